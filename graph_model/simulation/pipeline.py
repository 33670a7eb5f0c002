"""A run on a GPU as two tracks: what the host dispatches when, and what the GPU works on.

A run is simulated from what each node gives the GPU to do, and what it means to the host that dispatches it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.ort_analysis.cuda.language_kernels import Algorithm, language_algorithm
from hase.ort_analysis.cuda.slow_launches import is_slow_to_launch
from hase.records.kernel_record import Kernel
from hase.records.operators import operator_row
from hase.utils.frozen import Frozen
from hase.utils.trace_events import PREDICTED, Span, document, process_events

Floats = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.int_]  # the NodeKind of each node


class NodeKind(IntEnum):
    """What a node costs the host that dispatches it: it only renames a tensor (VIEW), it runs a kernel of ONNX Runtime's own
    (OWN), it calls a library: cuDNN for a convolution (CONVOLUTION) or for a recurrent layer (RECURRENT), cuBLAS for a matrix
    product (PRODUCT), it reduces or normalises, with cuDNN or without (REDUCING), it attends with cuDNN or flash attention
    (ATTENTION), or it plans and calls a product for any indices (EINSUM). For some products, cuBLAS takes a kernel that is slow
    to launch (SLOW_PRODUCT; in the steps of a recurrent layer SLOW_RECURRENT)."""

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


# of operators that are computed in several ways, by their algorithm; ONNX Runtime's own kernels otherwise
KIND_OF_ALGORITHM: dict[Algorithm, NodeKind] = {
    "cudnn": NodeKind.ATTENTION, "flash": NodeKind.ATTENTION, "flash decoding": NodeKind.ATTENTION,
    "memory efficient": NodeKind.ATTENTION, "dequantised": NodeKind.PRODUCT, "dequantised in parts": NodeKind.PRODUCT}

SLOW_KIND = {NodeKind.PRODUCT: NodeKind.SLOW_PRODUCT, NodeKind.RECURRENT: NodeKind.SLOW_RECURRENT}


def node_kind(kernel: Kernel, on_gpu: bool = True) -> NodeKind:
    """The kind of a node; no node that the CPU provider runs calls a GPU's library."""
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
        launches: number of kernel launches; a node without any gives the GPU no work.
        kinds: the `NodeKind`.
    """

    gpu_ms: Floats
    launches: Floats
    kinds: Kinds


class OffGpu(NamedTuple):
    """What the nodes of a run do on the host apart from giving the GPU work; one entry of each array per node.

    Attributes:
        host_ms: how long a node keeps a host at its usual pace busy, in addition to its dispatch: a node of the CPU provider,
            or a copy.
        waits: whether the host waits at the node until the GPU has done all its work, as at a copy to the host.
    """

    host_ms: Floats
    waits: npt.NDArray[np.bool_]


class PipelineCosts(Frozen):
    """What a run costs on the host, which dispatches node after node, and between it and the GPU, which follows; all ms.

    Attributes:
        node_ms, view_ms, launch_ms: the host's time for a node that moves data, for one that only renames a tensor, and
            for each launch.
        convolution_ms, product_ms: what a convolution and a matrix product cost the host in addition, for the call of cuDNN or
            cuBLAS.
        recurrent_ms, recurrent_launch_ms: what a recurrent layer, and each of its launches, costs it in addition.
        reducing_ms: what a reduction, normalisation, softmax or pool costs it in addition.
        attention_ms: what attention with cuDNN or flash attention costs it in addition; known from language models alone.
        einsum_ms: what an Einsum costs it in addition.
        slow_product_ms, slow_recurrent_launch_ms: what a matrix product, and each launch of a recurrent layer, cost it beyond
            this where their kernel is slow to launch.
        start_ms: the host's time before the first node.
        gap_ms: the GPU's pause between the work of two launches.
        lead_ms: from a launch to the start of its work on an idle GPU. It is fitted to whole runs, and negative where it makes
            up for what the other costs have too much.
        end_ms: from the end of both tracks to the moment when the caller learns of it.
        off_gpu: how many times as long as usual the nodes of an `OffGpu` keep the host busy, a ratio.
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
        """The costs where the host takes `pace` times as long for everything it does. The GPU's pauses stay as they are."""
        return self.model_copy(update={
            name: pace * getattr(self, name) for name in PipelineCosts.model_fields if name != "gap_ms"})


