"""Builds kernel records of networks from reusable parts, so that a search need not export and analyse each network.

A part (`GraphPart`) is a piece of the graph that ONNX Runtime runs: its nodes, its kernels, and its output tensor. Functions
that make parts cache them (`functools.lru_cache`), so a network costs little more than joining its parts.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Node, Tensor
from hase.records.kernel_types import describe_kernel
from hase.utils.fingerprint import Flavour

OPSET = 20


class NamedTensor(NamedTuple):
    """A float32 tensor in a graph: its name and shape."""

    name: str
    shape: tuple[int, ...]


class GraphPart(NamedTuple):
    """A piece of a graph."""

    nodes: tuple[Node, ...]  # in execution order
    kernels: Mapping[str, Kernel]  # by id
    weight_bytes: int  # of the constants that only this part has
    shared_bytes: Mapping[str, int]  # of the constants that several parts may share, by name
    output: NamedTensor


@functools.lru_cache(50_000)
def cached_kernel(op_type: str, attributes: tuple[tuple[str, Any], ...], inputs: tuple[tuple[int, ...], ...],
                  constants: tuple[tuple[int, ...], ...], values: tuple[int, ...] | None, output: tuple[int, ...]) -> Kernel:
    """The kernel of an operation with these shapes of inputs and constants. `values`: the content of an integer constant."""
    tensors = [KernelInput(dtype="float32", shape=shape) for shape in inputs]
    tensors += [KernelInput(dtype="float32" if values is None else "int64", shape=shape, constant=True, values=values)
                for shape in constants]
    as_read = {name: list(value) if isinstance(value, tuple) else value for name, value in attributes}  # a file gives lists
    return describe_kernel(op_type, "", OPSET, as_read, tensors, [Tensor(dtype="float32", shape=output)])


class PartBuilder:
    """Builds a part of a graph. Names of nodes and tensors start with the part's `name`."""

    def __init__(self, name: str) -> None:
        self._name, self._nodes, self._kernels = name, list[Node](), dict[str, Kernel]()
        self._weight_bytes, self._shared_bytes = 0, dict[str, int]()

    def add(self, name: str, op_type: str, inputs: Sequence[NamedTensor], output: tuple[int, ...],
            constants: Sequence[tuple[int, ...]] = (), attributes: Mapping[str, Any] | None = None,
            values: tuple[int, ...] | None = None) -> NamedTensor:
        """Adds a node. It reads tensors, then constants; `values` is the content of an integer constant shared by all nodes."""
        kernel = cached_kernel(op_type, tuple(sorted((attributes or {}).items())), tuple(tensor.shape for tensor in inputs),
                               tuple(constants), values, output)
        node = f"{self._name}.{name}"
        names = [f"{node}.constant_{index}" for index in range(len(constants))] if values is None else [f"constant {values}"]
        self._kernels[kernel.id] = kernel
        self._nodes.append(Node(name=node, kernel_id=kernel.id, provider="cuda", outputs=(f"{node}.out",),
                                inputs=(*(tensor.name for tensor in inputs), *names)))
        if values is None:
            self._weight_bytes += kernel.weight_bytes
        else:
            self._shared_bytes[names[0]] = kernel.weight_bytes
        return NamedTensor(f"{node}.out", output)

    def convolution(self, name: str, image: NamedTensor, channels: int, size: int = 1, stride: int = 1,
                    groups: int = 1) -> NamedTensor:
        """A convolution with a bias, into which the following normalisation was folded; `size`: of its square window."""
        batch, in_channels, height, width = image.shape
        pad = size // 2
        attributes: dict[str, Any] = {"kernel_shape": (size, size), "strides": (stride, stride)}
        attributes |= {"pads": (pad, pad, pad, pad)} if pad else {}
        attributes |= {"group": groups} if groups > 1 else {}
        return self.add(name, "Conv", [image], (batch, channels, -(-height // stride), -(-width // stride)),
                        [(channels, in_channels // groups, size, size), (channels,)], attributes)

    def unary(self, name: str, op_type: str, image: NamedTensor, **attributes: float) -> NamedTensor:
        """An element-wise operation on one tensor."""
        return self.add(name, op_type, [image], image.shape, attributes=attributes)

    def part(self, output: NamedTensor, output_name: str = "") -> GraphPart:
        """The part built so far; `output_name` renames its output."""
        nodes = tuple(self._nodes)
        if output_name:
            nodes = tuple(node.model_copy(update={"outputs": (output_name,)}) if output.name in node.outputs else node
                          for node in nodes)
        return GraphPart(nodes, self._kernels, self._weight_bytes, self._shared_bytes,
                         NamedTensor(output_name or output.name, output.shape))


def join_parts(model: str, flavour: Flavour, image: NamedTensor, parts: Sequence[GraphPart]) -> ModelRecord:
    """The record of a network that reads `image` and runs the parts one after another."""
    nodes: list[Node] = []
    kernels: dict[str, Kernel] = {}
    shared_bytes: dict[str, int] = {}
    for part in parts:
        nodes += part.nodes
        kernels |= part.kernels
        shared_bytes |= part.shared_bytes
    output, weight_bytes = parts[-1].output, sum(part.weight_bytes for part in parts) + sum(shared_bytes.values())
    return ModelRecord(
        model=model, file_stem=model, group="searched", sha256=hashlib.sha256(model.encode()).hexdigest(), dims={},
        flavour=flavour, derived=True, inputs={image.name: Tensor(dtype="float32", shape=image.shape)},
        outputs={output.name: Tensor(dtype="float32", shape=output.shape)}, weight_bytes=weight_bytes,
        opsets={"": OPSET}, kernels=kernels, nodes=tuple(nodes))
