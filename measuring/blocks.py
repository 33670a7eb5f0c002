"""Measures one block: units between two canaries, with windows of metrics, and again where the machine was unsteady."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from measuring.bench import Bench
from measuring.canary import Canary
from measuring.stress import Stress
from measuring.window import close_window, open_window, read_window
from records.blocks import Block
from records.labels import BELOW_BEST
from records.measurement import Measurement
from utils.logger import get_logger

log = get_logger("collector")


@dataclass
class Conditions:
    """What blocks are measured under.

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


def idle(bench: Bench, best_canary_ms: float = 0.0) -> Conditions:
    """An idle device; `best_canary_ms` is the shortest time that the canary ever took on it, 0 where that is not known."""
    return Conditions(Canary(bench.canary_ms, best_ms=best_canary_ms), Stress(0.0, None))


def measure_block(bench: Bench, key: str, time_units: Callable[[], Iterable[Measurement]], under: Conditions) -> Block:
    """One block, measured until it is steady or the attempts are used up; the steadiest attempt is kept.

    Args:
        bench: what is measured with.
        key: the block's name.
        time_units: times all units of the block. One that fails is a measurement that says so, and no exception.
        under: what else runs on the device.

    Raises:
        UserError: metrics, probe or canary can't be read, or the stressor has ended.
    """
    attempts = bench.steadiness.attempts_under_load if under.level else bench.steadiness.attempts
    unsteady: list[Block] = []
    while len(unsteady) < attempts:
        block = _attempt(bench, key, time_units, under, len(unsteady) + 1)
        if block.drift <= bench.steadiness.drift:
            return block
        unsteady.append(block)
        log.info("%s at %s: the machine was unsteady by %.0f %% (canary %.3f to %.3f ms)%s", key,
                 describe_load(*block.load), 100 * block.drift, block.canary_before_ms, block.canary_after_ms,
                 "; measuring again" if len(unsteady) < attempts else "")
    return min(unsteady, key=lambda block: block.drift).model_copy(update={"attempts": attempts})


def _attempt(bench: Bench, key: str, time_units: Callable[[], Iterable[Measurement]], under: Conditions, number: int) -> Block:
    """One attempt at a block: window, probe, canary, units with a second window around them, canary."""
    background = read_window(bench.source, bench.window_s)
    probe = bench.probe()
    before_ms = under.canary.steady_ms(bench.steadiness.drift + BELOW_BEST, bench.steadiness.patience_s)
    opened = open_window(bench.source)
    measurements = tuple(time_units())
    during = close_window(bench.source, opened)
    return Block(level=under.level, background_name=under.background, key=key, background=background.means,
                 background_s=round(background.seconds, 6), during=during.means, during_s=round(during.seconds, 6),
                 canary_before_ms=before_ms, canary_after_ms=under.canary.now_ms(), canary_best_ms=under.canary.best_ms,
                 attempts=number, stress=under.stress.reached(), probe=probe, machine=bench.machine_uuid,
                 measurements=measurements)


def describe_load(level: float, background: str) -> str:
    """`level 0`, `level 0.3, compute`."""
    return f"level {level:g}" + (f", {background}" if background else "")


def best_canary_ms(blocks: Iterable[Block]) -> float:
    """The canary's shortest time in some blocks, in ms; 0 where there are none."""
    return min((min(block.canary_before_ms, block.canary_after_ms) for block in blocks), default=0.0)
