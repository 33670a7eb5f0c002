"""Keeps the predictions of one model at several sizes in order: a larger size takes no less time than a smaller one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inference.core.answers import Prediction
from training.composition.fitted import NEARLY_ALL


def never_falling(found: Sequence[Prediction]) -> list[Prediction]:
    """Predictions of a model at several sizes of its dynamic dimensions, none shorter than one at sizes that are no greater.

    Where the predictors say otherwise, the prediction at the greater sizes is raised to the other's latency, with a warning.
    Predictions that rest on measured kernels (NEARLY_ALL of their time) stay as they are.
    """
    return [_raised(one, found) for one in found]


def _raised(one: Prediction, others: Sequence[Prediction]) -> Prediction:
    below = [other for other in others if _no_greater(other.dims, one.dims)
             and not (_measured(one) and _measured(other))]
    longest = max(below, key=lambda other: other.latency_ms, default=one)
    if longest.latency_ms <= one.latency_ms:
        return one
    low, high = one.interval_ms
    shared = one.under_load
    if shared and longest.under_load:
        pairs = zip(shared.percentiles_ms, longest.under_load.percentiles_ms, strict=True)
        shared = shared.model_copy(update={"mean_ms": longest.latency_ms, "percentiles_ms": tuple(map(max, pairs))})
    return one.model_copy(update={
        "latency_ms": longest.latency_ms, "interval_ms": (low, max(high, longest.interval_ms[1])), "under_load": shared,
        "items_per_second": one.batch / longest.latency_ms * 1e3 if one.batch else None,
        "warnings": (*one.warnings, f"{one.model}: predicted as {one.latency_ms:.4g} ms, less than {longest.model}; "
                                    "taken to be as long as that")})


def _no_greater(dims: Mapping[str, int], than: Mapping[str, int]) -> bool:
    return dims.keys() == than.keys() and dims != than and all(size <= than[name] for name, size in dims.items())


def _measured(one: Prediction) -> bool:
    return one.time_share["measured"] >= NEARLY_ALL
