"""A run on a GPU as two tracks: what the host dispatches when, and what the GPU works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from graph_model.simulation.tracks import Floats, OffGpu, Tracks
from utils.frozen import Frozen
from utils.trace_events import PREDICTED, Span, document, process_events


class PipelineCosts(Frozen):
    """What a run costs on the host, which dispatches node after node, and between it and the GPU, which follows; all ms.

    Attributes:
        node_ms, view_ms, launch_ms: the host's time for a node that moves data, for one that only renames a tensor, and
            for each launch.
        library_ms: what a node that calls cuDNN or cuBLAS costs the host in addition; 0 in files that do not hold it.
        start_ms: the host's time before the first node.
        gap_ms: the GPU's pause between the work of two launches.
        lead_ms: from the end of a node's dispatch to the start of its work on an idle GPU; negative, since its first
            launch comes before its dispatch ends.
        end_ms: from the end of both tracks to the moment when the caller learns of it.
    """

    node_ms: float
    view_ms: float
    launch_ms: float
    start_ms: float
    gap_ms: float
    lead_ms: float
    end_ms: float
    library_ms: float = 0.0

    def at_pace(self, pace: float) -> PipelineCosts:
        """The costs where the host takes `pace` times as long for everything it does. The GPU's pauses stay as they are."""
        return PipelineCosts(
            node_ms=pace * self.node_ms, view_ms=pace * self.view_ms, launch_ms=pace * self.launch_ms,
            start_ms=pace * self.start_ms, gap_ms=self.gap_ms, lead_ms=pace * self.lead_ms, end_ms=pace * self.end_ms,
            library_ms=pace * self.library_ms)


def _own_ms(tracks: Tracks, costs: PipelineCosts) -> Floats:
    """The host's time for the dispatch of each node."""
    of_kind = np.array([costs.view_ms, costs.node_ms, costs.node_ms + costs.library_ms])  # in the order of NodeKind
    return of_kind[tracks.kinds] + costs.launch_ms * tracks.launches


class HostTimes(NamedTuple):
    """When the host has dispatched each node, and when it goes on to the next: later where it waits for the GPU. In ms from the
    start of the run."""

    dispatched: Floats
    goes_on: Floats


def host_times(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> HostTimes:
    """The host's track; arguments as of `pipeline_ms`.

    Where the host waits, the GPU's work on a node begins no earlier than the node's dispatch. `lead_ms` alone may say
    otherwise: it is fitted to whole runs, and also makes up for what the GPU's times have too much.
    """
    own = _own_ms(tracks, costs)
    if off_gpu is None:
        at = costs.start_ms + np.cumsum(own)
        return HostTimes(at, at)
    leads = np.maximum(costs.lead_ms, -own)
    work = tracks.gpu_ms + costs.gap_ms * tracks.launches
    dispatched, goes_on, host, gpu = np.empty(len(own)), np.empty(len(own)), costs.start_ms, -np.inf
    for place, (takes, busy, lead, gives, count, waits) in enumerate(zip(
            own.tolist(), off_gpu.host_ms.tolist(), leads.tolist(), work.tolist(), tracks.launches.tolist(),
            off_gpu.waits.tolist(), strict=True)):
        host += takes if waits else takes + busy
        if count > 0:
            gpu = max(gpu, host + lead) + gives
        dispatched[place] = host
        if waits:
            host = max(host, gpu) + busy
        goes_on[place] = host
    return HostTimes(dispatched, goes_on)


def dispatched_ms(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> Floats:
    """When the host goes on after each node, in ms from the start of the run; arguments as of `pipeline_ms`."""
    return host_times(tracks, costs, off_gpu).goes_on


def pipeline_ms(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> float:
    """The latency of a run, ms. The host dispatches node after node, and the GPU does their work in that order.

    The GPU begins a node's work when the node is dispatched and the work before it is done. So for every node the run ends
    no earlier than this node's dispatch plus all work from this node on; the latest of these ends is the GPU's end.

    Args:
        tracks: the run's.
        costs: of the target.
        off_gpu: what nodes of the CPU provider and copies do on the host; None where the run has no such nodes.
    """
    host = host_times(tracks, costs, off_gpu)
    if not len(host.goes_on):
        return costs.start_ms + costs.end_ms
    working = tracks.launches > 0
    work = np.where(working, tracks.gpu_ms + costs.gap_ms * tracks.launches, 0.0)
    left = np.cumsum(work[::-1])[::-1]  # from each node on
    ends = (host.dispatched + costs.lead_ms + left)[working]
    return float(max(host.goes_on[-1], ends.max(initial=0.0)) + costs.end_ms)


class NodeSpan(NamedTuple):
    """When the host dispatches a node and when the GPU works on it, in ms from the start of a run. `gpu` is None for a node
    that gives the GPU no work."""

    host: tuple[float, float]
    gpu: tuple[float, float] | None


def timeline(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> list[NodeSpan]:
    """The two tracks node by node. `pipeline_ms` is the end of the later one (with its last gap) plus costs.end_ms.

    Where the fitted lead is longer than the first dispatch, the GPU's track begins before 0, as in that formula.

    Arguments are those of `pipeline_ms`.
    """
    spans, host, gpu = [], costs.start_ms, -np.inf
    found = host_times(tracks, costs, off_gpu)
    for dispatched, goes_on, time, count in zip(found.dispatched.tolist(), found.goes_on.tolist(), tracks.gpu_ms,
                                                tracks.launches, strict=True):
        work = None
        if count > 0:
            begins = max(gpu, dispatched + costs.lead_ms)
            gpu = begins + float(time) + costs.gap_ms * float(count)
            work = begins, begins + float(time)
        spans.append(NodeSpan((host, goes_on), work))
        host = goes_on
    return spans


def chrome_trace(names: Sequence[str], spans: Sequence[NodeSpan]) -> dict[str, Any]:
    """A timeline in Chrome's trace-event format (see utils/trace_events.py): one track for the host, one for the GPU.

    Time 0 is the start of the run, or of the earliest span where that is before it.
    """
    earliest = min([0.0, *(when[0] for span in spans for when in span if when is not None)])

    def track(place: int) -> list[Span]:
        return [Span(name, 1000 * (when[0] - earliest), 1000 * (when[1] - when[0]))
                for name, span in zip(names, spans, strict=True) if (when := span[place]) is not None]

    return document(process_events(1, PREDICTED, {"host": track(0), "GPU": track(1)}))
