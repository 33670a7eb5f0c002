"""How often verdicts of `hase gate` were right, for changes whose true size was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hase.inference.compare.regressions import percent, verdict_of

LIMITS = (0.03, 0.05, 0.10)


class JudgedChange(NamedTuple):
    """A change of a latency (after over before, less 1): what was measured, what was predicted, and its 90 % interval."""

    measured: float
    predicted: float
    low: float
    high: float

    @classmethod
    def from_logarithms(cls, measured: float, predicted: float, reach: float) -> JudgedChange:
        """The change from the logarithms of both ratios, and how far the interval reaches."""
        return cls(*map(math.expm1, (measured, predicted, predicted - reach, predicted + reach)))

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def verdict_rows(changes: Sequence[JudgedChange]) -> list[dict[str, Any]]:
    """For each limit: how many changes are slower by more, and how many of these were found, called maybe slower, and missed;
    how many are not, and the false alarms among these."""
    rows = []
    for limit in LIMITS:
        verdicts = [(change.measured > limit, verdict_of(change.predicted, (change.low, change.high), limit))
                    for change in changes]
        slower, others = ([verdict for is_slower, verdict in verdicts if is_slower is wanted] for wanted in (True, False))
        found, maybe = (slower.count(verdict) for verdict in ("surely slower", "maybe slower"))
        rows.append({"limit": percent(limit, sign=False), "slower": len(slower), "found": found, "maybe": maybe,
                     "missed": len(slower) - found - maybe, "not slower": len(others),
                     "false alarms": others.count("surely slower")})
    return rows
