"""Compares predicted with measured latencies, model by model, and reports the predictor's errors.

Reads ONNX models (files or folders) and what training learned for the target. Measures the models here, either under the load
that inference/config.yaml describes, or under the backgrounds of a collector's config, which it starts itself (--under-load).
With --recorded it takes the measurements in the target's dataset instead. Prints one row per model, the errors, and the
warnings of predictions; writes evaluation/<target>/evaluation.csv, .json and .png (.svg without matplotlib), and with --html a
page to look at. Only evaluates; fits nothing.

With --manifest it evaluates the models of a list, each at its own sizes: models of every kind, as recipes/kinds/make_models.py
makes them. They are measured here, or were measured on a machine with a GPU (--measured), and then predicted at the pace of its
host. It also says how many predictions are marked as rough estimates, and how far off the others are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hase.benchmark.collecting.config import CollectorConfig
from hase.inference.evaluation.comparison import (
    Comparison,
    Evaluation,
    comparison_table,
    marks_in_words,
    models_by_warning,
    summary_table,
)
from hase.inference.evaluation.evaluate import PATIENCE_S, TIMEOUT_S, EvaluationLoads, MeasuringPlan, evaluate, evaluate_list
from hase.inference.evaluation.models import read_latencies, read_manifest
from hase.inference.evaluation.report import draw_scatter, evaluation_page, scatter
from hase.inference.live.load import CONFIG_FILE, InferenceConfig
from hase.inference.prediction.conditions import AS_USUAL, RunMode
from hase.utils import cli, files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.pages.charts import write_plot
from hase.utils.pages.rendering import write_page
from hase.utils.paths import ROOT, Workspace
from hase.utils.text import first_and_count
from hase.utils.timing import error_statistics

log = get_logger("evaluator")

MOST_LOGGED = 5  # warnings on the console, most frequent first
EXAMPLES = """
python evaluator.py model_zoo/models/
python evaluator.py resnet18.onnx --batch 1,4,16
python evaluator.py trees.onnx --inputs rows.npz  # needs your own
python evaluator.py --recorded --html page.html  # needs measured models in the target's dataset
python evaluator.py resnet18.onnx --batch 16 --under-load recipes/h200/beside.yaml --probe  # needs a GPU
python evaluator.py --manifest out/kinds/kinds.json --workspace out/kinds_cpu --measure-missing  # needs make_models.py
python evaluator.py --manifest out/kinds/kinds.json --on h200 --measured out/kinds_on_gpu/on_gpu.json  # needs a GPU
"""


def write_scatter(evaluation: Evaluation, folder: Path) -> str:
    """Draws predicted against measured latencies as a PNG, without matplotlib as an SVG; returns the file's name."""
    rows = evaluation.comparisons
    predicted, strict, measured = zip(*((row.predicted_ms, row.strict_ms, row.measured_ms) for row in rows), strict=True)
    title = (f"{evaluation.target}\n{len(rows)} {'latency' if len(rows) == 1 else 'latencies'}: mean error "
             f"{error_statistics(predicted, measured).mape:.1%}, all kernels predicted "
             f"{error_statistics(strict, measured).mape:.1%}")
    if find_spec("matplotlib") is None:
        write_plot([scatter(rows)], folder / "evaluation.svg", title)
        return "evaluation.svg"
    draw_scatter(rows, title, folder / "evaluation.png")
    return "evaluation.png"


def write_files(evaluation: Evaluation, folder: Path) -> list[str]:
    """Writes the CSV, the JSON and the plot of an evaluation; returns their names. Warnings are only in the JSON."""
    left_out = {"warnings"} if any(comparison.kind for comparison in evaluation.comparisons) else {"warnings", "kind"}
    columns = [name for name in Comparison.model_fields if name not in left_out]
    rows = [comparison.model_dump(include=set(columns)) for comparison in evaluation.comparisons]
    files.write_csv(folder / "evaluation.csv", columns, rows)
    files.write_json(folder / "evaluation.json", evaluation.model_dump(mode="json"))  # for people: without a digest
    return ["evaluation.csv", "evaluation.json", write_scatter(evaluation, folder)]


