"""Fits what generation takes to the measured steps of language models, each family held out in turn.

The kernels' times are predicted. First the costs of the host are fitted, to steps that are too short for the device to lower
its clocks; then what the power limit does, to the longer ones. Errors are logarithms, with a loss that limits the influence of
outliers: the host of a virtual machine changes its pace even within a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.pipeline import PipelineCosts, Runs, host_work_ms
from hase.learned.composition.fitted import GraphReplay
from hase.learned.composition.formulas import each_left_out
from hase.learned.composition.intervals import KNOWN, CalibratedInterval, Case, error_range_of, fitted_to, sources
from hase.learned.energy import EnergyModel, work_of_run
from hase.learned.llm import (
    LARGEST_EXPONENT,
    CapturedTokens,
    FittedStep,
    GenerationLoop,
    LearnedGeneration,
    PowerLimit,
)
from hase.records.generations import PHASES, Phase
from hase.training.energy.fitting import MeasuredEnergy
from hase.training.llm.measured_steps import MeasuredStep, families, without
from hase.utils.lazy import scipy
from hase.utils.timing import error_statistics

Floats = npt.NDArray[np.float64]
ODD = 0.03  # error from which a step counts as an outlier
SHORT_MS = 30.0  # steps of which no device lowers its clocks
FIRST_US = (4.0, 5.0, 80.0, 0.5, 200.0, 5.0, 5.0, 100.0)  # where the search begins: the costs of `_Host`, in microseconds
FIRST_CAPTURED_US = (0.5, 50.0, 100.0)  # the same for `CapturedTokens`
FIRST_LIMIT = (1.0, 1.3)  # the same for the power limit: its share of the known one, and the exponent
HOLDS_MS = (20.0, 30.0, 40.0, 60.0, 80.0)  # that are tried
LEAST_LONG = 10  # steps that the power limit may have slowed; from fewer, nothing is learned


class _Host(NamedTuple):
    """The fitted costs of the host, and the device's time for choosing tokens; ms."""

    product_ms: float
    attention_ms: float
    step_ms: float
    sequence_ms: float
    first_ms: float
    first_layer_ms: float
    first_sequence_ms: float
    million_logits_ms: float

    @property
    def loop(self) -> GenerationLoop:
        return GenerationLoop(**{name: getattr(self, name) for name in GenerationLoop.model_fields if name in self._fields})

    def costs(self, costs: PipelineCosts) -> PipelineCosts:
        return costs.model_copy(update={"product_ms": self.product_ms, "attention_ms": self.attention_ms})


class Fit(NamedTuple):
    """What is learned of some steps."""

    host: _Host
    limit: PowerLimit | None


def fit_generation(target: str, steps: Sequence[MeasuredStep], costs: PipelineCosts, energy: EnergyModel | None,
                   predictors_created: str, calibrated: CalibratedInterval | None = None) -> LearnedGeneration:
    """What generation takes, with each family held out in turn for its errors.

    Args:
        target: its name.
        steps: that were measured.
        costs: of a run of other models.
        energy: of language models; None: nothing is learned of the power limit.
        predictors_created: when the predictors of the steps' kernels were trained.
        calibrated: the interval of other models; None: no intervals are learned.
    """
    counted = [step for step in steps if step.counted]
    predicted_ms = dict[int, float]()
    for family in families(steps):
        fitted, held_out = fit_steps(without(steps, family), costs, energy), [
            step for step in counted if step.point.family == family]
        predicted_ms |= dict(zip(map(id, held_out), predict_ms(held_out, fitted, costs, energy).tolist(), strict=True))
    fitted = fit_steps(steps, costs, energy)
    left_out = {phase: error_statistics(*(list(column) for column in zip(*(
        (predicted_ms[id(step)], step.measured_ms) for step in counted if step.phase == phase), strict=True)))
        for phase in PHASES}
    work_ms = {id(step): _host_work_ms(step, fitted.host, costs) for step in counted}
    return LearnedGeneration(
        target=target, genai_version=steps[0].point.machine.versions.get("onnxruntime-genai", ""),
        predictors_created=predictors_created, product_ms=fitted.host.product_ms, attention_ms=fitted.host.attention_ms,
        loop=fitted.host.loop, power_limit=fitted.limit, left_out=left_out,
        intervals=intervals_of(counted, predicted_ms, work_ms, calibrated) if calibrated else {}, steps=tuple(
            FittedStep(model=step.point.model, family=step.point.family, phase=step.phase, batch=step.point.batch,
                       prompt=step.point.prompt, pace=round(step.pace, 4), paced=step.paced, measured_ms=step.measured_ms,
                       predicted_ms=predicted_ms[id(step)]) for step in counted))


