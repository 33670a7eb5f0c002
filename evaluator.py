"""Compares predicted with measured latencies, model by model, and reports the predictor's errors.

Reads ONNX models (files or folders) and what training learned for the target. Measures the models here, either under the load
that inference/config.yaml describes, or under the backgrounds of a collector's config, which it starts itself (--under-load).
With --recorded it takes the measurements in the target's dataset instead. Prints one row per model, the errors, and the
warnings of predictions; writes evaluation/<target>/evaluation.csv, .json and .png (.svg without matplotlib), and with --html a
page to look at. Only evaluates; fits nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hase.benchmark.collecting.config import CollectorConfig
from hase.inference.core.run_modes import RunMode
from hase.inference.evaluation.comparison import Comparison, Evaluation, summary_table, table, warned_of
from hase.inference.evaluation.evaluate import PATIENCE_S, TIMEOUT_S, EvaluationLoads, MeasuringPlan, evaluate
from hase.inference.evaluation.plot import Point
from hase.inference.evaluation.plot import draw as draw_points
from hase.inference.live.load import CONFIG_FILE, InferenceConfig
from hase.inference.reporting.evaluations import called, evaluation_page, interval_of, scatter
from hase.utils import cli, files
from hase.utils.config import read_config
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.pages.plot_files import write_plot
from hase.utils.pages.rendering import write_page
from hase.utils.paths import ROOT
from hase.utils.timing import error_statistics

log = get_logger("evaluator")

TOLD_WARNINGS = 5  # on the console; the most frequent ones first
EXAMPLES = """
python evaluator.py model_zoo/models/
python evaluator.py resnet18.onnx --dim batch=1,4,16
python evaluator.py trees.onnx --inputs rows.npz  # needs your own
python evaluator.py --recorded --html page.html  # needs measured models in the target's dataset
python evaluator.py resnet18.onnx --dim batch=16 --under-load recipes/h200/live.yaml --probe  # needs a GPU
"""


def draw(evaluation: Evaluation, folder: Path) -> Path:
    """Draws the plot of an evaluation, as a PNG; as an SVG where matplotlib is not installed. Returns its path."""
    points = [Point(called(c), c.measured_ms, c.predicted_ms, c.held_out, interval_of(c)) for c in evaluation.comparisons]
    predicted, strict, measured = zip(*((c.predicted_ms, c.strict_ms, c.measured_ms) for c in evaluation.comparisons),
                                      strict=True)
    title = (f"{evaluation.target}\n{len(points)} {'latency' if len(points) == 1 else 'latencies'}: mean error "
             f"{error_statistics(predicted, measured).mape:.1%}, all kernels predicted "
             f"{error_statistics(strict, measured).mape:.1%}")
    if find_spec("matplotlib") is None:
        path = folder / "evaluation.svg"
        write_plot([scatter(evaluation.comparisons)], path, title)
    else:
        path = folder / "evaluation.png"
        draw_points(points, title, path)
    return path


def write(evaluation: Evaluation, folder: Path) -> list[str]:
    """Writes the CSV, the JSON and the plot of an evaluation; returns their names. Warnings, which are sentences, are only in
    the JSON."""
    columns = [name for name in Comparison.model_fields if name != "warnings"]
    rows = [comparison.model_dump(include=set(columns)) for comparison in evaluation.comparisons]
    files.write_csv(folder / "evaluation.csv", columns, rows)
    files.write_json(folder / "evaluation.json", evaluation.model_dump(mode="json"))  # for people: without a digest
    return ["evaluation.csv", "evaluation.json", draw(evaluation, folder).name]


def command_line() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL",
                        help="ONNX files or folders of them; bare names are also looked for in model_zoo")
    cli.add_dim(parser)
    cli.add_static(parser)
    cli.add_inputs(parser)
    parser.add_argument("--target", help="whose predictors (default: this machine, or the only target with predictors)")
    parser.add_argument("--recorded", action="store_true",
                        help="compare with the measurements in the target's dataset (without MODEL: with all of them)")
    cli.add_html(parser)
    cli.add_run_mode(parser)
    cli.add_load(parser, CONFIG_FILE)
    parser.add_argument("--under-load", type=Path, nargs="?", const=ROOT / "benchmark" / "config.yaml", metavar="CONFIG",
                        help="measure at the levels and under the backgrounds of a collector's config (default: "
                             "benchmark/config.yaml), which are started here; of its other keys only settle_s, source, metrics "
                             "and window_s are used")
    parser.add_argument("--probe", action="store_true",
                        help="learn what else runs from the sharing probe, which runs on this GPU just before")
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, metavar="S",
                        help="how long to wait, before each measurement, for the machine to be as fast as when its dataset "
                             f"was measured (default: {PATIENCE_S:g})")
    parser.add_argument("--timeout-s", type=cli.positive, default=TIMEOUT_S, metavar="S",
                        help="give up on a model if one of its sessions takes longer (default: "
                             f"{TIMEOUT_S:g})")
    parser.add_argument("--rounds", type=cli.count, default=3,
                        help="how often each model is measured, alternating with the others (default: 3)")
    parser.add_argument("--budget-s", type=cli.positive, default=1.0, help="seconds for each model and round (default: 1)")
    parser.add_argument("--force", action="store_true",
                        help="predict although element type or ONNX Runtime version are not the predictors'")
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses options that contradict each other."""
    if not 0 <= args.patience_s < math.inf:
        parser.error("--patience-s can't be negative")
    if not args.models and not args.recorded:
        parser.error("name models (files or folders), or --recorded for all that the dataset holds")
    if args.recorded and (args.metrics or args.changes or args.config != CONFIG_FILE):
        parser.error("--recorded takes the load from the dataset: leave --metrics, --config and --set out")
    if args.inputs and (args.recorded or len(args.models) != 1 or args.models[0].is_dir()):
        parser.error("--inputs are those of one MODEL that is measured here")
    if args.recorded and (args.under_load or args.probe):
        parser.error("--recorded measures nothing: leave --under-load and --probe out")
    if args.under_load and args.metrics:
        parser.error("--under-load: one file of metrics can't describe several loads; leave --metrics out")


