"""Compares a model on several GPUs: latency, throughput, memory, and what a million items cost.

A card is named as in records/gpus.yaml (or by a file with one's own). If it has predictors in the workspace or shipped with
Hase, they predict it; any other card is predicted from its data sheet (column `from`); `this` is this machine. Prices are a
YAML file of names and prices per hour, in any currency. Rows are sorted by cost, or by latency without prices; a card whose
memory is too small comes last. With --slo-ms, a column says how likely the latency meets it, by the prediction's interval.
Prints a table, draws latency against cost (without prices over the batch) with --plot, and makes a page of both with --html.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from typing import Annotated

from pydantic import Field, RootModel

from hase.inference.compare.devices import compare_on, ranked
from hase.inference.library.predictor import Predictor
from hase.inference.prediction.conditions import RunMode
from hase.inference.reporting.comparisons import device_chart, devices_page
from hase.ort_analysis.isolated.analysis import own_sizes
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.pages.charts import write_plot
from hase.utils.pages.rendering import write_page
from hase.utils.text import first_and_count, names_by_warning

log = get_logger("compare")
EXAMPLES = """
python inference/compare_devices.py --model resnet18.onnx --dim batch=1,8,32 --on h200,h100,a100,l4,l40s,rtx-4090
python inference/compare_devices.py --model resnet18.onnx --on h200,l4,t4 --slo-ms 10 --html page.html
python inference/compare_devices.py --model resnet18.onnx --on h100,l4 --slo-ms 10 --prices prices.yaml  # needs your prices
"""


class Prices(RootModel[dict[str, Annotated[float, Field(gt=0)]]]):
    """What an hour of each device costs, by its name."""


def names(text: str) -> list[str]:
    """Parses an option that lists devices by name."""
    listed = [name.strip() for name in text.split(",") if name.strip()]
    if not listed or len(set(listed)) < len(listed):
        raise argparse.ArgumentTypeError("the names of different devices are expected: --on h100,l4,this")
    return listed


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_model(parser)
    cli.add_dim(parser)
    cli.add_rebatch(parser)
    cli.add_static(parser)
    cli.add_no_weights(parser)
    parser.add_argument("--on", "--gpus", dest="devices", type=names, required=True, metavar="DEVICE,…",
                        help="h200, GPUs from their data sheets, e.g. l4 or rtx-4090, YAML files with one's own, trained "
                             "targets, or `this` machine")
    cli.add_dtype(parser)
    cli.add_run_mode(parser)
    parser.add_argument("--slo-ms", type=cli.positive, metavar="MS", help="how likely is a latency of at most this?")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML: prices per hour by the devices' names")
    parser.add_argument("--host-pace", type=cli.positive, metavar="RATIO",
                        help="how many times as long as usual the GPUs' host takes to dispatch")
    parser.add_argument("--plot", type=cli.plot_file, metavar="FILE", help="draw it: an .svg, .png or .pdf")
    cli.add_html(parser)
    cli.add_trust(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    prices = read_config(args.prices, Prices).root if args.prices else {}
    if args.prices and (missing := [name for name in args.devices if name not in prices]):
        raise UserError(f"{args.prices}: no price of {', '.join(missing)}; it has {', '.join(prices) or 'none'}")
    model = workspace.find_model(args.model)
    predictors = {name: Predictor(workspace, name, strict=args.strict, force=args.force, no_weights=args.no_weights)
                  for name in args.devices}
    sizes = own_sizes(model, cli.parse_dims(args.dim))
    by_type = [compare_on(predictors, model, sizes, prices, static=args.static, host_pace=args.host_pace, dtype=dtype,
                          run_mode=RunMode(io=args.io, cuda_graph=args.cuda_graph)) for dtype in args.dtype]
    comparison = ranked(by_type[0].model, [answer for comparison in by_type for answer in comparison.answers])
    warned = names_by_warning(comparison.warnings)
    for warning, concerned in warned.items():
        log.warning("%s: %s", first_and_count(concerned), warning)
    rows = comparison.rows(args.slo_ms)
    if args.plot:
        write_plot([device_chart(rows, args.slo_ms)], args.plot, f"{model.stem}\ndashed: from the data sheet, never measured")
    if args.html:
        write_page(devices_page(model, rows, {name: predictor.fitted for name, predictor in predictors.items()}, warned,
                                args.slo_ms), args.html)
    if args.json:
        cli.print_json(comparison)
    else:
        cli.print_table(rows, f"{model.stem} on {len(predictors)} devices")
    return 0


if __name__ == "__main__":
    cli.run(main)
