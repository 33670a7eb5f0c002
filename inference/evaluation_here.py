"""Models measured on this machine, beside whatever runs there, or beside loads that are started for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from inference.evaluation_cases import Case, Failures, predict_case
from inference.load import InferenceConfig, Load, current_load, fields_asked
from utils import cli
from utils.errors import UserError
from utils.locks import measuring
from utils.logger import get_logger
from utils.paths import Workspace

if TYPE_CHECKING:
    from benchmark.backgrounds import Background
    from benchmark.collector_config import CollectorConfig
    from benchmark.metrics import MetricSource
    from benchmark.stressor import Stress
    from inference.prediction import WayOfRunning
    from inference.targets import Fitted
    from overlap_simulator import OtherWork

log = get_logger("evaluator")

WARMUP = 3
LEAST_RUNS, MOST_RUNS = 10, 500  # of a session on an idle GPU
STEADY = 0.10  # how much slower than its best the canary may be before a measurement
PATIENCE_S = 15.0  # how long to wait for that


@dataclass(frozen=True)
class MeasuringPlan:
    """How models are measured here.

    Attributes:
        rounds: how often each model is, in turn.
        budget_s: for each model and round.
        patience_s: how long to wait, before each on an idle device, for the machine to be as fast as its dataset knows it.
    """

    rounds: int = 3
    budget_s: float = 1.0
    patience_s: float = PATIENCE_S


@dataclass(frozen=True)
class LoadsHere:
    """What else runs on this machine meanwhile, and what tells of it.

    Attributes:
        config, metrics_file: where metrics are read from, as `inference.load.current_load` does; neither: nothing runs.
        under_load: whose levels and backgrounds are started, one after another; where `config` names no Prometheus, its source
            of metrics tells of them.
        probe: whether the sharing probe tells, read here before each.
    """

    config: InferenceConfig = field(default_factory=InferenceConfig)
    metrics_file: Path | None = None
    under_load: CollectorConfig | None = None
    probe: bool = False

    def check(self, fitted: Fitted, way: WayOfRunning, workspace: Workspace) -> None:
        """Whether all loads can be had on a target that is this machine, and a Prometheus that is to tell of them answers,
        before the first is measured.

        Raises:
            UserError: one can't, it does not (whatever `on_failure` says: a load that was started is never taken for idle), or
                nothing is known of models run that way beside other work.
        """
        from inference.prediction import check_beside
        from inference.prometheus import server_for
        from inference.sharing import probed

        provider = fitted.target.flavour.execution_provider
        if fitted.sharing and (self.under_load or self.probe):
            check_beside(way)
        if self.under_load and not self.probe and not fields_asked(fitted):
            raise UserError(f"{fitted.target.name}: its predictors were trained without metrics, so no load changes what they "
                            "say; collect at levels above 0 and train again, or leave --under-load out")
        if self.probe:
            probed(fitted)
        if self.under_load:
            if self.under_load.device not in ("auto", provider):
                raise UserError(f"the loads are described for device {self.under_load.device}, and {fitted.target.name} is a "
                                f"target of {provider}; change device in their config, or choose another with --target")
            for background in self.under_load.backgrounds_on(provider).values():
                if background.model:
                    workspace.find_model(background.model)
            if self.config.prometheus.url is not None:  # else each level would find out, after its wait
                server_for(self.config.prometheus).check()

    def each(self) -> list[tuple[float, Background | None]]:
        """Levels and backgrounds in turn; a single idle one where no loads are started."""
        return self.under_load.loads() if self.under_load else [(0.0, None)]

    @contextmanager
    def running(self, level: float, background: Background | None, provider: str, workspace: Workspace) -> Iterator[Stress]:
        """One of them while a block runs; it is up when the block begins, and no metrics from before it are left."""
        from benchmark.backgrounds import COMPUTE
        from benchmark.collector import load_in_words
        from benchmark.stressor import stress

        with stress(level, background or COMPUTE, provider, workspace=workspace) as stressor:
            if self.under_load:
                settle_s = self.under_load.stress.settle_s + self.config.prometheus.memory_s
                log.info("%s: up; measuring in %g s", load_in_words(level, background.name if background else ""), settle_s)
                time.sleep(settle_s)
            yield stressor

    def source(self, provider: str) -> MetricSource | None:
        """What reads this machine's metrics where loads are started and no Prometheus tells of them; else None."""
        return self.under_load.open_source(provider) if self.under_load and self.config.prometheus.url is None else None

    def now(self, fitted: Fitted, level: float, source: MetricSource | None) -> tuple[Load, OtherWork | None]:
        """What else runs at this moment: by metrics, and as a probe met it.

        Args:
            source: see `source`.

        Raises:
            UserError: metrics or probe can't be read; a load that was started is never taken for idle.
        """
        from benchmark.metrics import values
        from inference.sharing import probe_of, probed

        if self.under_load and source:
            load = Load(values(source.window(self.under_load.window_s)) if level else {})
        else:
            config = self.config.never_idle() if self.under_load else self.config
            load = current_load(config, self.metrics_file, fields_asked(fitted), not self.probe and fitted.sharing is not None)
        return load, probed(fitted) if self.probe else probe_of(fitted, load)


