"""Fits the costs of text generation to measured steps of language models, with each family held out in turn.

The kernels' times are predicted. First the costs of the host are fitted to steps that are too short for the device to lower its
clocks, then the effect of the power limit to the longer ones. Errors are logarithms, with a loss that limits the influence of
outliers: the host of a virtual machine changes its pace even within a step.

On a CPU (`fit_on_cpu`), choosing a token reads all its logits. A prompt's logits use memory that is new to the process, whose
pages the system must create first. Either may take as long as a small model. The runs' times come from measured kernels, so the
rest of a step is the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import median
from typing import NamedTuple

import numpy as np

from hase.graph_model.simulation.pipeline import PipelineCosts, Runs, Tracks, host_work_ms, node_kind
from hase.learned.composition.fitted import GraphReplay, Mask
from hase.learned.composition.intervals import KNOWN, CalibratedInterval, Novelty, sources
from hase.learned.energy import EnergyModel, Part, work_of_run
from hase.learned.kernels.predictors import Predictors
from hase.learned.llm import LARGEST_EXPONENT, CapturedTokens, FittedStep, GenerationLoop, LearnedGeneration, PowerLimit
from hase.records.attention import OPERATOR
from hase.records.generations import (
    PHASES,
    Generation,
    Phase,
    StepEnergy,
    measured_model_names,
    measured_points,
    step_record_file,
)
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.composition.calibration import HeldOutCase, error_range_of, fitted_to
from hase.training.composition.formulas import each_left_out
from hase.training.fits.energy import MeasuredEnergy
from hase.utils.errors import UserError
from hase.utils.lazy import scipy
from hase.utils.paths import Workspace
from hase.utils.timing import ErrorStatistics, Floats, error_statistics

OUTLIER_ERROR = 0.03  # logarithmic error from which a step counts as an outlier
OUTLIER_ERROR_ON_CPU = 0.1
SHORT_MS = 30.0  # steps too short for any device to lower its clocks
# Where the searches begin, in microseconds: a product, attention and the `GenerationLoop`; `CapturedTokens`; the loop on a CPU
HOST_START_US = (4.0, 5.0, 80.0, 0.5, 200.0, 5.0, 5.0, 100.0)
CAPTURED_START_US = (0.5, 50.0, 100.0)
CPU_LOOP_START_US = (5.0, 5.0, 50.0, 5.0, 20.0, 600.0, 800.0)
LIMIT_START = (1.0, 1.3)  # the same for the power limit: its ratio to the known one, and the exponent
HOLD_CANDIDATES_MS = (20.0, 30.0, 40.0, 60.0, 80.0)
MIN_LONG_STEPS = 10  # steps that the power limit may have slowed; from fewer, nothing is learned
DECIMALS_US = 6  # of the fitted times of a CPU: what the search leaves of unused costs becomes 0
QUIET_SHARE = 0.4  # share of the tokens that count: those with the fastest readings of the host's probe
RECORD_STEPS = "python recipes/llm/record_steps.py"


@dataclass(frozen=True)
class MeasuredStep:
    """The first step of requests of one size, or their further tokens.

    Attributes:
        tracks, parts: of its run, with predicted times of kernels, and its kernels on the device.
        novelties: how kernels differ from those in training, by id; without those that don't.
        words, layers: logits for each sequence, and layers with a cache.
        measured_ms: its median time.
        pace: the host's time as a multiple of its usual time.
        counted: whether errors are counted; else it is only in the fit.
    """

    point: Generation
    phase: Phase
    tracks: Tracks
    parts: tuple[Part, ...]
    novelties: Mapping[str, Novelty]
    words: int
    layers: int
    measured_ms: float
    pace: float
    counted: bool = True

    @property
    def paced(self) -> bool:
        """Whether the host's pace was measured during the step, and not only before and after the whole point."""
        return bool(self.point.first_probe_us if self.phase == "first" else self.point.token_probe_us)

    @property
    def energy(self) -> StepEnergy | None:
        return self.point.first_energy if self.phase == "first" else self.point.token_energy


class _HostCosts(NamedTuple):
    """The fitted costs of the host, with those of the loop."""

    product_ms: float
    attention_ms: float
    loop: GenerationLoop

    @classmethod
    def from_us(cls, times_us: Sequence[float]) -> _HostCosts:
        """The costs from numbers of a search, in the order of HOST_START_US."""
        return cls(times_us[0] / 1e3, times_us[1] / 1e3, _loop_from_us(times_us[2:]))

    def in_pipeline(self, costs: PipelineCosts) -> PipelineCosts:
        """The costs of a run, with those of its products and attention."""
        return costs.model_copy(update={"product_ms": self.product_ms, "attention_ms": self.attention_ms})


