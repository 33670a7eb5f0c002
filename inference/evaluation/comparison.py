"""Compares predicted with measured latencies, as records and as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hase.inference.evaluation.models import EvaluatedModel
from hase.inference.prediction.under_load import LoadSource
from hase.utils.config import Frozen
from hase.utils.text import names_by_warning
from hase.utils.timing import ErrorStatistics, error_statistics, summarize

EvaluationSource = Literal["measured", "recorded", "listed"]


def _omitted_if_none() -> Any:
    """A field with the default None, which files then omit."""
    return Field(None, exclude_if=lambda value: value is None)


class Comparison(Frozen):
    """One model's predicted and measured latency. Errors are predicted / measured − 1; shares are ratios, too."""

    model: str  # the record's name, with the sizes of dynamic dimensions
    kind: str | None = _omitted_if_none()  # as a list of models gives it
    batch: int | None
    level: float  # busy share of the stressor; 0 is idle
    background: str = ""  # name of the stressor's work in the dataset or config; "" is idle
    load: dict[str, float] = {}  # the metrics that the prediction used, by DCGM field name
    told_by: LoadSource | None = None  # source of the load; None for an idle device or a prediction without distribution
    held_out: bool  # its group is in no fit
    background_held_out: bool = False  # measurements under this background are in no fit
    predicted_ms: float  # with measured kernels looked up
    strict_ms: float  # with all kernels predicted
    measured_ms: float  # the median of the samples; under load their mean
    median_ms: float
    mean_ms: float
    error: float
    strict_error: float
    p50_error: float | None = None  # of the 50th percentile; None if the prediction has no distribution
    p95_error: float | None = None
    spread: float  # interquartile range of the samples over their median
    runs: int  # number of samples
    measured_share: float  # of the kernel time of predicted_ms
    estimated_share: float
    rough_estimate: bool = False  # with look-up
    interval_low_ms: float | None = None  # the 90 % interval with look-up
    interval_high_ms: float | None = None
    host_pace: float | None = None  # a ratio, measured with the model and used for the prediction; None if not measured
    canary: float | None  # time of a reference workload before the measurements over its best in the dataset: 1 is steady
    predicted_memory_mib: float  # peak of the session
    measured_memory_mib: float | None = None
    warnings: tuple[str, ...] = ()  # of the prediction with look-up
    predicted_energy_j: float | None = _omitted_if_none()  # of a run; None if it can't be predicted or was not measured
    measured_energy_j: float | None = _omitted_if_none()  # the median of sessions
    energy_error: float | None = _omitted_if_none()


class Summary(Frozen):
    """Errors of a group of comparisons, with measured kernels looked up and with all predicted (`strict`). Errors of
    percentiles (mean absolute ratios) are given if all predictions have distributions, those of energies where they are
    known."""

    group: str
    level: float
    background: str = ""
    background_held_out: bool = False
    lookup: ErrorStatistics
    strict: ErrorStatistics
    p50: float | None = None
    p95: float | None = None
    energy: ErrorStatistics | None = _omitted_if_none()


class Marks(Frozen):
    """How many predictions are marked as rough estimates, the absolute errors of the others, and how many intervals hold."""

    models: int
    marked: int
    mape: float | None  # a ratio, as the next two
    median: float | None
    worst: float | None
    held: float | None  # the share of the 90 % intervals that hold the measured latency


def count_marks(comparisons: Sequence[Comparison]) -> Marks:
    """Counts the predictions that are marked as rough estimates, and the intervals that hold."""
    errors = [abs(row.error) for row in comparisons if not row.rough_estimate]
    held = [row.interval_low_ms <= row.measured_ms <= row.interval_high_ms for row in comparisons
            if row.interval_low_ms is not None and row.interval_high_ms is not None]
    return Marks(models=len(comparisons), marked=len(comparisons) - len(errors),
                 mape=float(np.mean(errors)) if errors else None, median=float(np.median(errors)) if errors else None,
                 worst=max(errors, default=None), held=sum(held) / len(held) if held else None)


