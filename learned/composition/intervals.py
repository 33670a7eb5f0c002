"""Prediction intervals, and what the error of a predicted latency may come from.

The simple kind of interval is the same multiple of every prediction (`ErrorRange`). The width of the calibrated kind depends on
what a prediction rests on. It is calibrated on models whose collection was held out of everything:

The error of a prediction is the logarithm of measured over predicted latency. Its plausible size is a *scale*, in which several
sources of error are added in quadrature: a constant, how far predicted kernels are off in the mean, and how much of the latency
rests on operators that were never measured, on other forms and sizes than were measured, on the host, and on its pace. How far
each source reaches is fitted (maximum likelihood of a Laplace distribution; reaches are not negative).

The interval reaches from `low` to `high` scales around the prediction. Both are conformal quantiles of errors in scales, each
collection's taken with a scale that was fitted without it (cross-conformal: Vovk, Cross-conformal predictors, 2015; scaled
errors: Lei et al., Distribution-free predictive inference for regression, 2018, section 5.2). Models of one family err alike,
so a family counts as one observation, however many models it has (Lee, Barber and Willett, Distribution-free inference with
hierarchical data, 2023).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from hase.utils.frozen import Frozen
from hase.utils.lazy import scipy

Floats = npt.NDArray[np.float64]
NoveltyKind = Literal["known", "unmeasured", "other form", "beyond"]
COVERAGE = 0.9  # of a prediction interval
LEAST_FOR_RANGE = 20  # held-out models; with fewer, the largest error is no 95th percentile
LEAST_FAMILIES = 8  # with fewer, the largest error is no 95th percentile by far
PARTS = 5  # that families are held out in where there is one collection only
LARGEST_LOG = 100.0  # of the end of an interval: one that wide says nothing, and larger ones have no number
MOST_TIMES = 1e9  # the end of an interval as a multiple of a prediction; a larger one is damage
ALWAYS = "always"  # the constant source
PACE = "pace"  # the source that only a fit to runs at many paces shows
LARGEST_REACH, FIRST_REACH = 10.0, 0.05
# Of these sources few held-out models have much, so a fit may find that they reach nowhere. Choices: an operator that was never
# measured errs by a quarter or so, one measured in other forms only by less, and something four times beyond by a fifth.
LEAST_REACH = {"unmeasured": 0.25, "other_form": 0.15, "beyond": 0.15}
SMALLEST_REACH = 1e-4  # of the other sources
SHRINK = 0.02  # penalty of a reach's square, so that a source that hardly occurs reaches no further than it shows


class ErrorRange(Frozen):
    """A prediction interval as multiples of the prediction: a share COVERAGE of all models has its latency in it.

    Attributes:
        low, high: the multiples.
        coverage: the share of models that lay in the interval made from the other families' errors alone.
    """

    low: float = Field(ge=0, le=MOST_TIMES)
    high: float = Field(ge=0, le=MOST_TIMES)
    coverage: float


def error_range_of(predicted_ms: Floats, measured_ms: Floats, groups: Sequence[str]) -> ErrorRange | None:
    """The prediction interval that follows from the errors of held-out models; None for fewer than LEAST_FOR_RANGE models.

    It is a split-conformal interval (Lei et al., Distribution-free predictive inference for regression, 2018) of the ratio of
    measured to predicted latency: quantiles of the ratios that leave a tenth of them out, corrected for their number.
    """
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


class Novelty(NamedTuple):
    """How a kernel differs from those that were learned from.

    Attributes:
        kind: of the difference.
        times: if its sizes lie beyond theirs, how many times.
        doubt: how far off such a kernel's time is in the mean, as a logarithm (`Predictors.doubts`).
    """

    kind: NoveltyKind
    times: float = 1.0
    doubt: float = 0.0

    @property
    def weights(self) -> dict[str, float]:
        """How much of the kernel's time counts for the sources that are shares of the latency, by field of `Sources`."""
        return {"predicted": float(self.kind in ("known", "beyond") and not self.doubt),
                "unmeasured": float(self.kind == "unmeasured"), "other_form": float(self.kind == "other form"),
                "beyond": math.log(self.times) if self.kind == "beyond" else 0.0}


KNOWN = Novelty("known")


