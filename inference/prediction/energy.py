"""Predicts the energy of a model's run, alone on the device, from its latency and its kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hase.inference.prediction.batch import Floats, Mask, Spans, joined_spans
from hase.inference.prediction.uncertainty import UNKNOWN_SPAN, Span
from hase.learned.energy import Part, work_of_run
from hase.utils.config import Frozen
from hase.utils.errors import UserError

if TYPE_CHECKING:
    from hase.inference.prediction.batch import Batch
    from hase.inference.prediction.kernels import KernelInModel
    from hase.inference.prediction.run import PredictedRun
    from hase.learned.energy import EnergyModel
    from hase.records.kernel_record import Kernel

ENERGY_VERSION = 1
EnergyPart = tuple[float, float, bool]  # per run of a kernel: energy that depends on time, the rest, whether that is a guess
NOTABLE = 1.1  # a power that exceeds the highest measured one, or the device's limit, by more than this factor gets a warning
SCALED_FACTOR = 1.6  # uncertainty of energies scaled from another card; chosen by hand, since none was measured
GUESSED_FACTOR = 1.5  # uncertainty if no measured model had such work; chosen by hand


class EnergyPrediction(Frozen):
    """The energy that a run takes, if runs follow each other without a pause. `--json` prints it as it is.

    Attributes:
        model, target: as in `Prediction`.
        energy_j: of a run, with idle power.
        interval_j: 90 % prediction interval.
        idle_j: the energy of the idle device in the same time.
        mean_power_w, power_interval_w: while the model runs.
        batch: of the first input.
        energy_per_item_j, item_interval_j: of one item of the batch.
        latency_ms: that the energy is for.
        rough_estimate: whether the latency is one, or the work or power is unlike what was measured.
        warnings: what the reader should know.
    """

    version: int = ENERGY_VERSION
    model: str
    target: str
    energy_j: float
    interval_j: tuple[float, float]
    idle_j: float
    mean_power_w: float
    power_interval_w: tuple[float, float]
    batch: int | None
    energy_per_item_j: float | None
    item_interval_j: tuple[float, float] | None
    latency_ms: float
    rough_estimate: bool
    warnings: tuple[str, ...] = ()

    def columns(self) -> dict[str, Any]:
        """The columns of a table that show the energy."""
        return {"energy (J)": self.energy_j, "90 % between (J)": "{:.4g} and {:.4g}".format(*self.interval_j),
                "J/item": self.energy_per_item_j, "mean power (W)": self.mean_power_w,
                "90 % between (W)": "{:.4g} and {:.4g}".format(*self.power_interval_w)}


class Energies(NamedTuple):
    """The energy of each model of a batch; fields as in `EnergyPrediction`.

    Attributes:
        over_limit: the mean power without the device's power limit, divided by that limit; at least 1.
        guessed: whether a kernel's work is of a kind that no measured model had.
        above: its power divided by the highest that any measured model took; at least 1.
    """

    energy_j: Floats
    interval: Spans
    power_w: Floats
    power_interval: Spans
    over_limit: Floats
    guessed: Mask
    above: Floats
    rough: Mask


def energies_of(batch: Batch, learned: EnergyModel, parts: Sequence[EnergyPart], latency: Floats, ends_ms: Sequence[Floats],
                limited: bool = False) -> Energies:
    """The energies of all models of a batch.

    Args:
        parts: the energy of each kernel of the batch.
        latency: of the models, ms.
        ends_ms: the low and the high ends of the latencies' intervals.
        limited: whether the latencies already include the effect of the device's power limit.

    Raises:
        UserError: something else uses the device, or a run takes no time at all.
    """
    for record, latency_ms in zip(batch.records, latency.tolist(), strict=True):
        if batch.conditions.load or batch.conditions.shared_gpu:
            raise UserError(f"{record.model}: energy is predicted for a device that does nothing else; leave the load out "
                            "(--metrics, --probe, prometheus.url in the config)")
        if not latency_ms:
            raise UserError(f"{record.model}: a run takes no time, so there is no energy to predict")
    timed, fixed, guesses = np.array(parts, dtype=float).T
    busy_ms, timed_j, fixed_j = batch.totals(batch.gpu_ms), batch.totals(timed), batch.totals(fixed)
    limit_w = math.inf if learned.limit_w is None else learned.limit_w

    def total_j(end_ms: Floats) -> Floats:
        """The energy of the same work in another time, without a power limit."""
        longer_ms = busy_ms * (end_ms / latency)
        fits = np.minimum(1.0, np.divide(end_ms, longer_ms, out=np.ones_like(end_ms), where=longer_ms > 0))
        return learned.run_w * end_ms / 1e3 + fits * (end_ms / latency) * timed_j + fixed_j

    energy_j, low_j, high_j = (np.minimum(total_j(end_ms), limit_w * end_ms / 1e3) for end_ms in (latency, *ends_ms))
    over_limit = np.maximum(1.0, total_j(latency) / (limit_w * latency / 1e3)) if not limited else np.ones_like(latency)
    power_w, highest_w = 1e3 * energy_j / latency, max(model.power_w for model in learned.models)
    guessed, above = batch.any(guesses > 0), np.maximum(1.0, power_w / highest_w)
    exceeds_limit = over_limit > NOTABLE
    ones = np.ones_like(latency)
    interval = learned.interval
    learned_span = UNKNOWN_SPAN if interval is None else Span(interval.low, interval.high)
    scaled = SCALED_FACTOR if learned.scaled_from else 1.0
    spans = [Spans(learned_span.low * ones, learned_span.high * ones), Spans(ones / scaled, ones * scaled),
             Spans(np.where(guessed, 1.0 / GUESSED_FACTOR, 1.0), np.where(guessed, GUESSED_FACTOR, 1.0)),
             Spans(ones, np.where(exceeds_limit, over_limit, 1.0)),  # a device at its limit lowers its clocks, and is slower
             Spans(np.where(above > NOTABLE, 1.0 / above, 1.0), ones)]
    powers = np.array([1e3 * end_j / end_ms / power_w for end_j, end_ms in zip((low_j, high_j), ends_ms, strict=True)])
    return Energies(energy_j, joined_spans([*spans, Spans(low_j / energy_j, high_j / energy_j)]), power_w,
                    joined_spans([*spans, Spans(powers.min(axis=0), powers.max(axis=0))]), over_limit, guessed, above,
                    batch.latencies.rough | guessed | exceeds_limit | (above > NOTABLE)
                    | bool(interval is None or learned.scaled_from))


def energy_part(kernel: Kernel | None, known: KernelInModel | None, learned: EnergyModel) -> EnergyPart:
    """The energy of a kernel's run; zero for no kernel, and for one on the host."""
    if kernel is None or known is None or known.on_host:
        return 0.0, 0.0, False
    launches = float(kernel.moves_data) if known.launches is None else known.launches
    return learned.part_j(Part(kernel, 1.0, known.gpu_ms, launches))


