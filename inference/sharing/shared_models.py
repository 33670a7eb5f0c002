"""Models on a GPU that others share: next to any co-runner, over the load, two on one GPU, and against a latency objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hase.inference.core.chances import chance_within, in_words
from hase.inference.core.run_modes import AS_USUAL
from hase.inference.core.uncertainty import CERTAIN, Span, joined
from hase.inference.sharing.co_runner import LoadSource, NotShared, UnderLoad, check_mode_here, under_load
from hase.learned.sharing.slices import Sharing, co_runner_guessed, in_a_loop
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.sharing_mode import SLICES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.core.answers import Prediction
    from hase.inference.core.model_run import PredictedRun

PERCENTILE = 95.0  # of the runs that must keep to an objective, if no other is given
PRECISION = 0.005  # of the highest share, a ratio


@dataclass(frozen=True)
class SharedModel:
    """A model, with all that is needed to predict it next to a co-runner.

    Attributes:
        prediction: of the model.
        alone_ms: its latency on an idle device.
        tracks, costs: of its run.
        sharing: how the target's GPU takes turns between processes.
        beyond_tracks_ms: how much longer a run takes than its tracks alone, idle or not (`ModelRun.beyond_tracks_ms`).
    """

    prediction: Prediction
    alone_ms: float
    tracks: Tracks
    costs: PipelineCosts
    sharing: Sharing
    beyond_tracks_ms: float = 0.0

    def next_to(self, co_runner: CoRunner, load_source: LoadSource) -> UnderLoad:
        """The distribution of its latency next to a co-runner."""
        return under_load(self.tracks, self.costs, self.sharing, co_runner, load_source).later_by(self.beyond_tracks_ms)

    def at_share(self, share: float, like: CoRunner | None = None) -> UnderLoad:
        """The distribution next to a background that is busy for `share` of the time (a ratio). The background's waits and
        phases are those of `like`, or of an average background among those that were measured."""
        return self.next_to(co_runner_guessed(share, self.sharing, like), "share")

    def co_runner(self, others: Sequence[SharedModel]) -> CoRunner:
        """Other models, run without a pause, each in a process of its own, as the co-runner of this one."""
        return in_a_loop([(other.tracks, other.costs) for other in others], (self.tracks, self.costs), self.sharing)

    def beside(self, others: Sequence[SharedModel]) -> UnderLoad:
        """The distribution of its latency while others run without a pause, each in a process of its own."""
        return self.next_to(self.co_runner(others), "prediction")


def shared_model_of(run: PredictedRun, as_here: bool = True) -> SharedModel:
    """A predicted model, ready to be put next to a co-runner.

    Args:
        run: of the model.
        as_here: whether it is asked for the way in which a GPU of this machine is shared now.

    Raises:
        UserError: the GPU is this machine's and shared in a way that was not measured.
        NotShared: nothing was learned of how the target is shared.
    """
    sharing, costs = run.fitted.sharing, run.run.costs
    if sharing is not None and as_here:
        check_mode_here(run.fitted)
    if sharing is None or costs is None:
        raise NotShared(run.fitted.target.name)
    return SharedModel(run.prediction, run.alone_ms, run.run.tracks, costs, sharing, run.run.beyond_tracks_ms(costs))


class OneOfTwo(Frozen):
    """A model's latency alone, and its distribution while the other model runs in a loop.

    Attributes:
        model, dims: the record's name, and the sizes given to its dynamic dimensions.
        idle_ms: its latency alone.
        under_load: the distribution beside the other.
        interval_ratios: the ends of the 90 % interval of each latency beside the other, as ratios of it: those of the
            prediction for an idle device, and how far off such latencies of held-out models were, together.
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
        sharing: how they share the GPU: `slices`, `mps`, or `mps:25/75` with the share of the threads that each may use.
        models: in the order in which they were given; `idle_ms` is with the share.
        warnings: of both predictions.
    """

    target: str
    sharing: str = SLICES
    models: tuple[OneOfTwo, OneOfTwo]
    warnings: tuple[str, ...]


def one_of_two(of: Prediction, neighbour: Prediction, alone_ms: float, under_load: UnderLoad, errors: Span) -> OneOfTwo:
    """What is said of a model of a pair, by its prediction and the neighbour's.

    Args:
        of, neighbour: the predictions.
        alone_ms, under_load: its latency alone, and beside the neighbour.
        errors: the factors by which latencies beside others are off where the run alone is right.
    """
    alone = Span(*(end / of.latency_ms for end in of.interval_ms)) if of.latency_ms else CERTAIN
    return OneOfTwo(model=of.model, dims=of.dims, idle_ms=alone_ms, under_load=under_load,
                    interval_ratios=tuple(joined([alone, errors])),
                    rough_estimate=of.rough_estimate or neighbour.rough_estimate, estimated_operators=of.estimated_operators)


class LoadPoint(Frozen):
    """The latency next to a background.

    Attributes:
        busy_share: the share of the time (a ratio) for which the background is busy.
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
        interval_ratios: the ends of the 90 % interval of each latency, as ratios of it: those of the prediction for an idle
            device.
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
        """The curve as people read it, a row for each load."""
        return [{"other work busy": f"{point.busy_share:.0%}", "mean (ms)": point.mean_ms, "p50 (ms)": point.p50_ms,
                 "p95 (ms)": point.p95_ms, "p95 90 % between (ms)": "{:.4g} and {:.4g}".format(*self.interval_ms(point.p95_ms)),
                 "p99 (ms)": point.p99_ms} for point in self.points]


