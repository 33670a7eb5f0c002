"""Where a run's time goes, as parts of a page: by operator, by layer, and over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hase.inference.core.model_run import spans_of
from hase.inference.reporting.layers import time_by_layer
from hase.utils.pages.page import COLOURS, Piece, Section, Shares, Span, Table, Timeline, TreeMap

if TYPE_CHECKING:
    from pathlib import Path

    from hase.inference.core.answers import Prediction
    from hase.inference.core.model_run import PredictedRun

MOST_SPANS = 8000  # of a timeline: a page stays below 2 MB


def operators_by_time(predictions: Sequence[Prediction]) -> list[str]:
    """The kernel types with the most time in all of the predictions: they have a colour each."""
    shares: dict[str, float] = {}
    for prediction in predictions:
        for kernel in prediction.kernels:
            shares[kernel.type] = shares.get(kernel.type, 0.0) + kernel.share
    return sorted(shares, key=lambda operator: -shares[operator])[:COLOURS]


def run_sections(run: PredictedRun, file: Path) -> list[Section]:
    """Where a run's time goes, and the run over time, of the model in the file."""
    timeline, said_of_it = run_over_time(run)
    return [Section("Where the time goes", where_time_goes(run, file), _together(run)),
            Section("The run over time", [timeline], said_of_it)]


def folded_run(name: str, run: PredictedRun, file: Path) -> Section:
    """The same of one run among several, in a section that the reader opens by its name."""
    timeline, said_of_it = run_over_time(run)
    return Section(name, [*where_time_goes(run, file), timeline], f"{_together(run)} {said_of_it}", folded=True)


def _together(run: PredictedRun) -> str:
    nodes, sum_ms = sum(run.prediction.kernel_count.values()), run.prediction.kernel_sum_ms
    return f"The kernels of its {nodes} nodes take {sum_ms:.4g} ms together."


def where_time_goes(run: PredictedRun, file: Path) -> list[Piece]:
    """Where a run's time goes: what is measured, by operator, and by layer of the model in the file."""
    prediction = run.prediction
    layers, layered = time_by_layer(run, file)
    return [Shares("Where the kernels' times come from", {str(name): share for name, share in prediction.time_share.items()}),
            Table(operator_rows(prediction), "By operator", bar="time (ms)", coloured="operator", most=10),
            TreeMap("By layer of the model" if layered else "By operator and node", layers, "ms")]


def operator_rows(prediction: Prediction) -> list[dict[str, object]]:
    """A row for each kernel type, the one with the most time first."""
    rows: dict[str, dict[str, float]] = {}
    for kernel in prediction.kernels:
        row = rows.setdefault(kernel.type, {"ms": 0.0, "share": 0.0, "runs": 0, "kernels": 0, "measured": 0.0})
        row["ms"] += kernel.total_ms
        row["share"] += kernel.share
        row["runs"] += kernel.count
        row["kernels"] += 1
        row["measured"] += kernel.total_ms if kernel.provenance == "measured" else 0.0
    return [{"operator": operator, "time (ms)": row["ms"], "share": f"{row['share']:.1%}", "runs": int(row["runs"]),
             "kernels": int(row["kernels"]), "measured": f"{row['measured'] / row['ms'] if row['ms'] else 0:.0%}"}
            for operator, row in sorted(rows.items(), key=lambda item: -item[1]["ms"])]


def run_over_time(run: PredictedRun) -> tuple[Timeline, str]:
    """The tracks of a run, and sentences about them."""
    record, spans = run.run.record, spans_of(run)
    nodes = [record.nodes[place] for place in run.run.order]
    tracks: dict[str, list[Span]] = {"host": [], "GPU": []} if run.run.costs else {"kernels": []}
    for node, span in zip(nodes[:MOST_SPANS], spans, strict=False):
        operator = record.kernel_of(node).type
        for name, when in zip(tracks, span, strict=False):
            if when is not None:
                tracks[name].append(Span(*when, f"{node.name} ({operator})", operator))
    text = "Nodes one after another, each as long as its kernel; what the host does between them is in the latency only."
    if run.run.costs:
        gpu_ms = sum(end - begin for _, when in spans if when for begin, end in [when])
        busy = gpu_ms / run.alone_ms if run.alone_ms else 0.0
        text = (f"The host launches node after node, and the GPU works through them: it is busy for {min(busy, 1):.0%} of the "
                "run. Where it pauses, it waits for the host.")
    if len(nodes) > MOST_SPANS:
        text += f" The first {MOST_SPANS} of {len(nodes)} nodes are shown."
    return Timeline("Host and GPU" if run.run.costs else "Kernels", tracks), text
