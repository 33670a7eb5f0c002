"""Compares a model on several GPUs: latency, throughput, memory, and what a million items cost.

A card is named as in records/gpus.yaml (or by a file with one's own). If it has predictors in the workspace or shipped with
Hase, they predict it; any other card is predicted from its data sheet (column `from`); `this` is this machine. Prices are a
YAML file of names and prices per hour, in any currency. Rows are sorted by cost, or by latency without prices; a card whose
memory is too small comes last. With --slo-ms, a column says how likely the latency meets it, by the prediction's interval.
Prints a table, draws latency against cost with --plot, and makes a page of both with --html.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, RootModel

from hase.inference.library.predictor import Predictor
from hase.inference.prediction.answers import Prediction, chance_within
from hase.inference.prediction.energy import EnergyPrediction
from hase.inference.prediction.targets import CardPredictors
from hase.inference.reporting.comparisons import device_chart, devices_page
from hase.ort_analysis.isolated.analysis import own_sizes
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.logger import get_logger, progress
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


def source_of(predictor: Predictor) -> str:
    """The origin of the predictions for a device."""
    predictors = predictor.fitted.predictors
    if not isinstance(predictors, CardPredictors):
        return "measured card"
    return "corrected data sheet" if predictors.seen_ms else "data sheet"


def row(name: str, prediction: Prediction, energy: EnergyPrediction | None, source: str, price: float | None,
        limit_ms: float | None) -> dict[str, Any]:
    """A device at a size, as a table row."""
    low_ms, high_ms = prediction.interval_ms
    rate, fits = prediction.items_per_second, prediction.fits_memory
    cost = None if price is None or not rate else price / 3600 * 1e6 / rate
    return {"device": name, "batch": prediction.batch, "latency (ms)": prediction.latency_ms, "low (ms)": low_ms,
            "high (ms)": high_ms, "items/s": rate,
            "J/item": energy.energy_per_item_j if energy else None, "peak memory (MiB)": prediction.peak_memory_mib,
            "fits": "not known" if fits is None else "yes" if fits else "no",
            **({"a million items": cost} if price is not None else {}),
            **({f"chance of {limit_ms:g} ms": f"{chance_within(prediction.latency_ms, prediction.interval_ms, limit_ms):.0%}"}
               if limit_ms else {}),
            "from": source, "rough estimate": "yes" if prediction.rough_estimate else "no"}


def compare(predictors: Mapping[str, Predictor], model: Path, sizes: Sequence[Mapping[str, int]], prices: Mapping[str, float],
            limit_ms: float | None, host_pace: float | None) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """The rows of all devices and sizes, and the devices that each warning concerns.

    Sorted by cost, or else by latency; devices whose memory is too small come last.
    """
    rows, warnings = [], list[tuple[str, tuple[str, ...]]]()
    for name, predictor in progress(list(predictors.items()), "devices"):
        try:
            _ = predictor.learned_energy  # raises an error without one
            energy_known = True
        except UserError as error:
            log.warning("%s: no energy: %s", name, error)
            energy_known = False
        for dims in sizes:
            pace = host_pace if predictor.fitted.target.flavour.device == "cuda" else None
            run = predictor.run(model, dims=dims, host_pace=pace)
            energy = predictor.energy(run) if energy_known else None
            warnings.append((name, (*run.prediction.warnings, *(energy.warnings if energy else ()))))
            rows.append(row(name, run.prediction, energy, source_of(predictor), prices.get(name), limit_ms))
    warned = names_by_warning(warnings)
    for warning, concerned in warned.items():
        log.warning("%s: %s", first_and_count(concerned), warning)
    return sorted(rows, key=lambda line: (
        line["fits"] == "no", line.get("a million items") or math.inf, line["latency (ms)"])), warned


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
    parser.add_argument("--on", "--gpus", dest="devices", type=names, required=True, metavar="DEVICE,…",
                        help="h200, GPUs from their data sheets, e.g. l4 or rtx-4090, YAML files with one's own, trained "
                             "targets, or `this` machine")
    parser.add_argument("--slo-ms", type=cli.positive, metavar="MS", help="how likely is a latency of at most this?")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML: prices per hour by the devices' names")
    parser.add_argument("--host-pace", type=cli.positive, metavar="RATIO",
                        help="how many times as long as usual the GPUs' host takes to dispatch")
    parser.add_argument("--plot", type=cli.plot_file, metavar="FILE", help="draw it: an .svg, .png or .pdf")
    cli.add_html(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    prices = read_config(args.prices, Prices).root if args.prices else {}
    if args.prices and (missing := [name for name in args.devices if name not in prices]):
        raise UserError(f"{args.prices}: no price of {', '.join(missing)}; it has {', '.join(prices) or 'none'}")
    model = workspace.find_model(args.model)
    predictors = {name: Predictor(workspace, name) for name in args.devices}
    rows, warned = compare(predictors, model, own_sizes(model, cli.parse_dims(args.dim)), prices, args.slo_ms, args.host_pace)
    if args.plot:
        write_plot([device_chart(rows, args.slo_ms)], args.plot, f"{model.stem}\ndashed: from the data sheet, never measured")
    if args.html:
        write_page(devices_page(model, rows, {name: predictor.fitted for name, predictor in predictors.items()}, warned,
                                args.slo_ms), args.html)
    cli.print_rows(rows, args.json, f"{model.stem} on {len(predictors)} devices")
    return 0


if __name__ == "__main__":
    cli.run(main)
