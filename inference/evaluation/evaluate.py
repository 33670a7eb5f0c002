"""Evaluates models: predicts them, and compares with latencies that are measured now or were recorded.

Models are measured under the load that is present, or under loads that the evaluation starts. They are predicted for the load
that is read just before they are measured.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hase.benchmark.load.stress import Stress, stress
from hase.benchmark.measuring.blocks import Canary, busy_share
from hase.benchmark.measuring.driver import describe_load
from hase.benchmark.metrics.source import MetricSource, values
from hase.inference.evaluation.comparison import Evaluation, EvaluationSource, compare_model, count_marks, summarise_comparisons
from hase.inference.evaluation.models import (
    EvaluatedModel,
    Failures,
    GpuLatency,
    ListedModel,
    listed_models,
    models_in_dataset,
    models_in_files,
    predict_model,
)
from hase.inference.library.predictor import Predictor
from hase.inference.live.load import InferenceConfig, LoadReading, current_load, fields_asked, read_metrics
from hase.inference.live.prometheus import server_for
from hase.inference.prediction.conditions import (
    AS_USUAL,
    USUAL,
    HostPace,
    RunMode,
    check_mode_while_shared,
    check_run_mode,
    pace_matters,
    probe_tells_pace,
    ratio_of,
)
from hase.inference.prediction.targets import MAKE_PREDICTORS, Fitted, fitted_for, is_here, local_targets, predictor_folders
from hase.inference.prediction.under_load import co_runner_from_probe, co_runner_from_summary
from hase.learned import target_files
from hase.records.dataset_files import header_path, model_table_path, read_header
from hase.records.dataset_tables import read_model_table
from hase.records.kernel_record_files import read_model_records
from hase.records.measurement import COMPUTE, Background, Effort
from hase.runtimes.protocol import Reply, Request, RuntimeSetting, Worker
from hase.utils.errors import UserError
from hase.utils.fingerprint import DEFAULT_RUNTIME, machine
from hase.utils.locks import measuring
from hase.utils.logger import get_logger, progress
from hase.utils.paths import ROOT, Workspace
from hase.utils.processes import WorkerFailed
from hase.utils.timing import pause

if TYPE_CHECKING:
    from hase.benchmark.collecting.config import CollectorConfig
    from hase.graph_model.simulation.sharing import CoRunner


log = get_logger("evaluator")

WARMUP = 3
LEAST_RUNS, MOST_RUNS = 10, 500  # per session on an idle GPU
STEADY = 0.10  # by how much the canary may be slower than its best before a measurement
PATIENCE_S = 15.0  # how long to wait for that
TIMEOUT_S = 600.0  # of a session


@dataclass(frozen=True)
class MeasuringPlan:
    """How models are measured.

    Attributes:
        rounds: how often each model is measured, for `budget_s` each time.
        patience_s: on an idle device, maximum wait before each model until the machine is as fast as in its dataset.
        timeout_s: seconds until a model whose session does not answer is skipped.
        inputs: a file with values of the models' inputs; None: generated ones.
    """

    rounds: int = 3
    budget_s: float = 1.0
    patience_s: float = PATIENCE_S
    timeout_s: float = TIMEOUT_S
    inputs: Path | None = None


@dataclass(frozen=True)
class EvaluationLoads:
    """The loads on this machine during an evaluation, and how they are read.

    Attributes:
        config, metrics_file: sources of metrics, as in `hase.inference.live.load.current_load`; neither: nothing runs.
        under_load: its levels and backgrounds are started, one after another. If `config` names no Prometheus, its source of
            metrics is read.
        probe: whether the sharing probe is read before each.
    """

    config: InferenceConfig = field(default_factory=InferenceConfig)
    metrics_file: Path | None = None
    under_load: CollectorConfig | None = None
    probe: bool = False

    def check(self, fitted: Fitted, run_mode: RunMode, workspace: Workspace) -> None:
        """Checks, before any measurement, that this machine supports all loads, and that Prometheus answers. A started load is
        never taken for idle, whatever `on_failure` says."""
        device = fitted.target.flavour.device
        if self.metrics_file:
            read_metrics(self.metrics_file)
        if fitted.sharing and (self.under_load or self.probe):
            check_mode_while_shared(run_mode)
        if self.under_load and not self.probe and not fields_asked(fitted):
            raise UserError(f"{fitted.target.name}: its predictors were trained without metrics, so no load changes what they "
                            "say; collect at levels above 0 and train again, or leave --under-load out")
        if self.probe:
            co_runner_from_probe(fitted)
        if self.under_load:
            if self.under_load.device not in ("auto", device):
                raise UserError(f"the loads are described for device {self.under_load.device}, and {fitted.target.name} is a "
                                f"target of {device}; change device in their config, or choose another with --target")
            for background in self.under_load.backgrounds_on(device).values():
                if background.model:
                    workspace.find_model(background.model)
            if self.config.prometheus.url is not None:  # otherwise each level would fail, after its wait
                server_for(self.config.prometheus).check()

    def each(self) -> list[tuple[float, Background | None]]:
        """The levels and backgrounds, one after another; a single idle one if no loads are started."""
        return self.under_load.loads() if self.under_load else [(0.0, None)]

    @contextmanager
    def running(self, level: float, background: Background | None, device: str, workspace: Workspace) -> Iterator[Stress]:
        """Runs a load during a block, which begins when the load is up and no metrics from before it are left."""
        with stress(level, background or COMPUTE, device, workspace=workspace) as stressor:
            if self.under_load:
                settle_s = self.under_load.stress.settle_s + self.config.prometheus.memory_s
                log.info("%s is running; measuring begins in %g s",
                         describe_load(level, background.name if background else ""), settle_s)
                pause(settle_s)
            yield stressor

    def source(self, device: str) -> MetricSource | None:
        """The reader of this machine's metrics, if loads are started and no Prometheus is read; else None."""
        return self.under_load.open_source(device) if self.under_load and self.config.prometheus.url is None else None

    def now(self, fitted: Fitted, level: float, source: MetricSource | None) -> tuple[LoadReading, CoRunner | None]:
        """The current load, by metrics (from `source`, if given) and by a probe."""
        if self.under_load and source:
            load = LoadReading(values(source.window(self.under_load.window_s)) if level else {})
        else:
            config = self.config.never_idle() if self.under_load else self.config
            load = current_load(config, self.metrics_file, fields_asked(fitted), not self.probe and fitted.sharing is not None)
        return load, co_runner_from_probe(fitted) if self.probe else co_runner_from_summary(fitted, load.probe)


