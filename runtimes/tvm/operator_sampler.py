"""Kernels of TVM from operators of drawn sizes, so that predictors learn how time follows size.

Reads the bounds of sizes (runtimes/tvm/operator_sizes.yaml). Draws small ONNX models of one operator and what is usually fused
to it, and takes them apart as any model (runtimes/tvm/relax_parser.py). Writes the functions of their kernels to
kernel_model/kernel_onnx/<flavour>/, and to sampled.json there that no model holds them. Needs TVM.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hase.kernel_model.sampling.seeds import SEED_FILE, Seeds, read_seeds
from hase.records.kernel_record import Kernel
from hase.records.kernel_record_files import update_index
from hase.runtimes.tvm.drawn import DRAWS, OperatorSizes
from hase.runtimes.tvm.functions import write_functions
from hase.runtimes.tvm.package import FUSED, tvm_flavour
from hase.runtimes.tvm.recording import parse
from hase.utils import cli, files
from hase.utils.config import read_config
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import ROOT, Workspace

log = get_logger("sampler")
EXAMPLES = """
python runtimes/tvm/operator_sampler.py --count 500
python runtimes/tvm/operator_sampler.py --count 200 --operators convolution,product --seed 7
"""


def too_large(kernel: Kernel, sizes: OperatorSizes) -> bool:
    """Whether a kernel has more operations or bytes than the config allows."""
    return (kernel.flops > 1e9 * sizes.most_gflop or
            kernel.bytes_read + kernel.bytes_written > sizes.most_mib * 2**20)


def sample(workspace: Workspace, sizes: OperatorSizes, count: int, operators: Sequence[str], seed: int,
           device: str = "cpu") -> Counter[str]:
    """Draws `count` models, and writes the kernels that are small enough; returns how many are new of each type, and how many
    were too large.

    Raises:
        UserError: TVM is not installed.
    """
    flavour = tvm_flavour(device, FUSED)
    folder, numbers, counts = workspace.kernel_onnx / flavour.name, np.random.default_rng(seed), Counter[str]()
    seeds: Seeds = read_seeds(folder)
    for number in cli.progress(range(count), "drawing operators"):
        drawn = DRAWS[operators[number % len(operators)]](sizes, numbers)
        graph = parse(drawn, name="drawn", device=device)[FUSED].graph
        for name, kernel in graph.kernels.items():
            if name not in graph.functions or name in seeds:
                continue
            if too_large(kernel, sizes):
                counts["(too large)"] += 1
                continue
            write_functions(workspace, flavour, graph.kernels, {name: graph.functions[name]})
            seeds[name] = ()
            counts[kernel.type] += 1
    files.write_json(folder / SEED_FILE, seeds)
    update_index(workspace, flavour)
    return counts


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--count", type=cli.count, default=500, metavar="N", help="models to draw (default: 500)")
    parser.add_argument("--operators", type=lambda text: text.split(","), default=list(DRAWS), metavar="NAMES",
                        help=f"of {', '.join(DRAWS)} (default: all, in turns)")
    cli.add_config(parser, ROOT / "runtimes" / "tvm" / "operator_sizes.yaml", "most_gflop=20", "bounds of sizes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels (default: cpu)")
    parser.add_argument("--seed", type=cli.whole, default=0, metavar="N", help="of the draws (default: 0)")
    args = parser.parse_args()
    if unknown := sorted(set(args.operators) - set(DRAWS)):
        parser.error(f"--operators: {', '.join(unknown)}: choose from {', '.join(DRAWS)}")
    workspace = cli.start(args)
    with sole_writer(workspace.kernel_records):
        counts = sample(workspace, read_config(args.config, OperatorSizes, args.changes), args.count, args.operators,
                        args.seed, args.device)
    cli.print_rows([{"type": kind, "kernels": number} for kind, number in counts.most_common()], args.json, "kernels drawn")


if __name__ == "__main__":
    cli.run(main, kept="the kernels that were written")
