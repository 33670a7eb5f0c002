"""The ways of sharing a GPU: a model's run time with its share, alone and beside other models.

Time slices and MPS (with and without shares of the threads) are learned from measurements. Instances (MIG) were never measured:
each model is alone in its instance, so its run time is that with the instance's share of the threads and of the memory
bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hase.graph_model.simulation.pipeline import pipeline_ms
from hase.graph_model.simulation.sharing import MpsProcess, mps_runs_ms, times_at_share
from hase.inference.prediction.uncertainty import Span, load_span, span_of_error
from hase.inference.prediction.under_load import SEED, NotShared, UnderLoad, local_sharing
from hase.inference.sharing.shared_models import ModelOfPair, Pair, model_of_pair, shared_model_of
from hase.learned.target_files import FIT_MPS
from hase.utils.errors import UserError
from hase.utils.sharing_mode import ALL_THREADS, SLICES, SetSharing

if TYPE_CHECKING:
    from hase.inference.prediction.run import PredictedRun
    from hase.inference.prediction.targets import Fitted
    from hase.learned.sharing import LearnedMps

MPS, MPS_SHARES, MIG = "mps", "mps with shares", "mig"
SHARES = (25, 50, 75)  # possible shares of the threads, per cent
COMPUTE_SLICES, MEMORY_SLICES = 7, 8  # of a GPU
CARDS = ("A100", "H100", "H200", "GH200", "B200", "GB200")
MIG_SPAN = Span(0.6, 1.6)  # uncertainty of these latencies; chosen by hand, since none was measured
NEVER_MEASURED = ("instances (MIG) were never measured: their times follow from the slices that the data sheet gives them, and "
                  "switching to them needs an administrator")


class WayTimes(Protocol):
    """Run times under one way of sharing a target's GPU. `percent` is a model's share of the GPU's threads, 100 if the way has
    no shares; `others` are models with their shares."""

    def choices(self, models: int) -> list[SetSharing]:
        """The shares that this number of models may get; one choice if the way has no shares."""

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        """The mean latency of a run with its share, while nothing else runs."""

    def beside(self, model: PredictedRun, percent: int, others: Sequence[tuple[PredictedRun, int]]) -> tuple[float, UnderLoad]:
        """A model's latency alone (ms), and its distribution while the others run in loops, each in its own process."""

    def span(self, model: PredictedRun, percent: int, alone_ms: float) -> Span:
        """The factors that contain nine of ten errors beside others, if the latency alone is exact."""


class TimeSlices:
    """The driver's time slices, as `inference/pair_latency.py` predicts them."""

    def choices(self, models: int) -> list[SetSharing]:
        return [SetSharing()]

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        return model.alone_ms

    def beside(self, model: PredictedRun, percent: int, others: Sequence[tuple[PredictedRun, int]]) -> tuple[float, UnderLoad]:
        shared = shared_model_of(model, as_here=False)
        return model.alone_ms, shared.beside([shared_model_of(other, as_here=False) for other, _ in others])

    def span(self, model: PredictedRun, percent: int, alone_ms: float) -> Span:
        return load_span(shared_model_of(model, as_here=False).sharing, "prediction")


def ways_of(fitted: Fitted) -> dict[str, WayTimes | None]:
    """All ways of sharing a GPU, by name; None for those that were not learned for a target."""
    return {
        SLICES: TimeSlices() if fitted.sharing is not None else None,
        MPS: ThroughMps(fitted.mps, shares=False) if fitted.mps else None,
        MPS_SHARES: ThroughMps(fitted.mps, shares=True) if fitted.mps else None,
        MIG: InInstances(fitted.mps) if fitted.mps and has_instances(fitted) else None,
    }


def kind_of(sharing: SetSharing, models: int) -> str:
    """The name of the way in which a number of models share a GPU, without its shares."""
    if not sharing.mps:
        return SLICES
    return MPS if all(sharing.percent_of(index) == ALL_THREADS for index in range(models)) else MPS_SHARES


def times_under(fitted: Fitted, sharing: SetSharing) -> WayTimes:
    """Run times under one way of sharing a target's GPU."""
    if not sharing.mps:
        if fitted.sharing is None:
            raise NotShared(fitted.target.name)
        return TimeSlices()
    if fitted.mps is None:
        raise NotThroughMps(fitted.target.name)
    return ThroughMps(fitted.mps, shares=True)