@dataclass
class MeasuredModels:
    """The models of an evaluation with predictions and samples. `load` has the metrics that were read, or says in words that
    there was no load or several."""

    models: list[EvaluatedModel] = field(default_factory=list)
    load: str | dict[str, float] = "idle"
    notices: list[str] = field(default_factory=list)


def measure_all(ready: Sequence[EvaluatedModel], fitted: Fitted, run_mode: RunMode, loads: EvaluationLoads, plan: MeasuringPlan,
                workspace: Workspace, force: bool, failures: Failures) -> MeasuredModels:
    """Predicts and measures models under each of `loads`. The load is read before models of this process are part of it. Models
    run in a separate process: if one fails, the others are still measured."""
    if not ready:
        return MeasuredModels()
    setting = RuntimeSetting.of(fitted.target, workspace.kernel_onnx)
    with measuring(fitted.target.flavour.device), Worker(plan.timeout_s, fitted.target.flavour.runtime, setting) as worker:
        return _measure_all(ready, worker, fitted, run_mode, loads, plan, workspace, force, failures)


def _measure_all(ready: Sequence[EvaluatedModel], worker: Worker, fitted: Fitted, run_mode: RunMode, loads: EvaluationLoads,
                 plan: MeasuringPlan, workspace: Workspace, force: bool, failures: Failures) -> MeasuredModels:
    target, device = fitted.target.name, fitted.target.flavour.device
    results = MeasuredModels(load="by level" if loads.under_load else "idle")
    source = loads.source(device)
    for level, background in loads.each():
        name = background.name if background else ""
        try:
            with loads.running(level, background, device, workspace) as stressor:
                current_reading, co_runner = loads.now(fitted, level, source)
                for notice in current_reading.notices:
                    log.warning("%s", notice)
                models = [model.next_to(level, name, current_reading.metrics, co_runner) for model in ready]
                for model in models:
                    predict_model(model, target, run_mode, workspace, force, failures)
                idle = all(model.idle for model in models)
                best_canary_ms = recorded_canary_ms(workspace, target, device) if idle else 0.0
                measure_here(models, worker, device, run_mode, plan, best_canary_ms, failures)
                for model in models:
                    if at_measured_pace(model, fitted, run_mode):
                        predict_model(model, target, run_mode, workspace, force, failures)
                stressor.reached()
        except UserError as error:
            if not loads.under_load:
                raise
            failures.add(describe_load(level, name), error)
            continue
        results.models += models
        results.notices += [notice for notice in current_reading.notices if notice not in results.notices]
        if not loads.under_load:
            results.load = current_reading.metrics or ("idle" if co_runner is None else "as the probe met it")
    return results


