"""Statistics of repeated timings and of prediction errors; waiting."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

Floats = npt.NDArray[np.float64]
UNSTABLE_SPREAD = 0.10  # (p75 − p25) / median above which a timing counts as unstable


def pause(seconds: float) -> None:
    """Waits for so many seconds; not at all for 0 or a negative number, where `time.sleep` would give up the core: a virtual
    machine may get it back after milliseconds. Where the clock jumps back meanwhile, as in a restored virtual machine,
    `time.sleep` may fail; a lock's time limit does not."""
    if seconds <= 0.0:
        return
    try:
        time.sleep(seconds)
    except OSError:
        threading.Event().wait(seconds)


class TimeSpan:
    """Base of dataclasses with a start and a duration, in microseconds on some clock."""

    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def covered_us(spans: Iterable[TimeSpan]) -> float:
    """The time in which at least one of the spans runs."""
    covered, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start_us):
        covered += max(0.0, span.end_us - max(span.start_us, until))
        until = max(until, span.end_us)
    return covered


class LatencyStatistics(BaseModel):
    """Statistics of one timing's samples, all in milliseconds."""

    model_config = ConfigDict(frozen=True)

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


class ErrorStatistics(BaseModel):
    """Errors of predictions against measurements; ratios, not per cent."""

    model_config = ConfigDict(frozen=True)

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
    """The mean of |predicted − measured| / measured, each weighted by its measured time, which is above 0."""
    errors = np.abs(predicted_ms / measured_ms - 1.0)
    return float((errors * measured_ms).sum() / measured_ms.sum())


def error_statistics(predicted: Sequence[float], measured: Sequence[float]) -> ErrorStatistics:
    """Relative errors |predicted − measured| / measured, summarised. Both in the same unit, `measured` above 0, at least
    one."""
    errors = np.abs(np.asarray(predicted, float) / np.asarray(measured, float) - 1.0)
    return ErrorStatistics(
        count=errors.size, mape=float(errors.mean()), median=float(np.median(errors)),
        within_5=float((errors <= 0.05).mean()), within_10=float((errors <= 0.10).mean()), worst=float(errors.max()),
    )
