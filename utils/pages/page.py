"""What a page holds: an answer, facts, plots, tables, warnings, and how to make it again. It knows no kernels.

`rendering.py` makes the HTML file; `svg.py` draws `Chart` and `Bars` without a browser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Tone = Literal["", "good", "bad", "doubtful"]
OTHER = "other"  # what has no colour of its own
COLOURS = 6  # things that a page tells apart by their colour; the rest is OTHER


@dataclass(frozen=True)
class Fact:
    """A number that stands out.

    Attributes:
        name: what it is.
        value, unit: as they are shown.
        note: a line below.
        between: the ends of its interval and the number itself, which are drawn as a line with a dot: low, number, high.
    """

    name: str
    value: str
    unit: str = ""
    note: str = ""
    tone: Tone = ""
    between: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Shares:
    """Parts of a whole, drawn as one bar; `parts`: amounts by name, in order. Without a `unit` they are ratios."""

    title: str
    parts: Mapping[str, float]
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """Rows as a table that can be sorted and filtered.

    Attributes:
        rows: by column; all have the columns of the first.
        title: above it; "" for none.
        bar: the column whose numbers are drawn as bars too; "" for none.
        coloured: the column whose words have the colours of the page; "" for none.
        most: number of rows that are shown until the reader asks for all.
    """

    rows: Sequence[Mapping[str, Any]]
    title: str = ""
    bar: str = ""
    coloured: str = ""
    most: int = 15


@dataclass(frozen=True)
class Grid:
    """Numbers by two things: a table whose cells are the darker, the larger their numbers are; on a logarithmic scale.

    Attributes:
        down, across: what the rows and the columns are.
        cells: by row and column; None where there is no number.
        notes: of the cells, for the reader who points at one, and marked by an asterisk; by row and column.
    """

    title: str
    down: str
    across: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[float | None]]
    notes: Mapping[tuple[int, int], str] = field(default_factory=dict)


class Axis(NamedTuple):
    """An axis of a chart; `log`: whether it is logarithmic; `zero`: whether it begins at 0."""

    title: str
    log: bool = False
    zero: bool = False


class Series(NamedTuple):
    """Points of a chart that belong together.

    Attributes:
        low, high: the intervals of `y`, drawn as a band around a line, or as a whisker at each point; empty where unknown.
        labels: of the points, for the reader who points at one.
        line: whether a line joins the points.
        dash: how it is drawn: "", "dashed" or "dotted".
        marked: the places of points that are drawn as crosses.
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


class Limit(NamedTuple):
    """A horizontal line with a name."""

    name: str
    y: float


@dataclass(frozen=True)
class Chart:
    """Lines with bands, or points with whiskers.

    Attributes:
        ticks: the places of the numbers of the x axis; empty where the axis chooses them.
        equality: draw the line x = y, and a band around it of this width, a ratio; for axes in the same unit.
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    limits: Sequence[Limit] = ()
    ticks: Sequence[float] = ()
    equality: float | None = None
    kind: str = field(default="chart", init=False)


class Bar(NamedTuple):
    """A bar, or its end and its interval."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """Numbers with intervals side by side, one line each; `limit`: a line across all of them."""

    title: str
    axis: Axis
    bars: Sequence[Bar]
    limit: Limit | None = None
    kind: str = field(default="bars", init=False)


@dataclass
class Part:
    """A part of a whole that is made of parts. Only those without parts have an `amount` of their own.

    Attributes:
        group: what it has its colour by.
        note: for the reader who points at it.
    """

    name: str
    amount: float = 0.0
    group: str = ""
    note: str = ""
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.amount + sum(part.total for part in self.parts.values())


@dataclass(frozen=True)
class TreeMap:
    """A whole as nested areas; `unit`: of the amounts."""

    title: str
    whole: Part
    unit: str
    kind: str = field(default="treemap", init=False)


class Span(NamedTuple):
    """A stretch of time on a track, in ms; `group`: what it has its colour by."""

    begins: float
    ends: float
    name: str
    group: str


@dataclass(frozen=True)
class Timeline:
    """What happens when, on tracks below each other."""

    title: str
    tracks: Mapping[str, Sequence[Span]]
    kind: str = field(default="timeline", init=False)


Plot = Chart | Bars | TreeMap | Timeline
Piece = Plot | Table | Shares | Grid


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading; `folded`: it is shown when the reader asks for it."""

    title: str
    pieces: Sequence[Piece]
    text: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        kind: of answer, as words: `Predicted latency`.
        title: what it is about; the browser's title too.
        answer: one sentence.
        more: sentences below it.
        facts: the numbers that stand out.
        sections: in order.
        warnings: whom each concerns, by its text; empty where it concerns all.
        basis: what the answer rests on: values by name.
        colours: what has a colour of its own on this page, in order; COLOURS at most.
    """

    kind: str
    title: str
    answer: str
    more: Sequence[str] = ()
    facts: Sequence[Fact] = ()
    sections: Sequence[Section] = ()
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    basis: Mapping[str, str] = field(default_factory=dict)
    colours: Sequence[str] = ()
