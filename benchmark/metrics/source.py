"""What a source of metrics is, and which of its values can be trusted.

GPUs have been seen (issues of dcgm-exporter) to report 4294967295, blanks, profiling fields that stay at 0 under load, and
fields that no longer change. None of that may become a feature, so each raises `Unsound` with the reason.
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

OVERSHOOT = 1.02  # counters and clock are not read at the same moment, so a busy device may seem this busy
MANY = 10  # so many equal samples in a row are no accident
PROFILED = tuple(field for field in FIELDS if field.startswith("DCGM_FI_PROF_"))  # for a field that counts cycles or bytes
AT_WORK = ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_OCCUPANCY")  # all or none of them
UTILISATION = "DCGM_FI_DEV_GPU_UTIL"
LOOKS_BACK = (UTILISATION, "DCGM_FI_DEV_MEM_COPY_UTIL")  # read if there is nothing better, or if named
LOOKS_BACK_S = 1.0  # at most: NVML computes these two over a sixth of a second to a second
NOISE = {"ratio": 0.01, "bytes/s": 1e6}  # below this, values are few counts, and repeat
BUSY = 0.1  # a share of time above the noise


class Unsound(UserError):
    """Samples that can't be right.

    Attributes:
        fact: which, and why. The message adds what to do if this machine reads the metric.
    """

    def __init__(self, fact: str) -> None:
        super().__init__(f"{fact}; measure again, and leave this metric out of the config if it stays so")
        self.fact = fact


def checked(field: str, value: float) -> float:
    """`value`, if `field` can have it; a value slightly above the limit becomes the limit.

    Raises:
        Unsound: it is blank, NaN, infinite, negative or above the limit.
    """
    limit = FIELDS[field].maximum
    if is_blank(value):
        raise Unsound(f"metric {field}: the device reports {value:.0f}, which stands for no value (blank)")
    if not math.isfinite(value) or not 0.0 <= value <= limit * OVERSHOOT:
        raise Unsound(f"metric {field}: the device reports {value:g} {FIELDS[field].unit}, possible is 0 to {limit:g}")
    return min(float(value), limit)


def check_together(readings: Mapping[str, Sequence[float]], lasted_s: float = 0.0) -> None:
    """Compares the samples of several fields from the same period.

    Args:
        lasted_s: length of the period; 0 for several periods with gaps between them.

    Raises:
        Unsound: a profiled field is frozen, or is 0 while others show that the GPU works.
    """
    moved = [field for field in PROFILED if len(set(readings.get(field, ()))) > MANY / 2]
    for field in PROFILED:
        values = readings.get(field, ())
        # another field must have several values: an exporter may be asked more often than it reads
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
    """Whether a profiled field with this value is expected to change: it is neither noise nor saturated."""
    return NOISE[FIELDS[field].unit] <= value < FIELDS[field].maximum


def _witness(readings: Mapping[str, Sequence[float]], lasted_s: float) -> str:
    """A field that shows the GPU busy for the whole period; "" if none does. Utilisation may still include a load that ended
    before the period, so the period must be longer than it looks back."""
    for field in AT_WORK:
        values = readings.get(field, ())
        if values and sum(values) / len(values) >= BUSY:
            return field
    used = readings.get(UTILISATION, ())
    outlasts = lasted_s >= 2 * LOOKS_BACK_S and len(used) > 1
    return UTILISATION if outlasts and min(used) >= BUSY * FIELDS[UTILISATION].maximum else ""


class History:
    """The means of the latest windows, checked like samples: a counter gives one value per window."""

    def __init__(self) -> None:
        self._means: dict[str, deque[float]] = {}

    def add(self, means: Mapping[str, float]) -> None:
        """Adds the means of a window.

        Raises:
            Unsound: over the latest MANY windows, a profiled field is frozen, or is 0 while others show that the GPU works.
        """
        for field, value in means.items():
            self._means.setdefault(field, deque(maxlen=MANY)).append(value)
        check_together({field: list(values) for field, values in self._means.items()})


@dataclass(frozen=True)
class Window:
    """An open metrics window: when it began (seconds, monotonic clock) and what the source read then."""

    began_s: float
    reading: Any


class Mean(NamedTuple):
    """The mean of a field over a window in the unit of FIELDS, and the number of samples; a counter's difference counts as
    one."""

    value: float
    readings: int


class MetricSource(ABC):
    """Means of metrics over windows. A subclass gives the fields that it can read (`available`), what it reads when a window
    opens and closes (`_read`), and the samples between the two (`_readings`).

    Attributes:
        name: for messages.
        minimum_window_s: shorter windows are not valid.
        fields: the fields that it reads, names of FIELDS.
    """

    name: str
    minimum_window_s: float

    def __init__(self, available: Sequence[str], fields: Sequence[str] | None) -> None:
        """Reads `fields`, or all that are `available` if none is named.

        Raises:
            UserError: one of them is not available.
        """
        unknown = [field for field in fields or () if field not in available]
        if unknown:
            raise UserError(f"metric {', '.join(unknown)}: {self.name} can't read it here; it has {', '.join(available)}")
        self.fields = tuple(dict.fromkeys(fields or available))
        self._history = History()

    @abstractmethod
    def _read(self) -> Any:
        """The device's values at this moment."""

    @abstractmethod
    def _readings(self, before: Window, after: Window) -> Mapping[str, Sequence[float]]:
        """The samples of every field between two moments, in the units of FIELDS; a counter's difference gives one, the mean.
        Other fields may be included; they are used to check these."""

    def start(self) -> Window:
        """Opens a window."""
        return Window(time.monotonic(), self._read())

    def stop(self, window: Window) -> dict[str, Mean]:
        """Closes `window` and returns the mean of each field since it was opened, in the units of FIELDS. May wait until the
        device reports its work up to now.

        Raises:
            Unsound: samples are blank, out of range, frozen, or contradict those of another field.
            UserError: the window is shorter than `minimum_window_s`, or has no sample of a field.
        """
        means = self._means(window)
        self._history.add(values(means))
        return means

    def _means(self, window: Window) -> dict[str, Mean]:
        """The mean of each field since `window` was opened.

        Raises:
            Unsound: samples are blank, out of range, frozen, or contradict those of another field.
            UserError: the window is shorter than `minimum_window_s`, or has no sample of a field.
        """
        now = time.monotonic()
        lasted_s = now - window.began_s
        if lasted_s < self.minimum_window_s:
            raise UserError(f"a metric window of {lasted_s * 1e3:.0f} ms is too short to be valid: "
                            f"{self.name} needs {self.minimum_window_s * 1e3:.0f} ms")
        samples = self._sound(self._readings(window, Window(now, self._read())))
        for field in self.fields:
            if not samples.get(field):
                raise UserError(f"metric {field}: {self.name} has no reading of it in a window of {lasted_s:.1f} s")
        check_together(samples, lasted_s)
        return {field: Mean(sum(samples[field]) / len(samples[field]), len(samples[field])) for field in self.fields}

    def _sound(self, readings: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """The samples after a check of their values; other fields with bad samples are left out.

        Raises:
            Unsound: one of `fields` has bad samples.
        """
        sound = {}
        for field, seen in readings.items():
            try:
                sound[field] = [checked(field, value) for value in seen]
            except Unsound:
                if field in self.fields:
                    raise
        return sound

    def window(self, seconds: float) -> dict[str, Mean]:
        """The mean of each field over the next `seconds`."""
        opened = self.start()
        pause(seconds)
        return self.stop(opened)


def values(means: Mapping[str, Mean]) -> dict[str, float]:
    """The means alone, without the numbers of samples."""
    return {field: mean.value for field, mean in means.items()}
