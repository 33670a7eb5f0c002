"""Measures one block on one device: canary, window of metrics, the units within a second window, canary.

The canary is a small, fixed piece of work that the runtime chooses (benchmark/ort/probes.py). If its time before and after a
block differs, the machine was disturbed, and benchmark/measuring/driver.py repeats the block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import psutil
from pydantic import Field

from hase.benchmark.load.stress import Stress, stress
from hase.benchmark.metrics.source import MetricSource, OpenWindow, values
from hase.records.measurement import (
    BELOW_BEST,
    BUSY_ADMITTED,
    COMPUTE,
    CPU_BUSY,
    DRIFT_ADMITTED,
    Background,
    Block,
    Measurement,
)
from hase.records.probe_reading import ProbeReading
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.processes import WorkerFailed, WorkerProcess
from hase.utils.timing import pause

PAUSE_S = 0.5  # between two canaries while the machine is disturbed
LOOK_S = 0.25  # how long the CPU's use is watched for `busy_share`
MOST_HALVINGS = 4  # of the patience

log = get_logger("collector")


class Unit(Protocol):
    """Anything that can be measured; its measurements carry its id."""

    @property
    def id(self) -> str: ...


U = TypeVar("U", bound=Unit)
U_co = TypeVar("U_co", bound=Unit, covariant=True)
StartLoad = Callable[[float, Background | None], AbstractContextManager[Stress]]
TimeUnits = Callable[[Sequence[U], float], Iterable[Measurement]]  # at a level; a unit that fails is a failed measurement


class PlannedBlock(NamedTuple, Generic[U_co]):
    """A block to measure. With `shares_host`, another device of the host may measure such a block meanwhile."""

    key: str
    units: Sequence[U_co]
    shares_host: bool = False


class Attempt(NamedTuple, Generic[U]):
    """A block to measure now, and the number of this attempt (from 1)."""

    planned: PlannedBlock[U]
    number: int = 1


class Steadiness(Frozen):
    """How steady the machine must be."""

    drift: float = Field(DRIFT_ADMITTED, gt=0)  # the largest drift (`Block.drift`, a ratio) of a steady block
    attempts: int = Field(2, ge=1)  # at an unsteady block on an idle device
    attempts_under_load: int = Field(2, ge=1)
    patience_s: float = Field(15.0, ge=0)  # to wait before a block on an idle device until the machine is at its best


@dataclass(frozen=True)
class Bench:
    """What blocks are measured with on this machine. Raises UserError if `window_s` is too short for the source."""

    device: str  # `cpu` or `cuda`
    machine_uuid: str  # see hase.utils.fingerprint.machine
    canary_ms: Callable[[bool], Sequence[float]]  # runs the canary a few times; more often on a loaded device (True)
    source: MetricSource | None = None  # of the device's metrics
    window_s: float = 0.5  # length of the window of metrics before a block
    probe: Callable[[], ProbeReading | None] = lambda: None  # how long tiny work waits for other work on the device
    busy: Callable[[], float] | None = None  # share of the processors' time in other work; None: irrelevant
    steadiness: Steadiness = field(default_factory=Steadiness)

    def __post_init__(self) -> None:
        if self.source is not None and self.window_s < self.source.minimum_window_s:
            raise UserError(f"window_s {self.window_s:g}: {self.source.name} needs at least "
                            f"{self.source.minimum_window_s:g} s")


@dataclass
class Canary:
    """The canary under one load. Only an idle device has a best time; under load the time varies."""

    run_ms: Callable[[bool], Sequence[float]]
    loaded: bool = False
    best_ms: float = 0.0  # the shortest time so far; 0: not known
    busy: Callable[[], float] | None = None  # as in a Bench: work that pauses may miss the canary's runs
    in_vain: int = 0  # consecutive waits in vain for a steady machine

    def now_ms(self) -> float:
        """Its current time: the median of a few runs; under load, which comes in bursts, the mean of more runs."""
        samples_ms = self.run_ms(self.loaded)
        if self.loaded:
            return float(np.mean(samples_ms))
        found_ms = float(np.median(samples_ms))
        self.best_ms = min(found_ms, self.best_ms or found_ms)
        return found_ms

    def steady_ms(self, tolerance: float, patience_s: float) -> float:
        """Its current time; on an idle device it first waits for the machine (`wait_until_steady`)."""
        if self.loaded:
            return self.now_ms()
        patience_s /= 2 ** min(self.in_vain, MOST_HALVINGS)  # less patience with a machine that is always disturbed
        began_s, best_ms = time.monotonic(), self.best_ms
        found_ms = wait_until_steady(self.now_ms, best_ms, tolerance, patience_s, self.busy)
        self.in_vain = self.in_vain + 1 if time.monotonic() - began_s >= patience_s > 0 else 0
        return found_ms


def busy_share() -> float:
    """Share of all processors' time (0–1) that is in use while this process watches."""
    return float(psutil.cpu_percent(LOOK_S)) / 100.0


def wait_until_steady(time_ms: Callable[[], float], reference_ms: float, tolerance: float, patience_s: float,
                      busy: Callable[[], float] | None = None) -> float:
    """Times the canary until the machine is idle and as fast as at its best, or patience ends; returns the last time in ms.
    `reference_ms` is the canary's best time (0: unknown, no waiting), `tolerance` the accepted ratio above it."""
    until = time.monotonic() + patience_s
    found_ms = time_ms()
    while time.monotonic() < until and ((reference_ms and found_ms > reference_ms * (1 + tolerance))
                                        or (busy is not None and patience_s and busy() > BUSY_ADMITTED)):
        pause(PAUSE_S)
        found_ms = time_ms()
    return found_ms


