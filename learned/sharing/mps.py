"""What was learned of a GPU that processes share through MPS: how much of it each kernel fills, and how kernels of several
processes run at the same time (fitted by mps_fit.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.mps import Grids, MpsRules
from hase.learned.kernels.estimators import KernelModel, predict_kernels
from hase.learned.kernels.saved_form import MPS_PREFIX, Saved, open_estimator
from hase.utils import files
from hase.utils.frozen import Frozen

if TYPE_CHECKING:
    from hase.records.kernel_record import Kernel

Floats = npt.NDArray[np.float64]
MPS_VERSION = 1
FILE = "mps.json"
WITHOUT_SHARES, WITH_SHARES = "without shares", "with shares"  # of the threads: a key of errors
STEM = f"{MPS_PREFIX}width"  # of the file of the estimator of widths
FIT = "python training/fit_mps.py"
GPU_BOUND = 0.8  # a model is GPU-bound if its kernels take this share of its latency or more


class MpsErrors(Frozen):
    """Mean errors (ratios) of latencies beside models in loops, with the model's family and the looped model held out of the
    rules' fit. Kernels and the latency alone are as measured."""

    cases: int
    mean: float
    p50: float
    p95: float


class MpsSharing(Frozen):
    """`mps.json`: how a target's GPU is shared through MPS.

    Attributes:
        learned_on: the target whose GPU was measured; it may be another one.
        rules: of the simulation.
        bytes_per_ms: the bandwidth of the target's memory.
        host_slowdown: how many times as long the host takes for a run through MPS as in time slices.
        width: the estimator of how wide kernels are.
        width_error: the mean error (a ratio) of widths of kernels whose family was left out; each counts by its time.
        gpu_bound, host_bound: errors for models whose kernels take GPU_BOUND of their latency, and for the others; by
            `without shares` and `with shares`.
    """

    version: int = MPS_VERSION
    learned_on: str
    rules: MpsRules
    bytes_per_ms: float
    host_slowdown: float = 1.0
    width: Saved
    width_error: float
    gpu_bound: dict[str, MpsErrors]
    host_bound: dict[str, MpsErrors]

    def errors_of(self, gpu_ms: float, alone_ms: float, shares: bool) -> MpsErrors | None:
        """The errors of models like one whose kernels take `gpu_ms` of its latency alone, with or without a share of the
        threads; None where no such model was measured."""
        of_kind = self.gpu_bound if gpu_ms >= GPU_BOUND * alone_ms else self.host_bound
        return of_kind.get(WITH_SHARES if shares else WITHOUT_SHARES)


def mps_path(folder: Path) -> Path:
    """The file of a target whose predictors are in `folder`."""
    return folder / FILE


def read_mps(folder: Path) -> MpsSharing | None:
    """What was learned of a target's sharing through MPS; None where nothing was.

    Raises:
        UserError: a damaged file or one of another version.
    """
    path = mps_path(folder)
    return files.read_record(path, MpsSharing, MPS_VERSION, FIT) if path.exists() else None


def write_mps(folder: Path, learned: MpsSharing) -> None:
    """Writes `mps.json`, then removes estimators of widths that neither it nor the one before names: a process may have read
    that one and not yet its estimator."""
    before = files.read_json(mps_path(folder)) if mps_path(folder).exists() else {}
    files.write_json(mps_path(folder), learned)
    in_use = {learned.width.file, before.get("width", {}).get("file") if isinstance(before, dict) else None}
    for path in folder.glob(f"{STEM}-*.npz"):
        if path.name not in in_use:
            path.unlink()


def grids_of(widths: Floats, bytes_moved: Floats, gpu_ms: Floats, bytes_per_ms: float) -> Grids:
    """The grids of nodes, from the widths of their kernels, the bytes that they read and write, and the GPU's time."""
    return Grids(np.clip(widths, 0.0, 1.0), np.minimum(1.0, bytes_moved / bytes_per_ms / np.maximum(gpu_ms, 1e-6)))


@dataclass(frozen=True)
class LearnedMps:
    """What was learned of a target's sharing through MPS, ready to predict.

    Attributes:
        sharing: the file.
        folder: of the file with the estimator of widths, which is read when it is first needed.
    """

    sharing: MpsSharing
    folder: Path

    @cached_property
    def _width(self) -> KernelModel:
        return open_estimator(self.sharing.width, KernelModel, self.folder, f"fit again: {FIT}")

    def grids(self, kernels: Sequence[Kernel], features: Floats, gpu_ms: Floats) -> Grids:
        """How kernels use the GPU.

        Args:
            kernels: in the order of a run's nodes.
            features: kernels × KERNEL_FEATURES.
            gpu_ms: the GPU's time of each.

        Raises:
            UserError: the estimator's file is missing or damaged.
        """
        moved = np.array([float(kernel.bytes_read + kernel.bytes_written) for kernel in kernels])
        widths = predict_kernels(self._width, kernels, features, self._width.idle_load) if len(kernels) else np.zeros(0)
        return grids_of(widths, moved, gpu_ms, self.sharing.bytes_per_ms)


def learned_mps(folder: Path) -> LearnedMps | None:
    """What was learned of a target whose predictors are in `folder`; None where nothing was.

    Raises:
        UserError: a damaged file or one of another version.
    """
    sharing = read_mps(folder)
    return None if sharing is None else LearnedMps(sharing, folder)