class Sources(NamedTuple):
    """What the error of a predicted latency may come from.

    Attributes:
        predicted: the share of the latency in which the GPU works on kernels that were predicted, of operators and forms that
            were measured, and whose doubt is not known; a ratio, as the following three.
        unmeasured: the same of operators that were never measured.
        other_form: … that were measured for other element types or ranks only.
        beyond: … of sizes beyond what was measured, times the logarithm of how many times.
        host: the share of the latency in which the host works, squared: one with time to spare hardly delays the GPU. (Each
            collection held out, `interval_score` is 4 to 12 % lower than with the share in which the GPU waits for the host.)
        doubt: the doubts of predicted kernels, each times the kernel's share of the latency. Different kernels err
            independently, so these are added in quadrature: of a hundred kernels alike, a tenth of the doubt of one is left.
        pace: `host` times how far the host's pace is from its usual one, as a logarithm.
    """

    predicted: float = 0.0
    unmeasured: float = 0.0
    other_form: float = 0.0
    beyond: float = 0.0
    host: float = 0.0
    doubt: float = 0.0
    pace: float = 0.0


def sources(kernels: Iterable[tuple[str, float, Novelty | None]], latency_ms: float, host_work_ms: float,
            pace: float = 1.0) -> Sources:
    """The sources of error of a predicted latency.

    Args:
        kernels: the id of each kernel, the GPU's time (ms) for all runs of a node, and its novelty; None for a measured kernel.
            A kernel of several nodes comes several times.
        latency_ms: the prediction.
        host_work_ms: how long the host works (`pipeline.host_work_ms`).
        pace: of the host, a ratio.
    """
    total_ms = 0.0
    weighted_ms, doubts_ms = dict.fromkeys(KNOWN.weights, 0.0), dict[str, float]()
    for name, time_ms, novelty in kernels:
        total_ms += time_ms
        if novelty is None:
            continue
        doubts_ms[name] = doubts_ms.get(name, 0.0) + time_ms * novelty.doubt
        for source, weight in novelty.weights.items():
            weighted_ms[source] += time_ms * weight
    per_ms = min(1.0, total_ms / latency_ms) / total_ms if total_ms and latency_ms else 0.0
    host = min(1.0, host_work_ms / latency_ms) ** 2 if latency_ms else 0.0
    return Sources(**{source: time_ms * per_ms for source, time_ms in weighted_ms.items()}, host=host,
                   doubt=math.hypot(*doubts_ms.values()) * per_ms, pace=host * abs(math.log(pace)))


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
        reach: how far each source of error reaches, by name, as logarithms of latency; that of the pace where it was learned.
        low, high: the interval's ends, in scales; `low` is not positive, `high` not negative.
        left_out: what was held out for the errors: each collection, or parts of the families.
        families: how many families they are of.
        coverage: the share of predictions that lay in the interval calibrated on other collections (or families) alone;
            families count equally.
    """

    reach: dict[str, Annotated[float, Field(ge=0, le=LARGEST_REACH)]]
    low: float = Field(le=0)
    high: float = Field(ge=0)
    left_out: Literal["collection", "family"]
    families: int
    coverage: float = Field(math.nan, allow_inf_nan=True)

    def scale(self, sources: Sources) -> float:
        """The plausible size of a prediction's error, as a logarithm."""
        return _scale(self.reach, sources)

    @property
    def holds_paces(self) -> bool:
        """Whether the doubt that is left once the host's pace is known is in the interval."""
        return PACE in self.reach

    def ends(self, sources: Sources) -> tuple[float, float]:
        """The interval of a prediction, as multiples of it."""
        scale = self.scale(sources)
        return math.exp(self.low * scale), math.exp(min(self.high * scale, LARGEST_LOG))


def calibrate(cases: Sequence[Case]) -> CalibratedInterval | None:
    """The interval that follows from the errors of held-out models; None where they are of too few families."""
    calibrated = _calibrate(cases)
    if calibrated is None or not (ends := intervals_held_out(cases)):
        return calibrated
    inside = [low <= math.exp(case.error) <= high for (low, high), case in zip(ends, cases, strict=True)]
    return calibrated.model_copy(update={"coverage": float(np.average(inside, weights=_weights(cases)))})


