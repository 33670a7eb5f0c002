"""Opens a stage on a unit, by OpenVINO, ONNX Runtime or PyTorch: a function of its inputs, which lie in the host's memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hase.extras.graph_stages.layer import HOST, Array, stage_function
from hase.extras.graph_stages.models import has_openvino, kind_of
from hase.extras.graph_stages.units import OPENVINO, ORT, TORCH, StageTask
from hase.utils.errors import UserError
from hase.utils.lazy import onnxruntime, openvino, torch
from hase.utils.ort_sessions import model_errors, open_session

Feed = Mapping[str, Array]
TOLERANCE = {"f32": 1e-4}  # of outputs, relative to the largest
REDUCED_TOLERANCE = 2e-2  # at any other precision: float16 has 11 bits, bfloat16 8, and many values are added up
PRECISION_HINT = "INFERENCE_PRECISION_HINT"


ADD_UP = ("sum", "count")  # ONNX Runtime's threads lose additions to one node on the CPU (microsoft/onnxruntime#18048)
ON_HOST = ("node_count",)  # a shape, which runtimes read on the host


class Refused(Exception):
    """A runtime can't run a stage on a unit, or computes something else; the message says why in one line."""


class OpenedStage:
    """A stage that is ready to run; this one computes on arrays in the host's memory.

    Attributes:
        ran_on: the device, by the unit's name; `CPU` where PyTorch stands in for another unit.
        runtime: what runs it.
        threads: on the CPU; 0 for the runtime's own choice.
        inference_precision: `f32` or `f16`, as OpenVINO says.
        memory: where `run_resident` takes its inputs: `host`, or `cuda`. Stages of one runtime accept each other's values.
    """

    memory = HOST

    def __init__(self, task: StageTask, ran_on: str, runtime: str, precision: str, run: Callable[[Feed], Array]) -> None:
        self.output, self.threads = task.definition.outputs[0], task.threads
        self.ran_on, self.runtime, self.inference_precision = ran_on, runtime, precision
        self.run = run  # the inputs by name give the output; all lie in the host's memory, and what a device needs is copied

    def to_unit(self, name: str, array: Array) -> Any:
        """A tensor copied to the unit's memory, to the end."""
        return array

    def run_resident(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the stage on values in the unit's memory, to the end; its output by name stays there."""
        return {self.output: self.run(values)}

    def to_host(self, name: str, value: Any) -> Array:
        """A value copied from the unit's memory."""
        return np.asarray(value)


def open_stage(task: StageTask) -> tuple[OpenedStage, str]:
    """Opens a stage by its unit's runtime, or by PyTorch where that one refuses it.

    Whatever opens it has computed the right output once.

    Returns:
        The stage, and why PyTorch runs it; "" where the unit's own runtime does.

    Raises:
        Refused: PyTorch can't run it either.
    """
    try:
        return open_by(task.runtime, task), ""
    except Refused as refused:
        if task.runtime == TORCH:
            raise
        try:
            return open_by(TORCH, task), f"{task.runtime}: {refused}"
        except Refused as again:
            raise Refused(f"{task.runtime}: {refused}; {TORCH}: {again}") from None


def open_by(runtime: str, task: StageTask) -> OpenedStage:
    """Opens a stage by one runtime, and checks what it computes.

    Raises:
        Refused: it can't, or its output is wrong.
    """
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
    """Why an output does not count; "" if it is right but for rounding."""
    off = difference(output, expected)
    right = off <= TOLERANCE.get(precision, REDUCED_TOLERANCE)  # NaN is wrong, too
    return "" if right else f"its output is wrong by {off:.2g} of the largest value"


def difference(output: Array, expected: Array) -> float:
    """The largest difference, relative to the largest expected value; infinite if the shapes differ."""
    if output.shape != expected.shape:
        return float("inf")
    return float(np.abs(output - expected).max() / max(float(np.abs(expected).max()), 1e-12))


def one_line(error: BaseException) -> str:
    """An error's message in one line of at most 300 characters, without the places in OpenVINO's source."""
    text = re.sub(r"Exception from \S+:\d+: ", "", " ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " …"


def by_openvino(task: StageTask) -> OpenedStage:
    """By OpenVINO, from the IR, which is the ONNX model where there is none."""
    if not has_openvino():
        raise Refused("the package openvino is not installed")
    core = openvino.Core()
    settings: dict[str, Any] = {PRECISION_HINT: task.inference_precision, "PERFORMANCE_HINT": "LATENCY"}
    if kind_of(task.unit) == "CPU" and task.threads:
        settings["INFERENCE_NUM_THREADS"] = task.threads
    settable = {name for name, access in core.get_property(task.unit, "SUPPORTED_PROPERTIES").items() if access == "RW"}
    compiled = core.compile_model(str(task.file.ir(task.folder)), task.unit, {
        name: value for name, value in settings.items() if name in settable})  # a driver may have one precision alone
    tells_precision = PRECISION_HINT in compiled.get_property("SUPPORTED_PROPERTIES")
    precision = compiled.get_property(PRECISION_HINT).get_type_name() if tells_precision else task.inference_precision
    request, names = compiled.create_infer_request(), [port.get_any_name() for port in compiled.inputs]

    def run(feed: Feed) -> Array:
        return np.asarray(request.infer({name: feed[name] for name in names}, share_inputs=True, share_outputs=True)[0])

    return OpenedStage(task, task.unit, OPENVINO, precision, run)


def by_ort(task: StageTask) -> OpenedStage:
    """By ONNX Runtime, on the CPU or by CUDA without TF32. On the CPU one thread adds up (ADD_UP)."""
    device = "cuda" if task.unit == "CUDA" else "cpu"
    if kind_of(task.unit) not in ("CPU", "CUDA"):
        raise Refused(f"ONNX Runtime is not used for {task.unit}")
    path = task.file.onnx(task.folder)
    threads = 1 if device == "cpu" and task.definition.name in ADD_UP else task.threads
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
    """A session of ONNX Runtime on an NVIDIA GPU; values are OrtValues."""

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
    """By PyTorch, on the unit itself where it can use it, else on the CPU; in FP32, without TF32."""
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
    """An array as torch's tensor on a device, or on the host where runtimes read it there."""
    return torch.from_numpy(array).to("cpu" if name in ON_HOST else device)


class TorchOnCuda(OpenedStage):
    """A stage by PyTorch on an NVIDIA GPU; values are torch's tensors."""

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
    """torch's name of the device on which it runs work for a unit, and the unit's name of that."""
    if unit == "CUDA" and torch.cuda.is_available():
        return "cuda", unit
    if kind_of(unit) == "GPU" and torch.xpu.is_available():
        return f"xpu:{unit.partition('.')[2] or 0}", unit
    return "cpu", "CPU"


OPENERS: dict[str, Callable[[StageTask], OpenedStage]] = {OPENVINO: by_openvino, ORT: by_ort, TORCH: by_torch}
