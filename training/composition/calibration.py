"""Calibrates prediction intervals on models that were held out of everything (learned/composition/intervals.py).

The reach of each source of error is the non-negative maximum-likelihood value for Laplace-distributed errors. The interval
reaches from `low` to `high` scales around the prediction. Both are conformal quantiles of errors in scales, with each
collection's scale fitted without it (cross-conformal: Vovk, Cross-conformal predictors, 2015; scaled errors: Lei et al.,
Distribution-free predictive inference for regression, 2018, section 5.2). Models of one family have similar errors, so a family
counts as one observation (Lee, Barber and Willett, Distribution-free inference with hierarchical data, 2023).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.learned.composition.intervals import (
    ALWAYS,
    COVERAGE,
    LARGEST_REACH,
    PACE,
    CalibratedInterval,
    ErrorRange,
    Sources,
    scale_of_error,
)
from hase.utils.lazy import scipy
from hase.utils.timing import Floats

LEAST_FOR_RANGE = 20  # held-out models; with fewer, the largest error is no 95th percentile
LEAST_FAMILIES = 8  # with fewer, the largest error is no 95th percentile by far
PARTS = 5  # in which families are held out if there is only one collection
FIRST_REACH = 0.05  # where the fit begins
# Few held-out models have much of these sources, so a fit may find no reach for them. Chosen by hand: the time of an operator
# that was never measured is off by about a quarter, that of one measured in other forms only by less, and that of sizes four
# times beyond those measured by a fifth.
LEAST_REACH = {"unmeasured": 0.25, "other_form": 0.15, "beyond": 0.15}
SMALLEST_REACH = 1e-4  # of the other sources
SHRINK = 0.02  # penalty on the square of a reach, so that a rare source gets no larger reach than its data show


def error_range_of(predicted_ms: Floats, measured_ms: Floats, groups: Sequence[str]) -> ErrorRange | None:
    """The prediction interval from the errors of held-out models; None for fewer than LEAST_FOR_RANGE models. A split-conformal
    interval (Lei et al., Distribution-free predictive inference for regression, 2018) of the ratio of measured to predicted
    latency: quantiles that exclude a tenth of the ratios, corrected for their number."""
    ratios = measured_ms / predicted_ms
    if len(ratios) < LEAST_FOR_RANGE:
        return None

    def bounds(values: Floats) -> tuple[float, float]:
        tail = (1.0 - COVERAGE) / 2
        upper = min(np.ceil((len(values) + 1) * (1.0 - tail)) / len(values), 1.0)
        return float(np.quantile(values, 1.0 - upper)), float(np.quantile(values, upper))

    inside, group_of_model = [], np.array(groups)
    for group in sorted(set(groups)):
        low, high = bounds(ratios[group_of_model != group])
        held_out = ratios[group_of_model == group]
        inside += ((held_out >= low) & (held_out <= high)).tolist()
    low, high = bounds(ratios)
    return ErrorRange(low=low, high=high, coverage=float(np.mean(inside)))


class HeldOutCase(NamedTuple):
    """A prediction of a held-out model; `error` is the logarithm of measured over predicted latency."""

    collection: str
    family: str
    sources: Sources
    error: float


def calibrate(cases: Sequence[HeldOutCase]) -> CalibratedInterval | None:
    """The interval from the errors of held-out models; None for too few families."""
    calibrated = _calibrate(cases)
    if calibrated is None or not (ends := intervals_held_out(cases)):
        return calibrated
    inside = [low <= math.exp(case.error) <= high for (low, high), case in zip(ends, cases, strict=True)]
    return calibrated.model_copy(update={"coverage": float(np.average(inside, weights=_weights(cases)))})


def fitted_to(interval: CalibratedInterval, cases: Sequence[HeldOutCase]) -> CalibratedInterval | None:
    """Adapts an interval to models of another sort with few families (at least two, else None). Two numbers are fitted: a
    factor for the reaches of the given interval, and the pace's reach. Both ends are equally far, at the conformal quantile of
    the errors' sizes in scales, since few families show no tails. Families count equally; `coverage` is measured on families
    left out of the fit. Each of `cases` was predicted without its family, at the pace that its host had."""
    families = np.array([case.family for case in cases])
    names = sorted(set(families.tolist()))
    if len(names) < 2:
        return None
    amounts = np.array([(interval.scale(case.sources), case.sources.pace) for case in cases])
    sizes, weights, inside = np.abs([case.error for case in cases]), _weights(cases), np.empty(len(cases))

    def fit(kept: npt.NDArray[np.bool_], count: int) -> tuple[Floats, Floats, float]:
        """Both reaches, the cases' errors in scales, and the 90 % end of those that are kept."""
        reach = _likeliest(amounts[kept], sizes[kept], weights[kept], [SMALLEST_REACH] * 2)
        scaled = sizes / np.sqrt(amounts ** 2 @ reach ** 2)
        return reach, scaled, _quantile(scaled[kept], weights[kept], COVERAGE, count)

    for name in names:
        _, scaled, end = fit(families != name, len(names) - 1)
        inside[families == name] = scaled[families == name] <= end
    (reach_factor, pace_reach), _, end = fit(np.ones(len(cases), dtype=bool), len(names))
    return interval.model_copy(update={
        "reach": {name: float(reach_factor) * reach for name, reach in interval.reach.items()} | {PACE: float(pace_reach)},
        "low": -end, "high": end, "left_out": "family", "families": len(names),
        "coverage": float(np.average(inside, weights=weights))})


