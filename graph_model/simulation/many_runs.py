"""The latencies of many runs at once, as `pipeline.pipeline_ms` has each of them.

A search over networks asks for thousands of runs that share their kernels. What a kernel means to a run is worked out once for
all of them; a run is then a row of numbers of kernels, and the two tracks of all runs are added up together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.pipeline import Floats, Kinds, PipelineCosts, Tracks, launch_ms, own_ms

Ints = npt.NDArray[np.int_]
NOTHING = 0  # the number that fills the rows of short runs


class RunKernels(NamedTuple):
    """The kernels of some runs; one entry of each array per kernel. The one with the number NOTHING is no kernel.

    Attributes:
        gpu_ms: the GPU's own time.
        launches: number of kernel launches.
        kinds: the `NodeKind`.
        host_ms: how long it keeps a host at its usual pace busy, in addition to its dispatch (`OffGpu.host_ms`).
        waits: whether the host waits for the GPU there.
    """

    gpu_ms: Floats
    launches: Floats
    kinds: Kinds
    host_ms: Floats
    waits: npt.NDArray[np.bool_]


class _Kernels(NamedTuple):
    """What each kernel means to a run: the host's time for it, the GPU's with pauses, and how much later than its dispatch,
    plus all work from there on, the GPU's end may be (-inf for one without work)."""

    dispatch_ms: Floats
    work_ms: Floats
    after_ms: Floats


def _kernels(kernels: RunKernels, costs: PipelineCosts) -> _Kernels:
    tracks = Tracks(kernels.gpu_ms, kernels.launches, kernels.kinds)
    dispatch = own_ms(tracks, costs)
    dispatch[NOTHING] = 0.0
    working, launched = kernels.launches > 0, np.maximum(kernels.launches, 1.0)
    work = np.where(working, kernels.gpu_ms + costs.gap_ms * kernels.launches, 0.0)
    from_first = costs.lead_ms - launch_ms(tracks, costs) * (launched - 1.0)
    from_last = costs.lead_ms - (work - work / launched)
    return _Kernels(dispatch, work, np.where(working, np.maximum(from_first, from_last), -np.inf))


def latencies_ms(runs: Ints, kernels: RunKernels, costs: PipelineCosts, beside: npt.NDArray[np.bool_]) -> Floats:
    """The latency of each run, ms.

    Args:
        runs: runs × nodes: the number of each node's kernel; NOTHING where a run has no more nodes.
        kernels: of the runs, by number.
        costs: of the target.
        beside: the runs with nodes off the GPU.
    """
    known = _kernels(kernels, costs)
    latencies = np.empty(len(runs))
    for rows, simulated in ((~beside, False), (beside, True)):
        if rows.any():
            some = runs if rows.all() else runs[rows]
            latencies[rows] = _hosted_ms(some, kernels, known, costs) if simulated else _dispatched_ms(some, known, costs)
    return latencies


def hosts_work_ms(runs: Ints, kernels: RunKernels, costs: PipelineCosts) -> Floats:
    """How long the host of each run works, as `pipeline.host_work_ms` has it; `runs`, `kernels` and `costs` as for
    `latencies_ms`."""
    of_kernels = _kernels(kernels, costs).dispatch_ms + costs.off_gpu * kernels.host_ms
    return np.asarray(costs.start_ms + of_kernels[runs].sum(axis=1))


def _dispatched_ms(runs: Ints, known: _Kernels, costs: PipelineCosts) -> Floats:
    """Of runs whose nodes are all on the GPU. For each node the GPU ends no earlier than its dispatch plus all work from it on:
    the sum of all work, and of what dispatch takes longer than work up to there."""
    ahead = np.cumsum((known.dispatch_ms - known.work_ms)[runs], axis=1)
    work = known.work_ms[runs].sum(axis=1)
    host = costs.start_ms + (ahead[:, -1] + work if runs.shape[1] else np.zeros(len(runs)))
    ends = costs.start_ms + work + (ahead + (known.work_ms + known.after_ms)[runs]).max(axis=1, initial=-np.inf)
    return np.where(runs.any(axis=1), np.maximum(host, np.maximum(ends, 0.0)), costs.start_ms) + costs.end_ms


def _hosted_ms(runs: Ints, kernels: RunKernels, known: _Kernels, costs: PipelineCosts) -> Floats:
    """Of runs with nodes off the GPU, where the host may wait: node by node, as `pipeline.host_times` does it."""
    launched = np.maximum(kernels.launches, 1.0)
    one_launch = launch_ms(Tracks(kernels.gpu_ms, kernels.launches, kernels.kinds), costs)
    first = np.maximum(costs.lead_ms - one_launch * (launched - 1.0), -known.dispatch_ms)
    lead, last = np.maximum(costs.lead_ms, -known.dispatch_ms), known.work_ms / launched
    busy_ms = costs.off_gpu * kernels.host_ms
    before = known.dispatch_ms + np.where(kernels.waits, 0.0, busy_ms)
    waits = np.asarray(kernels.waits[runs].any(axis=0))
    host, gpu, dispatched = np.full(len(runs), costs.start_ms), np.full(len(runs), -np.inf), np.empty(runs.shape)
    for place, numbers in enumerate(runs.T):
        host = host + before[numbers]
        of_last = last[numbers]
        busy_until = np.maximum(np.maximum(gpu, host + first[numbers]) + known.work_ms[numbers] - of_last,
                                host + lead[numbers]) + of_last
        gpu = np.where(kernels.launches[numbers] > 0, busy_until, gpu)
        dispatched[:, place] = host
        if waits[place]:
            host = np.where(kernels.waits[numbers], np.maximum(host, gpu) + busy_ms[numbers], host)
    work = known.work_ms[runs]
    left = np.cumsum(work[:, ::-1], axis=1)[:, ::-1]  # all work from each node on
    ends = (dispatched + left + known.after_ms[runs]).max(axis=1, initial=0.0)
    return np.maximum(host, ends) + costs.end_ms


def off_gpu(kernels: RunKernels, on_host: npt.NDArray[np.bool_], runs: Ints) -> npt.NDArray[np.bool_]:
    """The runs with nodes off the GPU: those on the host, and those where it waits."""
    beside = on_host | kernels.waits
    return np.asarray(beside[runs].any(axis=1) if beside.any() else np.zeros(len(runs), dtype=bool))