def _loop_from_us(times_us: Iterable[float]) -> GenerationLoop:
    return GenerationLoop(**{name: float(time_us) / 1e3
                             for name, time_us in zip(GenerationLoop.model_fields, times_us, strict=False)})


class _FittedCosts(NamedTuple):
    """The host's costs and the power limit, fitted to some steps."""

    host: _HostCosts
    limit: PowerLimit | None


def fit_generation(target: str, steps: Sequence[MeasuredStep], costs: PipelineCosts, energy: EnergyModel | None,
                   predictors_created: str, calibrated: CalibratedInterval | None = None) -> LearnedGeneration:
    """Fits the costs of generation on a GPU, with each family held out in turn for its errors. Without `energy` (of language
    models), no power limit is fitted; without `calibrated` (the interval of other models), no intervals."""
    counted = [step for step in steps if step.counted]

    def predict_left_out(kept: Mask, held_out: Mask) -> Floats:
        steps_of_family = list(compress(counted, held_out))
        others = [step for step in steps if step.point.family != steps_of_family[0].point.family]
        return _predict_ms(steps_of_family, _fit_costs(others, costs, energy), costs, energy)

    predicted_ms = each_left_out([step.point.family for step in counted], predict_left_out).tolist()
    fitted = _fit_costs(steps, costs, energy)
    fitted_steps = tuple(
        FittedStep(model=step.point.model, family=step.point.family, phase=step.phase, batch=step.point.batch,
                   prompt=step.point.prompt, pace=round(step.pace, 4), paced=step.paced, measured_ms=step.measured_ms,
                   predicted_ms=time_ms) for step, time_ms in zip(counted, predicted_ms, strict=True))
    return LearnedGeneration(
        target=target, genai_version=steps[0].point.machine.versions.get("onnxruntime-genai", ""),
        predictors_created=predictors_created, product_ms=fitted.host.product_ms, attention_ms=fitted.host.attention_ms,
        loop=fitted.host.loop, power_limit=fitted.limit, left_out=_errors_by_phase(fitted_steps),
        intervals=_intervals(counted, predicted_ms, fitted.host, costs, calibrated) if calibrated else {}, steps=fitted_steps)


def _errors_by_phase(steps: Iterable[FittedStep]) -> dict[Phase, ErrorStatistics]:
    times_ms: dict[Phase, list[tuple[float, float]]] = {phase: [] for phase in PHASES}
    for step in steps:
        times_ms[step.phase].append((step.predicted_ms, step.measured_ms))
    return {phase: error_statistics(*zip(*pairs, strict=True)) for phase, pairs in times_ms.items()}


def _intervals(steps: Iterable[MeasuredStep], predicted_ms: Iterable[float], host: _HostCosts, costs: PipelineCosts,
               calibrated: CalibratedInterval) -> dict[Phase, CalibratedInterval]:
    """Each phase's interval, from errors with the family held out, for steps whose host's pace was measured meanwhile."""
    cases: dict[Phase, list[HeldOutCase]] = {phase: [] for phase in PHASES}
    for step, time_ms in zip(steps, predicted_ms, strict=True):
        if step.paced:
            work_ms = host_work_ms(step.tracks, host.in_pipeline(costs).at_pace(step.pace)) + _loop_ms(step, host)
            step_sources = sources(((part.kernel.id, part.runs * part.time_ms, step.novelties.get(part.kernel.id, KNOWN))
                                    for part in step.parts), time_ms, work_ms, step.pace)
            cases[step.phase].append(HeldOutCase("", step.point.family, step_sources, math.log(step.measured_ms / time_ms)))
    intervals = {phase: fitted_to(calibrated, phase_cases) for phase, phase_cases in cases.items()}
    return {phase: interval for phase, interval in intervals.items() if interval}


def _fit_us(log_errors: Callable[[Sequence[float]], Floats], start_us: Sequence[float], outlier_error: float) -> list[float]:
    """The times, in microseconds and never negative, with the smallest errors. Outliers have a limited influence."""
    fitted = scipy.optimize.least_squares(log_errors, start_us, bounds=(0.0, np.inf), x_scale=start_us, loss="soft_l1",
                                          f_scale=outlier_error)
    return [float(time_us) for time_us in fitted.x]