def option_parser() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL",
                        help="ONNX files or folders of them; bare names are also looked for in model_zoo")
    cli.add_dim(parser)
    cli.add_static(parser)
    cli.add_inputs(parser)
    cli.add_target(parser)
    parser.add_argument("--recorded", action="store_true",
                        help="compare with the measurements in the target's dataset (without MODEL: with all of them)")
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="evaluate the models of this list, each at its own sizes")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="with --manifest: these models alone")
    parser.add_argument("--measured", type=Path, metavar="FILE",
                        help="with --manifest: compare with these latencies, of recipes/kinds/compare_on_gpu.py, and measure "
                             "nothing")
    parser.add_argument("--measure-missing", action="store_true",
                        help="with --manifest: first measure the models' kernels that were never measured, into the dataset")
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
                        help=f"give up on a model if one of its sessions takes longer (default: {TIMEOUT_S:g})")
    parser.add_argument("--rounds", type=cli.count, default=3,
                        help="how often each model is measured, alternating with the others (default: 3)")
    parser.add_argument("--budget-s", type=cli.positive, default=1.0, help="seconds for each model and round (default: 1)")
    parser.add_argument("--force", action="store_true",
                        help="predict although element type or ONNX Runtime version are not the predictors'")
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses contradictory options."""
    if args.manifest:
        others = (args.models, args.dim, args.static, args.inputs, args.recorded, args.metrics, args.changes, args.under_load,
                  args.probe, args.config != CONFIG_FILE, args.io != AS_USUAL.io, args.cuda_graph)
        if any(others):
            parser.error("--manifest says which models, at which sizes; they are run as usual, on an idle device: only --only, "
                         "--measured or --measure-missing, --target and how long to measure go with it")
        if args.measured and args.measure_missing:
            parser.error("--measured: nothing is measured here; leave --measure-missing out")
    elif args.only or args.measured or args.measure_missing:
        parser.error("--only, --measured and --measure-missing go with --manifest FILE")
    if not 0 <= args.patience_s < math.inf:
        parser.error("--patience-s can't be negative")
    if not args.models and not args.recorded and not args.manifest:
        parser.error("name models (files or folders), or --recorded for all that the dataset holds")
    if args.recorded and (args.metrics or args.changes or args.config != CONFIG_FILE):
        parser.error("--recorded takes the load from the dataset: leave --metrics, --config and --set out")
    if args.inputs and (args.recorded or len(args.models) != 1 or args.models[0].is_dir()):
        parser.error("--inputs are those of one MODEL that is measured here")
    if args.recorded and (args.under_load or args.probe):
        parser.error("--recorded measures nothing: leave --under-load and --probe out")
    if args.under_load and args.metrics:
        parser.error("--under-load: one file of metrics can't describe several loads; leave --metrics out")


def evaluate_manifest(args: argparse.Namespace, workspace: Workspace, plan: MeasuringPlan) -> Evaluation:
    """Evaluates the models that --manifest lists."""
    models = read_manifest(args.manifest).chosen(args.only)
    if not models:
        raise UserError(f"{args.manifest}: no model with the name {' or '.join(args.only)}")
    folder = args.manifest if args.manifest.is_dir() else args.manifest.parent
    return evaluate_list(workspace, folder.resolve(), models, target=args.target,
                         latencies=read_latencies(args.measured) if args.measured else None,
                         measure_missing=args.measure_missing, plan=plan, force=args.force)


def log_outcome(evaluation: Evaluation, folder: Path, written: Sequence[str]) -> None:
    """Logs the predictions' warnings, the names of the files written to `folder`, and the models that failed."""
    warned = models_by_warning(evaluation.comparisons)
    for warning in list(warned)[:MOST_LOGGED]:
        log.warning("%s: %s", first_and_count(warned[warning]), warning)
    if len(warned) > MOST_LOGGED:
        log.warning("%d more warnings are in evaluation.json", len(warned) - MOST_LOGGED)
    log.info("load %s; written to %s: %s", evaluation.load, folder, ", ".join(written))
    if evaluation.failures:
        log.error("%d failed: %s", len(evaluation.failures), ", ".join(evaluation.failures))


def main() -> int:
    parser = option_parser()
    args = parser.parse_args()
    check_arguments(parser, args)
    workspace = cli.start(args)
    plan = MeasuringPlan(args.rounds, args.budget_s, args.patience_s, args.timeout_s, args.inputs)
    if args.manifest:
        evaluation = evaluate_manifest(args, workspace, plan)
    else:
        loads = EvaluationLoads(
            config=read_config(args.config, InferenceConfig, args.changes), metrics_file=args.metrics,
            under_load=read_config(args.under_load, CollectorConfig) if args.under_load else None, probe=args.probe)
        evaluation = evaluate(
            workspace, args.models, dims=cli.parse_dims(args.dim), target=args.target, recorded=args.recorded,
            run_mode=RunMode(io=args.io, cuda_graph=args.cuda_graph), loads=loads, plan=plan, force=args.force,
            static=args.static)
    folder = workspace.evaluation / evaluation.target
    with sole_writer(folder):
        written = write_files(evaluation, folder)
    if args.html:
        write_page(evaluation_page(evaluation), args.html)
    if args.json:
        cli.print_json(evaluation)
    else:
        cli.print_table(comparison_table(evaluation.comparisons), f"{evaluation.target}, {evaluation.way}, {evaluation.source}")
        print()
        cli.print_table(summary_table(evaluation.summaries), "errors")
        if args.manifest:
            print(marks_in_words(evaluation.marks))
    log_outcome(evaluation, folder, written)
    return 1 if evaluation.failures else 0


if __name__ == "__main__":
    cli.run(main)
