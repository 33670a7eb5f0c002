"""The main numbers of thousands of predictions, as a search over models wants them: latency, interval, energy and memory.

They are those of `Predictor.predict`, without its warnings and its table of kernels. All models of a batch are put together
from their kernels at once; those that need more (bodies of loops, guesses, other versions, a load, a GPU that is shared) are
predicted one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.many_runs import hosts_work_ms, latencies_ms, off_gpu
from hase.inference.core.energy import ABOVE, GUESSED, SCALED, energy_of
from hase.inference.core.kernel_table import Batch, KernelTable
from hase.inference.core.memory import device_memory_mib, peak_memory
from hase.inference.core.run_modes import AS_USUAL
from hase.inference.core.uncertainty import (
    BEYOND_POWER,
    CERTAIN,
    FAR,
    FAR_OFF,
    OTHER_CUDNN,
    ROUGH,
    UNKNOWN,
    Span,
    fitted_span,
    hosts_between,
)
from hase.learned.composition.fitted import latency_ms
from hase.learned.composition.intervals import ALWAYS, KNOWN, LARGEST_LOG, PACE
from hase.utils.errors import UserError

if TYPE_CHECKING:
    from hase.graph_model.simulation.pipeline import PipelineCosts
    from hase.inference.core.conditions import Conditions
    from hase.inference.core.model_run import PredictedRun
    from hase.inference.core.sources import Source
    from hase.learned.composition.intervals import CalibratedInterval
    from hase.learned.energy import EnergyModel
    from hase.records.kernel_record import ModelRecord

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class BriefEnergy(NamedTuple):
    """The energy of a run, as `EnergyPrediction` has it."""

    energy_j: float
    interval_j: tuple[float, float]
    mean_power_w: float
    rough_estimate: bool


class BriefPrediction(NamedTuple):
    """The main numbers of a prediction, as `Prediction` has them.

    Attributes:
        energy: None unless it was asked for.
        peak_memory_mib, fits_memory: the same; `fits_memory` is None too where the device's memory is not known.
    """

    model: str
    latency_ms: float
    interval_ms: tuple[float, float]
    rough_estimate: bool
    energy: BriefEnergy | None = None
    peak_memory_mib: float | None = None
    fits_memory: bool | None = None


class Wanted(NamedTuple):
    """What is wanted besides latencies."""

    energy: EnergyModel | None = None
    memory: bool = False


class _Spans(NamedTuple):
    """A `Span` for each model."""

    low: Floats
    high: Floats


class _Latencies(NamedTuple):
    """The latency of each model, its interval as factors, and whether it is a rough estimate."""

    latency_ms: Floats
    spans: _Spans
    rough: Mask


class BriefPredictions:
    """Predicts batch after batch under the same conditions; what is known of kernels is kept between them."""

    def __init__(self, conditions: Conditions, wanted: Wanted, one_by_one: Callable[[Source], PredictedRun]) -> None:
        """Prepares.

        Args:
            conditions: what the predictions hold for.
            wanted: what else is wanted.
            one_by_one: predicts a model for which the short way is not enough.
        """
        self._conditions, self._wanted, self._one_by_one = conditions, wanted, one_by_one
        self._table = KernelTable(conditions, wanted.energy)
        used = conditions.used
        self._together = conditions.shared_gpu is None and conditions.run_mode == AS_USUAL and not conditions.load and (
            conditions.costs is not None if used.kind == "pipeline" else used.kind in ("sum", "sum_nodes"))
        fitted = conditions.fitted
        self._device_mib = device_memory_mib(fitted.target, fitted.predictors.sidecar.machines)

    def of(self, models: Sequence[tuple[Source, ModelRecord]]) -> list[BriefPrediction]:
        """The predictions of a batch of models with their records, in their order.

        Raises:
            UserError: a model can't be predicted, or its energy.
        """
        numbers = self._table.numbers([record for _, record in models]) if self._together else [None] * len(models)
        usual = [(record, of_model) for (_, record), of_model in zip(models, numbers, strict=True) if of_model is not None]
        answers = iter(self._of_usual(usual) if usual else [])
        return [self._of_run(self._one_by_one(source)) if of_model is None else next(answers)
                for (source, _), of_model in zip(models, numbers, strict=True)]

    def _of_run(self, run: PredictedRun) -> BriefPrediction:
        """The main numbers of a prediction that was made by itself."""
        whole = run.prediction
        energy = None
        if self._wanted.energy is not None:
            found = energy_of(run, self._wanted.energy)
            energy = BriefEnergy(found.energy_j, found.interval_j, found.mean_power_w, found.rough_estimate)
        memory = (whole.peak_memory_mib, whole.fits_memory) if self._wanted.memory else (None, None)
        return BriefPrediction(whole.model, whole.latency_ms, whole.interval_ms, whole.rough_estimate, energy, *memory)

    def _of_usual(self, models: Sequence[tuple[ModelRecord, list[int]]]) -> list[BriefPrediction]:
        """The predictions of models with the numbers of their kernels."""
        batch = self._table.batch([record.model for record, _ in models], [of_model for _, of_model in models])
        found = _latencies(batch, self._conditions)
        low_ms, high_ms = found.spans.low * found.latency_ms, found.spans.high * found.latency_ms
        answers = [BriefPrediction(*numbers) for numbers in zip(
            batch.models, found.latency_ms.tolist(), zip(low_ms.tolist(), high_ms.tolist(), strict=True),
            found.rough.tolist(), strict=True)]
        if self._wanted.energy is not None:
            energies = _energies(batch, self._wanted.energy, found, low_ms, high_ms)
            answers = [answer._replace(energy=energy) for answer, energy in zip(answers, energies, strict=True)]
        if self._wanted.memory:
            answers = [self._with_memory(answer, *model) for answer, model in zip(answers, models, strict=True)]
        return answers

    def _with_memory(self, answer: BriefPrediction, record: ModelRecord, numbers: Sequence[int]) -> BriefPrediction:
        peak_mib = peak_memory(record, layouts=self._table.layouts(record, numbers)).peak_mib
        return answer._replace(peak_memory_mib=peak_mib,
                               fits_memory=None if self._device_mib is None else peak_mib <= self._device_mib)


def _totals(batch: Batch, amounts: Floats) -> Floats:
    """The sum over the nodes of each model, given the amount of each kernel."""
    total: Floats = amounts[batch.runs].sum(axis=1)
    return total


def _in_quadrature(batch: Batch, amounts: Floats) -> Floats:
    """The amounts of each model's different kernels, added in quadrature, given that of each; those of a kernel's nodes are
    summed."""
    models, nodes = np.nonzero(amounts[batch.runs])
    kernels = batch.runs[models, nodes]
    _, places, counts = np.unique(models * len(amounts) + kernels, return_inverse=True, return_counts=True)
    squares = np.zeros(batch.runs.shape)  # added in the order of the nodes, as `_totals` does, and not of the batch's kernels
    squares[models, nodes] = counts[places] * amounts[kernels] ** 2  # for each of as many nodes
    return np.asarray(np.sqrt(squares.sum(axis=1)))


def _any(batch: Batch, kernels: Mask) -> Mask:
    """Whether each model has one of these kernels."""
    return np.asarray(kernels[batch.runs].any(axis=1) if kernels.any() else np.zeros(len(batch.models), dtype=bool))


class _Composed:
    """The latencies of a batch, as `ModelRun.composed` has them, with kernels at some ends of their plausible times."""

    def __init__(self, batch: Batch, conditions: Conditions) -> None:
        self._batch, self._conditions, columns = batch, conditions, batch.columns
        self._beside = off_gpu(columns.kernels(), columns.mask("on_host"), batch.runs)
        self.latency_ms = self.at(conditions.costs)

    def at(self, costs: PipelineCosts | None, time_times: Floats | float = 1.0, launch_times: Floats | float = 1.0) -> Floats:
        """The latencies if each kernel's time and launches are so many times as large."""
        batch, used, columns = self._batch, self._conditions.used, self._batch.columns
        if used.kind == "pipeline" and costs is not None:
            kernels = columns.kernels(time_times, launch_times)
            return np.maximum(latencies_ms(batch.runs, kernels, costs, self._beside), _totals(batch, kernels.gpu_ms))
        return np.asarray(latency_ms(used, _totals(batch, columns["time_ms"] * time_times), _totals(batch, columns["works"])))

    def _relative(self, low_ms: Floats, high_ms: Floats) -> _Spans:
        """The factors from the latencies to other ones; 1 for a model that takes no time."""
        return _Spans(*(np.divide(end_ms, self.latency_ms, out=np.ones_like(end_ms), where=self.latency_ms > 0)
                        for end_ms in (low_ms, high_ms)))

    def moved_by(self, kernels: Mask) -> _Spans:
        """The factors by which the latencies move if these kernels are at the low ends, or all at the high ends, of their
        times."""
        columns = self._batch.columns
        return self._relative(*(self.at(self._conditions.costs, np.where(kernels, columns[f"time_{end}"], 1.0),
                                        np.where(kernels, columns[f"launches_{end}"], 1.0)) for end in ("low", "high")))

    def moved_by_host(self) -> _Spans | None:
        """The factors by which they move with the host's pace (`model_run.hosts_span`); None where it does not matter, or the
        calibrated interval holds it."""
        pace, usual, used = self._conditions.pace, self._conditions.usual_costs, self._conditions.used
        if pace is None or usual is None or used.assumed or (
                used.calibrated and used.calibrated.holds_paces and pace.ratio is not None):
            return None
        ends_ms = [self.at(usual.at_pace(end)) for end in hosts_between(pace.ratio)]
        return self._relative(np.minimum.reduce(ends_ms), np.maximum.reduce(ends_ms))