def _fit_costs(steps: Sequence[MeasuredStep], costs: PipelineCosts, energy: EnergyModel | None) -> _FittedCosts:
    """Fits the host's costs to the short steps, then the power limit to the long ones."""
    short = [step for step in steps if step.measured_ms < SHORT_MS]
    runs, measured_ms = _runs(short), np.array([step.measured_ms for step in short])

    def errors(times_us: Sequence[float]) -> Floats:
        return np.asarray(np.log(_with_loop_ms(short, runs, _HostCosts.from_us(times_us), costs) / measured_ms))

    host = _HostCosts.from_us(_fit_us(errors, HOST_START_US, OUTLIER_ERROR))
    return _FittedCosts(host, None if energy is None else _fit_power_limit(steps, host, costs, energy))


def _fit_power_limit(steps: Sequence[MeasuredStep], host: _HostCosts, costs: PipelineCosts,
                     energy: EnergyModel) -> PowerLimit | None:
    """Fits how a device behaves at its power limit; None if the limit is unknown or too few steps are long enough."""
    long = [step for step in steps if step.measured_ms >= SHORT_MS and step.phase == "first"]
    if energy.limit_w is None or len(long) < MIN_LONG_STEPS:
        return None
    base_ms, measured_ms = _with_loop_ms(long, _runs(long), host, costs), np.array([step.measured_ms for step in long])
    power_w, usual_w = np.array([energy.unlimited_w(step.parts) for step in long]), energy.limit_w

    def limit(hold_ms: float, values: Sequence[float]) -> PowerLimit:
        return PowerLimit(hold_ms=hold_ms, limit_w=float(max(values[0], 0.1)) * usual_w,
                          exponent=float(np.clip(values[1], 0.0, LARGEST_EXPONENT)))

    def loss(values: Sequence[float], hold_ms: float) -> float:
        tried = limit(hold_ms, values)
        errors = np.log([tried.sustained_ms(*step) for step in zip(base_ms, power_w, strict=True)] / measured_ms)
        return float(np.sqrt(errors ** 2 + OUTLIER_ERROR ** 2).mean())

    found = [(hold_ms, scipy.optimize.minimize(loss, LIMIT_START, args=(hold_ms,), method="Nelder-Mead"))
             for hold_ms in HOLD_CANDIDATES_MS]
    hold_ms, best = min(found, key=lambda tried: float(tried[1].fun))
    return limit(hold_ms, best.x)


def _predict_ms(steps: Sequence[MeasuredStep], fitted: _FittedCosts, costs: PipelineCosts,
                energy: EnergyModel | None) -> Floats:
    """The times of steps, at the pace that their host had."""
    times_ms = _with_loop_ms(steps, _runs(steps), fitted.host, costs)
    if fitted.limit is None or energy is None:
        return times_ms
    return np.array([fitted.limit.sustained_ms(time_ms, energy.unlimited_w(step.parts))
                     for step, time_ms in zip(steps, times_ms.tolist(), strict=True)])


def _runs(steps: Sequence[MeasuredStep]) -> Runs:
    return Runs([(step.tracks, step.pace, None) for step in steps])


def _with_loop_ms(steps: Sequence[MeasuredStep], runs: Runs, host: _HostCosts, costs: PipelineCosts) -> Floats:
    """The times of steps without a power limit."""
    return np.asarray(runs.latencies_ms(host.in_pipeline(costs)) + np.array([_loop_ms(step, host) for step in steps]))


def _loop_ms(step: MeasuredStep, host: _HostCosts) -> float:
    return host.loop.time_ms(step.phase, step.point.batch, step.words, step.layers, step.pace)


