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
    whole, energy = run.prediction, None
    if learned is not None:
        found = energy_of(run, learned)
        energy = BriefEnergy(found.energy_j, found.interval_j, found.mean_power_w, found.rough_estimate)
    return BriefPrediction(whole.model, whole.latency_ms, whole.interval_ms, whole.rough_estimate, energy,
                           *((whole.peak_memory_mib, whole.fits_memory) if memory else ()))


def brief_predictions(batch: Batch, several: Sequence[bool], learned: EnergyModel | None = None,
                      memory: bool = False) -> list[BriefPrediction]:
    """The main numbers of the models of a batch. Models whose Ifs can take other branches come again at the end of the batch;
    `several` marks them.

    Raises:
        UserError: the energy of a model can't be predicted.
    """
    found, count = batch.latencies, len(several)
    latency, low_ms, high_ms = found.latency_ms, found.spans.low * found.latency_ms, found.spans.high * found.latency_ms
    for other, model in enumerate((index for index, has_other in enumerate(several) if has_other), count):
        low_ms[model], high_ms[model] = min(low_ms[model], low_ms[other]), max(high_ms[model], high_ms[other])
    names = [record.model for record in batch.records]
    answers = [BriefPrediction(*numbers) for numbers in zip(
        names[:count], latency[:count].tolist(), zip(low_ms[:count].tolist(), high_ms[:count].tolist(), strict=True),
        found.rough[:count].tolist(), strict=True)]
    if learned is not None:
        of = energies_of(batch, learned, kept_parts(batch, learned), latency, (low_ms, high_ms))
        energies = zip(of.energy_j.tolist(), zip((of.interval.low * of.energy_j).tolist(),
                                                 (of.interval.high * of.energy_j).tolist(), strict=True),
                       of.power_w.tolist(), of.rough.tolist(), strict=True)
        answers = [answer._replace(energy=BriefEnergy(*energy)) for answer, energy in zip(answers, energies, strict=False)]
    if memory:
        fitted = batch.conditions.fitted
        device_mib = device_memory_mib(fitted.target, fitted.predictors.sidecar.machines)
        peaks_mib = [batch.memory(index).peak_mib for index in range(count)]
        answers = [answer._replace(peak_memory_mib=peak_mib, fits_memory=None if device_mib is None else peak_mib <= device_mib)
                   for answer, peak_mib in zip(answers, peaks_mib, strict=True)]
    return answers
