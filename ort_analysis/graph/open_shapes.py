"""Sizes that a graph leaves open: those that the user gives, those that ONNX Runtime shows, and what follows from them.

Operators outside ONNX's own set, such as those of ai.onnx.ml, often have no shape inference; nor have some that ONNX defines by
other operators (LessOrEqual). Such a node is run once, alone, on zeros. A size that depends on data is the given one
(`--dim <tensor>.<axis>=SIZE`, or by its name in the model), else the largest that ONNX allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np

from hase.records.kernel_record import KernelInput, type_code, zeros
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.model_graphs import at_root
from hase.utils.ort_sessions import model_errors, open_session

if TYPE_CHECKING:
    import onnx

DETECTIONS = "detections"  # the name, for --dim, of the number of boxes that all NonMaxSuppressions of a model select
Shape = tuple[int | str, ...] | None  # an unknown size is its name, or ""; None: the rank is unknown


def selects_boxes(graph: onnx.GraphProto) -> bool:
    """Whether a graph, or a body in it, selects boxes by NonMaxSuppression."""
    return any(node.op_type == "NonMaxSuppression" or any(selects_boxes(attribute.g) for attribute in node.attribute
                                                          if attribute.HasField("g")) for node in graph.node)


def shapes_when_run(node: onnx.NodeProto, proto: onnx.ModelProto, tensors: Mapping[str, KernelInput],
                    name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a node's outputs, found by running the node alone on zeros.

    Args:
        node: of `proto`.
        proto: the graph; small constants inside.
        tensors: type and shape of the node's inputs.
        name: of the model, for errors.

    Raises:
        UserError: it can't be run alone.
    """
    constants = {tensor.name: tensor for tensor in proto.graph.initializer
                 if tensor.name in node.input and tensor.data_location != onnx.TensorProto.EXTERNAL}
    fed = [value for value in dict.fromkeys(node.input) if value and value not in constants]
    if not all(tensors[value].is_tensor for value in fed):
        raise UserError(f"{name}: the rank of tensor {node.output[0]} is not known, and its node {node.name} ({node.op_type}) "
                        "takes more than tensors, so that it can't be tried alone")
    inputs = [onnx.helper.make_tensor_value_info(value, type_code(tensors[value].dtype),
                                            tensors[value].shape) for value in fed]
    graph = onnx.helper.make_graph([node], "node", inputs, [onnx.helper.ValueInfoProto(name=out) for out in node.output if out],
                              list(constants.values()))
    model = onnx.helper.make_model(graph, opset_imports=list(proto.opset_import), ir_version=proto.ir_version)
    session = open_session(model.SerializeToString(), "cpu", optimize="none", name=f"{name}: node {node.name}",
                           entries=at_root())
    feed = {value: zeros(tensors[value].shape, tensors[value].dtype) for value in fed}
    with model_errors(f"{name}: node {node.name}"):
        made = session.run(None, feed)
    return {out.name: tuple(value.shape) for out, value in zip(session.get_outputs(), made, strict=True)
            if isinstance(value, np.ndarray)}


def keeps_its_shape(node: onnx.NodeProto) -> bool:
    """Whether a node's output has the shape of its input although its operator may change it: it drops no words of a text."""
    return node.op_type == "StringNormalizer" and not any(
        attribute.name == "stopwords" and attribute.strings for attribute in node.attribute)