def measure_here(models: Sequence[EvaluatedModel], worker: Worker, device: str, run_mode: RunMode, plan: MeasuringPlan,
                 best_canary_ms: float, failures: Failures) -> None:
    """Times every model as planned. Each round covers all models, so that drift affects all alike. Before each model it waits a
    while until the machine is as fast as when the dataset was measured, by the canary. It does not wait if `best_canary_ms`,
    the canary's time in the dataset, is 0: unknown, or the device is not idle."""
    loaded = False
    for model in progress([model for _ in range(plan.rounds) for model in models], "measuring"):
        if model.failed:
            continue
        with failures.catching(model.name, model):
            try:
                if not loaded:  # the first session also loads the runtime, whose time and memory must not count
                    time_session(model, worker, device, run_mode, 0.0, watch_host=False, inputs=plan.inputs)
                    loaded = True
                canary = Canary(partial(worker.canary_ms, device), best_ms=best_canary_ms,
                                busy=busy_share if device == "cpu" and model.idle else None)
                before_ms = canary.steady_ms(STEADY, plan.patience_s)
                if best_canary_ms:
                    model.canaries.append(before_ms / best_canary_ms)
                reply = time_session(model, worker, device, run_mode, plan.budget_s,
                                     watch_host=device == "cuda" and model.idle, inputs=plan.inputs)
            except WorkerFailed as error:
                loaded = False
                raise UserError(f"{model.name}: while it was measured: {error}" + (
                    "; --timeout-s gives it longer" if error.status == "timeout" else
                    " (out of memory?)" if error.signal == signal.SIGKILL else "")) from None
            model.samples_ms += reply.measurements[0].samples_ms
            if reply.measurements[0].probe_us is not None:
                model.probes_us.append(reply.measurements[0].probe_us)
            if model.memory_mib is None:
                model.memory_mib = reply.memory_mib


def at_measured_pace(model: EvaluatedModel, fitted: Fitted, run_mode: RunMode) -> bool:
    """Sets a model's host pace to the one measured with it; False if none was measured, or it does not matter."""
    if model.failed or not model.probes_us or not probe_tells_pace(fitted, run_mode):
        return False
    model.host_pace = HostPace(ratio_of(median(model.probes_us), fitted), "measured")
    return True


def time_session(model: EvaluatedModel, worker: Worker, device: str, run_mode: RunMode, budget_s: float,
                 watch_host: bool, inputs: Path | None = None) -> Reply:
    """One session's samples of a model, and its memory; with `watch_host`, only from moments with an undisturbed host."""
    if model.path is None:
        raise UserError(f"{model.record.model}: no file to run")
    reply = worker.ask(Request(
        do="session", device=device, paths=(str(model.path.absolute()),), dims=model.record.dims_run,
        static=model.record.static, labels=(run_mode.label,), watch_host="quiet" if watch_host else "",
        inputs=str(inputs.absolute()) if inputs else "",
        effort=Effort(warmup=WARMUP, budget_s=budget_s, least_runs=LEAST_RUNS, most_runs=MOST_RUNS)))
    if reply.error:
        raise UserError(reply.error)
    return reply


