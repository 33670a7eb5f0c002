"""Several models, the fastest first: by latency, or by latency per item where their batches differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hase.inference.core.answers import Prediction


def ranked_per_item(predictions: Sequence[Prediction]) -> bool:
    """Whether latencies per item are compared: batches differ, and every prediction has one."""
    batches = {prediction.batch for prediction in predictions}
    return len(batches) > 1 and all(batches)


def order_of(predictions: Sequence[Prediction]) -> list[int]:
    """The places of predictions in their order of rank: those that fit in memory first, and the fastest of them."""
    per_item = ranked_per_item(predictions)
    return sorted(range(len(predictions)), key=lambda place: (predictions[place].fits_memory is False,
                                                              compared_ms(predictions[place], per_item)))


def compared_ms(prediction: Prediction, per_item: bool) -> float:
    """The latency that is compared."""
    return prediction.latency_ms / (prediction.batch or math.inf) if per_item else prediction.latency_ms


def said_of_order(predictions: Sequence[Prediction]) -> str:
    """A sentence about ranked predictions: by what they are ranked, and whether the first two may change places."""
    per_item = ranked_per_item(predictions)
    sentence = f"ranked by {'latency per item, since batches differ' if per_item else 'latency'}"
    if len(predictions) < 2:
        return sentence
    first, second = predictions[:2]
    ratio = compared_ms(second, per_item) / compared_ms(first, per_item)
    sentence += f": {first.model} is {ratio:.3g} times as fast as {second.model}"
    high_ms, low_ms = (end * compared_ms(one, per_item) / one.latency_ms
                       for one, end in ((first, first.interval_ms[1]), (second, second.interval_ms[0])))
    return sentence + (", but their intervals overlap" if high_ms > low_ms else ", and their intervals do not overlap")
