"""The ways of sharing a GPU whose times were learned: how long a model runs with its share alone, and beside another model.

`ways_of` is the one place that knows them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from inference.sharing.co_runner import shared_as_here
from inference.sharing.mps import ThroughMps, pair_through_mps
from inference.sharing.shared_models import Pair, pair, shared_model_of
from utils.sharing_mode import SLICES, SetSharing

if TYPE_CHECKING:
    from graph_model.simulation.pipeline import Floats
    from inference.core.model_run import PredictedRun
    from inference.core.targets import Fitted

MPS, MPS_SHARES, MIG = "mps", "mps with shares", "mig"


class WayTimes(Protocol):
    """Run times under one way of sharing a target's GPU. A model is given as its predicted run; `percent` is its share of the
    GPU's threads, 100 where the way has no shares."""

    def choices(self, models: int) -> list[SetSharing]:
        """The shares that so many models may get under this way; one choice where it has none."""

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        """The mean latency of a run with its share, while nothing else runs."""

    def slowdowns(self, model: PredictedRun, percent: int, other: PredictedRun, other_percent: int) -> Floats:
        """How many times as long as alone, with the same share, runs take while the other model runs in a loop: equally likely
        ratios, SAMPLES of them."""


class TimeSlices:
    """The driver's time slices, as `inference/pair_latency.py` predicts them."""

    def choices(self, models: int) -> list[SetSharing]:
        return [SetSharing()]

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        return model.alone_ms

    def slowdowns(self, model: PredictedRun, percent: int, other: PredictedRun, other_percent: int) -> Floats:
        shared, neighbour = (shared_model_of(run, as_here=False) for run in (model, other))
        return shared.next_to(neighbour.in_a_loop(shared), "prediction").slowdowns(model.alone_ms)


def ways_of(fitted: Fitted) -> dict[str, WayTimes | None]:
    """All ways of sharing a GPU, by name; None for those that were not learned for a target."""
    return {
        SLICES: TimeSlices() if fitted.sharing is not None else None,
        MPS: ThroughMps(fitted.mps, shares=False) if fitted.mps else None,
        MPS_SHARES: ThroughMps(fitted.mps, shares=True) if fitted.mps else None,
        MIG: None,
    }


def pair_of(first: PredictedRun, second: PredictedRun, sharing: SetSharing | None = None) -> Pair:
    """Two models on one GPU, each in a process of its own that runs it again and again without a pause.

    Args:
        first, second: the models.
        sharing: how they share it; None: as it is shared now where it is this machine's, else in time slices.

    Raises:
        NotShared, NotThroughMps: nothing was learned of how the target is shared in this way.
        UserError: `sharing` has shares for another number of models, or this machine's GPU is shared through MIG.
    """
    sharing = sharing or shared_as_here(first.fitted)
    if sharing.mps:
        return pair_through_mps(first, second, sharing)
    return pair(*(shared_model_of(run, as_here=False) for run in (first, second)))
