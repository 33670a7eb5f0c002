"""How processes share a target's GPU: what is learned once, and the co-runner as a probe or live metrics show it.

Without MPS and MIG, two processes never run on the GPU at the same time. Each has it for a time slice, or for as long as its
work lasts if that is shorter. The length of a slice belongs to the device and is learned. How long the co-runner's turns are,
and how often it has work, is measured on the spot by a probe (benchmark/sharing_probe.py), or guessed from how busy the metrics
say that the GPU is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks
from hase.graph_model.simulation.sharing import CoRunner, gpu_work_ms, turns_ms
from hase.records.probe_reading import ALWAYS, ProbeReading, ProbeSummary, phases_ms, waiting_from_ms
from hase.utils import files
from hase.utils.frozen import Frozen
from hase.utils.sharing_mode import check_sharing_mode

SHARING_VERSION = 3
FIT = "python training/fit_sharing.py"
FILE = "sharing.json"
SEED = 7  # of the order of turns of several processes
DEFAULT_SWITCH_MS = 0.2  # fitted to an H200 (the shipped sharing.json); used where no model was measured next to a looped one
Floats = npt.NDArray[np.float64]
# Fields that say how busy a GPU is, with their value for a GPU that is never idle. The first one that is known is used, since
# utilisation counts a whole sampling period as busy if anything ran in it.
BUSY_FIELDS = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 1.0, "DCGM_FI_DEV_GPU_UTIL": 100.0}
TracksAndCosts = tuple[Tracks, PipelineCosts]  # the arguments of `pipeline_ms`


class SharingErrors(Frozen):
    """Mean errors (ratios) of predicted latencies next to a co-runner, with the model's family and the background held out."""

    cases: int
    mean: float
    p50: float
    p95: float


class Sharing(Frozen):
    """`sharing.json`: how processes share a target's GPU.

    Attributes:
        mode: the sharing mode; no other one was measured.
        slice_ms: how long a process has the GPU before it is another's turn.
        alone_ms: what each piece of the probe's work takes on an idle GPU, by name.
        waits_ms: evenly spaced quantiles of the waits next to an average background.
        cycle_ms: the median time from one busy phase to the next, of backgrounds that pause.
        longest_wait_ms: the longest wait of a probe. Next to a co-runner that always has work, this is the longest turn of a
            process plus a switch.
        switch_ms: what it costs to switch to the co-runner and back (training/sharing/shared_runs.py).
        probed, from_metrics, paired: errors of predictions from a probe, from the metrics alone, and from the prediction of a
            co-runner that is a model in a loop; None where nothing was held out.
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


def sharing_path(folder: Path) -> Path:
    """The file of a target whose predictors are in `folder`."""
    return folder / FILE


def read_sharing(folder: Path) -> Sharing | None:
    """What was learned of a target's sharing; None where nothing was.

    Raises:
        UserError: a damaged file or one of another version.
    """
    path = sharing_path(folder)
    return files.read_record(path, Sharing, SHARING_VERSION, FIT) if path.exists() else None


def co_runner_seen(starts_ms: npt.ArrayLike, latencies_ms: npt.ArrayLike, alone_ms: float) -> CoRunner:
    """The co-runner that explains a probe's runs of one piece of work, with the phases of `phases_ms`."""
    latencies = np.asarray(latencies_ms, dtype=float)
    waited = latencies > waiting_from_ms(alone_ms)
    return _in_phases(*phases_ms(starts_ms, latencies, waited), latencies[waited] - alone_ms)


def _in_phases(busy_ms: float, quiet_ms: float, waits_ms: Floats) -> CoRunner:
    """A co-runner with phases of these lengths, of which one may be 0."""
    if not busy_ms:
        return CoRunner(0.0, 1.0, waits_ms)
    return CoRunner(busy_ms, quiet_ms, waits_ms) if quiet_ms else CoRunner(1.0, 0.0, waits_ms)


