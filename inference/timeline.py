"""A predicted run as a timeline that Chrome and Perfetto show: what the host dispatches when, and what the GPU works on."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference.prediction import Prediction
from ort_analysis.records import ModelRecord
from overlap_simulator import NodeSpan, chrome_trace, timeline


def trace_of(prediction: Prediction, record: ModelRecord) -> dict[str, Any]:
    """The timeline of a prediction in Chrome's trace-event format.

    With composition `pipeline` a track for the host and one for the GPU; with the others, whose sums know no host, the kernels
    one after another, each as long as its label says.

    Args:
        prediction: of `record`.
        record: the model's.
    """
    kernels = {kernel.id: kernel for kernel in prediction.kernels}
    ids = [node.kernel_id for node in record.nodes]
    times = np.array([kernels[name].latency_ms for name in ids])
    if prediction.composition.costs is None:
        ends = np.cumsum(times)
        spans = [NodeSpan((float(end - time), float(end)), None) for end, time in zip(ends, times, strict=True)]
    else:
        spans = timeline(times, np.array([kernels[name].launches or 0.0 for name in ids]),
                         np.array([record.kernels[name].moves_data for name in ids], dtype=bool), prediction.composition.costs)
    return chrome_trace([f"{node.name} ({record.kernel_of(node).type})" for node in record.nodes], spans)
