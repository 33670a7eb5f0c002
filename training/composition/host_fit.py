"""Fits the costs of copies between host and GPU, and of waiting for the GPU, to latencies of small graphs.

Each graph (records/dataset_files.py) is simulated like a model. With the copy's time, the simulated difference of two graphs,
with and without the copy, equals the measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from hase.graph_model.simulation.pipeline import NodeKind, OffGpu, PipelineCosts, Tracks, pipeline_ms
from hase.learned.composition.host_side import DEFAULT_COSTS, CopyCosts, CopyCurve
from hase.learned.kernels.sidecar import read_sidecar
from hase.learned.target_files import TRAIN
from hase.records.dataset_files import CopyTimes, MeasuredCopies, WaitTimes
from hase.training.kernels.targets import trained_targets
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

HOST_NODE_MS = 0.001  # of the CPU provider's node on the smallest tensor, a time that the session's own hides
GPU_NODE_MS = 0.002  # of an elementwise kernel on a small tensor, which the host's dispatch hides (median of an H200's)
Predict = Callable[[WaitTimes], tuple[float, float] | None]
SMALL = 16384  # bytes of a tensor that the GPU processes faster than the host dispatches a node
HALVINGS = 60  # of the range in which a time lies


def host_predictors(workspace: Workspace) -> Path:
    """The folder of the predictors of the only CPU target in a workspace."""
    names = [name for name in trained_targets(workspace)
             if read_sidecar(workspace.predictors(name)).target.flavour.device == "cpu"]
    if len(names) != 1:
        raise UserError(f"{workspace.root}: {len(names)} CPU targets with predictors ({', '.join(names) or 'none'}); exactly "
                        f"one is expected: {TRAIN} --workspace {workspace.root}")
    return workspace.predictors(names[0])


class Step(NamedTuple):
    """A node of a simulated run: the GPU's time and launches, the host's own time, and whether the host waits for the GPU."""

    gpu_ms: float = 0.0
    launches: float = 0.0
    host_ms: float = 0.0
    waits: bool = False


def simulated_ms(steps: Sequence[Step], costs: PipelineCosts) -> float:
    """The latency (ms) of a simulated run."""
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


def copy_times_ms(measured: CopyTimes, smallest: CopyTimes, costs: PipelineCosts) -> tuple[float, float]:
    """The times (ms) of a copy to the host and of one to the GPU, from latencies at one size and at the smallest."""
    median_ms = medians_ms(measured)
    node_ms = max(median_ms["cpu"] - median(smallest.samples_ms["cpu"]), 0.0) + HOST_NODE_MS
    second = median_ms["gpu"] - median_ms["one"]
    on_gpu = Step(second if second > 1.5 * (costs.node_ms + costs.launch_ms) else GPU_NODE_MS, 1.0)
    on_cpu, one_ms = Step(host_ms=node_ms), simulated_ms([on_gpu], costs)

    def to_gpu(time_ms: float) -> float:
        return simulated_ms([on_cpu, Step(0.0, 1.0, host_ms=time_ms), on_gpu], costs) - one_ms

    def to_host(time_ms: float) -> float:
        return simulated_ms([on_gpu, Step(time_ms, 1.0, waits=True), on_cpu], costs) - one_ms

    return solve(median_ms["to_host"] - median_ms["one"], to_host), solve(median_ms["to_gpu"] - median_ms["one"], to_gpu)


def medians_ms(measured: CopyTimes) -> dict[str, float]:
    """The median latency of each graph, ms."""
    return {name: median(samples) for name, samples in measured.samples_ms.items()}


def pace_of(copies: Sequence[CopyTimes], costs: PipelineCosts) -> float:
    """The host's pace during the measurement: the cost of the second of two small nodes relative to its usual cost."""
    nodes_ms = [median_ms["gpu"] - median_ms["one"] for median_ms in map(medians_ms, (
        copy for copy in copies if copy.bytes <= SMALL))]
    return float(np.clip(median(nodes_ms) / (costs.node_ms + costs.launch_ms), 0.5, 2.0))


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """The values, each raised to the one before if that is larger: a larger copy takes no less time."""
    return tuple(accumulate(values, max))


def wait_ms(waits: Sequence[WaitTimes], predict: Predict, costs: PipelineCosts) -> float:
    """The host's time (ms) at a node that waits for the GPU: the median of the measurements, or the default without any.
    `predict` returns the GPU's time (ms) and the launches of a node; None if they are not known well enough."""
    times_ms = []
    for wait in waits:
        few, many = min(map(int, wait.samples_ms)), max(map(int, wait.samples_ms))
        per_node_ms = (median(wait.samples_ms[str(many)]) - median(wait.samples_ms[str(few)])) / (many - few)
        if (gpu_work := predict(wait)) is not None:
            times_ms.append(solve(per_node_ms, partial(_per_node_ms, Step(*gpu_work, waits=True), (few, many), costs)))
    return median(times_ms) if times_ms else DEFAULT_COSTS.wait_ms


def _per_node_ms(step: Step, counts: tuple[int, int], costs: PipelineCosts, host_ms: float) -> float:
    """The additional time of a run for each further node that waits, between two numbers of such nodes."""
    less, more = (simulated_ms([step._replace(host_ms=host_ms)] * count, costs) for count in counts)
    return (more - less) / (counts[1] - counts[0])


def fit_copies(measured: MeasuredCopies, predict: Predict, costs: PipelineCosts) -> CopyCosts:
    """Fits the costs of copies and of waiting. `predict` as in `wait_ms`; `costs` at the host's usual pace."""
    copies = sorted(measured.copies, key=lambda copy: copy.bytes)
    costs = costs.at_pace(pace_of(copies, costs)).model_copy(update={"off_gpu": 1.0})  # times on the host are as measured
    to_host, to_gpu = zip(*(copy_times_ms(copy, copies[0], costs) for copy in copies), strict=True)
    sizes = tuple(copy.bytes for copy in copies)
    return CopyCosts(to_host=CopyCurve(bytes=sizes, ms=rising(to_host)), to_gpu=CopyCurve(bytes=sizes, ms=rising(to_gpu)),
                     wait_ms=wait_ms(measured.waits, predict, costs))
