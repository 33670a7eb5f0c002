"""The host's side of a CUDA session: what copies cost, what waiting for the GPU costs, and the CPU provider's kernels.

`training/fit_host.py` learns them for a target. Its `host.json` has the costs of copies and of waiting. Targets without it have
defaults, which were measured once on an NVIDIA H200 (ONNX Runtime 1.31.1, Intel Xeon host). A copy to the host is part of the
GPU's stream, writes to pinned memory, and the host waits for it. A copy to the GPU reads pageable memory, which keeps the host
busy. Besides, either costs as much as a node with one launch. These costs are fitted to the latencies of small graphs with and
without copies (records/copies.py): each graph is simulated like a model, and the copy's time is what makes the simulated
difference of two graphs the measured one.

The kernels that the CPU provider runs have predictors of their own, of the CPU of a machine with that GPU, in the folder `host`
of the target's predictors. Where there are none, their times are guessed (cuda_nodes.py), and marked as estimated everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from hase.graph_model.simulation.pipeline import NodeKind, OffGpu, PipelineCosts, Tracks, pipeline_ms
from hase.learned.composition.cuda_nodes import guessed_ms, is_copy, is_off_gpu, takes_no_time, to_host, waits_inside
from hase.learned.kernels.predictors import Predictors, read_predictors
from hase.learned.kernels.sidecar import TRAIN, read_sidecar, sidecar_path
from hase.learned.kernels.uncertainty import NOTHING_LEARNED, Uncertainty, read_uncertainty
from hase.records.copies import CopyTimes, MeasuredCopies, WaitTimes
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.measurement import UNPROFILED
from hase.training.kernels.targets import trained_targets
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.paths import Workspace

FOLDER = "host"
HOST_LABEL = UNPROFILED  # the time of a kernel in a graph, without what the profiler adds
Floats = npt.NDArray[np.float64]
HOST_VERSION = 1
FIT = "python training/fit_host.py"
HOST_NODE_MS = 0.001  # of the CPU provider's node on the smallest tensor, which a session's own time hides
GPU_NODE_MS = 0.002  # of an elementwise kernel on a small tensor, which the host's dispatch hides (median of an H200's)
Predict = Callable[[WaitTimes], tuple[float, float] | None]
SMALL = 16384  # bytes of a tensor on which the GPU works for less time than the host takes to dispatch a node
HALVINGS = 60  # of the range in which a time lies


class CopyCurve(Frozen):
    """How long copies in one direction take, by their size.

    Attributes:
        bytes: sizes, ascending.
        ms: the time at each.
    """

    bytes: tuple[int, ...]
    ms: tuple[float, ...]

    @model_validator(mode="after")
    def _is_a_curve(self) -> CopyCurve:
        if len(self.bytes) != len(self.ms) or not self.bytes or min(self.bytes) < 1:
            raise ValueError("a curve needs a time for each of its sizes, which are positive")
        if (any(size >= larger for size, larger in pairwise(self.bytes))
                or any(time_ms > longer_ms for time_ms, longer_ms in pairwise(self.ms))):
            raise ValueError("sizes of a curve ascend, and times don't descend")
        return self

    def at(self, size: float) -> float:
        """The time of a copy of `size` bytes, ms: between two measured sizes on a straight line, below the smallest as at the
        smallest, beyond the largest in proportion to it."""
        if size > self.bytes[-1]:
            return self.ms[-1] * size / self.bytes[-1]
        return float(np.interp(size, self.bytes, self.ms))


class HostCosts(Frozen):
    """`host.json`.

    Attributes:
        to_host: the GPU's time for a copy to the host, the waiting for it included.
        to_gpu: the host's time for a copy to the GPU.
        wait_ms: the host's time at a node that waits for the GPU inside, besides its dispatch and the GPU's work.
        measured: whether they were measured on this target; else they are defaults.
    """

    version: int = HOST_VERSION
    to_host: CopyCurve
    to_gpu: CopyCurve
    wait_ms: float
    measured: bool = True


# 54 GB/s from 16 to 256 MiB to the host, 12.4 GB/s from 1 to 16 MiB to the GPU. A NonZero takes 30 µs, of which its dispatch
# with five launches takes 25.
DEFAULT_COSTS = HostCosts(to_host=CopyCurve(bytes=(54,), ms=(1e-6,)), to_gpu=CopyCurve(bytes=(124,), ms=(1e-5,)), wait_ms=0.005,
                          measured=False)


def host_costs_path(folder: Path) -> Path:
    return folder / "host.json"


def read_host_costs(folder: Path) -> HostCosts:
    """The costs in the folder of a target's predictors; DEFAULT_COSTS where there are none.

    Raises:
        UserError: the file can't be read.
    """
    path = host_costs_path(folder)
    return files.read_record(path, HostCosts, HOST_VERSION, FIT) if path.is_file() else DEFAULT_COSTS


class HostKernel(NamedTuple):
    """The time of a kernel that the CPU provider runs (ms), and where it comes from: `measured`, `predicted`, `estimated`."""

    time_ms: float
    provenance: str


class NodesOffGpu(NamedTuple):
    """The nodes of a model that are no GPU kernels; one entry of each array per node.

    Attributes:
        off: whether it is such a node.
        gpu_ms, launches: the GPU's work for it: that of a copy, else 0.
        run: what nodes do on the host, those that wait for the GPU inside among them.
    """

    off: npt.NDArray[np.bool_]
    gpu_ms: Floats
    launches: Floats
    run: OffGpu


@dataclass(frozen=True)
class HostSide:
    """What was learned of a target's host.

    Attributes:
        costs: of copies and of waiting.
        kernels: the predictors of the CPU provider's kernels; None where none were measured.
        uncertainty: how far off the times of kernels may be of which nothing was learned.
    """

    costs: HostCosts = DEFAULT_COSTS
    kernels: Predictors | None = None
    uncertainty: Uncertainty = NOTHING_LEARNED

    def copy_ms(self, kernel: Kernel) -> float:
        """How long a copy moves data (ms). A copy to the host is on the GPU's track, a copy to the GPU on the host's."""
        return (self.costs.to_host if to_host(kernel) else self.costs.to_gpu).at(kernel.bytes_written)

    def wait_ms(self, kernel: Kernel) -> float:
        """How long a GPU kernel keeps the host busy besides its dispatch, since it waits for the GPU inside (ms)."""
        return self.costs.wait_ms if waits_inside(kernel) else 0.0

    def kernel_times(self, kernels: Sequence[Kernel], strict: bool = False) -> list[HostKernel]:
        """The time of each kernel that the CPU provider runs; with `strict`, measured times are not looked up."""
        working = [kernel for kernel in kernels if not takes_no_time(kernel)]
        known = {kernel.id: HostKernel(guessed_ms(kernel), "estimated") for kernel in working}
        if self.kernels is not None and working:
            times = self.kernels.predict(working, {}, HOST_LABEL, strict)
            known |= {kernel.id: HostKernel(time_ms, provenance) for kernel, time_ms, provenance in zip(
                working, times.latency_ms, times.provenance, strict=True) if provenance != "estimated"}
        return [HostKernel(0.0, "measured") if takes_no_time(kernel) else known[kernel.id] for kernel in kernels]

    def off_gpu(self, record: ModelRecord, strict: bool = True) -> NodesOffGpu | None:
        """What the nodes of a model without bodies do off the GPU; None where all of them run on the GPU.

        Args:
            record: the model's.
            strict: whether measured times are not looked up.
        """
        kernels = [record.kernel_of(node) for node in record.nodes]
        off = np.array([is_off_gpu(kernel, node.provider) for kernel, node in zip(kernels, record.nodes, strict=True)])
        waits = np.array([to_host(kernel) or (not out and waits_inside(kernel))
                          for kernel, out in zip(kernels, off, strict=True)])
        if not (off | waits).any():
            return None
        on_cpu = {kernel.id: kernel for kernel, out in zip(kernels, off, strict=True) if out and not is_copy(kernel)}
        times = dict(zip(on_cpu, self.kernel_times(list(on_cpu.values()), strict), strict=True))

        def host_ms(kernel: Kernel, out: bool) -> float:
            if not out:
                return self.wait_ms(kernel)
            if is_copy(kernel):
                return 0.0 if to_host(kernel) else self.copy_ms(kernel)
            return times[kernel.id].time_ms

        return NodesOffGpu(off, np.array([self.copy_ms(kernel) if to_host(kernel) else 0.0 for kernel in kernels]),
                           np.array([float(is_copy(kernel)) for kernel in kernels]),
                           OffGpu(np.array([host_ms(kernel, out) for kernel, out in zip(kernels, off, strict=True)]), waits))


NOTHING_MEASURED = HostSide()


def host_folder(folder: Path) -> Path:
    """The folder of the predictors of the CPU provider's kernels, in that of a target's predictors."""
    return folder / FOLDER


def host_predictors(workspace: Workspace) -> Path:
    """The folder of the predictors of the only CPU target in a workspace.

    Raises:
        UserError: there is none, or more than one.
    """
    names = [name for name in trained_targets(workspace)
             if read_sidecar(workspace.predictors(name)).target.flavour.device == "cpu"]
    if len(names) != 1:
        raise UserError(f"{workspace.root}: {len(names)} CPU targets with predictors ({', '.join(names) or 'none'}); exactly "
                        f"one is expected: {TRAIN} --workspace {workspace.root}")
    return workspace.predictors(names[0])


def read_host_side(folder: Path) -> HostSide:
    """What was learned of the host of the target whose predictors lie in `folder`; defaults where nothing was.

    Raises:
        UserError: a file can't be read.
    """
    of_kernels = host_folder(folder)
    if not sidecar_path(of_kernels).is_file():
        return HostSide(read_host_costs(folder))
    return HostSide(read_host_costs(folder), read_predictors(of_kernels), read_uncertainty(of_kernels))


def host_sha256(folder: Path) -> str:
    """The hash of what was learned of the host of the target whose predictors lie in `folder`; empty where nothing was."""
    paths = [path for path in (host_costs_path(folder), sidecar_path(host_folder(folder))) if path.is_file()]
    return files.digest_of([files.sha256(path) for path in paths]) if paths else ""


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


def copy_times_ms(measured: CopyTimes, smallest: CopyTimes, costs: PipelineCosts) -> tuple[float, float]:
    """The time of a copy to the host and of one to the GPU, ms.

    Args:
        measured: the latencies at one size.
        smallest: the same at the smallest size.
        costs: of a run.
    """
    taken = medians_ms(measured)
    node_ms = max(taken["cpu"] - median(smallest.samples_ms["cpu"]), 0.0) + HOST_NODE_MS
    second = taken["gpu"] - taken["one"]
    on_gpu = Step(second if second > 1.5 * (costs.node_ms + costs.launch_ms) else GPU_NODE_MS, 1.0)
    on_cpu, one_ms = Step(host_ms=node_ms), simulated_ms([on_gpu], costs)

    def to_gpu(time_ms: float) -> float:
        return simulated_ms([on_cpu, Step(0.0, 1.0, host_ms=time_ms), on_gpu], costs) - one_ms

    def to_host(time_ms: float) -> float:
        return simulated_ms([on_gpu, Step(time_ms, 1.0, waits=True), on_cpu], costs) - one_ms

    return solve(taken["to_host"] - taken["one"], to_host), solve(taken["to_gpu"] - taken["one"], to_gpu)


def medians_ms(measured: CopyTimes) -> dict[str, float]:
    """The median latency of each graph, ms."""
    return {name: median(samples) for name, samples in measured.samples_ms.items()}


def pace_of(copies: Sequence[CopyTimes], costs: PipelineCosts) -> float:
    """How many times as long as usual the host took meanwhile: the second of two small nodes, to what it costs usually."""
    nodes_ms = [taken["gpu"] - taken["one"] for copy in copies if copy.bytes <= SMALL for taken in [medians_ms(copy)]]
    return float(np.clip(median(nodes_ms) / (costs.node_ms + costs.launch_ms), 0.5, 2.0))


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
    times_ms = []
    for wait in waits:
        few, many = min(map(int, wait.samples_ms)), max(map(int, wait.samples_ms))
        each_ms = (median(wait.samples_ms[str(many)]) - median(wait.samples_ms[str(few)])) / (many - few)
        if (of_gpu := predict(wait)) is not None:
            times_ms.append(solve(each_ms, partial(_each_ms, Step(*of_gpu, waits=True), (few, many), costs)))
    return median(times_ms) if times_ms else DEFAULT_COSTS.wait_ms


def _each_ms(step: Step, counts: tuple[int, int], costs: PipelineCosts, host_ms: float) -> float:
    """How much longer a run is with each further node that waits, between two numbers of such nodes."""
    less, more = (simulated_ms([step._replace(host_ms=host_ms)] * count, costs) for count in counts)
    return (more - less) / (counts[1] - counts[0])


def fit_copies(measured: MeasuredCopies, predict: Predict, costs: PipelineCosts) -> HostCosts:
    """What copies cost, and waiting.

    Args:
        measured: the latencies of graphs with and without copies.
        predict: the GPU's time (ms) and the launches of a node; None where they are not known well enough.
        costs: of a run, at the host's usual pace.
    """
    copies = sorted(measured.copies, key=lambda copy: copy.bytes)
    costs = costs.at_pace(pace_of(copies, costs)).model_copy(update={"off_gpu": 1.0})  # times on the host are as measured
    to_host, to_gpu = zip(*(copy_times_ms(copy, copies[0], costs) for copy in copies), strict=True)
    sizes = tuple(copy.bytes for copy in copies)
    return HostCosts(to_host=CopyCurve(bytes=sizes, ms=rising(to_host)), to_gpu=CopyCurve(bytes=sizes, ms=rising(to_gpu)),
                     wait_ms=wait_ms(measured.waits, predict, costs))
