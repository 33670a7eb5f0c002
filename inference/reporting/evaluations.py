"""The page of an evaluation: predicted against measured latencies, and the errors model by model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hase.inference.evaluation.comparison import summary_table, table, warned_of
from hase.inference.evaluation.plot import BAND
from hase.inference.reporting.common import about
from hase.utils.pages.page import Axis, Bar, Bars, Chart, Fact, Page, Section, Series, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hase.inference.evaluation.comparison import Comparison, Evaluation

MOST_ROWS, MOST_WARNINGS = 500, 100  # of a page, which stays below 2 MB
WORST = 12  # models whose errors are drawn
GROUPS = ((False, "families in the fit"), (True, "families in no fit"))


def evaluation_page(evaluation: Evaluation) -> Page:
    """The page of an evaluation."""
    rows, models = evaluation.comparisons, len({row.model for row in evaluation.comparisons})
    errors = [abs(row.error) for row in rows]
    held = sum(low <= row.measured_ms <= high for row in rows for low, high in [interval_of(row)]) / len(rows)
    near = sum(error <= BAND for error in errors) / len(rows)
    mean, strict = sum(errors) / len(rows), sum(abs(row.strict_error) for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    many = f"{len(rows)} latencies" if len(rows) > 1 else "One latency"
    facts = [Fact("mean error", f"{100 * mean:.1f}", "%", "measured kernels looked up"),
             Fact("mean error, strict", f"{100 * strict:.1f}", "%", "all kernels predicted"),
             Fact(f"within ±{BAND:.0%}", f"{100 * near:.0f}", "%", "of the latencies"),
             Fact("inside their intervals", f"{100 * held:.0f}", "%", "of the latencies; 90 % were promised"),
             Fact("largest error", f"{100 * worst.error:+.1f}", "%", worst.model)]
    failures = [{"model": model, "why": why} for model, why in evaluation.failures.items()]
    warned = warned_of(rows)  # the most frequent one first
    warnings = dict.fromkeys(evaluation.warnings, ()) | about(dict(list(warned.items())[:MOST_WARNINGS]), models)
    if len(warned) > MOST_WARNINGS:
        warnings[f"{len(warned) - MOST_WARNINGS} rarer warnings are in evaluation.json only"] = ()
    shown = sorted(rows, key=lambda row: -abs(row.error))[:MOST_ROWS] if len(rows) > MOST_ROWS else rows
    left_out = "" if shown is rows else f"The {MOST_ROWS} of {len(rows)} with the largest errors; all are in evaluation.csv."
    unseen = sum(row.held_out for row in rows)
    said = f"{unseen} of them are of families that are in no fit." if unseen else (
        "All are of families that are in the fit, so models of others may err by more.")
    return Page(
        "Predicted and measured", f"{models} models on {evaluation.target}",
        f"{many} on {evaluation.target}: predictions err by {mean:.1%} on the mean.",
        [f"{said} An error is predicted / measured − 1; the mean is that of their sizes."], facts,
        [Section("Predicted against measured", [scatter(rows)],
                 f"Points on the line are right; the band is ±{BAND:.0%}. Whiskers are 90 % intervals."),
         Section("The largest errors", [_worst(rows)]),
         Section("Errors by group", [Table(summary_table(evaluation.summaries))]),
         Section("Model by model", [Table(table(shown), "Latencies", most=30)], left_out),
         *([Section("Without a comparison", [Table(failures)])] if failures else [])],
        warnings,
        {"target": evaluation.target,
         "measured": "here and now" if evaluation.source == "measured" else "in the target's dataset",
         "run": evaluation.way, "load": evaluation.load if isinstance(evaluation.load, str) else ", ".join(
             f"{name}={value:g}" for name, value in evaluation.load.items())})


def called(row: Comparison) -> str:
    """A comparison's model, with the load that it was measured under."""
    return row.model + (f" ({' '.join(filter(None, (f'load {row.level:g}', row.background)))})" if row.level else "")


def interval_of(row: Comparison) -> tuple[float, float]:
    """The interval of a comparison's prediction, ms; the prediction itself where the comparison has none."""
    return row.interval_low_ms or row.predicted_ms, row.interval_high_ms or row.predicted_ms


def scatter(rows: Sequence[Comparison]) -> Chart:
    """A point for each latency, with the interval of its prediction."""
    series = []
    for held_out, name in GROUPS:
        group = [row for row in rows if row.held_out == held_out]
        if group:
            low, high = zip(*map(interval_of, group), strict=True)
            series.append(Series(name, [row.measured_ms for row in group], [row.predicted_ms for row in group], low, high,
                                 [called(row) for row in group], line=False))
    return Chart("Predicted over measured latency", Axis("measured (ms)", log=True), Axis("predicted (ms)", log=True), series,
                 equality=BAND)


def _worst(rows: Sequence[Comparison]) -> Bars:
    """The models with the largest errors, and where their intervals would have put the error."""
    bars = []
    for row in sorted(rows, key=lambda row: -abs(row.error))[:WORST]:
        low, high = (100 * (end / row.measured_ms - 1) for end in interval_of(row))
        bars.append(Bar(called(row), 100 * row.error, low, high,
                        f"predicted {row.predicted_ms:.4g} ms, measured {row.measured_ms:.4g} ms"))
    return Bars("Errors, with the prediction's interval", Axis("error (%)", zero=True), bars)
