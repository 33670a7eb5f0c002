"""Phase 7.2: predicted against measured latency, model by model, and how far off the predictor is.

Reads ONNX models (files or folders) and what training learned for the target. Measures the models here, under the load that
inference/config.yaml tells of, or beside the backgrounds of a collector's config, which it starts itself (--under-load); or,
with --recorded, takes the measurements that the target's dataset holds. Prints a row a model and the errors, what predictions
warn of, and writes evaluation/<target>/evaluation.csv, .json and .png. Scores; fits nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.evaluation_cases import Case, Failures, cases_of, predict_case, recorded_cases
from inference.evaluation_here import PATIENCE_S, TIMEOUT_S, LoadsHere, MeasuredHere, MeasuringPlan, measure_all
from inference.evaluation_plot import Point
from inference.evaluation_plot import draw as draw_points
from inference.sharing import ToldBy
from ort_analysis.records import Frozen, ModelRecord, family
from utils import cli, files
from utils.errors import UserError
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import ROOT, Workspace
from utils.timing import ErrorStatistics, error_statistics, summarize

if TYPE_CHECKING:
    from inference.prediction import WayOfRunning
    from inference.targets import Fitted

log = get_logger("evaluator")

EVALUATION_VERSION = 1
TOLD_WARNINGS = 5  # on the console, those of most models first
EXAMPLES = """
python evaluator.py models/
python evaluator.py resnet18.onnx --dim batch=1,4,16 --io host
python evaluator.py resnet50.onnx --dim batch=16 --under-load gpu_dataset/live.yaml --probe
python evaluator.py --recorded --target nvidia-h200-cuda-ort1.31-all
"""


class Comparison(Frozen):
    """One model's predicted and measured latency.

    Attributes:
        model: the record's name, with the sizes of dynamic dimensions.
        level: share of time that the stressor was busy meanwhile; 0 is idle.
        background: what the stressor was busy with, by its name in the dataset or config; "" is idle.
        load: the metrics that the prediction was told, by DCGM field name.
        told_by: what the prediction learned of other work from; None where it is of an idle device, or has no distribution.
        held_out: its family is in no fit.
        background_held_out: rows beside this background are in no fit.
        predicted_ms, strict_ms: with measured kernels looked up, and with every kernel predicted.
        measured_ms: what is compared with: the median of the samples, under load their mean.
        error, strict_error: predicted / measured − 1, ratios.
        spread: interquartile range over the median of the samples, a ratio.
        p50_error, p95_error: of these percentiles, likewise; None where the prediction has no distribution.
        runs: number of samples.
        measured_share: part of predicted_ms's kernel time that was looked up, a ratio.
        rough_estimate: whether the prediction with look-up is one.
        interval_low_ms, interval_high_ms: of the prediction with look-up.
        host_pace: how many times as long as usual a GPU's host took to dispatch, measured beside the model and predicted for;
            None where it was not measured.
        canary: how long the canary took before its measurements over its best in the dataset, a ratio: 1 is steady.
        predicted_memory_mib, measured_memory_mib: what a run holds; measured is what opening and running took.
        warnings: what the prediction with look-up says should be known about it.
    """

    model: str
    batch: int | None
    level: float
    background: str = ""
    load: dict[str, float] = {}
    told_by: ToldBy | None = None
    held_out: bool
    background_held_out: bool = False
    predicted_ms: float
    strict_ms: float
    measured_ms: float
    median_ms: float
    mean_ms: float
    error: float
    strict_error: float
    p50_error: float | None = None
    p95_error: float | None = None
    spread: float
    runs: int
    measured_share: float
    estimated_share: float
    rough_estimate: bool = False
    interval_low_ms: float | None = None
    interval_high_ms: float | None = None
    host_pace: float | None = None
    canary: float | None
    predicted_memory_mib: float
    measured_memory_mib: float | None = None
    warnings: tuple[str, ...] = ()


class Summary(Frozen):
    """Errors of a group of comparisons, with look-up and strict; mean absolute ones of percentiles (ratios), where all of them
    have distributions."""

    group: str
    level: float
    background: str = ""
    background_held_out: bool = False
    lookup: ErrorStatistics
    strict: ErrorStatistics
    p50: float | None = None
    p95: float | None = None


class Evaluation(Frozen):
    """What the evaluator writes and `--json` prints. Version 1 is the first.

    Attributes:
        source: `measured` here and now, or `recorded` in the dataset.
        way: how the models were run, in words.
        load: what the predictions were told: metrics, or in words `idle` or `as the probe met it`; `recorded` or `by level`
            where each level has its own.
        failures: models that could not be evaluated, and why.
        warnings: what to know about the load.
    """

    version: int = EVALUATION_VERSION
    target: str
    composition: dict[str, Any]
    source: str
    way: str
    load: str | dict[str, float]
    comparisons: tuple[Comparison, ...]
    summaries: tuple[Summary, ...]
    failures: dict[str, str]
    warnings: tuple[str, ...] = ()


def name_missing(records: Mapping[str, ModelRecord], found: set[str], folder: Path, failures: Failures) -> None:
    """Names the models that a record tells of and the dataset in `folder` does not."""
    for name in sorted(set(records) - found):
        failures.add(name, UserError(f"{name}: {folder} holds no good measurement of it; measure it with: "
                                     "python benchmark/collector.py"))


def compare(case: Case, held_out: Sequence[str], held_out_backgrounds: Sequence[str] = ()) -> Comparison | None:
    """A case's predictions beside its samples; None where either is missing."""
    if case.failed or case.with_lookup is None or case.strict is None or not case.samples_ms:
        return None
    statistics = summarize(case.samples_ms)
    predicted_ms, strict_ms = case.with_lookup.latency_ms, case.strict.latency_ms
    measured_ms = statistics.median_ms if case.idle else statistics.mean_ms
    shared = case.with_lookup.under_load
    p50_error, p95_error = (shared.percentile_ms(percent) / found - 1 if shared else None for percent, found in (
        (50, statistics.median_ms), (95, statistics.p95_ms)))
    return Comparison(
        model=case.record.model, batch=case.record.batch, level=case.level, background=case.background, load=dict(case.load),
        told_by=shared.told_by if shared else None,
        held_out=family(case.record.model) in held_out, background_held_out=case.background in held_out_backgrounds,
        predicted_ms=predicted_ms, strict_ms=strict_ms, measured_ms=measured_ms, median_ms=statistics.median_ms,
        mean_ms=statistics.mean_ms, error=predicted_ms / measured_ms - 1, strict_error=strict_ms / measured_ms - 1,
        p50_error=p50_error, p95_error=p95_error,
        spread=statistics.spread, runs=statistics.runs, measured_share=case.with_lookup.time_share["measured"],
        estimated_share=case.with_lookup.time_share["estimated"], rough_estimate=case.with_lookup.rough_estimate,
        interval_low_ms=case.with_lookup.interval_ms[0], interval_high_ms=case.with_lookup.interval_ms[1],
        host_pace=case.with_lookup.host_pace if case.probes_us else None,
        canary=sum(case.canaries) / len(case.canaries) if case.canaries else None,
        predicted_memory_mib=case.with_lookup.peak_memory_mib, measured_memory_mib=case.memory_mib,
        warnings=case.with_lookup.warnings,
    )


