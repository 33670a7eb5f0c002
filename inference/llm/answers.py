"""The predicted answer for a request to a language model, as --json prints it."""

from __future__ import annotations

from typing import Any, Literal, Self

from hase.inference.prediction.answers import Provenance, ReadableResult, chance_within, chance_word
from hase.inference.prediction.conditions import PaceSource
from hase.utils.config import Frozen
from hase.utils.pages.rendering import CardField, card_html

LLM_VERSION = 1
Objective = Literal["ttft", "tpot"]


class LlmTime(Frozen):
    """A predicted time.

    Attributes:
        ms: the prediction.
        interval_ms: 90 % prediction interval; that of a sum is the sum of the ranges.
    """

    ms: float
    interval_ms: tuple[float, float]

    @property
    def between(self) -> str:
        return "{:.4g} and {:.4g}".format(*self.interval_ms)


class TokenTime(LlmTime):
    """The time of one token of each sequence.

    Attributes:
        cached: how many tokens of each the cache holds before.
    """

    cached: int


class LlmMemory(Frozen):
    """The memory that a request holds at its peak, in MiB: of the process on a CPU, of the device on CUDA.

    Attributes:
        weights_mib: constants of the optimised graph.
        cache_mib: keys, values and other states.
        activations_mib: other inputs, outputs and tensors alive at the peak.
        arena_mib: the arena's surplus.
        workspace_mib: the kernels' own scratch, as far as it is known.
        loading_mib: what loading leaves in a CPU's heap; 0 on CUDA.
        peak_mib: the sum of all but what loading leaves.
    """

    weights_mib: float
    cache_mib: float
    activations_mib: float
    arena_mib: float
    workspace_mib: float
    loading_mib: float
    peak_mib: float


class LlmEnergy(Frozen):
    """The energy that a request takes, if nothing else runs on the device.

    Attributes:
        prompt_j: the prompts of the whole batch.
        request_j: the same and all further tokens.
        token_j: request_j over the tokens generated, all sequences together.
        token_interval_j: its 90 % interval.
        rough_estimate: whether one of the runs' energies is a rough estimate.
    """

    prompt_j: float
    request_j: float
    token_j: float
    token_interval_j: tuple[float, float]
    rough_estimate: bool


class ObjectiveMet(Frozen):
    """Whether a request meets an objective.

    Attributes:
        objective: `ttft` or `tpot`.
        limit_ms, predicted_ms: the objective, and the prediction that is compared with it.
        met: whether the prediction is at most the limit.
        headroom_ms: the limit less the prediction.
        chance, chance_in_words: how likely the objective is met, 0 to 1.
    """

    objective: Objective
    limit_ms: float
    predicted_ms: float
    met: bool
    headroom_ms: float
    chance: float
    chance_in_words: str

    @classmethod
    def of(cls, objective: Objective, time: LlmTime, limit_ms: float) -> Self:
        """Compares a predicted time with its limit."""
        chance = chance_within(time.ms, time.interval_ms, limit_ms)
        return cls(objective=objective, limit_ms=limit_ms, predicted_ms=time.ms, met=time.ms <= limit_ms,
                   headroom_ms=limit_ms - time.ms, chance=chance, chance_in_words=chance_word(chance))


