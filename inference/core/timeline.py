"""A predicted run as a timeline that Chrome and Perfetto show: what the host dispatches when, and what the GPU works on."""

from __future__ import annotations

from typing import Any

import numpy as np

from graph_model.simulation.pipeline import NodeSpan, chrome_trace, timeline
from graph_model.simulation.tracks import OffGpu, Tracks, node_kind
from inference.core.answers import Prediction
from ort_analysis.records.kernel_record import ModelRecord, Node
from ort_analysis.records.run_order import run_order, shortest_cut


def nodes_run(record: ModelRecord) -> list[Node]:
    """The nodes in the order in which they run, those of bodies as often as they do (of very long loops, a part)."""
    return [record.nodes[place] for place in run_order(record, shortest_cut(record))]


def tracks_of(prediction: Prediction, record: ModelRecord) -> Tracks:
    """The nodes of `record` as they run, of which `prediction` is; without composition `pipeline` no launches are known, and
    stand as 0."""
    kernels = {(kernel.id, kernel.provider): kernel for kernel in prediction.kernels}
    placed = [(node.kernel_id, node.provider) for node in nodes_run(record)]
    on_host = on_host_of(prediction, record)
    return Tracks(np.array([0.0 if host else kernels[key].latency_ms for key, host in zip(placed, on_host, strict=True)]),
                  np.array([kernels[key].launches or 0.0 for key in placed]),
                  np.array([node_kind(record.kernels[key[0]], key[1] != "cpu") for key in placed], dtype=int))


def on_host_of(prediction: Prediction, record: ModelRecord) -> list[bool]:
    """Whether the time of each node that runs is the host's, as that of the CPU provider's nodes, of copies to the GPU, and of
    nodes with bodies in a CUDA session."""
    from training.composition.off_gpu import on_host

    nodes = nodes_run(record)
    if prediction.composition.costs is None:
        return [False] * len(nodes)
    return [on_host(record.kernel_of(node), node.provider) for node in nodes]


def off_gpu_of(prediction: Prediction, record: ModelRecord) -> OffGpu | None:
    """What the nodes of a CUDA session do off the GPU; None where all of it is the GPU's."""
    from training.composition.off_gpu import waits_for_gpu

    on_host, nodes = on_host_of(prediction, record), nodes_run(record)
    waits = [prediction.composition.costs is not None and waits_for_gpu(record.kernel_of(node)) for node in nodes]
    if not any(on_host) and not any(waits):
        return None
    kernels = {(kernel.id, kernel.provider): kernel.latency_ms for kernel in prediction.kernels}
    return OffGpu(np.array([kernels[node.kernel_id, node.provider] if host else 0.0
                            for node, host in zip(nodes, on_host, strict=True)]), np.array(waits, dtype=bool))


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
        spans = timeline(tracks, prediction.composition.costs, off_gpu_of(prediction, record))
    return chrome_trace([f"{node.name} ({record.kernel_of(node).type})" for node in nodes_run(record)], spans)
