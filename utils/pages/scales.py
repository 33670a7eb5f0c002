"""The range of an axis and its numbers, the same on a page and in a drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hase.utils.pages.page import Axis, Bars, Chart

LEAST_TICKS = 4
LINEAR_TICKS = 6
LOG_FROM = 20.0  # times the smallest number: from there on, an axis is logarithmic
MARGIN = 0.05  # of the range, on each side
TICK_STEPS = (  # within a decade; the coarsest first
    (1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), tuple(1 + n / 2 for n in range(18)),
    tuple(1 + n / 5 for n in range(45)), tuple(1 + n / 10 for n in range(90)))


class Scale(NamedTuple):
    """An axis from `low` to `high`, with numbers at `ticks`."""

    title: str
    log: bool
    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Where a value lies on the axis: 0 at its beginning, 1 at its end."""
        low, high, at = (math.log(number) for number in (self.low, self.high, max(value, self.low))) if self.log else (
            self.low, self.high, value)
        return (at - low) / (high - low)


def axis_for(title: str, values: Iterable[float]) -> Axis:
    """The axis of some numbers: it begins at 0, or is logarithmic where the largest is many times the smallest."""
    positive = [value for value in values if value > 0]
    log = bool(positive) and max(positive) > LOG_FROM * min(positive)
    return Axis(title, log, zero=not log)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high` for a logarithmic axis: as few as possible, but at least LEAST_TICKS."""
    values: list[float] = []
    for steps in TICK_STEPS:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [value for decade in decades for step in steps if low <= (value := float(f"{step:g}e{decade}")) <= high]
        if len(values) >= LEAST_TICKS:
            break
    return values


def linear_ticks(low: float, high: float) -> list[float]:
    """About LINEAR_TICKS round numbers from `low` to `high`."""
    rough = (high - low) / LINEAR_TICKS
    decade = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * decade for factor in (1.0, 2.0, 2.5, 5.0, 10.0)), key=lambda size: abs(size - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def scale(axis: Axis, values: Iterable[float], ticks: Sequence[float] = ()) -> Scale:
    """The scale of an axis that shows all `values`; with `ticks`, it has its numbers there."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)] or [1.0]
    low, high = min(known), max(known)
    if axis.log:
        factor = max(high / low, 1.2) ** MARGIN
        low, high = low / factor, high * factor
        return Scale(axis.title, True, low, high, tuple(ticks or log_ticks(low, high)))
    low, high = (min(low, 0.0), max(high, 0.0)) if axis.zero else (low, high)
    margin = MARGIN * ((high - low) or abs(high) or 1.0)
    low, high = (low if axis.zero and not low else low - margin), (high if axis.zero and not high else high + margin)
    return Scale(axis.title, False, low, high, tuple(ticks or linear_ticks(low, high)))


def scales_of(chart: Chart) -> tuple[Scale, Scale]:
    """The scales of a chart's x and y axis."""
    across = [value for series in chart.series for value in series.x]
    up = [value for series in chart.series for value in (*series.y, *series.low, *series.high)]
    up += [limit.y for limit in chart.limits]
    if chart.equality is not None:
        across = up = [*across, *up]
    return scale(chart.x, across, chart.ticks), scale(chart.y, up)


def scale_of(bars: Bars) -> Scale:
    """The scale of the bars' axis."""
    ends = [end for bar in bars.bars for end in (bar.value, bar.low, bar.high) if end is not None]
    return scale(bars.axis, [*ends, *([bars.limit.y] if bars.limit else ())])
