"""The ways of sharing a GPU whose times were learned: how long a model runs with its share alone, and beside other models.

`ways_of` is the one place that knows them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hase.inference.core.uncertainty import Span, load_span
from hase.inference.sharing.co_runner import NotShared, UnderLoad, shared_as_here
from hase.inference.sharing.instances import InInstances, has_instances
from hase.inference.sharing.mps import NotThroughMps, ThroughMps, learned_elsewhere
from hase.inference.sharing.shared_models import OneOfTwo, Pair, one_of_two, shared_model_of
from hase.utils.errors import UserError
from hase.utils.sharing_mode import ALL_THREADS, SLICES, SetSharing

if TYPE_CHECKING:
    from hase.inference.core.model_run import PredictedRun
    from hase.inference.core.targets import Fitted

MPS, MPS_SHARES, MIG = "mps", "mps with shares", "mig"


class WayTimes(Protocol):
    """Run times under one way of sharing a target's GPU. A model is given as its predicted run; `percent` is its share of the
    GPU's threads, 100 where the way has no shares. `others` are models with their shares."""

    def choices(self, models: int) -> list[SetSharing]:
        """The shares that so many models may get under this way; one choice where it has none."""

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        """The mean latency of a run with its share, while nothing else runs."""

    def beside(self, model: PredictedRun, percent: int, others: Sequence[tuple[PredictedRun, int]]) -> tuple[float, UnderLoad]:
        """A model's latency alone (ms), and its distribution while the others run in loops, each in a process of its own."""

    def span(self, model: PredictedRun, percent: int, alone_ms: float) -> Span:
        """The factors by which nine of ten latencies beside others are off, where the latency alone is right."""


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
    """All ways of sharing a GPU, by name; None for those that were not learned for a target. Instances are never learned:
    their times follow from how wide kernels are, and from the data sheet."""
    return {
        SLICES: TimeSlices() if fitted.sharing is not None else None,
        MPS: ThroughMps(fitted.mps, shares=False) if fitted.mps else None,
        MPS_SHARES: ThroughMps(fitted.mps, shares=True) if fitted.mps else None,
        MIG: InInstances(fitted.mps) if fitted.mps and has_instances(fitted) else None,
    }


def kind_of(sharing: SetSharing, models: int) -> str:
    """The name of a way in which so many models share a GPU, without its shares."""
    if not sharing.mps:
        return SLICES
    return MPS if all(sharing.percent_of(place) == ALL_THREADS for place in range(models)) else MPS_SHARES


def times_under(fitted: Fitted, sharing: SetSharing) -> WayTimes:
    """Run times while a target's GPU is shared in a way.

    Raises:
        NotShared, NotThroughMps: nothing was learned of how the target is shared in this way.
    """
    if not sharing.mps:
        if fitted.sharing is None:
            raise NotShared(fitted.target.name)
        return TimeSlices()
    if fitted.mps is None:
        raise NotThroughMps(fitted.target.name)
    return ThroughMps(fitted.mps, shares=True)


def pair_of(first: PredictedRun, second: PredictedRun, sharing: SetSharing | None = None) -> Pair:
    """Two models on one GPU, each in a process of its own that runs it again and again without a pause.

    Args:
        first, second: the models.
        sharing: how they share it; None: as it is shared now where it is this machine's, else in time slices.

    Raises:
        NotShared, NotThroughMps: nothing was learned of how the target is shared in this way.
        UserError: `sharing` has shares for another number of models, or this machine's GPU is shared through MIG.
    """
    fitted = first.fitted
    sharing = sharing or shared_as_here(fitted)
    if not sharing.fits(2):
        raise UserError(f"two models share the GPU, and there are {len(sharing.percents)} shares of the threads: give one for "
                        "both (mps:50) or one for each (mps:25/75)")
    times = times_under(fitted, sharing)
    percents = sharing.percent_of(0), sharing.percent_of(1)

    def of_pair(run: PredictedRun, percent: int, other: PredictedRun, other_percent: int) -> OneOfTwo:
        alone_ms, under_load = times.beside(run, percent, [(other, other_percent)])
        return one_of_two(run.prediction, other.prediction, alone_ms, under_load, times.span(run, percent, alone_ms))

    return Pair(target=fitted.target.name, sharing=str(sharing),
                models=(of_pair(first, percents[0], second, percents[1]), of_pair(second, percents[1], first, percents[0])),
                warnings=tuple(dict.fromkeys((*first.prediction.warnings, *second.prediction.warnings,
                                              *(learned_elsewhere(fitted) if sharing.mps else ())))))
