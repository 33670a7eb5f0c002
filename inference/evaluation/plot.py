"""The plot of an evaluation: predicted over measured latencies, with the names of the worst ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hase.utils import files
from hase.utils.lazy import matplotlib
from hase.utils.pages.scales import log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED = 5  # number of models with a name: those with the largest errors
BAND = 0.1  # a ratio
LABEL_POINTS = 9.0  # size of a number, and its distance from its point, in points
DIRECTIONS = 8  # number of directions from a point to its number
RINGS = (1.3, 2.0, 3.0, 4.0)  # distances to try, in sizes of a number
CLEARANCE = 1.0  # free space around a number, in sizes of a number


class Point(NamedTuple):
    """One latency: its name, measured and predicted (ms), whether its group was held out of all fits, and the interval of the
    prediction (ms)."""

    name: str
    measured_ms: float
    predicted_ms: float
    held_out: bool
    between_ms: tuple[float, float]

    @property
    def error(self) -> float:
        """The error of the prediction, a ratio."""
        return self.predicted_ms / self.measured_ms - 1


def worst(points: Sequence[Point], count: int = NAMED) -> list[Point]:
    """The points with the largest errors, the largest first."""
    return sorted(points, key=lambda point: -abs(point.error))[:count]


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Writes the plot (a .png): logarithmic axes, the line of equality, a band of ±10 % around it, and intervals."""
    matplotlib.use("Agg")
    values = [value for point in points for value in (point.measured_ms, point.predicted_ms, *point.between_ms)]
    ends = [min(values) / 1.3, max(values) * 1.3]
    figure, (axes, below) = matplotlib.pyplot.subplots(2, figsize=(8, 9.6), height_ratios=(8, 1.5), layout="constrained")
    axes.fill_between(ends, [(1 - BAND) * end for end in ends], [(1 + BAND) * end for end in ends], color="0.92",
                      label=f"within ±{BAND:.0%}")
    axes.plot(ends, ends, color="0.5", linewidth=1, label="predicted = measured")
    for held_out, colour, label in ((False, "tab:blue", "families in the fit"), (True, "tab:orange", "families in no fit")):
        group = [point for point in points if point.held_out == held_out]
        if group:
            lows, highs = zip(*(point.between_ms for point in group), strict=True)
            axes.vlines([point.measured_ms for point in group], lows, highs, color=colour, alpha=0.4, linewidth=1, zorder=2)
            axes.scatter([point.measured_ms for point in group], [point.predicted_ms for point in group], s=30, alpha=0.75,
                         edgecolors="white", linewidths=0.6, color=colour, label=label, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.FixedLocator(log_ticks(*ends)))
        axis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(labelsize=11)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("measured latency (ms)", fontsize=12)
    axes.set_ylabel("predicted latency (ms)", fontsize=12)
    axes.set_title(title, fontsize=12)
    axes.legend(loc="upper left", fontsize=10)
    named = worst(points)
    lines = [f"{number}  {point.error:+.1%}  {point.name}: {point.predicted_ms:.4g} ms, measured {point.measured_ms:.4g}"
             for number, point in enumerate(named, 1)]
    below.axis("off")
    below.text(0, 1, "\n".join(["largest errors", *lines]), transform=below.transAxes, fontsize=10, va="top", linespacing=1.4)
    figure.canvas.draw()  # fixes the layout, on which the positions of the numbers depend
    number_points(axes, named, points)
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    matplotlib.pyplot.close(figure)


def number_points(axes: Axes, named: Sequence[Point], points: Sequence[Point]) -> None:
    """Writes 1, 2, … next to the `named` ones of `points`, where they cover neither points nor other numbers."""
    scale = axes.get_figure(root=True).dpi / 72  # type: ignore[union-attr]
    size = LABEL_POINTS * scale
    taken = [tuple(axes.transData.transform((point.measured_ms, point.predicted_ms))) for point in points]
    for number, point in enumerate(named, 1):
        x, y = axes.transData.transform((point.measured_ms, point.predicted_ms))
        outward = (3 if point.error > 0 else -1) * math.pi / 4
        turns = sorted(range(DIRECTIONS), key=lambda turn: min(turn, DIRECTIONS - turn))
        around = [(ring * size * math.cos(outward + turn * math.tau / DIRECTIONS),
                   ring * size * math.sin(outward + turn * math.tau / DIRECTIONS))
                  for ring in RINGS for turn in turns]
        dx, dy = next(((dx, dy) for dx, dy in around if all(
            math.dist((x + dx, y + dy), placed) > CLEARANCE * size for placed in taken)), around[0])
        taken.append((x + dx, y + dy))
        label = axes.annotate(
            str(number), (point.measured_ms, point.predicted_ms), (dx / scale, dy / scale), textcoords="offset points",
            fontsize=LABEL_POINTS, fontweight="bold", ha="center", va="center", zorder=4,
            arrowprops={"arrowstyle": "-", "color": "0.4", "linewidth": 0.6, "shrinkA": 4, "shrinkB": 2})
        label.set_path_effects([matplotlib.patheffects.withStroke(linewidth=2, foreground="white")])
