"""The chart of two models that share a GPU through MPS: the latency of each over the share of the threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hase.inference.sharing.shared_models import PERCENTILE
from hase.utils.pages.page import Axis, Chart, Limit, Series
from hase.utils.pages.scales import axis_for
from hase.utils.sharing_mode import SLICES, SetSharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hase.inference.sharing.shared_models import Pair


def share_chart(pairs: Sequence[Pair]) -> Chart:
    """The mean with its interval, and the 95th percentile, of both models over the share of the threads that the first may use.

    Args:
        pairs: the same two models under different ways; those with a share for each model are points, and each other way is a
            line at the first model's mean.
    """
    ways = [(SetSharing.parse(pair.sharing), pair) for pair in pairs]
    shared = sorted(((way.percent_of(0), pair) for way, pair in ways if len(way.percents) > 1), key=lambda point: point[0])
    shares = [float(share) for share, _ in shared]
    series = []
    alike = len({model.model for model in pairs[0].models}) == 1
    for place, model in enumerate(pairs[0].models):
        name = f"{model.model}, {('first', 'second')[place]}" if alike else model.model
        points = [pair.models[place] for _, pair in shared]
        lows, highs = ([point.mean_interval_ms[end] for point in points] for end in (0, 1))
        series += [Series(f"{name}: mean", shares, [point.under_load.mean_ms for point in points], lows, highs),
                   Series(f"{name}: p95", shares, [point.under_load.percentile_ms(PERCENTILE) for point in points],
                          dash="dashed")]
    limits = [Limit(f"the first, {'in time slices' if pair.sharing == SLICES else f'through {pair.sharing}'}",
                    pair.models[0].under_load.mean_ms) for way, pair in ways if len(way.percents) == 1]
    values = [value for one in series for value in one.y] + [limit.y for limit in limits]
    return Chart("Latency over the share of the threads", Axis("the first model's share of the threads (%)"),
                 axis_for("ms", values), series, limits)
