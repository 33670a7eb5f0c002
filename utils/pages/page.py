"""The contents of a page: an answer, facts, plots, tables, warnings, and the command that produces it.

`rendering.py` makes the HTML file; `charts.py` draws `Chart` and `Bars` without a browser.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Tone = Literal["", "good", "bad", "doubtful"]
OTHER = "other"  # the group of all names without a colour of their own
COLOURS = 6  # the most names of a page that have a colour of their own
LEAST_TICKS = 4
LINEAR_TICKS = 6
LOG_FROM = 20.0  # an axis is logarithmic if its largest number is more than this times the smallest
MARGIN = 0.05  # of the range, on each side of an axis
TICK_STEPS = (  # possible ticks within a decade; the coarsest first
    (1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), tuple(1 + n / 2 for n in range(18)),
    tuple(1 + n / 5 for n in range(45)), tuple(1 + n / 10 for n in range(90)))


@dataclass(frozen=True)
class Fact:
    """A prominent number, with a note below it; `between`: low end, number and high end of its interval, drawn as a line."""

    name: str
    value: str
    unit: str = ""
    note: str = ""
    tone: Tone = ""
    between: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Shares:
    """Parts of a whole, drawn as one bar; `parts`: amounts by name, in order; ratios if there is no `unit`."""

    title: str
    parts: Mapping[str, float]
    unit: str = ""


@dataclass(frozen=True)
class PageTable:
    """Rows as a table that can be sorted and filtered.

    Attributes:
        rows: with columns by name; a row may lack some.
        bar: the column whose numbers are also drawn as bars; "" for none.
        coloured: the column whose words are coloured; "" for none.
        most: number of rows shown before the reader opens the rest.
    """

    rows: Sequence[Mapping[str, Any]]
    title: str = ""
    bar: str = ""
    coloured: str = ""
    most: int = 15

    @property
    def columns(self) -> list[str]:
        """The columns of all rows, in order of appearance."""
        return list(dict.fromkeys(column for row in self.rows for column in row))


@dataclass(frozen=True)
class Grid:
    """A table of numbers whose cells are darker for larger numbers, on a logarithmic scale.

    Attributes:
        down, across: what the rows and the columns are.
        cells: by row and column; None for no number.
        notes: by row and column, shown under the pointer; such cells have an asterisk.
    """

    title: str
    down: str
    across: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[float | None]]
    notes: Mapping[tuple[int, int], str] = field(default_factory=dict)


class ChartAxis(NamedTuple):
    """An axis of a chart; `log`: whether it is logarithmic; `zero`: whether it begins at 0."""

    title: str
    log: bool = False
    zero: bool = False


class ChartSeries(NamedTuple):
    """Points of a chart that belong together.

    Attributes:
        low, high: intervals of `y`, drawn as a band on a line, else as whiskers; empty if unknown.
        labels: of the points, shown under the pointer.
        line: whether a line joins the points.
        dash: "", "dashed" or "dotted".
        marked: indices of points drawn as crosses.
        beside: words drawn beside the points; empty for none.
        whiskers: whether a line has whiskers too, as one that turns back needs.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    labels: Sequence[str] = ()
    line: bool = True
    dash: str = ""
    marked: Sequence[int] = ()
    beside: Sequence[str] = ()
    whiskers: bool = False


class Limit(NamedTuple):
    """A named horizontal line."""

    name: str
    y: float


@dataclass(frozen=True)
class Chart:
    """Lines with bands, or points with whiskers.

    Attributes:
        ticks: numbers on the x axis; empty for automatic ones.
        equality: draws the line x = y with a band of this relative width; for axes in the same unit.
    """

    title: str
    x: ChartAxis
    y: ChartAxis
    series: Sequence[ChartSeries]
    limits: Sequence[Limit] = ()
    ticks: Sequence[float] = ()
    equality: float | None = None
    kind: str = field(default="chart", init=False)