def fit_captured(steps: Sequence[MeasuredStep], replay: GraphReplay) -> CapturedTokens:
    """Fits the time of tokens that run as a CUDA graph, with each family held out in turn for the errors."""
    measured_ms, groups = np.array([step.measured_ms for step in steps]), [step.point.family for step in steps]
    tracks = Runs([(step.tracks, 1.0, None) for step in steps])  # a captured graph does not wait for its host
    paces, logits = (np.array([getattr(step, name) for step in steps]) for name in ("pace", "words"))
    million_logits = logits * np.array([step.point.batch for step in steps]) / 1e6

    def times_ms(values_us: Sequence[float]) -> Floats:
        gap_ms, step_ms, million_logits_ms = (value / 1e3 for value in values_us)
        runs_ms = tracks.latencies_ms(replay.costs.model_copy(update={"gap_ms": gap_ms}))
        return np.asarray(runs_ms + step_ms * paces + million_logits_ms * million_logits)

    def fit(kept: Mask) -> list[float]:
        return _fit_us(lambda values_us: np.log(times_ms(values_us) / measured_ms)[kept], CAPTURED_START_US, OUTLIER_ERROR)

    gap_ms, step_ms, million_logits_ms = (value / 1e3 for value in fit(np.ones(len(steps), dtype=bool)))
    fitted = CapturedTokens(gap_ms=gap_ms, step_ms=step_ms, million_logits_ms=million_logits_ms)
    if len(set(groups)) < 2:
        return fitted
    left_out_ms = each_left_out(groups, lambda kept, held_out: times_ms(fit(kept))[held_out])
    return fitted.model_copy(update={"left_out": error_statistics(left_out_ms.tolist(), measured_ms.tolist()),
                                     "interval": error_range_of(left_out_ms, measured_ms, groups)})


def measured_step_energies(steps: Sequence[MeasuredStep], generation: LearnedGeneration | None = None) -> list[MeasuredEnergy]:
    """The measured energies of steps for a fit; with the latencies of `generation`, predicted with the family held out."""
    predicted_ms = {_step_name(step.model, step.batch, step.prompt, step.phase): step.predicted_ms
                    for step in reversed(generation.steps if generation else ())}  # if measured twice, the first
    energies = []
    for step in steps:
        if step.energy is not None:
            name = _step_name(step.point.model, step.point.batch, step.point.prompt, step.phase)
            run_ms, energy_j = 1e3 * step.energy.seconds / step.energy.steps, step.energy.joules / step.energy.steps
            energies.append(MeasuredEnergy(
                name, step.point.family, energy_j, 1e3 * energy_j / run_ms, float("nan"), run_ms,
                work_of_run(step.parts, run_ms), work_of_run(step.parts, predicted_ms[name]) if name in predicted_ms else None))
    return energies


def _step_name(model: str, batch: int, prompt: int, phase: Phase) -> str:
    return f"{model}@{batch}x{prompt}-{phase}"


class LoopStep(NamedTuple):
    """A measured step of requests of one size on a CPU, and the time of its model's run.

    Attributes:
        batch, prompt: sequences, and tokens of each prompt.
        words, layers: logits for each sequence, and layers with a cache.
        run_ms: the time of the model's run, from measured kernels.
        measured_ms: the median time of the whole step.
    """

    model: str
    family: str
    phase: Phase
    batch: int
    prompt: int
    words: int
    layers: int
    other_logits: int
    run_ms: float
    measured_ms: float

    def time_ms(self, loop: GenerationLoop) -> float:
        """The predicted time of the whole step."""
        return self.run_ms + loop.time_ms(self.phase, self.batch, self.words, self.layers, other_logits=self.other_logits)


def fit_loop(steps: Sequence[LoopStep]) -> GenerationLoop:
    """The loop whose predicted steps are nearest to the measured ones, by their ratios."""
    measured_ms = np.array([step.measured_ms for step in steps])

    def errors(times_us: Sequence[float]) -> Floats:
        loop = _loop_from_us(times_us)
        return np.asarray(np.log(np.array([step.time_ms(loop) for step in steps]) / measured_ms))

    return _loop_from_us(np.round(_fit_us(errors, CPU_LOOP_START_US, OUTLIER_ERROR_ON_CPU), DECIMALS_US))


def fit_on_cpu(target: str, steps: Sequence[LoopStep], genai_version: str, predictors_created: str) -> LearnedGeneration:
    """Fits the costs of generation on a CPU, with each of the families (at least two) held out in turn for the errors."""
    def predict_left_out(kept: Mask, held_out: Mask) -> list[float]:
        loop = fit_loop(list(compress(steps, kept)))
        return [step.time_ms(loop) for step in compress(steps, held_out)]

    predicted_ms = each_left_out([step.family for step in steps], predict_left_out).tolist()
    fitted_steps = tuple(
        FittedStep(model=step.model, family=step.family, phase=step.phase, batch=step.batch, prompt=step.prompt, pace=1.0,
                   measured_ms=step.measured_ms, predicted_ms=time_ms)
        for step, time_ms in zip(steps, predicted_ms, strict=True))
    return LearnedGeneration(target=target, genai_version=genai_version, predictors_created=predictors_created,
                             loop=fit_loop(steps), left_out=_errors_by_phase(fitted_steps), steps=fitted_steps)


