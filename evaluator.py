"""Phase 7.2: predicted against measured latency, model by model, and how far off the predictor is.

Reads ONNX models (files or folders) and what training learned for the target. Measures the models here, under the load that
inference/config.yaml tells of, or, with --recorded, takes the measurements that the target's dataset holds. Prints a row a
model and the errors, and writes evaluation/<target>/evaluation.csv, .json and .png. Scores; fits nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ort_analysis.records import Frozen, ModelRecord, family
from utils import cli, files
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import Workspace
from utils.timing import ErrorStatistics, error_statistics, summarize

if TYPE_CHECKING:
    from inference.load import InferenceConfig
    from inference.prediction import Prediction, WayOfRunning
    from inference.targets import Fitted

log = get_logger("evaluator")

EVALUATION_VERSION = 1
WARMUP = 3
LEAST_RUNS, MOST_RUNS = 10, 500  # of a session on an idle GPU
STEADY = 0.10  # how much slower than its best the canary may be before a measurement
PATIENCE_S = 15.0  # how long to wait for that
LABELLED_POINTS = 40  # in the plot; more names would cover each other
EXAMPLES = """
python evaluator.py models/
python evaluator.py resnet18.onnx --dim batch=1,4,16 --io host
python evaluator.py --recorded --target nvidia-h200-cuda-ort1.31-all
"""


class Comparison(Frozen):
    """One model's predicted and measured latency.

    Attributes:
        model: the record's name, with the sizes of dynamic dimensions.
        level: share of time that the stressor was busy while the measurement was recorded; 0 is idle.
        background: what the stressor was busy with, by its name in the dataset; "" is idle.
        held_out: its family is in no fit.
        background_held_out: rows beside this background are in no fit.
        predicted_ms, strict_ms: with measured kernels looked up, and with every kernel predicted.
        measured_ms: what is compared with: the median of the samples, under load their mean.
        error, strict_error: predicted / measured − 1, ratios.
        spread: interquartile range over the median of the samples, a ratio.
        runs: number of samples.
        measured_share: part of predicted_ms's kernel time that was looked up, a ratio.
        canary: how long the canary took before its measurements over its best in the dataset, a ratio: 1 is steady.
        predicted_memory_mib, measured_memory_mib: what a run holds; measured is what opening and running took.
    """

    model: str
    batch: int | None
    level: float
    background: str = ""
    held_out: bool
    background_held_out: bool = False
    predicted_ms: float
    strict_ms: float
    measured_ms: float
    median_ms: float
    mean_ms: float
    error: float
    strict_error: float
    spread: float
    runs: int
    measured_share: float
    fallback_share: float
    canary: float | None
    predicted_memory_mib: float
    measured_memory_mib: float | None = None


class Summary(Frozen):
    """Errors of a group of comparisons, with look-up and strict."""

    group: str
    level: float
    background: str = ""
    background_held_out: bool = False
    lookup: ErrorStatistics
    strict: ErrorStatistics


class Evaluation(Frozen):
    """What the evaluator writes and `--json` prints. Version 1 is the first.

    Attributes:
        source: `measured` here and now, or `recorded` in the dataset.
        way: how the models were run, in words.
        load: what the predictions were told: `idle`, or metrics; `recorded` where each level has its own.
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


@dataclass
class Case:
    """One model to evaluate: its record, its file where it is to run, the load, and what was found; `failed` drops it."""

    record: ModelRecord
    path: Path | None = None
    level: float = 0.0
    background: str = ""
    load: Mapping[str, float] = field(default_factory=dict)
    with_lookup: Prediction | None = None
    strict: Prediction | None = None
    samples_ms: list[float] = field(default_factory=list)
    memory_mib: float | None = None
    canaries: list[float] = field(default_factory=list)
    failed: bool = False


class Failures(dict[str, str]):
    """Why models failed, by name; each is told when it happens."""

    def add(self, name: str, reason: UserError) -> None:
        self[name] = str(reason)
        log.error("%s", reason if name in str(reason) else f"{name}: {reason}")

    def add_case(self, case: Case, reason: UserError) -> None:
        case.failed = True
        self.add(case.record.model, reason)


