"""What generating text with a language model takes, measured with onnxruntime-genai.

recipes/llm/measure_genai.py writes these records, a line for each point, and what the GPU did in single steps beside them, to
`<workspace>/llm/measured`. recipes/llm/record_steps.py writes the kernel records of these steps to `<workspace>/llm/records`.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from hase.utils import files
from hase.utils.fingerprint import Machine
from hase.utils.frozen import Frozen
from hase.utils.paths import Workspace

Phase = Literal["first", "token"]  # the prompt's run with the first token; a run with a further one
PHASES: tuple[Phase, ...] = get_args(Phase)
REMEDY = "remove it, and measure that model again: python recipes/llm/measure_genai.py"


class StepEnergy(Frozen):
    """The energy of a phase that ran again and again.

    Attributes:
        steps: how often it ran.
        seconds: how long, all together.
        joules: used meanwhile, of the whole device.
    """

    steps: int
    seconds: float
    joules: float


class Generation(Frozen):
    """Requests of one size with one model.

    Attributes:
        model: the name of its folder.
        family, precision: of the model.
        batch, prompt, generated: sequences, and tokens of each before and after the first that is generated.
        cache: the length that genai's cache of keys and values has, which is its `max_length`.
        create_ms: until a generator is there, with its cache.
        first_ms: from the prompt to the first token, of each request.
        token_ms: of each request, or of the last one alone, the time of each further token.
        first_probe_us, token_probe_us: what the host's probe took meanwhile: the slower of its readings before and after a slot
            of runs; none where it was not read between.
        weights_mib: memory of the device that the loaded model holds before any request.
        peak_mib: the largest memory of the device meanwhile, beyond what it held before the model was loaded.
        first_energy, token_energy: of requests that end with the first token, and of the tokens after the first of one longer
            request; None where not measured.
        captured: whether tokens ran as a CUDA graph.
        failed: why it could not be measured; "" where it could.
        probe_us: what the probe of the host's pace took before and after.
        machine: the device and software.
        taken: when.
    """

    model: str
    family: str
    precision: str
    batch: int
    prompt: int
    generated: int
    cache: int
    create_ms: tuple[float, ...] = ()
    first_ms: tuple[float, ...] = ()
    token_ms: tuple[tuple[float, ...], ...] = ()
    first_probe_us: tuple[float, ...] = ()
    token_probe_us: tuple[tuple[float, ...], ...] = ()
    weights_mib: float = 0.0
    peak_mib: float = 0.0
    first_energy: StepEnergy | None = None
    token_energy: StepEnergy | None = None
    captured: bool = False
    failed: str = ""
    probe_us: tuple[float, ...] = ()
    machine: Machine
    taken: datetime


class GenerationMemory(Frozen):
    """Memory of the device that one request takes, in a process that ran nothing before it.

    Attributes:
        model, batch, prompt, generated, cache: as of a `Generation`.
        context_mib: held once ONNX Runtime has a CUDA context, with a session of one small node.
        weights_mib: held by the loaded model, beyond that.
        peak_mib: the largest while the request ran, beyond the context.
        failed: why there is none; "" where there is.
        machine, taken: as of a `Generation`.
    """

    model: str
    batch: int
    prompt: int
    generated: int
    cache: int
    context_mib: float = 0.0
    weights_mib: float = 0.0
    peak_mib: float = 0.0
    failed: str = ""
    machine: Machine
    taken: datetime


class TracedStep(Frozen):
    """What the GPU did in one step: its kernels, copies and fills in the order of their launches.

    Attributes:
        model, batch, prompt: whose step.
        step: 0 is the prompt with the first token, n the n-th token after it.
        host_us: how long the step took on the host, while it was traced.
        names: of the work, each once.
        work: places in `names`.
        start_us, duration_us, launched_us: of each piece, from the start of the step; when its launch began.
    """

    model: str
    batch: int
    prompt: int
    step: int
    host_us: float
    names: tuple[str, ...]
    work: tuple[int, ...]
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]
    launched_us: tuple[float, ...]


def measured_file(workspace: Workspace, model: str, memory: bool = False) -> Path:
    """What was measured of a model, its times or its memory: a line a point."""
    return workspace.root / "llm" / "measured" / f"{model}{'.memory' if memory else ''}.jsonl"


def measured_models(workspace: Workspace) -> list[str]:
    """The models whose times were measured, by the names of their folders, sorted."""
    return sorted(path.stem for path in measured_file(workspace, "").parent.glob("*.jsonl") if "." not in path.stem)


def measured_points(workspace: Workspace, model: str) -> list[Generation]:
    """The points of a model whose times could be measured.

    Raises:
        UserError: the file is missing or damaged.
    """
    points = files.read_records(measured_file(workspace, model), Generation, REMEDY)
    return [point for point in points if not point.failed]


def step_record_file(workspace: Workspace, point: Generation | GenerationMemory, phase: Phase) -> Path:
    """The kernel record of a step of a point: of the prompt, or of the token in the middle of those that were generated."""
    return workspace.root / "llm" / "records" / f"{point.model}@{point.batch}x{point.prompt}-{phase}.json"
