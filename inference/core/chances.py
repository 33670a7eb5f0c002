"""How likely a latency keeps to a limit, by the interval of its prediction; and in words."""

from __future__ import annotations

import math
from statistics import NormalDist

END = NormalDist().inv_cdf(0.95)  # of an interval of nine tenths, in standard deviations from its middle
LEAST_SPREAD = 1e-6  # of a latency's logarithm: an interval may end at the prediction
VERY_LIKELY = 0.9  # what is more is "very likely"
UP_TO = ((0.1, "very unlikely"), (0.35, "unlikely"), (0.65, "about even"), (VERY_LIKELY, "likely"))


def chance_within(latency_ms: float, interval_ms: tuple[float, float], limit_ms: float) -> float:
    """How likely a predicted latency is within a limit, 0 to 1.

    The prediction is the middle of what is likely: half lies on each side of it, and the interval leaves out a twentieth below
    and a twentieth above. On each side, the latency's logarithm is distributed normally.
    """
    if not latency_ms:
        return 1.0
    off = math.log(limit_ms / latency_ms)
    end_ms = interval_ms[1] if off > 0 else interval_ms[0]
    spread = abs(math.log(end_ms / latency_ms)) / END if end_ms > 0 else math.inf
    return NormalDist().cdf(off / max(spread, LEAST_SPREAD))


def in_words(chance: float) -> str:
    """A chance (0 to 1) in words: "very unlikely" up to 10 %, "unlikely" up to 35 %, "about even" up to 65 %, "likely" up to
    90 %, and "very likely" above."""
    return next((words for most, words in UP_TO if chance <= most), "very likely")


def said(chance: float) -> str:
    """A chance (0 to 1) in words, with its number: "likely (80 %)"."""
    number = "over 99 %" if chance > 0.99 else "under 1 %" if chance < 0.01 else f"{100 * chance:.0f} %"
    return f"{in_words(chance)} ({number})"