def load_curve(model: SharedModel, points: int) -> LoadCurve:
    """The latency of a model for `points` loads: the background's busy share goes from 0 to 1 in even steps. From 0.95 on the
    background never pauses (`hase.records.probe_reading.ALWAYS`)."""
    load_points = []
    for place in range(points):
        share = place / (points - 1)
        under = model.at_share(share)
        p50, p95, p99 = (under.percentile_ms(percent) for percent in (50, 95, 99))
        load_points.append(LoadPoint(busy_share=share, mean_ms=under.mean_ms, p50_ms=p50, p95_ms=p95, p99_ms=p99))
    of = model.prediction
    low_ms, high_ms = of.interval_ms
    return LoadCurve(model=of.model, target=of.target, dims=of.dims, points=tuple(load_points),
                     interval_ratios=(low_ms / of.latency_ms, high_ms / of.latency_ms), rough_estimate=of.rough_estimate,
                     estimated_operators=of.estimated_operators, warnings=of.warnings)


class Slo(Frozen):
    """A latency objective, and how a prediction compares with it.

    Attributes:
        limit_ms: the highest latency that is allowed.
        percentile: of the runs, in per cent, must keep to it.
        latency_ms: that percentile of the predicted distribution. Where there is no distribution, as on an idle device, the
            predicted latency: the median of the runs, for any percentile, since their spread is not predicted there.
        met: whether latency_ms is at most limit_ms.
        headroom_ms, headroom_percent: how far latency_ms is below the limit (in per cent of the limit); negative if missed.
        could_be_ms: the upper end of the prediction's interval, which holds nine of ten models. Under load, the percentile
            times the ratio of that end to the mean. It says how wrong the prediction may be, not how the runs spread.
        chance: how likely the objective is met, 0 to 1, given how wrong the prediction may be.
        chance_in_words: the same as `hase.inference.core.chances.in_words` says it.
    """

    limit_ms: float
    percentile: float
    latency_ms: float
    met: bool
    headroom_ms: float
    headroom_percent: float
    could_be_ms: float
    chance: float
    chance_in_words: str


class SloUnderLoad(Slo):
    """A latency objective, and the highest load at which it is still met.

    Attributes:
        highest_busy_share: the largest share of the time (a ratio) for which a background may be busy. None where the objective
            is missed on an idle device already, or where the share is not known.
        unknown_because: why it is not known; None where it is.
    """

    highest_busy_share: float | None = None
    unknown_because: str | None = None


def _check_percentile(percentile: float) -> None:
    """Refuses what is no percentile, such as the ratio 0.95.

    Raises:
        UserError: it is not between 1 and 100.
    """
    if not 1.0 <= percentile <= 100.0:
        raise UserError(f"percentile {percentile:g} is not between 1 and 100; write 95 for the 95th percentile")


def check_slo(prediction: Prediction, limit_ms: float, percentile: float = PERCENTILE) -> Slo:
    """Compares a prediction with the objective that `percentile` % of the runs take at most `limit_ms`.

    Raises:
        UserError: the percentile is not between 1 and 100.
    """
    _check_percentile(percentile)
    shared = prediction.under_load
    latency, (low_ms, high_ms) = prediction.latency_ms, prediction.interval_ms
    if shared is not None:
        latency = shared.percentile_ms(percentile)
        low_ms, high_ms = (end * latency / prediction.latency_ms for end in (low_ms, high_ms))
    chance = chance_within(latency, (low_ms, high_ms), limit_ms)
    return Slo(limit_ms=limit_ms, percentile=percentile, latency_ms=latency, met=latency <= limit_ms,
               headroom_ms=limit_ms - latency, headroom_percent=100 * (1 - latency / limit_ms),
               could_be_ms=high_ms, chance=chance, chance_in_words=in_words(chance))


def highest_busy_share(model: SharedModel, limit_ms: float, percentile: float = PERCENTILE,
                       like: CoRunner | None = None) -> float | None:
    """The largest share of the time (a ratio) for which a background may be busy so that `percentile` % of the runs still take
    at most `limit_ms`; None where they take longer on an idle device.

    It is found by bisection, to PRECISION, over backgrounds with the waits and phases of those that were measured, or of
    `like`. The same runs are simulated at each share, so percentiles grow with it. High percentiles rest on few runs.

    Raises:
        UserError: the percentile is not between 1 and 100.
    """
    _check_percentile(percentile)

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


def objective_of(run: PredictedRun, limit_ms: float, percentile: float = PERCENTILE,
                 like: CoRunner | None = None) -> SloUnderLoad:
    """Compares a predicted run with an objective, and finds the highest load at which it is still met.

    Args:
        run: of the model.
        limit_ms, percentile: the objective: `percentile` % of the runs take at most `limit_ms`.
        like: the co-runner as a probe saw it; the highest load is taken to have the same waits and phases.

    Raises:
        UserError: the percentile is not between 1 and 100, or the GPU is this machine's and shared in a way that was not
            measured.
    """
    prediction = run.prediction
    slo = check_slo(prediction, limit_ms, percentile).model_dump()
    if prediction.way != AS_USUAL:
        why = f"a model run {prediction.way.description} was not measured while the GPU was shared"
        return SloUnderLoad(**slo, unknown_because=why)
    try:
        model = shared_model_of(run)
    except NotShared as error:
        return SloUnderLoad(**slo, unknown_because=str(error))
    return SloUnderLoad(**slo, highest_busy_share=highest_busy_share(model, limit_ms, percentile, like))