def co_runner_probed(reading: ProbeReading, alone_ms: Mapping[str, float]) -> CoRunner:
    """The co-runner in a reading of the probe.

    Only the probe's longer piece of work is used: while it runs, as while a model runs, the co-runner queues its next work. (On
    an H200, means have an error of 5.2 % with the longer piece and 5.6 % with the tiny one, with the same constants.)

    Raises:
        UserError: the GPU was shared in a way that was not measured.
    """
    if reading.sharing is not None:
        check_sharing_mode(reading.sharing)
    return co_runner_seen(reading.long.starts_ms, reading.long.latencies_ms, alone_ms["long"])


def co_runner_summarised(summary: ProbeSummary, alone_ms: Mapping[str, float]) -> CoRunner:
    """The co-runner in the summary of a reading: as `co_runner_probed` finds it in the reading, but with quantiles in place of
    all waits; a run at the border of waiting may count differently.

    Raises:
        UserError: the GPU was shared in a way that was not measured.
    """
    if summary.sharing is not None:
        check_sharing_mode(summary.sharing)
    alone = alone_ms["long"]
    if summary.latencies_ms[0] > waiting_from_ms(alone):  # the co-runner left no gap: even the shortest run waited
        return CoRunner(1.0, 0.0, np.array(summary.latencies_ms) - alone)
    waits = np.maximum(np.array(summary.waited_ms) - alone, 0.0)  # below 0 on a faster GPU than the one learned from
    return _in_phases(summary.busy_ms, summary.quiet_ms, waits)


def busy_share(metrics: Mapping[str, float]) -> float | None:
    """The share of the time for which the GPU is at work, by the metrics; None where they have none of BUSY_FIELDS."""
    for field, always in BUSY_FIELDS.items():
        if field in metrics:
            return min(max(metrics[field] / always, 0.0), 1.0)
    return None


def co_runner_guessed(share: float, sharing: Sharing, like: CoRunner | None = None) -> CoRunner:
    """A co-runner of which only the busy share is known. Its waits and its cycle are those of `like`, or without that those of
    an average background."""
    waits = like.waits_ms if like and len(like.waits_ms) else np.asarray(sharing.waits_ms)
    cycle_ms = like.cycle_ms if like and like.busy_ms and like.quiet_ms else sharing.cycle_ms
    if share > ALWAYS:
        return CoRunner(1.0, 0.0, waits)
    return CoRunner(share * cycle_ms, (1.0 - share) * cycle_ms, waits)


def in_a_loop(looped: Sequence[TracksAndCosts], model: TracksAndCosts, sharing: Sharing) -> CoRunner:
    """Models that run without a pause, each in a process of its own, as the co-runner of `model`.

    They always have work, and each wait is a turn of each of them, plus a switch for each. Between its turns, a process is away
    from the GPU for as long as all others work in one slice, plus their switches; it goes on dispatching meanwhile.
    """
    slices_ms = [min(work_ms, sharing.slice_ms) + sharing.switch_ms if place == 0 or work_ms else 0.0
                 for place, work_ms in enumerate(gpu_work_ms(*run) for run in (model, *looped))]
    longest_ms = max(sharing.longest_wait_ms - sharing.switch_ms, sharing.switch_ms)  # where all waits were short
    turns = [of_process + sharing.switch_ms for run, own_ms in zip(looped, slices_ms[1:], strict=True)
             if len(of_process := turns_ms(*run, longest_ms, sum(slices_ms) - own_ms))]
    if not turns:
        return CoRunner(0.0, 1.0, np.zeros(0))
    shuffled = np.random.default_rng(SEED)  # where each process is in its run has nothing to do with where the others are
    longest = max(map(len, turns))
    first, *others = (np.resize(of_process, longest) for of_process in turns)
    return CoRunner(1.0, 0.0, sum((shuffled.permutation(of_process) for of_process in others), first))
