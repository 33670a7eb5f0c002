"""Defines a source of metrics, and checks which of its values can be trusted.

GPUs have been seen (issues of dcgm-exporter) to report 4294967295, blanks, profiling fields that stay 0 under load, and fields
that no longer change. None of these may become a feature, so each raises `Unsound` with the reason.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hase.benchmark.metrics.names import FIELDS, is_blank
from hase.utils.errors import UserError
from hase.utils.timing import pause

OVERSHOOT = 1.02  # counters and clock are read at different moments, so a share may exceed 1
MANY = 10  # so many equal samples in sequence are no coincidence
PROFILED = tuple(field for field in FIELDS if field.startswith("DCGM_FI_PROF_"))  # for a field that counts cycles or bytes
AT_WORK = ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_OCCUPANCY")  # all above 0, or none
UTILISATION = "DCGM_FI_DEV_GPU_UTIL"
LOOKS_BACK = (UTILISATION, "DCGM_FI_DEV_MEM_COPY_UTIL")  # read if there is nothing better, or if named
LOOKS_BACK_S = 1.0  # at most: NVML computes these two over a sixth of a second to a second
NOISE = {"ratio": 0.01, "bytes/s": 1e6}  # below this, values are few counts, and repeat
BUSY = 0.1  # a share of time above the noise


class Unsound(UserError):
    """Impossible samples. `fact` says which and why; the message adds what to do."""

    def __init__(self, fact: str) -> None:
        super().__init__(f"{fact}; measure again, and leave this metric out of the config if it stays so")
        self.fact = fact


def checked(field: str, value: float) -> float:
    """Returns `value`, at most the field's limit. Raises Unsound if it is blank, NaN, infinite, negative or too large."""
    limit = FIELDS[field].maximum
    if is_blank(value):
        raise Unsound(f"metric {field}: the device reports {value:.0f}, which stands for no value (blank)")
    if not math.isfinite(value) or not 0.0 <= value <= limit * OVERSHOOT:
        raise Unsound(f"metric {field}: the device reports {value:g} {FIELDS[field].unit}, possible is 0 to {limit:g}")
    return min(float(value), limit)


def check_together(readings: Mapping[str, Sequence[float]], lasted_s: float = 0.0) -> None:
    """Compares samples of several fields from one period of `lasted_s` seconds (0: several periods with gaps).

    Raises Unsound if a profiled field is frozen, or is 0 while others show the GPU busy.
    """
    moved = [field for field in PROFILED if len(set(readings.get(field, ()))) > MANY / 2]
    for field in PROFILED:
        values = readings.get(field, ())
        # only if another field has several values: an exporter may be queried more often than it reads
        if moved and len(values) >= MANY and len(set(values)) == 1 and _would_move(field, values[0]):
            raise Unsound(f"metric {field}: frozen: {len(values)} readings of exactly {values[0]:g} {FIELDS[field].unit} "
                          f"while {moved[0]} moved; restart what reads the GPU (DCGM, its exporter)")
    witness = _witness(readings, lasted_s)
    for field in AT_WORK:
        values = readings.get(field, ())
        if witness and values and not any(values):
            raise Unsound(f"metric {field}: stuck at 0 while {witness} says that the GPU is busy; is another profiler using "
                          "its counters? Restart what reads the GPU (DCGM, its exporter)")


def _would_move(field: str, value: float) -> bool:
    """Whether a profiled field with this value should change: it is neither noise nor saturated."""
    return NOISE[FIELDS[field].unit] <= value < FIELDS[field].maximum


def _witness(readings: Mapping[str, Sequence[float]], lasted_s: float) -> str:
    """A field that shows the GPU busy for the whole period; "" if none does. Utilisation may include earlier work, so it counts
    only for longer periods."""
    for field in AT_WORK:
        values = readings.get(field, ())
        if values and sum(values) / len(values) >= BUSY:
            return field
    utilisation = readings.get(UTILISATION, ())
    outlasts = lasted_s >= 2 * LOOKS_BACK_S and len(utilisation) > 1
    return UTILISATION if outlasts and min(utilisation) >= BUSY * FIELDS[UTILISATION].maximum else ""


