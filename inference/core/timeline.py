"""A predicted run as a timeline for Chrome and Perfetto: when the host dispatches each node, and when the GPU works on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graph_model.simulation.pipeline import NodeSpan, chrome_trace, timeline

if TYPE_CHECKING:
    from inference.core.predicted_run import PredictedRun


def trace_of(predicted: PredictedRun) -> dict[str, Any]:
    """The timeline of a predicted run in Chrome's trace-event format.

    With composition `pipeline` it has one track for the host and one for the GPU. The other compositions do not know the host,
    so the kernels stand one after another, each as long as its label says. Of very long loops only some trips are shown.
    """
    run = predicted.run
    if run.costs is None:
        times = [node.latency_ms for node in run.nodes_run]
        spans = [NodeSpan((float(end - time), float(end)), None) for end, time in zip(np.cumsum(times), times, strict=True)]
    else:
        spans = timeline(run.tracks, run.costs, run.off_gpu)
    nodes = [run.record.nodes[place] for place in run.order]
    return chrome_trace([f"{node.name} ({run.record.kernel_of(node).type})" for node in nodes], spans)
