"""Draws charts and bars as SVG without a plotting library; charts also as PNG or PDF with matplotlib.

For `--plot FILE`, and for pages where scripts may not run, such as in a mail program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from hase.utils import files
from hase.utils.lazy import matplotlib
from hase.utils.pages.page import Bars, Chart, ChartSeries, Plot, Scale, bars_scale, chart_scales

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 60, 56  # margins of a chart; TOP with one row of names
ROW = 18  # height of a row of names
NAMES, LINE = 220, 26  # of bars: the width of their names, and the height of a line
COLOURS = ("#2f6bc9", "#2a9187", "#d9962b", "#c8553d", "#7c5bbf", "#5d7f2e")  # page.css has the same, for light pages
LIMIT_NAME = 10  # the longest name of a limit, in letters, that stands beside its line; longer ones stand above it
MOST_NAMED = 300  # points of a series: more are drawn as one shape, without their names
INK, MUTED, GRID, LIMIT = "#16191d", "#5d6670", "#e1e4e8", "#b3372b"
DASHES = {"": "", "dashed": ' stroke-dasharray="7 4"', "dotted": ' stroke-dasharray="2 4"'}
INCHES = (7.6, 4.4)  # of a chart
STYLES = {"": "-", "dashed": "--", "dotted": ":"}


def chart_svg(plot: Plot) -> str:
    """A plot as an SVG element; "" for kinds of plots that only a page shows."""
    return _svg(*_height_and_parts(plot), plot.title) if isinstance(plot, (Chart, Bars)) else ""


def drawing_of_all(plots: Sequence[Chart | Bars], title: str) -> str:
    """Plots below each other as one SVG element, under a `title` that may have several lines."""
    lines = title.splitlines()
    height, parts = 12.0 + 20 * len(lines), [_text(16, 24 + 20 * index, line, size=15 if not index else 13, weight=600)
                                             for index, line in enumerate(lines)]
    for plot in plots:
        plot_height, elements = _height_and_parts(plot)
        parts.append(f'<g transform="translate(0 {height:g})">{elements}</g>')
        height += plot_height
    return _svg(height, "".join(parts), title)


def _height_and_parts(plot: Chart | Bars) -> tuple[float, str]:
    """The height of a plot, and its SVG elements."""
    if isinstance(plot, Chart):
        frame = _Frame(*chart_scales(plot), len(_name_rows(plot)), right_margin(plot))
        height, parts = frame.bottom + BOTTOM, _chart_parts(plot, frame)
    else:
        height, parts = TOP + LINE * len(plot.bars) + BOTTOM - 12, _bars_parts(plot)
    return height, _text(16, 24, plot.title, size=15, weight=600) + "".join(parts)


def _svg(height: float, elements: str, title: str) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="100%" style="background:#fff;'
            f'max-width:{WIDTH}px" font-family="system-ui, sans-serif" font-size="13" role="img">'
            f'<title>{escape(title)}</title>{elements}</svg>')


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK, size: float = 12, weight: int = 400,
          turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size:g}" '
            f'font-weight="{weight}"{turn}>{escape(words)}</text>')


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = GRID, width: float = 1, dash: str = "") -> str:
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"'
            f'{DASHES[dash]}/>')


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def right_margin(chart: Chart) -> int:
    """The space at the right of a chart: for names of its limits, so that they do not lie on a line."""
    return max([RIGHT, *(12 + 7 * len(limit.name) for limit in chart.limits if len(limit.name) <= LIMIT_NAME)])


class _Frame:
    """The area of a chart, and the positions of values in it."""

    def __init__(self, across: Scale, up: Scale, name_rows: int, right: int) -> None:
        self.across, self.up = across, up
        self.top = TOP + ROW * max(name_rows - 1, 0)
        self.right, self.bottom = WIDTH - right, HEIGHT - BOTTOM + self.top - TOP

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (LEFT + self.across.position(x) * (self.right - LEFT),
                self.bottom - self.up.position(y) * (self.bottom - self.top))

    def axes(self) -> Iterator[str]:
        for tick in self.up.ticks:
            _, y = self.at(self.across.low, tick)
            yield _line(LEFT, y, self.right, y) + _text(LEFT - 8, y + 4, f"{tick:g}", "end", MUTED)
        for tick in self.across.ticks:
            x, _ = self.at(tick, self.up.low)
            yield _line(x, self.top, x, self.bottom) + _text(x, self.bottom + 18, f"{tick:g}", "middle", MUTED)
        yield _text((LEFT + self.right) / 2, self.bottom + BOTTOM - 14, self.across.title, "middle", MUTED)
        yield _text(20, (self.top + self.bottom) / 2, self.up.title, "middle", MUTED, turned=True)


def _name_rows(chart: Chart) -> list[list[tuple[float, int]]]:
    """The names of a chart's series by row: distance from the left, and index. A single series needs no name."""
    rows: list[list[tuple[float, int]]] = []
    x = float(WIDTH)
    for number, series in enumerate(chart.series if len(chart.series) > 1 else ()):
        width = 46 + 7 * len(series.name)
        if x + width > WIDTH:
            rows.append([])
            x = LEFT
        rows[-1].append((x, number))
        x += width
    return rows


