"""The host's side of a CUDA session: costs of copies, of waiting for the GPU, and of the CPU provider's kernels.

`training/fit_host.py` learns them for a target; `host.json` has the costs of copies and of waiting. The defaults for other
targets were measured on an NVIDIA H200 (ONNX Runtime 1.31.1, Intel Xeon host). A copy to the host is part of the GPU's stream
and writes to pinned memory, and the host waits for it. A copy to the GPU reads pageable memory, which keeps the host busy. In
addition, each costs as much as a node with one launch. The costs are fitted to the latencies of small graphs with and without
copies (records/dataset_files.py): with the copy's time, the simulated difference of two graphs equals the measured one.

The CPU provider's kernels have predictors of their own, in the folder `host` of the target's predictors. Without these, their
times are guessed (cuda_nodes.py) and marked as estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from hase.graph_model.simulation.pipeline import OffGpu
from hase.learned import target_files
from hase.learned.composition.cuda_nodes import (
    copies_to_host,
    guessed_host_ms,
    is_copy,
    is_off_gpu,
    takes_no_time,
    waits_for_size,
)
from hase.learned.kernels.predictors import Predictors, read_predictors
from hase.learned.kernels.uncertainty import NOTHING_LEARNED, Uncertainty
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.measurement import UNPROFILED
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.timing import Floats

FOLDER = "host"
HOST_LABEL = UNPROFILED  # the time of a kernel in a graph, without what the profiler adds
HOST_VERSION = 1


class CopyCurve(Frozen):
    """How long copies in one direction take (ms), at ascending sizes in bytes."""

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
        """The time of a copy (ms): linear between measured sizes, constant below, proportional beyond."""
        if size > self.bytes[-1]:
            return self.ms[-1] * size / self.bytes[-1]
        return float(np.interp(size, self.bytes, self.ms))


class CopyCosts(Frozen):
    """`host.json`: the costs of copies and of waiting on a target.

    Attributes:
        to_host: the GPU's time for a copy to the host, including the wait for it.
        to_gpu: the host's time for a copy to the GPU.
        wait_ms: the host's time at a node that waits for the GPU, besides dispatch and the GPU's work.
        measured: on this target; else they are defaults.
    """

    version: int = HOST_VERSION
    to_host: CopyCurve
    to_gpu: CopyCurve
    wait_ms: float
    measured: bool = True


# 54 GB/s from 16 to 256 MiB to the host, 12.4 GB/s from 1 to 16 MiB to the GPU. A NonZero takes 30 µs, of which its dispatch
# with five launches takes 25.
DEFAULT_COSTS = CopyCosts(to_host=CopyCurve(bytes=(54,), ms=(1e-6,)), to_gpu=CopyCurve(bytes=(124,), ms=(1e-5,)), wait_ms=0.005,
                          measured=False)


class HostKernel(NamedTuple):
    """The time of a CPU provider's kernel (ms), and its origin: `measured`, `predicted` or `estimated`."""

    time_ms: float
    provenance: str


class NodesOffGpu(NamedTuple):
    """The nodes of a model that are no GPU kernels; one entry of each array per node. `gpu_ms` and `launches` are the GPU's
    work for a copy, else 0; `run` is the work on the host, also of nodes that wait for the GPU."""

    off: npt.NDArray[np.bool_]
    gpu_ms: Floats
    launches: Floats
    run: OffGpu


@dataclass(frozen=True)
class HostSide:
    """A target's host, ready to predict: costs of copies and of waiting, and predictors of the CPU's kernels. `kernels` is None
    if none were measured. `uncertainty` is for kernels about which nothing was learned."""

    costs: CopyCosts = DEFAULT_COSTS
    kernels: Predictors | None = None
    uncertainty: Uncertainty = NOTHING_LEARNED

    def copy_ms(self, kernel: Kernel) -> float:
        """How long a copy moves data (ms). A copy to the host is on the GPU's track, a copy to the GPU on the host's."""
        return (self.costs.to_host if copies_to_host(kernel) else self.costs.to_gpu).at(kernel.bytes_written)

    def wait_ms(self, kernel: Kernel) -> float:
        """How long a kernel that waits inside for the GPU keeps the host busy, besides its dispatch (ms)."""
        return self.costs.wait_ms if waits_for_size(kernel) else 0.0

    def kernel_times(self, kernels: Sequence[Kernel], strict: bool = False) -> list[HostKernel]:
        """The time of each kernel on the CPU provider; `strict`: don't look up measured times."""
        working = [kernel for kernel in kernels if not takes_no_time(kernel)]
        known = {kernel.id: HostKernel(guessed_host_ms(kernel), "estimated") for kernel in working}
        if self.kernels is not None and working:
            times = self.kernels.predict(working, {}, HOST_LABEL, strict)
            known |= {kernel.id: HostKernel(time_ms, provenance) for kernel, time_ms, provenance in zip(
                working, times.latency_ms, times.provenance, strict=True) if provenance != "estimated"}
        return [HostKernel(0.0, "measured") if takes_no_time(kernel) else known[kernel.id] for kernel in kernels]

    def off_gpu(self, record: ModelRecord, strict: bool = True) -> NodesOffGpu | None:
        """The work of a model's nodes off the GPU; None if all nodes run on the GPU. `strict`: don't look up measured times.
        The model must have no bodies."""
        kernels = [record.kernel_of(node) for node in record.nodes]
        off = np.array([is_off_gpu(kernel, node.provider) for kernel, node in zip(kernels, record.nodes, strict=True)])
        waits = np.array([copies_to_host(kernel) or (not is_off and waits_for_size(kernel))
                          for kernel, is_off in zip(kernels, off, strict=True)])
        if not (off | waits).any():
            return None
        on_cpu = {kernel.id: kernel for kernel, is_off in zip(kernels, off, strict=True) if is_off and not is_copy(kernel)}
        times = dict(zip(on_cpu, self.kernel_times(list(on_cpu.values()), strict), strict=True))

        def host_ms(kernel: Kernel, is_off: bool) -> float:
            if not is_off:
                return self.wait_ms(kernel)
            if is_copy(kernel):
                return 0.0 if copies_to_host(kernel) else self.copy_ms(kernel)
            return times[kernel.id].time_ms

        host_times_ms = np.array([host_ms(kernel, is_off) for kernel, is_off in zip(kernels, off, strict=True)])
        return NodesOffGpu(off, np.array([self.copy_ms(kernel) if copies_to_host(kernel) else 0.0 for kernel in kernels]),
                           np.array([float(is_copy(kernel)) for kernel in kernels]), OffGpu(host_times_ms, waits))


NOTHING_MEASURED = HostSide()


def host_folder(folder: Path) -> Path:
    """The folder of the predictors of the CPU provider's kernels, inside that of a target's predictors."""
    return folder / FOLDER


def read_host_side(folder: Path) -> HostSide:
    """Reads a target's host side from the folder of its predictors, or returns defaults."""
    costs, kernels = target_files.HOST.read(folder) or DEFAULT_COSTS, host_folder(folder)
    if not target_files.PREDICTORS.path(kernels).is_file():
        return HostSide(costs)
    return HostSide(costs, read_predictors(kernels), target_files.UNCERTAINTY.read(kernels) or NOTHING_LEARNED)


def host_sha256(folder: Path) -> str:
    """The hash of what was learned about the host of the target whose predictors are in `folder`; empty if nothing was."""
    paths = target_files.HOST.path(folder), target_files.PREDICTORS.path(host_folder(folder))
    digests = [files.sha256(path) for path in paths if path.is_file()]
    return files.content_digest(digests) if digests else ""


