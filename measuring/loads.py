"""The measuring loop: blocks of units under one load after another, each block kept as soon as it is measured.

It knows units only by their ids. What they are, and how one is timed, its callers know.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from measuring.bench import Bench
from measuring.blocks import Conditions, best_canary_ms, describe_load, measure_block
from measuring.canary import Canary
from measuring.pending import Planned, Unit
from measuring.stress import Stress, stress
from records.backgrounds import COMPUTE, Background
from records.blocks import Block
from records.journal import Journal
from records.measurement import Measurement
from utils import cli
from utils.logger import get_logger
from utils.paths import Workspace

log = get_logger("collector")
U = TypeVar("U", bound=Unit)
StressLevel = tuple[float, Background | None]  # the share of time, 0–1, and what the device is busy with; None on an idle one
IDLE: tuple[StressLevel, ...] = ((0.0, None),)
Start = Callable[[float, Background | None], AbstractContextManager[Stress]]


@dataclass
class Totals(Generic[U]):
    """What was measured: the units, the blocks, how many of these were unsteady, the seconds that measuring took, and how many
    units were left because the time was over."""

    units: list[U] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    unsteady_blocks: int = 0
    measuring_s: float = 0.0
    left: int = 0


@contextmanager
def started(level: float, background: Background | None, device: str, workspace: Workspace | None = None,
            settle_s: float = 1.0) -> Iterator[Stress]:
    """Keeps the device busy, and gives it `settle_s` seconds to settle before anything is measured; level 0 starts nothing.

    Raises:
        UserError: the stressor did not start.
    """
    with stress(level, background or COMPUTE, device, workspace=workspace) as stressor:
        time.sleep(settle_s if level else 0.0)
        yield stressor


def measure_loads(bench: Bench, blocks_of: Callable[[tuple[float, str], Sequence[Block]], Sequence[Planned[U]]],
                  time_units: Callable[[Sequence[U], float], Iterable[Measurement]], journal: Journal,
                  loads: Iterable[StressLevel] = IDLE, start: Start | None = None, stop_at_s: float = math.inf) -> Totals[U]:
    """Measures under each load what `blocks_of` says, and adds every block to the journal.

    To resume after a kill is to call it again: `blocks_of` plans what the journal does not hold (see `plan_blocks`).

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
        UserError: metrics, probe or canary can't be read, or a load can't be had.
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
            under = Conditions(Canary(bench.canary_ms, bool(level), 0.0 if level else best_ms), stressor, *load)
            for planned in cli.progress(_until(stop_at_s, todo, totals), _described(load, stop_at_s), len(todo)):
                began_s = time.monotonic()
                block = measure_block(bench, planned.key, partial(time_units, planned.units, level), under)
                totals.measuring_s += time.monotonic() - began_s
                totals.unsteady_blocks += block.drift > bench.steadiness.drift
                totals.units += planned.units
                totals.blocks.append(block)
                journal.append(block)
    if totals.unsteady_blocks:
        log.warning("%d blocks kept although the machine was unsteady by more than %.0f %%", totals.unsteady_blocks,
                    100 * bench.steadiness.drift)
    return totals


def _until(stop_at_s: float, todo: Sequence[Planned[U]], totals: Totals[U]) -> Iterator[Planned[U]]:
    """The blocks to measure, one after another until the time is over; counts the units of those that are left."""
    for place, planned in enumerate(todo):
        if time.monotonic() >= stop_at_s:
            totals.left += sum(len(block.units) for block in todo[place:])
            return
        yield planned


def _described(load: tuple[float, str], stop_at_s: float) -> str:
    """The text of the progress bar."""
    if math.isinf(stop_at_s):
        return describe_load(*load)
    return f"{describe_load(*load)}, for {max(stop_at_s - time.monotonic(), 0.0):.0f} s at most"