def step_time(point: Generation, phase: Phase) -> tuple[float, float | None]:
    """The median time of a step in ms, and the time of the host's probe meanwhile in µs (None on a CPU, which has no probe).
    Among tokens, only those with the fastest host count, if that is known."""
    before_and_after_us = median(point.probe_us) if point.probe_us else None
    if phase == "first":
        middle = np.argsort(point.first_ms, kind="stable")[len(point.first_ms) // 2]
        return point.first_ms[middle], point.first_probe_us[middle] if point.first_probe_us else before_and_after_us
    times = np.concatenate(point.token_ms)
    if not point.token_probe_us:
        return float(np.median(times)), before_and_after_us
    probes = np.concatenate(point.token_probe_us)
    quiet = probes <= np.quantile(probes, QUIET_SHARE)
    return float(np.median(times[quiet])), float(np.median(probes[quiet]))


def measured_steps(workspace: Workspace, predictors: Predictors, usual_us: float, counted: bool = True,
                   captured: bool = False) -> list[MeasuredStep]:
    """The measured steps in a workspace with `llm/measured` and `llm/records`, of usual tokens, or of those that ran as a CUDA
    graph (`captured`). All kernels are predicted. `usual_us`: the host's probe at the usual pace."""
    recorded = list(_recorded_steps(workspace, captured))
    if not recorded:
        raise UserError(f"{workspace.root}: no generation was measured; do: python recipes/llm/measure_genai.py")
    kernels = {kernel.id: kernel for _, _, record in recorded for kernel in record.kernels.values()}
    times_ms, launches = (dict(zip(kernels, predictors.predict(list(kernels.values()), {}, label, strict=True).latency_ms,
                                   strict=True)) for label in (GPU_LABEL, LAUNCHES))
    novelties = _novelties(list(kernels.values()), predictors)
    steps = []
    for point, phase, record in recorded:
        measured_ms, probe_us = step_time(point, phase)
        tracks, parts = _tracks_and_parts(record, times_ms, launches)
        words = max(tensor.shape[-1] for name, tensor in record.outputs.items() if "logits" in name)
        steps.append(MeasuredStep(
            point, phase, tracks, parts, novelties, words,
            layers=sum(record.kernel_of(node).op_type == OPERATOR for node in record.nodes), measured_ms=measured_ms,
            pace=1.0 if probe_us is None else probe_us / usual_us, counted=counted))
    return steps


def _recorded_steps(workspace: Workspace, captured: bool) -> Iterator[tuple[Generation, Phase, ModelRecord]]:
    """Measured points, with the record of each phase."""
    for name in measured_model_names(workspace):
        for point in measured_points(workspace, name):
            if point.captured != captured:
                continue
            for phase in PHASES[1:] if captured else PHASES:
                path = step_record_file(workspace, point, phase)
                if not path.is_file():
                    raise UserError(f"{path}: missing; make it with: {RECORD_STEPS} --workspace {workspace.root}")
                yield point, phase, read_model_record(path)


def _novelties(kernels: Sequence[Kernel], predictors: Predictors) -> dict[str, Novelty]:
    """How kernels differ from those in training; all their operators were measured."""
    beyond, doubts = predictors.beyond_range(kernels), predictors.doubts([kernel for kernel in kernels if kernel.moves_data])
    return {name: (Novelty("beyond", beyond[name]) if name in beyond else KNOWN)._replace(doubt=doubts.get(name, 0.0))
            for name in beyond.keys() | doubts.keys()}


def _tracks_and_parts(record: ModelRecord, times_ms: Mapping[str, float],
                      launches: Mapping[str, float]) -> tuple[Tracks, tuple[Part, ...]]:
    """The tracks of a run, and the kernels on the GPU. The few nodes of the CPU provider only cost their dispatch."""
    gpu_ms, counts, kinds, parts = list[float](), list[float](), list[int](), list[Part]()
    for node in record.nodes:
        kernel, on_gpu = record.kernel_of(node), node.provider == "cuda"
        gpu_ms.append(times_ms[kernel.id] if on_gpu else 0.0)
        counts.append(launches[kernel.id] if on_gpu else 0.0)
        kinds.append(int(node_kind(kernel, on_gpu)))
        if on_gpu:
            parts.append(Part(kernel, node.runs, gpu_ms[-1], counts[-1]))
    return Tracks(np.array(gpu_ms), np.array(counts), np.array(kinds)), tuple(parts)