def intervals_of(steps: Iterable[MeasuredStep], predicted_ms: Mapping[int, float], work_ms: Mapping[int, float],
                 calibrated: CalibratedInterval) -> dict[Phase, CalibratedInterval]:
    """The interval of each phase, from the errors of steps whose host's pace was read meanwhile.

    Args:
        steps: that count.
        predicted_ms: of each step by its `id`, its family held out.
        work_ms: how long the host works in each step, likewise.
        calibrated: the interval of other models.
    """
    cases: dict[Phase, list[Case]] = {phase: [] for phase in PHASES}
    for step in steps:
        if step.paced:
            time_ms = predicted_ms[id(step)]
            of_step = sources(((part.kernel.id, part.runs * part.time_ms, step.novelties.get(part.kernel.id, KNOWN))
                               for part in step.parts), time_ms, work_ms[id(step)], step.pace)
            cases[step.phase].append(Case("", step.point.family, of_step, math.log(step.measured_ms / time_ms)))
    found = {phase: fitted_to(calibrated, of_phase) for phase, of_phase in cases.items()}
    return {phase: interval for phase, interval in found.items() if interval}


def _host_work_ms(step: MeasuredStep, host: _Host, costs: PipelineCosts) -> float:
    """How long the host works in a step, with the loop."""
    return host_work_ms(step.tracks, host.costs(costs).at_pace(step.pace)) + _loop_ms(step, host)


def fit_steps(steps: Sequence[MeasuredStep], costs: PipelineCosts, energy: EnergyModel | None) -> Fit:
    """The costs of the host, and what the power limit does, of some steps."""
    short = [step for step in steps if step.measured_ms < SHORT_MS]
    runs, measured_ms = _runs(short), np.array([step.measured_ms for step in short])

    def errors(values_us: Sequence[float]) -> Floats:
        return np.asarray(np.log(_with_loop_ms(short, runs, _Host(*(value / 1e3 for value in values_us)), costs) / measured_ms))

    found = scipy.optimize.least_squares(errors, FIRST_US, bounds=(0.0, np.inf), x_scale=FIRST_US, loss="soft_l1", f_scale=ODD)
    host = _Host(*(float(value) / 1e3 for value in found.x))
    return Fit(host, None if energy is None else fit_limit(steps, host, costs, energy))


def fit_limit(steps: Sequence[MeasuredStep], host: _Host, costs: PipelineCosts, energy: EnergyModel) -> PowerLimit | None:
    """What the power limit does; None where it is not known, or too few steps are long enough to show it."""
    long = [step for step in steps if step.measured_ms >= SHORT_MS and step.phase == "first"]
    if energy.limit_w is None or len(long) < LEAST_LONG:
        return None
    base_ms, measured_ms = _with_loop_ms(long, _runs(long), host, costs), np.array([step.measured_ms for step in long])
    power_w, usual_w = np.array([energy.unlimited_w(step.parts) for step in long]), energy.limit_w

    def limit(hold_ms: float, values: Sequence[float]) -> PowerLimit:
        return PowerLimit(hold_ms=hold_ms, limit_w=float(max(values[0], 0.1)) * usual_w,
                          exponent=float(np.clip(values[1], 0.0, LARGEST_EXPONENT)))

    def loss(values: Sequence[float], hold_ms: float) -> float:
        tried = limit(hold_ms, values)
        errors = np.log([tried.sustained_ms(*of_step) for of_step in zip(base_ms, power_w, strict=True)] / measured_ms)
        return float(np.sqrt(errors ** 2 + ODD ** 2).mean())

    found = [(hold_ms, scipy.optimize.minimize(loss, FIRST_LIMIT, args=(hold_ms,), method="Nelder-Mead"))
             for hold_ms in HOLDS_MS]
    hold_ms, best = min(found, key=lambda tried: float(tried[1].fun))
    return limit(hold_ms, best.x)


