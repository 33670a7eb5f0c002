"""What is learned from runs of language models with onnxruntime-genai: the time of its loop, the host's cost of the models'
nodes, and how a device slows down at its power limit."""

from __future__ import annotations

from pydantic import Field

from hase.learned.composition.fitted import Composition
from hase.learned.composition.intervals import CalibratedInterval, ErrorRange
from hase.records.generations import Phase
from hase.records.measurement import ModelMilliseconds
from hase.utils.config import Frozen
from hase.utils.timing import ErrorStatistics

GENERATION_VERSION = 3  # 3: intervals follow from how long the host works
LARGEST_EXPONENT = 5.0


class GenerationLoop(Frozen):
    """The time that onnxruntime-genai's loop adds to a model's run in one step.

    All but the times per million logits are the host's, at its usual pace.

    Attributes:
        step_ms: of each step, independent of the number of sequences: choosing tokens, bookkeeping.
        sequence_ms: of each sequence in a step.
        first_ms, first_layer_ms, first_sequence_ms: added in the first step: once, per layer with a cache, and per sequence.
        million_logits_ms: the device's time per million logits from which tokens are chosen.
        million_other_logits_ms: the same for unused logits of a prompt's earlier tokens, whose memory is new to the process. 0
            on a GPU, whose arena keeps it.
    """

    step_ms: float = Field(ge=0)
    sequence_ms: float = Field(ge=0)
    first_ms: float = Field(ge=0)
    first_layer_ms: float = Field(ge=0)
    first_sequence_ms: float = Field(ge=0)
    million_logits_ms: float = Field(ge=0)
    million_other_logits_ms: float = Field(default=0.0, ge=0)

    def time_ms(self, phase: Phase, sequences: int, vocabulary: int, layers: int, pace: float = 1.0,
                other_logits: int = 0) -> float:
        """The loop's time in a step: `sequences` get a token each, `layers` have a cache, `pace` is relative to usual, and from
        `other_logits` no token is chosen."""
        host_ms = self.step_ms + sequences * self.sequence_ms
        if phase == "first":
            host_ms += self.first_ms + layers * self.first_layer_ms + sequences * self.first_sequence_ms
        logits_ms = (self.million_logits_ms * sequences * vocabulary + self.million_other_logits_ms * other_logits) / 1e6
        return pace * host_ms + logits_ms


class CapturedTokens(Frozen):
    """The time besides kernels of tokens that run as a CUDA graph (all after the first). `gap_ms` is the device's pause after
    each launch of the graph, `step_ms` genai's loop per token on a host at its usual pace, `million_logits_ms` the device's
    time per million logits from which tokens are chosen."""

    gap_ms: float = Field(ge=0)
    step_ms: float = Field(ge=0)
    million_logits_ms: float = Field(ge=0)
    left_out: ErrorStatistics | None = None
    interval: ErrorRange | None = None


class PowerLimit(Frozen):
    """How a device slows down at its power limit: after `hold_ms`, time grows by (power / limit) to the `exponent`."""

    hold_ms: float = Field(ge=0)
    limit_w: float = Field(gt=0)
    exponent: float = Field(ge=0, le=LARGEST_EXPONENT)

    def sustained_ms(self, latency_ms: float, power_w: float) -> float:
        """The latency of a run that would take `latency_ms` and draw `power_w` at full clocks."""
        if latency_ms <= self.hold_ms or power_w <= self.limit_w:
            return latency_ms
        return self.hold_ms + (latency_ms - self.hold_ms) * (power_w / self.limit_w) ** self.exponent


class FittedStep(Frozen):
    """A step of the fit: its measured time, and its time predicted with the family held out, at the host's pace. `paced`:
    whether the pace was measured during the step itself, not only before and after all steps of its prompt and batch."""

    model: str
    family: str
    phase: Phase
    batch: int
    prompt: int
    pace: float
    paced: bool = False
    measured_ms: ModelMilliseconds
    predicted_ms: ModelMilliseconds


class LearnedGeneration(Frozen):
    """`generation.json`: the time of text generation besides the kernels.

    Attributes:
        product_ms, attention_ms: the host's cost of a matrix product and of library attention, which replace those of the
            composition. Not for a CPU.
        captured: of tokens run as a CUDA graph; None if none was measured.
        power_limit: None if no run was long enough to reach it.
        intervals, left_out: for each phase, the interval on a host of known pace, and errors with the family held out.
    """

    version: int = GENERATION_VERSION
    target: str
    genai_version: str
    predictors_created: str
    product_ms: float = 0.0
    attention_ms: float = 0.0
    loop: GenerationLoop
    captured: CapturedTokens | None = None
    power_limit: PowerLimit | None = None
    intervals: dict[Phase, CalibratedInterval] = {}
    left_out: dict[Phase, ErrorStatistics] = {}
    steps: tuple[FittedStep, ...] = ()

    def composition(self, composition: Composition, phase: Phase) -> Composition:
        """The composition for runs of a language model, made from that of other models."""
        graph, captured = composition.cuda_graph, self.captured
        if graph and captured:
            graph = graph.model_copy(update={
                "costs": graph.costs.model_copy(update={"gap_ms": captured.gap_ms}),
                "left_out": captured.left_out or graph.left_out, "interval": captured.interval or graph.interval})
        costs = composition.costs and composition.costs.model_copy(
            update={"product_ms": self.product_ms, "attention_ms": self.attention_ms})
        return composition.model_copy(update={
            "calibrated": self.intervals.get(phase, composition.calibrated), "cuda_graph": graph, "costs": costs})

    def loop_for(self, cuda_graph: bool) -> GenerationLoop:
        """The loop's times for steps that run as a CUDA graph, or for other steps."""
        if not cuda_graph or self.captured is None:
            return self.loop
        return self.loop.model_copy(update={
            "step_ms": self.captured.step_ms, "sequence_ms": 0.0, "million_logits_ms": self.captured.million_logits_ms})

    def at_power_limit(self, ratio: float) -> LearnedGeneration:
        """The same for a card whose power limit is `ratio` times as high. The host's times stay."""
        if self.power_limit is None:
            return self
        limit = self.power_limit.model_copy(update={"limit_w": ratio * self.power_limit.limit_w})
        return self.model_copy(update={"power_limit": limit})
