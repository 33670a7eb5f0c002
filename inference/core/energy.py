"""The energy of a model's run on a device that does nothing else, from its predicted latency and its kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hase.inference.core.uncertainty import UNKNOWN, Span, joined
from hase.learned.energy import RUN, Part, work_of_run
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen

if TYPE_CHECKING:
    from hase.inference.core.model_run import PredictedRun
    from hase.learned.energy import EnergyModel, RunEnergy

ENERGY_VERSION = 1
ABOVE = 1.1  # times the highest mean power that was measured; more is marked, since a device limits its power
SCALED = 1.6  # how far the energy of a card may be off that is scaled from another one: a choice, since none was measured
GUESSED = 1.5  # how far an energy may be off where work of the run is of a kind that no measured model had: a choice


class EnergyPrediction(Frozen):
    """What a run takes of the device's energy, when runs follow each other without a pause. `--json` prints it as it is.

    Attributes:
        model, target: the record's name, and the name of the target.
        energy_j: of a run; it includes the device's idle power during the run.
        interval_j: the range around it that held nine of ten models whose family was held out, widened by how sure the latency
            is, and by work of a kind that was never measured.
        idle_j: what the idle device takes in the same time.
        mean_power_w, power_interval_w: while the model runs.
        batch: of the first input; None where it has no dimension.
        energy_per_item_j, item_interval_j: of one item of the batch; None without a batch.
        latency_ms: that the energy is for.
        rough_estimate: whether the latency is a rough estimate, or the energy rests on work of a kind that was never measured,
            or its error on other models is not known, or the power is above any that was measured.
        warnings: what the reader should know of the energy.
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
        """Columns for a row of a table."""
        return {"energy (J)": self.energy_j, "90 % between (J)": "{:.4g} and {:.4g}".format(*self.interval_j),
                "J/item": self.energy_per_item_j, "mean power (W)": self.mean_power_w,
                "90 % between (W)": "{:.4g} and {:.4g}".format(*self.power_interval_w)}


def energy_of(run: PredictedRun, learned: EnergyModel, limited: bool = False) -> EnergyPrediction:
    """The energy of a predicted run; `limited`: its latency is already as long as the device's power limit makes it.

    Raises:
        UserError: something else uses the device, so that its energy is not the model's; or a run takes no time at all.
    """
    prediction = run.prediction
    if prediction.load != "idle" or prediction.under_load is not None:
        raise UserError(f"{prediction.model}: energy is predicted for a device that does nothing else; leave the load out "
                        "(--metrics, --probe, prometheus.url in the config)")
    if not prediction.latency_ms:
        raise UserError(f"{prediction.model}: a run takes no time, so there is no energy to predict")
    latency_ms, batch = prediction.latency_ms, prediction.batch
    work = work_of_run(parts_of_run(run), latency_ms)
    run_energy = learned.run_j(work)
    energy_j, power_w = run_energy.energy_j, 1e3 * run_energy.energy_j / latency_ms
    of_learned, warnings = _learned_span(learned, run_energy._replace(over_limit=1.0) if limited else run_energy, power_w)
    # A latency that is off because kernels are off has the same work in another time.
    low_j, high_j = (learned.run_j(work_of_run(parts_of_run(run, end_ms / latency_ms), end_ms)).energy_j
                     for end_ms in prediction.interval_ms)
    span = joined([of_learned, Span(low_j / energy_j, high_j / energy_j)])
    powers = [1e3 * end_j / end_ms / power_w for end_j, end_ms in zip((low_j, high_j), prediction.interval_ms, strict=True)]
    power_span = joined([of_learned, Span(min(powers), max(powers))])
    interval_j = span.low * energy_j, span.high * energy_j
    return EnergyPrediction(
        model=prediction.model, target=prediction.target, energy_j=energy_j, interval_j=interval_j,
        idle_j=learned.idle_w * work[RUN], mean_power_w=power_w,
        power_interval_w=(max(power_span.low * power_w, min(learned.idle_w, power_w)),
                          min(power_span.high * power_w, learned.limit_w or math.inf)), batch=batch,
        energy_per_item_j=energy_j / batch if batch else None,
        item_interval_j=(interval_j[0] / batch, interval_j[1] / batch) if batch else None, latency_ms=latency_ms,
        rough_estimate=prediction.rough_estimate or bool(warnings), warnings=warnings)


def parts_of_run(run: PredictedRun, times: float = 1.0) -> list[Part]:
    """The kernels that the device runs, with their times multiplied by `times`."""
    record = run.run.record
    return [Part(record.kernel_of(node), node.runs, times * known.gpu_ms,
                 float(record.kernel_of(node).moves_data) if known.launches is None else known.launches)
            for node, known in zip(record.nodes, run.run.nodes, strict=True) if not known.on_host]


def _learned_span(learned: EnergyModel, run_energy: RunEnergy, power_w: float) -> tuple[Span, tuple[str, ...]]:
    """How far an energy may be off although the latency is right, and what the reader should know about that."""
    spans, warnings = [], []
    if learned.interval is None:
        spans.append(Span(1.0 / UNKNOWN, UNKNOWN))
        warnings.append(f"rough estimate: the energy was learned from {len(learned.models)} models, too few to say how far it "
                        "may be off")
    else:
        spans.append(Span(learned.interval.low, learned.interval.high))
    if learned.scaled_from:
        spans.append(Span(1.0 / SCALED, SCALED))
        warnings.append(f"rough estimate: the energy is that of {learned.scaled_from}, scaled by the power limits; none was "
                        "measured on this card")
    if run_energy.guessed:
        spans.append(Span(1.0 / GUESSED, GUESSED))
        warnings.append(f"rough estimate: no model whose energy was measured had work of the kind "
                        f"{', '.join(run_energy.guessed)}")
    if run_energy.over_limit > ABOVE:
        spans.append(Span(1.0, run_energy.over_limit))  # a device at its limit lowers its clocks: the latency may be longer
        warnings.append(f"rough estimate: the run would draw {run_energy.over_limit * power_w:.0f} W, and the device's power "
                        f"limit is {learned.limit_w:.0f} W; it may take longer than predicted")
    most_w = max(model.power_w for model in learned.models)
    if power_w > ABOVE * most_w:
        spans.append(Span(most_w / power_w, 1.0))
        warnings.append(f"rough estimate: a mean power of {power_w:.0f} W was predicted, and no model that was measured took "
                        f"more than {most_w:.0f} W")
    return joined(spans), tuple(warnings)
