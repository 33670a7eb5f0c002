"""Finds the processing units of this machine, and opens stages on them.

Units have OpenVINO's names; an NVIDIA GPU is `CUDA`. If the unit's own runtime refuses a stage, PyTorch runs it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.extras.graph_stages.measuring.layer import (
    HOST,
    STAGES,
    Array,
    GraphSize,
    GraphSource,
    LayerStage,
    Weights,
    compute_tensors,
    draw_weights,
    stage_function,
)
from hase.extras.graph_stages.measuring.models import FORM_OF, ModelFile, has_openvino, stage_model_file, unit_kind
from hase.extras.graph_stages.measuring.records import UnitReport
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import gpu_facts, machine, package_version
from hase.utils.lazy import onnxruntime, openvino, torch
from hase.utils.ort_sessions import model_errors, open_session
from hase.utils.paths import as_file_name

OPENVINO, ORT, TORCH = "openvino", "ort", "torch"
INSTALL = "pip install '.[stages]'"
KINDS = ("CPU", "GPU", "NPU", "CUDA")
CPU_RUNTIMES = (OPENVINO, ORT, TORCH)
PACKAGES = {OPENVINO: ("openvino",), ORT: ("onnxruntime-gpu", "onnxruntime"), TORCH: ("torch",)}
NEEDS = {"GPU": "an Intel GPU with its driver (on Linux: intel-opencl-icd, and a user who may read /dev/dri)",
         "NPU": "an Intel Core Ultra with the NPU's driver (on Linux: a user who may read /dev/accel)"}
INFERENCE_PRECISION = {"CPU": "f32", "CUDA": "f32", "GPU": "f16", "NPU": "f16"}  # in which a kind of unit computes


def openvino_devices() -> dict[str, str]:
    """OpenVINO's devices on this machine with their full names; empty without OpenVINO."""
    if not has_openvino():
        return {}
    core = openvino.Core()
    return {name: str(core.get_property(name, "FULL_DEVICE_NAME")).strip() for name in core.available_devices}


def runtime_version(runtime: str) -> str:
    """The installed version; "" if there is none."""
    return package_version(*PACKAGES[runtime])


def find_units(cpu_runtime: str | None = None, devices: Mapping[str, str] | None = None) -> list[UnitReport]:
    """Every unit that this machine has or could have; absent units say why.

    The CPU's runtime is OpenVINO if installed, else PyTorch, unless `cpu_runtime` is given. `devices` replaces OpenVINO's.
    """
    present = openvino_devices() if devices is None else dict(devices)
    chosen = cpu_runtime or (OPENVINO if "CPU" in present else TORCH)
    if not runtime_version(chosen):
        raise UserError(f"--cpu-runtime {chosen}: it is not installed; {INSTALL}")
    units = [_unit("CPU", present.get("CPU") or machine("cpu").device_name, chosen)]
    for kind in ("GPU", "NPU"):
        names = [name for name in present if unit_kind(name) == kind]
        units += [_unit(name, present[name], OPENVINO) for name in names] or [_absent(kind, _why_absent(kind, present))]
    if why := _why_no_cuda():
        return [*units, _absent("CUDA", why)]
    return [*units, _unit("CUDA", gpu_facts()["name"], ORT)]


def _unit(name: str, device_name: str, runtime: str) -> UnitReport:
    return UnitReport(name=name, present=True, device_name=device_name, runtime=runtime,
                      inference_precision=INFERENCE_PRECISION[unit_kind(name)])


def _absent(name: str, why: str) -> UnitReport:
    return UnitReport(name=name, present=False, why=why)


def _why_absent(kind: str, devices: Mapping[str, str]) -> str:
    if not devices:
        return f"the package openvino, which finds it, is not installed; {INSTALL}"
    return f"OpenVINO {runtime_version(OPENVINO)} finds none (it finds {', '.join(devices)}); it needs {NEEDS[kind]}"


def _why_no_cuda() -> str:
    """Why CUDA is missing; "" if it is there."""
    if not gpu_facts():
        return "no NVIDIA GPU that the driver can talk to; nvidia-smi should list one"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this ONNX Runtime has no CUDA provider; pip install onnxruntime-gpu in place of onnxruntime"
    return ""