def cases_of(paths: Iterable[Path], dims: Mapping[str, Sequence[int]], execution_provider: str,
             failures: Failures) -> list[Case]:
    """The models of `paths` made ready: a case a combination of those of `dims` that are dynamic in the model.

    Raises:
        UserError: one of `dims` is dynamic in none of the models.
    """
    from inference.sources import record_of
    from ort_analysis.ort_graph_parser import own_sizes

    cases: list[Case] = []
    unused = set(dims)
    for path in cli.track(list(dict.fromkeys(paths)), "analysing"):
        try:
            sizes = own_sizes(path, dims)
            unused -= set(sizes[0])
            for size in sizes:
                cases.append(Case(record=record_of(path, execution_provider, size), path=path))
        except UserError as error:
            failures.add(path.name, error)
    if unused and cases:
        raise UserError(f"--dim {', '.join(sorted(unused))}: not a dynamic dimension of any of these models")
    return cases


def measure_here(cases: Sequence[Case], execution_provider: str, way: WayOfRunning, rounds: int, budget_s: float,
                 best_canary_ms: float, patience_s: float, failures: Failures) -> None:
    """Times every case `rounds` times for `budget_s` seconds, all cases in each round, so that drift hits all alike.

    Before each it waits a while for the machine to be as fast as it was when the dataset was measured, by the canary.

    Args:
        patience_s: how long to wait at most.
        best_canary_ms: the canary then; 0 where that is not known, or where the device is not idle: no waiting.
    """
    from benchmark.canary import canary_ms, wait_until_steady

    warmed = False
    for case in cli.track([case for _ in range(rounds) for case in cases], "measuring"):
        if case.failed:
            continue
        try:
            if not warmed:  # the first session loads the runtime, whose time and memory are no model's
                measure_once(Case(record=case.record, path=case.path), execution_provider, way, 0.0, watch_host=False)
                warmed = True
            canary = wait_until_steady(lambda: canary_ms(execution_provider), best_canary_ms, STEADY, patience_s)
            if best_canary_ms:
                case.canaries.append(canary / best_canary_ms)
            measure_once(case, execution_provider, way, budget_s, watch_host=execution_provider == "cuda" and not case.load)
        except UserError as error:
            failures.add_case(case, error)


def measure_once(case: Case, execution_provider: str, way: WayOfRunning, budget_s: float, watch_host: bool) -> None:
    """Adds one session's samples to a case (with `watch_host`, those of moments in which the host was undisturbed), and what
    the first session took in memory."""
    from benchmark.ort_kernel_runner import open_runner
    from benchmark.protocol import Effort
    from benchmark.quiet_host import host_probe, quiet_samples_ms

    if case.path is None:
        raise UserError(f"{case.record.model}: no file to run")
    probe = host_probe(execution_provider) if watch_host else None  # first: its session is no part of the model's memory
    before = memory_in_use_mib(execution_provider)
    runner = open_runner(case.path, execution_provider, dims=case.record.dims, io=way.io, cuda_graph=way.cuda_graph)
    if probe:
        runner.warm_up(WARMUP)
        effort = Effort(budget_s=budget_s, least_runs=LEAST_RUNS, most_runs=MOST_RUNS)
        case.samples_ms += quiet_samples_ms(probe, {"latency": runner.run_s}, effort)["latency"].samples_ms
    else:
        case.samples_ms += runner.time(warmup=WARMUP, budget_s=budget_s).samples_ms
    if case.memory_mib is None:
        case.memory_mib = memory_in_use_mib(execution_provider) - before


def memory_in_use_mib(execution_provider: str) -> float:
    """Memory that this process holds on the CPU, or that the first GPU has given out, in MiB."""
    if execution_provider == "cuda":
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used / 2**20
    import ctypes

    import psutil

    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what earlier models left, or it hides what this one takes
    except (OSError, AttributeError):
        log.debug("no malloc_trim here: memory figures are rough")
    return psutil.Process().memory_info().rss / 2**20


def recorded_cases(folder: Path, records: Mapping[str, ModelRecord], metrics: Sequence[str], label: str) -> list[Case]:
    """A case for every model of `records`, level, background and machine that the dataset in `folder` holds a good measurement
    of, by `label`; idle, without those that a disturbed host held up."""
    import pandas as pd

    from benchmark.dataset import Block, Measurement, model_rows, model_sessions, paced_rows, read_journal

    sessions = [session for session in model_sessions(read_journal(folder)) if "latency" in session.labels]
    rows = paced_rows(pd.DataFrame(model_rows(sessions)))
    held_up = set(rows.index[~rows["tells"]])
    if held_up:
        log.warning("%d latencies that a disturbed host held up are left out; the collector measures them again", len(held_up))
    measured: dict[tuple[str, tuple[float, str], str], list[tuple[Block, Measurement]]] = defaultdict(list)
    for place, (model, block, labels) in enumerate(sessions):
        found = labels.get(label)
        if place not in held_up and found and found.status == "ok" and found.samples_ms and model in records:
            measured[model, block.load, block.machine].append((block, found))
    cases = []
    for (model, (level, background), _), of_model in measured.items():
        alone = of_model[-1][0].background
        load = {name: alone[name] for name in metrics if name in alone} if level else {}
        cases.append(Case(record=records[model], level=level, background=background, load=load,
                          samples_ms=[sample for _, found in of_model for sample in found.samples_ms]))
    return sorted(cases, key=lambda case: (case.level, case.background, case.record.model))