@dataclass
class MeasuredHere:
    """What `measure_all` found.

    Attributes:
        cases: with their predictions and samples.
        load: the metrics that were read; in words where there are none, or several loads.
        notices: what to know about it.
    """

    cases: list[Case] = field(default_factory=list)
    load: str | dict[str, float] = "idle"
    notices: list[str] = field(default_factory=list)


def measure_all(ready: Sequence[Case], fitted: Fitted, way: WayOfRunning, loads: LoadsHere, plan: MeasuringPlan,
                workspace: Workspace, force: bool, failures: Failures) -> MeasuredHere:
    """Predicts and measures models beside each of `loads`; one of several that fails costs only itself.

    What else runs is read first, before models of this process are part of it.

    Raises:
        UserError: what else runs is not known, where no load is started; or another process measures on this device.
    """
    with measuring(fitted.target.flavour.execution_provider):
        return _measure_all(ready, fitted, way, loads, plan, workspace, force, failures)


def _measure_all(ready: Sequence[Case], fitted: Fitted, way: WayOfRunning, loads: LoadsHere, plan: MeasuringPlan,
                 workspace: Workspace, force: bool, failures: Failures) -> MeasuredHere:
    from benchmark.collector import load_in_words

    target, provider = fitted.target.name, fitted.target.flavour.execution_provider
    found = MeasuredHere(load="by level" if loads.under_load else "idle")
    source = loads.source(provider)
    for level, background in loads.each():
        name = background.name if background else ""
        try:
            with loads.running(level, background, provider, workspace) as stressor:
                now, other = loads.now(fitted, level, source)
                for notice in now.notices:
                    log.warning("%s", notice)
                cases = [case.beside(level, name, now.metrics, other) for case in ready]
                for case in cases:
                    predict_case(case, target, way, workspace, force, failures)
                idle = all(case.idle for case in cases)
                best_canary_ms = recorded_canary_ms(workspace, target, provider) if idle else 0.0
                measure_here(cases, provider, way, plan, best_canary_ms, failures)
                stressor.reached()
        except UserError as error:
            if not loads.under_load:
                raise
            failures.add(load_in_words(level, name), error)
            continue
        found.cases += cases
        found.notices += [notice for notice in now.notices if notice not in found.notices]
        if not loads.under_load:
            found.load = now.metrics or ("idle" if other is None else "as the probe met it")
    return found


def measure_here(cases: Sequence[Case], execution_provider: str, way: WayOfRunning, plan: MeasuringPlan,
                 best_canary_ms: float, failures: Failures) -> None:
    """Times every case as planned, all cases in each round, so that drift hits all alike.

    Before each it waits a while for the machine to be as fast as it was when the dataset was measured, by the canary.

    Args:
        best_canary_ms: the canary then; 0 where that is not known, or where the device is not idle: no waiting.
    """
    from benchmark.canary import canary_ms, wait_until_steady

    warmed = False
    for case in cli.track([case for _ in range(plan.rounds) for case in cases], "measuring"):
        if case.failed:
            continue
        with failures.costing(case.name, case):
            if not warmed:  # the first session loads the runtime, whose time and memory are no model's
                measure_once(Case(record=case.record, path=case.path), execution_provider, way, 0.0, watch_host=False)
                warmed = True
            canary = wait_until_steady(lambda: canary_ms(execution_provider), best_canary_ms, STEADY, plan.patience_s)
            if best_canary_ms:
                case.canaries.append(canary / best_canary_ms)
            measure_once(case, execution_provider, way, plan.budget_s, watch_host=execution_provider == "cuda" and case.idle)


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
    runner = open_runner(case.path, execution_provider, dims=case.record.dims_run, io=way.io, cuda_graph=way.cuda_graph,
                         static=case.record.static)
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


def recorded_canary_ms(workspace: Workspace, target: str, execution_provider: str) -> float:
    """The canary's shortest time in the idle blocks of the target's dataset, if it was measured on this machine; else 0."""
    from benchmark.dataset import load_model_table, model_table_path
    from utils.fingerprint import machine

    if not model_table_path(workspace.dataset(target)).exists():
        return 0.0
    rows = load_model_table(workspace, target)
    here = rows[(rows["Level"] == 0) & (rows["Machine"] == machine(execution_provider).uuid)]
    return float(here["Canary_ms"].min()) if len(here) else 0.0
