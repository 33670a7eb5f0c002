"""How often to run what is timed, and the times of repeated runs: by CUDA events on a GPU, by the host's clock on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from hase.utils.frozen import Frozen
from hase.utils.lazy import torch


class Effort(Frozen):
    """How long to measure one thing.

    Attributes:
        warmup: untimed runs at first.
        warmup_s: how long these last at least, in seconds: threads that slept take a while to spread over the processors.
        budget_s: seconds of timed runs.
        least_runs, most_runs: limits of the number of timed runs.
    """

    warmup: int = 2
    warmup_s: float = 0.0
    budget_s: float = 0.05
    least_runs: int = 5
    most_runs: int = 50

    def part(self, parts: int) -> Effort:
        """An effort of which `parts` together are as this one, or a little more."""
        return self.model_copy(update={"budget_s": self.budget_s / parts, "least_runs": math.ceil(self.least_runs / parts),
                                       "most_runs": math.ceil(self.most_runs / parts)})

    def runs(self, one_run_s: float) -> int:
        """The number of runs that fits the budget when one takes `one_run_s` seconds."""
        return max(self.least_runs, min(self.most_runs, int(self.budget_s / max(one_run_s, 1e-6))))


def wait_for(device: str) -> None:
    """Waits until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


class Stopwatch:
    """Takes the time between two moments of the device's work, in ms; read it after `wait_for`."""

    def __init__(self, device: str) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        self._times_s = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._times_s[which] = time.perf_counter()

    @property
    def began(self) -> bool:
        """Whether a GPU has come to the first moment; False on a CPU, where nothing runs ahead."""
        return bool(self._events) and bool(self._events[0].query())

    @property
    def ms(self) -> float:
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1]))
        return 1e3 * (self._times_s[1] - self._times_s[0])


def time_runs_ms(run: Callable[[], Any], count: int, device: str) -> list[float]:
    """The time of each of `count` runs in ms, from when the host begins until the device is done."""
    times_ms = []
    for _ in range(count):
        watch = Stopwatch(device)
        wait_for(device)
        watch.start()
        run()
        watch.stop()
        wait_for(device)
        times_ms.append(watch.ms)
    return times_ms


def time_warm_runs_ms(run: Callable[[], Any], warmup: int, runs: int, device: str = "cpu") -> list[float]:
    """The times of runs as `time_runs_ms` gives them, after some that do not count."""
    time_runs_ms(run, warmup, device)
    return time_runs_ms(run, runs, device)