def intervals_held_out(cases: Sequence[HeldOutCase]) -> list[tuple[float, float]]:
    """Each prediction's interval, as multiples, calibrated without its collection or family; empty for too few families."""
    parts = _parts(cases)
    calibrated: dict[str, CalibratedInterval] = {}
    for held_out in sorted(set(parts)):
        interval = _calibrate([case for case, part in zip(cases, parts, strict=True) if part != held_out])
        if interval is None:
            return []
        calibrated[held_out] = interval
    return [calibrated[part].ends(case.sources) for case, part in zip(cases, parts, strict=True)]


def interval_score(ends: Sequence[tuple[float, float]], ratios: Floats) -> Floats:
    """The score of each interval in logarithms of latency; lower is better. Its width, plus the distance of the truth outside
    it times 2 / (1 - coverage) (Gneiting and Raftery, Strictly Proper Scoring Rules, Prediction, and Estimation, 2007, section
    6.2). `ends` are multiples of the predictions."""
    (low, high), true = np.log(np.array(ends)).T, np.log(ratios)
    outside = np.maximum(0.0, np.maximum(low - true, true - high))
    return np.asarray(high - low + 2.0 / (1.0 - COVERAGE) * outside)


def _calibrate(cases: Sequence[HeldOutCase]) -> CalibratedInterval | None:
    families = len({(case.collection, case.family) for case in cases})
    if families < LEAST_FAMILIES:
        return None
    parts, several = _parts(cases), len({case.collection for case in cases}) > 1
    scaled = np.empty(len(cases))
    for held_out in sorted(set(parts)):
        reach = _fit_reach([case for case, part in zip(cases, parts, strict=True) if part != held_out])
        inside = [index for index, part in enumerate(parts) if part == held_out]
        scaled[inside] = [cases[index].error / scale_of_error(reach, cases[index].sources) for index in inside]
    weights, tail = _weights(cases), (1.0 - COVERAGE) / 2
    return CalibratedInterval(
        reach=_fit_reach(cases), low=min(0.0, -_quantile(-scaled, weights, 1.0 - tail, families)),
        high=max(0.0, _quantile(scaled, weights, 1.0 - tail, families)), left_out="collection" if several else "family",
        families=families)


def _parts(cases: Sequence[HeldOutCase]) -> list[str]:
    """What each case is held out with: its collection, or a part of the families if there is one collection."""
    if len({case.collection for case in cases}) > 1:
        return [case.collection for case in cases]
    part_of = {family: str(index % PARTS) for index, family in enumerate(sorted({case.family for case in cases}))}
    return [part_of[case.family] for case in cases]


def _weights(cases: Sequence[HeldOutCase]) -> Floats:
    """The weight of each case: 1 in total for each family."""
    families = [(case.collection, case.family) for case in cases]
    counts = Counter(families)
    return np.array([1.0 / counts[family] for family in families])


def _quantile(values: Floats, weights: Floats, level: float, families: int) -> float:
    """The conformal quantile of weighted values: one more family may have any value. The plain one for too few families."""
    order = np.argsort(values)
    count = families + 1 if families / (families + 1) >= level else families
    index = int(np.searchsorted(np.cumsum(weights[order]) / count, level - 1e-12))
    return float(values[order][min(index, len(values) - 1)])


def _fit_reach(cases: Sequence[HeldOutCase]) -> dict[str, float]:
    """The reach of each source that occurs in some case or has a minimum reach."""
    case_sources = np.array([case.sources for case in cases])
    amounts = {ALWAYS: np.ones(len(cases)), **dict(zip(Sources._fields, case_sources.T, strict=True))}
    names = [name for name, amount in amounts.items() if name in LEAST_REACH or amount.any()]
    fitted = _likeliest(np.column_stack([amounts[name] for name in names]), np.abs([case.error for case in cases]),
                        _weights(cases), [LEAST_REACH.get(name, SMALLEST_REACH) for name in names])
    return dict(zip(names, fitted.tolist(), strict=True))


def _likeliest(amounts: Floats, sizes: Floats, weights: Floats, least: Sequence[float]) -> Floats:
    """The likeliest reaches for Laplace errors whose mean size is the scale; `amounts` are cases × sources."""
    squares, weights = amounts ** 2, weights / weights.sum()

    def loss(reach: Floats) -> tuple[float, Floats]:
        variance = squares @ reach ** 2
        scale = np.sqrt(variance)
        value = weights @ (np.log(scale) + sizes / scale) + SHRINK * float(reach @ reach)
        slope = weights * (1.0 / scale - sizes / variance) / scale
        return float(value), (slope @ squares) * reach + 2 * SHRINK * reach

    optimum = scipy.optimize.minimize(loss, np.maximum(least, FIRST_REACH), jac=True, method="TNC",
                                      bounds=[(smallest, LARGEST_REACH) for smallest in least])
    return np.asarray(optimum.x)
