"""What runs a convolution under an algorithm: cuDNN by its legacy API, torch, or the package aithree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from convolutions.algorithms import DEFAULT, FROM_AI3, GUESS, ON_GPU, Algorithm
from convolutions.cudnn import FMA_MATH, Cudnn, Descriptors
from convolutions.shapes import ConvShape, NotSupported, shape_of
from utils.errors import UserError
from utils.lazy import ai3, torch

if TYPE_CHECKING:
    from convolutions.shapes import Convolution, Tensor

AI3_REQUIREMENTS = "requirements-convolutions.txt"


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
        made = self._convolution(layer, self._algorithm, "torch")
        return Plan(lambda images: made.forward(images.contiguous()), self._algorithm)


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
        made = Descriptors(shape, self._tf32)
        self._cudnn.use_stream()
        name = self._algorithm.name if self._algorithm.number is not None else self._chosen(made, shape)
        number = number_of(name)
        size = self._cudnn.workspace_bytes(made, number)

        def run(images: Tensor) -> Tensor:
            output = torch.empty(made.output_shape, dtype=images.dtype, device=images.device)
            workspace = torch.empty(size, dtype=torch.uint8, device=images.device) if size else None
            self._cudnn.forward(made, number, images.contiguous(), layer.weight, output, workspace)
            return output if layer.bias is None else output.add_(layer.bias.view(1, -1, 1, 1))

        return Plan(run, name, size)

    def _chosen(self, made: Descriptors, shape: ConvShape) -> str:
        """The first of the heuristic's choices that cuDNN then supports; the descriptors get its math type.

        Raises:
            NotSupported: there is none.
        """
        refused = NotSupported("NO_CHOICE", "cuDNN's heuristic names no algorithm")
        for algorithm, math in self._cudnn.choices(made):
            made.set_math(math if self._tf32 or shape.dtype != "fp32" else FMA_MATH)
            try:
                self._cudnn.workspace_bytes(made, number_of(algorithm))
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
