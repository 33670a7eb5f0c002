"""What blocks of measurements are taken with: the device with its canary and its metrics.

The canary is a small, fixed piece of work, the choice of the runtime (benchmark/ort/probes.py). It is timed before and after
each block of measurements. If the two times differ, the machine was disturbed, and the block is measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import psutil
from pydantic import Field

from hase.benchmark.metrics.source import MetricSource, Window, values
from hase.records.measurement import BUSY_ADMITTED, DRIFT_ADMITTED
from hase.records.probe_reading import ProbeReading
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.timing import pause


class Steadiness(Frozen):
    """How steady the machine must be.

    Attributes:
        drift: the largest drift (`Block.drift`, a ratio) of a steady block.
        attempts, attempts_under_load: how often an unsteady block is measured at most, on an idle and on a loaded device.
        patience_s: how long to wait before a block on an idle device for the machine to be as fast as at its best, and a CPU
            free of other work.
    """

    drift: float = Field(DRIFT_ADMITTED, gt=0)
    attempts: int = Field(2, ge=1)
    attempts_under_load: int = Field(2, ge=1)
    patience_s: float = Field(15.0, ge=0)


@dataclass(frozen=True)
class Bench:
    """What blocks on this machine are measured with.

    Attributes:
        device: `cpu` or `cuda`.
        machine_uuid: of this machine (hase.utils.fingerprint.machine).
        canary_ms: runs the canary a few times and returns the times in ms; its argument says whether the device is loaded.
        source: of the device's metrics; None where none are read.
        window_s: how long the window of metrics before a block is.
        probe: reads how long tiny work waits for what else runs on the device; None where that is not read.
        busy: the share of the processors' time that other work takes now, of a CPU that is to be idle; None where that does not
            matter.
        steadiness: how steady the machine must be.

    Raises:
        UserError: `window_s` is too short for the source.
    """

    device: str
    machine_uuid: str
    canary_ms: Callable[[bool], Sequence[float]]
    source: MetricSource | None = None
    window_s: float = 0.5
    probe: Callable[[], ProbeReading | None] = lambda: None
    busy: Callable[[], float] | None = None
    steadiness: Steadiness = field(default_factory=Steadiness)

    def __post_init__(self) -> None:
        if self.source is not None and self.window_s < self.source.minimum_window_s:
            raise UserError(f"window_s {self.window_s:g}: {self.source.name} needs at least "
                            f"{self.source.minimum_window_s:g} s")


PAUSE_S = 0.5
LOOK_S = 0.25  # at what else a CPU does
HALVINGS = 4  # of patience, at most


@dataclass
class Canary:
    """The canary under one load.

    Attributes:
        run_ms: runs the canary a few times and returns the times in ms. Its argument says whether the device is loaded, which
            takes more runs.
        loaded: whether other work is kept running on the device.
        best_ms: the shortest time so far; 0 while none is known, and under load, where it varies.
        busy: the share of the processors' time that other work takes now; None where that does not matter. Work that pauses
            may miss the canary's runs.
    """

    run_ms: Callable[[bool], Sequence[float]]
    loaded: bool = False
    best_ms: float = 0.0
    busy: Callable[[], float] | None = None
    in_vain: int = 0  # how often in a row it waited without the machine's becoming steady

    def now_ms(self) -> float:
        """The time now: the median of a few runs; under load the mean of more runs, because the load comes in bursts."""
        samples_ms = self.run_ms(self.loaded)
        if self.loaded:
            return float(np.mean(samples_ms))
        found_ms = float(np.median(samples_ms))
        self.best_ms = min(found_ms, self.best_ms or found_ms)
        return found_ms

    def steady_ms(self, tolerance: float, patience_s: float) -> float:
        """The time now. On an idle device it first waits until the machine is as fast as at its best, as
        `wait_until_steady` does."""
        if self.loaded:
            return self.now_ms()
        patience_s /= 2 ** min(self.in_vain, HALVINGS)  # a machine that is always disturbed does not hold everything up
        began_s, best_ms = time.monotonic(), self.best_ms
        found_ms = wait_until_steady(self.now_ms, best_ms, tolerance, patience_s, self.busy)
        self.in_vain = self.in_vain + 1 if time.monotonic() - began_s >= patience_s > 0 else 0
        return found_ms


def busy_share() -> float:
    """The share of all processors' time, 0–1, that something takes while this process looks on."""
    return float(psutil.cpu_percent(LOOK_S)) / 100.0


def wait_until_steady(time_ms: Callable[[], float], reference_ms: float, tolerance: float, patience_s: float,
                      busy: Callable[[], float] | None = None) -> float:
    """Times the canary until the machine is as fast as at its best and does nothing else, or until patience ends; returns the
    last time in ms.

    Args:
        time_ms: times the canary.
        reference_ms: the canary's time on the machine at its best; 0 where that is not known: no waiting.
        tolerance: how much slower still counts as steady, a ratio.
        patience_s: how long to wait at most.
        busy: the share of the processors' time that other work takes now; None: what else runs does not matter.
    """
    until = time.monotonic() + patience_s
    found_ms = time_ms()
    while time.monotonic() < until and ((reference_ms and found_ms > reference_ms * (1 + tolerance))
                                        or (busy is not None and patience_s and busy() > BUSY_ADMITTED)):
        pause(PAUSE_S)
        found_ms = time_ms()
    return found_ms


class MetricsWindow(NamedTuple):
    """The mean of each metric by name, and how long the window lasted in seconds."""

    means: dict[str, float]
    seconds: float


NO_WINDOW = MetricsWindow({}, 0.0)


def read_window(source: MetricSource | None, seconds: float) -> MetricsWindow:
    """The means over the next `seconds`; NO_WINDOW at once where there is no source."""
    if source is None:
        return NO_WINDOW
    opened = source.start()
    pause(seconds)
    return close_window(source, opened)


def open_window(source: MetricSource | None) -> Window | None:
    """Opens a window, for `close_window`."""
    return None if source is None else source.start()


def close_window(source: MetricSource | None, opened: Window | None) -> MetricsWindow:
    """The means since the window was opened; NO_WINDOW where it was too short to be valid, or where there is no source."""
    if source is None or opened is None:
        return NO_WINDOW
    seconds = time.monotonic() - opened.began_s
    return NO_WINDOW if seconds < source.minimum_window_s else MetricsWindow(values(source.stop(opened)), seconds)
