"""Finds the sizes of a model's tensors that depend on data, by running it once on this machine's CPU.

The sizes of a detector's tensors depend on what is in the image, which no analysis can know. This script runs the model once,
with the inputs that Hase uses for measuring or with real ones (--inputs), and prints the sizes as `--dim` options. With these
options, a prediction and a measurement are of the same work. Reads the ONNX file; writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import shlex

from hase.benchmark.ort.runner import read_inputs
from hase.benchmark.ort.sizes_of_a_run import sizes_of_a_run
from hase.utils import cli
from hase.utils.logger import get_logger

log = get_logger("sizes")
EXAMPLES = """
python benchmark/sizes_of_a_run.py --model resnet18.onnx
python benchmark/sizes_of_a_run.py --model detector.onnx --dim batch=1 --inputs image.npz  # needs your own
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, required=True, help="an ONNX file; a bare name is also looked for in model_zoo")
    cli.add_inputs(parser)
    cli.add_dim(parser)
    cli.add_static(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    sizes = sizes_of_a_run(workspace.find_model(args.model), cli.one_size_dims(args.dim),
                           read_inputs(args.inputs) if args.inputs else None, args.static)
    if not sizes:
        log.info("no size of %s depends on data", args.model)
    if args.json:
        cli.print_json(sizes)
    else:
        print(" ".join(f"--dim {shlex.quote(f'{name}={size}')}" for name, size in sizes.items()))
    return 0


if __name__ == "__main__":
    cli.run(main)