def choose_units(reports: Sequence[UnitReport], requested: Sequence[str]) -> list[UnitReport]:
    """The requested units that are present (all if `requested` is empty). Raises UserError, with reasons, if there is none."""
    names = [unit.name for unit in reports]
    for name in requested:
        if name not in names and name not in KINDS:
            raise UserError(f"--units {name}: no such unit; this machine was asked for {', '.join(names)}")
    wanted = [unit for unit in reports if not requested or unit.name in requested or unit_kind(unit.name) in requested]
    if present := [unit for unit in wanted if unit.present]:
        return present
    raise UserError("no unit to measure: " + "; ".join(f"{unit.name}: {unit.why}" for unit in wanted))


# tasks -------------------------------------------------------------------------------------------------------------------

class StageTask(Frozen):
    """One stage to measure on one unit, on one graph."""

    size: GraphSize
    source: GraphSource = GraphSource()
    graph: str
    unit: str
    stage: int
    runtime: str  # what should run it: `openvino`, `ort` or `torch`
    runtime_version: str = ""  # another one is measured again
    threads: int = 0  # on the CPU; 0 is the runtime's default
    warmup: int = 10
    runs: int = 50
    models: str  # the folder with `onnx_models` and `ir_models`

    @property
    def id(self) -> str:
        """A text of all settings, so that the journal distinguishes them."""
        size = self.size
        parts = (self.unit, f"stage{self.stage}", size.name, f"f{size.features}", f"h{size.hidden}", self.graph,
                 f"s{self.source.seed}", f"{self.runtime}{self.runtime_version}", f"t{self.threads}", f"w{self.warmup}",
                 f"r{self.runs}")
        return as_file_name("_".join(parts))

    @property
    def definition(self) -> LayerStage:
        return STAGES[self.stage - 1]

    @property
    def folder(self) -> Path:
        """The folder of the models."""
        return Path(self.models)

    @property
    def file(self) -> ModelFile:
        """The model file."""
        return stage_model_file(self.unit, self.definition, self.size, self.source.seed)

    @property
    def precision(self) -> str:
        """Precision of the weights: `FP32` or `FP16`."""
        return FORM_OF[unit_kind(self.unit)].precision

    @property
    def inference_precision(self) -> str:
        return INFERENCE_PRECISION[unit_kind(self.unit)]

    @property
    def weights(self) -> Weights:
        """The weights as the unit's files store them."""
        drawn = draw_weights(self.size.features, self.size.hidden, self.source.seed)
        return drawn if self.precision == "FP32" else drawn.rounded()

    @property
    def tensors(self) -> dict[str, Array]:
        """All tensors of the layer on this graph: the inputs and expected output of the stage."""
        return _tensors(self.size, self.source, self.precision)


@functools.lru_cache(maxsize=1)  # the stages of one size come one after another
def _tensors(size: GraphSize, source: GraphSource, precision: str) -> dict[str, Array]:
    weights = draw_weights(size.features, size.hidden, source.seed)
    graph = source.graph(size.nodes, size.edges)
    return compute_tensors(graph, weights if precision == "FP32" else weights.rounded(), source.seed)


def facts_of(task: StageTask) -> dict[str, Any]:
    """What every measurement records about its task, by field of `StageRecord`."""
    size, stage = task.size, task.definition
    return {"nodes": size.nodes, "edges": size.edges, "features": size.features, "hidden": size.hidden, "graph": task.graph,
            "unit": task.unit, "stage": stage.id, "stage_name": stage.name, "precision": task.precision,
            "bytes_in": stage.bytes_in(size), "bytes_out": stage.bytes_out(size)}


# opened stages -----------------------------------------------------------------------------------------------------------

Feed = Mapping[str, Array]
TOLERANCE = {"f32": 1e-4}  # of outputs, relative to the largest
REDUCED_TOLERANCE = 2e-2  # at any other precision: float16 has 11 bits, bfloat16 8, and many values are added up
PRECISION_HINT = "INFERENCE_PRECISION_HINT"
SUMMING = ("sum", "count")  # ONNX Runtime's threads lose additions to one node on the CPU (microsoft/onnxruntime#18048)
ON_HOST = ("node_count",)  # a shape, which runtimes read on the host


class Refused(Exception):
    """A runtime cannot run a stage on a unit, or computes a wrong result; the message says why in one line."""


