"""Predicts the latency of two models that share a GPU, each running in a loop in its own process.

Reads both models and what training learned for the target, above all how its GPU is shared. In time slices, each model waits
for the other's turns, which follow from the other's predicted run: a turn lasts until all dispatched work is done, or as long
as a process may keep the GPU. Through MPS (--sharing), kernels of both models run at the same time where there is room. Prints
a row per model for each chosen way of sharing; --plot draws the latencies over the first model's share of the threads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.inference.library.predictor import Predictor
from hase.inference.reporting.comparisons import share_chart
from hase.utils import cli
from hase.utils.logger import get_logger, progress
from hase.utils.pages.charts import write_plot
from hase.utils.sharing_mode import ALL_THREADS, SetSharing

EXAMPLES = """
python inference/pair_latency.py --model resnet18.onnx --beside-model resnet18.onnx --on h200
python inference/pair_latency.py --model resnet18.onnx --beside-model resnet18.onnx --beside-dim batch=16 --on h200
python inference/pair_latency.py --model resnet18.onnx --beside-model resnet18.onnx --on h200 --sharing mps:50
python inference/pair_latency.py --model resnet18.onnx --beside-model resnet18.onnx --on h200 --sharing all --plot a.svg
"""
ALL = "all"
STEP = 10  # per cent of the threads
ALL_WAYS = (SetSharing(), SetSharing(True), *(
    SetSharing(True, (share, ALL_THREADS - share)) for share in range(STEP, ALL_THREADS, STEP)))

log = get_logger("pair_latency")


def parse_sharing(text: str) -> tuple[SetSharing, ...]:
    """Parses one or several ways of sharing a GPU, separated by commas."""
    try:
        return ALL_WAYS if text == ALL else tuple(SetSharing.parse(way) for way in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_model(parser)
    cli.add_dim(parser)
    cli.add_static(parser)
    parser.add_argument("--beside-model", type=Path, required=True, metavar="MODEL", help="the other model")
    parser.add_argument("--beside-dim", action="append", default=[], metavar="NAME=SIZE", help="size of its dynamic dimension")
    cli.add_target(parser)
    parser.add_argument("--sharing", type=parse_sharing, default=(None,), metavar="WAY[,WAY…]",
                        help="slices, mps, or mps with the share of the threads that each may use, in per cent: mps:50, "
                             f"mps:25/75; {ALL}: {len(ALL_WAYS)} ways, with shares from 10/90 to 90/10 (default: as this "
                             "machine's GPU is shared now; slices for another GPU)")
    parser.add_argument("--plot", type=cli.plot_file, metavar="FILE",
                        help="draw the latencies over the first model's share of the threads: an .svg, .png or .pdf")
    cli.add_trust(parser)
    args = parser.parse_args()
    if args.plot and len({way.percents for way in args.sharing if way and way.mps and len(way.percents) > 1}) < 2:
        parser.error("--plot draws over the share of the threads: give at least two ways with a share for each model, such as "
                     f"--sharing {ALL}")
    workspace = cli.start(args)
    predictor = Predictor(workspace, args.target, strict=args.strict, force=args.force, any_device=True)
    both = predictor.run(args.model, dims=cli.one_size_dims(args.dim), static=args.static), predictor.run(
        args.beside_model, dims=cli.one_size_dims(args.beside_dim), static=args.static)
    pairs = [predictor.pair(*both, sharing=sharing) for sharing in progress(args.sharing, "ways of sharing")]
    for warning in dict.fromkeys(warning for pair in pairs for warning in pair.warnings):
        log.warning("%s", warning)
    if args.plot:
        write_plot([share_chart(pairs)], args.plot, f"side by side on {pairs[0].target}")
    if args.json:
        cli.print_json(pairs[0] if len(pairs) == 1 else [pair.model_dump(mode="json") for pair in pairs])
        return 0
    cli.print_table([
        {**({"sharing": pair.sharing} if len(pairs) > 1 else {}), "model": model.model, "beside": neighbour.model,
         "alone (ms)": model.idle_ms, **model.under_load.columns(),
         "mean 90 % between (ms)": "{:.4g} and {:.4g}".format(*model.mean_interval_ms),
         "mean / alone": model.under_load.mean_ms / model.idle_ms,
         **({"rough estimate": "yes"} if model.rough_estimate else {})}
        for pair in pairs for model, neighbour in (pair.models, pair.models[::-1])],
        f"side by side on {pairs[0].target}" + (f", {pairs[0].sharing}" if len(pairs) == 1 else ""))
    return 0


if __name__ == "__main__":
    cli.run(main)