def _chart_parts(chart: Chart, frame: _Frame) -> Iterator[str]:
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
        at = (frame.right + 6, y + 4, limit.name, "start") if len(limit.name) <= LIMIT_NAME else (
            frame.right, y - 5, limit.name, "end")
        yield _line(LEFT, y, frame.right, y, LIMIT, 1.2, "dashed") + _text(*at, LIMIT)
    for row, names in enumerate(_name_rows(chart)):
        for x, number in names:
            y = 42 + ROW * row
            yield _line(x, y, x + 16, y, COLOURS[number % len(COLOURS)], 3, chart.series[number].dash)
            yield _text(x + 22, y + 4, chart.series[number].name, colour=MUTED)


def _series_parts(series: ChartSeries, colour: str, frame: _Frame) -> Iterator[str]:
    points = [frame.at(x, y) for x, y in zip(series.x, series.y, strict=True)]
    lows, highs = ([frame.at(x, y) for x, y in zip(series.x, ends, strict=False)] for ends in (series.low, series.high))
    if series.line:
        if lows and not series.whiskers:
            yield f'<polygon points="{_points([*lows, *reversed(highs)])}" fill="{colour}" fill-opacity="0.15"/>'
        yield f'<polyline points="{_points(points)}" fill="none" stroke="{colour}" stroke-width="2"{DASHES[series.dash]}/>'
    if series.whiskers or not series.line:
        whiskers = "".join(f"M{x:.1f} {low:.1f}V{high:.1f}" for (x, low), (_, high) in zip(lows, highs, strict=True))
        yield f'<path d="{whiskers}" stroke="{colour}" fill="none"/>'
        if len(points) > MOST_NAMED and not series.marked and not series.line:
            dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
            yield f'<path d="{dots}" stroke="{colour}" stroke-width="7" stroke-linecap="round" stroke-opacity="0.7"/>'
            return
    yield from (_text(x + 6, y - 2, words, colour=MUTED, size=11) for (x, y), words in zip(points, series.beside, strict=False))
    labels = series.labels or [series.name] * len(points)
    for index, ((x, y), label) in enumerate(zip(points, labels, strict=True)):
        title = f"<title>{escape(label)}: {series.y[index]:.4g}</title>"
        if index in series.marked:
            yield _line(x - 5, y - 5, x + 5, y + 5, INK, 1.6) + _line(x - 5, y + 5, x + 5, y - 5, INK, 1.6)
        elif not series.line or len(points) <= 40:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" stroke="#fff">{title}</circle>'