class OpenedStage:
    """A stage that is ready to run; this class computes on arrays in the host's memory.

    Attributes:
        ran_on: the device, by the unit's name; `CPU` if PyTorch replaces another unit.
        memory: where `run_resident` takes its inputs: `host` or `cuda`. Stages of one runtime accept each other's values.
    """

    memory = HOST

    def __init__(self, task: StageTask, ran_on: str, runtime: str, precision: str, run: Callable[[Feed], Array]) -> None:
        self.output, self.threads = task.definition.outputs[0], task.threads
        self.ran_on, self.runtime, self.inference_precision = ran_on, runtime, precision
        self.run = run  # inputs by name to output, in the host's memory; copies for the device are part of it

    def to_unit(self, name: str, array: Array) -> Any:
        """Copies a tensor to the unit's memory; returns when the copy is complete."""
        return array

    def run_resident(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the stage to completion on values in the unit's memory; the output, by name, stays there."""
        return {self.output: self.run(values)}

    def to_host(self, name: str, value: Any) -> Array:
        """Copies a value from the unit's memory."""
        return np.asarray(value)


def open_stage(task: StageTask) -> tuple[OpenedStage, str]:
    """Opens a stage by its unit's runtime, or by PyTorch if that refuses it, and checks its output once.

    Also returns why PyTorch runs it ("" if the unit's own runtime does). Raises Refused if PyTorch cannot run it either.
    """
    try:
        return open_by(task.runtime, task), ""
    except Refused as refused:
        if task.runtime == TORCH:
            raise
        try:
            return open_by(TORCH, task), f"{task.runtime}: {refused}"
        except Refused as torch_refused:
            raise Refused(f"{task.runtime}: {refused}; {TORCH}: {torch_refused}") from None


def open_by(runtime: str, task: StageTask) -> OpenedStage:
    """Opens a stage by one runtime and checks its output. Raises Refused if it cannot run or the output is wrong."""
    try:
        opened = OPENERS[runtime](task)
        feed, expected = task.tensors, task.tensors[task.definition.outputs[0]]
        output = opened.run(feed)
    except (RuntimeError, UserError, ModuleNotFoundError) as error:  # OpenVINO's and torch's errors are RuntimeErrors
        raise Refused(one_line(error)) from None
    if why := wrong(output, expected, opened.inference_precision):
        raise Refused(why)
    return opened


def wrong(output: Array, expected: Array, precision: str) -> str:
    """Why an output is wrong; "" if it is correct apart from rounding."""
    error = difference(output, expected)
    is_right = error <= TOLERANCE.get(precision, REDUCED_TOLERANCE)  # NaN is wrong, too
    return "" if is_right else f"its output is wrong by {error:.2g} of the largest value"


def difference(output: Array, expected: Array) -> float:
    """The largest difference relative to the largest expected value; infinite if the shapes differ."""
    if output.shape != expected.shape:
        return float("inf")
    return float(np.abs(output - expected).max() / max(float(np.abs(expected).max()), 1e-12))


def one_line(error: BaseException) -> str:
    """An error's message in one line of at most 300 characters, without locations in OpenVINO's source."""
    text = re.sub(r"Exception from \S+:\d+: ", "", " ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " …"


def by_openvino(task: StageTask) -> OpenedStage:
    """Opens a stage by OpenVINO, from the IR, or from the ONNX model without one."""
    if not has_openvino():
        raise Refused("the package openvino is not installed")
    core = openvino.Core()
    settings: dict[str, Any] = {PRECISION_HINT: task.inference_precision, "PERFORMANCE_HINT": "LATENCY"}
    if unit_kind(task.unit) == "CPU" and task.threads:
        settings["INFERENCE_NUM_THREADS"] = task.threads
    settable = {name for name, access in core.get_property(task.unit, "SUPPORTED_PROPERTIES").items() if access == "RW"}
    compiled = core.compile_model(str(task.file.ir(task.folder)), task.unit, {
        name: value for name, value in settings.items() if name in settable})  # a driver may support only one precision
    tells_precision = PRECISION_HINT in compiled.get_property("SUPPORTED_PROPERTIES")
    precision = compiled.get_property(PRECISION_HINT).get_type_name() if tells_precision else task.inference_precision
    request, names = compiled.create_infer_request(), [port.get_any_name() for port in compiled.inputs]

    def run(feed: Feed) -> Array:
        return np.asarray(request.infer({name: feed[name] for name in names}, share_inputs=True, share_outputs=True)[0])

    return OpenedStage(task, task.unit, OPENVINO, precision, run)


def by_ort(task: StageTask) -> OpenedStage:
    """Opens a stage by ONNX Runtime, on the CPU or by CUDA without TF32. On the CPU one thread does the sums (SUMMING)."""
    device = "cuda" if task.unit == "CUDA" else "cpu"
    if unit_kind(task.unit) not in ("CPU", "CUDA"):
        raise Refused(f"ONNX Runtime is not used for {task.unit}")
    path = task.file.onnx(task.folder)
    threads = 1 if device == "cpu" and task.definition.name in SUMMING else task.threads
    session = open_session(path, device, provider_options={"use_tf32": "0"}, threads=threads)
    names = [port.name for port in session.get_inputs()]

    def run(feed: Feed) -> Array:
        with model_errors(path.name):
            return np.asarray(session.run(None, {name: feed[name] for name in names})[0])

    if device == "cuda":
        return OrtOnCuda(task, session, run)
    opened = OpenedStage(task, task.unit, ORT, "f32", run)
    opened.threads = threads
    return opened


class OrtOnCuda(OpenedStage):
    """An ONNX Runtime session on an NVIDIA GPU; values are OrtValues."""

    memory = "cuda"
    place: tuple[str, int] = ("cuda", 0)

    def __init__(self, task: StageTask, session: onnxruntime.InferenceSession, run: Callable[[Feed], Array]) -> None:
        super().__init__(task, task.unit, ORT, "f32", run)
        self._session, self._names = session, [port.name for port in session.get_inputs()]

    def to_unit(self, name: str, array: Array) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, *(("cpu", 0) if name in ON_HOST else self.place))

    def run_resident(self, values: Mapping[str, Any]) -> dict[str, Any]:
        binding = self._session.io_binding()
        for name in self._names:
            binding.bind_ortvalue_input(name, values[name])
        binding.bind_output(self.output, *self.place)
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return {self.output: binding.get_outputs()[0]}

    def to_host(self, name: str, value: Any) -> Array:
        return np.asarray(value.numpy())


def by_torch(task: StageTask) -> OpenedStage:
    """Opens a stage by PyTorch, on the unit itself if possible, else on the CPU; in FP32, without TF32."""
    device, ran_on = _torch_device(task.unit)
    if task.threads:
        torch.set_num_threads(task.threads)
    torch.set_float32_matmul_precision("highest")
    compute, names = stage_function(task.definition, task.weights, device), task.definition.inputs

    def run(feed: Feed) -> Array:
        with torch.inference_mode():
            return np.asarray(compute({name: torch_tensor(name, feed[name], device) for name in names}).cpu().numpy())

    if device == "cuda":
        return TorchOnCuda(task, ran_on, run, compute)
    return OpenedStage(task, ran_on, TORCH, "f32", run)


def torch_tensor(name: str, array: Array, device: str) -> torch.Tensor:
    """An array as a torch tensor on a device, or on the host for tensors that runtimes read there."""
    return torch.from_numpy(array).to("cpu" if name in ON_HOST else device)


class TorchOnCuda(OpenedStage):
    """A PyTorch stage on an NVIDIA GPU; values are torch tensors."""

    memory = "cuda"

    def __init__(self, task: StageTask, ran_on: str, run: Callable[[Feed], Array],
                 compute: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]) -> None:
        super().__init__(task, ran_on, TORCH, "f32", run)
        self._compute = compute

    def to_unit(self, name: str, array: Array) -> Any:
        copied = torch_tensor(name, array, "cuda")
        torch.cuda.synchronize()
        return copied

    def run_resident(self, values: Mapping[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            output = self._compute(values)
        torch.cuda.synchronize()
        return {self.output: output}

    def to_host(self, name: str, value: Any) -> Array:
        return np.asarray(value.cpu().numpy())


def _torch_device(unit: str) -> tuple[str, str]:
    """The torch device that runs work for a unit, and that device's unit name."""
    if unit == "CUDA" and torch.cuda.is_available():
        return "cuda", unit
    if unit_kind(unit) == "GPU" and torch.xpu.is_available():
        return f"xpu:{unit.partition('.')[2] or 0}", unit
    return "cpu", "CPU"


OPENERS: dict[str, Callable[[StageTask], OpenedStage]] = {OPENVINO: by_openvino, ORT: by_ort, TORCH: by_torch}
