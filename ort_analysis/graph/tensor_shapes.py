"""Type and shape of every tensor of an optimised graph, as ONNX Runtime itself infers them.

The graph that ORT saves holds no shapes, and ONNX's own inference stops at ORT's operators. So a copy of the graph, in which
every tensor is an output and large weights are inputs, is opened and saved again: its outputs then carry what ORT knows. Where
shapes depend on whole numbers that the graph computes from other shapes, ORT's constant folding works these out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from ort_analysis.graph.bodies import captured, hold
from ort_analysis.graph.inferred import Held, InferredTensors, Values
from ort_analysis.graph.open_shapes import (
    DETECTIONS,
    SIZED_BY_VALUES,
    Shape,
    keeps_its_shape,
    largest_shapes,
    selects_boxes,
    shapes_when_run,
)
from ort_analysis.graph.parsed_nodes import ONNX_DOMAINS, bodies_of
from ort_analysis.records.elements import type_code, type_name
from ort_analysis.records.kernel_record import KernelInput
from utils.errors import UserError
from utils.lazy import onnx
from utils.model_files import with_values
from utils.ort_sessions import PROVIDER_NAMES, open_session
from utils.temporary import temporary_folder

SMALL_INTS = 64  # whole-number constants up to this many elements are kept by value: shapes, axes, splits
FLOAT_VALUES_MATTER = {"Resize", "Upsample"}  # operators whose small floating constants set the output's shape
FRESH = "hase.fresh"  # an input of probes, and its open dimension: only a graph that a session changed is saved with its shapes
HeldBy = Callable[["onnx.NodeProto", Mapping[str, KernelInput], Mapping[str, Values]], "Held | None"]


def constant_input(tensor: onnx.TensorProto, keep_floats: bool) -> KernelInput:
    """An initializer as a constant tensor; its value is kept where it decides what the kernel does."""
    dtype, shape = type_name(tensor.data_type), tuple(tensor.dims)
    plain = KernelInput(dtype=dtype, shape=shape, constant=True)
    if onnx.external_data_helper.uses_external_data(tensor) or dtype == "string":
        return plain
    whole = dtype.startswith(("int", "uint", "bool"))
    if not (plain.elements <= SMALL_INTS if whole or keep_floats else plain.elements == 1):
        return plain
    return plain.model_copy(update={"values": tuple(onnx.numpy_helper.to_array(tensor).ravel().tolist())})


def small_values_by_use(graph: onnx.GraphProto) -> set[str]:
    """Names of the tensors whose floating values set an output's shape."""
    return {name for node in graph.node if node.op_type in FLOAT_VALUES_MATTER for name in node.input[1:] if name}


def index_ranges(folder: Path, graph: onnx.GraphProto) -> dict[str, tuple[int, int]]:
    """Smallest and largest value of each large whole-number constant of `graph` (index tables)."""
    ranges = {}
    for tensor in graph.initializer:
        if tensor.data_type not in (onnx.TensorProto.INT32, onnx.TensorProto.INT64) or math.prod(tensor.dims) <= SMALL_INTS:
            continue
        array = onnx.numpy_helper.to_array(with_values(tensor, folder))
        ranges[tensor.name] = (int(array.min()), int(array.max()))
    return ranges


def infer_tensors(proto: onnx.ModelProto, device: str, name: str, folder: Path,
                  dims: Mapping[str, int] | None = None, inside: str = "") -> InferredTensors:
    """Type and shape of every tensor of an optimised graph, and the provider of every node, as ORT knows them.

    Args:
        proto: the graph; nodes named uniquely.
        device: `cpu` or `cuda`.
        name: of the model, for errors.
        folder: where its external weights lie.
        dims: sizes of the dimensions that are still dynamic in it, and of tensors whose sizes depend on data.
        inside: the name of the node whose body it is; "" for a model's graph.

    Raises:
        UserError: a shape that depends on data, or a rank that is not known; the tensor is named.
    """
    constants = _constants(proto.graph, folder)
    probe = _probe(proto, dims or {})
    answer = _ask(probe, device, name, fold=False)
    providers, plain = answer.providers, answer.shapes
    if answer.unknown(constants):
        answer = _ask(probe, device, name, fold=True)
    assumed: dict[str, tuple[int, ...]] = {}
    told: dict[str, tuple[int, ...]] = {}
    sizes = _GivenSizes(dims or {}, f"{inside}/" if inside else "", selects_boxes(proto.graph))

    def infer_body(body: onnx.ModelProto, holder: str) -> InferredTensors:
        return infer_tensors(body, device, f"{name}: {holder}", folder, dims, holder)

    def held_by(node: onnx.NodeProto, tensors: Mapping[str, KernelInput], values: Mapping[str, Values]) -> Held | None:
        return hold(node, proto, tensors, values, dims or {}, infer_body)

    while answer.unknown(constants):
        found, bounds = _first_open(answer, proto, constants, name, sizes, held_by)
        assumed |= bounds
        told |= found | bounds
        _stamp(probe, found | bounds, answer.dtypes)
        answer = _ask(probe, device, name, fold=True)
        for tensor, shape in told.items():  # what ORT does not take for granted holds all the same
            if tensor in answer.shapes and answer.is_open(tensor):
                answer.shapes[tensor] = shape
    tensors = constants | {tensor: KernelInput(dtype=dtype, shape=tuple(int(size) for size in answer.shapes[tensor] or ()))
                           for tensor, dtype in answer.dtypes.items() if tensor not in constants}
    computed = {tensor: values for tensor, values in answer.values.items() if tensor in tensors and tensor not in constants}
    held = {node.name: one for node in proto.graph.node if (one := held_by(node, tensors, computed)) is not None}
    used = sizes.used.union(*(body.inferred.used for each in held.values() for body in each.bodies))
    return InferredTensors(tensors, computed, providers, assumed, plain, held, frozenset(used))