# The kinds of nodes that a cost is paid for: once a node, or with each launch.
OF_NODE: dict[str, tuple[NodeKind, ...]] = {
    "node_ms": tuple(kind for kind in NodeKind if kind is not NodeKind.VIEW), "view_ms": (NodeKind.VIEW,),
    "convolution_ms": (NodeKind.CONVOLUTION,), "product_ms": (NodeKind.PRODUCT, NodeKind.SLOW_PRODUCT),
    "reducing_ms": (NodeKind.REDUCING,), "attention_ms": (NodeKind.ATTENTION,), "einsum_ms": (NodeKind.EINSUM,),
    "recurrent_ms": (NodeKind.RECURRENT, NodeKind.SLOW_RECURRENT), "slow_product_ms": (NodeKind.SLOW_PRODUCT,)}
OF_LAUNCH: dict[str, tuple[NodeKind, ...]] = {
    "launch_ms": tuple(NodeKind), "recurrent_launch_ms": (NodeKind.RECURRENT, NodeKind.SLOW_RECURRENT),
    "slow_recurrent_launch_ms": (NodeKind.SLOW_RECURRENT,)}


def _of_kinds(tracks: Tracks, costs: PipelineCosts, kinds_of: Mapping[str, Sequence[NodeKind]]) -> Floats:
    """The sum of those costs that are paid for each node, or each of its launches."""
    of_kind = np.array([sum(getattr(costs, name) for name, kinds in kinds_of.items() if kind in kinds) for kind in NodeKind])
    return of_kind[tracks.kinds]


def launch_ms(tracks: Tracks, costs: PipelineCosts) -> Floats:
    """The host's time for one launch of each node."""
    return _of_kinds(tracks, costs, OF_LAUNCH)


def own_ms(tracks: Tracks, costs: PipelineCosts) -> Floats:
    """The host's time for the dispatch of each node."""
    return _of_kinds(tracks, costs, OF_NODE) + launch_ms(tracks, costs) * tracks.launches


