"""The canary: a fixed piece of work that shows how fast the machine is at this moment.

It is timed before and after each block of measurements. If the two times differ, the machine was disturbed and the block is
measured again. What the work is, is the runtime's choice (runtimes/ort/canary.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from measuring.effort import Effort

IDLE_EFFORT = Effort(warmup=2, warmup_s=0.02, budget_s=0.03, least_runs=15, most_runs=15)
LOADED_EFFORT = Effort(warmup=2, warmup_s=0.02, budget_s=0.3, least_runs=15, most_runs=300)
PAUSE_S = 0.5


@dataclass
class Canary:
    """The canary under one load.

    Attributes:
        run_ms: runs the canary a few times and returns the times in ms. Its argument says whether the device is loaded, which
            takes more runs (LOADED_EFFORT in place of IDLE_EFFORT).
        loaded: whether other work is kept running on the device.
        best_ms: the shortest time so far; 0 while none is known, and under load, where it varies.
    """

    run_ms: Callable[[bool], Sequence[float]]
    loaded: bool = False
    best_ms: float = 0.0

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
        return wait_until_steady(self.now_ms, self.best_ms, tolerance, patience_s)


def wait_until_steady(time_ms: Callable[[], float], reference_ms: float, tolerance: float, patience_s: float) -> float:
    """Times the canary until the machine is as fast as at its best, or until patience ends; returns the last time in ms.

    Args:
        time_ms: times the canary.
        reference_ms: the canary's time on the machine at its best; 0 where that is not known: no waiting.
        tolerance: how much slower still counts as steady, a ratio.
        patience_s: how long to wait at most.
    """
    until = time.monotonic() + patience_s
    found_ms = time_ms()
    while reference_ms and found_ms > reference_ms * (1 + tolerance) and time.monotonic() < until:
        time.sleep(PAUSE_S)
        found_ms = time_ms()
    return found_ms