def name_missing(records: Mapping[str, ModelRecord], found: set[str], folder: Path, failures: Failures) -> None:
    """Names the models that a record tells of and the dataset in `folder` does not."""
    for name in sorted(set(records) - found):
        failures.add(name, UserError(f"{name}: {folder} holds no good measurement of it; measure it with: "
                                     "python benchmark/collector.py"))


def predict_case(case: Case, target: str, way: WayOfRunning, workspace: Workspace, force: bool, failures: Failures) -> None:
    """Fills in a case's predictions: with look-up, and strict."""
    from inference.prediction import predict

    try:
        case.with_lookup, case.strict = (
            predict(case.record, target=target, strict=strict, load=case.load, way=way, workspace=workspace, force=force)
            for strict in (False, True))
    except UserError as error:
        failures.add_case(case, error)


def compare(case: Case, held_out: Sequence[str], held_out_backgrounds: Sequence[str] = ()) -> Comparison | None:
    """A case's predictions beside its samples; None where either is missing."""
    if case.failed or case.with_lookup is None or case.strict is None or not case.samples_ms:
        return None
    statistics = summarize(case.samples_ms)
    predicted_ms, strict_ms = case.with_lookup.latency_ms, case.strict.latency_ms
    measured_ms = statistics.mean_ms if case.level or case.load else statistics.median_ms
    return Comparison(
        model=case.record.model, batch=case.record.batch, level=case.level, background=case.background,
        held_out=family(case.record.model) in held_out, background_held_out=case.background in held_out_backgrounds,
        predicted_ms=predicted_ms, strict_ms=strict_ms, measured_ms=measured_ms, median_ms=statistics.median_ms,
        mean_ms=statistics.mean_ms, error=predicted_ms / measured_ms - 1, strict_error=strict_ms / measured_ms - 1,
        spread=statistics.spread, runs=statistics.runs, measured_share=case.with_lookup.time_share["measured"],
        fallback_share=case.with_lookup.time_share["fallback"],
        canary=sum(case.canaries) / len(case.canaries) if case.canaries else None,
        predicted_memory_mib=case.with_lookup.peak_memory_mib, measured_memory_mib=case.memory_mib,
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
                strict=error_statistics([c.strict_ms for c in members], [c.measured_ms for c in members]))
        for (load, group), members in groups.items()
        if group == "all models" or len(members) < len(groups[load, "all models"]))


