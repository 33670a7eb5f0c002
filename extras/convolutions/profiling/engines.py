"""Runs a model's convolutions under one algorithm, through cuDNN's legacy API, torch, or the package aithree.

The `forward` of every `nn.Conv2d` is replaced; hooks and other modules stay as they are. Layers are planned for one size of the
model's input; a layer that is called several times in a run has one plan per call.

torch's own interface lets cuDNN choose the algorithm. Only the legacy API takes one (cuDNN API reference, `cudnn_cnn` library;
deprecated since cuDNN 9 but still exported). It is called with ctypes on the library that torch has loaded. Descriptors can be
made without a GPU; a handle needs one.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hase.extras.convolutions.profiling.algorithms import (
    DEFAULT,
    FROM_AI3,
    GPU_ALGORITHMS,
    GUESS,
    Algorithm,
    ConvShape,
    NotSupported,
    convolution_shape,
    never_runs,
)
from hase.utils.errors import UserError
from hase.utils.lazy import ai3, torch
from hase.utils.text import first_and_count

if TYPE_CHECKING:
    from hase.extras.convolutions.profiling.algorithms import Convolution, Tensor

SUCCESS = 0
NCHW = 0  # cudnnTensorFormat_t
DTYPES = {"fp32": 0, "fp16": 2}  # cudnnDataType_t
FLOAT = DTYPES["fp32"]
CROSS_CORRELATION = 1  # cudnnConvolutionMode_t
DEFAULT_MATH, TENSOR_OP_MATH, FMA_MATH = 0, 1, 3  # cudnnMathType_t; the default allows TF32 from Ampere on
NUMBERS = {name: algorithm.number for name, algorithm in GPU_ALGORITHMS.items() if algorithm.number is not None}  # cuDNN's
MOST_CHOICES = 8  # that the heuristic is asked for
MAPS = Path("/proc/self/maps")  # the files that this process has mapped


class _Choice(ctypes.Structure):
    """cudnnConvolutionFwdAlgoPerf_t."""

    _fields_ = [("algorithm", c_int), ("status", c_int), ("time_ms", c_float), ("memory", c_size_t), ("determinism", c_int),
                ("math", c_int), ("reserved", c_int * 3)]


def _path_of_loaded() -> str:
    """Path of the libcudnn that this process has loaded, or its plain name if the path is unknown."""
    torch.backends.cudnn.version()  # makes torch load it
    if not MAPS.exists():
        return "libcudnn.so.9"
    paths = {line.split()[-1] for line in MAPS.read_text(encoding="utf-8").splitlines() if "/libcudnn.so" in line}
    return min(paths, default="libcudnn.so.9")


@functools.cache
def library() -> ctypes.CDLL:
    """cuDNN with its function types. Raises UserError if torch has no cuDNN, or one without the legacy API."""
    if not torch.backends.cudnn.is_available():
        raise UserError("cuDNN is not available: this torch was built without it; install the wheels of requirements.txt")
    try:
        loaded = ctypes.CDLL(_path_of_loaded())
        loaded.cudnnGetErrorString.restype = c_char_p
        loaded.cudnnConvolutionForward.argtypes = [
            c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_size_t, c_void_p, c_void_p,
            c_void_p]
        loaded.cudnnGetConvolutionForwardWorkspaceSize.argtypes = [c_void_p] * 5 + [c_int, POINTER(c_size_t)]
        loaded.cudnnGetConvolutionForwardAlgorithm_v7.argtypes = [c_void_p] * 5 + [c_int, POINTER(c_int), POINTER(_Choice)]
        loaded.cudnnSetStream.argtypes = [c_void_p, c_void_p]
    except (OSError, AttributeError) as error:
        raise UserError(f"cuDNN is not available: {error}; algorithms are forced through its legacy API, which cuDNN 8 and 9 "
                        "have") from None
    return loaded


def check(status: int) -> None:
    """Raises `NotSupported` with cuDNN's status and reason if a call failed."""
    if status == SUCCESS:
        return
    name = library().cudnnGetErrorString(status).decode()
    raise NotSupported(name if "UNKNOWN" not in name else f"cuDNN status {status}", _last_error())


