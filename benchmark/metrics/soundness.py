"""Whether readings of metrics can be believed: what is not a value, and what contradicts itself.

In the field (dcgm-exporter's issues) GPUs were seen to report 4294967295, blanks, profiling fields that stay at 0 under load,
and fields that no longer move. None of that may become a feature, so each is an `Unsound` that says which it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from benchmark.metrics.dcgm_names import is_blank
from benchmark.metrics.fields import FIELDS
from utils.errors import UserError

OVERSHOOT = 1.02  # counters and clock are read one after the other, so a busy device can seem up to this busy
MANY = 10  # so many equal readings in a row are no accident, …
PROFILED = tuple(field for field in FIELDS if field.startswith("DCGM_FI_PROF_"))  # … of a field that counts cycles or bytes
AT_WORK = ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_OCCUPANCY")  # none without the others
UTILISATION = "DCGM_FI_DEV_GPU_UTIL"
LOOKS_BACK = (UTILISATION, "DCGM_FI_DEV_MEM_COPY_UTIL")  # read where there is no better, or if asked for
LOOKS_BACK_S = 1.0  # at most: NVML works these two out over a sixth of a second to a second
NOISE = {"ratio": 0.01, "bytes/s": 1e6}  # below this values are small numbers of counts, and repeat
BUSY = 0.1  # a share of the time that is no noise


class Unsound(UserError):
    """Readings that cannot be believed.

    Attributes:
        fact: which, and why; the message goes on with what to do where the metric's reader is on this machine.
    """

    def __init__(self, fact: str) -> None:
        super().__init__(f"{fact}; measure again, and leave this metric out of the config if it stays so")
        self.fact = fact


def checked(field: str, value: float) -> float:
    """`value`, if it is one that `field` can have; a hair above the limit is the limit.

    Raises:
        Unsound: blank, NaN, infinite, negative or beyond the limit.
    """
    limit = FIELDS[field].maximum
    if is_blank(value):
        raise Unsound(f"metric {field}: the device reports {value:.0f}, which stands for no value (blank)")
    if not math.isfinite(value) or not 0.0 <= value <= limit * OVERSHOOT:
        raise Unsound(f"metric {field}: the device reports {value:g} {FIELDS[field].unit}, possible is 0 to {limit:g}")
    return min(float(value), limit)


def check_together(readings: Mapping[str, Sequence[float]], lasted_s: float = 0.0) -> None:
    """Holds the fields' readings of one time against each other.

    Args:
        lasted_s: how long that time was; 0 where it was several with gaps between.

    Raises:
        Unsound: a profiled field is frozen, or at 0 while others say that the GPU works.
    """
    moved = [field for field in PROFILED if len(set(readings.get(field, ()))) > MANY / 2]
    for field in PROFILED:
        values = readings.get(field, ())
        # several others' values, not two: an exporter may be asked more often than it reads
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
    """Whether a profiled field with this value would move: it is neither noise nor saturated."""
    return NOISE[FIELDS[field].unit] <= value < FIELDS[field].maximum


def _witness(readings: Mapping[str, Sequence[float]], lasted_s: float) -> str:
    """A field by which the GPU was busy all the time; "" where none says so. Utilisation may tell of a load that was over when
    the readings began, so they must have lasted longer."""
    for field in AT_WORK:
        values = readings.get(field, ())
        if values and sum(values) / len(values) >= BUSY:
            return field
    used = readings.get(UTILISATION, ())
    outlasts = lasted_s >= 2 * LOOKS_BACK_S and len(used) > 1
    return UTILISATION if outlasts and min(used) >= BUSY * FIELDS[UTILISATION].maximum else ""


class History:
    """The means of the latest windows, held against each other as readings are: a counter gives one reading a window."""

    def __init__(self) -> None:
        self._means: dict[str, deque[float]] = {}

    def add(self, means: Mapping[str, float]) -> None:
        """Adds a window's.

        Raises:
            Unsound: as `check_together` does, of the latest MANY windows.
        """
        for field, value in means.items():
            self._means.setdefault(field, deque(maxlen=MANY)).append(value)
        check_together({field: list(values) for field, values in self._means.items()})
