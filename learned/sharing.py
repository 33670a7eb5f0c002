"""How processes share a target's GPU, in time slices or through MPS, and how a host serves requests to models.

Without MPS and MIG, two processes never run on the GPU at the same time: each has it for a time slice, or until its work is
done. The length of a slice is learned for each device. The co-runner's turns, and how often it has work, are measured by a
probe (benchmark/sharing_probe.py), or guessed from the GPU's busy share in the metrics. Through MPS, kernels of several
processes run at the same time; it is learned how much of the GPU (width) each kernel fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks
from hase.graph_model.simulation.serving import Host
from hase.graph_model.simulation.sharing import CoRunner, Grids, MpsRules, gpu_work_ms, turns_ms
from hase.learned import target_files
from hase.learned.kernels.estimators import KernelModel, predict_kernels
from hase.learned.kernels.saved_form import MPS_PREFIX, Saved, open_estimator
from hase.learned.target_files import FIT_MPS
from hase.records.host_pace import Stalls
from hase.records.probe_reading import ALWAYS, ProbeReading, ProbeSummary, phases_ms, waiting_from_ms
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.sharing_mode import check_sharing_mode
from hase.utils.timing import Floats

if TYPE_CHECKING:
    from hase.records.kernel_record import Kernel

SHARING_VERSION, MPS_VERSION, SERVING_VERSION = 3, 1, 1
SEED = 7  # of the order of turns of several processes
DEFAULT_SWITCH_MS = 0.2  # fitted to an H200 (the shipped sharing.json); used where no model was measured next to a looped one
# Fields that say how busy a GPU is, with their value for a GPU that is never idle. The first one that is known is used, since
# utilisation counts a whole sampling period as busy if anything ran in it.
BUSY_FIELDS = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 1.0, "DCGM_FI_DEV_GPU_UTIL": 100.0}
TracksAndCosts = tuple[Tracks, PipelineCosts]  # the arguments of `pipeline_ms`
WITHOUT_SHARES, WITH_SHARES = "without shares", "with shares"  # of the threads: a key of errors
STEM = f"{MPS_PREFIX}width"  # of the file of the estimator of widths
GPU_BOUND = 0.8  # a model is GPU-bound if its kernels take this share of its latency or more


class SharingErrors(Frozen):
    """Errors (ratios) of the mean, p50 and p95 beside others, with the family and the background or other model held out."""

    cases: int
    mean: float
    p50: float
    p95: float


class Sharing(Frozen):
    """`sharing.json`: how processes share a target's GPU.

    Attributes:
        mode: the only sharing mode that was measured.
        slice_ms: the length of a time slice.
        alone_ms: the time of each piece of the probe's work on an idle GPU, by name.
        waits_ms: evenly spaced quantiles of the waits next to an average background.
        cycle_ms: the median time between starts of busy phases, for backgrounds that pause.
        longest_wait_ms: the longest wait of a probe: next to a co-runner that always has work, the longest turn plus a switch.
        switch_ms: the cost of switching to the co-runner and back (training/fits/time_slices.py).
        probed, from_metrics, paired: errors of predictions from a probe, from metrics alone, and with a co-runner predicted as
            a model in a loop; None if nothing was held out.
    """

    version: int = SHARING_VERSION
    mode: Literal["time_slices"] = "time_slices"
    slice_ms: float
    alone_ms: dict[str, float]
    waits_ms: tuple[float, ...]
    cycle_ms: float
    longest_wait_ms: float
    switch_ms: float
    probed: SharingErrors | None = None
    from_metrics: SharingErrors | None = None
    paired: SharingErrors | None = None


def co_runner_from_latencies(starts_ms: npt.ArrayLike, latencies_ms: npt.ArrayLike, alone_ms: float) -> CoRunner:
    """The co-runner that explains the latencies of one piece of the probe's work, which takes `alone_ms` on an idle GPU."""
    latencies = np.asarray(latencies_ms, dtype=float)
    waited = latencies > waiting_from_ms(alone_ms)
    return _with_phases(*phases_ms(starts_ms, latencies, waited), latencies[waited] - alone_ms)


def _with_phases(busy_ms: float, quiet_ms: float, waits_ms: Floats) -> CoRunner:
    """A co-runner with busy and quiet phases, one of which may have the length 0."""
    if not busy_ms:
        return CoRunner(0.0, 1.0, waits_ms)
    return CoRunner(busy_ms, quiet_ms, waits_ms) if quiet_ms else CoRunner(1.0, 0.0, waits_ms)


