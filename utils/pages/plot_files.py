"""Writes the charts of a page as a file of their own: an SVG by the page's own code, a PNG or PDF by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hase.utils import files
from hase.utils.lazy import matplotlib
from hase.utils.pages.page import Chart, Series
from hase.utils.pages.scales import Scale, scales_of
from hase.utils.pages.svg import COLOURS, INK, LIMIT, MUTED, drawing_of_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

INCHES = (7.6, 4.4)  # of a chart
STYLES = {"": "-", "dashed": "--", "dotted": ":"}


def write_plot(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Writes charts below each other.

    Args:
        path: a .svg, for which nothing needs to be installed, or a .png or .pdf, which matplotlib draws.
        title: above them; it may have several lines.

    Raises:
        ModuleNotFoundError: matplotlib is needed and not installed; `cli.plot_file` refuses such a name.
    """
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
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    matplotlib.pyplot.close(figure)


def _draw(chart: Chart, axes: Axes) -> None:
    across, up = scales_of(chart)
    for number, series in enumerate(chart.series):
        _draw_series(series, axes, COLOURS[number % len(COLOURS)])
    for limit in chart.limits:
        axes.axhline(limit.y, color=LIMIT, linewidth=1, linestyle="--", label=limit.name)
    axes.set_title(chart.title, fontsize=10, loc="left")
    axes.grid(color="0.9")
    axes.set(xscale=_kind(across), yscale=_kind(up))
    _numbered(axes.xaxis, across)
    _numbered(axes.yaxis, up)
    axes.set(xlim=(across.low, across.high), ylim=(up.low, up.high), xlabel=across.title, ylabel=up.title)
    if len(chart.series) > 1 or chart.limits:
        axes.legend(fontsize=8)


def _draw_series(series: Series, axes: Axes, colour: str) -> None:
    axes.plot(series.x, series.y, STYLES[series.dash] if series.line else "", marker="o", markersize=4, color=colour,
              label=series.name)
    if series.low and series.line:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    elif series.low:
        axes.vlines(series.x, series.low, series.high, color=colour, linewidth=1)
    axes.plot([series.x[place] for place in series.marked], [series.y[place] for place in series.marked], "x", color=INK,
              markersize=9, zorder=4)


def _kind(scale: Scale) -> str:
    return "log" if scale.log else "linear"


def _numbered(axis: Axis, scale: Scale) -> None:
    """Gives an axis the numbers that it has on a page."""
    axis.set_major_locator(matplotlib.ticker.FixedLocator(scale.ticks))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_tick_params(labelcolor=MUTED)
