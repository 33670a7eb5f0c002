"""The plot and the page of an evaluation: predicted against measured latencies, and the errors model by model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hase.inference.evaluation.comparison import comparison_table, marks_in_words, models_by_warning, summary_table
from hase.inference.reporting.runs import about, sentence
from hase.utils.lazy import matplotlib
from hase.utils.pages.charts import save_figure, set_ticks
from hase.utils.pages.page import Bar, Bars, Chart, ChartAxis, ChartSeries, Fact, Page, PageSection, PageTable, log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hase.inference.evaluation.comparison import Comparison, Evaluation


MOST_ROWS, MOST_WARNINGS = 500, 100  # on a page, so that it stays below 2 MB
MEASURED = {"measured": "here and now", "recorded": "in the target's dataset", "listed": "on a machine with the device"}
MOST_BARS = 12  # of the models with the largest errors
GROUPS = ((False, "families in the fit", "tab:blue"), (True, "families in no fit", "tab:orange"))  # by `held_out`
MOST_NAMES = 5  # of models with the largest errors, below the plot
BAND = 0.1  # half the width of the band around equality, a ratio
LABEL_POINTS = 9.0  # the size of a number, in points
DIRECTIONS = 8  # in which a number may lie from its point
RINGS = (1.3, 2.0, 3.0, 4.0)  # distances to try between a point and its number, in sizes of a number
CLEARANCE = 1.0  # free space around a number, in sizes of a number


def evaluation_page(evaluation: Evaluation) -> Page:
    """The page of an evaluation."""
    rows, models = evaluation.comparisons, len({row.model for row in evaluation.comparisons})
    errors = [abs(row.error) for row in rows]
    held = sum(low <= row.measured_ms <= high for row in rows for low, high in [row_interval(row)]) / len(rows)
    near = sum(error <= BAND for error in errors) / len(rows)
    mean, strict = sum(errors) / len(rows), sum(abs(row.strict_error) for row in rows) / len(rows)
    by_error = largest_errors(rows)
    many = f"{len(rows)} latencies" if len(rows) > 1 else "One latency"
    facts = [Fact("mean error", f"{100 * mean:.1f}", "%", "measured kernels looked up"),
             Fact("mean error, strict", f"{100 * strict:.1f}", "%", "all kernels predicted"),
             Fact(f"within ±{BAND:.0%}", f"{100 * near:.0f}", "%", "of the latencies"),
             Fact("inside their intervals", f"{100 * held:.0f}", "%", "of the latencies; 90 % were promised"),
             Fact("largest error", f"{100 * by_error[0].error:+.1f}", "%", by_error[0].model)]
    failures = [{"model": model, "why": why} for model, why in evaluation.failures.items()]
    warned = models_by_warning(rows)  # most frequent first
    warnings = dict.fromkeys(evaluation.warnings, ()) | about(dict(list(warned.items())[:MOST_WARNINGS]), models)
    if len(warned) > MOST_WARNINGS:
        warnings[f"{len(warned) - MOST_WARNINGS} rarer warnings are in evaluation.json only"] = ()
    shown = by_error[:MOST_ROWS] if len(rows) > MOST_ROWS else rows
    left_out = "" if shown is rows else f"The {MOST_ROWS} of {len(rows)} with the largest errors; all are in evaluation.csv."
    unseen = sum(row.held_out for row in rows)
    families = f"{unseen} of them are of families that are in no fit." if unseen else (
        "All are of families that are in the fit, so errors of other models may be larger.")
    marks = [sentence(marks_in_words(evaluation.marks))] if any(row.kind for row in rows) else []
    return Page(
        "Predicted and measured", f"{models} models on {evaluation.target}",
        f"{many} on {evaluation.target}: predictions err by {mean:.1%} on the mean.",
        [f"{families} An error is predicted / measured − 1; the mean is that of their sizes.", *marks], facts,
        [PageSection("Predicted against measured", [scatter(rows)],
                 f"Points on the line are right; the band is ±{BAND:.0%}. Whiskers are 90 % intervals."),
         PageSection("The largest errors", [_error_bars(by_error[:MOST_BARS])]),
         PageSection("Errors by group", [PageTable(summary_table(evaluation.summaries))]),
         PageSection("Model by model", [PageTable(comparison_table(shown), "Latencies", most=30)], left_out),
         *([PageSection("Without a comparison", [PageTable(failures)])] if failures else [])],
        warnings, {"target": evaluation.target, "measured": MEASURED[evaluation.source],
         "run": evaluation.way, "load": evaluation.load if isinstance(evaluation.load, str) else ", ".join(
             f"{name}={value:g}" for name, value in evaluation.load.items())})


def row_name(row: Comparison) -> str:
    """The model of a comparison, and the load under which it was measured."""
    return row.model + (f" ({' '.join(filter(None, (f'load {row.level:g}', row.background)))})" if row.level else "")


def row_interval(row: Comparison) -> tuple[float, float]:
    """The interval of a comparison's prediction (ms); the prediction itself if it has none."""
    return row.interval_low_ms or row.predicted_ms, row.interval_high_ms or row.predicted_ms


