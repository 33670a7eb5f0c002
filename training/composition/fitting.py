"""Fits lines from kernel times to model latencies, holds models out, and makes prediction intervals from the errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from training.composition.fitted import Candidate, ErrorRange, Kind, Line, latency_ms
from training.composition.intervals import COVERAGE

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
LEAST_FOR_RANGE = 20  # held-out models; with fewer, the largest error is no 95th percentile
MODELS_FOR_NODES = 5  # fewer can't separate γ from α and β


def fit_line(sums_ms: Floats, measured_ms: Floats, nodes: Floats | None = None) -> Line:
    """The line that minimises Σ(latency / measured − 1)², with α > 0 and β ≥ 0.

    β and γ are 0 where there are too few different models to separate them from α.

    Args:
        sums_ms: Σ of each model, positive.
        measured_ms: its latency, positive.
        nodes: its number of working nodes; None for a line without γ.
    """
    ratio, inverse = sums_ms / measured_ms, 1.0 / measured_ms
    ones = np.ones(len(sums_ms))
    if nodes is not None and len(set(sums_ms.tolist())) >= MODELS_FOR_NODES:
        per_node = nodes / measured_ms
        (alpha, gamma, beta), *_ = np.linalg.lstsq(np.column_stack([ratio, per_node, inverse]), ones, rcond=None)
        if beta < 0:
            (alpha, gamma), *_ = np.linalg.lstsq(np.column_stack([ratio, per_node]), ones, rcond=None)
            beta = 0.0
        if alpha > 0:
            return Line(float(alpha), float(beta), float(gamma))
    if len(set(sums_ms.tolist())) > 1:
        (alpha, beta), *_ = np.linalg.lstsq(np.column_stack([ratio, inverse]), ones, rcond=None)
        if alpha > 0 and beta >= 0:
            return Line(float(alpha), float(beta))
    return Line(float(ratio.sum() / (ratio @ ratio)), 0.0)


def each_left_out(groups: Sequence[str], fit_and_predict: Callable[[Mask, Mask], Floats | Sequence[float]]) -> Floats:
    """Each model's latency (ms), predicted by what was fitted without its group.

    Args:
        groups: of each model.
        fit_and_predict: takes a mask of the models to fit to and one of those to predict; returns the latencies of the latter.
    """
    labels = np.array(groups)
    predicted = np.empty(len(labels))
    for group in set(groups):
        out = labels == group
        predicted[out] = fit_and_predict(~out, out)
    return predicted


def leave_out(sums_ms: Floats, measured_ms: Floats, groups: Sequence[str], nodes: Floats | None = None) -> Floats:
    """Each model's latency (ms), predicted by a line fitted without its group."""
    counts = np.zeros(len(groups)) if nodes is None else nodes

    def fit_and_predict(fit: Mask, out: Mask) -> Floats:
        line = fit_line(sums_ms[fit], measured_ms[fit], None if nodes is None else nodes[fit])
        return latency_ms(line, sums_ms[out], counts[out])

    return each_left_out(groups, fit_and_predict)


def error_range_of(predicted_ms: Floats, measured_ms: Floats, groups: Sequence[str]) -> ErrorRange | None:
    """The prediction interval that follows from the errors of held-out models; None for fewer than LEAST_FOR_RANGE models.

    It is a split-conformal interval (Lei et al., Distribution-free predictive inference for regression, 2018) of the ratio of
    measured to predicted latency: quantiles of the ratios that leave a tenth of them out, corrected for their number.
    """
    ratios = measured_ms / predicted_ms
    if len(ratios) < LEAST_FOR_RANGE:
        return None

    def bounds(of: Floats) -> tuple[float, float]:
        tail = (1.0 - COVERAGE) / 2
        upper = min(np.ceil((len(of) + 1) * (1.0 - tail)) / len(of), 1.0)
        return float(np.quantile(of, 1.0 - upper)), float(np.quantile(of, upper))

    inside, labels = [], np.array(groups)
    for group in sorted(set(groups)):
        low, high = bounds(ratios[labels != group])
        inside += ((ratios[labels == group] >= low) & (ratios[labels == group] <= high)).tolist()
    low, high = bounds(ratios)
    return ErrorRange(low=low, high=high, coverage=float(np.mean(inside)))


def mape(predicted_ms: Floats, measured_ms: Floats) -> float:
    """The mean absolute error, as a ratio."""
    return float(np.abs(predicted_ms / measured_ms - 1).mean())


def fit_candidate(label: str, kind: Kind, sums_ms: Floats, measured_ms: Floats, nodes: Floats,
                  groups: Sequence[str] | None) -> tuple[Candidate, Floats]:
    """A candidate with its errors, and the latency (ms) that it predicts for each model: held out by `groups`, or fitted.

    Where Σ itself is nearer to the models held out than the lines fitted without them are, it is taken as it is (α = 1, β = 0):
    the errors of few predicted kernels can mislead a line.
    """
    counted = nodes if kind == "sum_nodes" else None
    line = fit_line(sums_ms, measured_ms, counted)
    predicted = latency_ms(line, sums_ms, nodes) if groups is None else leave_out(sums_ms, measured_ms, groups, counted)
    if groups is not None and counted is None and mape(sums_ms, measured_ms) <= mape(predicted, measured_ms):
        line, predicted = Line(1.0, 0.0), sums_ms
    errors = np.abs(predicted / measured_ms - 1)
    return Candidate(
        label=label, kind=kind, alpha=line.alpha, beta_ms=line.beta_ms, node_ms=line.node_ms,
        cv_mape=float(errors.mean()) if groups is not None else None,
        cv_max=float(errors.max()) if groups is not None else None,
        fit_mape=mape(latency_ms(line, sums_ms, nodes), measured_ms), plain_mape=mape(sums_ms, measured_ms),
    ), predicted
