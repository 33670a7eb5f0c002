"""Prediction intervals that are calibrated on models whose collection was held out of everything.

The error of a prediction is the logarithm of measured over predicted latency. Its plausible size is a *scale*, in which several
sources of error are added in quadrature: a constant, and how much of the latency rests on predicted kernels, on operators that
were never measured, on other forms and sizes than were measured, and on the host. How far each source reaches is fitted
(maximum likelihood of a Laplace distribution; reaches are not negative).

The interval reaches from `low` to `high` scales around the prediction. Both are conformal quantiles of errors in scales, each
collection's taken with a scale that was fitted without it (cross-conformal: Vovk, Cross-conformal predictors, 2015; scaled
errors: Lei et al., Distribution-free predictive inference for regression, 2018, section 5.2). Models of one family err alike,
so a family counts as one observation, however many models it has (Lee, Barber and Willett, Distribution-free inference with
hierarchical data, 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from training.composition.error_sources import Sources
from utils.frozen import Frozen
from utils.lazy import scipy

Floats = npt.NDArray[np.float64]
COVERAGE = 0.9  # of a prediction interval
LEAST_FAMILIES = 8  # with fewer, the largest error is no 95th percentile by far
PARTS = 5  # that families are held out in where there is one collection only
ALWAYS = "always"  # the constant source
LARGEST_REACH, FIRST_REACH = 10.0, 0.05
# Of these sources few held-out models have much, so a fit may find that they reach nowhere. Choices: an operator that was never
# measured errs by a quarter or so, one measured in other forms only by less, and something four times beyond by a fifth.
LEAST_REACH = {"unmeasured": 0.25, "other_form": 0.15, "beyond": 0.15}
SMALLEST_REACH = 1e-4  # of the other sources
SHRINK = 0.02  # penalty of a reach's square, so that a source that hardly occurs reaches no further than it shows


class Case(NamedTuple):
    """A prediction of a model that was held out.

    Attributes:
        collection, family: of the model.
        sources: of the prediction's error.
        error: logarithm of measured over predicted latency.
    """

    collection: str
    family: str
    sources: Sources
    error: float


class CalibratedInterval(Frozen):
    """A prediction interval whose width follows from what a prediction rests on.

    Attributes:
        reach: how far each source of error reaches, by name, as logarithms of latency.
        low, high: the interval's ends, in scales; `low` is not positive, `high` not negative.
        left_out: what was held out for the errors: each collection, or parts of the families.
        families: how many families they are of.
        coverage: the share of predictions that lay in the interval calibrated on other collections (or families) alone;
            families count equally.
    """

    reach: dict[str, float]
    low: float
    high: float
    left_out: Literal["collection", "family"]
    families: int
    coverage: float = math.nan

    def scale(self, sources: Sources) -> float:
        """The plausible size of a prediction's error, as a logarithm."""
        return _scale(self.reach, sources)

    def ends(self, sources: Sources) -> tuple[float, float]:
        """The interval of a prediction, as multiples of it."""
        scale = self.scale(sources)
        return math.exp(self.low * scale), math.exp(self.high * scale)


def calibrate(cases: Sequence[Case]) -> CalibratedInterval | None:
    """The interval that follows from the errors of held-out models; None where they are of too few families."""
    found = _calibrate(cases)
    if found is None or not (ends := intervals_without_own(cases)):
        return found
    inside = [low <= math.exp(case.error) <= high for (low, high), case in zip(ends, cases, strict=True)]
    return found.model_copy(update={"coverage": float(np.average(inside, weights=_weights(cases)))})


def intervals_without_own(cases: Sequence[Case]) -> list[tuple[float, float]]:
    """The interval of each prediction as multiples of it, calibrated on the other collections (or families) alone; empty where
    too few families are left for that."""
    parts = _parts(cases)
    found: dict[int, tuple[float, float]] = {}
    for part in sorted(set(parts)):
        interval = _calibrate([case for case, of in zip(cases, parts, strict=True) if of != part])
        if interval is None:
            return []
        found |= {place: interval.ends(cases[place].sources) for place, of in enumerate(parts) if of == part}
    return [found[place] for place in range(len(cases))]


