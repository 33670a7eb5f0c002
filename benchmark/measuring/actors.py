"""What measures blocks: actors, each alone on one device.

The driver (benchmark/load/loads.py) plans the blocks, hands them out and keeps them; an actor only measures them. Usually there is
one actor, in the driver's own process (`LocalActor`); on a cluster there is one for each device
(benchmark/collecting/ray_actors.py). Both are `Actors` to the driver, and both measure with a `Measurer`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from hase.benchmark.load.stress import Stress, stress
from hase.benchmark.measuring.bench import Bench, Canary, MetricsWindow, close_window, open_window, read_window
from hase.benchmark.measuring.pending import Planned, Unit
from hase.records.backgrounds import COMPUTE, Background
from hase.records.blocks import Block
from hase.records.measurement import BELOW_BEST, BUSY_ADMITTED, CPU_BUSY, Measurement
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.timing import pause

log = get_logger("collector")
U = TypeVar("U", bound=Unit)
Start = Callable[[float, Background | None], AbstractContextManager[Stress]]
TimeUnits = Callable[[Sequence[U], float], Iterable[Measurement]]


@dataclass
class RunningLoad:
    """The load under which blocks are measured.

    Attributes:
        canary: under this load.
        stress: what keeps the device busy.
        level: share of the time that it is asked to, 0–1.
        background: the name of what it is busy with; "" on an idle device.
    """

    canary: Canary
    stress: Stress
    level: float = 0.0
    background: str = ""


def idle(bench: Bench, best_canary_ms: float = 0.0) -> RunningLoad:
    """An idle device; `best_canary_ms` is the shortest time that the canary ever took on it, 0 where that is not known."""
    return RunningLoad(Canary(bench.canary_ms, best_ms=best_canary_ms, busy=bench.busy), Stress(0.0))


def measure_block(bench: Bench, key: str, time_units: Callable[[], Iterable[Measurement]], under: RunningLoad,
                  attempt: int = 1) -> Block:
    """One block, measured once: canary, window, probe, units with a second window around them, canary. On an idle CPU a third
    window follows, and the busier one of the first and the third counts.

    Args:
        bench: what is measured with.
        key: the block's name.
        time_units: times all units of the block. One that fails is a measurement that says so, and no exception.
        under: what else runs on the device.
        attempt: the number of this attempt at the block, counted from 1.

    Raises:
        UserError: metrics, probe or canary can't be read, or the stressor has ended.
    """
    before_ms = under.canary.steady_ms(bench.steadiness.drift + BELOW_BEST, bench.steadiness.patience_s)
    background = read_window(bench.source, bench.window_s)
    probe = bench.probe()
    opened = open_window(bench.source)
    measurements = tuple(time_units())
    during = close_window(bench.source, opened)
    after_ms = under.canary.now_ms()
    if under.canary.busy is not None:
        background = max(background, read_window(bench.source, bench.window_s), key=_busy)
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


def _busy(window: MetricsWindow) -> float:
    return window.means.get(CPU_BUSY, 0.0)


def describe_load(level: float, background: str) -> str:
    """`level 0`, `level 0.3, compute`."""
    return f"level {level:g}" + (f", {background}" if background else "")


@contextmanager
def started(level: float, background: Background | None, device: str, workspace: Workspace | None = None,
            settle_s: float = 1.0, environment: Mapping[str, str] | None = None) -> Iterator[Stress]:
    """Keeps the device busy, and gives it `settle_s` seconds to settle before anything is measured; level 0 starts nothing.

    Raises:
        UserError: the stressor did not start.
    """
    with stress(level, background or COMPUTE, device, workspace=workspace, environment=environment) as stressor:
        pause(settle_s if level else 0.0)
        yield stressor


class Task(NamedTuple, Generic[U]):
    """A block to be measured now, and the number of this attempt at it, counted from 1."""

    planned: Planned[U]
    attempt: int = 1


class Measurer(Generic[U]):
    """Measures blocks on one device, under one load after another.

    Args:
        bench: what is measured with.
        time_units: times the units of a block at a level. One that fails is a measurement that says so, and no exception.
        start: starts a load; by default `started`.
    """

    def __init__(self, bench: Bench, time_units: TimeUnits[U], start: Start | None = None) -> None:
        self.bench, self._time_units = bench, time_units
        self._start = start or partial(started, device=bench.device)
        self._under: RunningLoad | None = None
        self._stop_at_s = math.inf

    @contextmanager
    def loaded(self, level: float, background: Background | None, best_canary_ms: float = 0.0,
               stop_at_s: float = math.inf) -> Iterator[None]:
        """Puts the device under a load while the block runs.

        Args:
            level, background: the load.
            best_canary_ms: the canary's shortest time so far on this idle device; 0 where it is not known.
            stop_at_s: the time (of `time.monotonic`) after which no block begins.

        Raises:
            UserError: the load can't be had.
        """
        with self._start(level, background) as stressor:
            canary = Canary(self.bench.canary_ms, bool(level), 0.0 if level else best_canary_ms,
                            None if level else self.bench.busy)
            self._under = RunningLoad(canary, stressor, level, background.name if background else "")
            self._stop_at_s = stop_at_s
            try:
                yield
            finally:
                self._under = None

    def measure(self, task: Task[U]) -> Block | None:
        """One attempt at a block under the load that runs; None where the time was over before it began.

        Raises:
            UserError: metrics, probe or canary can't be read, or the stressor has ended.
        """
        under, (planned, attempt) = self._under, task
        if under is None:
            raise RuntimeError("a block is to be measured, but no load was started")
        if time.monotonic() >= self._stop_at_s:
            return None
        return measure_block(self.bench, planned.key, partial(self._time_units, planned.units, under.level), under, attempt)


@dataclass(frozen=True)
class Actor:
    """What the driver knows of an actor.

    Attributes:
        name: for messages; no two actors have one name.
        machine: the identifier of the device that it measures (hase.utils.fingerprint.machine).
        host: where that is; actors of one host may disturb each other.
    """

    name: str
    machine: str
    host: str


class Finished(NamedTuple, Generic[U]):
    """What came of a task.

    Attributes:
        actor, task: who measured what.
        block: None where the time was over before it began, and where the actor is lost.
        seconds: how long the actor measured.
        lost: why the actor can measure nothing more, with all tasks that it had; None where it goes on.
    """

    actor: Actor
    task: Task[U]
    block: Block | None
    seconds: float = 0.0
    lost: UserError | None = None


class Actors(Protocol[U]):
    """The actors that measure for a driver.

    Attributes:
        members: those that can measure; the driver removes those that are lost.
        tasks_each: how many tasks an actor is given at a time, so that it need not wait for the driver between two of them.
    """

    members: list[Actor]
    tasks_each: int

    def loaded(self, level: float, background: Background | None, best_canary_ms: Mapping[str, float],
               stop_at_s: float) -> AbstractContextManager[None]:
        """Puts the devices of all members under a load while the block runs. Members that can't have it are removed.

        Args:
            level, background: the load.
            best_canary_ms: the canary's shortest time so far on an idle device, by machine.
            stop_at_s: the time (of `time.monotonic`) after which no block begins.

        Raises:
            UserError: no member can have it.
        """

    def begin(self, actor: Actor, task: Task[U]) -> None:
        """Gives a member a task; it does one after another."""

    def wait(self) -> Sequence[Finished[U]]:
        """Waits until a task or more have ended. Of an actor that is lost, one task is among them, and no other comes later."""


class LocalActor(Generic[U]):
    """The one actor that measures in the driver's own process (see `Actors`)."""

    tasks_each = 1

    def __init__(self, measurer: Measurer[U]) -> None:
        self._measurer = measurer
        self.members = [Actor("this machine", measurer.bench.machine_uuid, "this machine")]
        self._task: tuple[Actor, Task[U]] | None = None

    def loaded(self, level: float, background: Background | None, best_canary_ms: Mapping[str, float],
               stop_at_s: float) -> AbstractContextManager[None]:
        return self._measurer.loaded(level, background, best_canary_ms.get(self._measurer.bench.machine_uuid, 0.0), stop_at_s)

    def begin(self, actor: Actor, task: Task[U]) -> None:
        self._task = (actor, task)

    def wait(self) -> Sequence[Finished[U]]:
        if self._task is None:
            raise RuntimeError("nothing was begun")
        (actor, task), self._task = self._task, None
        began_s = time.monotonic()
        try:
            block = self._measurer.measure(task)
        except UserError as error:
            return [Finished(actor, task, None, time.monotonic() - began_s, error)]
        return [Finished(actor, task, block, time.monotonic() - began_s)]