def _latencies(batch: Batch, conditions: Conditions) -> _Latencies:
    """As `model_run` has the latency of each model, and how sure it is."""
    columns, fitted, used = batch.columns, conditions.fitted, conditions.used
    composed = _Composed(batch, conditions)
    latency = composed.latency_ms
    everything = np.ones(len(columns["time_ms"]), dtype=bool)
    of_kernels, by_rough = composed.moved_by(everything), composed.moved_by(columns.mask("rough"))
    amounts = _sources(batch, latency, conditions)
    if used.calibrated is not None:
        fit = _calibrated(used.calibrated, amounts)
        moved = composed.moved_by(~columns.mask("calibrated"))
    else:
        fit, moved = _fitted(batch, conditions), of_kernels
    hosts = composed.moved_by_host()
    shortest_ms = min((model.predicted_ms for model in used.models), default=0.0)
    times = np.maximum(np.divide(shortest_ms, latency, out=np.ones_like(latency), where=latency > 0), 1.0)
    short = times ** BEYOND_POWER
    spans = [fit, moved, _Spans(1.0 / short, short), *([hosts] if hosts else [])]
    if fitted.sheet_range:
        spans.append(_everywhere(Span(fitted.sheet_range.low, fitted.sheet_range.high), latency))
    joined = _joined(spans)
    power = OTHER_CUDNN if fitted.other_cudnn else 1.0
    rough = ((by_rough.high > 1.0 + ROUGH) | (by_rough.low < 1.0 - ROUGH) | (times >= FAR)
             | (amounts["other_form"] > ROUGH) | (amounts["doubt"] >= FAR_OFF))
    return _Latencies(latency, _Spans(np.minimum(joined.low, of_kernels.low) ** power,
                                      np.maximum(joined.high, of_kernels.high) ** power), rough)


