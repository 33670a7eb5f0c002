"""Simulates a run on a GPU as two tracks: the host dispatches nodes, the GPU works on them.

The inputs are each node's work for the GPU, and what it costs the host to dispatch it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.ort_analysis.cuda.kernel_choice import Algorithm, is_slow_to_launch, language_algorithm
from hase.records.kernel_record import Kernel
from hase.records.operators import operator_row
from hase.records.traces import PREDICTED, TraceSpan, document, process_events
from hase.utils.config import Frozen
from hase.utils.timing import Floats

Kinds = npt.NDArray[np.int_]  # the NodeKind of each node


class NodeKind(IntEnum):
    """The cost class of a node for the host that dispatches it. It renames a tensor (VIEW), runs one of ONNX Runtime's own
    kernels (OWN), calls cuDNN for a convolution (CONVOLUTION) or a recurrent layer (RECURRENT), calls cuBLAS for a matrix
    product (PRODUCT), reduces or normalises, with cuDNN or without (REDUCING), attends with cuDNN or flash attention
    (ATTENTION), or plans and calls a product for any indices (EINSUM). For some products cuBLAS uses a kernel that is slow to
    launch (SLOW_PRODUCT; in a recurrent layer's steps SLOW_RECURRENT)."""

    VIEW = 0
    OWN = 1
    CONVOLUTION = 2
    PRODUCT = 3
    RECURRENT = 4
    REDUCING = 5
    ATTENTION = 6
    EINSUM = 7
    SLOW_PRODUCT = 8
    SLOW_RECURRENT = 9


# for operators with several algorithms; others are ONNX Runtime's own kernels
KIND_OF_ALGORITHM: dict[Algorithm, NodeKind] = {
    "cudnn": NodeKind.ATTENTION, "flash": NodeKind.ATTENTION, "flash decoding": NodeKind.ATTENTION,
    "memory efficient": NodeKind.ATTENTION, "dequantised": NodeKind.PRODUCT, "dequantised in parts": NodeKind.PRODUCT}

SLOW_KIND = {NodeKind.PRODUCT: NodeKind.SLOW_PRODUCT, NodeKind.RECURRENT: NodeKind.SLOW_RECURRENT}


def node_kind(kernel: Kernel, on_gpu: bool = True) -> NodeKind:
    """The kind of a node. Nodes of the CPU provider call no GPU library."""
    if not kernel.moves_data:
        return NodeKind.VIEW
    if not on_gpu:
        return NodeKind.OWN
    if algorithm := language_algorithm(kernel):
        return KIND_OF_ALGORITHM.get(algorithm, NodeKind.OWN)
    kind = NodeKind[operator_row(kernel.op_type).dispatch.upper()]
    return SLOW_KIND[kind] if kind in SLOW_KIND and is_slow_to_launch(kernel) else kind


class Tracks(NamedTuple):
    """The nodes of a run, in the order in which they run; one entry of each array per node.

    Attributes:
        gpu_ms: the GPU's own time.
        launches: number of kernel launches; a node with none gives the GPU no work.
        kinds: the `NodeKind`.
    """

    gpu_ms: Floats
    launches: Floats
    kinds: Kinds


class OffGpu(NamedTuple):
    """The host's work for nodes of a run besides dispatching them; one entry of each array per node.

    Attributes:
        host_ms: extra time of a host at its usual pace: for a node of the CPU provider, or a copy.
        waits: whether the host waits at the node until the GPU has done all its work, as at a copy to the host.
    """

    host_ms: Floats
    waits: npt.NDArray[np.bool_]


class PipelineCosts(Frozen):
    """What a run costs on the host, which dispatches node after node, and between it and the GPU, which follows; all ms.

    Attributes:
        node_ms, view_ms, launch_ms: the host's time for a node, for one that only renames a tensor, and for each launch.
        convolution_ms, product_ms: in addition for calls of cuDNN and cuBLAS.
        recurrent_ms, recurrent_launch_ms: in addition for a recurrent layer and each of its launches.
        reducing_ms: in addition for a reduction, normalisation, softmax or pool.
        attention_ms: in addition for attention with cuDNN or flash attention.
        einsum_ms: in addition for an Einsum.
        slow_product_ms, slow_recurrent_launch_ms: in addition where a product's kernel is slow to launch.
        start_ms: before the first node.
        gap_ms: the GPU's pause between the work of two launches.
        lead_ms: from a launch to its work on an idle GPU; fitted to whole runs, so it may be negative.
        end_ms: from the end of both tracks until the caller knows.
        off_gpu: how many times as long as usual nodes off the GPU keep the host busy.
    """

    node_ms: float
    view_ms: float
    launch_ms: float
    start_ms: float
    gap_ms: float
    lead_ms: float
    end_ms: float
    convolution_ms: float = 0.0
    product_ms: float = 0.0
    recurrent_ms: float = 0.0
    recurrent_launch_ms: float = 0.0
    reducing_ms: float = 0.0
    attention_ms: float = 0.0
    einsum_ms: float = 0.0
    slow_product_ms: float = 0.0
    slow_recurrent_launch_ms: float = 0.0
    off_gpu: float = 1.0

    def at_pace(self, pace: float) -> PipelineCosts:
        """The costs of a host that takes `pace` times as long for everything. The GPU's pauses do not change."""
        return self.model_copy(update={
            name: pace * getattr(self, name) for name in PipelineCosts.model_fields if name != "gap_ms"})


# The kinds of nodes that have each cost: once per node, or per launch.
OF_NODE: dict[str, tuple[NodeKind, ...]] = {
    "node_ms": tuple(kind for kind in NodeKind if kind is not NodeKind.VIEW), "view_ms": (NodeKind.VIEW,),
    "convolution_ms": (NodeKind.CONVOLUTION,), "product_ms": (NodeKind.PRODUCT, NodeKind.SLOW_PRODUCT),
    "reducing_ms": (NodeKind.REDUCING,), "attention_ms": (NodeKind.ATTENTION,), "einsum_ms": (NodeKind.EINSUM,),
    "recurrent_ms": (NodeKind.RECURRENT, NodeKind.SLOW_RECURRENT), "slow_product_ms": (NodeKind.SLOW_PRODUCT,)}
OF_LAUNCH: dict[str, tuple[NodeKind, ...]] = {
    "launch_ms": tuple(NodeKind), "recurrent_launch_ms": (NodeKind.RECURRENT, NodeKind.SLOW_RECURRENT),
    "slow_recurrent_launch_ms": (NodeKind.SLOW_RECURRENT,)}
LENGTHS_PER_DOUBLING = 4  # groups of runs per doubling of their length, so that there is little padding
NOTHING = np.zeros(0)
NO_NODE = len(NodeKind)  # the kind of padding; it costs nothing
COSTS = tuple(PipelineCosts.model_fields)
INDEX = {name: index for index, name in enumerate(COSTS)}
AT_PACE = np.array([name != "gap_ms" for name in COSTS])  # costs that scale with the host's pace


def _paid(kinds_of: Mapping[str, Sequence[NodeKind]]) -> Floats:
    """Costs × kinds of nodes (and NO_NODE): 1 if nodes of the kind have that cost."""
    return np.array([[float(kind in kinds_of.get(name, ())) for kind in (*NodeKind, None)] for name in COSTS])


PAID_ONCE, PAID_EACH_LAUNCH = _paid(OF_NODE), _paid(OF_LAUNCH)


@dataclass(frozen=True)
class HostCosts:
    """Costs of several hosts, or of one at several paces: arrays with a row for each host.

    Attributes:
        once_ms, launch_ms: hosts × kinds of nodes: the host's time for a node besides its launches, and for each launch.
        others: hosts × COSTS.
    """

    once_ms: Floats
    launch_ms: Floats
    others: Floats

    @classmethod
    def at(cls, costs: PipelineCosts, paces: Sequence[float] | Floats = (1.0,)) -> HostCosts:
        """The costs of a host at some paces (`PipelineCosts.at_pace`)."""
        values = np.array([getattr(costs, name) for name in COSTS]) * np.where(AT_PACE, np.asarray(paces)[:, None], 1.0)
        once_ms, launch_ms = ((values[..., None] * paid).sum(axis=-2) for paid in (PAID_ONCE, PAID_EACH_LAUNCH))
        return cls(once_ms, launch_ms, values)

    def __getitem__(self, name: str) -> Floats:
        """One of COSTS, with an axis for nodes."""
        return self.others[:, INDEX[name], None]


class Steps(NamedTuple):
    """The effect of each node on a run; arrays of runs × nodes, in ms.

    Attributes:
        before_ms: the host's time up to the dispatch, after that of the node before.
        busy_ms: how long the host is busy after it has waited for the GPU.
        waits: whether it waits at the node until the GPU has done all its work.
        work_ms: the GPU's work, with the pauses between launches.
        after_ms: a lower bound of the GPU's end, less the dispatch and all work from this node on; -inf without work. All
            launches of a node take the same time, on the host and on the GPU. So its work ends no earlier than its first launch
            plus all of it, and no earlier than its last launch plus the last part; launches between give no later bound.
        seen_ms: the same if the host waits: the GPU's work then begins no earlier than the dispatch. `lead_ms` alone could
            place it earlier: it is fitted to whole runs, and also compensates GPU times that are too long.
    """

    before_ms: Floats
    busy_ms: Floats
    waits: npt.NDArray[np.bool_]
    work_ms: Floats
    after_ms: Floats
    seen_ms: Floats

    @classmethod
    def of(cls, tracks: Tracks, hosts: HostCosts, off_gpu: OffGpu | None = None) -> Steps:
        """The steps of nodes (one run, or runs × nodes) for each host; one host serves all runs."""
        shape = np.broadcast_shapes((len(hosts.others), 1), np.atleast_2d(tracks.launches).shape)
        kinds = np.broadcast_to(tracks.kinds, shape)
        once, launch = (np.take_along_axis(np.broadcast_to(table, (shape[0], table.shape[1])), kinds, axis=1)
                        for table in (hosts.once_ms, hosts.launch_ms))
        dispatch, launched = once + launch * tracks.launches, np.maximum(tracks.launches, 1.0)
        working, work = tracks.launches > 0, tracks.gpu_ms + hosts["gap_ms"] * tracks.launches
        lead, first = hosts["lead_ms"], hosts["lead_ms"] - launch * (launched - 1.0)
        rest = work - work / launched
        after = np.where(working, np.maximum(first, lead - rest), -np.inf)
        work = np.where(working, work, 0.0)
        if off_gpu is None:
            never = np.zeros(shape, dtype=bool)
            return cls(dispatch, np.zeros(shape), never, work, after, after)
        busy, waits = hosts["off_gpu"] * off_gpu.host_ms, np.broadcast_to(off_gpu.waits, shape)
        seen = np.where(working, np.maximum(np.maximum(first, -dispatch), np.maximum(lead, -dispatch) - rest), -np.inf)
        return cls(dispatch + np.where(waits, 0.0, busy), np.where(waits, busy, 0.0), waits, work, after, seen)

    def taken(self, runs: npt.NDArray[np.int_]) -> Steps:
        """The steps of runs whose nodes are given by index, for each host: hosts × runs × nodes."""
        waits = self.waits[:, runs]
        if not waits.any():
            return Steps(self.before_ms[:, runs], NOTHING, waits, self.work_ms[:, runs], self.after_ms[:, runs], NOTHING)
        return Steps(self.before_ms[:, runs], self.busy_ms[:, runs], waits, self.work_ms[:, runs], self.after_ms[:, runs],
                     self.seen_ms[:, runs])

    @property
    def host_ms(self) -> Floats:
        """The host's work time, without waiting for the GPU and without the time before the first node."""
        total: Floats = (self.before_ms + self.busy_ms).sum(axis=-1)
        return total


class HostTimes(NamedTuple):
    """When the host has dispatched each node and when it continues (later if it waits for the GPU), ms from the run's start."""

    dispatched: Floats
    goes_on: Floats


def _remaining_work(work_ms: Floats) -> Floats:
    """The sum of the work of each node and all later ones."""
    total: Floats = np.cumsum(work_ms[..., ::-1], axis=-1)[..., ::-1]
    return total


def _host_times(steps: Steps, start_ms: Floats) -> HostTimes:
    """The host's track of each run, simulated from one node at which a host waits to the next."""
    waiting = np.flatnonzero(steps.waits.any(axis=tuple(range(steps.waits.ndim - 1))))
    if not waiting.size:
        at = start_ms + np.cumsum(steps.before_ms, axis=-1)
        return HostTimes(at, at)
    goes_on, dispatched = np.empty_like(steps.before_ms), np.empty_like(steps.before_ms)
    host, gpu, begin = start_ms[..., 0] + np.zeros_like(goes_on[..., 0]), np.full_like(goes_on[..., 0], -np.inf), 0
    for stop in (*(waiting + 1).tolist(), goes_on.shape[-1]):
        if begin == stop:
            break
        at = host[..., None] + np.cumsum(steps.before_ms[..., begin:stop], axis=-1)
        left = _remaining_work(steps.work_ms[..., begin:stop])
        dispatched[..., begin:stop] = goes_on[..., begin:stop] = at
        gpu = np.maximum(gpu + left[..., 0], (at + left + steps.seen_ms[..., begin:stop]).max(axis=-1))
        host = at[..., -1] if stop - 1 not in waiting else np.where(
            steps.waits[..., stop - 1], np.maximum(at[..., -1], gpu) + steps.busy_ms[..., stop - 1], at[..., -1])
        goes_on[..., stop - 1], begin = host, stop
    return HostTimes(dispatched, goes_on)


def latencies_ms(steps: Steps, hosts: HostCosts) -> Floats:
    """The latency of each run, ms. The host dispatches node after node, and the GPU does their work in that order. The GPU
    begins the work of a launch when the host has launched it and the work before it is done. So for every launch the run ends
    no earlier than this launch plus all work from this one on. The latest of these bounds is the GPU's end. `steps` are runs ×
    nodes with a host for each run, or hosts × runs × nodes."""
    start, end = (hosts[name] if steps.before_ms.ndim == 2 else hosts[name][..., None] for name in ("start_ms", "end_ms"))
    if not steps.before_ms.shape[-1]:
        return np.broadcast_to((start + end)[..., 0], steps.before_ms.shape[:-1])
    host = _host_times(steps, start)
    ends = (host.dispatched + _remaining_work(steps.work_ms) + steps.after_ms).max(axis=-1, initial=0.0)
    return np.maximum(host.goes_on[..., -1], ends) + end[..., 0]


def pipeline_ms(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> float:
    """The latency of one run, ms (`latencies_ms`). `off_gpu`: the host's work for CPU nodes and copies, if there are any."""
    hosts = HostCosts.at(costs)
    return float(latencies_ms(Steps.of(tracks, hosts, off_gpu), hosts)[0])


def host_work_ms(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> float:
    """The host's work time in a run, without waiting for the GPU, ms."""
    return float(costs.start_ms + Steps.of(tracks, HostCosts.at(costs), off_gpu).host_ms[0])


def host_times(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> HostTimes:
    """The host's track in a run."""
    hosts = HostCosts.at(costs)
    times = _host_times(Steps.of(tracks, hosts, off_gpu), hosts["start_ms"])
    return HostTimes(times.dispatched[0], times.goes_on[0])


def dispatched_ms(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> Floats:
    """When the host continues after each node, in ms from the start of the run."""
    return host_times(tracks, costs, off_gpu).goes_on


def launch_ms(tracks: Tracks, costs: PipelineCosts) -> Floats:
    """The host's time for one launch of each node."""
    return HostCosts.at(costs).launch_ms[0, tracks.kinds]


class GpuWork(NamedTuple):
    """The GPU's work in a run, in order; all ms. Each node with work has two entries: all launches but the last, and the last.
    `ready_ms` is when the GPU can begin it, from the start of the run; `work_ms` includes the pauses between launches."""

    ready_ms: Floats
    work_ms: Floats


def gpu_work(tracks: Tracks, costs: PipelineCosts, dispatched: Floats) -> GpuWork:
    """The GPU's work in a run whose nodes are dispatched at `dispatched` (ms from the start of the run)."""
    working = tracks.launches > 0
    launched = np.maximum(tracks.launches[working], 1.0)
    work = (tracks.gpu_ms + costs.gap_ms * tracks.launches)[working]
    last = dispatched[working] + costs.lead_ms
    first = last - launch_ms(tracks, costs)[working] * (launched - 1.0)
    return GpuWork(np.column_stack([first, last]).ravel(), np.column_stack([work - work / launched, work / launched]).ravel())


class _PaddedRuns(NamedTuple):
    """Runs of similar length, padded to the longest: runs × nodes; `indices` are theirs among all runs."""

    indices: list[int]
    tracks: Tracks
    off_gpu: OffGpu | None
    paces: Floats


class Runs:
    """Runs whose latencies are computed thousands of times with different costs, as in a fit."""

    def __init__(self, runs: Sequence[tuple[Tracks, float, OffGpu | None]]) -> None:
        """Groups runs of similar length. Each run has tracks, its host's pace (`PipelineCosts.at_pace`), and the host's work
        off the GPU."""
        self._count, self._groups = len(runs), list[_PaddedRuns]()
        lengths = [len(tracks.kinds) for tracks, *_ in runs]
        groups: dict[tuple[bool, int], list[int]] = {}
        for index, length in enumerate(lengths):
            length_class = round(LENGTHS_PER_DOUBLING * math.log2(length + 1))
            groups.setdefault((runs[index][2] is not None, length_class), []).append(index)
        for (has_off_gpu, _), indices in groups.items():
            tracks, off = [runs[index][0] for index in indices], [runs[index][2] for index in indices]
            self._groups.append(_PaddedRuns(
                indices, Tracks(_filled([run.gpu_ms for run in tracks]), _filled([run.launches for run in tracks]),
                               _filled([run.kinds for run in tracks], NO_NODE)),
                OffGpu(_filled([run.host_ms for run in off if run]), _filled([run.waits for run in off if run]))
                if has_off_gpu else None, np.array([runs[index][1] for index in indices])))

    def _apply(self, compute: Callable[[Steps, HostCosts], Floats], costs: PipelineCosts) -> Floats:
        """Applies a function to all runs; results in their order."""
        results = np.empty(self._count)
        for group in self._groups:
            hosts = HostCosts.at(costs, group.paces)
            results[group.indices] = compute(Steps.of(group.tracks, hosts, group.off_gpu), hosts)
        return results

    def latencies_ms(self, costs: PipelineCosts) -> Floats:
        """The latency of each run."""
        return self._apply(latencies_ms, costs)

    def hosts_ms(self, costs: PipelineCosts) -> Floats:
        """When the host of each run has dispatched the last node."""
        return self._apply(lambda steps, hosts: _host_times(steps, hosts["start_ms"]).goes_on[:, -1] if steps.before_ms.size
                           else hosts["start_ms"][:, 0], costs)


def _filled(rows: Sequence[npt.NDArray[Any]], with_value: int = 0) -> npt.NDArray[Any]:
    """Stacks rows into one array; pads the short ones."""
    filled = np.full((len(rows), max(map(len, rows), default=0)), with_value, dtype=rows[0].dtype)
    for row, values in zip(filled, rows, strict=True):
        row[:len(values)] = values
    return filled


class NodeSpan(NamedTuple):
    """When the host dispatches a node and when the GPU works on it, in ms from the start of a run. `gpu` is None for a node
    without work for the GPU."""

    host: tuple[float, float]
    gpu: tuple[float, float] | None


def timeline(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> list[NodeSpan]:
    """The two tracks node by node. `pipeline_ms` is the end of the later one (with its last gap) plus costs.end_ms.

    The GPU begins a node's work no earlier than the host begins its dispatch. `costs.lead_ms` alone could place it even before
    the run: it is fitted to whole runs, and also compensates GPU times that are too long. If the GPU's work would then
    end after the run, all of its times are shorter by the same factor. Arguments as for `pipeline_ms`.
    """
    times, working = host_times(tracks, costs, off_gpu), tracks.launches > 0
    host_begins = np.concatenate([[costs.start_ms], times.goes_on])[:-1]
    ready, work = gpu_work(tracks, costs, times.dispatched)
    left, begins = _remaining_work(work), np.maximum(ready, np.repeat(host_begins[working], 2))
    run_ends = max(times.goes_on.max(initial=costs.start_ms), (ready + left).max(initial=0.0))
    shorter = ((run_ends - begins)[left > 0] / left[left > 0]).min(initial=1.0)
    spans, gpu = [], -np.inf
    launches_of_nodes = zip(begins.reshape(-1, 2).tolist(), (shorter * work).reshape(-1, 2).tolist(), strict=True)
    for host_begin, goes_on, count in zip(host_begins.tolist(), times.goes_on.tolist(), tracks.launches.tolist(), strict=True):
        on_gpu = None
        if count > 0:
            (first, last), (others_ms, last_ms) = next(launches_of_nodes)
            begin = max(gpu, first)
            gpu = max(begin + others_ms, last) + last_ms
            on_gpu = begin, gpu - shorter * costs.gap_ms * min(count, 1.0)
        spans.append(NodeSpan((host_begin, goes_on), on_gpu))
    return spans


def chrome_trace(names: Sequence[str], spans: Sequence[NodeSpan]) -> dict[str, Any]:
    """A timeline in Chrome's trace-event format (see records/traces.py): one track for the host, one for the GPU. Time 0 is the
    start of the run."""

    def track(index: int) -> list[TraceSpan]:
        return [TraceSpan(name, 1000 * when[0], 1000 * (when[1] - when[0]))
                for name, span in zip(names, spans, strict=True) if (when := span[index]) is not None]

    return document(process_events(1, PREDICTED, {"host": track(0), "GPU": track(1)}))