class LlmPrediction(ReadableResult):
    """What a request to a language model takes. `--json` prints it as it is. Version 1 is the first.

    Attributes:
        model, target: folder or file, and target.
        batch, prompt, generate: sequences, tokens of each prompt, tokens generated for each.
        max_length: tokens for which the cache is made.
        shares_cache: whether one buffer of `max_length` tokens is the cache of all runs.
        cuda_graph: whether further tokens run as a CUDA graph.
        ttft: time to first token.
        tpot: mean time per further token.
        tpot_start, tpot_middle, tpot_end: of the first, the middle and the last of these tokens.
        tokens: lengths at which a token was predicted; others are interpolated.
        request: the whole request.
        tokens_per_second: generated for each sequence, in the time of the whole request.
        device_tokens_per_second: the same of all sequences together.
        genai_loop_ms: onnxruntime-genai's loop for each token, in the times; None where not measured.
        memory: its peak.
        device_memory_mib: of the target's device.
        fits_memory: whether the peak is no more than that.
        largest_batch: the largest batch with which this request fits into memory; 0: none.
        longest_context: the most tokens of prompt and answer that fit in this batch; 0: none.
        context_length: the most that the model allows.
        energy: None where none was learned.
        prompt_share, token_share: kernels' time by provenance, ratios.
        host_pace, host_pace_source: as in `Prediction`.
        rough_estimate: whether one of the runs is a rough estimate.
        objectives: those that were asked for.
        warnings: what the reader should know.
    """

    version: int = LLM_VERSION
    model: str
    target: str
    batch: int
    prompt: int
    generate: int
    max_length: int
    shares_cache: bool
    cuda_graph: bool
    ttft: LlmTime
    tpot: LlmTime | None
    tpot_start: LlmTime | None
    tpot_middle: LlmTime | None
    tpot_end: LlmTime | None
    tokens: tuple[TokenTime, ...]
    request: LlmTime
    tokens_per_second: float
    device_tokens_per_second: float
    genai_loop_ms: float | None
    memory: LlmMemory
    device_memory_mib: float | None
    fits_memory: bool | None
    largest_batch: int | None
    longest_context: int | None
    context_length: int | None
    energy: LlmEnergy | None
    prompt_share: dict[Provenance, float]
    token_share: dict[Provenance, float] | None
    host_pace: float | None = None
    host_pace_source: PaceSource | None = None
    rough_estimate: bool
    objectives: tuple[ObjectiveMet, ...] = ()
    warnings: tuple[str, ...] = ()

    def judged(self, ttft_ms: float | None, tpot_ms: float | None) -> LlmPrediction:
        """This answer with objectives: limits (ms) for the time to first token and the mean time per further token, if any."""
        limits: tuple[tuple[Objective, float | None, LlmTime | None], ...] = (
            ("ttft", ttft_ms, self.ttft), ("tpot", tpot_ms, self.tpot))
        return self.model_copy(update={"objectives": tuple(
            ObjectiveMet.of(name, time, limit) for name, limit, time in limits if limit is not None and time is not None)})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each time of the request."""
        return [{"time": name, "ms": time.ms, "low_ms": time.interval_ms[0], "high_ms": time.interval_ms[1]} for name, time in (
            ("first token", self.ttft), ("further token", self.tpot), ("request", self.request)) if time]

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        times = [("first token", self.ttft), ("each further token", self.tpot), ("whole request", self.request)]
        numbers = [CardField(name, f"{time.ms:.4g} ms", f"90 % between {time.between}") for name, time in times if time]
        fits = {True: "fits", False: "more than the device has", None: ""}[self.fits_memory]
        numbers += [CardField("throughput", f"{self.device_tokens_per_second:.4g} tokens/s", f"batch {self.batch}"),
                    CardField("peak memory", f"{self.memory.peak_mib:.4g} MiB", fits)]
        subtitle = f"{self.prompt} tokens in, {self.generate} out, batch {self.batch}; {self.target}"
        return card_html(self.model, subtitle, numbers, self.warnings, "a rough estimate" if self.rough_estimate else "")

    def __str__(self) -> str:
        """One line: `llama: first token after 12.3 ms, then 4.56 ms each (219 tokens/s) on nvidia-h200-cuda-ort1.31-all`."""
        further = f", then {self.tpot.ms:.4g} ms each" if self.tpot else ""
        return (f"{self.model}: first token after {self.ttft.ms:.4g} ms{further} ({self.device_tokens_per_second:.4g} "
                f"tokens/s) on {self.target}{'; a rough estimate' if self.rough_estimate else ''}"
                f"{'; more memory than the device has' if self.fits_memory is False else ''}")