def predict_ms(steps: Sequence[MeasuredStep], fitted: Fit, costs: PipelineCosts, energy: EnergyModel | None) -> Floats:
    """The times of steps, at the pace that their host had."""
    times_ms = _with_loop_ms(steps, _runs(steps), fitted.host, costs)
    if fitted.limit is None or energy is None:
        return times_ms
    return np.array([fitted.limit.sustained_ms(time_ms, energy.unlimited_w(step.parts))
                     for step, time_ms in zip(steps, times_ms.tolist(), strict=True)])


def _runs(steps: Sequence[MeasuredStep]) -> Runs:
    return Runs([(step.tracks, step.pace, None) for step in steps])


def _with_loop_ms(steps: Sequence[MeasuredStep], runs: Runs, host: _Host, costs: PipelineCosts) -> Floats:
    """The times of steps without a power limit."""
    return np.asarray(runs.latencies_ms(host.costs(costs)) + np.array([_loop_ms(step, host) for step in steps]))


def _loop_ms(step: MeasuredStep, host: _Host) -> float:
    return host.loop.time_ms(step.phase, step.point.batch, step.words, step.layers, step.pace)


def fit_captured(steps: Sequence[MeasuredStep], replay: GraphReplay) -> CapturedTokens:
    """What tokens take that run as a CUDA graph, with each family held out in turn for the errors.

    Args:
        steps: such tokens.
        replay: of other models as CUDA graphs.
    """
    measured_ms, groups = np.array([step.measured_ms for step in steps]), [step.point.family for step in steps]
    tracks = Runs([(step.tracks, 1.0, None) for step in steps])  # a captured graph does not wait for its host
    paces, logits = (np.array([getattr(step, name) for step in steps]) for name in ("pace", "words"))
    million_logits = logits * np.array([step.point.batch for step in steps]) / 1e6

    def times_ms(values_us: Sequence[float]) -> Floats:
        gap_ms, step_ms, million_logits_ms = (value / 1e3 for value in values_us)
        runs_ms = tracks.latencies_ms(replay.costs.model_copy(update={"gap_ms": gap_ms}))
        return np.asarray(runs_ms + step_ms * paces + million_logits_ms * million_logits)

    def fit(kept: npt.NDArray[np.bool_]) -> list[float]:
        found = scipy.optimize.least_squares(
            lambda values_us: np.log(times_ms(values_us) / measured_ms)[kept], FIRST_CAPTURED_US, bounds=(0.0, np.inf),
            x_scale=FIRST_CAPTURED_US, loss="soft_l1", f_scale=ODD)
        return [float(value) for value in found.x]

    gap_ms, step_ms, million_logits_ms = (value / 1e3 for value in fit(np.ones(len(steps), dtype=bool)))
    fitted = CapturedTokens(gap_ms=gap_ms, step_ms=step_ms, million_logits_ms=million_logits_ms)
    if len(set(groups)) < 2:
        return fitted
    left_out_ms = each_left_out(groups, lambda kept, held_out: times_ms(fit(kept))[held_out])
    return fitted.model_copy(update={"left_out": error_statistics(left_out_ms.tolist(), measured_ms.tolist()),
                                     "interval": error_range_of(left_out_ms, measured_ms, groups)})


def measured_energies(steps: Sequence[MeasuredStep], generation: LearnedGeneration | None = None) -> list[MeasuredEnergy]:
    """The energies of the steps whose energy was measured, as a fit of energy takes them; with the latencies of `generation`,
    which were predicted with the family held out."""
    predicted_ms = {step_name(step.model, step.batch, step.prompt, step.phase): step.predicted_ms
                    for step in reversed(generation.steps if generation else ())}  # of steps measured twice, the first
    found = []
    for step in steps:
        if step.energy is not None:
            name = step_name(step.point.model, step.point.batch, step.point.prompt, step.phase)
            run_ms, energy_j = 1e3 * step.energy.seconds / step.energy.steps, step.energy.joules / step.energy.steps
            found.append(MeasuredEnergy(
                name, step.point.family, energy_j, 1e3 * energy_j / run_ms, float("nan"), run_ms,
                work_of_run(step.parts, run_ms),
                work_of_run(step.parts, predicted_ms[name]) if name in predicted_ms else None))
    return found


def step_name(model: str, batch: int, prompt: int, phase: Phase) -> str:
    return f"{model}@{batch}x{prompt}-{phase}"
