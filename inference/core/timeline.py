"""A predicted run as a timeline that Chrome and Perfetto show: what the host dispatches when, and what the GPU works on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graph_model.simulation.pipeline import NodeSpan, chrome_trace, timeline

if TYPE_CHECKING:
    from inference.core.predicted_run import PredictedRun


def trace_of(predicted: PredictedRun) -> dict[str, Any]:
    """The timeline of a predicted run in Chrome's trace-event format.

    With composition `pipeline` a track for the host and one for the GPU; with the others, whose sums know no host, the kernels
    one after another, each as long as its label says. Of very long loops only a part.
    """
    run = predicted.run
    if run.costs is None:
        times = [node.latency_ms for node in run.nodes_run]
        spans = [NodeSpan((float(end - time), float(end)), None) for end, time in zip(np.cumsum(times), times, strict=True)]
    else:
        spans = timeline(run.tracks, run.costs, run.off_gpu)
    nodes = [run.record.nodes[place] for place in run.order]
    return chrome_trace([f"{node.name} ({run.record.kernel_of(node).type})" for node in nodes], spans)
