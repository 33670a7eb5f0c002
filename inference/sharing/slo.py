"""Whether a latency objective is met, and up to which load it still would be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.core.run_modes import AS_USUAL
from inference.sharing.co_runner import NotShared
from inference.sharing.shared_models import SharedModel, shared_model_of
from utils.frozen import Frozen

if TYPE_CHECKING:
    from graph_model.simulation.sharing import CoRunner
    from inference.core.answers import Prediction
    from inference.core.predicted_run import PredictedRun

PERCENTILE = 95.0
PRECISION = 0.005  # of the highest share, a ratio


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
    """

    limit_ms: float
    percentile: float
    latency_ms: float
    met: bool
    headroom_ms: float
    headroom_percent: float
    could_be_ms: float


class SloUnderLoad(Slo):
    """A latency objective, and the highest load at which it is still met.

    Attributes:
        highest_busy_share: the largest share of the time (a ratio) for which a background may be busy. None where the objective
            is missed on an idle device already, or where `unknown_because` says why the share is not known.
    """

    highest_busy_share: float | None = None
    unknown_because: str | None = None


def check_slo(prediction: Prediction, limit_ms: float, percentile: float = PERCENTILE) -> Slo:
    """Compares a prediction with the objective that `percentile` % of the runs take at most `limit_ms`."""
    shared = prediction.under_load
    latency, could_be = prediction.latency_ms, prediction.interval_ms[1]
    if shared is not None:
        latency, could_be = shared.percentile_ms(percentile), could_be * shared.percentile_ms(percentile) / latency
    return Slo(limit_ms=limit_ms, percentile=percentile, latency_ms=latency, met=latency <= limit_ms,
               headroom_ms=limit_ms - latency, headroom_percent=100 * (1 - latency / limit_ms),
               could_be_ms=could_be)


def highest_busy_share(model: SharedModel, limit_ms: float, percentile: float = PERCENTILE,
                       like: CoRunner | None = None) -> float | None:
    """The largest share of the time (a ratio) for which a background may be busy so that `percentile` % of the runs still take
    at most `limit_ms`; None where they take longer on an idle device.

    It is found by bisection, to PRECISION, over backgrounds with the waits and phases of those that were measured, or of
    `like`. The same runs are simulated at each share, so percentiles grow with it. High percentiles rest on few runs.
    """
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
    """
    prediction = run.prediction
    found = check_slo(prediction, limit_ms, percentile).model_dump()
    if prediction.way != AS_USUAL:
        why = f"a model run {prediction.way.description} was not measured while the GPU was shared"
        return SloUnderLoad(**found, unknown_because=why)
    try:
        model = shared_model_of(run)
    except NotShared as error:
        return SloUnderLoad(**found, unknown_because=str(error))
    return SloUnderLoad(**found, highest_busy_share=highest_busy_share(model, limit_ms, percentile, like))