def largest_errors(rows: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons, sorted by the size of their errors, the largest first."""
    return sorted(rows, key=lambda row: -abs(row.error))


def scatter(rows: Sequence[Comparison]) -> Chart:
    """A chart with a point for each latency, and the interval of its prediction."""
    series = []
    for held_out, name, _ in GROUPS:
        group = [row for row in rows if row.held_out == held_out]
        if group:
            low, high = zip(*map(row_interval, group), strict=True)
            series.append(ChartSeries(name, [row.measured_ms for row in group], [row.predicted_ms for row in group], low, high,
                                      [row_name(row) for row in group], line=False))
    return Chart("Predicted over measured latency", ChartAxis("measured (ms)", log=True), ChartAxis("predicted (ms)", log=True),
                 series, equality=BAND)


def _error_bars(rows: Sequence[Comparison]) -> Bars:
    """The errors of some comparisons, and the errors at the ends of their intervals."""
    bars = []
    for row in rows:
        low, high = (100 * (end / row.measured_ms - 1) for end in row_interval(row))
        bars.append(Bar(row_name(row), 100 * row.error, low, high,
                        f"predicted {row.predicted_ms:.4g} ms, measured {row.measured_ms:.4g} ms"))
    return Bars("Errors, with the prediction's interval", ChartAxis("error (%)", zero=True), bars)


def draw_scatter(rows: Sequence[Comparison], title: str, path: Path) -> None:
    """Draws predicted over measured latencies as a PNG, with intervals, the line of equality, and a band around it. The largest
    errors are numbered, and named below."""
    matplotlib.use("Agg")
    values = [value for row in rows for value in (row.measured_ms, row.predicted_ms, *row_interval(row))]
    ends = [min(values) / 1.3, max(values) * 1.3]
    figure, (axes, below) = matplotlib.pyplot.subplots(2, figsize=(8, 9.6), height_ratios=(8, 1.5), layout="constrained")
    axes.fill_between(ends, [(1 - BAND) * end for end in ends], [(1 + BAND) * end for end in ends], color="0.92",
                      label=f"within ±{BAND:.0%}")
    axes.plot(ends, ends, color="0.5", linewidth=1, label="predicted = measured")
    for held_out, name, colour in GROUPS:
        group = [row for row in rows if row.held_out == held_out]
        if group:
            measured_ms, predicted_ms = [row.measured_ms for row in group], [row.predicted_ms for row in group]
            low_ms, high_ms = zip(*map(row_interval, group), strict=True)
            axes.vlines(measured_ms, low_ms, high_ms, color=colour, alpha=0.4, linewidth=1, zorder=2)
            axes.scatter(measured_ms, predicted_ms, s=30, alpha=0.75, edgecolors="white", linewidths=0.6, color=colour,
                         label=name, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        set_ticks(axis, log_ticks(*ends))
    axes.tick_params(labelsize=11)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("measured latency (ms)", fontsize=12)
    axes.set_ylabel("predicted latency (ms)", fontsize=12)
    axes.set_title(title, fontsize=12)
    axes.legend(loc="upper left", fontsize=10)
    named = largest_errors(rows)[:MOST_NAMES]
    lines = [f"{number}  {row.error:+.1%}  {row_name(row)}: {row.predicted_ms:.4g} ms, measured {row.measured_ms:.4g}"
             for number, row in enumerate(named, 1)]
    below.axis("off")
    below.text(0, 1, "\n".join(["largest errors", *lines]), transform=below.transAxes, fontsize=10, va="top", linespacing=1.4)
    figure.canvas.draw()  # fixes the layout, on which the positions of the numbers depend
    _number_points(axes, named, rows)
    save_figure(figure, path)


def _number_points(axes: Axes, named: Sequence[Comparison], rows: Sequence[Comparison]) -> None:
    """Writes 1, 2, … next to the points of `named` rows, where they cover neither points of `rows` nor other numbers."""
    scale = axes.get_figure(root=True).dpi / 72  # type: ignore[union-attr]
    size = LABEL_POINTS * scale
    occupied = [tuple(axes.transData.transform((row.measured_ms, row.predicted_ms))) for row in rows]
    for number, row in enumerate(named, 1):
        x, y = axes.transData.transform((row.measured_ms, row.predicted_ms))
        outward = (3 if row.error > 0 else -1) * math.pi / 4
        turns = sorted(range(DIRECTIONS), key=lambda turn: min(turn, DIRECTIONS - turn))
        around = [(ring * size * math.cos(outward + turn * math.tau / DIRECTIONS),
                   ring * size * math.sin(outward + turn * math.tau / DIRECTIONS)) for ring in RINGS for turn in turns]
        dx, dy = next(((dx, dy) for dx, dy in around if all(
            math.dist((x + dx, y + dy), other) > CLEARANCE * size for other in occupied)), around[0])
        occupied.append((x + dx, y + dy))
        label = axes.annotate(
            str(number), (row.measured_ms, row.predicted_ms), (dx / scale, dy / scale), textcoords="offset points",
            fontsize=LABEL_POINTS, fontweight="bold", ha="center", va="center", zorder=4,
            arrowprops={"arrowstyle": "-", "color": "0.4", "linewidth": 0.6, "shrinkA": 4, "shrinkB": 2})
        label.set_path_effects([matplotlib.patheffects.withStroke(linewidth=2, foreground="white")])