class History:
    """Means of the latest windows, checked like samples, since a counter gives one value per window."""

    def __init__(self) -> None:
        self._means: dict[str, deque[float]] = {}

    def add(self, means: Mapping[str, float]) -> None:
        """Adds the means of a window. Raises Unsound as `check_together` does, over the latest MANY windows."""
        for field, value in means.items():
            self._means.setdefault(field, deque(maxlen=MANY)).append(value)
        check_together({field: list(values) for field, values in self._means.items()})


@dataclass(frozen=True)
class OpenWindow:
    """An open metrics window: its start (seconds, monotonic clock) and what the source read then."""

    began_s: float
    reading: Any


class MetricMean(NamedTuple):
    """Mean of a field over a window in the unit of FIELDS, and the number of samples (1 for a counter's difference)."""

    value: float
    readings: int


class MetricSource(ABC):
    """Means of metrics over windows. Subclasses define what to read at the ends (`_read`) and between (`_readings`)."""

    name: str  # for messages
    minimum_window_s: float  # shorter windows are not valid

    def __init__(self, available: Sequence[str], fields: Sequence[str] | None) -> None:
        """Reads `fields`, or all `available` ones. Raises UserError if one is not available."""
        unknown = [field for field in fields or () if field not in available]
        if unknown:
            raise UserError(f"metric {', '.join(unknown)}: {self.name} can't read it here; it has {', '.join(available)}")
        self.fields = tuple(dict.fromkeys(fields or available))
        self._history = History()

    @abstractmethod
    def _read(self) -> Any:
        """Current values of the device."""

    @abstractmethod
    def _readings(self, before: OpenWindow, after: OpenWindow) -> Mapping[str, Sequence[float]]:
        """Samples of every field (others may be added as a check) between two moments; one mean for a counter's difference."""

    def start(self) -> OpenWindow:
        """Opens a window."""
        return OpenWindow(time.monotonic(), self._read())

    def stop(self, window: OpenWindow) -> dict[str, MetricMean]:
        """Closes `window` and returns the mean of each field; may wait until the device has reported its work."""
        means = self._means(window)
        self._history.add(values(means))
        return means

    def _means(self, window: OpenWindow) -> dict[str, MetricMean]:
        """Mean of each field since `window` was opened; errors as in `stop`."""
        now = time.monotonic()
        lasted_s = now - window.began_s
        if lasted_s < self.minimum_window_s:
            raise UserError(f"a metric window of {lasted_s * 1e3:.0f} ms is too short to be valid: "
                            f"{self.name} needs {self.minimum_window_s * 1e3:.0f} ms")
        samples = self._valid(self._readings(window, OpenWindow(now, self._read())))
        for field in self.fields:
            if not samples.get(field):
                raise UserError(f"metric {field}: {self.name} has no reading of it in a window of {lasted_s:.1f} s")
        check_together(samples, lasted_s)
        return {field: MetricMean(sum(samples[field]) / len(samples[field]), len(samples[field])) for field in self.fields}

    def _valid(self, readings: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Samples of valid fields. Raises Unsound if one of `fields` has invalid samples; other fields are left out."""
        valid = {}
        for field, samples in readings.items():
            try:
                valid[field] = [checked(field, value) for value in samples]
            except Unsound:
                if field in self.fields:
                    raise
        return valid

    def window(self, seconds: float) -> dict[str, MetricMean]:
        """Mean of each field over the next `seconds`."""
        opened = self.start()
        pause(seconds)
        return self.stop(opened)


def values(means: Mapping[str, MetricMean]) -> dict[str, float]:
    """The means, without numbers of samples."""
    return {field: mean.value for field, mean in means.items()}
