"""A run of a language model as a step of onnxruntime-genai: with what its loop takes, and as long as the power limit has it.

The loop runs on the host, so it is as slow as the host is. A prompt that keeps the device at work for long reaches its power
limit: after a while the device lowers its clocks (learned/llm.py). The ends of a step's interval are those of its run,
with the same added to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hase.inference.core.energy import parts_of_run
from hase.inference.core.from_data_sheet import CardPredictors
from hase.inference.core.targets import predictor_folders
from hase.inference.core.uncertainty import hosts_between
from hase.inference.llm.dimensions import DecoderFile, Step
from hase.learned.energy import EnergyModel, energy_path, read_energy
from hase.learned.llm import LearnedGeneration, read_generation, read_generation_energy
from hase.learned.scaled_energy import scaled
from hase.records.generations import PHASES, Phase

if TYPE_CHECKING:
    from hase.inference.core.model_run import PredictedRun
    from hase.inference.core.predictor import Predictor
    from hase.learned.composition.fitted import Composition
    from hase.records.kernel_record import ModelRecord


LIMITED = 1.02  # times as long as without the power limit, from which on the answer says so


@dataclass(frozen=True)
class Learned:
    """What was learned of generation on a target.

    Attributes:
        generation: None where nothing was.
        energy: of language models, else that of other models; None where neither was learned.
        compositions: of runs of a language model, by phase; where one is missing, the target's own holds.
    """

    generation: LearnedGeneration | None
    energy: EnergyModel | None
    compositions: Mapping[Phase, Composition]

    def loop_ms(self, step: Step, file: DecoderFile, pace: float = 1.0, cuda_graph: bool = False,
                other_logits: int = 0) -> float | None:
        """What genai's loop takes of a step at a pace, as a CUDA graph or as usual; None where that is not known.
        `other_logits`: as for `GenerationLoop.time_ms`."""
        if self.generation is None:
            return None
        return self.generation.loop_of(cuda_graph).time_ms(_phase(step), step.batch, file.words, layers_of(file), pace,
                                                           other_logits)


def learned_of(predictor: Predictor) -> Learned:
    """What was learned of generation on a predictor's target.

    Raises:
        UserError: there are no predictors, or a file can't be read.
    """
    fitted = predictor.fitted
    predictors = fitted.predictors
    folder = predictor_folders(predictor.workspace).get(fitted.target.name, predictors.folder)  # that of the base card, if any
    generation, energy = read_generation(folder), read_generation_energy(folder)
    if energy is None and energy_path(folder).is_file():
        energy = read_energy(folder)
    if isinstance(predictors, CardPredictors) and predictors.base and predictors.gpu:
        generation = generation and generation.for_limit(predictors.gpu.power_w / predictors.base.power_w)
        energy = energy and scaled(energy, predictors.base, predictors.gpu)
    return Learned(generation, energy, {} if generation is None else {
        phase: generation.composition(fitted.composition, phase) for phase in PHASES})


def _phase(step: Step) -> Phase:
    return "token" if step.before else "first"


def layers_of(file: DecoderFile) -> int:
    """The number of its layers with a cache."""
    return len(file.caches) // 2


def other_logits(record: ModelRecord, file: DecoderFile, step: Step) -> int:
    """How many logits a run writes beside those from which tokens are chosen: those of a prompt's earlier tokens."""
    sizes = [math.prod(tensor.shape) for name, tensor in record.outputs.items()
             if name not in file.presents and tensor.shape and tensor.shape[-1] == file.words]
    return max(max(sizes, default=0) - step.batch * file.words, 0)


def as_step(run: PredictedRun, step: Step, file: DecoderFile, learned: Learned, pace: float | None) -> PredictedRun:
    """A predicted run, with the time and the interval of its step in place of its own; `pace` is the host's, None where it is
    unknown."""
    generation, prediction = learned.generation, run.prediction
    if generation is None or not prediction.latency_ms:
        return run
    hosts = hosts_between(None)
    if pace is None and run.fitted.target.flavour.device == "cpu":
        pace = 1.0  # there, the loop was measured on the target itself
    paces = (min(hosts), 1.0, max(hosts)) if pace is None else (pace, pace, pace)
    others = other_logits(run.run.record, file, step)
    of_run = prediction.interval_ms[0], prediction.latency_ms, prediction.interval_ms[1]
    times_ms = [time_ms + (learned.loop_ms(step, file, at, prediction.way.cuda_graph, others) or 0.0)
                for time_ms, at in zip(of_run, paces, strict=True)]
    low_ms, whole_ms, high_ms = _sustained_ms(times_ms, run, learned)
    warnings = prediction.warnings
    if whole_ms > LIMITED * times_ms[1]:
        what = {"first": "the first token", "token": "a further token"}[_phase(step)]
        warnings = (*warnings, f"{what} takes {whole_ms / times_ms[1] - 1:.0%} longer than at the device's highest clocks, "
                    "since it reaches its power limit")
    return run._replace(prediction=prediction.model_copy(update={
        "latency_ms": whole_ms, "interval_ms": (low_ms, high_ms), "warnings": warnings}))


def _sustained_ms(times_ms: Sequence[float], run: PredictedRun, learned: Learned) -> list[float]:
    """Times of a step as the device's power limit has them."""
    if learned.generation is None or learned.generation.power_limit is None or learned.energy is None:
        return list(times_ms)
    power_w = learned.energy.unlimited_w(parts_of_run(run))
    return [learned.generation.power_limit.sustained_ms(time_ms, power_w) for time_ms in times_ms]