def _everywhere(span: Span, like: Floats) -> _Spans:
    return _Spans(np.full_like(like, span.low), np.full_like(like, span.high))


def _joined(spans: Sequence[_Spans]) -> _Spans:
    """As `uncertainty.joined`."""
    with np.errstate(divide="ignore"):
        low = np.sqrt(sum(np.log(np.minimum(span.low, 1.0)) ** 2 for span in spans))
    return _Spans(np.exp(-low), np.exp(np.sqrt(sum(np.log(np.maximum(span.high, 1.0)) ** 2 for span in spans))))


def _sources(batch: Batch, latency: Floats, conditions: Conditions) -> dict[str, Floats]:
    """What the error of each model may come from, as `intervals.sources` has it."""
    columns, costs, pace = batch.columns, conditions.costs, conditions.pace
    kernels, host = columns.kernels(), np.zeros_like(latency)
    gpu_ms = kernels.gpu_ms
    total_ms = _totals(batch, gpu_ms)
    busy = (total_ms > 0) & (latency > 0)
    within = np.minimum(1.0, np.divide(total_ms, latency, out=np.zeros_like(latency), where=busy))
    per_ms = np.divide(within, total_ms, out=np.zeros_like(latency), where=busy)
    if conditions.used.kind == "pipeline" and costs is not None:
        work_ms = hosts_work_ms(batch.runs, kernels, costs)
        host = np.minimum(1.0, np.divide(work_ms, latency, out=host, where=latency > 0)) ** 2
    off = abs(math.log(pace.ratio)) if pace and pace.ratio else 0.0
    return {"host": host, PACE: host * off, "doubt": _in_quadrature(batch, gpu_ms * columns["doubt"]) * per_ms,
            **{name: _totals(batch, gpu_ms * columns[name]) * per_ms for name in KNOWN.weights}}