def co_runner_probed(reading: ProbeReading, alone_ms: Mapping[str, float]) -> CoRunner:
    """The co-runner that a reading of the probe shows. Only the probe's longer piece of work is used: while it runs, as while a
    model runs, the co-runner queues its next work. (On an H200, means have an error of 5.2 % with the longer piece and 5.6 %
    with the tiny one, with the same constants.) Raises UserError: the GPU was shared in a mode that was not measured."""
    if reading.sharing is not None:
        check_sharing_mode(reading.sharing)
    return co_runner_from_latencies(reading.long.starts_ms, reading.long.latencies_ms, alone_ms["long"])


def co_runner_summarised(summary: ProbeSummary, alone_ms: Mapping[str, float]) -> CoRunner:
    """As `co_runner_probed`, from a summary, whose quantiles stand for all waits. Raises UserError: a mode not measured."""
    if summary.sharing is not None:
        check_sharing_mode(summary.sharing)
    alone = alone_ms["long"]
    if summary.latencies_ms[0] > waiting_from_ms(alone):  # the co-runner left no gap: even the shortest run waited
        return CoRunner(1.0, 0.0, np.array(summary.latencies_ms) - alone)
    waits = np.maximum(np.array(summary.waited_ms) - alone, 0.0)  # below 0 on a faster GPU than the one learned from
    return _with_phases(summary.busy_ms, summary.quiet_ms, waits)


def busy_share(metrics: Mapping[str, float]) -> float | None:
    """The share of time in which the GPU is busy, from the first of BUSY_FIELDS in the metrics; None without any."""
    return next((min(max(metrics[field] / never_idle, 0.0), 1.0) for field, never_idle in BUSY_FIELDS.items()
                 if field in metrics), None)


def co_runner_guessed(share: float, sharing: Sharing, like: CoRunner | None = None) -> CoRunner:
    """A guessed co-runner of a known busy share. Waits and cycle are those of `like`, or of an average background."""
    waits = like.waits_ms if like and len(like.waits_ms) else np.asarray(sharing.waits_ms)
    cycle_ms = like.cycle_ms if like and like.busy_ms and like.quiet_ms else sharing.cycle_ms
    if share > ALWAYS:
        return CoRunner(1.0, 0.0, waits)
    return CoRunner(share * cycle_ms, (1.0 - share) * cycle_ms, waits)


def looped_co_runner(looped: Sequence[TracksAndCosts], model: TracksAndCosts, sharing: Sharing) -> CoRunner:
    """The co-runner of `model` that consists of models in loops without a pause, each in its own process. They always have
    work, so each wait is one turn of each of them plus their switches. Meanwhile the host of `model` continues to dispatch."""
    slices_ms = [min(work_ms, sharing.slice_ms) + sharing.switch_ms if index == 0 or work_ms else 0.0
                 for index, work_ms in enumerate(gpu_work_ms(*run) for run in (model, *looped))]
    longest_ms = max(sharing.longest_wait_ms - sharing.switch_ms, sharing.switch_ms)  # the latter if all waits were short
    turns = [process_turns + sharing.switch_ms for run, own_ms in zip(looped, slices_ms[1:], strict=True)
             if len(process_turns := turns_ms(*run, longest_ms, sum(slices_ms) - own_ms))]
    if not turns:
        return CoRunner(0.0, 1.0, np.zeros(0))
    generator = np.random.default_rng(SEED)  # shuffles, since the processes are independent of each other
    most_turns = max(map(len, turns))
    first, *others = (np.resize(process_turns, most_turns) for process_turns in turns)
    return CoRunner(1.0, 0.0, sum((generator.permutation(process_turns) for process_turns in others), first))


# through MPS -------------------------------------------------------------------------------------------------------------

