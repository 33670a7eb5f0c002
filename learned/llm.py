"""What is learned from language models that onnxruntime-genai ran: what its loop takes beside the model's runs, what
dispatching their nodes costs the host, and how much longer a run takes once the device is at its power limit."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from hase.learned.composition.fitted import Composition
from hase.learned.composition.intervals import CalibratedInterval, ErrorRange
from hase.learned.energy import ENERGY_VERSION, EnergyModel
from hase.records.generations import Phase
from hase.records.measurement import ModelMilliseconds
from hase.utils import files
from hase.utils.frozen import Frozen
from hase.utils.timing import ErrorStatistics

GENERATION_VERSION = 3  # 3: intervals follow from how long the host works
FILE, ENERGY_FILE = "generation.json", "generation_energy.json"  # beside what else was learned of a target
FIT = "python training/fit_generation.py"
LARGEST_EXPONENT = 5.0


class GenerationLoop(Frozen):
    """The time of onnxruntime-genai's loop for one step, beside the model's run. None is negative. All but the last two
    attributes are the host's, at its usual pace.

    Attributes:
        step_ms: of each step, however many sequences there are: choosing tokens, bookkeeping.
        sequence_ms: for each sequence.
        first_ms, first_layer_ms, first_sequence_ms: of the first step in addition: once, for each layer with a cache, and for
            each sequence.
        million_logits_ms: the device's time for each million of logits from which tokens are chosen.
        million_other_logits_ms: the same for logits of a prompt's earlier tokens, which nothing reads: memory that is new to
            the process. 0 on a GPU, whose arena keeps it.
    """

    step_ms: float = Field(ge=0)
    sequence_ms: float = Field(ge=0)
    first_ms: float = Field(ge=0)
    first_layer_ms: float = Field(ge=0)
    first_sequence_ms: float = Field(ge=0)
    million_logits_ms: float = Field(ge=0)
    million_other_logits_ms: float = Field(default=0.0, ge=0)

    def time_ms(self, phase: Phase, sequences: int, words: int, layers: int, pace: float = 1.0, other_logits: int = 0) -> float:
        """The loop's time of one step.

        Args:
            phase: the first step, or a further one.
            sequences: for each of which a token is chosen.
            words: of which it is one.
            layers: with a cache.
            pace: how many times as long as usual the host takes.
            other_logits: that the run writes beside those from which tokens are chosen.
        """
        host_ms = self.step_ms + sequences * self.sequence_ms
        if phase == "first":
            host_ms += self.first_ms + layers * self.first_layer_ms + sequences * self.first_sequence_ms
        return pace * host_ms + (self.million_logits_ms * sequences * words + self.million_other_logits_ms * other_logits) / 1e6


class CapturedTokens(Frozen):
    """What further tokens take that run as a CUDA graph, beside their kernels.

    Attributes:
        gap_ms: the device's pause after each launch of the graph.
        step_ms: genai's loop for each token: the host's, at its usual pace.
        million_logits_ms: the device's time for each million of logits from which tokens are chosen.
        left_out: errors of tokens whose family was held out.
        interval: that follows from these errors; None from too few.
    """

    gap_ms: float = Field(ge=0)
    step_ms: float = Field(ge=0)
    million_logits_ms: float = Field(ge=0)
    left_out: ErrorStatistics | None = None
    interval: ErrorRange | None = None


class PowerLimit(Frozen):
    """How a device behaves that would draw more than it may: for a while it does so, then it lowers its clocks.

    Attributes:
        hold_ms: how long it keeps its clocks.
        limit_w: the mean power above which it lowers them, by the energy model's reckoning.
        exponent: time beyond `hold_ms` grows with this power of what it would draw over what it may.
    """

    hold_ms: float = Field(ge=0)
    limit_w: float = Field(gt=0)
    exponent: float = Field(ge=0, le=LARGEST_EXPONENT)

    def sustained_ms(self, latency_ms: float, power_w: float) -> float:
        """The latency of a run that takes `latency_ms` and draws `power_w` while the device keeps its clocks."""
        if latency_ms <= self.hold_ms or power_w <= self.limit_w:
            return latency_ms
        return self.hold_ms + (latency_ms - self.hold_ms) * (power_w / self.limit_w) ** self.exponent


class FittedStep(Frozen):
    """A point of the fit: its times as measured, and as predicted with its family held out, at the pace that its host had;
    `paced`: whether that was read during the step, and not only before and after all of its point."""

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
    """`generation.json`.

    Attributes:
        target: its name.
        genai_version: of the onnxruntime-genai that was measured.
        predictors_created: when the predictors of kernels were trained with which it was fitted.
        product_ms, attention_ms: what a matrix product and attention by a library cost the host, in place of those that the
            composition has. A CPU has neither.
        loop: the time of onnxruntime-genai's loop.
        captured: of tokens that run as a CUDA graph; None where none was measured.
        power_limit: None where no run was long enough to show it.
        intervals: of runs whose host's pace is known, by phase; a phase is missing where too few families were measured.
        left_out: errors of steps whose family was held out, by phase.
        steps: all that was fitted to.
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
        """How the kernels of a run of a language model are put together; `composition` is that of other models."""
        costs, interval = composition.costs, self.intervals.get(phase, composition.calibrated)
        graph, captured = composition.cuda_graph, self.captured
        if graph and captured:
            graph = graph.model_copy(update={
                "costs": graph.costs.model_copy(update={"gap_ms": captured.gap_ms}),
                "left_out": captured.left_out or graph.left_out, "interval": captured.interval or graph.interval})
        return composition.model_copy(update={"calibrated": interval, "cuda_graph": graph, "costs": costs and costs.model_copy(
            update={"product_ms": self.product_ms, "attention_ms": self.attention_ms})})

    def loop_of(self, cuda_graph: bool) -> GenerationLoop:
        """The loop's time, of tokens that run as a CUDA graph or of other steps."""
        if not cuda_graph or self.captured is None:
            return self.loop
        return self.loop.model_copy(update={
            "step_ms": self.captured.step_ms, "sequence_ms": 0.0, "million_logits_ms": self.captured.million_logits_ms})

    def for_limit(self, times: float) -> LearnedGeneration:
        """What was learned, for a card with `times` the power limit, whose energy is scaled by it (learned/scaled_energy.py).
        The loop is the host's, and stays as it is."""
        if self.power_limit is None:
            return self
        limit = self.power_limit.model_copy(update={"limit_w": times * self.power_limit.limit_w})
        return self.model_copy(update={"power_limit": limit})


def generation_path(folder: Path) -> Path:
    return folder / FILE


def generation_energy_path(folder: Path) -> Path:
    return folder / ENERGY_FILE


def read_generation(folder: Path) -> LearnedGeneration | None:
    """What was learned for the target whose predictors lie in `folder`; None where nothing was.

    Raises:
        UserError: the file can't be read.
    """
    path = generation_path(folder)
    return files.read_record(path, LearnedGeneration, GENERATION_VERSION, FIT) if path.is_file() else None


def read_generation_energy(folder: Path) -> EnergyModel | None:
    """What was learned of the energy of language models on that target; None where nothing was.

    Raises:
        UserError: the file can't be read.
    """
    path = generation_energy_path(folder)
    return files.read_record(path, EnergyModel, ENERGY_VERSION, FIT) if path.is_file() else None