def for_any_host(ends: tuple[float, float], fastest_ms: float, usual_ms: float, slowest_ms: float) -> tuple[float, float]:
    """An interval that holds for a host of unknown pace: its own reach and that of the hosts, as logarithms in quadrature.

    Args:
        ends: of the interval where the pace is known, as multiples of the prediction.
        fastest_ms, usual_ms, slowest_ms: the latency with the fastest plausible host, a usual one and the slowest.
    """
    low, high = (math.hypot(math.log(end), math.log(host_ms / usual_ms))
                 for end, host_ms in zip(ends, (min(fastest_ms, usual_ms), max(slowest_ms, usual_ms)), strict=True))
    return math.exp(-low), math.exp(high)


def _calibrate(cases: Sequence[Case]) -> CalibratedInterval | None:
    families = len({(case.collection, case.family) for case in cases})
    if families < LEAST_FAMILIES:
        return None
    parts, several = _parts(cases), len({case.collection for case in cases}) > 1
    scaled = np.empty(len(cases))
    for part in sorted(set(parts)):
        reach = _fit_reach([case for case, of in zip(cases, parts, strict=True) if of != part])
        inside = [place for place, of in enumerate(parts) if of == part]
        scaled[inside] = [cases[place].error / _scale(reach, cases[place].sources) for place in inside]
    weights, tail = _weights(cases), (1.0 - COVERAGE) / 2
    return CalibratedInterval(
        reach=_fit_reach(cases), low=min(0.0, -_quantile(-scaled, weights, 1.0 - tail, families)),
        high=max(0.0, _quantile(scaled, weights, 1.0 - tail, families)), left_out="collection" if several else "family",
        families=families)


def _parts(cases: Sequence[Case]) -> list[str]:
    """What each case is held out with: its collection, or where there is one alone, a part of the families."""
    if len({case.collection for case in cases}) > 1:
        return [case.collection for case in cases]
    part_of = {family: str(place % PARTS) for place, family in enumerate(sorted({case.family for case in cases}))}
    return [part_of[case.family] for case in cases]


def _weights(cases: Sequence[Case]) -> Floats:
    """The weight of each case: those of one family have 1 together."""
    names = [(case.collection, case.family) for case in cases]
    counts: dict[tuple[str, str], int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return np.array([1.0 / counts[name] for name in names])


def _quantile(values: Floats, weights: Floats, level: float, families: int) -> float:
    """The conformal quantile of values that have weights: one more family may have any value. Where there are too few families
    for that, the quantile of the values alone."""
    order = np.argsort(values)
    every = families + 1 if families / (families + 1) >= level else families
    place = int(np.searchsorted(np.cumsum(weights[order]) / every, level - 1e-12))
    return float(values[order][min(place, len(values) - 1)])


def _scale(reach: Mapping[str, float], sources: Sources) -> float:
    return math.hypot(reach.get(ALWAYS, 0.0), *(reach.get(name, 0.0) * amount for name, amount in sources._asdict().items()))


def _fit_reach(cases: Sequence[Case]) -> dict[str, float]:
    """How far each source reaches: the likeliest where errors have a Laplace distribution with the scale as mean size."""
    squares = np.column_stack([np.ones(len(cases)), np.array([case.sources for case in cases])]) ** 2
    sizes, weights = np.abs([case.error for case in cases]), _weights(cases)
    weights = weights / weights.sum()

    def loss(reach: Floats) -> tuple[float, Floats]:
        variance = squares @ reach ** 2
        scale = np.sqrt(variance)
        value = weights @ (np.log(scale) + sizes / scale) + SHRINK * float(reach @ reach)
        slope = weights * (1.0 / scale - sizes / variance) / scale
        return float(value), (slope @ squares) * reach + 2 * SHRINK * reach

    names = (ALWAYS, *Sources._fields)
    least = [LEAST_REACH.get(name, SMALLEST_REACH) for name in names]
    found = scipy.optimize.minimize(loss, np.maximum(least, FIRST_REACH), jac=True, method="TNC",
                                    bounds=[(one, LARGEST_REACH) for one in least])
    return dict(zip(names, found.x.tolist(), strict=True))
