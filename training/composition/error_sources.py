"""What the error of a predicted latency may come from, as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

Strangeness = Literal["known", "unmeasured", "other form", "beyond"]


class Stranger(NamedTuple):
    """How a kernel differs from those that were learned from, and, if its sizes lie beyond theirs, how many times."""

    how: Strangeness
    times: float = 1.0


KNOWN = Stranger("known")


class Sources(NamedTuple):
    """What the error of a predicted latency may come from.

    Attributes:
        predicted: the share of the latency in which the GPU works on kernels that were predicted, of operators and forms that
            were measured; a ratio, as the following three.
        unmeasured: the same of operators that were never measured.
        other_form: … that were measured for other element types or ranks only.
        beyond: … of sizes beyond what was measured, times the logarithm of how many times.
        host: the share of the latency in which the GPU waits for the host.
    """

    predicted: float = 0.0
    unmeasured: float = 0.0
    other_form: float = 0.0
    beyond: float = 0.0
    host: float = 0.0


def sources(kernels: Iterable[tuple[float, Stranger | None]], latency_ms: float) -> Sources:
    """The sources of error of a predicted latency.

    Args:
        kernels: the GPU's time (ms) of each kernel, over all its runs, and how it differs from those that were learned from;
            None for a measured kernel.
        latency_ms: the prediction.
    """
    total_ms = 0.0
    of: dict[str, float] = dict.fromkeys(("known", "unmeasured", "other form", "beyond"), 0.0)
    for time_ms, stranger in kernels:
        total_ms += time_ms
        if stranger is not None:
            of[stranger.how] += time_ms * (math.log(stranger.times) if stranger.how == "beyond" else 1.0)
            of["known"] += time_ms if stranger.how == "beyond" else 0.0
    per_ms = min(1.0, total_ms / latency_ms) / total_ms if total_ms and latency_ms else 0.0
    return Sources(
        predicted=of["known"] * per_ms, unmeasured=of["unmeasured"] * per_ms, other_form=of["other form"] * per_ms,
        beyond=of["beyond"] * per_ms, host=1.0 - total_ms * per_ms)
