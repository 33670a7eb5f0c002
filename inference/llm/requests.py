"""Splits a request to a language model into runs; adds the time of onnxruntime-genai's loop and of the power limit to each.

A request is one run of the prompt with an empty cache, and then one run for each further token. The time of such a run is
roughly piecewise linear in the length of the cache: kernels change their algorithm at some lengths, mostly powers of two. So a
token is predicted at the start, in the middle and at the end of the generation, and at the powers of two between; the others
are interpolated linearly.

The loop runs on the host and scales with the host's pace. A long prompt can bring the device to its power limit: after a while
the device lowers its clocks (learned/llm.py). Both corrections are also applied to the ends of a step's interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hase.graph_model.simulation.pipeline import Floats
from hase.inference.llm.language_model import DecoderFile, DecoderStep, LanguageModel
from hase.inference.prediction.energy import parts_of_run
from hase.inference.prediction.targets import CardPredictors, predictor_folders
from hase.inference.prediction.uncertainty import hosts_between
from hase.learned import target_files
from hase.learned.energy import EnergyModel, scaled
from hase.learned.llm import LearnedGeneration
from hase.records.generations import PHASES, Generation, GenerationMemory, Phase
from hase.utils.errors import UserError

if TYPE_CHECKING:
    from hase.inference.library.predictor import Predictor
    from hase.inference.prediction.run import PredictedRun
    from hase.learned.composition.fitted import Composition
    from hase.records.kernel_record import ModelRecord

MENTIONED_SLOWDOWN = 1.02  # the answer mentions the power limit from this slowdown on


class LlmRequest(NamedTuple):
    """Prompts for which tokens are generated together.

    Attributes:
        prompt: tokens of the longest; shorter ones are padded to it.
        generate: tokens generated for each.
        max_length: tokens of prompt and answer for which the cache is allocated.
    """

    batch: int
    prompt: int
    generate: int
    max_length: int

    @property
    def cache_lengths(self) -> range:
        """The number of tokens in the cache before each run after the prompt's."""
        return range(self.prompt, self.prompt + self.generate - 1)

    @property
    def middle_length(self) -> int:
        return self.cache_lengths[len(self.cache_lengths) // 2]

    @property
    def main_lengths(self) -> list[int]:
        """The cache lengths at the start, in the middle and at the end, without duplicates."""
        return sorted({self.cache_lengths[0], self.middle_length, self.cache_lengths[-1]}) if self.cache_lengths else []

    @property
    def predicted_lengths(self) -> list[int]:
        """The cache lengths at which a token is predicted: the main ones, and the powers of two between."""
        powers = (1 << power for power in range(self.prompt.bit_length(), self.prompt.bit_length() + 64))
        return sorted({*self.main_lengths, *(power for power in powers if power in self.cache_lengths)})


def request_at_point(model: LanguageModel, point: Generation | GenerationMemory, generate: int) -> LlmRequest:
    """The request of a measured point, with `generate` tokens generated."""
    return LlmRequest(point.batch * model.beams, point.prompt, generate, max(point.cache, point.prompt + generate))


def request_for(model: LanguageModel, batch: int, prompt: int, generate: int, max_length: int | None = None) -> LlmRequest:
    """A request, checked against the model. `max_length` defaults to the model's config, and without one to the number of
    tokens needed."""
    for name, count in (("batch", batch), ("prompt", prompt), ("generate", generate), ("max_length", max_length)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise UserError(f"{name}={count!r}: a whole number, 1 or more, is expected")
    needed, most = prompt + generate, model.context_length
    tokens = f"{needed} tokens ({prompt} + {generate})"
    if most is not None and needed > most:
        raise UserError(f"{model.name}: {tokens} are more than its context, {most}")
    if most is not None and max_length is not None and max_length > most:
        raise UserError(f"{model.name}: a max_length of {max_length} tokens is more than its context, {most}")
    length = max_length or model.max_length or needed
    if needed > length:
        raise UserError(f"{model.name}: {tokens} are more than max_length, {length}, at which the generation ends; give a "
                        "larger one (--max-length)")
    return LlmRequest(batch, prompt, generate, length)


def interpolate_tokens(request: LlmRequest, lengths: Sequence[int], values: Sequence[float]) -> Floats:
    """A value for each token after the first, interpolated linearly between `values` at `lengths` of the cache. `lengths` are
    ascending and include the first and the last of the generation."""
    return np.interp(np.asarray(request.cache_lengths, dtype=float), lengths, values)


@dataclass(frozen=True)
class GenerationModels:
    """The fitted models of token generation on a target.

    Attributes:
        energy: of language models, else that of other models; None if neither was learned.
        compositions: of runs of a language model, by phase; if one is missing, the target's own is used.
    """

    generation: LearnedGeneration | None
    energy: EnergyModel | None
    compositions: Mapping[Phase, Composition]

    def loop_ms(self, step: DecoderStep, file: DecoderFile, pace: float = 1.0, cuda_graph: bool = False,
                other_logits: int = 0) -> float | None:
        """The time of genai's loop in a step on a host of this pace; None if unknown."""
        if self.generation is None:
            return None
        return self.generation.loop_for(cuda_graph).time_ms(
            _phase(step), step.batch, file.vocabulary_size, layers_with_cache(file), pace, other_logits)


def generation_models(predictor: Predictor) -> GenerationModels:
    """Reads the fitted models of token generation on a predictor's target."""
    fitted = predictor.fitted
    predictors = fitted.predictors
    folder = predictor_folders(predictor.workspace).get(fitted.target.name, predictors.folder)  # if none, the base card's
    generation, energy = target_files.GENERATION.read(folder), target_files.GENERATION_ENERGY.read(folder)
    if energy is None and target_files.ENERGY.path(folder).is_file():
        energy = target_files.ENERGY.needed(folder)
    if isinstance(predictors, CardPredictors) and predictors.base and predictors.gpu:
        generation = generation and generation.at_power_limit(predictors.gpu.power_w / predictors.base.power_w)
        energy = energy and scaled(energy, predictors.base, predictors.gpu)
    return GenerationModels(generation, energy, {} if generation is None else {
        phase: generation.composition(fitted.composition, phase) for phase in PHASES})


def _phase(step: DecoderStep) -> Phase:
    return "token" if step.before else "first"


def layers_with_cache(file: DecoderFile) -> int:
    """The number of a decoder's layers that have a cache (of keys and of values)."""
    return len(file.caches) // 2


def count_other_logits(record: ModelRecord, file: DecoderFile, step: DecoderStep) -> int:
    """The number of logits that no token is chosen from: those of a prompt's earlier tokens."""
    sizes = [math.prod(tensor.shape) for name, tensor in record.outputs.items()
             if name not in file.presents and tensor.shape and tensor.shape[-1] == file.vocabulary_size]
    return max(max(sizes, default=0) - step.batch * file.vocabulary_size, 0)


def run_of_step(run: PredictedRun, step: DecoderStep, file: DecoderFile, learned: GenerationModels,
                pace: float | None) -> PredictedRun:
    """A predicted run with genai's loop and the power limit in its time and interval; `pace` is the host's, None if unknown."""
    generation, prediction = learned.generation, run.prediction
    if generation is None or not prediction.latency_ms:
        return run
    hosts = hosts_between(None)
    if pace is None and run.fitted.target.flavour.device == "cpu":
        pace = 1.0  # there, the loop was measured on the target itself
    paces = (min(hosts), 1.0, max(hosts)) if pace is None else (pace, pace, pace)
    other_logits = count_other_logits(run.run.record, file, step)
    run_ms = prediction.interval_ms[0], prediction.latency_ms, prediction.interval_ms[1]
    times_ms = [time_ms + (learned.loop_ms(step, file, at, prediction.way.cuda_graph, other_logits) or 0.0)
                for time_ms, at in zip(run_ms, paces, strict=True)]
    low_ms, whole_ms, high_ms = times_ms
    if generation.power_limit is not None and learned.energy is not None:
        power_w = learned.energy.unlimited_w(parts_of_run(run))
        low_ms, whole_ms, high_ms = (generation.power_limit.sustained_ms(time_ms, power_w) for time_ms in times_ms)
    warnings = prediction.warnings
    if whole_ms > MENTIONED_SLOWDOWN * times_ms[1]:
        token = {"first": "the first token", "token": "a further token"}[_phase(step)]
        warnings = (*warnings, f"{token} takes {whole_ms / times_ms[1] - 1:.0%} longer than at the device's highest clocks, "
                    "since it reaches its power limit")
    return run._replace(prediction=prediction.model_copy(update={
        "latency_ms": whole_ms, "interval_ms": (low_ms, high_ms), "warnings": warnings}))
