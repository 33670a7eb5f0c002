"""Draws charts and bars as SVG, without a browser and without a plotting library.

The drawings of `--plot FILE.svg`; and what a page shows where scripts may not run, as in a mail program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from utils.pages.page import Bars, Chart, Plot, Series
from utils.pages.scales import Scale, scale_of, scales_of

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 60, 56  # margins of a chart
NAMES, LINE = 220, 26  # of bars: the width of their names, and the height of each
COLOURS = ("#2f6bc9", "#2a9187", "#d9962b", "#c8553d", "#7c5bbf", "#5d7f2e")  # page.css has the same, for light pages
INK, MUTED, GRID, LIMIT = "#16191d", "#5d6670", "#e1e4e8", "#b3372b"
DASHES = {"": "", "dashed": ' stroke-dasharray="7 4"', "dotted": ' stroke-dasharray="2 4"'}


def drawing_of(plot: Plot) -> str:
    """A plot as an SVG element; "" for one of a kind that only a page shows."""
    if isinstance(plot, Chart):
        return chart_drawing(plot)
    return bars_drawing(plot) if isinstance(plot, Bars) else ""


def _svg(height: float, title: str, parts: Iterator[str]) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="100%" style="background:#fff;'
            f'max-width:{WIDTH}px" font-family="system-ui, sans-serif" font-size="13" role="img">'
            f'<title>{escape(title)}</title>{_text(16, 24, title, size=15, weight=600)}{"".join(parts)}</svg>')


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK, size: float = 12, weight: int = 400,
          turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size:g}" '
            f'font-weight="{weight}"{turn}>{escape(words)}</text>')


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = GRID, width: float = 1, dash: str = "") -> str:
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"'
            f'{DASHES[dash]}/>')


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


class _Frame:
    """The area of a chart, and where values lie in it."""

    def __init__(self, across: Scale, up: Scale) -> None:
        self.across, self.up = across, up
        self.right, self.bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (LEFT + self.across.share(x) * (self.right - LEFT), self.bottom - self.up.share(y) * (self.bottom - TOP))

    def axes(self) -> Iterator[str]:
        for tick in self.up.ticks:
            _, y = self.at(self.across.low, tick)
            yield _line(LEFT, y, self.right, y) + _text(LEFT - 8, y + 4, f"{tick:g}", "end", MUTED)
        for tick in self.across.ticks:
            x, _ = self.at(tick, self.up.low)
            yield _line(x, TOP, x, self.bottom) + _text(x, self.bottom + 18, f"{tick:g}", "middle", MUTED)
        yield _text((LEFT + self.right) / 2, HEIGHT - 14, self.across.title, "middle", MUTED)
        yield _text(20, (TOP + self.bottom) / 2, self.up.title, "middle", MUTED, turned=True)


def chart_drawing(chart: Chart) -> str:
    """A chart as an SVG element."""
    return _svg(HEIGHT, chart.title, _chart_parts(chart))


def _chart_parts(chart: Chart) -> Iterator[str]:
    frame = _Frame(*scales_of(chart))
    if chart.equality is not None:
        low, high = frame.across.low, frame.across.high
        ends = [frame.at(end, min(max(end * (1 + side * chart.equality), frame.up.low), frame.up.high))
                for side, order in ((-1, (low, high)), (1, (high, low))) for end in order]
        yield f'<polygon points="{_points(ends)}" fill="#f0f1f3"/>'
    yield from frame.axes()
    if chart.equality is not None:
        yield _line(*frame.at(low, low), *frame.at(high, high), MUTED)
    for number, series in enumerate(chart.series):
        yield from _series_parts(series, COLOURS[number % len(COLOURS)], frame)
    for limit in chart.limits:
        _, y = frame.at(frame.across.low, limit.y)
        yield _line(LEFT, y, frame.right, y, LIMIT, 1.2, "dashed") + _text(frame.right, y - 5, limit.name, "end", LIMIT)
    x = float(LEFT)
    for number, series in enumerate(chart.series if len(chart.series) > 1 else ()):
        yield _line(x, 42, x + 16, 42, COLOURS[number % len(COLOURS)], 3, series.dash)
        yield _text(x + 22, 46, series.name, colour=MUTED)
        x += 46 + 7 * len(series.name)


def _series_parts(series: Series, colour: str, frame: _Frame) -> Iterator[str]:
    places = [frame.at(x, y) for x, y in zip(series.x, series.y, strict=True)]
    lows, highs = ([frame.at(x, y) for x, y in zip(series.x, ends, strict=False)] for ends in (series.low, series.high))
    if series.line:
        if lows:
            yield f'<polygon points="{_points([*lows, *reversed(highs)])}" fill="{colour}" fill-opacity="0.15"/>'
        yield f'<polyline points="{_points(places)}" fill="none" stroke="{colour}" stroke-width="2"{DASHES[series.dash]}/>'
    else:
        for low, high in zip(lows, highs, strict=True):
            yield _line(*low, *high, colour)
    labels = series.labels or [series.name] * len(places)
    for place, ((x, y), label) in enumerate(zip(places, labels, strict=True)):
        title = f"<title>{escape(label)}: {series.y[place]:.4g}</title>"
        if place in series.marked:
            yield _line(x - 5, y - 5, x + 5, y + 5, INK, 1.6) + _line(x - 5, y + 5, x + 5, y - 5, INK, 1.6)
        elif not series.line or len(places) <= 40:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" stroke="#fff">{title}</circle>'


def bars_drawing(bars: Bars) -> str:
    """Bars as an SVG element."""
    return _svg(TOP + LINE * len(bars.bars) + BOTTOM - 12, bars.title, _bars_parts(bars))


def _bars_parts(bars: Bars) -> Iterator[str]:
    scale, top = scale_of(bars), TOP - 12
    bottom = top + LINE * len(bars.bars)

    def at(value: float) -> float:
        return NAMES + scale.share(value) * (WIDTH - RIGHT - NAMES)

    for tick in scale.ticks:
        yield _line(at(tick), top, at(tick), bottom) + _text(at(tick), bottom + 18, f"{tick:g}", "middle", MUTED)
    yield _text((NAMES + WIDTH - RIGHT) / 2, bottom + 40, scale.title, "middle", MUTED)
    for place, bar in enumerate(bars.bars):
        y, x = top + LINE * (place + 0.5), at(bar.value)
        name = bar.name if len(bar.name) <= 30 else f"{bar.name[:29]}…"
        yield _text(NAMES - 10, y + 4, name, "end")
        if not scale.log:
            yield (f'<rect x="{NAMES}" y="{y - 7:.1f}" width="{x - NAMES:.1f}" height="14" fill="{COLOURS[0]}" '
                   'fill-opacity="0.28"/>')
        if bar.low is not None and bar.high is not None:
            yield _line(at(bar.low), y, at(bar.high), y, COLOURS[0], 1.4)
            yield "".join(_line(at(end), y - 4, at(end), y + 4, COLOURS[0], 1.4) for end in (bar.low, bar.high))
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{COLOURS[0]}" stroke="#fff"/>'
    if bars.limit:
        x = at(bars.limit.y)
        yield _line(x, top, x, bottom, LIMIT, 1.2, "dashed") + _text(x, top - 4, bars.limit.name, "middle", LIMIT)