def _bars_parts(bars: Bars) -> Iterator[str]:
    scale, top = bars_scale(bars), TOP - 12
    bottom = top + LINE * len(bars.bars)

    def at(value: float) -> float:
        return NAMES + scale.position(value) * (WIDTH - RIGHT - NAMES)

    for tick in scale.ticks:
        yield _line(at(tick), top, at(tick), bottom) + _text(at(tick), bottom + 18, f"{tick:g}", "middle", MUTED)
    yield _text((NAMES + WIDTH - RIGHT) / 2, bottom + 40, scale.title, "middle", MUTED)
    for index, bar in enumerate(bars.bars):
        y, x = top + LINE * (index + 0.5), at(bar.value)
        name = bar.name if len(bar.name) <= 30 else f"{bar.name[:29]}…"
        yield _text(NAMES - 10, y + 4, name, "end")
        if not scale.log:
            zero = at(min(max(0.0, scale.low), scale.high))
            yield (f'<rect x="{min(zero, x):.1f}" y="{y - 7:.1f}" width="{abs(x - zero):.1f}" height="14" fill="{COLOURS[0]}" '
                   'fill-opacity="0.28"/>')
        if bar.low is not None and bar.high is not None:
            yield _line(at(bar.low), y, at(bar.high), y, COLOURS[0], 1.4)
            yield "".join(_line(at(end), y - 4, at(end), y + 4, COLOURS[0], 1.4) for end in (bar.low, bar.high))
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{COLOURS[0]}" stroke="#fff"/>'
    if bars.limit:
        x = at(bars.limit.y)
        yield _line(x, top, x, bottom, LIMIT, 1.2, "dashed") + _text(x, top - 4, bars.limit.name, "middle", LIMIT)


def write_plot(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Writes charts below each other to a .svg, or with matplotlib to a .png or .pdf. The title may have several lines.
    `cli.plot_file` has already checked that matplotlib is installed."""
    if path.suffix == ".svg":
        files.write_text(path, f"{drawing_of_all(charts, title)}\n")
        return
    matplotlib.use("Agg")
    width, height = INCHES
    figure, panels = matplotlib.pyplot.subplots(len(charts), figsize=(width, height * len(charts)), squeeze=False,
                                                layout="constrained")
    figure.suptitle(title, fontsize=11)
    for chart, axes in zip(charts, panels.flat, strict=True):
        _draw(chart, axes)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Writes a figure of matplotlib to a file, completely or not at all, and closes it."""
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi)
    matplotlib.pyplot.close(figure)


def _draw(chart: Chart, axes: Axes) -> None:
    across, up = chart_scales(chart)
    for number, series in enumerate(chart.series):
        _draw_series(series, axes, COLOURS[number % len(COLOURS)])
    for limit in chart.limits:
        axes.axhline(limit.y, color=LIMIT, linewidth=1, linestyle="--", label=limit.name)
    axes.set_title(chart.title, fontsize=10, loc="left")
    axes.grid(color="0.9")
    axes.set(xscale=_scale_name(across), yscale=_scale_name(up))
    set_ticks(axes.xaxis, across.ticks)
    set_ticks(axes.yaxis, up.ticks)
    axes.tick_params(labelcolor=MUTED)
    axes.set(xlim=(across.low, across.high), ylim=(up.low, up.high), xlabel=across.title, ylabel=up.title)
    if len(chart.series) > 1 or chart.limits:
        axes.legend(fontsize=8)


def _draw_series(series: ChartSeries, axes: Axes, colour: str) -> None:
    axes.plot(series.x, series.y, STYLES[series.dash] if series.line else "", marker="o", markersize=4, color=colour,
              label=series.name)
    if series.low and series.line and not series.whiskers:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    elif series.low:
        axes.vlines(series.x, series.low, series.high, color=colour, linewidth=1)
    for x, y, words in zip(series.x, series.y, series.beside, strict=False):
        axes.annotate(words, (x, y), xytext=(4, 1), textcoords="offset points", fontsize=7, color=MUTED)
    axes.plot([series.x[index] for index in series.marked], [series.y[index] for index in series.marked], "x", color=INK,
              markersize=9, zorder=4)


def _scale_name(scale: Scale) -> str:
    return "log" if scale.log else "linear"


def set_ticks(axis: Axis, ticks: Sequence[float]) -> None:
    """Gives an axis of matplotlib these numbers, written as on a page."""
    axis.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
