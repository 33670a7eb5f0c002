"""Measured text generation with onnxruntime-genai: times, memory, energy and traced steps.

recipes/llm/measure_genai.py writes these records to `<workspace>/llm/measured`, one line a point, and traces of single steps
next to them. recipes/llm/record_steps.py writes the steps' kernel records to `<workspace>/llm/records`.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.fingerprint import Machine
from hase.utils.paths import Workspace

Phase = Literal["first", "token"]  # the run of the prompt, which gives the first token; a run that gives a further token
PHASES: tuple[Phase, ...] = get_args(Phase)
REMEDY = "remove it, and measure that model again: python recipes/llm/measure_genai.py"


class StepEnergy(Frozen):
    """The energy of a phase that ran `steps` times in `seconds`, measured for the whole device."""

    steps: int
    seconds: float
    joules: float


class Generation(Frozen):
    """Requests of one size with one model."""

    model: str
    family: str
    precision: str
    batch: int  # number of sequences
    # prompt, generated: tokens of each sequence that are given, and that are generated after the first one
    prompt: int
    generated: int
    cache: int  # length of genai's cache of keys and values, its `max_length`
    create_ms: tuple[float, ...] = ()  # time to create a generator with its cache
    first_ms: tuple[float, ...] = ()  # of each request, from the prompt to the first token
    token_ms: tuple[tuple[float, ...], ...] = ()  # of each request, or only of the last one, the time of each further token
    # first_probe_us, token_probe_us: the slower of the host probe's readings before and after a slot of runs; empty if not read
    first_probe_us: tuple[float, ...] = ()
    token_probe_us: tuple[tuple[float, ...], ...] = ()
    weights_mib: float = 0.0  # device memory of the loaded model before any request
    peak_mib: float = 0.0  # largest device memory, minus that before the model was loaded
    # first_energy, token_energy: for requests that end with the first token, and for the further tokens of one longer request;
    # None if not measured
    first_energy: StepEnergy | None = None
    token_energy: StepEnergy | None = None
    captured: bool = False  # tokens ran as a CUDA graph
    failed: str = ""  # why it could not be measured; "" if it could
    probe_us: tuple[float, ...] = ()  # the host probe's readings before and after
    machine: Machine
    taken: datetime


class GenerationMemory(Frozen):
    """Device memory of one request in a new process. Sizes as in `Generation`."""

    model: str
    batch: int
    prompt: int
    generated: int
    cache: int
    context_mib: float = 0.0  # ONNX Runtime's CUDA context, with a session of one small node
    weights_mib: float = 0.0  # added by the loaded model
    peak_mib: float = 0.0  # the most while the request ran, without the context
    failed: str = ""  # why it could not be measured; "" if it could
    machine: Machine
    taken: datetime


class TracedStep(Frozen):
    """The GPU's kernels, copies and fills in one step, in launch order."""

    model: str
    batch: int
    prompt: int
    step: int  # 0 is the prompt with the first token, n the n-th token after it
    host_us: float  # duration on the host, while traced
    names: tuple[str, ...]  # distinct names of the work
    work: tuple[int, ...]  # each piece of work, as an index into `names`
    # start_us, duration_us, launched_us: of each piece: start, duration, and start of its launch, from the start of the step
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]
    launched_us: tuple[float, ...]


def measured_file(workspace: Workspace, model: str, memory: bool = False) -> Path:
    """The file with a model's measured times, or with its measured memory: one line a point."""
    return workspace.root / "llm" / "measured" / f"{model}{'.memory' if memory else ''}.jsonl"


def measured_model_names(workspace: Workspace) -> list[str]:
    """The folder names of all models with measured times, sorted."""
    return sorted(path.stem for path in measured_file(workspace, "").parent.glob("*.jsonl") if "." not in path.stem)


def measured_points(workspace: Workspace, model: str) -> list[Generation]:
    """The successfully measured points of a model."""
    points = files.read_records(measured_file(workspace, model), Generation, REMEDY)
    return [point for point in points if not point.failed]


def step_record_file(workspace: Workspace, point: Generation | GenerationMemory, phase: Phase) -> Path:
    """The kernel record of a point's prompt, or of its middle generated token."""
    return workspace.root / "llm" / "records" / f"{point.model}@{point.batch}x{point.prompt}-{phase}.json"