def fitted_to(interval: CalibratedInterval, cases: Sequence[Case]) -> CalibratedInterval | None:
    """An interval for models of another sort, which may be of few families. Two numbers are fitted: how many times as far the
    sources of the given interval reach, and how far the pace does. Both ends are as far from the prediction: at the conformal
    quantile of the errors' sizes in scales, since few families show no tails. Families count equally.

    Args:
        interval: calibrated on other models.
        cases: the errors of models of that sort, each predicted without its family, at the pace that its host had.

    Returns:
        The interval, whose `coverage` is that of families whose errors are not among its own; None for fewer than two families.
    """
    families = np.array([case.family for case in cases])
    names = sorted(set(families.tolist()))
    if len(names) < 2:
        return None
    amounts = np.array([(interval.scale(case.sources), case.sources.pace) for case in cases])
    sizes, weights, inside = np.abs([case.error for case in cases]), _weights(cases), np.empty(len(cases))

    def fit(kept: npt.NDArray[np.bool_], count: int) -> tuple[Floats, Floats, float]:
        """How far both reach, the cases' errors in scales, and where nine of ten of those that are kept end."""
        reach = _likeliest(amounts[kept], sizes[kept], weights[kept], [SMALLEST_REACH] * 2)
        scaled = sizes / np.sqrt(amounts ** 2 @ reach ** 2)
        return reach, scaled, _quantile(scaled[kept], weights[kept], COVERAGE, count)

    for name in names:
        _, scaled, end = fit(families != name, len(names) - 1)
        inside[families == name] = scaled[families == name] <= end
    (times, of_pace), _, end = fit(np.ones(len(cases), dtype=bool), len(names))
    return interval.model_copy(update={
        "reach": {name: float(times) * reach for name, reach in interval.reach.items()} | {PACE: float(of_pace)},
        "low": -end, "high": end, "left_out": "family", "families": len(names),
        "coverage": float(np.average(inside, weights=weights))})


def intervals_held_out(cases: Sequence[Case]) -> list[tuple[float, float]]:
    """The interval of each prediction as multiples of it, calibrated on the other collections (or families) alone; empty where
    too few families are left for that."""
    parts = _parts(cases)
    calibrated: dict[str, CalibratedInterval] = {}
    for held_out in sorted(set(parts)):
        interval = _calibrate([case for case, part in zip(cases, parts, strict=True) if part != held_out])
        if interval is None:
            return []
        calibrated[held_out] = interval
    return [calibrated[part].ends(case.sources) for case, part in zip(cases, parts, strict=True)]


def interval_score(ends: Sequence[tuple[float, float]], ratios: Floats) -> Floats:
    """How good each interval is: its width, and how far the truth lies outside times 2 over the share that may; lower is better
    (Gneiting and Raftery, Strictly Proper Scoring Rules, Prediction, and Estimation, 2007, section 6.2).

    Args:
        ends: of the intervals, as multiples of the predictions.
        ratios: measured over predicted latencies.

    Returns:
        The score of each, in logarithms of latency.
    """
    (low, high), true = np.log(np.array(ends)).T, np.log(ratios)
    outside = np.maximum(0.0, np.maximum(low - true, true - high))
    return np.asarray(high - low + 2.0 / (1.0 - COVERAGE) * outside)


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
    for held_out in sorted(set(parts)):
        reach = _fit_reach([case for case, part in zip(cases, parts, strict=True) if part != held_out])
        inside = [place for place, part in enumerate(parts) if part == held_out]
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
    families = [(case.collection, case.family) for case in cases]
    counts = Counter(families)
    return np.array([1.0 / counts[family] for family in families])


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
    """How far each source reaches that some case has, or that has a least reach."""
    of_sources = np.array([case.sources for case in cases])
    amounts = {ALWAYS: np.ones(len(cases)), **dict(zip(Sources._fields, of_sources.T, strict=True))}
    names = [name for name, amount in amounts.items() if name in LEAST_REACH or amount.any()]
    fitted = _likeliest(np.column_stack([amounts[name] for name in names]), np.abs([case.error for case in cases]),
                        _weights(cases), [LEAST_REACH.get(name, SMALLEST_REACH) for name in names])
    return dict(zip(names, fitted.tolist(), strict=True))


def _likeliest(amounts: Floats, sizes: Floats, weights: Floats, least: Sequence[float]) -> Floats:
    """How far sources reach: the likeliest where errors have a Laplace distribution with the scale as mean size.

    Args:
        amounts: cases × sources.
        sizes: of the cases' errors.
        weights: of the cases.
        least: of each source's reach.
    """
    squares, weights = amounts ** 2, weights / weights.sum()

    def loss(reach: Floats) -> tuple[float, Floats]:
        variance = squares @ reach ** 2
        scale = np.sqrt(variance)
        value = weights @ (np.log(scale) + sizes / scale) + SHRINK * float(reach @ reach)
        slope = weights * (1.0 / scale - sizes / variance) / scale
        return float(value), (slope @ squares) * reach + 2 * SHRINK * reach

    found = scipy.optimize.minimize(loss, np.maximum(least, FIRST_REACH), jac=True, method="TNC",
                                    bounds=[(smallest, LARGEST_REACH) for smallest in least])
    return np.asarray(found.x)
