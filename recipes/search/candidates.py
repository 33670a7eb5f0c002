"""Records of networks as a search over architectures tries them: of MobileNetV3's kind, with their depths, widths, windows,
expansions and image sizes drawn at random.

They are built without ONNX Runtime, as a search builds them that has to try hundreds of thousands. Each is the graph that ONNX
Runtime runs on a GPU: convolutions with folded normalisations, activations of their own, squeeze and excitation.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from records.kernel_record import Kernel, KernelInput, ModelRecord, Node, Tensor
from records.kernel_types import describe_kernel
from utils.fingerprint import Flavour

OPSET, CLASSES = 20, 1000
WIDTHS = ((16, 24), (24, 32, 40), (40, 48, 56), (80, 96, 112), (112, 128, 160), (160, 192, 224))  # of each stage
STRIDES = (1, 2, 2, 2, 1, 2)
ACTIVATIONS = ("Relu", "Relu", "Relu", "HardSwish", "HardSwish", "HardSwish")
EXCITED = (False, False, True, False, True, True)
DEPTHS, WINDOWS, EXPANSIONS = (1, 2, 3), (3, 5, 7), (3, 4, 6)
BATCHES, SIDES = (1, 4, 8, 16), (160, 192, 224)


class Values(NamedTuple):
    """A tensor of the graph: its name and shape."""

    name: str
    shape: tuple[int, ...]


@functools.cache
def kernel_of(op_type: str, attributes: tuple[tuple[str, Any], ...], inputs: tuple[KernelInput, ...],
              output: tuple[int, ...]) -> Kernel:
    """The kernel of an operation; each is described once."""
    return describe_kernel(op_type, "", OPSET, dict(attributes), inputs, [Tensor(dtype="float32", shape=output)])


class Network:
    """The graph of a network while it is built."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.input = Values("input", shape)
        self.nodes: list[Node] = []
        self.kernels: dict[str, Kernel] = {}
        self.weight_bytes = 0

    def add(self, name: str, op_type: str, inputs: Sequence[Values], output: tuple[int, ...],
            constants: Sequence[tuple[int, ...]] = (), attributes: Mapping[str, Any] | None = None,
            values: tuple[int, ...] | None = None) -> Values:
        """A node that reads tensors and then constants; `values` are those of a constant of integers."""
        activations = [KernelInput(dtype="float32", shape=tensor.shape) for tensor in inputs]
        weights = [KernelInput(dtype="float32" if values is None else "int64", shape=shape, constant=True, values=values)
                   for shape in constants]
        kernel = kernel_of(op_type, tuple(sorted((attributes or {}).items())), (*activations, *weights), output)
        names = [tensor.name for tensor in inputs] + [f"{name}.constant_{place}" for place in range(len(constants))]
        self.kernels[kernel.id] = kernel
        self.nodes.append(Node(name=name, kernel_id=kernel.id, provider="cuda", inputs=tuple(names), outputs=(f"{name}.out",)))
        self.weight_bytes += sum(tensor.bytes for tensor in weights)
        return Values(f"{name}.out", output)

    def convolution(self, name: str, image: Values, channels: int, window: int = 1, stride: int = 1,
                    groups: int = 1) -> Values:
        batch, before, height, width = image.shape
        pad = window // 2
        attributes: dict[str, Any] = {"kernel_shape": (window, window), "strides": (stride, stride)}
        attributes |= {"pads": (pad, pad, pad, pad)} if pad else {}
        attributes |= {"group": groups} if groups > 1 else {}
        return self.add(name, "Conv", [image], (batch, channels, -(-height // stride), -(-width // stride)),
                        [(channels, before // groups, window, window), (channels,)], attributes)

    def each(self, name: str, op_type: str, image: Values, **attributes: float) -> Values:
        """An operation on each element."""
        return self.add(name, op_type, [image], image.shape, attributes=attributes)

    def mean(self, name: str, image: Values) -> Values:
        return self.add(name, "ReduceMean", [image], (*image.shape[:2], 1, 1), [(2,)],
                        {"keepdims": 1, "noop_with_empty_axes": 0}, values=(-1, -2))

    def excited(self, name: str, image: Values) -> Values:
        """Squeeze and excitation."""
        few = max(8, image.shape[1] // 32 * 8)
        squeezed = self.each(f"{name}.relu", "Relu", self.convolution(f"{name}.fc1", self.mean(f"{name}.mean", image), few))
        gate = self.each(f"{name}.gate", "HardSigmoid", self.convolution(f"{name}.fc2", squeezed, image.shape[1]),
                         alpha=1 / 6, beta=0.5)
        return self.add(f"{name}.mul", "Mul", [gate, image], image.shape)

    def block(self, name: str, image: Values, channels: int, stage: int, stride: int, window: int, expansion: int) -> Values:
        """An inverted residual block."""
        wide, activation = expansion * image.shape[1], ACTIVATIONS[stage]
        inside = self.each(f"{name}.act1", activation, self.convolution(f"{name}.expand", image, wide))
        inside = self.each(f"{name}.act2", activation, self.convolution(
            f"{name}.depthwise", inside, wide, window, stride, groups=wide))
        if EXCITED[stage]:
            inside = self.excited(f"{name}.se", inside)
        made = self.convolution(f"{name}.project", inside, channels)
        return self.add(f"{name}.add", "Add", [made, image], made.shape) if made.shape == image.shape else made

    def record(self, model: str, flavour: Flavour, output: Values) -> ModelRecord:
        return ModelRecord(
            model=model, file_stem=model, group="searched", sha256=hashlib.sha256(model.encode()).hexdigest(), dims={},
            flavour=flavour, derived=True, inputs={self.input.name: Tensor(dtype="float32", shape=self.input.shape)},
            outputs={output.name: Tensor(dtype="float32", shape=output.shape)}, weight_bytes=self.weight_bytes,
            opsets={"": OPSET}, kernels=self.kernels, nodes=tuple(self.nodes))


def candidate(number: int, flavour: Flavour) -> ModelRecord:
    """The record of a network that is drawn at random; the same for the same `number`."""
    draw = random.Random(number)
    batch, side = draw.choice(BATCHES), draw.choice(SIDES)
    network = Network((batch, 3, side, side))
    image = network.each("stem.act", "HardSwish", network.convolution("stem", network.input, 16, 3, 2))
    for stage, widths in enumerate(WIDTHS):
        channels = draw.choice(widths)
        for place in range(draw.choice(DEPTHS)):
            image = network.block(f"stage{stage}.{place}", image, channels, stage, STRIDES[stage] if place == 0 else 1,
                                  draw.choice(WINDOWS), draw.choice(EXPANSIONS))
    last = network.each("last.act", "HardSwish", network.convolution("last", image, 6 * image.shape[1]))
    pooled = network.mean("pool", last)
    flat = network.add("flat", "Reshape", [pooled], pooled.shape[:2], [(2,)], values=(batch, pooled.shape[1]))
    hidden = network.each("hidden.act", "HardSwish", network.add(
        "hidden", "Gemm", [flat], (batch, 1280), [(1280, flat.shape[1]), (1280,)], {"transB": 1}))
    scores = network.add("scores", "Gemm", [hidden], (batch, CLASSES), [(CLASSES, 1280), (CLASSES,)], {"transB": 1})
    return network.record(f"candidate_{number}", flavour, scores)