class Bar(NamedTuple):
    """A bar from 0 to `value`, with an interval."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """Horizontal bars with intervals below each other; `limit`: a line across all of them."""

    title: str
    axis: ChartAxis
    bars: Sequence[Bar]
    limit: Limit | None = None
    kind: str = field(default="bars", init=False)


@dataclass
class TreeMapPart:
    """A part of a whole, which may have parts itself; only the smallest have an `amount`. `group` decides its colour."""

    name: str
    amount: float = 0.0
    group: str = ""
    note: str = ""
    parts: dict[str, TreeMapPart] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.amount + sum(part.total for part in self.parts.values())


@dataclass(frozen=True)
class TreeMap:
    """A whole, drawn as nested areas; `unit`: of the amounts."""

    title: str
    whole: TreeMapPart
    unit: str
    kind: str = field(default="treemap", init=False)


class TimelineSpan(NamedTuple):
    """A stretch of time on a track, in ms; `group` decides its colour."""

    begins: float
    ends: float
    name: str
    group: str


@dataclass(frozen=True)
class Timeline:
    """What happens when, on tracks below each other."""

    title: str
    tracks: Mapping[str, Sequence[TimelineSpan]]
    kind: str = field(default="timeline", init=False)


Plot = Chart | Bars | TreeMap | Timeline
Piece = Plot | PageTable | Shares | Grid


@dataclass(frozen=True)
class PageSection:
    """A part of a page under a heading; `folded`: only its heading is shown until the reader opens it."""

    title: str
    pieces: Sequence[Piece]
    text: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """An answer, with all that a page shows of it.

    Attributes:
        kind: the kind of answer in words, e.g. `Predicted latency`.
        title: what it is about; also the browser's title.
        warnings: by text, the names that each concerns; empty if it concerns all.
        basis: what the answer is based on, by name.
        colours: names that have a colour on this page, in order; at most COLOURS.
    """

    kind: str
    title: str
    answer: str
    more: Sequence[str] = ()
    facts: Sequence[Fact] = ()
    sections: Sequence[PageSection] = ()
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    basis: Mapping[str, str] = field(default_factory=dict)
    colours: Sequence[str] = ()


class Scale(NamedTuple):
    """An axis from `low` to `high`, with numbers at `ticks`."""

    title: str
    log: bool
    low: float
    high: float
    ticks: tuple[float, ...]

    def position(self, value: float) -> float:
        """The position of a value on the axis, from 0 at its beginning to 1 at its end."""
        low, high, at = (math.log(number) for number in (self.low, self.high, max(value, self.low))) if self.log else (
            self.low, self.high, value)
        return (at - low) / (high - low)


def axis_for(title: str, values: Iterable[float]) -> ChartAxis:
    """The axis for some numbers: from 0, or logarithmic if the largest is many times the smallest."""
    positive = [value for value in values if value > 0]
    log = max(positive, default=0.0) > LOG_FROM * min(positive, default=0.0)
    return ChartAxis(title, log, zero=not log)


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


def scale(axis: ChartAxis, values: Iterable[float], ticks: Sequence[float] = ()) -> Scale:
    """The scale of an axis that shows all `values`, with the given `ticks` if any."""
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


def chart_scales(chart: Chart) -> tuple[Scale, Scale]:
    """The scales of a chart's x and y axis."""
    across = [value for series in chart.series for value in series.x]
    up = [value for series in chart.series for value in (*series.y, *series.low, *series.high)]
    up += [limit.y for limit in chart.limits]
    if chart.equality is not None:
        across = up = [*across, *up]
    return scale(chart.x, across, chart.ticks), scale(chart.y, up)


def bars_scale(bars: Bars) -> Scale:
    """The scale of the bars' axis."""
    ends = [end for bar in bars.bars for end in (bar.value, bar.low, bar.high) if end is not None]
    return scale(bars.axis, [*ends, *([bars.limit.y] if bars.limit else ())])
