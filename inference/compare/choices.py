"""Ranks predictions of models by latency, and chooses a model's best batch for throughput and for an objective.

Latencies per item are compared if batches differ.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hase.inference.prediction.answers import VERY_LIKELY, chance_text, slo_statistic
from hase.utils.text import cell

if TYPE_CHECKING:
    from hase.inference.prediction.answers import Prediction, Slo


def ranked_per_item(predictions: Sequence[Prediction]) -> bool:
    """Whether latencies per item are compared: batches differ, and every prediction has one."""
    batches = {prediction.batch for prediction in predictions}
    return len(batches) > 1 and all(batches)


def order_of(predictions: Sequence[Prediction]) -> list[int]:
    """The indices of predictions by rank: those that fit in memory first, fastest first."""
    per_item = ranked_per_item(predictions)
    return sorted(range(len(predictions)), key=lambda index: (predictions[index].fits_memory is False,
                                                              compared_ms(predictions[index], per_item)))


def compared_ms(prediction: Prediction, per_item: bool) -> float:
    """The latency by which predictions are ranked."""
    return prediction.latency_ms / (prediction.batch or math.inf) if per_item else prediction.latency_ms


def order_sentence(predictions: Sequence[Prediction]) -> str:
    """A sentence about ranked predictions: by what they are ranked, and whether the order of the first two is uncertain."""
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


@dataclass(frozen=True)
class BestBatches:
    """The best of a model's predictions that differ in their batch, as indices.

    Attributes:
        indices: the indices of all of them, by batch.
        others: the sizes other than the batch, by dimension.
        throughput: the one with the most items per second.
        within_slo: the same among those that meet the objective; None if there are none.
        surely_within_slo: the same among those that very likely meet it.
    """

    indices: tuple[int, ...]
    others: Mapping[str, int]
    throughput: int
    within_slo: int | None = None
    surely_within_slo: int | None = None

    def best_for(self, index: int) -> list[str]:
        """The criteria (throughput, objective) by which a prediction is the best, as --json names them."""
        best = {"throughput": self.throughput, "throughput_within_slo": self.within_slo,
                "throughput_very_likely_within_slo": self.surely_within_slo}
        return [words for words, chosen in best.items() if chosen == index]


def best_batches(predictions: Sequence[Prediction], slos: Sequence[Slo | None],
                 models: Sequence[Hashable]) -> list[BestBatches]:
    """The best batches of each model that was predicted at several, at each combination of its other sizes. A run that needs
    more memory than the device has is never the best. `models` are keys: predictions with equal keys differ only in sizes.
    """
    groups: dict[tuple[Hashable, tuple[tuple[str, int], ...]], list[int]] = {}
    for index, prediction in enumerate(predictions):
        same_model = [other for other, model in zip(predictions, models, strict=True) if model == models[index]]
        in_batch = {name for name in prediction.dims
                    if all(other.dims.get(name, other.batch) == other.batch for other in same_model)}
        others = tuple((name, size) for name, size in prediction.dims.items() if name not in in_batch)
        groups.setdefault((models[index], others), []).append(index)
    bests = (_best_of(indices, dict(others), predictions, slos) for (_, others), indices in groups.items()
             if len({predictions[index].batch for index in indices}) > 1)
    return [best for best in bests if best]


def _best_of(indices: Sequence[int], others: Mapping[str, int], predictions: Sequence[Prediction],
             slos: Sequence[Slo | None]) -> BestBatches | None:
    """The best of the predictions at `indices`; None if no run fits in the device's memory, or has a batch."""
    rates = {index: rate for index in indices
             if (rate := predictions[index].items_per_second) and predictions[index].fits_memory is not False}

    def best(chosen: Sequence[int]) -> int | None:
        return max(chosen, key=lambda index: rates[index], default=None)

    throughput = best(list(rates))
    if throughput is None:
        return None
    compared = {index: slo for index in rates if (slo := slos[index]) is not None}
    return BestBatches(
        tuple(sorted(indices, key=lambda index: predictions[index].batch or 0)), others, throughput,
        best([index for index, slo in compared.items() if slo.met]),
        best([index for index, slo in compared.items() if slo.chance > VERY_LIKELY]))


def best_batch_sentences(best: BestBatches, predictions: Sequence[Prediction], slos: Sequence[Slo | None],
                         name: str) -> list[str]:
    """Sentences about the best batches of the model `name`."""
    chosen = predictions[best.throughput]
    lines = [f"{name}: the best batch for throughput is {chosen.batch}: {_rate(chosen)} at {chosen.latency_ms:.4g} ms"
             + ("; none larger was asked" if best.throughput == best.indices[-1] else "")]
    compared = {index: slo for index in best.indices if (slo := slos[index]) is not None}
    if not compared:
        return lines
    index = best.within_slo
    if index is None:
        index = min(compared, key=lambda index: compared[index].latency_ms)
        statement = f"no batch keeps to {compared[index].limit_ms:g} ms; the nearest is {predictions[index].batch}"
    else:
        statement = (f"the best batch for throughput within {compared[index].limit_ms:g} ms is {predictions[index].batch}: "
                     f"{_rate(predictions[index])}")
    slo = compared[index]
    lines.append(f"{name}: {statement}, {slo_statistic(predictions[index], slo)} {slo.latency_ms:.4g} ms; that it is met is "
                 f"{chance_text(slo.chance)}")
    if best.surely_within_slo is None:
        lines[-1] += "; of no batch is it very likely"
    elif best.surely_within_slo != index:
        likely = predictions[best.surely_within_slo]
        chance = chance_text(compared[best.surely_within_slo].chance)
        lines[-1] += f"; of batch {likely.batch} it is {chance}, with {_rate(likely)}"
    return lines


def _rate(prediction: Prediction) -> str:
    return f"{cell(prediction.items_per_second)} items/s"
