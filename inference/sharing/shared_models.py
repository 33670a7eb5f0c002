"""Predicts models on a shared GPU: beside any co-runner, over the load, in pairs, and against a latency objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hase.inference.prediction.answers import PERCENTILE, Slo, check_percentile, check_slo
from hase.inference.prediction.conditions import AS_USUAL
from hase.inference.prediction.uncertainty import CERTAIN, Span, joined
from hase.inference.prediction.under_load import LoadSource, NotShared, UnderLoad, check_local_sharing_mode, under_load
from hase.learned.sharing import Sharing, co_runner_guessed, looped_co_runner
from hase.utils.config import Frozen
from hase.utils.sharing_mode import SLICES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.prediction.answers import Prediction
    from hase.inference.prediction.run import PredictedRun

PRECISION = 0.005  # of the highest busy share, a ratio


@dataclass(frozen=True)
class SharedModel:
    """A model, with all that is needed to predict it beside a co-runner: other work on the same GPU.

    Attributes:
        sharing: how processes take turns on the target's GPU.
        beyond_tracks_ms: time of a run that the tracks do not include (`ModelRun.beyond_tracks_ms`).
    """

    prediction: Prediction
    tracks: Tracks
    costs: PipelineCosts
    sharing: Sharing
    beyond_tracks_ms: float = 0.0

    def beside_co_runner(self, co_runner: CoRunner, load_source: LoadSource) -> UnderLoad:
        """The distribution of its latency beside a co-runner."""
        return under_load(self.tracks, self.costs, self.sharing, co_runner, load_source).longer_by(self.beyond_tracks_ms)

    def at_share(self, share: float, like: CoRunner | None = None) -> UnderLoad:
        """The distribution of its latency beside a co-runner that is busy for `share` of the time (a ratio). The co-runner's
        waits and phases are those of `like`, or of an average measured one."""
        return self.beside_co_runner(co_runner_guessed(share, self.sharing, like), "share")

    def co_runner(self, others: Sequence[SharedModel]) -> CoRunner:
        """The co-runner that other models are for this one; each runs without a pause in its own process."""
        return looped_co_runner([(other.tracks, other.costs) for other in others], (self.tracks, self.costs), self.sharing)

    def beside(self, others: Sequence[SharedModel]) -> UnderLoad:
        """The distribution of its latency while others run without a pause, each in its own process."""
        return self.beside_co_runner(self.co_runner(others), "prediction")


def shared_model_of(run: PredictedRun, as_here: bool = True) -> SharedModel:
    """A predicted model, prepared for prediction beside a co-runner. Raises NotShared if nothing was learned of sharing. With
    `as_here`, a UserError if this machine's GPU is the target and is shared in a way that was not measured."""
    sharing, costs = run.fitted.sharing, run.run.costs
    if sharing is not None and as_here:
        check_local_sharing_mode(run.fitted)
    if sharing is None or costs is None:
        raise NotShared(run.fitted.target.name)
    return SharedModel(run.prediction, run.run.tracks, costs, sharing, run.run.beyond_tracks_ms(costs))


class ModelOfPair(Frozen):
    """A model's latency alone, and its distribution while the other model runs in a loop.

    Attributes:
        model, dims: the record's name, and the sizes given to its dynamic dimensions.
        idle_ms: its latency alone.
        under_load: the distribution beside the other.
        interval_ratios: ends of the 90 % interval of each latency beside the other, as ratios of it.
        rough_estimate: whether the prediction of either model is one.
        estimated_operators: as in `Prediction`.
    """

    model: str
    dims: dict[str, int]
    idle_ms: float
    under_load: UnderLoad
    interval_ratios: tuple[float, float]
    rough_estimate: bool = False
    estimated_operators: tuple[str, ...] = ()

    @property
    def mean_interval_ms(self) -> tuple[float, float]:
        """The 90 % interval of the mean beside the other."""
        low, high = self.interval_ratios
        return low * self.under_load.mean_ms, high * self.under_load.mean_ms


class Pair(Frozen):
    """Two models on one GPU.

    Attributes:
        target: of both.
        sharing: `slices`, `mps`, or `mps:25/75` with shares of the threads.
        models: in the order given; `idle_ms` is with the share.
        warnings: of both predictions.
    """

    target: str
    sharing: str = SLICES
    models: tuple[ModelOfPair, ModelOfPair]
    warnings: tuple[str, ...]


def model_of_pair(own: Prediction, other: Prediction, alone_ms: float, under_load: UnderLoad, errors: Span) -> ModelOfPair:
    """A model of a pair, from its own prediction and the other's. `errors`: factors by which latencies beside others are off if
    the run alone is exact."""
    alone = Span(*(end / own.latency_ms for end in own.interval_ms)) if own.latency_ms else CERTAIN
    return ModelOfPair(model=own.model, dims=own.dims, idle_ms=alone_ms, under_load=under_load,
                       interval_ratios=tuple(joined([alone, errors])),
                       rough_estimate=own.rough_estimate or other.rough_estimate, estimated_operators=own.estimated_operators)


