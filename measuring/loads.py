"""The measuring loop: blocks of units under one load after another, each block kept as soon as it is measured.

The loop knows units only by their ids. Its callers know what they are, and how to time one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from measuring.bench import Bench, Canary, MetricsWindow, close_window, open_window, read_window
from measuring.pending import Planned, Unit
from measuring.stress import Stress, stress
from records.backgrounds import COMPUTE, Background
from records.blocks import Block, Journal
from records.measurement import BELOW_BEST, BUSY_ADMITTED, CPU_BUSY, Measurement
from utils import cli
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import Workspace
from utils.timing import pause

log = get_logger("collector")
U = TypeVar("U", bound=Unit)
MOST_FRUITLESS = 3  # blocks in a row of which nothing is kept, since the machine lacks something
StressLevel = tuple[float, Background | None]  # the share of time, 0–1, and what the device is busy with; None on an idle one
IDLE: tuple[StressLevel, ...] = ((0.0, None),)
Start = Callable[[float, Background | None], AbstractContextManager[Stress]]


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


def without_interrupted(block: Block) -> tuple[Block, dict[str, str]]:
    """A block without the units of which some measurement was interrupted; and why, by the ids of these units."""
    interrupted = {m.id: m.error for m in block.measurements if m.status == "interrupted"}
    if not interrupted:
        return block, interrupted
    kept = tuple(m for m in block.measurements if m.id not in interrupted)
    return block.model_copy(update={"measurements": kept}), interrupted


def describe_load(level: float, background: str) -> str:
    """`level 0`, `level 0.3, compute`."""
    return f"level {level:g}" + (f", {background}" if background else "")


def best_canary_ms(blocks: Iterable[Block]) -> float:
    """The canary's shortest time in some blocks, in ms; 0 where there are none."""
    return min((min(block.canary_before_ms, block.canary_after_ms) for block in blocks), default=0.0)


@dataclass
class Totals(Generic[U]):
    """What was measured: the units, the blocks (of each its steadiest attempt), how many of these were unsteady, the seconds
    that measuring took, and how many units were left because the time was over. `interrupted`: the ids of units that are to be
    measured again, and why."""

    units: list[U] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    unsteady_blocks: int = 0
    measuring_s: float = 0.0
    left: int = 0
    interrupted: dict[str, str] = field(default_factory=dict)


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


def measure_loads(bench: Bench, blocks_of: Callable[[tuple[float, str], Sequence[Block]], Sequence[Planned[U]]],
                  time_units: Callable[[Sequence[U], float], Iterable[Measurement]], journal: Journal,
                  loads: Iterable[StressLevel] = IDLE, start: Start | None = None, stop_at_s: float = math.inf) -> Totals[U]:
    """Measures under each load what `blocks_of` says, and adds every block to the journal.

    To resume after a kill is to call it again: `blocks_of` plans what the journal does not hold (as `plan_blocks` does).

    Args:
        bench: what is measured with.
        blocks_of: the blocks to measure under a load (its level and the name of its background), of which the given blocks are
            measured already.
        time_units: times the units of a block at a level. One that fails is a measurement that says so, and no exception.
        journal: keeps the blocks.
        loads: one after another; by default the idle device alone.
        start: starts one of them; by default `started`.
        stop_at_s: the time (of `time.monotonic`) after which no block begins. What is left, a later call measures.

    Raises:
        UserError: metrics, probe or canary can't be read, a load can't be had, or block after block was interrupted.
    """
    start = start or partial(started, device=bench.device)
    totals = Totals[U]()
    for level, background in loads:
        load = (level, background.name if background else "")
        measured = [block for block in journal.blocks if block.load == load]
        todo = blocks_of(load, measured)
        if not todo:
            continue
        best_ms = best_canary_ms(block for block in measured if block.machine == bench.machine_uuid)
        with start(level, background) as stressor:
            under = RunningLoad(Canary(bench.canary_ms, bool(level), 0.0 if level else best_ms,
                                       None if level else bench.busy), stressor, *load)
            _LoadMeasured(bench, time_units, under, journal, totals, stop_at_s).measure(todo)
    if totals.interrupted:
        log.warning("%d units were interrupted: the machine lacked disk space, memory or open files, or a process could not "
                    "use its device, or was ended from outside; run again to measure them: %s", len(totals.interrupted),
                    cli.first_of(list(totals.interrupted)))
    if totals.unsteady_blocks:
        count = len(totals.blocks)
        log.warning("%d of %d block%s kept, and marked, although the machine was unsteady by more than %.0f %% (by up to "
                    "%.0f %%)", totals.unsteady_blocks, count, "s" * (count != 1), 100 * bench.steadiness.drift,
                    100 * max(block.drift for block in totals.blocks))
    return totals


