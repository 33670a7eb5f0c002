"""The difference of two models as rows and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hase.inference.core.model_differences import said_of_difference
from hase.inference.reporting.common import about, sentence, target_basis
from hase.inference.reporting.runs import folded_run, operators_by_time
from hase.utils.pages.page import Axis, Bar, Bars, Fact, Page, Section, Table
from hase.utils.pages.scales import axis_for

if TYPE_CHECKING:
    from pathlib import Path

    from hase.inference.core.model_differences import ComparedModel, ModelDifference
    from hase.inference.core.model_run import PredictedRun


def difference_rows(difference: ModelDifference) -> list[dict[str, Any]]:
    """A row for each operator and one for the time outside kernels, the largest difference first."""
    a, b, whole_ms = difference.a, difference.b, difference.difference_ms
    rows = [(row.difference_ms, {
        "operator": row.operator, "runs A": f"{row.a.runs:g}", "runs B": f"{row.b.runs:g}", "A (ms)": row.a.time_ms,
        "B (ms)": row.b.time_ms, "B - A (ms)": row.difference_ms, "share": _percent(row.share),
        "measured A": _percent(row.a.measured_share if row.a.runs else None),
        "measured B": _percent(row.b.measured_share if row.b.runs else None), "what explains it": row.explanation})
        for row in difference.operators]
    outside_ms = difference.outside_kernels_ms
    rows.append((outside_ms, {
        "operator": "outside kernels", "runs A": None, "runs B": None, "A (ms)": a.outside_kernels_ms,
        "B (ms)": b.outside_kernels_ms, "B - A (ms)": outside_ms,
        "share": _percent(outside_ms / whole_ms if whole_ms else None),
        "measured A": None, "measured B": None, "what explains it": f"{a.nodes:g} nodes in A, {b.nodes:g} in B"}))
    return [row for _, row in sorted(rows, key=lambda pair: -abs(pair[0]))]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{round(100 * share)}%"


def difference_page(difference: ModelDifference, runs: Sequence[PredictedRun], files: Sequence[Path],
                    warned: Mapping[str, Sequence[str]]) -> Page:
    """The page of two models.

    Args:
        difference: of their predictions.
        runs, files: of A and B.
        warned: which of A and B each warning concerns.
    """
    a, b = difference.a, difference.b
    names = f"A = {a.model}, B = {b.model}"
    answer, *more = (sentence(line.removeprefix(f"{names}: ")) for line in said_of_difference(difference))
    rows = difference_rows(difference)
    latencies = [Bar(f"{name}: {one.model}", one.latency_ms, *one.interval_ms, "a rough estimate" if one.rough_estimate else "")
                 for name, one in (("A", a), ("B", b))]
    shift = [Bar(row["operator"], row["B - A (ms)"], note=row["what explains it"]) for row in rows if row["B - A (ms)"]]
    return Page(
        "Two models compared", f"{a.model} and {b.model}", answer, [f"{names}.", *more],
        [_fact("A", a), _fact("B", b), _ratio(difference)],
        [Section("Latency, with its interval", [Bars("Latency", axis_for("ms", [a.latency_ms, b.latency_ms]), latencies)]),
         Section("Operator by operator", [Bars("How much longer B takes", Axis("ms", zero=True), shift[:12]),
                                          Table(rows, "All of the difference", most=30)],
                 "The rows add up to the difference of the latencies. A negative number means that B takes less."),
         *(folded_run(f"{name}: {one.model}", run, file)
           for name, one, run, file in zip("AB", (a, b), runs, files, strict=True))],
        about(warned, 2),
        {"A": _called(a), "B": _called(b), **target_basis(runs[0].fitted),
         "run": "replayed as a CUDA graph" if difference.cuda_graph else "node by node",
         "other work": "none"}, operators_by_time([run.prediction for run in runs]))


def _fact(name: str, one: ComparedModel) -> Fact:
    low, high = one.interval_ms
    return Fact(f"{name}: {one.model}", f"{one.latency_ms:.4g}", "ms", f"90 % between {low:.4g} and {high:.4g}",
                "doubtful" if one.rough_estimate else "", (low, one.latency_ms, high))


def _called(one: ComparedModel) -> str:
    return ", ".join([one.file, *(f"{name}={size}" for name, size in one.dims.items())])


def _ratio(difference: ModelDifference) -> Fact:
    overlap = difference.intervals_overlap
    return Fact("B over A", f"{difference.ratio:.3g}", "times", f"the intervals {'' if overlap else 'do not '}overlap",
                "doubtful" if overlap else "")