class LoadPoint(Frozen):
    """The latency next to a background.

    Attributes:
        busy_share: of the time in which the co-runner is busy, a ratio.
        mean_ms, p50_ms, p95_ms, p99_ms: of the latency.
    """

    busy_share: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


class LoadCurve(Frozen):
    """A model's latency for loads from idle to a background that is always busy.

    Attributes:
        model, target, dims: the record's name, the target, and the sizes given to dynamic dimensions.
        points: by load.
        interval_ratios: ends of the 90 % interval of each latency, as ratios of it.
        rough_estimate, estimated_operators, warnings: as in `Prediction`.
    """

    model: str
    target: str
    dims: dict[str, int]
    points: tuple[LoadPoint, ...]
    interval_ratios: tuple[float, float]
    rough_estimate: bool = False
    estimated_operators: tuple[str, ...] = ()
    warnings: tuple[str, ...]

    def interval_ms(self, latency_ms: float) -> tuple[float, float]:
        """The 90 % interval of one of its latencies."""
        low, high = self.interval_ratios
        return low * latency_ms, high * latency_ms

    @property
    def rows(self) -> list[dict[str, object]]:
        """A table row for each load."""
        return [{"other work busy": f"{point.busy_share:.0%}", "mean (ms)": point.mean_ms, "p50 (ms)": point.p50_ms,
                 "p95 (ms)": point.p95_ms, "p95 90 % between (ms)": "{:.4g} and {:.4g}".format(*self.interval_ms(point.p95_ms)),
                 "p99 (ms)": point.p99_ms} for point in self.points]


def load_curve(model: SharedModel, points: int) -> LoadCurve:
    """The latency of a model at `points` loads: the co-runner's busy share goes from 0 to 1 in even steps. From 0.95 on, the
    co-runner never pauses (`hase.records.probe_reading.ALWAYS`)."""
    load_points = []
    for share in (index / (points - 1) for index in range(points)):
        loaded = model.at_share(share)
        p50, p95, p99 = (loaded.percentile_ms(percent) for percent in (50, 95, 99))
        load_points.append(LoadPoint(busy_share=share, mean_ms=loaded.mean_ms, p50_ms=p50, p95_ms=p95, p99_ms=p99))
    idle = model.prediction
    low_ms, high_ms = idle.interval_ms
    return LoadCurve(model=idle.model, target=idle.target, dims=idle.dims, points=tuple(load_points),
                     interval_ratios=(low_ms / idle.latency_ms, high_ms / idle.latency_ms), rough_estimate=idle.rough_estimate,
                     estimated_operators=idle.estimated_operators, warnings=idle.warnings)


class SloUnderLoad(Slo):
    """A latency objective, and the highest load at which it is still met.

    Attributes:
        highest_busy_share: up to which a co-runner may be busy, a ratio; None where missed idle already, or unknown.
        unknown_because: why it is not known.
    """

    highest_busy_share: float | None = None
    unknown_because: str | None = None


def highest_busy_share(model: SharedModel, limit_ms: float, percentile: float = PERCENTILE,
                       like: CoRunner | None = None) -> float | None:
    """The largest busy share of a co-runner (a ratio) at which an objective is met; None if even an idle device misses it. The
    objective: `percentile` % of the runs take at most `limit_ms`. Found by bisection, to PRECISION, over co-runners with the
    waits and phases of the measured ones, or of `like`. All shares use the same simulated runs, so percentiles increase with
    the share. High percentiles depend on few runs."""
    check_percentile(percentile)

    def met(share: float) -> bool:
        return model.at_share(share, like).percentile_ms(percentile) <= limit_ms

    if not met(0.0):
        return None
    if met(1.0):
        return 1.0
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if met(middle) else (low, middle)
    return low


def slo_under_load(run: PredictedRun, limit_ms: float, percentile: float = PERCENTILE,
                   like: CoRunner | None = None) -> SloUnderLoad:
    """Compares a predicted run with an objective, and finds the highest load at which it is still met. The load is assumed to
    have the waits and phases of `like`, the co-runner as a probe saw it."""
    slo = check_slo(run.prediction, limit_ms, percentile).model_dump()
    share = unknown_because = None
    if run.prediction.way != AS_USUAL:
        unknown_because = f"a model run {run.prediction.way.description} was not measured while the GPU was shared"
    else:
        try:
            share = highest_busy_share(shared_model_of(run), limit_ms, percentile, like)
        except NotShared as error:
            unknown_because = str(error)
    return SloUnderLoad(**slo, highest_busy_share=share, unknown_because=unknown_because)
