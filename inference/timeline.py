"""A predicted run as a timeline that Chrome and Perfetto show: what the host dispatches when, and what the GPU works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from inference.prediction import Prediction
from ort_analysis.records import ModelRecord
from overlap_simulator import NodeSpan, chrome_trace, timeline


class Tracks(NamedTuple):
    """A run's nodes in order: the GPU's time of each (ms), its launches, and whether it moves data."""

    gpu_ms: npt.NDArray[np.float64]
    launches: npt.NDArray[np.float64]
    moves: npt.NDArray[np.bool_]


def tracks_of(prediction: Prediction, record: ModelRecord) -> Tracks:
    """The nodes of `record`, of which `prediction` is; without composition `pipeline` no launches are known, and stand as 0."""
    kernels = {kernel.id: kernel for kernel in prediction.kernels}
    ids = [node.kernel_id for node in record.nodes]
    return Tracks(np.array([kernels[name].latency_ms for name in ids]),
                  np.array([kernels[name].launches or 0.0 for name in ids]),
                  np.array([record.kernels[name].moves_data for name in ids], dtype=bool))


def trace_of(prediction: Prediction, record: ModelRecord) -> dict[str, Any]:
    """The timeline of a prediction in Chrome's trace-event format.

    With composition `pipeline` a track for the host and one for the GPU; with the others, whose sums know no host, the kernels
    one after another, each as long as its label says.

    Args:
        prediction: of `record`.
        record: the model's.
    """
    tracks = tracks_of(prediction, record)
    if prediction.composition.costs is None:
        ends = np.cumsum(tracks.gpu_ms)
        spans = [NodeSpan((float(end - time), float(end)), None) for end, time in zip(ends, tracks.gpu_ms, strict=True)]
    else:
        spans = timeline(*tracks, prediction.composition.costs)
    return chrome_trace([f"{node.name} ({record.kernel_of(node).type})" for node in record.nodes], spans)