def host_work_ms(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> float:
    """How long the host works in a run, without the time in which it waits for the GPU, ms."""
    off_gpu_ms = 0.0 if off_gpu is None else costs.off_gpu * off_gpu.host_ms.sum()
    return float(costs.start_ms + own_ms(tracks, costs).sum() + off_gpu_ms)


class HostTimes(NamedTuple):
    """When the host has dispatched each node, and when it goes on to the next: later where it waits for the GPU. In ms from the
    start of the run."""

    dispatched: Floats
    goes_on: Floats


def host_times(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> HostTimes:
    """The host's track in a run, given what nodes off the GPU do on the host (None: there are no such nodes).

    Where the host waits, the GPU's work on a node begins no earlier than the node's dispatch. `lead_ms` alone may say
    otherwise: it is fitted to whole runs, and also makes up for what the GPU's times have too much.
    """
    dispatch_ms = own_ms(tracks, costs)
    if off_gpu is None:
        at = costs.start_ms + np.cumsum(dispatch_ms)
        return HostTimes(at, at)
    launched = np.maximum(tracks.launches, 1.0)
    firsts = np.maximum(costs.lead_ms - launch_ms(tracks, costs) * (launched - 1.0), -dispatch_ms)
    leads = np.maximum(costs.lead_ms, -dispatch_ms)
    work = tracks.gpu_ms + costs.gap_ms * tracks.launches
    dispatched, goes_on, host, gpu = np.empty(len(dispatch_ms)), np.empty(len(dispatch_ms)), costs.start_ms, -np.inf
    for place, (takes, busy, first, lead, gives, count, waits) in enumerate(zip(
            dispatch_ms.tolist(), (costs.off_gpu * off_gpu.host_ms).tolist(), firsts.tolist(), leads.tolist(), work.tolist(),
            tracks.launches.tolist(), off_gpu.waits.tolist(), strict=True)):
        host += takes if waits else takes + busy
        if count > 0:
            last = gives / max(count, 1.0)
            gpu = max(max(gpu, host + first) + gives - last, host + lead) + last
        dispatched[place] = host
        if waits:
            host = max(host, gpu) + busy
        goes_on[place] = host
    return HostTimes(dispatched, goes_on)


def dispatched_ms(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> Floats:
    """When the host goes on after each node, in ms from the start of the run."""
    return host_times(tracks, costs, off_gpu).goes_on


class GpuWork(NamedTuple):
    """The GPU's work in a run, in order: of each node that gives it some all launches but the last, then the last; all ms.

    The launches of a node take equally long, on the host and on the GPU. So the work of a node ends no earlier than its first
    launch plus all of its work, and no earlier than its last launch plus the last part, and nothing between is later.

    Attributes:
        ready_ms: when the GPU can begin it, from the start of the run.
        work_ms: how long it takes, with the pauses between launches.
    """

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


def pipeline_ms(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> float:
    """The latency of a run, ms. The host dispatches node after node, and the GPU does their work in that order.

    The GPU begins the work of a launch when the host has launched it and the work before it is done. So for every launch the
    run ends no earlier than this launch plus all work from this one on; the latest of these ends is the GPU's end.

    Args:
        tracks: the run's.
        costs: of the target.
        off_gpu: what nodes of the CPU provider and copies do on the host; None where the run has no such nodes.
    """
    host = host_times(tracks, costs, off_gpu)
    if not len(host.goes_on):
        return costs.start_ms + costs.end_ms
    ready, work = gpu_work(tracks, costs, host.dispatched)
    ends = ready + np.cumsum(work[::-1])[::-1]  # all work from each launch on
    return float(max(host.goes_on[-1], ends.max(initial=0.0)) + costs.end_ms)


COSTS = tuple(PipelineCosts.model_fields)
AT_PACE = np.array([name != "gap_ms" for name in COSTS])  # those that a slower host makes longer


class Runs:
    """Runs whose latencies are asked for thousands of times with different costs, as a fit does.

    `pipeline_ms` takes the latest of several ends. Each of them is a sum: every cost as often as it is paid before that end,
    and work of the GPU. How often is counted once; the ends of all runs are then one product of matrices. Runs with nodes off
    the GPU, where the host may wait, are simulated one by one.
    """

    def __init__(self, runs: Sequence[tuple[Tracks, float, OffGpu | None]]) -> None:
        """Counts what each run costs.

        Args:
            runs: the tracks of each, the pace of its host (see `PipelineCosts.at_pace`), and what nodes off the GPU do.
        """
        self._simulated = [(place, *run) for place, run in enumerate(runs) if run[2] is not None]
        self._counted = [place for place, run in enumerate(runs) if run[2] is None]
        ends = [_ends(runs[place][0]) for place in self._counted]
        self._begins = np.cumsum([0, *(len(work_ms) for _, work_ms in ends)])[:-1]  # the first row of each run: the host's end
        self._counts = np.concatenate([np.empty((0, len(COSTS))), *(
            counts * np.where(AT_PACE, runs[place][1], 1.0) for place, (counts, _) in zip(self._counted, ends, strict=True))])
        self._work_ms = np.concatenate([np.empty(0), *(work_ms for _, work_ms in ends)])

    def _all(self, counted: Floats, simulated: Sequence[float]) -> Floats:
        """Both kinds of runs, in the order in which they were given."""
        all_runs = np.empty(len(self._counted) + len(self._simulated))
        all_runs[self._counted] = counted
        all_runs[[place for place, *_ in self._simulated]] = simulated
        return all_runs

    def latencies_ms(self, costs: PipelineCosts) -> Floats:
        """The latency of each run, as `pipeline_ms` has it."""
        ends = self._counts @ _values(costs) + self._work_ms
        return self._all(np.maximum.reduceat(ends, self._begins) if len(ends) else ends,
                         [pipeline_ms(tracks, costs.at_pace(pace), off_gpu) for _, tracks, pace, off_gpu in self._simulated])

    def hosts_ms(self, costs: PipelineCosts) -> Floats:
        """When the host of each run has dispatched the last node."""
        values = _values(costs) * (np.array(COSTS) != "end_ms")
        return self._all(self._counts[self._begins] @ values,
                         [dispatched_ms(tracks, costs.at_pace(pace), off_gpu)[-1]
                          for _, tracks, pace, off_gpu in self._simulated])


def _values(costs: PipelineCosts) -> Floats:
    return np.array([getattr(costs, name) for name in COSTS])


def _ends(tracks: Tracks) -> tuple[Floats, Floats]:
    """How often each of COSTS is paid, and the GPU's work in ms, up to each end that a run may have: that of its host, then
    those of all work from each node's last launch on, then from the first launch of those with several."""
    of_launch = {name: np.isin(tracks.kinds, kinds) for name, kinds in OF_LAUNCH.items()}
    of_node = {name: np.isin(tracks.kinds, kinds) for name, kinds in OF_NODE.items()} | {
        name: tracks.launches * paid for name, paid in of_launch.items()}
    host = np.zeros((len(tracks.kinds) + 1, len(COSTS)))
    for name, counts in of_node.items():
        host[1:, COSTS.index(name)] = np.cumsum(counts)
    host[:, [COSTS.index("start_ms"), COSTS.index("end_ms")]] = 1.0
    working = tracks.launches > 0
    launches = tracks.launches[working]
    launched = np.maximum(launches, 1.0)
    part = 1.0 - 1.0 / launched  # of a node's work that is before its last launch

    def of_all_from(of_nodes: Floats) -> Floats:
        return np.cumsum(of_nodes[::-1])[::-1]

    last, gap = host[1:][working], COSTS.index("gap_ms")
    last[:, COSTS.index("lead_ms")] = 1.0
    work_ms, gaps = of_all_from(tracks.gpu_ms[working]), of_all_from(launches)
    several = launched > 1
    first = last[several]
    for name, paid in of_launch.items():
        first[:, COSTS.index(name)] -= (launched[several] - 1.0) * paid[working][several]
    first[:, gap], last[:, gap] = gaps[several], gaps - part * launches
    return (np.concatenate([host[-1:], last, first]),
            np.concatenate([[0.0], work_ms - part * tracks.gpu_ms[working], work_ms[several]]))


class NodeSpan(NamedTuple):
    """When the host dispatches a node and when the GPU works on it, in ms from the start of a run. `gpu` is None for a node
    that gives the GPU no work."""

    host: tuple[float, float]
    gpu: tuple[float, float] | None


def timeline(tracks: Tracks, costs: PipelineCosts, off_gpu: OffGpu | None = None) -> list[NodeSpan]:
    """The two tracks node by node. `pipeline_ms` is the end of the later one (with its last gap) plus costs.end_ms.

    Where the fitted lead is longer than the first dispatch, the GPU's track begins before 0, as in that formula.

    Args:
        tracks: the run's.
        costs: of the target.
        off_gpu: what nodes of the CPU provider and copies do on the host; None where the run has no such nodes.
    """
    spans, host, gpu = [], costs.start_ms, -np.inf
    times = host_times(tracks, costs, off_gpu)
    ready, parts = (column.reshape(-1, 2).tolist() for column in gpu_work(tracks, costs, times.dispatched))
    of_launches = zip(ready, parts, strict=True)
    for goes_on, count in zip(times.goes_on.tolist(), tracks.launches, strict=True):
        work = None
        if count > 0:
            (first, last), (before_last, of_last) = next(of_launches)
            begins = max(gpu, first)
            gpu = max(begins + before_last, last) + of_last
            work = begins, gpu - costs.gap_ms * min(float(count), 1.0)
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