def _constants(graph: onnx.GraphProto, folder: Path) -> dict[str, KernelInput]:
    keep_floats, ranges = small_values_by_use(graph), index_ranges(folder, graph)
    return {tensor.name: constant_input(tensor, tensor.name in keep_floats).model_copy(
        update={"value_range": ranges.get(tensor.name)}) for tensor in graph.initializer}


def _probe(proto: onnx.ModelProto, dims: Mapping[str, int]) -> onnx.ModelProto:
    """A copy in which every tensor is an output, the weights that lie outside the file are inputs, and `dims` are fixed."""
    probe = onnx.ModelProto()
    probe.CopyFrom(proto)
    graph = probe.graph
    outside = [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    inside = [tensor for tensor in graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    declared = {value.name for value in graph.input}
    graph.input.extend(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                       for tensor in outside if tensor.name not in declared)
    graph.input.append(onnx.helper.make_tensor_value_info(FRESH, onnx.TensorProto.FLOAT, [FRESH]))
    del graph.initializer[:]
    graph.initializer.extend(inside)
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]
    known = {value.name for value in graph.output}
    for node in proto.graph.node:
        graph.output.extend(onnx.helper.ValueInfoProto(name=out) for out in node.output if out and out not in known)
    return probe


@dataclass(frozen=True)
class _Answer:
    """What ORT says of a probe's tensors, by name: types, shapes (None for what is no tensor, too), values of small
    whole-number tensors; and providers by node name."""

    dtypes: dict[str, str]
    shapes: dict[str, Shape]
    values: dict[str, Values]
    providers: dict[str, str]

    def is_open(self, tensor: str) -> bool:
        """Whether the shape of `tensor` is not wholly known."""
        shape = self.shapes[tensor]
        if shape is None:
            return "(" not in self.dtypes[tensor]  # sequences and maps have none
        return any(isinstance(size, str) for size in shape)

    def unknown(self, besides: Mapping[str, KernelInput]) -> list[str]:
        """The tensors, but for `besides`, whose shapes are not wholly known."""
        return [tensor for tensor in self.shapes if tensor not in besides and self.is_open(tensor)]


def _ask(probe: onnx.ModelProto, device: str, name: str, fold: bool) -> _Answer:
    """Has ORT infer the shapes of a probe; with `fold`, it also computes what follows from shapes and constants alone."""
    with temporary_folder() as folder:
        saved = Path(folder) / "probe.onnx"
        session = open_session(probe.SerializeToString(), device, optimize="basic" if fold else "none", name=name,
                               dims={FRESH: 1}, save_to=saved, entries={"session.record_ep_graph_assignment_info": "1"})
        graph = onnx.load(str(saved)).graph
    dtypes, shapes, values = {}, {}, {}
    for value in (value for value in [*graph.input, *graph.output] if value.name != FRESH):
        dtypes[value.name] = value_type(value.type)
        shapes[value.name] = shape_of(value.type)
    for tensor in graph.initializer:  # a tensor that was folded keeps its name
        made = constant_input(tensor, keep_floats=True)
        if made.values is not None:
            values[tensor.name] = made.values
        if tensor.name in shapes:
            shapes[tensor.name] = tuple(tensor.dims)
    return _Answer(dtypes, shapes, values, dict(assignments(session)))


def shapes_of_any_size(proto: onnx.ModelProto, name: str) -> dict[str, Shape]:
    """The shapes of a graph's tensors as ORT knows them while it optimises, before any size is given: open ones are words."""
    return _ask(_probe(proto, {}), "cpu", name, fold=False).shapes


def value_type(kind: onnx.TypeProto) -> str:
    """The element type of a tensor; for what is no tensor its type in words: `sequence(map(int64,float32))`."""
    which = kind.WhichOneof("value")
    if which == "tensor_type":
        return type_name(kind.tensor_type.elem_type)
    if which == "sparse_tensor_type":
        return f"sparse({type_name(kind.sparse_tensor_type.elem_type)})"
    if which == "map_type":
        return f"map({type_name(kind.map_type.key_type)},{value_type(kind.map_type.value_type)})"
    if which in ("sequence_type", "optional_type"):
        return f"{which.removesuffix('_type')}({value_type(getattr(kind, which).elem_type)})"
    return f"{which or 'unknown'}()"


def session_dtype(text: str) -> str:
    """What a session calls `tensor(float)` as `float32`."""
    inner = text[text.find("(") + 1:text.rfind(")")] if "(" in text else text
    return {"float": "float32", "double": "float64"}.get(inner, inner)


def shape_of(kind: onnx.TypeProto) -> Shape:
    """The shape of a tensor's type, its unknown sizes as words; None where its rank is unknown, or it is no tensor."""
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param
                 for dim in kind.tensor_type.shape.dim)