def held_out_of_fits(workspace: Workspace, target: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Families and backgrounds that the target's dataset keeps out of every fit; none where there is no dataset."""
    from benchmark.dataset import header_path, load_header

    folder = workspace.dataset(target)
    if not header_path(folder).exists():
        return (), ()
    header = load_header(folder)
    return header.held_out, header.held_out_backgrounds


def recorded_canary_ms(workspace: Workspace, target: str, execution_provider: str) -> float:
    """The canary's shortest time in the idle blocks of the target's dataset, if it was measured on this machine; else 0."""
    from benchmark.dataset import load_model_table, model_table_path
    from utils.fingerprint import machine

    if not model_table_path(workspace.dataset(target)).exists():
        return 0.0
    rows = load_model_table(workspace, target)
    here = rows[(rows["Level"] == 0) & (rows["Machine"] == machine(execution_provider).uuid)]
    return float(here["Canary_ms"].min()) if len(here) else 0.0


def draw(evaluation: Evaluation, path: Path) -> None:
    """Predicted against measured, both logarithmic, with the ±10 % band; held-out models stand out."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    points = evaluation.comparisons
    values = [v for c in points for v in (c.measured_ms, c.predicted_ms)]
    ends = [min(values) / 1.5, max(values) * 1.5]
    figure, axes = plt.subplots(figsize=(8, 8), layout="constrained")
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="0.9", label="±10 %")
    axes.plot(ends, ends, color="0.5", linewidth=1)
    for held_out, colour, label in ((False, "tab:blue", "not held out"), (True, "tab:orange", "held out of every fit")):
        group = [c for c in points if c.held_out == held_out]
        if group:
            axes.scatter([c.measured_ms for c in group], [c.predicted_ms for c in group], color=colour, label=label,
                         zorder=3)
    if len(points) <= LABELLED_POINTS:
        for c in points:
            load = f" ({' '.join(filter(None, (f'{c.level:g}', c.background)))})" if c.level else ""
            axes.annotate(c.model + load, (c.measured_ms, c.predicted_ms), xytext=(4, -8), textcoords="offset points",
                          fontsize=6)
    whole = evaluation.summaries[0]
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", xlabel="measured latency (ms)",
             ylabel="predicted latency (ms)",
             title=f"{evaluation.target}\n{whole.lookup.count} models, MAPE {whole.lookup.mape:.1%}, "
                   f"all kernels predicted {whole.strict.mape:.1%}")
    axes.legend(loc="upper left")
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    plt.close(figure)


def write(evaluation: Evaluation, folder: Path) -> None:
    """The CSV, the JSON and the plot of an evaluation."""
    rows = [comparison.model_dump() for comparison in evaluation.comparisons]
    files.write_csv(folder / "evaluation.csv", list(Comparison.model_fields), rows)
    files.write_json(folder / "evaluation.json", evaluation)
    draw(evaluation, folder / "evaluation.png")


def percent(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %"


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
         "canary": c.canary, "predicted (ms)": c.predicted_ms, "error": percent(c.error), "strict (ms)": c.strict_ms,
         "strict error": percent(c.strict_error), "memory (MiB)": c.predicted_memory_mib,
         "measured (MiB)": c.measured_memory_mib}
        for c in comparisons]


def summary_table(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """The summaries as rows of a table: one with look-up and one strict for each group."""
    return [
        {"models": s.group, **load_columns(s, summaries), "kernels": kind, "count": e.count, "MAPE": f"{e.mape:.1%}",
         "median": f"{e.median:.1%}", "within ±5 %": f"{e.within_5:.0%}", "within ±10 %": f"{e.within_10:.0%}",
         "worst": f"{e.worst:.1%}"}
        for s in summaries for kind, e in (("looked up", s.lookup), ("all predicted", s.strict))]


def evaluate(workspace: Workspace, models: Sequence[Path], *, dims: Mapping[str, Sequence[int]] | None = None,
             target: str | None = None, recorded: bool = False, way: WayOfRunning | None = None,
             metrics_file: Path | None = None, config: InferenceConfig | None = None, rounds: int = 3, budget_s: float = 1.0,
             patience_s: float = PATIENCE_S, force: bool = False) -> Evaluation:
    """Predicts and measures `models` (or takes recorded measurements); a model that fails costs only itself.

    The load, the same for all predictions, is read once and first: before models of this process are part of it.

    Args:
        metrics_file, config: where the load is read from, as `inference.load.current_load` does; neither: idle.

    Raises:
        UserError: no predictors, the target is another machine's and `recorded` is off, the load is not known, or not one
            model is left.
    """
    from inference.load import InferenceConfig, Load, current_load, fields_asked
    from inference.prediction import AS_USUAL, check_way
    from inference.targets import fitted_for, local_targets

    fitted, way = fitted_for(workspace, target), way or AS_USUAL
    check_way(way, fitted.composition, fitted.target.name)
    name, provider = fitted.target.name, fitted.target.flavour.execution_provider
    failures = Failures()
    here = [local.name for local in local_targets()]
    if not recorded and name not in here:
        raise UserError(f"target {name} is not this machine ({', '.join(here)}): compare with the measurements in its "
                        "dataset: --recorded")
    load = Load()
    if recorded:
        records = recorded_records(workspace, models, dims or {}, fitted, failures)
        cases = recorded_cases(workspace.dataset(name), records, fitted.predictors.sidecar.metrics, way.label)
        if models:  # else all that the dataset holds is asked for
            name_missing(records, {case.record.model for case in cases}, workspace.dataset(name), failures)
    else:
        load = current_load(config or InferenceConfig(), metrics_file, fields_asked(fitted))
        for notice in load.notices:
            log.warning("%s", notice)
        cases = cases_of(workspace.find_models(models), dims or {}, provider, failures)
        for case in cases:
            case.load = load.metrics
    for case in cases:
        predict_case(case, name, way, workspace, force, failures)
    if not recorded:
        best_canary_ms = 0.0 if load.metrics else recorded_canary_ms(workspace, name, provider)
        measure_here(cases, provider, way, rounds, budget_s, best_canary_ms, patience_s, failures)
    held_out = held_out_of_fits(workspace, name)
    comparisons = tuple(found for case in cases if (found := compare(case, *held_out)))
    if not comparisons:
        raise UserError("no model could be evaluated" + (f": {', '.join(failures)} failed" if failures else
                        f": the dataset of {name} holds no measurement of them" if recorded else ""))
    return Evaluation(
        target=name, composition=composition_facts(fitted), source="recorded" if recorded else "measured", way=way.in_words,
        load="recorded" if recorded else load.metrics or "idle", comparisons=comparisons, summaries=summarise(comparisons),
        failures=dict(failures), warnings=load.notices)


def composition_facts(fitted: Fitted) -> dict[str, Any]:
    """How kernel times became model times."""
    used = fitted.composition
    return {"label": used.label, "kind": used.kind, "alpha": used.alpha, "beta_ms": used.beta_ms, "node_ms": used.node_ms}


def recorded_records(workspace: Workspace, models: Sequence[Path], dims: Mapping[str, Sequence[int]], fitted: Fitted,
                     failures: Failures) -> dict[str, ModelRecord]:
    """Records by name: of the models given, else all that the fusion detector wrote for the target's flavour."""
    from ort_analysis.records import load_records

    flavour = fitted.target.flavour
    if models:
        cases = cases_of(workspace.find_models(models), dims, flavour.execution_provider, failures)
        return {case.record.model: case.record for case in cases}
    return {record.model: record for record in load_records(workspace, flavour)}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL",
                        help="ONNX files or folders of them; bare names are also looked for in model_zoo")
    cli.add_dim(parser)
    parser.add_argument("--target", help="whose predictors (default: this machine, or the only target with predictors)")
    parser.add_argument("--recorded", action="store_true",
                        help="compare with the measurements in the target's dataset (without MODEL: with all of them)")
    cli.add_way(parser)
    cli.add_load(parser)
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, metavar="S",
                        help="how long to wait, before each measurement, for the machine to be as fast as when its dataset "
                             f"was measured (default: {PATIENCE_S:g})")
    parser.add_argument("--rounds", type=int, default=3, help="how often each model is measured, in turn (default: 3)")
    parser.add_argument("--budget-s", type=float, default=1.0, help="seconds for each model and round (default: 1)")
    parser.add_argument("--force", action="store_true",
                        help="predict although element type or ONNX Runtime version are not the predictors'")
    args = parser.parse_args()
    if args.patience_s < 0:
        parser.error("--patience-s can't be negative")
    if args.rounds < 1 or not (args.budget_s > 0 and math.isfinite(args.budget_s)):
        parser.error("--rounds must be at least 1 and --budget-s positive")
    if not args.models and not args.recorded:
        parser.error("name models (files or folders), or --recorded for all that the dataset holds")
    if args.recorded and (args.metrics or args.config):
        parser.error("--recorded takes the load from the dataset: leave --metrics and --config out")
    workspace = cli.start(args)
    from inference.load import CONFIG_FILE, InferenceConfig
    from inference.prediction import WayOfRunning
    from utils.config import load_config

    evaluation = evaluate(
        workspace, args.models, dims=cli.parse_dims(args.dim), target=args.target, recorded=args.recorded,
        way=WayOfRunning(io=args.io, cuda_graph=args.cuda_graph), metrics_file=args.metrics,
        config=load_config(args.config or CONFIG_FILE, InferenceConfig), patience_s=args.patience_s,
        rounds=args.rounds, budget_s=args.budget_s, force=args.force)
    folder = workspace.evaluation / evaluation.target
    write(evaluation, folder)
    if args.json:
        cli.print_json(evaluation)
    else:
        cli.print_table(table(evaluation.comparisons), f"{evaluation.target}, {evaluation.way}, {evaluation.source}")
        print()
        cli.print_table(summary_table(evaluation.summaries), "errors")
    log.info("load %s; written to %s: evaluation.csv, evaluation.json, evaluation.png", evaluation.load, folder)
    if evaluation.failures:
        log.error("%d failed: %s", len(evaluation.failures), ", ".join(evaluation.failures))
    return 1 if evaluation.failures else 0


if __name__ == "__main__":
    cli.run(main)
