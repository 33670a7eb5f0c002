"""Whether readings of metrics can be believed: what is not a value, and what contradicts itself.

In the field (dcgm-exporter's issues) GPUs were seen to report 4294967295, blanks, profiling fields that stay at 0 under load,
and fields that no longer move. None of that may become a feature, so each is a `UserError` that says which it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from benchmark.metric_fields import FIELDS
from utils.errors import UserError

OVERSHOOT = 1.02  # counters and clock are read one after the other, so a busy device can seem up to this busy
# DCGM's blanks (dcgmvalue.py in its bindings): a base, and up to 15 more for the reason. Drivers give -1 as an unsigned number.
INT32_BLANK, INT64_BLANK, FP64_BLANK = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 2.0**47
UNSIGNED_MINUS_ONE = (2**32 - 1, 2**64 - 1)
MANY = 10  # so many equal readings in a row are no accident, …
PROFILED = tuple(field for field in FIELDS if field.startswith("DCGM_FI_PROF_"))  # … of a field that counts cycles or bytes
AT_WORK = ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_OCCUPANCY")  # none without the others
UTILISATION = "DCGM_FI_DEV_GPU_UTIL"
NOISE = {"ratio": 0.01, "bytes/s": 1e6}  # below this values are small numbers of counts, and repeat
BUSY = 0.1  # a share of the time that is no noise


def is_blank(value: float) -> bool:
    """Whether `value` is one of the numbers that stand for no value."""
    return (value in UNSIGNED_MINUS_ONE or INT32_BLANK <= value <= INT32_BLANK + 15
            or FP64_BLANK <= value <= FP64_BLANK + 15 or value >= INT64_BLANK)


def checked(field: str, value: float) -> float:
    """`value`, if it is one that `field` can have; a hair above the limit is the limit.

    Raises:
        UserError: blank, NaN, infinite, negative or beyond the limit.
    """
    limit = FIELDS[field].maximum
    if is_blank(value):
        raise UserError(f"metric {field}: the device reports {value:.0f}, which stands for no value (blank); "
                        "leave this metric out of the config if it stays so")
    if not math.isfinite(value) or not 0.0 <= value <= limit * OVERSHOOT:
        raise UserError(f"metric {field}: the device reports {value:g} {FIELDS[field].unit}, possible is 0 to {limit:g}; "
                        "measure again, and leave this metric out of the config if it stays so")
    return min(float(value), limit)


def check_together(readings: Mapping[str, Sequence[float]]) -> None:
    """Holds the fields' readings of one time against each other.

    Raises:
        UserError: a profiled field is frozen, or at 0 while others say that the GPU works.
    """
    moving = {field: len(set(values)) > 1 for field, values in readings.items()}
    for field in PROFILED:
        values = readings.get(field, ())
        if len(values) < MANY or moving[field] or not NOISE[FIELDS[field].unit] <= values[0] < FIELDS[field].maximum:
            continue
        others = [other for other in PROFILED if moving.get(other)]
        if others:
            raise UserError(f"metric {field}: frozen: {len(values)} readings of exactly {values[0]:g} {FIELDS[field].unit} "
                            f"while {others[0]} moved; restart what reads the GPU (DCGM, its exporter), or leave it out")
    witness = _witness(readings)
    for field in AT_WORK:
        values = readings.get(field, ())
        if witness and values and not any(values):
            raise UserError(f"metric {field}: stuck at 0 while {witness} says that the GPU is busy; is another profiler using "
                            "its counters? Restart what reads the GPU (DCGM, its exporter), or leave this metric out")


def _witness(readings: Mapping[str, Sequence[float]]) -> str:
    """A field by which the GPU was busy all the time; "" where none says so. Utilisation looks back by up to a second, so it
    takes many readings."""
    for field in AT_WORK:
        values = readings.get(field, ())
        if values and sum(values) / len(values) >= BUSY:
            return field
    used = readings.get(UTILISATION, ())
    return UTILISATION if len(used) >= MANY and min(used) >= BUSY * FIELDS[UTILISATION].maximum else ""


class History:
    """The means of the latest windows, held against each other as readings are: a counter gives one reading a window."""

    def __init__(self) -> None:
        self._means: dict[str, deque[float]] = {}

    def add(self, means: Mapping[str, float]) -> None:
        """Adds a window's.

        Raises:
            UserError: as `check_together` does, of the latest MANY windows.
        """
        for field, value in means.items():
            self._means.setdefault(field, deque(maxlen=MANY)).append(value)
        check_together({field: list(values) for field, values in self._means.items()})