def recorded_canary_ms(workspace: Workspace, target: str, device: str) -> float:
    """The canary's shortest time in the idle blocks of the target's dataset, if it was measured on this machine; else 0."""
    if not model_table_path(workspace.dataset(target)).exists():
        return 0.0
    rows = read_model_table(workspace, target)
    idle_rows = rows[(rows["Level"] == 0) & (rows["Machine"] == machine(device).uuid)]
    return float(idle_rows["Canary_ms"].min()) if len(idle_rows) else 0.0




def held_out_of_fits(workspace: Workspace, target: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The groups and backgrounds that the target's dataset excludes from every fit; none if there is no dataset."""
    folder = workspace.dataset(target)
    if not header_path(folder).exists():
        return (), ()
    header = read_header(folder)
    return header.held_out, header.held_out_backgrounds


def evaluate(workspace: Workspace, models: Sequence[Path], *, dims: Mapping[str, Sequence[int]] | None = None,
             target: str | None = None, recorded: bool = False, run_mode: RunMode = AS_USUAL,
             loads: EvaluationLoads | None = None, plan: MeasuringPlan | None = None, force: bool = False,
             static: bool = False) -> Evaluation:
    """Predicts models, and measures them here or reads their measurements from the dataset. A failing model does not stop the
    others. `static` fixes dynamic dimensions before ONNX Runtime optimises a model, for prediction and run.

    Raises:
        UserError: there are no predictors, the target is another machine and `recorded` is off, the load is unknown, or no
            model could be evaluated.
    """
    paths = workspace.find_models(models)  # first, to find mistyped names early
    fitted, loads, plan = fitted_for(workspace, target), loads or EvaluationLoads(), plan or MeasuringPlan()
    check_run_mode(run_mode, fitted.composition, fitted.target.name)
    name, flavour = fitted.target.name, fitted.target.flavour
    failures = Failures()
    if recorded:
        results = MeasuredModels(recorded_models(workspace, paths, dims or {}, fitted, run_mode, failures, static), "recorded")
        with_energy = target_files.ENERGY.path(predictor_folders(workspace)[name]).is_file()
        for model in results.models:  # recorded samples are from a host near its usual pace
            model.host_pace = USUAL if pace_matters(fitted.composition, run_mode) else None
            predict_model(model, name, run_mode, workspace, force, failures, with_energy)
        return evaluation_of(workspace, fitted, results, "recorded", run_mode, failures)
    check_measurable(fitted, plan)
    loads.check(fitted, run_mode, workspace)
    ready = models_in_files(paths, dims or {}, flavour, failures, static)
    results = measure_all(ready, fitted, run_mode, loads, plan, workspace, force, failures)
    return evaluation_of(workspace, fitted, results, "measured", run_mode, failures)


def evaluate_list(workspace: Workspace, folder: Path, models: Sequence[ListedModel], *, target: str | None = None,
                  latencies: Mapping[str, GpuLatency] | None = None, measure_missing: bool = False,
                  plan: MeasuringPlan | None = None, force: bool = False) -> Evaluation:
    """Predicts the models of a list, whose files are in `folder`, and compares with measured latencies.

    They are measured here, or `latencies` has them from another machine, with the pace of its host. With `measure_missing`,
    first measures kernels that the dataset lacks.

    Raises:
        UserError: there are no predictors, models are to be measured and the target is another machine, or none could be
            evaluated.
    """
    failures, plan = Failures(), plan or MeasuringPlan()
    if measure_missing:
        predictor = Predictor(workspace, target, force=force)
        for model in progress(models, "measuring kernels"):
            with failures.catching(model.name):
                predictor.measure_missing(folder / model.file, [model.dims])
    fitted = fitted_for(workspace, target)
    if latencies is None:
        check_measurable(fitted, plan)
    ready = listed_models([model for model in models if model.name not in failures], folder, fitted.target.flavour, failures,
                          latencies)
    if latencies is None:
        results = measure_all(ready, fitted, AS_USUAL, EvaluationLoads(), plan, workspace, force, failures)
    else:
        results = MeasuredModels(ready)
        for evaluated in ready:
            at_measured_pace(evaluated, fitted, AS_USUAL)
            predict_model(evaluated, fitted.target.name, AS_USUAL, workspace, force, failures)
    return evaluation_of(workspace, fitted, results, "measured" if latencies is None else "listed", AS_USUAL, failures)


def check_measurable(fitted: Fitted, plan: MeasuringPlan) -> None:
    """Refuses to measure models for a target that is another machine, and to use given inputs under other runtimes."""
    name = fitted.target.name
    if not is_here(fitted.target):
        local_names = [local.name for local in local_targets()]
        raise UserError(f"target {name} is not this machine ({', '.join(local_names)}), where models are to be measured; "
                        "compare with the measurements in its dataset (--recorded), or have predictors of this machine "
                        f"made: {'; '.join(MAKE_PREDICTORS)}")
    if plan.inputs and fitted.target.flavour.runtime != DEFAULT_RUNTIME:
        raise UserError("--inputs: only models under ONNX Runtime can be run with them; leave it out here")


def evaluation_of(workspace: Workspace, fitted: Fitted, results: MeasuredModels, source: EvaluationSource, run_mode: RunMode,
                  failures: Failures) -> Evaluation:
    """Builds the evaluation from predictions and measurements."""
    name, fit = fitted.target.name, fitted.composition
    held_out = held_out_of_fits(workspace, name)
    comparisons = tuple(compared for model in results.models if (compared := compare_model(model, *held_out)))
    if not comparisons:
        raise UserError("no model could be evaluated" + (f": {', '.join(failures)} failed" if failures else
                        f": the dataset of {name} holds no measurement of them" if source == "recorded" else ""))
    return Evaluation(
        target=name, composition={"label": fit.label, "kind": fit.kind, "alpha": fit.alpha, "beta_ms": fit.beta_ms,
                                  "node_ms": fit.node_ms},
        source=source, way=run_mode.description, load=results.load, comparisons=comparisons,
        summaries=summarise_comparisons(comparisons), failures=dict(failures), marks=count_marks(comparisons),
        warnings=tuple(results.notices))


def recorded_models(workspace: Workspace, paths: Sequence[Path], dims: Mapping[str, Sequence[int]], fitted: Fitted,
                    run_mode: RunMode, failures: Failures, static: bool) -> list[EvaluatedModel]:
    """The models in `paths`, or all models, that the target's dataset has measurements of."""
    folder = workspace.dataset(fitted.target.name)
    if not header_path(folder).exists():
        shipped = ROOT / "recipes" / "h200" / f"{fitted.target.name}.tar.xz"
        raise UserError(f"{folder}: no dataset of target {fitted.target.name} to compare with; " + (
            f"unpack the one that comes with Hase: python recipes/h200/dataset_archives.py unpack --workspace {workspace.root}"
            if shipped.exists() else "measure it on such a machine: python benchmark/collector.py"))
    flavour = fitted.target.flavour
    wanted = [model.record for model in models_in_files(paths, dims, flavour, failures, static)] if paths else (
        read_model_records(workspace, flavour))
    records = {record.model: record for record in wanted}
    models = models_in_dataset(folder, records, fitted.predictors.sidecar.metrics, run_mode.label)
    missing = set(records) - {model.record.model for model in models} if paths else set[str]()  # else the dataset's are wanted
    for name in sorted(missing):
        failures.add(name, UserError(f"{name}: {folder} holds no good measurement of it; measure it with: "
                                     "python benchmark/collector.py"))
    return models
