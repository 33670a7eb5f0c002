"""The host's side of a CUDA session, as it was learned for a target: copies, and the kernels that the CPU provider runs.

The kernels have predictors of their own, of the CPU of a machine with that GPU, in the folder `host` of the target's
predictors. Where there are none, their times are guessed (off_gpu.py), and marked as estimated everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graph_model.simulation.tracks import OffGpu
from records.kernel_record import Kernel, ModelRecord
from records.labels import UNPROFILED
from training.composition.host_costs import DEFAULT_COSTS, HostCosts, read_host_costs
from training.composition.off_gpu import guessed_ms, is_copy, is_off_gpu, takes_no_time, to_host, waits_inside
from training.kernels.predictors import Predictors, read_predictors
from training.kernels.sidecar import TRAIN, read_sidecar, sidecar_path
from training.kernels.targets import trained_targets
from training.kernels.uncertainty import NOTHING_LEARNED, Uncertainty, read_uncertainty
from utils.errors import UserError
from utils.paths import Workspace

FOLDER = "host"
HOST_LABEL = UNPROFILED  # the time of a kernel in a graph, without what the profiler adds
Floats = npt.NDArray[np.float64]


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
        found: dict[str, HostKernel] = {}
        if self.kernels is not None and working:
            times = self.kernels.predict(working, {}, HOST_LABEL, strict)
            found = {kernel.id: HostKernel(time_ms, provenance) for kernel, time_ms, provenance in zip(
                working, times.latency_ms, times.provenance, strict=True) if provenance != "estimated"}
        guesses = {kernel.id: HostKernel(guessed_ms(kernel), "estimated") for kernel in working}
        return [HostKernel(0.0, "measured") if takes_no_time(kernel) else found.get(kernel.id, guesses[kernel.id])
                for kernel in kernels]

    def off_gpu(self, record: ModelRecord, strict: bool = True) -> NodesOffGpu | None:
        """What the nodes of a model without bodies do off the GPU; None where all of them run on the GPU.

        Args:
            record: the model's.
            strict: as of `kernel_times`.
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
    found = [name for name in trained_targets(workspace)
             if read_sidecar(workspace.predictors(name)).target.flavour.device == "cpu"]
    if len(found) != 1:
        raise UserError(f"{workspace.root}: {len(found)} CPU targets with predictors ({', '.join(found) or 'none'}); exactly "
                        f"one must be there: {TRAIN} --workspace {workspace.root}")
    return workspace.predictors(found[0])


def read_host_side(folder: Path) -> HostSide:
    """What was learned of the host of the target whose predictors lie in `folder`; defaults where nothing was.

    Raises:
        UserError: a file can't be read.
    """
    of_kernels = host_folder(folder)
    if not sidecar_path(of_kernels).is_file():
        return HostSide(read_host_costs(folder))
    return HostSide(read_host_costs(folder), read_predictors(of_kernels), read_uncertainty(of_kernels))
