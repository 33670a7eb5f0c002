"""A model whose convolutions run under one algorithm: by cuDNN's legacy API, by torch, or by the package aithree.

Every `nn.Conv2d` gets a `forward` of its own, so that hooks and all other modules stay as they are. Layers are planned for one
size of the model's input; a layer that a run calls several times has a plan for each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hase.extras.convolutions.algorithms import (
    DEFAULT,
    FROM_AI3,
    GUESS,
    ON_GPU,
    Algorithm,
    ConvShape,
    NotSupported,
    never_runs,
    shape_of,
)
from hase.extras.convolutions.cudnn import FMA_MATH, Cudnn, Descriptors
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.lazy import ai3, torch

if TYPE_CHECKING:
    from hase.extras.convolutions.algorithms import Convolution, Tensor

AI3_REQUIREMENTS = "requirements-convolutions.txt"
OK, INACCURATE, FAILED = "ok", "INACCURATE", "FAILED"
INCOMPATIBLE = "not compatible with model"  # in the message for a model that is refused
# The largest relative error (Euclidean norm) of a layer's output. TF32 and half precision keep 10 bits of each factor, which
# gives about 5e-4; Winograd's transform then loses some 4 bits more.
TOLERANCES = {("fp32", False): 1e-4, ("fp32", True): 2e-2, ("fp16", False): 2e-2, ("fp16", True): 2e-2}
# Of a model's output: errors grow with its depth. Noise of 5e-4 in each layer gave 0.07 in resnet152 and 0.0003 in alexnet; a
# layer that runs another one's plan gives more than 1.
MODEL_TOLERANCE, MOST_MODEL_TOLERANCE = 100.0, 0.5  # times that of a layer; at most
NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True)
class Plan:
    """How one layer runs for one size of its input.

    Attributes:
        run: from the input to the output.
        algorithm: what runs; under `guess` the one that cuDNN chose.
        workspace_bytes: memory that it needs besides input, weights and output.
    """

    run: Callable[[Tensor], Tensor]
    algorithm: str
    workspace_bytes: int = 0


class Engine(Protocol):
    """Plans layers under one algorithm."""

    def plan(self, layer: Convolution, images: Tensor) -> Plan:
        """How `layer` runs for inputs like `images`.

        Raises:
            NotSupported: the algorithm can't.
        """
        ...


class TorchEngine:
    """torch's own convolution."""

    def plan(self, layer: Convolution, images: Tensor) -> Plan:
        return Plan(lambda images: type(layer).forward(layer, images), DEFAULT)


def ai3_missing() -> str:
    """Why the package aithree can't be used; "" if it can."""
    try:
        return "" if ai3.swap_torch.Conv2D else "the package aithree is not whole"
    except ImportError as error:  # of it, or of packaging, which it needs and does not name
        return f"the package aithree is not there ({error})"


class Ai3Engine:
    """The package aithree, on a CPU.

    Raises:
        UserError: it is not installed.
    """

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        if missing := ai3_missing():
            raise UserError(f"algorithm {algorithm} on a CPU: {missing}; install it with: pip install -r {AI3_REQUIREMENTS}")
        self._convolution = ai3.swap_torch.Conv2D

    def plan(self, layer: Convolution, images: Tensor) -> Plan:
        if images.dtype != torch.float32:
            raise NotSupported("DTYPE", f"aithree computes in single precision, not in {images.dtype}")
        convolution = self._convolution(layer, self._algorithm, "torch")
        return Plan(lambda images: convolution.forward(images.contiguous()), self._algorithm)


def number_of(algorithm: str) -> int:
    """cuDNN's number of one of its own algorithms."""
    number = ON_GPU[algorithm].number
    if number is None:
        raise ValueError(f"{algorithm} has no number of cuDNN")
    return number