def pair_of(first: PredictedRun, second: PredictedRun, sharing: SetSharing | None = None) -> Pair:
    """Two models on one GPU, each run in its own process without a pause. Without `sharing`: as this machine's GPU is shared
    now if it is the target, else in time slices. Raises NotShared, NotThroughMps: nothing was learned of how the target is
    shared in this way; UserError: `sharing` has shares for another number of models, or this machine's GPU is shared through
    MIG."""
    fitted = first.fitted
    sharing = sharing or local_sharing(fitted)
    if not sharing.fits(2):
        raise UserError(f"two models share the GPU, and there are {len(sharing.percents)} shares of the threads: give one for "
                        "both (mps:50) or one for each (mps:25/75)")
    times = times_under(fitted, sharing)
    percents = sharing.percent_of(0), sharing.percent_of(1)

    def beside_other(run: PredictedRun, percent: int, other: PredictedRun, other_percent: int) -> ModelOfPair:
        alone_ms, under_load = times.beside(run, percent, [(other, other_percent)])
        return model_of_pair(run.prediction, other.prediction, alone_ms, under_load, times.span(run, percent, alone_ms))

    return Pair(target=fitted.target.name, sharing=str(sharing),
                models=(beside_other(first, percents[0], second, percents[1]),
                        beside_other(second, percents[1], first, percents[0])),
                warnings=tuple(dict.fromkeys((*first.prediction.warnings, *second.prediction.warnings,
                                              *(learned_elsewhere(fitted) if sharing.mps else ())))))


class NotThroughMps(UserError):
    """Nothing was learned of how a target's GPU is shared through MPS."""

    def __init__(self, target: str) -> None:
        super().__init__(f"{target}: nothing was learned of how it is shared through MPS; measure it under mps "
                         f"(recipes/h200/measure_sharing.sh), then: {FIT_MPS}")


class ThroughMps:
    """Run times of models that share a GPU through MPS, with or without shares of its threads."""

    def __init__(self, learned: LearnedMps, shares: bool) -> None:
        self._learned, self._shares = learned, shares

    def choices(self, models: int) -> list[SetSharing]:
        """No shares; or every choice of SHARES that adds up to all threads."""
        if not self._shares or models == 1:
            return [SetSharing(True)]
        return [SetSharing(True, percents) for percents in product(SHARES, repeat=models) if sum(percents) == ALL_THREADS]

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        """The latency of a run with a share of the threads, while nothing else runs."""
        return self._alone_ms(model, self._process(model, percent))

    def beside(self, model: PredictedRun, percent: int, others: Sequence[tuple[PredictedRun, int]]) -> tuple[float, UnderLoad]:
        """A model's latency alone (ms), and its distribution while the others run in loops, each with its share."""
        process, rules = self._process(model, percent), self._learned.sharing.rules
        alone_ms = self._alone_ms(model, process)
        if not np.any(process.tracks.launches > 0):
            return alone_ms, UnderLoad.from_runs(np.array([alone_ms]), 1.0, "prediction")
        by_itself = float(np.median(mps_runs_ms(process, (), rules, np.random.default_rng(SEED), 2)))
        runs = mps_runs_ms(process, [self._process(*other) for other in others], rules, np.random.default_rng(SEED))
        return alone_ms, UnderLoad.from_runs(runs, 1.0, "prediction").longer_by(alone_ms - by_itself)

    def span(self, model: PredictedRun, percent: int, alone_ms: float) -> Span:
        """The factors that contain nine of ten errors of models like this one beside others."""
        gpu_ms = float(self._process(model, percent).tracks_alone(self._learned.sharing.rules).gpu_ms.sum())
        errors = self._learned.sharing.errors_of(gpu_ms, alone_ms, percent < ALL_THREADS)
        return span_of_error(errors.mean if errors else None)

    def _process(self, run: PredictedRun, percent: int) -> MpsProcess:
        return mps_process(run, self._learned, percent)

    def _alone_ms(self, model: PredictedRun, process: MpsProcess) -> float:
        usual_ms = pipeline_ms(process.tracks, model.run.costs) if model.run.costs else 0.0
        return model.alone_ms + pipeline_ms(process.tracks_alone(self._learned.sharing.rules), process.costs) - usual_ms


