"""The models that an evaluation is about: made ready, predicted, and measured here or found in the dataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ort_analysis.records import ModelRecord
from utils import cli
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import Workspace

if TYPE_CHECKING:
    from inference.prediction import Prediction, WayOfRunning
    from overlap_simulator import OtherWork

log = get_logger("evaluator")

WARMUP = 3
LEAST_RUNS, MOST_RUNS = 10, 500  # of a session on an idle GPU
STEADY = 0.10  # how much slower than its best the canary may be before a measurement


@dataclass
class Case:
    """One model to evaluate: its record, its file where it is to run, what else runs (by metrics, and as a probe met it), and
    what was found; `failed` drops it."""

    record: ModelRecord
    path: Path | None = None
    level: float = 0.0
    background: str = ""
    load: Mapping[str, float] = field(default_factory=dict)
    other: OtherWork | None = None
    with_lookup: Prediction | None = None
    strict: Prediction | None = None
    samples_ms: list[float] = field(default_factory=list)
    memory_mib: float | None = None
    canaries: list[float] = field(default_factory=list)
    failed: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing else is to run."""
        return not self.level and not self.load and self.other is None

    def beside(self, level: float, background: str, load: Mapping[str, float], other: OtherWork | None) -> Case:
        """The same model, not measured yet, beside other work."""
        return Case(record=self.record, path=self.path, level=level, background=background, load=load, other=other)


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
            measure_once(case, execution_provider, way, budget_s, watch_host=execution_provider == "cuda" and case.idle)
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


def predict_case(case: Case, target: str, way: WayOfRunning, workspace: Workspace, force: bool, failures: Failures) -> None:
    """Fills in a case's predictions: with look-up, and strict."""
    from inference.prediction import predict

    try:
        case.with_lookup, case.strict = (
            predict(case.record, target=target, strict=strict, load=case.load, way=way, workspace=workspace, force=force,
                    other=case.other)
            for strict in (False, True))
    except UserError as error:
        failures.add_case(case, error)


def recorded_canary_ms(workspace: Workspace, target: str, execution_provider: str) -> float:
    """The canary's shortest time in the idle blocks of the target's dataset, if it was measured on this machine; else 0."""
    from benchmark.dataset import load_model_table, model_table_path
    from utils.fingerprint import machine

    if not model_table_path(workspace.dataset(target)).exists():
        return 0.0
    rows = load_model_table(workspace, target)
    here = rows[(rows["Level"] == 0) & (rows["Machine"] == machine(execution_provider).uuid)]
    return float(here["Canary_ms"].min()) if len(here) else 0.0
