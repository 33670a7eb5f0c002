"""What copies cost, from the latencies of small graphs with and without them (records/copies.py).

Each graph is simulated like a model, and the copy's time is what makes the simulated difference of two graphs the measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import numpy as np

from graph_model.simulation.pipeline import PipelineCosts, pipeline_ms
from graph_model.simulation.tracks import NodeKind, OffGpu, Tracks
from records.copies import CopyTimes, MeasuredCopies, WaitTimes
from training.composition.host_costs import DEFAULT_COSTS, CopyCurve, HostCosts

HOST_NODE_MS = 0.001  # of the CPU provider's node on the smallest tensor, which a session's own time hides
GPU_NODE_MS = 0.002  # of an elementwise kernel on a small tensor, which the host's dispatch hides (median of an H200's)
Predict = Callable[[WaitTimes], tuple[float, float] | None]
SMALL = 16384  # bytes of a tensor on which the GPU works for less time than the host takes to dispatch a node
HALVINGS = 60  # of the range in which a time lies


class Step(NamedTuple):
    """A node of a simulated run: the GPU's time and launches, the host's own time, and whether the host waits for the GPU."""

    gpu_ms: float = 0.0
    launches: float = 0.0
    host_ms: float = 0.0
    waits: bool = False


def simulated_ms(steps: Sequence[Step], costs: PipelineCosts) -> float:
    """The latency of a run."""
    gpu, launches, host, waits = (np.array(column) for column in zip(*steps, strict=True))
    tracks = Tracks(gpu, launches, np.full(len(steps), NodeKind.OWN, dtype=int))
    return pipeline_ms(tracks, costs, OffGpu(host, waits.astype(bool)))


def solve(wanted_ms: float, simulate: Callable[[float], float]) -> float:
    """The time (ms, at least 0) at which an ascending `simulate` gives `wanted_ms`."""
    low, high = 0.0, max(wanted_ms, 1e-6)
    while simulate(high) < wanted_ms and high < 1e9:
        high *= 2.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if simulate(middle) < wanted_ms else (low, middle)
    return low


def copy_times_ms(found: CopyTimes, smallest: CopyTimes, costs: PipelineCosts) -> tuple[float, float]:
    """The time of a copy to the host and of one to the GPU, ms.

    Args:
        found: what was measured at one size.
        smallest: the same at the smallest size.
        costs: of a run.
    """
    taken = medians_ms(found)
    node_ms = max(taken["cpu"] - median(smallest.samples_ms["cpu"]), 0.0) + HOST_NODE_MS
    second = taken["gpu"] - taken["one"]
    on_gpu = Step(second if second > 1.5 * (costs.node_ms + costs.launch_ms) else GPU_NODE_MS, 1.0)
    on_cpu, one_ms = Step(host_ms=node_ms), simulated_ms([on_gpu], costs)

    def to_gpu(time_ms: float) -> float:
        return simulated_ms([on_cpu, Step(0.0, 1.0, host_ms=time_ms), on_gpu], costs) - one_ms

    def to_host(time_ms: float) -> float:
        return simulated_ms([on_gpu, Step(time_ms, 1.0, waits=True), on_cpu], costs) - one_ms

    return solve(taken["to_host"] - taken["one"], to_host), solve(taken["to_gpu"] - taken["one"], to_gpu)


def medians_ms(found: CopyTimes) -> dict[str, float]:
    """The median latency of each graph, ms."""
    return {name: median(samples) for name, samples in found.samples_ms.items()}


def pace_of(copies: Sequence[CopyTimes], costs: PipelineCosts) -> float:
    """How many times as long as usual the host took meanwhile: the second of two small nodes, to what it costs usually."""
    seconds = [taken["gpu"] - taken["one"] for one in copies if one.bytes <= SMALL for taken in [medians_ms(one)]]
    return float(np.clip(median(seconds) / (costs.node_ms + costs.launch_ms), 0.5, 2.0))


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """The values, each at least as large as the one before: a larger copy takes no less time."""
    return tuple(accumulate(values, max))


def wait_ms(waits: Sequence[WaitTimes], predict: Predict, costs: PipelineCosts) -> float:
    """The host's time at a node that waits for the GPU, ms: the median over what was measured, the default without any.

    Args:
        waits: what was measured.
        predict: the GPU's time (ms) and the launches of a node; None where they are not known well enough.
        costs: of a run.
    """
    found = []
    for one in waits:
        few, many = min(map(int, one.samples_ms)), max(map(int, one.samples_ms))
        each_ms = (median(one.samples_ms[str(many)]) - median(one.samples_ms[str(few)])) / (many - few)
        if (of_gpu := predict(one)) is not None:
            found.append(solve(each_ms, partial(_each_ms, Step(*of_gpu, waits=True), (few, many), costs)))
    return median(found) if found else DEFAULT_COSTS.wait_ms


def _each_ms(step: Step, counts: tuple[int, int], costs: PipelineCosts, host_ms: float) -> float:
    """How much longer a run is with each further node that waits, between two numbers of such nodes."""
    less, more = (simulated_ms([step._replace(host_ms=host_ms)] * count, costs) for count in counts)
    return (more - less) / (counts[1] - counts[0])


def fit_copies(measured: MeasuredCopies, predict: Predict, costs: PipelineCosts) -> HostCosts:
    """What copies cost, and waiting; arguments as of `wait_ms`, the costs at the host's usual pace."""
    copies = sorted(measured.copies, key=lambda one: one.bytes)
    costs = costs.at_pace(pace_of(copies, costs))
    to_host, to_gpu = zip(*(copy_times_ms(one, copies[0], costs) for one in copies), strict=True)
    sizes = tuple(one.bytes for one in copies)
    return HostCosts(to_host=CopyCurve(bytes=sizes, ms=rising(to_host)), to_gpu=CopyCurve(bytes=sizes, ms=rising(to_gpu)),
                     wait_ms=wait_ms(measured.waits, predict, costs))