def report(evaluation: Evaluation, folder: Path, written: Sequence[str]) -> None:
    """Logs what predictions warn of, the files that were written to `folder`, and the models that failed."""
    warned = warned_of(evaluation.comparisons)
    for warning in list(warned)[:TOLD_WARNINGS]:
        log.warning("%s: %s", cli.first_of(warned[warning]), warning)
    if len(warned) > TOLD_WARNINGS:
        log.warning("%d more warnings are in evaluation.json", len(warned) - TOLD_WARNINGS)
    log.info("load %s; written to %s: %s", evaluation.load, folder, ", ".join(written))
    if evaluation.failures:
        log.error("%d failed: %s", len(evaluation.failures), ", ".join(evaluation.failures))


def main() -> int:
    parser = command_line()
    args = parser.parse_args()
    check_arguments(parser, args)
    workspace = cli.start(args)
    loads = EvaluationLoads(config=read_config(args.config, InferenceConfig, args.changes), metrics_file=args.metrics,
                      under_load=read_config(args.under_load, CollectorConfig) if args.under_load else None, probe=args.probe)
    evaluation = evaluate(
        workspace, args.models, dims=cli.parse_dims(args.dim), target=args.target, recorded=args.recorded,
        run_mode=RunMode(io=args.io, cuda_graph=args.cuda_graph), loads=loads,
        plan=MeasuringPlan(args.rounds, args.budget_s, args.patience_s, args.timeout_s, args.inputs), force=args.force,
        static=args.static)
    folder = workspace.evaluation / evaluation.target
    with sole_writer(folder):
        written = write(evaluation, folder)
    if args.html:
        write_page(evaluation_page(evaluation), args.html)
    if args.json:
        cli.print_json(evaluation)
    else:
        cli.print_table(table(evaluation.comparisons), f"{evaluation.target}, {evaluation.way}, {evaluation.source}")
        print()
        cli.print_table(summary_table(evaluation.summaries), "errors")
    report(evaluation, folder, written)
    return 1 if evaluation.failures else 0


if __name__ == "__main__":
    cli.run(main)