def _last_error() -> str:
    """cuDNN's text for the last error of this thread; "" before version 9, which has no such text."""
    if not hasattr(library(), "cudnnGetLastErrorString"):
        return ""
    text = ctypes.create_string_buffer(1024)
    library().cudnnGetLastErrorString(text, c_size_t(len(text)))
    return text.value.decode(errors="replace").strip()


def _free_with(owner: object, function: str, handle: c_void_p) -> None:
    """Frees `handle` with cuDNN's `function` when `owner` is collected; not at exit, since CUDA may have ended before."""
    weakref.finalize(owner, getattr(library(), function), handle).atexit = False


class Descriptors:
    """cuDNN's descriptors of one convolution, freed with this object. Raises NotSupported if cuDNN refuses the shape."""

    def __init__(self, shape: ConvShape, tf32: bool) -> None:
        self.math = TENSOR_OP_MATH if shape.dtype == "fp16" else DEFAULT_MATH if tf32 else FMA_MATH
        dtype = DTYPES[shape.dtype]
        self.images, self.output = self._create("Tensor"), self._create("Tensor")
        self.weights, self.convolution = self._create("Filter"), self._create("Convolution")
        check(library().cudnnSetTensor4dDescriptor(
            self.images, NCHW, dtype, shape.batch, shape.in_channels, shape.height, shape.width))
        check(library().cudnnSetFilter4dDescriptor(
            self.weights, dtype, NCHW, shape.out_channels, shape.in_channels // shape.groups, *shape.kernel))
        check(library().cudnnSetConvolution2dDescriptor(
            self.convolution, *shape.padding, *shape.stride, *shape.dilation, CROSS_CORRELATION, FLOAT))
        check(library().cudnnSetConvolutionGroupCount(self.convolution, shape.groups))
        self.set_math(self.math)
        sizes = [c_int() for _ in range(4)]
        check(library().cudnnGetConvolution2dForwardOutputDim(self.convolution, self.images, self.weights, *map(byref, sizes)))
        self.output_shape = tuple(size.value for size in sizes)
        check(library().cudnnSetTensor4dDescriptor(self.output, NCHW, dtype, *self.output_shape))

    @property
    def handles(self) -> tuple[c_void_p, ...]:
        """Handles in the order in which cuDNN's functions take them."""
        return self.images, self.weights, self.convolution, self.output

    def _create(self, kind: str) -> c_void_p:
        descriptor = c_void_p()
        check(getattr(library(), f"cudnnCreate{kind}Descriptor")(byref(descriptor)))
        _free_with(self, f"cudnnDestroy{kind}Descriptor", descriptor)
        return descriptor

    def set_math(self, math: int) -> None:
        """Sets cudnnMathType_t."""
        check(library().cudnnSetConvolutionMathType(self.convolution, math))


class Choice(NamedTuple):
    """An algorithm from cuDNN's heuristic, with its math type."""

    algorithm: str
    math: int


class Cudnn:
    """A cuDNN handle on the current GPU. Raises UserError without a GPU or cuDNN."""

    def __init__(self) -> None:
        self._handle = c_void_p()
        try:
            check(library().cudnnCreate(byref(self._handle)))
        except NotSupported as error:
            raise UserError(f"cuDNN is not available: {error}") from None
        _free_with(self, "cudnnDestroy", self._handle)

    def use_stream(self) -> None:
        """Makes cuDNN work on torch's current stream."""
        check(library().cudnnSetStream(self._handle, torch.cuda.current_stream().cuda_stream))

    def workspace_bytes(self, descriptors: Descriptors, number: int) -> int:
        """Workspace that an algorithm needs, in bytes. Raises NotSupported if it cannot compute this convolution."""
        size = c_size_t()
        check(library().cudnnGetConvolutionForwardWorkspaceSize(
            self._handle, *descriptors.handles, number, byref(size)))
        return size.value

    def choices(self, descriptors: Descriptors) -> list[Choice]:
        """Algorithms that cuDNN's heuristic proposes for a convolution, best first."""
        ranked, count = (_Choice * MOST_CHOICES)(), c_int()
        check(library().cudnnGetConvolutionForwardAlgorithm_v7(
            self._handle, *descriptors.handles, MOST_CHOICES, byref(count), ranked))
        names = {number: name for name, number in NUMBERS.items()}
        return [Choice(names[choice.algorithm], choice.math) for choice in ranked[:count.value]
                if choice.status == SUCCESS and choice.algorithm in names]

    def forward(self, descriptors: Descriptors, number: int, images: Tensor, weights: Tensor, output: Tensor,
                workspace: Tensor | None) -> None:
        """Computes `output` without waiting for the GPU. Raises NotSupported if cuDNN refuses."""
        check(library().cudnnConvolutionForward(
            self._handle, byref(_ONE), descriptors.images, images.data_ptr(), descriptors.weights, weights.data_ptr(),
            descriptors.convolution, number, workspace.data_ptr() if workspace is not None else None,
            workspace.numel() if workspace is not None else 0, byref(_ZERO), descriptors.output, output.data_ptr()))


_ONE, _ZERO = c_float(1.0), c_float(0.0)


# engines, and models whose layers run under them -------------------------------------------------------------------------

INSTALL_AI3 = "pip install '.[convolutions]'"
OK, INACCURATE, FAILED = "ok", "INACCURATE", "FAILED"
INCOMPATIBLE = "not compatible with model"  # in the message for a model that is refused
# The largest relative error (Euclidean norm) of a layer's output. TF32 and half precision keep 10 bits of each factor, which
# gives about 5e-4; Winograd's transform then loses some 4 bits more.
TOLERANCES = {("fp32", False): 1e-4, ("fp32", True): 2e-2, ("fp16", False): 2e-2, ("fp16", True): 2e-2}
# Of a model's output: errors grow with its depth. Noise of 5e-4 in each layer gave 0.07 in resnet152 and 0.0003 in alexnet; a
# layer that runs another one's plan gives more than 1.
MODEL_TOLERANCE, MOST_MODEL_TOLERANCE = 100.0, 0.5  # factor on a layer's tolerance; upper limit
NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True)
class LayerPlan:
    """How one layer runs for one input size; for `guess`, `algorithm` is the one that cuDNN chose."""

    run: Callable[[Tensor], Tensor]
    algorithm: str
    workspace_bytes: int = 0


class Engine(Protocol):
    """Plans layers under one algorithm."""

    def plan(self, layer: Convolution, images: Tensor) -> LayerPlan:
        """Plans `layer` for inputs like `images`. Raises NotSupported if the algorithm cannot run it."""
        ...


class TorchEngine:
    """torch's own convolution."""

    def plan(self, layer: Convolution, images: Tensor) -> LayerPlan:
        return LayerPlan(lambda images: type(layer).forward(layer, images), DEFAULT)


def ai3_missing() -> str:
    """Why the package aithree cannot be used; "" if it can."""
    try:
        return "" if ai3.swap_torch.Conv2D else "the package aithree is not whole"
    except ImportError as error:  # aithree itself, or packaging, which it needs without declaring it
        return f"the package aithree is not there ({error})"


class Ai3Engine:
    """The package aithree, on a CPU. Raises UserError if it is not installed."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        if missing := ai3_missing():
            raise UserError(f"algorithm {algorithm} on a CPU: {missing}; {INSTALL_AI3}")
        self._convolution = ai3.swap_torch.Conv2D

    def plan(self, layer: Convolution, images: Tensor) -> LayerPlan:
        if images.dtype != torch.float32:
            raise NotSupported("DTYPE", f"aithree computes in single precision, not in {images.dtype}")
        convolution = self._convolution(layer, self._algorithm, "torch")
        return LayerPlan(lambda images: convolution.forward(images.contiguous()), self._algorithm)


class CudnnEngine:
    """cuDNN's legacy API, with a named algorithm or (`guess`) the first choice of its heuristic."""

    def __init__(self, algorithm: Algorithm, tf32: bool) -> None:
        self._cudnn, self._algorithm, self._tf32 = Cudnn(), algorithm, tf32

    def plan(self, layer: Convolution, images: Tensor) -> LayerPlan:
        shape = convolution_shape(layer, images)
        descriptors = Descriptors(shape, self._tf32)
        self._cudnn.use_stream()
        name = self._algorithm.name if self._algorithm.number is not None else self._chosen(descriptors, shape)
        number = NUMBERS[name]
        size = self._cudnn.workspace_bytes(descriptors, number)

        def run(images: Tensor) -> Tensor:
            output = torch.empty(descriptors.output_shape, dtype=images.dtype, device=images.device)
            workspace = torch.empty(size, dtype=torch.uint8, device=images.device) if size else None
            self._cudnn.forward(descriptors, number, images.contiguous(), layer.weight, output, workspace)
            return output if layer.bias is None else output.add_(layer.bias.view(1, -1, 1, 1))

        return LayerPlan(run, name, size)

    def _chosen(self, descriptors: Descriptors, shape: ConvShape) -> str:
        """The heuristic's first choice that cuDNN supports; sets its math type. Raises NotSupported if there is none."""
        refused = NotSupported("NO_CHOICE", "cuDNN's heuristic names no algorithm")
        for algorithm, math in self._cudnn.choices(descriptors):
            descriptors.set_math(math if self._tf32 or shape.dtype != "fp32" else FMA_MATH)
            try:
                self._cudnn.workspace_bytes(descriptors, NUMBERS[algorithm])
            except NotSupported as error:
                refused = error
            else:
                return algorithm
        raise refused


def engine_of(algorithm: Algorithm, device: str, tf32: bool = True) -> Engine:
    """The engine for `algorithm` on `cpu` or `cuda`."""
    if algorithm.name == DEFAULT:
        return TorchEngine()
    if device == "cuda":
        return CudnnEngine(algorithm, tf32)
    if algorithm.name not in FROM_AI3:
        raise UserError(f"cuDNN is not available: algorithm {algorithm.name} needs an NVIDIA GPU, and this device is a CPU")
    return Ai3Engine(algorithm.name)


def fallback_of(device: str) -> Algorithm:
    """The algorithm for layers that the requested one cannot run: cuDNN's choice on a GPU, torch's on a CPU."""
    return GPU_ALGORITHMS[GUESS] if device == "cuda" else Algorithm(DEFAULT, "what torch runs")


@dataclass(frozen=True)
class LayerCall:
    """One call of a convolution in a run of the model."""

    layer: str  # the module's name; a second call of the same module is `<name>.call2`
    shape: ConvShape | None  # None if the padding has no shape (see `convolution_shape`)
    status: str  # `ok`, or the library's if the requested algorithm cannot run it
    detail: str = ""  # the library's reason
    algorithm: str = ""  # what runs the layer; "" for nothing
    workspace_bytes: int = 0
    output_error: float | None = None  # relative difference to torch's output (Euclidean norm); None if nothing ran


class ForcedModel:
    """A model in evaluation mode on its device, whose `nn.Conv2d` layers can be run under an algorithm.

    Args:
        fallback: plans the layers that `engine` refuses; if None, they have no plan.
        tf32: whether TF32 is allowed; sets the tolerance.
    """

    def __init__(self, model: torch.nn.Module, engine: Engine, fallback: Engine | None = None, tf32: bool = True) -> None:
        self.model, self._engine, self._fallback, self._tf32 = model, engine, fallback, tf32
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Conv2d)}
        self.calls: list[LayerCall] = []
        self._plans: list[LayerPlan] = []

    def plan(self, images: Tensor) -> None:
        """Plans every call of a run with `images`, and compares the output of each plan with torch's."""
        self.calls, self._plans = [], []
        counts: Counter[str] = Counter()

        def plan_and_run(name: str, layer: Convolution, inputs: Tensor) -> Tensor:
            counts[name] += 1
            call_name = name if counts[name] == 1 else f"{name}.call{counts[name]}"
            outputs = type(layer).forward(layer, inputs)
            plan, call = self._plan_call(call_name, layer, inputs)
            self.calls.append(call)
            self._plans.append(plan)
            return outputs

        with self._forwards(plan_and_run), torch.inference_mode():
            self.model(images)

    def _plan_call(self, name: str, layer: Convolution, images: Tensor) -> tuple[LayerPlan, LayerCall]:
        """The plan of a call and its record; torch's own plan if nothing else runs."""
        shape: ConvShape | None = None
        status, detail = OK, ""
        with suppress(NotSupported):  # aithree and torch may still run it
            shape = convolution_shape(layer, images)
        for engine in filter(None, (self._engine, self._fallback)):
            try:
                plan, error = self._try_plan(engine, layer, images)
            except NotSupported as refused:
                if status == OK:
                    status, detail = refused.status, refused.detail
                continue
            return plan, LayerCall(name, shape, status, detail, plan.algorithm, plan.workspace_bytes, error)
        return LayerPlan(partial(type(layer).forward, layer), ""), LayerCall(name, shape, status, detail)

    def _try_plan(self, engine: Engine, layer: Convolution, images: Tensor) -> tuple[LayerPlan, float]:
        """A plan after one run, with its output error. Raises NotSupported if it fails or its output is wrong."""
        try:
            plan = engine.plan(layer, images)
            error = output_error(plan, layer, images)
        except RuntimeError as failure:
            if is_out_of_memory(failure):
                raise
            raise NotSupported(FAILED, str(failure).partition("\n")[0]) from None
        if not error <= self.tolerance(images):  # also true for NaN
            raise NotSupported(INACCURATE, f"its output differs from torch's by {error:.2g} (relative)")
        return plan, error

    def model_tolerance(self, images: Tensor) -> float:
        """The largest error of the model's output that counts as equal."""
        return min(MODEL_TOLERANCE * self.tolerance(images), MOST_MODEL_TOLERANCE)

    def tolerance(self, images: Tensor) -> float:
        """The largest error of a layer's output that counts as equal."""
        return TOLERANCES["fp16" if images.dtype == torch.float16 else "fp32", self._tf32 and images.is_cuda]

    @contextmanager
    def forced(self, around: Callable[[int], AbstractContextManager[object]] | None = None) -> Iterator[None]:
        """Within the block, the model's convolutions run as planned; call `plan` first.

        `around(n)` gives a context for the n-th call of a run, for instance a range of a trace.
        """
        next_number = 0  # the index of the next call in a run

        def run(name: str, layer: Convolution, inputs: Tensor) -> Tensor:
            nonlocal next_number
            number, next_number = next_number, (next_number + 1) % len(self._plans)
            if around is None:
                return self._plans[number].run(inputs)
            with around(number):
                return self._plans[number].run(inputs)

        with self._forwards(run), torch.inference_mode():
            yield

    @contextmanager
    def _forwards(self, forward: Callable[[str, Convolution, Tensor], Tensor]) -> Iterator[None]:
        """Replaces the `forward` of every convolution within the block."""
        for name, layer in self.layers.items():
            layer.__dict__["forward"] = partial(forward, name, layer)
        try:
            yield
        finally:
            for layer in self.layers.values():
                del layer.__dict__["forward"]

    @property
    def refused(self) -> list[LayerCall]:
        """Calls that the requested algorithm cannot run."""
        return [call for call in self.calls if call.status != OK]


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch ran out of memory, on a GPU or a CPU."""
    return any(text in str(error).lower() for text in NO_MEMORY)


def output_error(plan: LayerPlan, layer: Convolution, images: Tensor) -> float:
    """Runs a plan once; returns the relative difference (Euclidean norm) to torch's output in single precision without TF32."""
    output = plan.run(images).float()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = layer._conv_forward(images.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())
    return relative_error(output, expected)


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Difference of two tensors relative to the second, by the Euclidean norm."""
    scale = torch.linalg.vector_norm(expected).item()
    difference = torch.linalg.vector_norm(output - expected).item()
    return difference / scale if scale else difference


def instead(algorithm: Algorithm, device: str, capability: tuple[int, int] | None, fallback: bool) -> str:
    """One line on what runs instead of an algorithm that no layer can run on the device; "" if some layers may."""
    reason = never_runs(algorithm, device, capability)
    if not reason:
        return ""
    choice = f"{fallback_of(device).name} ({fallback_of(device).meaning})"
    return f"{algorithm.name}: {reason}; " + (f"all layers run by {choice} instead" if fallback else
                                              f"no layer runs, and the model is refused; with --fallback all run by {choice}")


def incompatible(algorithm: str, model: str, calls: Sequence[LayerCall]) -> str:
    """The message for a model with layers that the algorithm cannot run; "" if there are none."""
    refused = [call for call in calls if call.status != OK]
    if not refused:
        return ""
    advice = "; --fallback runs these layers by the library's own choice" if len(refused) < len(calls) else ""
    reasons = Counter(f"{call.status}" + (f", {call.detail}" if call.detail else "") for call in refused)
    return (f"Algorithm {algorithm} {INCOMPATIBLE} {model}: {len(refused)} of {len(calls)} layers "
            f"({first_and_count([call.layer for call in refused])}): {reasons.most_common(1)[0][0]}{advice}")
