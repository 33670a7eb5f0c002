"""Prediction intervals, and the sources of error of a predicted latency.

The simple interval is the same multiple of every prediction (`ErrorRange`). The width of the calibrated interval depends on
what a prediction is based on; it is calibrated on models whose collection was held out of everything.

An error is the logarithm of measured over predicted latency. Its plausible size, the *scale*, adds several sources in
quadrature: a constant, the mean error of predicted kernels, and how much of the latency is due to operators that were never
measured, to unmeasured forms and sizes, to the host, and to its pace. The weight (reach) of each source is fitted. The interval
reaches from `low` to `high` scales around the prediction (training/composition/calibration.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field

from hase.utils.config import Frozen

NoveltyKind = Literal["known", "unmeasured", "other form", "beyond"]
COVERAGE = 0.9  # of a prediction interval
LARGEST_LOG = 100.0  # of an interval's end: larger ones are useless and would overflow
LARGEST_END = 1e9  # of an interval, as a multiple of a prediction; larger values mean a damaged file
ALWAYS = "always"  # the constant source
PACE = "pace"  # the source that can only be fitted to runs at several paces
LARGEST_REACH = 10.0
# How many times as long as usual hosts with one kind of GPU take to dispatch. Measured with H200s: 1.15 to 1.6 times on other
# hosts than those of the shipped predictors, or with other users on the same host; 0.85 times in one session.
HOSTS = (0.85, 1.6)


class ErrorRange(Frozen):
    """A prediction interval as multiples of the prediction, which contains the latency of a share COVERAGE of models.
    `coverage` is that of the interval made from the other families' errors alone."""

    low: float = Field(ge=0, le=LARGEST_END)
    high: float = Field(ge=0, le=LARGEST_END)
    coverage: float


class Novelty(NamedTuple):
    """How a kernel differs from those in training. `times` is the factor by which its sizes exceed those, `doubt` the mean
    error of its time, as a logarithm (`Predictors.doubts`)."""

    kind: NoveltyKind
    times: float = 1.0
    doubt: float = 0.0

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the kernel's time in those sources that are shares of the latency, by field of `Sources`."""
        return {"predicted": float(self.kind in ("known", "beyond") and not self.doubt),
                "unmeasured": float(self.kind == "unmeasured"), "other_form": float(self.kind == "other form"),
                "beyond": math.log(self.times) if self.kind == "beyond" else 0.0}


KNOWN = Novelty("known")


class Sources(NamedTuple):
    """The sources of error of a predicted latency, each with its amount.

    Attributes:
        predicted: the share of the latency in predicted kernels of measured operators and forms without a known doubt.
        unmeasured: the share in kernels of operators that were never measured.
        other_form: the share in kernels of operators measured for other element types or ranks only.
        beyond: the share in kernels of sizes beyond training, times the logarithm of the factor.
        host: the squared share in which the host works: a host with time to spare hardly delays the GPU. (With each collection
            held out, `interval_score` is 4 to 12 % lower than with the share in which the GPU waits for the host.)
        doubt: the doubts of predicted kernels, weighted with their shares, in quadrature since their errors are independent.
        pace: `host` times the logarithm of the host's pace relative to its usual pace.
    """

    predicted: float = 0.0
    unmeasured: float = 0.0
    other_form: float = 0.0
    beyond: float = 0.0
    host: float = 0.0
    doubt: float = 0.0
    pace: float = 0.0

    @classmethod
    def of(cls, total_ms: float, weighted_ms: Mapping[str, float], doubt_ms: float, latency_ms: float, host_work_ms: float,
           pace: float) -> Self:
        """The sources of error from totals over a model's kernels.

        Args:
            total_ms: the GPU's time for all kernels.
            weighted_ms: the part of it that counts for each source that is a share (`Novelty.weights`).
            doubt_ms: each different kernel's time times its doubt, added in quadrature.
            host_work_ms: how long the host works (`pipeline.host_work_ms`).
        """
        per_ms = min(1.0, total_ms / latency_ms) / total_ms if total_ms and latency_ms else 0.0
        host = min(1.0, host_work_ms / latency_ms) ** 2 if latency_ms else 0.0
        return cls(**{source: time_ms * per_ms for source, time_ms in weighted_ms.items()}, host=host,
                   doubt=doubt_ms * per_ms, pace=host * abs(math.log(pace)))


def sources(kernels: Iterable[tuple[str, float, Novelty | None]], latency_ms: float, host_work_ms: float,
            pace: float = 1.0) -> Sources:
    """The sources of error of a predicted latency. `kernels` has each node's kernel id, the GPU's time (ms) for all runs of the
    node, and the novelty (None for a measured kernel)."""
    total_ms = 0.0
    weighted_ms, doubts_ms = dict.fromkeys(KNOWN.weights, 0.0), dict[str, float]()
    for name, time_ms, novelty in kernels:
        total_ms += time_ms
        if novelty is None:
            continue
        doubts_ms[name] = doubts_ms.get(name, 0.0) + time_ms * novelty.doubt
        for source, weight in novelty.weights.items():
            weighted_ms[source] += time_ms * weight
    return Sources.of(total_ms, weighted_ms, math.hypot(*doubts_ms.values()), latency_ms, host_work_ms, pace)


class CalibratedInterval(Frozen):
    """A prediction interval whose width depends on what a prediction is based on.

    Attributes:
        reach: the weight of each source of error, by name, as a logarithm of latency; includes the pace if that was learned.
        low, high: the interval's ends, in scales; `low` is not positive, `high` not negative.
        left_out: what was held out: each collection, or parts of the families.
        coverage: the share of predictions in the interval calibrated without them; families count equally.
    """

    reach: dict[str, Annotated[float, Field(ge=0, le=LARGEST_REACH)]]
    low: float = Field(le=0)
    high: float = Field(ge=0)
    left_out: Literal["collection", "family"]
    families: int
    coverage: float = Field(math.nan, allow_inf_nan=True)

    def scale(self, sources: Sources) -> float:
        """The plausible size of a prediction's error, as a logarithm."""
        return scale_of_error(self.reach, sources)

    @property
    def holds_paces(self) -> bool:
        """Whether the interval contains the doubt that remains once the host's pace is known."""
        return PACE in self.reach

    def ends(self, sources: Sources) -> tuple[float, float]:
        """The ends of a prediction's interval, as multiples of the prediction."""
        scale = self.scale(sources)
        return math.exp(self.low * scale), math.exp(min(self.high * scale, LARGEST_LOG))


def for_any_host(ends: tuple[float, float], fastest_ms: float, usual_ms: float, slowest_ms: float) -> tuple[float, float]:
    """The interval for a host of unknown pace: its own reach and that of possible paces, as logarithms in quadrature. `ends` is
    the interval for a known pace, as multiples of the prediction; the latencies are those with a host of each pace."""
    low, high = (math.hypot(math.log(end), math.log(host_ms / usual_ms))
                 for end, host_ms in zip(ends, (min(fastest_ms, usual_ms), max(slowest_ms, usual_ms)), strict=True))
    return math.exp(-low), math.exp(high)


def scale_of_error(reach: Mapping[str, float], sources: Sources) -> float:
    return math.hypot(reach.get(ALWAYS, 0.0), *(reach.get(name, 0.0) * amount for name, amount in sources._asdict().items()))