def kept_parts(batch: Batch, learned: EnergyModel) -> list[EnergyPart]:
    """The energy of each kernel of a batch, cached with the kernel table."""
    known_parts = batch.energies.setdefault(id(learned), (learned, {}))[1]
    for index, key in enumerate(batch.keys):
        if key not in known_parts:
            known_parts[key] = energy_part(batch.kernels[index], batch.known[index], learned)
    return [known_parts[key] for key in batch.keys]


def energy_of(run: PredictedRun, learned: EnergyModel, limited: bool = False) -> EnergyPrediction:
    """The energy of a predicted run; `limited`: its latency already includes the effect of the device's power limit."""
    prediction, batch, index = run.prediction, run.run.batch, run.run.index
    latency, ends_ms = batch.latencies.latency_ms.copy(), [batch.latencies.latency_ms.copy() for _ in prediction.interval_ms]
    for batch_values, value in zip((latency, *ends_ms), (prediction.latency_ms, *prediction.interval_ms), strict=True):
        batch_values[index] = value  # which may have changed since
    energies = energies_of(batch, learned, kept_parts(batch, learned), latency, ends_ms, limited)
    energy_j, power_w, items = float(energies.energy_j[index]), float(energies.power_w[index]), prediction.batch
    span, power_span = energies.interval.of_model(index), energies.power_interval.of_model(index)
    interval_j = span.low * energy_j, span.high * energy_j
    return EnergyPrediction(
        model=prediction.model, target=prediction.target, energy_j=energy_j, interval_j=interval_j,
        idle_j=learned.idle_w * prediction.latency_ms / 1e3, mean_power_w=power_w,
        power_interval_w=(max(power_span.low * power_w, min(learned.idle_w, power_w)),
                          min(power_span.high * power_w, learned.limit_w or math.inf)), batch=items,
        energy_per_item_j=energy_j / items if items else None,
        item_interval_j=(interval_j[0] / items, interval_j[1] / items) if items else None, latency_ms=prediction.latency_ms,
        rough_estimate=prediction.rough_estimate or bool(energies.rough[index]), warnings=_warnings(run, learned, energies))


def parts_of_run(run: PredictedRun, times: float = 1.0) -> list[Part]:
    """The kernels that the device runs, with their times multiplied by `times`."""
    record = run.run.record
    return [Part(record.kernel_of(node), node.runs, times * known.gpu_ms,
                 float(record.kernel_of(node).moves_data) if known.launches is None else known.launches)
            for node, known in zip(record.nodes, run.run.nodes, strict=True) if not known.on_host]


def _warnings(run: PredictedRun, learned: EnergyModel, energies: Energies) -> tuple[str, ...]:
    """Reasons why an energy may be off although the latency is right."""
    index, warnings = run.run.index, []
    power_w, over_limit = float(energies.power_w[index]), float(energies.over_limit[index])
    if learned.interval is None:
        warnings.append(f"the energy was learned from {len(learned.models)} models, too few to say how far it may be off")
    if learned.scaled_from:
        warnings.append(f"the energy is that of {learned.scaled_from}, scaled by the power limits; none was measured on this "
                        "card")
    if energies.guessed[index]:
        kinds = learned.guessed(work_of_run(parts_of_run(run), run.prediction.latency_ms))
        warnings.append(f"no model whose energy was measured had work of the kind {', '.join(kinds)}")
    if over_limit > NOTABLE:
        warnings.append(f"the run would draw {over_limit * power_w:.0f} W, and the device's power limit is "
                        f"{learned.limit_w:.0f} W; it may take longer than predicted")
    if energies.above[index] > NOTABLE:
        warnings.append(f"a mean power of {power_w:.0f} W was predicted, and no model that was measured took more than "
                        f"{max(model.power_w for model in learned.models):.0f} W")
    return tuple(f"rough estimate: {warning}" for warning in warnings)
