"""Times of repeated runs: by CUDA events on a GPU, by the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from utils.lazy import torch


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
