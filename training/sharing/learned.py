"""What is learned of how a target's GPU turns between processes, and what a probe or the live metrics tell of the other one.

Without MPS and MIG two processes never run side by side: each has the GPU for a slice of time, or for as long as its work lasts
if that is shorter. The slice is the device's; how long the other one's turns are, and how often it has work, is read on the
spot by a probe (benchmark/sharing_probe.py), or guessed from how busy the metrics say that the GPU is. History of the
schema: version 1 is the first; 2 has `longest_wait_ms` in the place of the longest turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmark.load.probe_reading import ALWAYS, ProbeReading, ProbeSummary, phases_ms, waiting_from_ms
from graph_model.simulation.pipeline import PipelineCosts
from graph_model.simulation.sharing import CoRunner, gpu_work_ms, turns_ms
from graph_model.simulation.tracks import Tracks
from ort_analysis.records.kernel_record import Frozen
from utils import files
from utils.sharing_mode import check_sharing_mode

SHARING_VERSION = 3
FIT = "python training/fit_sharing.py"
FILE = "sharing.json"
DEFAULT_SWITCH_MS = 0.2  # what fit_sharing fits to an H200 (the shipped sharing.json): where no model in a loop was measured
Floats = npt.NDArray[np.float64]
BUSY_FIELDS = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 1.0, "DCGM_FI_DEV_GPU_UTIL": 100.0}  # and what each shows of a GPU that is
# never idle; the first one there is taken: utilisation counts a whole sampling period as busy in which anything ran
TracksAndCosts = tuple[Tracks, PipelineCosts]  # what `pipeline_ms` takes


class SharingErrors(Frozen):
    """Of latencies under load, of models and backgrounds that were in no fit: mean errors as ratios, by what was predicted."""

    cases: int
    mean: float
    p50: float
    p95: float


class Sharing(Frozen):
    """`sharing.json`: how a target's GPU turns between processes.

    Attributes:
        mode: how the processes share it; another one was not measured.
        slice_ms: how long a process has the GPU before another's turn.
        alone_ms: what the probe's pieces of work take on an idle GPU, by name.
        waits_ms: evenly spaced quantiles of the waits beside an average one of the backgrounds that were measured.
        cycle_ms: of a background that pauses: from one busy phase to the next, at the median.
        longest_wait_ms: the longest that a probe waited beside what was measured: beside work that never runs dry it is the
            longest turn that a process has, and a switch.
        switch_ms: what a turn of the other process costs besides (training/sharing/pairs.py).
        probed, from_metrics, paired: errors of predictions from a probe, from the metrics alone, and from what is predicted of
            the model that runs in a loop beside; None where nothing was left out.
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
    """Beside the predictors of a target in `folder`."""
    return folder / FILE


def read_sharing(folder: Path) -> Sharing | None:
    """What was learned of a target's sharing; None where nothing was.

    Raises:
        UserError: a damaged file or one of another version.
    """
    path = sharing_path(folder)
    return files.read_record(path, Sharing, SHARING_VERSION, FIT) if path.exists() else None


def co_runner_seen(starts_ms: npt.ArrayLike, latencies_ms: npt.ArrayLike, alone_ms: float) -> CoRunner:
    """What else runs, as a probe's runs of one piece of work met it, in the phases of `phases_ms`."""
    latencies = np.asarray(latencies_ms, dtype=float)
    waited = latencies > waiting_from_ms(alone_ms)
    return _in_phases(*phases_ms(starts_ms, latencies, waited), latencies[waited] - alone_ms)


def _in_phases(busy_ms: float, quiet_ms: float, waits_ms: Floats) -> CoRunner:
    """Other work in phases of these lengths, of which one may be 0."""
    if not busy_ms:
        return CoRunner(0.0, 1.0, waits_ms)
    return CoRunner(busy_ms, quiet_ms, waits_ms) if quiet_ms else CoRunner(1.0, 0.0, waits_ms)


def co_runner_probed(reading: ProbeReading, alone_ms: Mapping[str, float]) -> CoRunner:
    """What else runs, as a reading of the probe tells it.

    Its longer piece of work tells: beside that, as beside a model, the other process queues its next work meanwhile (on an H200
    means err 5.2 % with it and 5.6 % with the tiny piece, all constants alike).

    Raises:
        UserError: the GPU was shared in a way that was not measured.
    """
    if reading.sharing is not None:
        check_sharing_mode(reading.sharing)
    return co_runner_seen(reading.long.starts_ms, reading.long.latencies_ms, alone_ms["long"])


def co_runner_summarised(summary: ProbeSummary, alone_ms: Mapping[str, float]) -> CoRunner:
    """What else runs, as the summary of a reading tells it: what `co_runner_probed` says of that reading, with quantiles in
    the place of all waits, and but for a run at the border of waiting.

    Raises:
        UserError: the GPU was shared in a way that was not measured.
    """
    if summary.sharing is not None:
        check_sharing_mode(summary.sharing)
    alone = alone_ms["long"]
    if summary.latencies_ms[0] > waiting_from_ms(alone):  # other work left no gap, so that the shortest run waited too
        return CoRunner(1.0, 0.0, np.array(summary.latencies_ms) - alone)
    waits = np.maximum(np.array(summary.waited_ms) - alone, 0.0)  # on a faster GPU than was learned from
    return _in_phases(summary.busy_ms, summary.quiet_ms, waits)


def busy_share(metrics: Mapping[str, float]) -> float | None:
    """For what share of the time the metrics say that a GPU is at work; None where no field tells."""
    for field, always in BUSY_FIELDS.items():
        if field in metrics:
            return min(max(metrics[field] / always, 0.0), 1.0)
    return None


def co_runner_guessed(share: float, sharing: Sharing, like: CoRunner | None = None) -> CoRunner:
    """What else runs where only its share of the time is known: with waits as beside an average kind of what was measured, and
    their median cycle, or as of `like`."""
    waits = like.waits_ms if like and len(like.waits_ms) else np.asarray(sharing.waits_ms)
    cycle_ms = like.cycle_ms if like and like.busy_ms and like.quiet_ms else sharing.cycle_ms
    if share > ALWAYS:
        return CoRunner(1.0, 0.0, waits)
    return CoRunner(share * cycle_ms, (1.0 - share) * cycle_ms, waits)


def in_a_loop(looped: TracksAndCosts, beside: TracksAndCosts, sharing: Sharing) -> CoRunner:
    """A model that runs without a pause, as the model `beside` meets it: it always has work; a wait is one of its turns and a
    switch. It is away from the GPU for as long as the other works in one slice, and for a switch, and dispatches meanwhile.
    """
    away_ms = min(gpu_work_ms(*beside), sharing.slice_ms) + sharing.switch_ms
    longest_ms = max(sharing.longest_wait_ms - sharing.switch_ms, sharing.switch_ms)  # where all that was measured was short
    turns = turns_ms(*looped, longest_ms, away_ms)
    return CoRunner(1.0, 0.0, turns + sharing.switch_ms) if len(turns) else CoRunner(0.0, 1.0, turns)