class SizeNotKnown(UserError):
    """A shape depends on data, and ONNX sets it no bound.

    Attributes:
        tensor: it, by the name under which its sizes can be given.
    """

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


@dataclass
class _GivenSizes:
    """The sizes that the user gives to tensors of one graph whose sizes depend on data.

    Attributes:
        dims: all that is given, by name.
        prefix: of the names of a body's tensors.
        selects: the graph selects boxes, whose number may stand for other sizes, too.
        used: names of those that were asked for.
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
        """A tensor's shape with the sizes that are given; None where one is still open.

        Args:
            tensor, shape: as far as it is known; of a tensor whose rank is not known, the sizes given say it.
            boxes: a node makes it whose first axis is the boxes that it selects.
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
        """A shape whose open sizes are the number of boxes that the user gives; None where none is given."""
        if shape is None or (number := self._take(DETECTIONS)) is None:
            return None
        return tuple(size if isinstance(size, int) else number for size in shape)

    def refusal(self, name: str, tensor: str, shape: Shape) -> SizeNotKnown:
        """Why the shape of a tensor is no use, and how to give it.

        Args:
            name: of the model.
            tensor, shape: as far as it is known.
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
                            f"its size, for example {options}{boxes} (benchmark/sizes_of_a_run.py tells those of a run)", whole)


def _options(tensor: str, axes: Iterable[int]) -> str:
    """How sizes of a tensor are given to a command."""
    return " ".join(f"--dim {quote(f'{tensor}.{axis}=100')}" for axis in axes)


def _first_open(answer: _Answer, proto: onnx.ModelProto, constants: Mapping[str, KernelInput], name: str, sizes: _GivenSizes,
                held_by: HeldBy) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes, found otherwise, of the open outputs of each node whose inputs are all known, and all that these are computed
    from, at least one: those that are sure or given, and those that are the largest possible.

    A size may be a number that the graph computes from shapes that are open, too: it is known once they are.

    Raises:
        UserError: they can't be found; the tensor is named.
    """
    waiting = set(answer.unknown(constants))
    made = {out for node in proto.graph.node for out in node.output}
    for tensor in sorted(waiting - made):
        what = "rank" if answer.shapes[tensor] is None else "shape"
        raise UserError(f"{name}: the {what} of tensor {tensor}, an input, is not known; export the model with the shapes of "
                        "its inputs")
    known = {**constants, **{tensor: KernelInput(dtype=dtype, shape=tuple(int(size) for size in answer.shapes[tensor] or ()))
                         for tensor, dtype in answer.dtypes.items() if tensor not in waiting and tensor not in constants}}
    found: dict[str, tuple[int, ...]] = {}
    bounds: dict[str, tuple[int, ...]] = {}
    open_before: set[str] = set()  # tensors that are open, or computed from such
    for node in proto.graph.node:
        outputs = waiting & set(node.output)
        bodies = bodies_of(node)
        if open_before & {*node.input, *(read for body in bodies.values() for read in captured(body))}:
            open_before.update(node.output)
            continue
        open_before |= outputs
        if not outputs:
            continue
        held = held_by(node, known, answer.values) if bodies else None
        if held is not None:
            found |= {out: shape for out, shape in held.shapes.items() if out in outputs}
            continue
        given = {out: shape for out in sorted(outputs) if (shape := sizes.shape(
            out, answer.shapes[out], node.op_type == "NonMaxSuppression")) is not None}
        if keeps_its_shape(node):
            given |= {node.output[0]: known[node.input[0]].shape}
        found |= given
        left = sorted(outputs - set(given))
        by_values = node.op_type in SIZED_BY_VALUES or any(answer.shapes[out] is not None for out in left)
        if node.domain in ONNX_DOMAINS and by_values:
            largest = largest_shapes(node, answer.shapes, known, answer.values)
            for out in left:
                if out in largest:
                    bounds[out] = largest[out]
                elif (shape := sizes.as_many_as_boxes(answer.shapes[out])) is not None:
                    found[out] = shape
                else:
                    raise sizes.refusal(name, out, answer.shapes[out])
        elif left:
            found |= {out: shape for out, shape in shapes_when_run(node, proto, known, name).items() if out in left}
            if left[0] not in found:
                raise sizes.refusal(name, left[0], answer.shapes[left[0]])
    return found, bounds


def _stamp(probe: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> None:
    """Declares the shapes of some of a probe's outputs, which ORT then takes for granted."""
    for value in probe.graph.output:
        if value.name in shapes:
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, type_code(dtypes[value.name]), shapes[value.name]))


def assignments(session: Any) -> Iterator[tuple[str, str]]:
    """Pairs of node name and provider as ORT assigned them."""
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            yield node.name, PROVIDER_NAMES.get(part.ep_name, part.ep_name)