class Evaluation(Frozen):
    """The result of an evaluation, as a file and as `--json` prints it. Version 1 is the first."""

    version: int = 1
    target: str
    composition: dict[str, Any]
    source: EvaluationSource  # `measured` here and now, `recorded` in the dataset, or `listed` in a file of latencies
    way: str  # how the models were run, in words
    load: str | dict[str, float]  # metrics, or `idle`, `as the probe met it`, `recorded`, or `by level` if each has its own
    comparisons: tuple[Comparison, ...]
    summaries: tuple[Summary, ...]
    failures: dict[str, str]  # models that could not be evaluated, and why
    marks: Marks  # of all comparisons
    warnings: tuple[str, ...] = ()  # about the load


def compare_model(model: EvaluatedModel, held_out: Sequence[str],
                  held_out_backgrounds: Sequence[str] = ()) -> Comparison | None:
    """Compares a model's predictions with its samples; None if one of the two is missing."""
    if model.failed or model.with_lookup is None or model.strict is None or not model.samples_ms:
        return None
    statistics = summarize(model.samples_ms)
    prediction, predicted_ms, strict_ms = model.with_lookup, model.with_lookup.latency_ms, model.strict.latency_ms
    measured_ms = statistics.median_ms if model.idle else statistics.mean_ms
    shared = prediction.under_load
    return Comparison(
        model=model.record.model, kind=model.kind, batch=model.record.batch, level=model.level, background=model.background,
        load=dict(model.load), told_by=shared.told_by if shared else None,
        held_out=model.record.group in held_out, background_held_out=model.background in held_out_backgrounds,
        predicted_ms=predicted_ms, strict_ms=strict_ms, measured_ms=measured_ms, median_ms=statistics.median_ms,
        mean_ms=statistics.mean_ms, error=predicted_ms / measured_ms - 1, strict_error=strict_ms / measured_ms - 1,
        p50_error=shared.percentile_ms(50) / statistics.median_ms - 1 if shared else None,
        p95_error=shared.percentile_ms(95) / statistics.p95_ms - 1 if shared else None,
        spread=statistics.spread, runs=statistics.runs, measured_share=prediction.time_share["measured"],
        estimated_share=prediction.time_share["estimated"], rough_estimate=prediction.rough_estimate,
        interval_low_ms=prediction.interval_ms[0], interval_high_ms=prediction.interval_ms[1],
        host_pace=prediction.host_pace if model.probes_us else None,
        canary=sum(model.canaries) / len(model.canaries) if model.canaries else None,
        predicted_memory_mib=prediction.peak_memory_mib, measured_memory_mib=model.memory_mib,
        warnings=prediction.warnings, **_energies(model))


def _energies(model: EvaluatedModel) -> dict[str, float]:
    """The energy fields of a comparison; none unless the energy was measured and predicted."""
    if model.energy is None or not model.energies_j:
        return {}
    measured_j = float(np.median(model.energies_j))
    return {"predicted_energy_j": model.energy.energy_j, "measured_energy_j": measured_j,
            "energy_error": model.energy.energy_j / measured_j - 1}


def _energy_errors(comparisons: Sequence[Comparison]) -> ErrorStatistics | None:
    pairs = [(comparison.predicted_energy_j, comparison.measured_energy_j) for comparison in comparisons
             if comparison.predicted_energy_j is not None and comparison.measured_energy_j is not None]
    return error_statistics(*zip(*pairs, strict=True)) if pairs else None