def _calibrated(interval: CalibratedInterval, amounts: Mapping[str, Floats]) -> _Spans:
    """The calibrated interval of each model, as `CalibratedInterval.ends` has it, by what its error may come from."""
    scale = np.sqrt(interval.reach.get(ALWAYS, 0.0) ** 2 + sum(
        (interval.reach.get(name, 0.0) * amount) ** 2 for name, amount in amounts.items()))
    return _Spans(np.exp(interval.low * scale), np.exp(np.minimum(interval.high * scale, LARGEST_LOG)))


def _fitted(batch: Batch, conditions: Conditions) -> _Spans:
    """How far models were off that were held out of the composition's fit, by the share of their time that was measured."""
    times = batch.columns["time_ms"]
    total_ms, measured_ms = _totals(batch, times), _totals(batch, times * batch.columns["measured"])
    shares = np.divide(measured_ms, total_ms, out=np.zeros_like(total_ms), where=total_ms > 0)
    spans: dict[object, Span] = {}
    ends = []
    for share in shares.tolist():
        interval = conditions.used.interval_for(share)
        if id(interval) not in spans:
            spans[id(interval)] = fitted_span(conditions.used, conditions.run_mode, share, conditions.device)
        ends.append(spans[id(interval)])
    low, high = zip(*ends, strict=True)
    return _Spans(np.array(low), np.array(high))


def _energies(batch: Batch, learned: EnergyModel, found: _Latencies, low_ms: Floats, high_ms: Floats) -> list[BriefEnergy]:
    """As `energy.energy_of` has the energy of each model.

    Raises:
        UserError: a run takes no time at all.
    """
    columns, latency = batch.columns, found.latency_ms
    if not latency.all():
        raise UserError(f"{batch.models[int(np.argmin(latency))]}: a run takes no time, so there is no energy to predict")
    busy_ms = _totals(batch, columns.kernels().gpu_ms)
    timed_j, fixed_j = _totals(batch, columns["timed_j"]), _totals(batch, columns["fixed_j"])
    limit_w = math.inf if learned.limit_w is None else learned.limit_w

    def total_j(end_ms: Floats) -> Floats:
        """Of runs that take as long, since their kernels do, without a power limit."""
        longer_ms = busy_ms * (end_ms / latency)
        fits = np.minimum(1.0, np.divide(end_ms, longer_ms, out=np.ones_like(end_ms), where=longer_ms > 0))
        return learned.run_w * end_ms / 1e3 + fits * (end_ms / latency) * timed_j + fixed_j

    unlimited_j = total_j(latency)
    energy_j, low_j, high_j = (np.minimum(total_j(end_ms), limit_w * end_ms / 1e3) for end_ms in (latency, low_ms, high_ms))
    over_limit = np.maximum(1.0, unlimited_j / (limit_w * latency / 1e3))
    power_w, most_w = 1e3 * energy_j / latency, max(model.power_w for model in learned.models)
    guessed, over, above = _any(batch, columns.mask("guessed")), over_limit > ABOVE, power_w > ABOVE * most_w
    whole = Span(1.0 / UNKNOWN, UNKNOWN) if learned.interval is None else Span(learned.interval.low, learned.interval.high)
    spans = [_everywhere(whole, latency),
             _everywhere(Span(1.0 / SCALED, SCALED) if learned.scaled_from else CERTAIN, latency),
             _Spans(np.where(guessed, 1.0 / GUESSED, 1.0), np.where(guessed, GUESSED, 1.0)),
             _Spans(np.ones_like(latency), np.where(over, over_limit, 1.0)),
             _Spans(np.where(above, most_w / power_w, 1.0), np.ones_like(latency))]
    span = _joined([*spans, _Spans(low_j / energy_j, high_j / energy_j)])
    rough = found.rough | guessed | over | above | bool(learned.interval is None or learned.scaled_from)
    return [BriefEnergy(*numbers) for numbers in zip(
        energy_j.tolist(), zip((span.low * energy_j).tolist(), (span.high * energy_j).tolist(), strict=True),
        power_w.tolist(), rough.tolist(), strict=True)]