class CudnnEngine:
    """cuDNN's legacy API: a named algorithm, or its heuristic's first choice.

    Args:
        algorithm: one of ON_GPU with a number, or `guess`.
        tf32: whether single precision may be computed in TF32.

    Raises:
        UserError: there is no GPU, or no cuDNN.
    """

    def __init__(self, algorithm: Algorithm, tf32: bool) -> None:
        self._cudnn, self._algorithm, self._tf32 = Cudnn(), algorithm, tf32

    def plan(self, layer: Convolution, images: Tensor) -> Plan:
        shape = shape_of(layer, images)
        descriptors = Descriptors(shape, self._tf32)
        self._cudnn.use_stream()
        name = self._algorithm.name if self._algorithm.number is not None else self._chosen(descriptors, shape)
        number = number_of(name)
        size = self._cudnn.workspace_bytes(descriptors, number)

        def run(images: Tensor) -> Tensor:
            output = torch.empty(descriptors.output_shape, dtype=images.dtype, device=images.device)
            workspace = torch.empty(size, dtype=torch.uint8, device=images.device) if size else None
            self._cudnn.forward(descriptors, number, images.contiguous(), layer.weight, output, workspace)
            return output if layer.bias is None else output.add_(layer.bias.view(1, -1, 1, 1))

        return Plan(run, name, size)

    def _chosen(self, descriptors: Descriptors, shape: ConvShape) -> str:
        """The first of the heuristic's choices that cuDNN then supports; the descriptors get its math type.

        Raises:
            NotSupported: there is none.
        """
        refused = NotSupported("NO_CHOICE", "cuDNN's heuristic names no algorithm")
        for algorithm, math in self._cudnn.choices(descriptors):
            descriptors.set_math(math if self._tf32 or shape.dtype != "fp32" else FMA_MATH)
            try:
                self._cudnn.workspace_bytes(descriptors, number_of(algorithm))
            except NotSupported as error:
                refused = error
            else:
                return algorithm
        raise refused


def engine_of(algorithm: Algorithm, device: str, tf32: bool = True) -> Engine:
    """What runs layers under `algorithm` on `cpu` or `cuda`.

    Raises:
        UserError: cuDNN or the package aithree is not there.
    """
    if algorithm.name == DEFAULT:
        return TorchEngine()
    if device == "cuda":
        return CudnnEngine(algorithm, tf32)
    if algorithm.name not in FROM_AI3:
        raise UserError(f"cuDNN is not available: algorithm {algorithm.name} needs an NVIDIA GPU, and this device is a CPU")
    return Ai3Engine(algorithm.name)


def fallback_of(device: str) -> Algorithm:
    """What runs the layers that the asked algorithm can't: cuDNN's choice on a GPU, torch's on a CPU."""
    return ON_GPU[GUESS] if device == "cuda" else Algorithm(DEFAULT, "what torch runs")


@dataclass(frozen=True)
class LayerCall:
    """One call of a convolution in a run of the model.

    Attributes:
        layer: the module's name; a second call of the same module is named `<name>.call2`.
        shape: of the call; None for a layer whose padding has no shape (see `shape_of`).
        status: `ok`, or the library's word for why the asked algorithm can't run it.
        detail: the library's reason.
        algorithm: what runs the layer; "" for nothing.
        workspace_bytes: that it needs.
        output_error: difference to torch's output, relative, by the Euclidean norm; None if nothing ran.
    """

    layer: str
    shape: ConvShape | None
    status: str
    detail: str = ""
    algorithm: str = ""
    workspace_bytes: int = 0
    output_error: float | None = None