def mps_process(run: PredictedRun, learned: LearnedMps, percent: int) -> MpsProcess:
    """A predicted model as a process with a share of the GPU's threads."""
    costs = run.run.costs
    if costs is None:
        raise NotThroughMps(run.fitted.target.name)
    record, tracks = run.run.record, run.run.tracks
    kernels = [record.kernels[record.nodes[index].kernel_id] for index in run.run.order]
    grids = learned.grids(kernels, run.fitted.predictors.features(kernels), tracks.gpu_ms)
    return MpsProcess(tracks, costs.at_pace(learned.sharing.host_slowdown), grids, percent / ALL_THREADS)


def learned_elsewhere(fitted: Fitted) -> tuple[str, ...]:
    """A notice if sharing through MPS was learned on another GPU than the target."""
    if fitted.mps is None or fitted.mps.sharing.learned_on == fitted.target.name:
        return ()
    return (f"how kernels of several processes run at the same time through MPS was learned on "
            f"{fitted.mps.sharing.learned_on}, and not on {fitted.target.name}",)


# instances (MIG) ---------------------------------------------------------------------------------------------------------

class MigProfile(NamedTuple):
    """A kind of instance: its name, and its slices of compute and of memory."""

    name: str
    compute: int
    memory: int

    @property
    def percent(self) -> int:
        """The instance's share of the GPU's threads."""
        return round(ALL_THREADS * self.compute / COMPUTE_SLICES)


# Of A100, H100, H200 and the GPUs of Blackwell with as many slices (NVIDIA Multi-Instance GPU User Guide, "Supported MIG
# Profiles"); some of their names have the memory in GB behind these.
PROFILES = (MigProfile("1g", 1, 1), MigProfile("2g", 2, 2), MigProfile("3g", 3, 4), MigProfile("4g", 4, 4),
            MigProfile("7g", 7, 8))
BY_PERCENT = {profile.percent: profile for profile in PROFILES}


def has_instances(fitted: Fitted) -> bool:
    """Whether a target's GPU supports instances of PROFILES."""
    return any(card in fitted.target.device_name.split() for card in CARDS)


def fit_together(profiles: Sequence[MigProfile]) -> bool:
    """Whether a GPU has enough slices for these instances. (Some choices can't be placed in every order.)"""
    return (sum(profile.compute for profile in profiles) <= COMPUTE_SLICES
            and sum(profile.memory for profile in profiles) <= MEMORY_SLICES)


class InInstances:
    """Run times of models in a MIG instance each."""

    def __init__(self, learned: LearnedMps) -> None:
        self._learned = learned

    def choices(self, models: int) -> list[SetSharing]:
        """A profile for each model, such that none could be larger."""
        def can_grow(profiles: tuple[MigProfile, ...]) -> bool:
            return any(fit_together([*profiles[:index], larger, *profiles[index + 1:]])
                       for index, profile in enumerate(profiles) for larger in PROFILES if larger.compute > profile.compute)

        fitting = [profiles for profiles in product(PROFILES, repeat=models) if fit_together(profiles)]
        return [SetSharing(percents=tuple(profile.percent for profile in profiles),
                           instances=tuple(profile.name for profile in profiles))
                for profiles in fitting if not can_grow(profiles)]

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        """The mean latency of a run in the instance with such a share of the threads."""
        process, profile = mps_process(model, self._learned, percent), BY_PERCENT[percent]
        tracks, grids, costs = process.tracks, process.grids, model.run.costs
        if costs is None:
            return model.alone_ms
        by_threads_ms = times_at_share(tracks.gpu_ms, grids.width, profile.compute / COMPUTE_SLICES,
                                       self._learned.sharing.rules)
        by_memory_ms = tracks.gpu_ms * grids.bandwidth * MEMORY_SLICES / profile.memory
        slower_tracks = tracks._replace(gpu_ms=np.maximum(by_threads_ms, by_memory_ms))
        return model.alone_ms + pipeline_ms(slower_tracks, costs) - pipeline_ms(tracks, costs)

    def beside(self, model: PredictedRun, percent: int, others: Sequence[tuple[PredictedRun, int]]) -> tuple[float, UnderLoad]:
        """The latency alone (ms), which equals that beside the others."""
        alone_ms = self.alone_ms(model, percent)
        return alone_ms, UnderLoad.from_runs(np.array([alone_ms]), 1.0, "prediction")

    def span(self, model: PredictedRun, percent: int, alone_ms: float) -> Span:
        return MIG_SPAN