class MetricsWindow(NamedTuple):
    """Mean of each metric by name, and the window's length in seconds."""

    means: dict[str, float]
    seconds: float


NO_WINDOW = MetricsWindow({}, 0.0)


def read_window(source: MetricSource | None, seconds: float) -> MetricsWindow:
    """Means over the next `seconds`; without a source, NO_WINDOW at once."""
    if source is None:
        return NO_WINDOW
    opened = source.start()
    pause(seconds)
    return close_window(source, opened)


def close_window(source: MetricSource | None, opened: OpenWindow | None) -> MetricsWindow:
    """Means since the window was opened; NO_WINDOW without a source, or if the window is too short."""
    if source is None or opened is None:
        return NO_WINDOW
    seconds = time.monotonic() - opened.began_s
    return NO_WINDOW if seconds < source.minimum_window_s else MetricsWindow(values(source.stop(opened)), seconds)


@dataclass
class RunningLoad:
    """The load under which blocks are measured."""

    canary: Canary  # under this load
    stress: Stress  # what keeps the device busy
    level: float = 0.0  # wanted share of time, 0–1
    background: str = ""  # the name of its work; "" on an idle device


def idle(bench: Bench, best_canary_ms: float = 0.0) -> RunningLoad:
    """An idle device; `best_canary_ms` is the canary's shortest time on it so far (0: unknown)."""
    return RunningLoad(Canary(bench.canary_ms, best_ms=best_canary_ms, busy=bench.busy), Stress(0.0))


def describe_load(level: float, background: str) -> str:
    """Text for a load: `level 0` or `level 0.3, compute`."""
    return f"level {level:g}" + (f", {background}" if background else "")


def measure_block(bench: Bench, key: str, time_units: Callable[[], Iterable[Measurement]], under: RunningLoad,
                  attempt: int = 1) -> Block:
    """Measures one block once. On an idle CPU a third window follows, and the busier of the first and third counts."""
    with _canary_needed():
        before_ms = under.canary.steady_ms(bench.steadiness.drift + BELOW_BEST, bench.steadiness.patience_s)
    background = read_window(bench.source, bench.window_s)
    probe = bench.probe()
    opened = bench.source.start() if bench.source else None
    measurements = tuple(time_units())
    during = close_window(bench.source, opened)
    with _canary_needed():
        after_ms = under.canary.now_ms()
    if under.canary.busy is not None:
        background = max(background, read_window(bench.source, bench.window_s),
                         key=lambda window: window.means.get(CPU_BUSY, 0.0))
    block = Block(level=under.level, background_name=under.background, key=key, background=background.means,
                  background_s=round(background.seconds, 6), during=during.means, during_s=round(during.seconds, 6),
                  canary_before_ms=before_ms, canary_after_ms=after_ms, canary_best_ms=under.canary.best_ms,
                  drift_admitted=bench.steadiness.drift, attempts=attempt, stress=under.stress.reached(), probe=probe,
                  machine=bench.machine_uuid, measurements=measurements)
    if block.unsteady:
        log.debug("%s at %s: the machine was unsteady by %.0f %% (canary %.3f to %.3f ms%s)", key, describe_load(*block.load),
                  100 * block.drift, block.canary_before_ms, block.canary_after_ms,
                  f"; {block.busy:.0%} busy with other work" if block.busy > BUSY_ADMITTED else "")
    return block


@contextmanager
def _canary_needed() -> Iterator[None]:
    try:
        yield
    except WorkerFailed as error:
        raise UserError(f"the canary, a fixed piece of work, does not run: {error}") from None


@contextmanager
def started(level: float, background: Background | None, device: str, workspace: Workspace | None = None,
            settle_s: float = 1.0, environment: Mapping[str, str] | None = None,
            workers: Iterable[WorkerProcess[Any, Any]] = ()) -> Iterator[Stress]:
    """Keeps the device busy once all `workers` are loaded, then waits `settle_s` seconds; level 0 starts nothing."""
    for worker in workers:
        worker.wait()
    with stress(level, background or COMPUTE, device, workspace=workspace, environment=environment) as stressor:
        pause(settle_s if level else 0.0)
        yield stressor


class Measurer(Generic[U]):
    """Measures blocks on one device, under one load after another. `start` starts a load (default: `started`)."""

    def __init__(self, bench: Bench, time_units: TimeUnits[U], start: StartLoad | None = None) -> None:
        self.bench, self._time_units = bench, time_units
        self._start = start or partial(started, device=bench.device)
        self._under: RunningLoad | None = None
        self._stop_at_s = math.inf

    @contextmanager
    def loaded(self, level: float, background: Background | None, best_canary_ms: float = 0.0,
               stop_at_s: float = math.inf) -> Iterator[None]:
        """Puts the device under a load during the block; no measurement begins after `stop_at_s` (`time.monotonic`)."""
        with self._start(level, background) as stressor:
            canary = Canary(self.bench.canary_ms, bool(level), 0.0 if level else best_canary_ms,
                            None if level else self.bench.busy)
            self._under = RunningLoad(canary, stressor, level, background.name if background else "")
            self._stop_at_s = stop_at_s
            try:
                yield
            finally:
                self._under = None

    def measure(self, attempt: Attempt[U]) -> Block | None:
        """One attempt at a block under the current load; None if time was over before it began. Raises as `measure_block`."""
        under, (planned, number) = self._under, attempt
        if under is None:
            raise RuntimeError("a block is to be measured, but no load was started")
        if time.monotonic() >= self._stop_at_s:
            return None
        return measure_block(self.bench, planned.key, partial(self._time_units, planned.units, under.level), under, number)