@dataclass
class _LoadMeasured(Generic[U]):
    """Measures the blocks of one load.

    Attributes:
        bench, time_units, journal, stop_at_s: as for `measure_loads`.
        under: the load.
        totals: to which is added what was measured.
        fruitless: blocks in a row of which nothing was kept.
        steadiest: of each block, by key, the steadiest attempt so far.
    """

    bench: Bench
    time_units: Callable[[Sequence[U], float], Iterable[Measurement]]
    under: RunningLoad
    journal: Journal
    totals: Totals[U]
    stop_at_s: float
    fruitless: int = 0
    steadiest: dict[str, Block] = field(default_factory=dict)

    def measure(self, todo: Sequence[Planned[U]]) -> None:
        """Each block once; then those during which the machine was unsteady again, since a disturbance has often passed by
        then. Every attempt is kept at once; of several, the steadiest counts."""
        steadiness = self.bench.steadiness
        attempts = steadiness.attempts_under_load if self.under.level else steadiness.attempts
        text = _described((self.under.level, self.under.background), self.stop_at_s)
        for planned in cli.progress(_until(self.stop_at_s, todo, self.totals), text, len(todo)):
            self._attempt(planned, 1)
        for attempt in range(2, attempts + 1):
            again = [planned for planned in todo if planned.key in self.steadiest and self.steadiest[planned.key].unsteady]
            for planned in cli.progress(_until(self.stop_at_s, again), f"{text}, once more", len(again)) if again else ():
                self._attempt(planned, attempt)
        self.totals.blocks += self.steadiest.values()
        self.totals.unsteady_blocks += sum(block.unsteady for block in self.steadiest.values())

    def _attempt(self, planned: Planned[U], attempt: int) -> None:
        if block := self._block(planned, attempt):
            self.journal.append(block)
            before = self.steadiest.get(planned.key)
            if before is None or block.drift < before.drift:
                self.steadiest[planned.key] = block

    def _block(self, planned: Planned[U], attempt: int) -> Block | None:
        """One attempt at a block, without the units that were interrupted; None where it would have none.

        Raises:
            UserError: block after block was interrupted.
        """
        began_s = time.monotonic()
        block, interrupted = without_interrupted(measure_block(
            self.bench, planned.key, partial(self.time_units, planned.units, self.under.level), self.under, attempt))
        self.totals.measuring_s += time.monotonic() - began_s
        if attempt == 1:
            self.totals.interrupted |= interrupted
            self.totals.units += [unit for unit in planned.units if unit.id not in interrupted]
        self.fruitless = 0 if block.measurements or not interrupted else self.fruitless + 1
        if self.fruitless == MOST_FRUITLESS:
            raise UserError(f"the last {self.fruitless} blocks were interrupted: {interrupted[next(iter(interrupted))]}; "
                            "free what is lacking and run the same command again: what was finished is kept")
        return None if self.fruitless else block


def _until(stop_at_s: float, todo: Sequence[Planned[U]], totals: Totals[U] | None = None) -> Iterator[Planned[U]]:
    """The blocks to measure, one after another until the time is over; counts the units of those that are left in `totals`."""
    for place, planned in enumerate(todo):
        if time.monotonic() >= stop_at_s:
            if totals is not None:
                totals.left += sum(len(block.units) for block in todo[place:])
            return
        yield planned


def _described(load: tuple[float, str], stop_at_s: float) -> str:
    """The text of the progress bar."""
    if math.isinf(stop_at_s):
        return describe_load(*load)
    return f"{describe_load(*load)}, for {max(stop_at_s - time.monotonic(), 0.0):.0f} s at most"
