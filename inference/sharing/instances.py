"""A model's latency in an instance of a GPU (MIG), which has a part of the GPU to itself. Never measured.

Instances get whole slices: of a GPU with seven of computing and eight of memory, as its data sheet has them. A kernel takes
longer by the threads that it lacks, as through MPS with such a share, or by the memory's bandwidth that it lacks, whichever is
more. Processes in different instances don't wait for each other.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hase.graph_model.simulation.mps import times_at_share
from hase.graph_model.simulation.pipeline import pipeline_ms
from hase.inference.core.uncertainty import Span
from hase.inference.sharing.co_runner import UnderLoad
from hase.inference.sharing.mps import mps_process
from hase.utils.sharing_mode import ALL_THREADS, SetSharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hase.inference.core.model_run import PredictedRun
    from hase.inference.core.targets import Fitted
    from hase.learned.sharing.mps import LearnedMps

COMPUTE_SLICES, MEMORY_SLICES = 7, 8


class Profile(NamedTuple):
    """A kind of instance: its name, and its slices of computing and of memory."""

    name: str
    compute: int
    memory: int

    @property
    def percent(self) -> int:
        """Its share of the GPU's threads."""
        return round(ALL_THREADS * self.compute / COMPUTE_SLICES)


# Of A100, H100, H200 and the GPUs of Blackwell with as many slices (NVIDIA Multi-Instance GPU User Guide, "Supported MIG
# Profiles"); some of their names have the memory in GB behind these.
PROFILES = (Profile("1g", 1, 1), Profile("2g", 2, 2), Profile("3g", 3, 4), Profile("4g", 4, 4), Profile("7g", 7, 8))
CARDS = ("A100", "H100", "H200", "GH200", "B200", "GB200")
BY_PERCENT = {profile.percent: profile for profile in PROFILES}
SPAN = Span(0.6, 1.6)  # by which such latencies may be off; a choice, since none was measured
NEVER_MEASURED = ("instances (MIG) were never measured: their times follow from the slices that the data sheet gives them, and "
                  "switching to them needs an administrator")


def has_instances(fitted: Fitted) -> bool:
    """Whether a target's GPU can be cut into instances of PROFILES."""
    return any(card in fitted.target.device_name.split() for card in CARDS)


def fit_together(profiles: Sequence[Profile]) -> bool:
    """Whether a GPU has enough slices for instances of these profiles. (Not every such choice can be placed in every order.)"""
    return (sum(profile.compute for profile in profiles) <= COMPUTE_SLICES
            and sum(profile.memory for profile in profiles) <= MEMORY_SLICES)


class InInstances:
    """Run times of models in an instance each (`hase.inference.sharing.ways`)."""

    def __init__(self, learned: LearnedMps) -> None:
        self._learned = learned

    def choices(self, models: int) -> list[SetSharing]:
        """A profile for each model, so that none can be larger."""
        def larger(profiles: tuple[Profile, ...]) -> bool:
            return any(fit_together([*profiles[:place], better, *profiles[place + 1:]])
                       for place, profile in enumerate(profiles) for better in PROFILES if better.compute > profile.compute)

        fitting = [profiles for profiles in product(PROFILES, repeat=models) if fit_together(profiles)]
        return [SetSharing(percents=tuple(profile.percent for profile in profiles),
                           instances=tuple(profile.name for profile in profiles))
                for profiles in fitting if not larger(profiles)]

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        """The mean latency of a run in the instance with such a share of the threads.

        Raises:
            NotThroughMps: the target's runs are no two tracks of host and GPU.
        """
        process, profile = mps_process(model, self._learned, percent), BY_PERCENT[percent]
        tracks, grids, costs = process.tracks, process.grids, model.run.costs
        if costs is None:
            return model.alone_ms
        of_threads = times_at_share(tracks.gpu_ms, grids.width, profile.compute / COMPUTE_SLICES, self._learned.sharing.rules)
        of_memory = tracks.gpu_ms * grids.bandwidth * MEMORY_SLICES / profile.memory
        slower = tracks._replace(gpu_ms=np.maximum(of_threads, of_memory))
        return model.alone_ms + pipeline_ms(slower, costs) - pipeline_ms(tracks, costs)

    def beside(self, model: PredictedRun, percent: int, others: Sequence[tuple[PredictedRun, int]]) -> tuple[float, UnderLoad]:
        """The latency alone (ms), which is that beside the others, too."""
        alone_ms = self.alone_ms(model, percent)
        return alone_ms, UnderLoad.of(np.array([alone_ms]), 1.0, "prediction")

    def span(self, model: PredictedRun, percent: int, alone_ms: float) -> Span:
        return SPAN
