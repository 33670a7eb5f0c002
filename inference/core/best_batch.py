"""Which of several batches to take: the one with the most throughput, and the one with the most that keeps to an objective."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hase.inference.core.chances import VERY_LIKELY, said
from hase.inference.core.report import statistic
from hase.utils import cli

if TYPE_CHECKING:
    from hase.inference.core.answers import Prediction
    from hase.inference.sharing.shared_models import Slo


@dataclass(frozen=True)
class BestBatches:
    """Of predictions of one model that differ in their batch, the places of the best.

    Attributes:
        places: of all of them, by batch.
        others: their sizes besides the batch.
        throughput: the one with the most items per second.
        within_slo: of those that meet the objective, the one with the most; None where none does, or none is given.
        surely_within_slo: the same of those that very likely meet it.
    """

    places: tuple[int, ...]
    others: Mapping[str, int]
    throughput: int
    within_slo: int | None = None
    surely_within_slo: int | None = None

    def best_for(self, place: int) -> list[str]:
        """What the prediction at a place is the best for, in words of --json."""
        best = {"throughput": self.throughput, "throughput_within_slo": self.within_slo,
                "throughput_very_likely_within_slo": self.surely_within_slo}
        return [words for words, chosen in best.items() if chosen == place]


def best_batches(predictions: Sequence[Prediction], slos: Sequence[Slo | None],
                 models: Sequence[Hashable]) -> list[BestBatches]:
    """The best batches of each model that was predicted at several, at each combination of its other sizes. A run that needs
    more memory than the device has is never the best.

    Args:
        predictions: in any order.
        slos: how each compares with the objective, if there is one.
        models: what tells them apart; two predictions with the same may differ in sizes only.
    """
    groups: dict[tuple[Hashable, tuple[tuple[str, int], ...]], list[int]] = {}
    for place, prediction in enumerate(predictions):
        of_model = [other for other, model in zip(predictions, models, strict=True) if model == models[place]]
        in_batch = {name for name in prediction.dims if all(other.dims.get(name) == other.batch for other in of_model)}
        others = tuple((name, size) for name, size in prediction.dims.items() if name not in in_batch)
        groups.setdefault((models[place], others), []).append(place)
    found = (_best_of(places, dict(others), predictions, slos) for (_, others), places in groups.items()
             if len({predictions[place].batch for place in places}) > 1)
    return [best for best in found if best]


def _best_of(places: Sequence[int], others: Mapping[str, int], predictions: Sequence[Prediction],
             slos: Sequence[Slo | None]) -> BestBatches | None:
    """The best of the places; None where no run fits in the device's memory, or has a batch."""
    rates = {place: rate for place in places
             if (rate := predictions[place].items_per_second) and predictions[place].fits_memory is not False}

    def best(chosen: Sequence[int]) -> int | None:
        return max(chosen, key=lambda place: rates[place], default=None)

    throughput = best(list(rates))
    if throughput is None:
        return None
    compared = {place: slo for place in rates if (slo := slos[place]) is not None}
    return BestBatches(
        tuple(sorted(places, key=lambda place: predictions[place].batch or 0)), others, throughput,
        best([place for place, slo in compared.items() if slo.met]),
        best([place for place, slo in compared.items() if slo.chance > VERY_LIKELY]))


def said_of_batches(best: BestBatches, predictions: Sequence[Prediction], slos: Sequence[Slo | None], name: str) -> list[str]:
    """Sentences about the best batches of one model, which is called `name`."""
    chosen = predictions[best.throughput]
    lines = [f"{name}: the best batch for throughput is {chosen.batch}: {_rate(chosen)} at {chosen.latency_ms:.4g} ms"
             + ("; none larger was asked" if best.throughput == best.places[-1] else "")]
    compared = {place: slo for place in best.places if (slo := slos[place]) is not None}
    if not compared:
        return lines
    place = best.within_slo
    if place is None:
        place = min(compared, key=lambda place: compared[place].latency_ms)
        what = f"no batch keeps to {compared[place].limit_ms:g} ms; the nearest is {predictions[place].batch}"
    else:
        what = (f"the best batch for throughput within {compared[place].limit_ms:g} ms is {predictions[place].batch}: "
                f"{_rate(predictions[place])}")
    slo = compared[place]
    lines.append(f"{name}: {what}, {statistic(predictions[place], slo)} {slo.latency_ms:.4g} ms; that it is met is "
                 f"{said(slo.chance)}")
    if best.surely_within_slo is None:
        lines[-1] += "; of no batch is it very likely"
    elif best.surely_within_slo != place:
        surely = predictions[best.surely_within_slo]
        lines[-1] += f"; of batch {surely.batch} it is {said(compared[best.surely_within_slo].chance)}, with {_rate(surely)}"
    return lines


def _rate(prediction: Prediction) -> str:
    return f"{cli.cell(prediction.items_per_second)} items/s"