class MpsSharing(Frozen):
    """`mps.json`: how a target's GPU is shared through MPS.

    Attributes:
        learned_on: the target that was measured; it may be another one.
        host_slowdown: the host's time for a run through MPS divided by that in time slices.
        width_error: the mean error (a ratio) of kernel widths with the family held out, weighted by time.
        gpu_bound, host_bound: errors beside looped models, for models whose kernels take GPU_BOUND of their latency, and for
            others. Kernel times and the latency alone were measured. Keys are `without shares` and `with shares`.
    """

    version: int = MPS_VERSION
    learned_on: str
    rules: MpsRules
    bytes_per_ms: float
    host_slowdown: float = 1.0
    width: Saved
    width_error: float
    gpu_bound: dict[str, SharingErrors]
    host_bound: dict[str, SharingErrors]

    def errors_of(self, gpu_ms: float, alone_ms: float, shares: bool) -> SharingErrors | None:
        """The errors for models with this share of kernel time in the latency alone; None if no such model was measured."""
        errors = self.gpu_bound if gpu_ms >= GPU_BOUND * alone_ms else self.host_bound
        return errors.get(WITH_SHARES if shares else WITHOUT_SHARES)


def write_mps(folder: Path, learned: MpsSharing) -> None:
    """Writes `mps.json`, then removes width estimators that neither it nor the previous file names. The previous estimator
    stays since a process may have read the previous file, but not yet its estimator."""
    path = target_files.MPS.path(folder)
    before = files.read_json(path) if path.exists() else {}
    files.write_json(path, learned)
    in_use = {learned.width.file, before.get("width", {}).get("file") if isinstance(before, dict) else None}
    for estimator in folder.glob(f"{STEM}-*.npz"):
        if estimator.name not in in_use:
            estimator.unlink()


def grids_of(widths: Floats, bytes_moved: Floats, gpu_ms: Floats, bytes_per_ms: float) -> Grids:
    """The shares of the GPU and of its bandwidth that kernels use, from their widths, bytes moved and GPU times."""
    return Grids(np.clip(widths, 0.0, 1.0), np.minimum(1.0, bytes_moved / bytes_per_ms / np.maximum(gpu_ms, 1e-6)))


@dataclass(frozen=True)
class LearnedMps:
    """A target's sharing through MPS, ready to predict. The estimator of widths is read from `folder` when first needed."""

    sharing: MpsSharing
    folder: Path

    @cached_property
    def _width(self) -> KernelModel:
        return open_estimator(self.sharing.width, KernelModel, self.folder, f"fit again: {FIT_MPS}")

    def grids(self, kernels: Sequence[Kernel], features: Floats, gpu_ms: Floats) -> Grids:
        """The shares of the GPU and of its bandwidth that each kernel uses. `features` are kernels × KERNEL_FEATURES."""
        moved = np.array([float(kernel.bytes_read + kernel.bytes_written) for kernel in kernels])
        widths = predict_kernels(self._width, kernels, features, self._width.idle_load) if len(kernels) else np.zeros(0)
        return grids_of(widths, moved, gpu_ms, self.sharing.bytes_per_ms)


def read_mps(folder: Path) -> LearnedMps | None:
    """Reads how a target's GPU is shared through MPS, from the folder of its predictors; None if nothing was learned."""
    sharing = target_files.MPS.read(folder)
    return None if sharing is None else LearnedMps(sharing, folder)


# serving -----------------------------------------------------------------------------------------------------------------

class ServingHost(Frozen):
    """`serving.json`: how the pace of a host changes while it serves requests. Not listed: as in `Host`.

    Attributes:
        pace: of the measured host by its probe, relative to the target's usual pace.
        paces: evenly spaced quantiles of the pace in back-to-back runs, relative to the probe's.
    """

    version: int = SERVING_VERSION
    learned_on: str
    models: int
    runs: int
    pace: float
    paces: tuple[float, ...]
    lasts_ms: float
    idle_ms: tuple[float, ...]
    slower: tuple[float, ...]
    stalls_per_s: float
    stalls_ms: tuple[float, ...]

    @property
    def median_pace(self) -> float:
        """The median of `paces`, at which runs are predicted."""
        return float(np.median(self.paces))

    def host(self, stalls: Stalls | None = None) -> Host:
        """The host for a simulation, at `median_pace`. `stalls`, seen on an idle machine, only count if more frequent than the
        learned ones: one that never stalled when idle stalled once a second."""
        learned = Stalls(self.stalls_per_s, self.stalls_ms)
        per_s, lengths_ms = max(learned, stalls or learned, key=lambda which: which.per_s)
        return Host(np.array(self.paces) / self.median_pace, self.lasts_ms, np.array(self.idle_ms), np.array(self.slower),
                    per_s, np.array(lengths_ms))


