"""How far off the predicted ratio of two latencies may be. Errors of kernels that both models have cancel.

A kernel that takes the same share of both latencies makes the ratio no worse, however wrong its time is. What counts is the
*shift*: its share of the second latency less that of the first. Each source of error is a sum over the shifts:

- `measured`: of measured kernels, in quadrature, since their errors are independent;
- `predicted`: of predicted and estimated kernels times their doubts, in quadrature;
- `alike`: the same, but summed within each kernel type first: predictors err alike for kernels of a type;
- `host`: of the host's work, to the degree to which it limits both runs; kernels that cost the host about the same are one;
- `limited`: half the sum of the sizes of all shifts, to that degree: what the simulation of a host that limits both leaves;
- `always`: what composition leaves, for any two runs.

As in an interval of one latency (intervals.py), the *scale* adds the sources in quadrature, each with its reach. The interval
of the ratio's logarithm goes END scales to both sides of the prediction. Reaches and END are fitted to pairs of models measured
on an H200 (recipes/gate/fit_differences.py), and used for all targets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal, NamedTuple

from hase.learned.composition.intervals import for_any_host

REACH = {"measured": 0.02, "predicted": 1.3, "alike": 0.7, "host": 0.07, "limited": 0.044, "always": 0.003}
END = 2.2  # of the 90 % interval, in scales
HOST_CLASSES = 8  # of kernels by the host's work, for each factor of e
Provenance = Literal["measured", "predicted", "estimated"]


class KernelCost(NamedTuple):
    """What a kernel costs a run of a model.

    Attributes:
        type: the kernel type.
        runs: how often it runs.
        time_ms, host_ms: of one run: its time, and the host's work for it (0 where the host is not simulated).
        provenance: where its time comes from.
        doubt: the plausible size of its time's error, as a logarithm; 0 where it was measured steadily.
    """

    type: str
    runs: float
    time_ms: float
    host_ms: float
    provenance: Provenance
    doubt: float


class RunCosts(NamedTuple):
    """A predicted run: its latency, and its kernels by id. `host_span`: the factors to the latency with the fastest and the
    slowest plausible host, where the host's pace is unknown."""

    latency_ms: float
    kernels: Mapping[str, KernelCost]
    host_span: tuple[float, float] = (1.0, 1.0)


class DifferenceSources(NamedTuple):
    """The sources of error of a predicted ratio, each with its amount (see the module)."""

    measured: float = 0.0
    predicted: float = 0.0
    alike: float = 0.0
    host: float = 0.0
    limited: float = 0.0
    always: float = 1.0


def sources_of_difference(a: RunCosts, b: RunCosts) -> DifferenceSources:
    """The sources of error of the latency of `b` divided by that of `a`."""
    shares = [_shares(run, "time_ms") for run in (a, b)]
    host_shares = [_shares(run, "host_ms") for run in (a, b)]
    measured, predicted, moved = 0.0, 0.0, 0.0
    alike, host = defaultdict[str, float](float), defaultdict[int, float](float)
    for name, kernel in {**a.kernels, **b.kernels}.items():
        shift = shares[1].get(name, 0.0) - shares[0].get(name, 0.0)
        moved += abs(shift) / 2.0
        if kernel.host_ms:
            host_class = round(HOST_CLASSES * math.log(kernel.host_ms))
            host[host_class] += host_shares[1].get(name, 0.0) - host_shares[0].get(name, 0.0)
        if kernel.doubt:
            predicted += (shift * kernel.doubt) ** 2
            alike[kernel.type] += shift * kernel.doubt
        else:
            measured += shift ** 2
    limited = math.prod(min(1.0, sum(kernel.runs * kernel.host_ms for kernel in run.kernels.values()) / run.latency_ms)
                        for run in (a, b))
    return DifferenceSources(math.sqrt(measured), math.sqrt(predicted), math.hypot(*alike.values()),
                             limited * math.hypot(*host.values()), limited * moved)


def _shares(run: RunCosts, what: Literal["time_ms", "host_ms"]) -> dict[str, float]:
    """The share of the latency that each kernel takes, by id; together at most 1, although tracks overlap."""
    total_ms = {name: kernel.runs * getattr(kernel, what) for name, kernel in run.kernels.items()}
    whole_ms = max(run.latency_ms, sum(total_ms.values()))
    return {name: time_ms / whole_ms for name, time_ms in total_ms.items()}


def ratio_interval(a: RunCosts, b: RunCosts) -> tuple[float, float]:
    """The 90 % interval of the latency of `b` divided by that of `a`."""
    ratio = b.latency_ms / a.latency_ms
    amounts = sources_of_difference(a, b)._asdict()
    reach = END * math.hypot(*(REACH[name] * amount for name, amount in amounts.items()))
    least, most = sorted(of_b / of_a for of_a, of_b in zip(a.host_span, b.host_span, strict=True))
    low, high = for_any_host((math.exp(-reach), math.exp(reach)), least, 1.0, most)
    return low * ratio, high * ratio
