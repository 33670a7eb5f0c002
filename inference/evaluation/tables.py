"""The tables of an evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from inference.evaluation.comparison import Comparison, Summary, percent


def percentile_columns(one: Comparison, others: Sequence[Comparison]) -> dict[str, Any]:
    """The columns for errors of percentiles, if any of `others` has them."""
    if all(other.p50_error is None for other in others):
        return {}
    return {name: None if error is None else percent(error)
            for name, error in (("p50 error", one.p50_error), ("p95 error", one.p95_error))}


def energy_columns(one: Comparison, others: Sequence[Comparison]) -> dict[str, Any]:
    """The columns of measured and predicted energy, if any of `others` has both."""
    if all(other.energy_error is None for other in others):
        return {}
    return {"measured (J)": one.measured_energy_j, "predicted (J)": one.predicted_energy_j,
            "energy error": None if one.energy_error is None else percent(one.energy_error)}


def load_columns(one: Comparison | Summary, others: Sequence[Comparison | Summary]) -> dict[str, Any]:
    """The columns that show what else ran, if any of `others` was measured under load."""
    if not any(other.level for other in others):
        return {}
    background = {"background": one.background + (" (held out)" if one.background_held_out else "")}
    return {"level": one.level, **(background if any(other.background for other in others) else {})}


def table(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The comparisons as rows of a table."""
    return [
        {"model": c.model, **load_columns(c, comparisons),
         "held out": "yes" if c.held_out else "", "measured (ms)": c.measured_ms, "spread": f"{100 * c.spread:.1f} %",
         "canary": c.canary,
         **({"host pace": c.host_pace} if any(other.host_pace is not None for other in comparisons) else {}),
         "predicted (ms)": c.predicted_ms, "error": percent(c.error),
         **({"rough estimate": "yes" if c.rough_estimate else "no"} if any(other.rough_estimate for other in comparisons)
            else {}),
         **percentile_columns(c, comparisons), **energy_columns(c, comparisons), "strict (ms)": c.strict_ms,
         "strict error": percent(c.strict_error), "memory (MiB)": c.predicted_memory_mib,
         "measured (MiB)": c.measured_memory_mib}
        for c in comparisons]


def summary_table(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """The summaries as rows of a table: one with look-up and one strict for each group."""
    return [
        {"models": s.group, **load_columns(s, summaries), "kernels": kind, "count": e.count, "MAPE": f"{e.mape:.1%}",
         "median": f"{e.median:.1%}", "within ±5 %": f"{e.within_5:.0%}", "within ±10 %": f"{e.within_10:.0%}",
         "worst": f"{e.worst:.1%}",
         **({"p50": f"{s.p50:.1%}", "p95": f"{s.p95:.1%}"} if kind == "looked up" and s.p50 is not None and s.p95 is not None
            else {"p50": None, "p95": None} if any(other.p50 is not None for other in summaries) else {})}
        for s in summaries for kind, e in (("looked up", s.lookup), ("all predicted", s.strict),
                                           *((("energy", s.energy),) if s.energy else ()))]


def warned_of(comparisons: Sequence[Comparison]) -> dict[str, list[str]]:
    """The models by warning of their predictions; the most frequent warning first."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for one in comparisons:
        for warning in one.warnings:
            found[warning][one.model] = None
    return {warning: list(found[warning]) for warning in sorted(found, key=lambda warning: -len(found[warning]))}
