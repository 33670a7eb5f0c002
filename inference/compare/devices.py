"""Compares a model on several devices: what each takes, what a million items cost there, and where its numbers come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from hase.inference.prediction.answers import Prediction, ReadableResult, chance_within
from hase.inference.prediction.energy import EnergyPrediction
from hase.inference.prediction.targets import CardPredictors
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.logger import get_logger, progress

if TYPE_CHECKING:
    from hase.inference.library.predictor import Predictor
    from hase.inference.prediction.conditions import Options
    from hase.inference.prediction.sources import Source

log = get_logger("compare")
Basis = Literal["measured card", "data sheet", "corrected data sheet"]


class DeviceAnswer(Frozen):
    """A model on one device.

    Attributes:
        device: its name, as it was given.
        basis: what its predictions rest on.
        prediction: at one size.
        energy: None where no energies were learned.
        price_per_hour: of the device, in any currency.
        cost_per_million_items: in that currency.
    """

    device: str
    basis: Basis
    prediction: Prediction
    energy: EnergyPrediction | None = None
    price_per_hour: float | None = None
    cost_per_million_items: float | None = None

    def row(self, limit_ms: float | None = None) -> dict[str, Any]:
        """The table row; with a limit, how likely the latency keeps to it."""
        prediction, fits = self.prediction, self.prediction.fits_memory
        low_ms, high_ms = prediction.interval_ms
        row = {"device": self.device, "batch": prediction.batch, "latency (ms)": prediction.latency_ms, "low (ms)": low_ms,
               "high (ms)": high_ms, "items/s": prediction.items_per_second,
               "J/item": self.energy and self.energy.energy_per_item_j, "peak memory (MiB)": prediction.peak_memory_mib,
               "fits": "not known" if fits is None else "yes" if fits else "no"}
        if self.price_per_hour is not None:
            row["a million items"] = self.cost_per_million_items
        if limit_ms:
            row[f"chance of {limit_ms:g} ms"] = f"{chance_within(prediction.latency_ms, prediction.interval_ms, limit_ms):.0%}"
        return row | {"from": self.basis, "rough estimate": "yes" if prediction.rough_estimate else "no"}


class DeviceComparison(ReadableResult):
    """A model on several devices, sorted by cost, or by latency without prices; devices whose memory is too small come last.
    Version 1 is the first.

    Attributes:
        model: its name.
        answers: one for each device and size.
    """

    version: int = 1
    model: str
    answers: tuple[DeviceAnswer, ...]

    def rows(self, limit_ms: float | None = None) -> list[dict[str, Any]]:
        """A row for each device and size; with a limit, how likely the latency keeps to it."""
        return [answer.row(limit_ms) for answer in self.answers]

    @property
    def warnings(self) -> list[tuple[str, tuple[str, ...]]]:
        """The devices, each with the warnings of its predictions."""
        return [(answer.device, (*answer.prediction.warnings, *(answer.energy.warnings if answer.energy else ())))
                for answer in self.answers]


def compare_on(predictors: Mapping[str, Predictor], model: Source, sizes: Sequence[Mapping[str, int]],
               prices: Mapping[str, float], **options: Unpack[Options]) -> DeviceComparison:
    """Compares a model at some sizes on the devices of `predictors`, by their names. Prices are per hour, by device.

    Raises:
        UserError: as for a single prediction.
    """
    answers = []
    for device, predictor in progress(list(predictors.items()), "devices"):
        try:
            _ = predictor.learned_energy  # raises an error without one
            energy_known = True
        except UserError as error:
            log.warning("%s: no energy: %s", device, error)
            energy_known = False
        on_gpu = predictor.fitted.target.flavour.device == "cuda"
        for dims in sizes:
            asked: Options = {**options, "dims": dims}
            if not on_gpu:
                asked["host_pace"] = None
            run = predictor.run(model, **asked)
            price, rate = prices.get(device), run.prediction.items_per_second
            answers.append(DeviceAnswer(
                device=device, basis=_basis(predictor), prediction=run.prediction,
                energy=predictor.energy(run) if energy_known else None, price_per_hour=price,
                cost_per_million_items=price / 3600 * 1e6 / rate if price is not None and rate else None))
    return ranked(answers[0].prediction.model.partition("@")[0], answers)


def ranked(model: str, answers: Sequence[DeviceAnswer]) -> DeviceComparison:
    """The comparison with the best device first."""
    return DeviceComparison(model=model, answers=tuple(sorted(answers, key=lambda one: (
        one.prediction.fits_memory is False, one.cost_per_million_items or math.inf, one.prediction.latency_ms))))


def _basis(predictor: Predictor) -> Basis:
    predictors = predictor.fitted.predictors
    if not isinstance(predictors, CardPredictors):
        return "measured card"
    return "corrected data sheet" if predictors.seen_ms else "data sheet"