def largest_shapes(node: onnx.NodeProto, shapes: Mapping[str, Shape], tensors: Mapping[str, KernelInput],
                   values: Mapping[str, tuple[int | float | bool, ...]]) -> dict[str, tuple[int, ...]]:
    """The largest shapes that ONNX allows for the outputs of a node whose sizes depend on data; empty if there is no bound.

    NonMaxSuppression selects at most max_output_boxes_per_class boxes per class and image, and at most as many as there are.
    NonZero, Compress and Unique return at most the elements of the input (or its rows, along an axis), TopK and Slice at most
    the input's size along each axis. A Reshape keeps the number of elements.

    Args:
        node: of an operator of ONNX's own set.
        shapes: of its outputs, as far as they are known.
        tensors: type and shape of its inputs.
        values: of small integer tensors.
    """
    first = tensors.get(node.input[0]) if node.input else None
    if first is None:
        return {}
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    largest: dict[str, tuple[int, ...]] = {}
    for place, name in enumerate(node.output):
        shape = shapes.get(name)
        if not name or shape is None:
            continue
        if node.op_type == "NonMaxSuppression":
            bounds: tuple[int, ...] = (_most_boxes(node, tensors, values), 3)
        elif node.op_type == "NonZero":
            bounds = (len(first.shape), first.elements)
        elif node.op_type in ("Compress", "Unique"):
            bounds = first.shape if axis is not None and place == 0 else (
                first.elements if axis is None else first.shape[axis],)
        elif node.op_type in ("TopK", "Slice"):
            bounds = first.shape
        elif node.op_type == "Reshape" and sum(isinstance(size, str) for size in shape) == 1:
            rest = math.prod(size for size in shape if isinstance(size, int))
            bounds = tuple(first.elements // max(rest, 1) if isinstance(size, str) else size for size in shape)
        else:
            continue
        if len(bounds) == len(shape):
            largest[name] = tuple(bound if isinstance(size, str) else size for bound, size in zip(bounds, shape, strict=True))
    return largest


def _most_boxes(node: onnx.NodeProto, tensors: Mapping[str, KernelInput],
                values: Mapping[str, tuple[int | float | bool, ...]]) -> int:
    """The largest number of boxes that a NonMaxSuppression can select."""
    batch, classes, boxes = tensors[node.input[1]].shape
    limit = node.input[2] if len(node.input) > 2 else ""
    given = (tensors[limit].values or values.get(limit)) if limit else (0,)  # ONNX: without this input nothing is selected
    return batch * classes * (boxes if given is None else min(int(given[0]), boxes))


class SizeNotKnown(UserError):
    """A shape depends on data, and ONNX sets it no bound.

    Attributes:
        tensor: the name under which its sizes can be given.
    """

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


@dataclass
class GivenSizes:
    """The sizes that the user gives to tensors of one graph whose sizes depend on data.

    Attributes:
        dims: all given sizes, by name.
        prefix: of the names of a body's tensors.
        selects: the graph selects boxes; their number may set other sizes too.
        used: the names of the given sizes that were used.
    """

    dims: Mapping[str, int]
    prefix: str
    selects: bool
    used: set[str] = field(default_factory=set)

    def _take(self, *names: str) -> int | None:
        name = next((name for name in names if name in self.dims), None)
        self.used |= {name} if name else set()
        return self.dims[name] if name else None

    def shape(self, tensor: str, shape: Shape, boxes: bool) -> tuple[int, ...] | None:
        """A tensor's shape with the given sizes; None if a size is still open.

        Args:
            tensor: its name.
            shape: as far as it is known; if the rank is not known, the given sizes define it.
            boxes: the tensor's first axis is the boxes that a node selects.
        """
        if shape is None:
            rank = 0
            while any(f"{prefix}{tensor}.{rank}" in self.dims for prefix in (self.prefix, "")):
                rank += 1
            shape = ("",) * rank or None
        if shape is None:
            return None
        sizes: list[int | None] = []
        for axis, size in enumerate(shape):
            names = [f"{self.prefix}{tensor}.{axis}", f"{tensor}.{axis}"]
            if isinstance(size, int):
                self.used |= {name for name in names if self.dims.get(name) == size}
                sizes.append(size)
            else:
                sizes.append(self._take(*names, size, *([DETECTIONS] if boxes and axis == 0 else [])))
        return None if None in sizes else tuple(size for size in sizes if size is not None)

    def as_many_as_boxes(self, shape: Shape) -> tuple[int, ...] | None:
        """A shape in which every open size is the given number of boxes; None if none is given."""
        if shape is None or (number := self._take(DETECTIONS)) is None:
            return None
        return tuple(size if isinstance(size, int) else number for size in shape)

    def refusal(self, name: str, tensor: str, shape: Shape) -> SizeNotKnown:
        """The error for a shape that is not known; it says how to give the size.

        Args:
            name: of the model.
            tensor: its name.
            shape: as far as it is known.
        """
        whole = f"{self.prefix}{tensor}"
        if shape is None:
            return SizeNotKnown(
                f"{name}: the rank of tensor {whole} is not known; export the model with the shapes of its inputs, or give all "
                f"sizes of this tensor, for example, where it has two axes, {_options(whole, range(2))}", whole)
        sizes = ", ".join(str(size) or "?" for size in shape)
        options = _options(whole, [axis for axis, size in enumerate(shape) if not isinstance(size, int)])
        boxes = f", or --dim {DETECTIONS}=100 for all such sizes" if self.selects else ""
        return SizeNotKnown(f"{name}: the shape of tensor {whole} ([{sizes}]) depends on data or on an open dimension; give "
                            f"its size, for example {options}{boxes} (benchmark/sizes_of_a_run.py shows those of a run)", whole)


def _options(tensor: str, axes: Iterable[int]) -> str:
    """The options that give sizes of a tensor."""
    return " ".join(f"--dim {quote(f'{tensor}.{axis}=100')}" for axis in axes)


Values = tuple[int | float | bool, ...]


@dataclass(frozen=True)
class InferredTensors:
    """What is known of a graph's tensors.

    Attributes:
        tensors: type and shape by name, constants with their small values.
        computed: values of small integer tensors that the graph computes from shapes and constants, by name.
        providers: by node name, the provider that ORT assigned.
        assumed: by tensor name, shapes that depend on data; the largest possible ones are assumed.
        plain: by tensor name, shapes as far as ORT infers them from shapes alone: what its optimisers know.
        held: by node name, the bodies of nodes.
        used: the names of the given sizes that a tensor of this graph, or of a body in it, has.
    """

    tensors: dict[str, KernelInput]
    computed: dict[str, Values]
    providers: dict[str, str]
    assumed: dict[str, tuple[int, ...]]
    plain: dict[str, Shape]
    held: dict[str, Held] = field(default_factory=dict)
    used: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Trips:
    """How often a body runs per run of its node.

    Attributes:
        low, high: the range, as multiples of `count`, if it is a guess.
        fixed: the model itself sets it, not a given size.
    """

    count: int
    low: float = 1.0
    high: float = 1.0
    fixed: bool = True


@dataclass(frozen=True)
class Body:
    """A body as a model of its own.

    Attributes:
        attribute: of the node that holds it.
        proto: the body as a model.
        captured: the tensors that it takes from the graph around it.
        inferred: what is known of its tensors.
    """

    attribute: str
    proto: onnx.ModelProto
    captured: frozenset[str]
    inferred: InferredTensors


@dataclass(frozen=True)
class Held:
    """The bodies of a node.

    Attributes:
        trips: of the body; a branch of an If runs once.
        bodies: one; of an If, both branches.
        chosen: the attribute of the If's branch that the user chose; "" if none.
        shapes: of the node's outputs, from those of the bodies.
    """

    trips: Trips
    bodies: tuple[Body, ...]
    chosen: str
    shapes: dict[str, tuple[int, ...]]
