"""Two models on one GPU: the latency of each while the other runs in a loop, in a process of its own.

Reads both models and what training learned for the target, above all how its GPU is shared. In time slices each model waits
for the other's turns, which follow from the other's predicted run: it has the GPU until all that it dispatched is done, or for
the longest turn that a process may have. Through MPS (--sharing) kernels of both run at the same time where there is room.
Prints one row per model; writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from inference.core.predictor import Predictor
from utils import cli
from utils.logger import get_logger
from utils.sharing_mode import SetSharing

EXAMPLES = """
python inference/pair_latency.py --model resnet18.onnx --beside-model resnet18.onnx --target nvidia-h200
python inference/pair_latency.py --model resnet18.onnx --beside-model resnet18.onnx --beside-dim batch=16 --target nvidia-h200
python inference/pair_latency.py --model resnet18.onnx --beside-model resnet18.onnx --target nvidia-h200 --sharing mps:50
"""

log = get_logger("pair_latency")


def set_sharing(text: str) -> SetSharing:
    """An option that is a way of sharing a GPU."""
    try:
        return SetSharing.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_model(parser)
    cli.add_dim(parser)
    cli.add_static(parser)
    parser.add_argument("--beside-model", type=Path, required=True, metavar="MODEL", help="the other model, likewise")
    parser.add_argument("--beside-dim", action="append", default=[], metavar="NAME=SIZE", help="size of its dynamic dimension")
    cli.add_target(parser)
    parser.add_argument("--sharing", type=set_sharing, default=SetSharing(), metavar="WAY", help="slices (default), mps, or "
                        "mps with the share of the threads that each may use, in per cent: mps:50, mps:25/75")
    cli.add_trust(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    predictor = Predictor(workspace, args.target, strict=args.strict, force=args.force, any_device=True)
    pair = predictor.pair(args.model, args.beside_model, dims=cli.one_size_dims(args.dim),
                          second_dims=cli.one_size_dims(args.beside_dim), static=args.static, sharing=args.sharing)
    for warning in pair.warnings:
        log.warning("%s", warning)
    if args.json:
        cli.print_json(pair)
        return 0
    cli.print_table([
        {"model": model.model, "beside": neighbour.model, "alone (ms)": model.idle_ms, **model.under_load.columns(),
         "mean / alone": model.under_load.mean_ms / model.idle_ms,
         **({"rough estimate": "yes"} if model.rough_estimate else {})}
        for model, neighbour in (pair.models, pair.models[::-1])],
        f"side by side on {pair.target}" + (f", {pair.sharing}" if args.sharing.mps else ""))
    return 0


if __name__ == "__main__":
    cli.run(main)