class ForcedModel:
    """A model in evaluation mode on its device, whose convolutions can be run under an algorithm.

    Args:
        model: any module; its convolutions are the `nn.Conv2d` in it.
        engine: plans the layers.
        fallback: plans those that `engine` refuses; None: they stay without a plan.
        tf32: whether TF32 is allowed, for the tolerance.

    Attributes:
        calls: the convolutions in the order of a run, for the size that was planned last.
    """

    def __init__(self, model: torch.nn.Module, engine: Engine, fallback: Engine | None = None, tf32: bool = True) -> None:
        self.model, self._engine, self._fallback, self._tf32 = model, engine, fallback, tf32
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Conv2d)}
        self.calls: list[LayerCall] = []
        self._plans: list[Plan] = []

    def plan(self, images: Tensor) -> None:
        """Plans every call of a run with `images`, and compares each plan's output with torch's."""
        self.calls, self._plans = [], []
        counts: Counter[str] = Counter()

        def planned(name: str, layer: Convolution, inputs: Tensor) -> Tensor:
            counts[name] += 1
            called = name if counts[name] == 1 else f"{name}.call{counts[name]}"
            outputs = type(layer).forward(layer, inputs)
            plan, call = self._plan_call(called, layer, inputs)
            self.calls.append(call)
            self._plans.append(plan)
            return outputs

        with self._forwards(planned), torch.inference_mode():
            self.model(images)

    def _plan_call(self, name: str, layer: Convolution, images: Tensor) -> tuple[Plan, LayerCall]:
        """The plan of a call (torch's own where nothing else runs), and what is known of it."""
        shape: ConvShape | None = None
        status, detail = OK, ""
        with suppress(NotSupported):  # aithree and torch may still run it
            shape = shape_of(layer, images)
        for engine in filter(None, (self._engine, self._fallback)):
            try:
                plan, error = self._tried(engine, layer, images)
            except NotSupported as refused:
                if status == OK:
                    status, detail = refused.status, refused.detail
                continue
            return plan, LayerCall(name, shape, status, detail, plan.algorithm, plan.workspace_bytes, error)
        return Plan(partial(type(layer).forward, layer), ""), LayerCall(name, shape, status, detail)

    def _tried(self, engine: Engine, layer: Convolution, images: Tensor) -> tuple[Plan, float]:
        """A plan that was run once, and the error of its output.

        Raises:
            NotSupported: it does not run, or its output is not torch's.
            RuntimeError: there is not enough memory.
        """
        try:
            plan = engine.plan(layer, images)
            error = output_error(plan, layer, images)
        except RuntimeError as failure:
            if is_out_of_memory(failure):
                raise
            raise NotSupported(FAILED, str(failure).partition("\n")[0]) from None
        if not error <= self.tolerance(images):  # NaN is no equal output either
            raise NotSupported(INACCURATE, f"its output differs from torch's by {error:.2g} (relative)")
        return plan, error

    def model_tolerance(self, images: Tensor) -> float:
        """The largest error of the model's output that counts as equal."""
        return min(MODEL_TOLERANCE * self.tolerance(images), MOST_MODEL_TOLERANCE)

    def tolerance(self, images: Tensor) -> float:
        """The largest error of a layer that counts as equal."""
        return TOLERANCES["fp16" if images.dtype == torch.float16 else "fp32", self._tf32 and images.is_cuda]

    @contextmanager
    def forced(self, around: Callable[[int], AbstractContextManager[object]] | None = None) -> Iterator[None]:
        """While the block runs, the model's convolutions run as planned; `plan` comes first.

        Args:
            around: makes what the n-th call of a run is wrapped in, for instance a range of a trace.
        """
        turn = 0

        def run(name: str, layer: Convolution, inputs: Tensor) -> Tensor:
            nonlocal turn
            number, turn = turn, (turn + 1) % len(self._plans)
            if around is None:
                return self._plans[number].run(inputs)
            with around(number):
                return self._plans[number].run(inputs)

        with self._forwards(run), torch.inference_mode():
            yield

    @contextmanager
    def _forwards(self, forward: Callable[[str, Convolution, Tensor], Tensor]) -> Iterator[None]:
        """Replaces the `forward` of every convolution."""
        for name, layer in self.layers.items():
            layer.__dict__["forward"] = partial(forward, name, layer)
        try:
            yield
        finally:
            for layer in self.layers.values():
                del layer.__dict__["forward"]

    @property
    def refused(self) -> list[LayerCall]:
        """The calls that the asked algorithm can't run."""
        return [call for call in self.calls if call.status != OK]


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch found no memory, on a GPU or on a CPU."""
    return any(text in str(error).lower() for text in NO_MEMORY)


def output_error(plan: Plan, layer: Convolution, images: Tensor) -> float:
    """Runs a plan once; the difference to torch's output in single precision without TF32, relative, by the Euclidean norm."""
    output = plan.run(images).float()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = layer._conv_forward(images.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())
    return relative_error(output, expected)


def relative_error(output: Tensor, expected: Tensor) -> float:
    """The difference of two tensors relative to the second, by the Euclidean norm."""
    scale = torch.linalg.vector_norm(expected).item()
    difference = torch.linalg.vector_norm(output - expected).item()
    return difference / scale if scale else difference


def instead(algorithm: Algorithm, device: str, capability: tuple[int, int] | None, fallback: bool) -> str:
    """What runs in place of an algorithm that no layer can run on the device, and why, in one line; "" where some layer may.

    Args:
        algorithm: that was asked for.
        device: `cpu` or `cuda`.
        capability: the GPU's compute capability; None for a CPU, or where it is not known.
        fallback: whether other layers may run by the library's choice.
    """
    why = never_runs(algorithm, device, capability)
    if not why:
        return ""
    choice = f"{fallback_of(device).name} ({fallback_of(device).meaning})"
    return f"{algorithm.name}: {why}; " + (f"all layers run by {choice} instead" if fallback else
                                           f"no layer runs, and the model is refused; with --fallback all run by {choice}")


def incompatible(algorithm: str, model: str, calls: Sequence[LayerCall]) -> str:
    """The message for a model that has layers which the algorithm can't run; "" if it has none."""
    refused = [call for call in calls if call.status != OK]
    if not refused:
        return ""
    advice = "; --fallback runs these layers by the library's own choice" if len(refused) < len(calls) else ""
    reasons = Counter(f"{call.status}" + (f", {call.detail}" if call.detail else "") for call in refused)
    return (f"Algorithm {algorithm} {INCOMPATIBLE} {model}: {len(refused)} of {len(calls)} layers "
            f"({cli.first_of([call.layer for call in refused])}): {reasons.most_common(1)[0][0]}{advice}")
