"""A model's latency as a function of the load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.frozen import Frozen

if TYPE_CHECKING:
    from inference.sharing.shared_models import SharedModel


class LoadPoint(Frozen):
    """The latency next to a background that is busy for `busy_share` (a ratio) of the time."""

    busy_share: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


class LoadCurve(Frozen):
    """A model's latency for loads from idle to a background that is always busy, with the warnings of its prediction."""

    model: str
    target: str
    dims: dict[str, int]
    points: tuple[LoadPoint, ...]
    rough_estimate: bool = False
    estimated_operators: tuple[str, ...] = ()
    warnings: tuple[str, ...]


def load_curve(model: SharedModel, points: int) -> LoadCurve:
    """The latency of a model for `points` loads: the background's busy share goes from 0 to 1 in even steps. From 0.95 on the
    background never pauses (`records.probe_reading.ALWAYS`)."""
    found = []
    for place in range(points):
        share = place / (points - 1)
        under = model.at_share(share)
        p50, p95, p99 = (under.percentile_ms(percent) for percent in (50, 95, 99))
        found.append(LoadPoint(busy_share=share, mean_ms=under.mean_ms, p50_ms=p50, p95_ms=p95, p99_ms=p99))
    of = model.prediction
    return LoadCurve(model=of.model, target=of.target, dims=of.dims, points=tuple(found), rough_estimate=of.rough_estimate,
                     estimated_operators=of.estimated_operators, warnings=of.warnings)
