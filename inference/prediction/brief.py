"""The main numbers of a prediction (latency, interval, energy, memory), for searches over thousands of models.

They equal those of `Predictor.predict`, without warnings and the table of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hase.inference.memory.session import device_memory_mib
from hase.inference.prediction.energy import energies_of, energy_of, kept_parts

if TYPE_CHECKING:
    from hase.inference.prediction.batch import Batch
    from hase.inference.prediction.run import PredictedRun
    from hase.learned.energy import EnergyModel


class BriefEnergy(NamedTuple):
    """The energy of a run; fields as in `EnergyPrediction`."""

    energy_j: float
    interval_j: tuple[float, float]
    mean_power_w: float
    rough_estimate: bool


class BriefPrediction(NamedTuple):
    """The main numbers of a prediction, as in `Prediction`. Energy and memory are None unless asked for; `fits_memory` also
    where the device's memory is unknown.
    """

    model: str
    latency_ms: float
    interval_ms: tuple[float, float]
    rough_estimate: bool
    energy: BriefEnergy | None = None
    peak_memory_mib: float | None = None
    fits_memory: bool | None = None


def brief_prediction(run: PredictedRun, learned: EnergyModel | None = None, memory: bool = False) -> BriefPrediction:
    """Extracts the main numbers from a full answer, with energy and memory if wanted."""
    full, energy = run.prediction, None
    if learned is not None:
        full_energy = energy_of(run, learned)
        energy = BriefEnergy(full_energy.energy_j, full_energy.interval_j, full_energy.mean_power_w, full_energy.rough_estimate)
    return BriefPrediction(full.model, full.latency_ms, full.interval_ms, full.rough_estimate, energy,
                           *((full.peak_memory_mib, full.fits_memory) if memory else ()))


def brief_predictions(batch: Batch, has_branches: Sequence[bool], learned: EnergyModel | None = None,
                      memory: bool = False) -> list[BriefPrediction]:
    """The main numbers of the models of a batch. Raises UserError if the energy of a model can't be predicted.

    `has_branches` marks models whose Ifs can take other branches. They come again, with these, at the end of the batch.
    """
    latencies, count = batch.latencies, len(has_branches)
    latency_ms = latencies.latency_ms
    low_ms, high_ms = latencies.spans.low * latency_ms, latencies.spans.high * latency_ms
    for other, model in enumerate((index for index, marked in enumerate(has_branches) if marked), count):
        low_ms[model], high_ms[model] = min(low_ms[model], low_ms[other]), max(high_ms[model], high_ms[other])
    names = [record.model for record in batch.records]
    answers = [BriefPrediction(*numbers) for numbers in zip(
        names[:count], latency_ms[:count].tolist(), zip(low_ms[:count].tolist(), high_ms[:count].tolist(), strict=True),
        latencies.rough[:count].tolist(), strict=True)]
    if learned is not None:
        energies = energies_of(batch, learned, kept_parts(batch, learned), latency_ms, (low_ms, high_ms))
        intervals_j = zip(*((end * energies.energy_j).tolist() for end in (energies.interval.low, energies.interval.high)),
                          strict=True)
        numbers_by_model = zip(energies.energy_j.tolist(), intervals_j, energies.power_w.tolist(), energies.rough.tolist(),
                               strict=True)
        answers = [answer._replace(energy=BriefEnergy(*numbers))
                   for answer, numbers in zip(answers, numbers_by_model, strict=False)]
    if memory:
        fitted = batch.conditions.fitted
        device_mib = device_memory_mib(fitted.target, fitted.predictors.sidecar.machines)
        peaks_mib = [batch.memory(index).peak_mib for index in range(count)]
        answers = [answer._replace(peak_memory_mib=peak_mib, fits_memory=None if device_mib is None else peak_mib <= device_mib)
                   for answer, peak_mib in zip(answers, peaks_mib, strict=True)]
    return answers