def summarise(comparisons: Sequence[Comparison]) -> tuple[Summary, ...]:
    """Errors by level and background: of all models, and of the held-out ones and the others apart where there are both."""
    groups: dict[tuple[tuple[float, str], str], list[Comparison]] = defaultdict(list)
    for one in comparisons:
        load = one.level, one.background
        groups[load, "all models"].append(one)
        groups[load, "held out" if one.held_out else "not held out"].append(one)
    return tuple(
        Summary(group=group, level=load[0], background=load[1], background_held_out=members[0].background_held_out,
                lookup=error_statistics([c.predicted_ms for c in members], [c.measured_ms for c in members]),
                strict=error_statistics([c.strict_ms for c in members], [c.measured_ms for c in members]),
                p50=_mean_size([c.p50_error for c in members]), p95=_mean_size([c.p95_error for c in members]))
        for (load, group), members in groups.items()
        if group == "all models" or len(members) < len(groups[load, "all models"]))


def _mean_size(errors: Sequence[float | None]) -> float | None:
    """The mean of their absolute values; None where one is missing."""
    known = [abs(error) for error in errors if error is not None]
    return sum(known) / len(known) if len(known) == len(errors) else None


def held_out_of_fits(workspace: Workspace, target: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Families and backgrounds that the target's dataset keeps out of every fit; none where there is no dataset."""
    from benchmark.dataset import header_path, load_header

    folder = workspace.dataset(target)
    if not header_path(folder).exists():
        return (), ()
    header = load_header(folder)
    return header.held_out, header.held_out_backgrounds


def draw(evaluation: Evaluation, path: Path) -> None:
    """The evaluation's picture."""
    points = [Point(c.model + (f" ({' '.join(filter(None, (f'load {c.level:g}', c.background)))})" if c.level else ""),
                    c.measured_ms, c.predicted_ms, c.held_out) for c in evaluation.comparisons]
    predicted, strict, measured = zip(*((c.predicted_ms, c.strict_ms, c.measured_ms) for c in evaluation.comparisons),
                                      strict=True)
    draw_points(points, f"{evaluation.target}\n{len(points)} {'latency' if len(points) == 1 else 'latencies'}: mean error "
                        f"{error_statistics(predicted, measured).mape:.1%}, all kernels predicted "
                        f"{error_statistics(strict, measured).mape:.1%}", path)


def write(evaluation: Evaluation, folder: Path) -> None:
    """The CSV, the JSON and the plot of an evaluation; warnings, which are sentences, stand in the JSON alone."""
    columns = [name for name in Comparison.model_fields if name != "warnings"]
    rows = [one.model_dump(include=set(columns)) for one in evaluation.comparisons]
    files.write_csv(folder / "evaluation.csv", columns, rows)
    files.write_json(folder / "evaluation.json", evaluation.model_dump(mode="json"))  # for people: without a digest
    draw(evaluation, folder / "evaluation.png")


def percent(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %"


def percentile_columns(one: Comparison, others: Sequence[Comparison]) -> dict[str, Any]:
    """Errors of percentiles, where any of `others` has them."""
    if all(other.p50_error is None for other in others):
        return {}
    return {name: None if error is None else percent(error)
            for name, error in (("p50 error", one.p50_error), ("p95 error", one.p95_error))}


def load_columns(one: Comparison | Summary, others: Sequence[Comparison | Summary]) -> dict[str, Any]:
    """The columns that tell what else ran, where any of `others` was measured under load."""
    if not any(other.level for other in others):
        return {}
    background = {"background": one.background + (" (held out)" if one.background_held_out else "")}
    return {"level": one.level, **(background if any(other.background for other in others) else {})}


def table(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The comparisons as rows of a table."""
    return [
        {"model": c.model, **load_columns(c, comparisons),
         "held out": "yes" if c.held_out else "", "measured (ms)": c.measured_ms, "spread": f"{100 * c.spread:.1f} %",
         "canary": c.canary,
         **({"host pace": c.host_pace} if any(other.host_pace is not None for other in comparisons) else {}),
         "predicted (ms)": c.predicted_ms, "error": percent(c.error),
         **({"rough estimate": "yes" if c.rough_estimate else "no"} if any(other.rough_estimate for other in comparisons)
            else {}),
         **percentile_columns(c, comparisons), "strict (ms)": c.strict_ms,
         "strict error": percent(c.strict_error), "memory (MiB)": c.predicted_memory_mib,
         "measured (MiB)": c.measured_memory_mib}
        for c in comparisons]


def summary_table(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """The summaries as rows of a table: one with look-up and one strict for each group."""
    return [
        {"models": s.group, **load_columns(s, summaries), "kernels": kind, "count": e.count, "MAPE": f"{e.mape:.1%}",
         "median": f"{e.median:.1%}", "within ±5 %": f"{e.within_5:.0%}", "within ±10 %": f"{e.within_10:.0%}",
         "worst": f"{e.worst:.1%}",
         **({"p50": f"{s.p50:.1%}", "p95": f"{s.p95:.1%}"} if kind == "looked up" and s.p50 is not None and s.p95 is not None
            else {"p50": None, "p95": None} if any(other.p50 is not None for other in summaries) else {})}
        for s in summaries for kind, e in (("looked up", s.lookup), ("all predicted", s.strict))]


def warned_of(comparisons: Sequence[Comparison]) -> dict[str, list[str]]:
    """By warning, the models that predictions warn of so; what many are warned of comes first."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for one in comparisons:
        for warning in one.warnings:
            found[warning][one.model] = None
    return {warning: list(found[warning]) for warning in sorted(found, key=lambda warning: -len(found[warning]))}


def evaluate(workspace: Workspace, models: Sequence[Path], *, dims: Mapping[str, Sequence[int]] | None = None,
             target: str | None = None, recorded: bool = False, way: WayOfRunning | None = None,
             loads: LoadsHere | None = None, plan: MeasuringPlan | None = None, force: bool = False,
             static: bool = False) -> Evaluation:
    """Predicts and measures `models` (or takes recorded measurements); a model that fails costs only itself.

    Args:
        loads: what else runs meanwhile; None: nothing.
        plan: how models are measured.
        static: whether sizes of dynamic dimensions are fixed before ONNX Runtime optimises a model, for prediction and run.

    Raises:
        UserError: no predictors, the target is another machine's and `recorded` is off, the load is not known, or not one
            model is left.
    """
    from inference.host_pace import USUAL, counts
    from inference.prediction import AS_USUAL, check_way
    from inference.targets import MAKE_PREDICTORS, fitted_for, is_here, local_targets

    paths = workspace.find_models(models)  # what was asked for comes first: a name may be mistyped
    fitted, way, loads = fitted_for(workspace, target), way or AS_USUAL, loads or LoadsHere()
    check_way(way, fitted.composition, fitted.target.name)
    name, provider = fitted.target.name, fitted.target.flavour.execution_provider
    failures = Failures()
    if recorded:
        found = MeasuredHere(recorded_models(workspace, paths, dims or {}, fitted, way, failures, static), "recorded")
        for case in found.cases:  # with the samples of a host at about its usual pace
            case.host_pace = USUAL if counts(fitted.composition, way) else None
            predict_case(case, name, way, workspace, force, failures)
    else:
        if not is_here(fitted.target):
            here = [local.name for local in local_targets()]
            raise UserError(f"target {name} is not this machine ({', '.join(here)}), where models are to be measured; compare "
                            "with the measurements in its dataset (--recorded), or have predictors of this machine made: "
                            f"{'; '.join(MAKE_PREDICTORS)}")
        loads.check(fitted, way, workspace)
        ready = cases_of(paths, dims or {}, provider, failures, static)
        found = measure_all(ready, fitted, way, loads, plan or MeasuringPlan(), workspace, force, failures) if ready else (
            MeasuredHere())
    held_out = held_out_of_fits(workspace, name)
    comparisons = tuple(compared for case in found.cases if (compared := compare(case, *held_out)))
    if not comparisons:
        raise UserError("no model could be evaluated" + (f": {', '.join(failures)} failed" if failures else
                        f": the dataset of {name} holds no measurement of them" if recorded else ""))
    return Evaluation(
        target=name, composition=composition_facts(fitted), source="recorded" if recorded else "measured", way=way.in_words,
        load=found.load, comparisons=comparisons, summaries=summarise(comparisons), failures=dict(failures),
        warnings=tuple(found.notices))


def recorded_models(workspace: Workspace, paths: Sequence[Path], dims: Mapping[str, Sequence[int]], fitted: Fitted,
                    way: WayOfRunning, failures: Failures, static: bool) -> list[Case]:
    """The models that the target's dataset holds measurements of, of those in `paths` or of all.

    Raises:
        UserError: there is no dataset, or no record of a model.
    """
    from benchmark.dataset import header_path

    folder = workspace.dataset(fitted.target.name)
    if not header_path(folder).exists():
        shipped = ROOT / "gpu_dataset" / f"{fitted.target.name}.tar.xz"
        raise UserError(f"{folder}: no dataset of target {fitted.target.name} to compare with; " + (
            f"unpack the one that comes with Hase: tar xf {shipped} -C {folder.parent}" if shipped.exists() else
            "measure it on such a machine: python benchmark/collector.py"))
    records = recorded_records(workspace, paths, dims, fitted, failures, static)
    cases = recorded_cases(folder, records, fitted.predictors.sidecar.metrics, way.label)
    if paths:  # else all that the dataset holds is asked for
        name_missing(records, {case.record.model for case in cases}, folder, failures)
    return cases


def composition_facts(fitted: Fitted) -> dict[str, Any]:
    """How kernel times became model times."""
    used = fitted.composition
    return {"label": used.label, "kind": used.kind, "alpha": used.alpha, "beta_ms": used.beta_ms, "node_ms": used.node_ms}


def recorded_records(workspace: Workspace, paths: Sequence[Path], dims: Mapping[str, Sequence[int]], fitted: Fitted,
                     failures: Failures, static: bool) -> dict[str, ModelRecord]:
    """Records by name: of the models in `paths`, else all that the fusion detector wrote for the target's flavour."""
    from ort_analysis.records import load_records

    flavour = fitted.target.flavour
    if paths:
        cases = cases_of(paths, dims, flavour.execution_provider, failures, static)
        return {case.record.model: case.record for case in cases}
    return {record.model: record for record in load_records(workspace, flavour)}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL",
                        help="ONNX files or folders of them; bare names are also looked for in model_zoo")
    cli.add_dim(parser)
    cli.add_static(parser)
    parser.add_argument("--target", help="whose predictors (default: this machine, or the only target with predictors)")
    parser.add_argument("--recorded", action="store_true",
                        help="compare with the measurements in the target's dataset (without MODEL: with all of them)")
    cli.add_way(parser)
    cli.add_load(parser)
    parser.add_argument("--under-load", type=Path, nargs="?", const=ROOT / "benchmark" / "config.yaml", metavar="CONFIG",
                        help="measure at the levels and beside the backgrounds of a collector's config (without one: "
                             "benchmark/config.yaml), which are started here; of its other keys, settle_s, source, metrics and "
                             "window_s count")
    parser.add_argument("--probe", action="store_true",
                        help="learn what else runs from the sharing probe, read on this GPU just before")
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, metavar="S",
                        help="how long to wait, before each measurement, for the machine to be as fast as when its dataset "
                             f"was measured (default: {PATIENCE_S:g})")
    parser.add_argument("--timeout-s", type=cli.positive, default=TIMEOUT_S, metavar="S",
                        help="give a model up whose session has not been timed after that long: once for each round "
                             f"(default: {TIMEOUT_S:g})")
    parser.add_argument("--rounds", type=cli.count, default=3, help="how often each model is measured, in turn (default: 3)")
    parser.add_argument("--budget-s", type=cli.positive, default=1.0, help="seconds for each model and round (default: 1)")
    parser.add_argument("--force", action="store_true",
                        help="predict although element type or ONNX Runtime version are not the predictors'")
    args = parser.parse_args()
    if not 0 <= args.patience_s < math.inf:
        parser.error("--patience-s can't be negative")
    if not args.models and not args.recorded:
        parser.error("name models (files or folders), or --recorded for all that the dataset holds")
    if args.recorded and (args.metrics or args.config):
        parser.error("--recorded takes the load from the dataset: leave --metrics and --config out")
    if args.recorded and (args.under_load or args.probe):
        parser.error("--recorded measures nothing: leave --under-load and --probe out")
    if args.under_load and args.metrics:
        parser.error("--under-load: one file of metrics does not tell of several loads; leave --metrics out")
    workspace = cli.start(args)
    from benchmark.collector_config import CollectorConfig
    from inference.load import CONFIG_FILE, InferenceConfig
    from inference.prediction import WayOfRunning
    from utils.config import load_config

    loads = LoadsHere(config=load_config(args.config or CONFIG_FILE, InferenceConfig), metrics_file=args.metrics,
                      under_load=load_config(args.under_load, CollectorConfig) if args.under_load else None, probe=args.probe)
    evaluation = evaluate(
        workspace, args.models, dims=cli.parse_dims(args.dim), target=args.target, recorded=args.recorded,
        way=WayOfRunning(io=args.io, cuda_graph=args.cuda_graph), loads=loads,
        plan=MeasuringPlan(args.rounds, args.budget_s, args.patience_s, args.timeout_s), force=args.force,
        static=args.static)
    folder = workspace.evaluation / evaluation.target
    with sole_writer(folder):
        write(evaluation, folder)
    if args.json:
        cli.print_json(evaluation)
    else:
        cli.print_table(table(evaluation.comparisons), f"{evaluation.target}, {evaluation.way}, {evaluation.source}")
        print()
        cli.print_table(summary_table(evaluation.summaries), "errors")
    warned = warned_of(evaluation.comparisons)
    for warning in list(warned)[:TOLD_WARNINGS]:
        log.warning("%s: %s", cli.first_of(warned[warning]), warning)
    if len(warned) > TOLD_WARNINGS:
        log.warning("%d more warnings are in evaluation.json", len(warned) - TOLD_WARNINGS)
    log.info("load %s; written to %s: evaluation.csv, evaluation.json, evaluation.png", evaluation.load, folder)
    if evaluation.failures:
        log.error("%d failed: %s", len(evaluation.failures), ", ".join(evaluation.failures))
    return 1 if evaluation.failures else 0


if __name__ == "__main__":
    cli.run(main)