def summarise_comparisons(comparisons: Sequence[Comparison]) -> tuple[Summary, ...]:
    """Errors by level and background: of all models, and if both exist, of the held-out ones and of the others."""
    groups: dict[tuple[tuple[float, str], str], list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        load = comparison.level, comparison.background
        groups[load, "all models"].append(comparison)
        groups[load, "held out" if comparison.held_out else "not held out"].append(comparison)
    return tuple(
        Summary(group=group, level=load[0], background=load[1], background_held_out=members[0].background_held_out,
                lookup=error_statistics([c.predicted_ms for c in members], [c.measured_ms for c in members]),
                strict=error_statistics([c.strict_ms for c in members], [c.measured_ms for c in members]),
                p50=_mean_absolute([c.p50_error for c in members]), p95=_mean_absolute([c.p95_error for c in members]),
                energy=_energy_errors(members)) for (load, group), members in groups.items()
        if group == "all models" or len(members) < len(groups[load, "all models"]))


def _mean_absolute(errors: Sequence[float | None]) -> float | None:
    """The mean of absolute errors; None if one is missing."""
    known = [abs(error) for error in errors if error is not None]
    return sum(known) / len(known) if len(known) == len(errors) else None


def _percent(ratio: float | None) -> str | None:
    return None if ratio is None else f"{100 * ratio:+.1f} %"


def _load_columns(row: Comparison | Summary, rows: Sequence[Comparison | Summary]) -> dict[str, Any]:
    """The columns of the load, if any of `rows` was measured under load."""
    level = {"level": row.level} if any(other.level for other in rows) else {}
    background = {"background": row.background + (" (held out)" if row.background_held_out else "")}
    return level | (background if level and any(other.background for other in rows) else {})


def comparison_table(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The comparisons as table rows. Columns of what no comparison has are left out."""
    def if_any(name: str, columns: dict[str, Any]) -> dict[str, Any]:
        values = [getattr(row, name) for row in comparisons]
        return columns if any(value is not None and value is not False for value in values) else {}

    return [
        {"model": c.model, **({"kind": c.kind} if c.kind else {}), **_load_columns(c, comparisons),
         "held out": "yes" if c.held_out else "", "measured (ms)": c.measured_ms, "spread": f"{100 * c.spread:.1f} %",
         "canary": c.canary, **if_any("host_pace", {"host pace": c.host_pace}), "predicted (ms)": c.predicted_ms,
         "error": _percent(c.error), **if_any("rough_estimate", {"rough estimate": "yes" if c.rough_estimate else "no"}),
         **if_any("p50_error", {"p50 error": _percent(c.p50_error), "p95 error": _percent(c.p95_error)}),
         **if_any("energy_error", {"measured (J)": c.measured_energy_j, "predicted (J)": c.predicted_energy_j,
                                   "energy error": _percent(c.energy_error)}),
         "strict (ms)": c.strict_ms, "strict error": _percent(c.strict_error), "memory (MiB)": c.predicted_memory_mib,
         "measured (MiB)": c.measured_memory_mib} for c in comparisons]


def summary_table(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """The summaries as table rows: for each group one with look-up and one strict."""
    return [
        {"models": s.group, **_load_columns(s, summaries), "kernels": kind, "count": e.count, "MAPE": f"{e.mape:.1%}",
         "median": f"{e.median:.1%}", "within ±5 %": f"{e.within_5:.0%}", "within ±10 %": f"{e.within_10:.0%}",
         "worst": f"{e.worst:.1%}",
         **({"p50": f"{s.p50:.1%}", "p95": f"{s.p95:.1%}"} if kind == "looked up" and s.p50 is not None and s.p95 is not None
            else {"p50": None, "p95": None} if any(row.p50 is not None for row in summaries) else {})}
        for s in summaries for kind, e in (("looked up", s.lookup), ("all predicted", s.strict),
                                           *((("energy", s.energy),) if s.energy else ()))]


def models_by_warning(comparisons: Sequence[Comparison]) -> dict[str, list[str]]:
    """The models that each warning concerns, the most frequent warning first."""
    warned = names_by_warning((comparison.model, comparison.warnings) for comparison in comparisons)
    return dict(sorted(warned.items(), key=lambda item: -len(item[1])))


def marks_in_words(marks: Marks) -> str:
    """`Marks` as a sentence."""
    words = [f"{marks.marked} of {marks.models} predictions are marked as rough estimates"]
    if marks.mape is not None:
        words.append(f"the others err by {marks.mape:.1%} on the mean, {marks.median:.1%} in the median, {marks.worst:.1%} at "
                     "most")
    if marks.held is not None:
        words.append(f"{marks.held:.1%} of the 90 % intervals hold what was measured")
    return "; ".join(words)
