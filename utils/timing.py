"""Timing loops, waiting, and statistics of timings and prediction errors."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from hase.utils.lazy import torch

Floats = npt.NDArray[np.float64]
UNSTABLE_SPREAD = 0.10  # (p75 − p25) / median above which a timing counts as unstable


def pause(seconds: float) -> None:
    """Waits for some seconds, or not at all for 0 or a negative number.

    `time.sleep(0)` would yield the core, which a virtual machine may get back only after milliseconds. If the clock jumps
    back, as in a restored virtual machine, `time.sleep` may fail; a lock's time limit does not.
    """
    if seconds <= 0.0:
        return
    try:
        time.sleep(seconds)
    except OSError:
        threading.Event().wait(seconds)


class TimeSpan:
    """Base of dataclasses with a start and a duration, both in microseconds."""

    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def covered_us(spans: Iterable[TimeSpan]) -> float:
    """The total time in which at least one of the spans runs."""
    covered, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start_us):
        covered += max(0.0, span.end_us - max(span.start_us, until))
        until = max(until, span.end_us)
    return covered


class LatencyStatistics(BaseModel, frozen=True):
    """Statistics of one timing's samples, all in milliseconds."""

    runs: int
    mean_ms: float
    median_ms: float
    p95_ms: float
    std_ms: float
    min_ms: float
    max_ms: float
    spread: float  # interquartile range over the median, a ratio

    @property
    def unstable(self) -> bool:
        return self.spread > UNSTABLE_SPREAD


def summarize(samples_ms: Sequence[float]) -> LatencyStatistics:
    """The statistics of at least one sample (milliseconds)."""
    samples = np.asarray(samples_ms, dtype=float)
    low, median, high = np.percentile(samples, [25, 50, 75])
    return LatencyStatistics(
        runs=samples.size, mean_ms=float(samples.mean()), median_ms=float(median),
        p95_ms=float(np.percentile(samples, 95)), std_ms=float(samples.std(ddof=1)) if samples.size > 1 else 0.0,
        min_ms=float(samples.min()), max_ms=float(samples.max()),
        spread=float((high - low) / median) if median > 0 else 0.0,
    )


class ErrorStatistics(BaseModel, frozen=True):
    """Errors of predictions against measurements; ratios, not per cent."""

    count: int
    mape: float
    median: float
    within_5: float
    within_10: float
    worst: float

    def columns(self) -> dict[str, float]:
        """Columns of a printed table: the count, and errors in per cent."""
        return {"count": self.count, "MAPE_%": 100 * self.mape, "median_%": 100 * self.median,
                "within_10_%": 100 * self.within_10, "worst_%": 100 * self.worst}


def time_weighted_error(predicted_ms: Floats, measured_ms: Floats) -> float:
    """The mean of |predicted − measured| / measured, weighted by the measured time, which is above 0."""
    errors = np.abs(predicted_ms / measured_ms - 1.0)
    return float((errors * measured_ms).sum() / measured_ms.sum())


def error_statistics(predicted: Sequence[float], measured: Sequence[float]) -> ErrorStatistics:
    """Statistics of |predicted − measured| / measured. Both in the same unit, `measured` above 0, at least one value."""
    errors = np.abs(np.asarray(predicted, float) / np.asarray(measured, float) - 1.0)
    return ErrorStatistics(
        count=errors.size, mape=float(errors.mean()), median=float(np.median(errors)),
        within_5=float((errors <= 0.05).mean()), within_10=float((errors <= 0.10).mean()), worst=float(errors.max()),
    )


def turns(least: int = 1, seconds: float = 0.0, most: float = math.inf) -> Iterator[int]:
    """Yields 0, 1, 2, …: at least `least` numbers, then more, up to `most` in all, until `seconds` have passed."""
    until_s, number = time.perf_counter() + seconds, 0
    while number < least or (number < most and time.perf_counter() < until_s):
        yield number
        number += 1


def timed(run: Callable[[], Any], before: Callable[[], Any] | None = None) -> Callable[[], float]:
    """A function that runs `run` once and returns its seconds by the host's clock; `before` is called first, untimed."""
    def run_s() -> float:
        if before is not None:
            before()
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s

    return run_s


def timed_by_events(run: Callable[[], Any]) -> Callable[[], float]:
    """Like `timed`, but by events in an idle GPU's queue: from when the host begins until the GPU is done. Needs torch."""
    def run_s() -> float:
        watch = Stopwatch("cuda")
        wait_for("cuda")
        watch.start()
        run()
        watch.stop()
        wait_for("cuda")
        return 1e-3 * watch.ms

    return run_s


def time_runs_ms(run: Callable[[], Any], runs: int = 1, seconds: float = 0.0, *, warmup: int = 0,
                 by_events: bool = False) -> list[float]:
    """The time of each run in ms: at least `runs` runs, and more while `seconds` have not passed, after `warmup` untimed ones.
    `run` must return when its work is done, unless it is timed `by_events` on a GPU."""
    run_s = timed_by_events(run) if by_events else timed(run)
    for _ in turns(warmup):
        run_s()
    return [1e3 * run_s() for _ in turns(runs, seconds)]


def warm_up(run: Callable[[], Any], runs: int, seconds: float = 0.0) -> tuple[int, float]:
    """Runs at least `runs` times and `seconds` long; returns the number of runs and the seconds of the last one (or 0)."""
    run_s = timed(run)
    times_s = [run_s() for _ in turns(runs, seconds)]
    return len(times_s), times_s[-1] if times_s else 0.0


def wait_for(device: str) -> None:
    """Waits until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


class Stopwatch:
    """Measures the time between two points of the device's work, in ms; read it after `wait_for`."""

    def __init__(self, device: str) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        self._times_s = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, index: int) -> None:
        if self._events:
            self._events[index].record()
        else:
            self._times_s[index] = time.perf_counter()

    @property
    def began(self) -> bool:
        """Whether a GPU has reached the first point; False on a CPU, where nothing runs ahead."""
        return bool(self._events) and bool(self._events[0].query())

    @property
    def ms(self) -> float:
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1]))
        return 1e3 * (self._times_s[1] - self._times_s[0])
