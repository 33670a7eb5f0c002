"""Type and shape of every tensor of a graph, as inferred by ONNX Runtime.

ORT's saved optimised graph has no shapes, and ONNX's own inference does not know ORT's operators. So ORT gets a shape query: a
copy of the graph in which every tensor is an output and large weights are inputs. A session opens and saves it; the saved
outputs carry the inferred shapes. If shapes depend on integers computed from other shapes, ORT's constant folding computes
these.

Operators outside ONNX's own set (such as ai.onnx.ml), and some that ONNX defines by other operators (LessOrEqual), often have
no shape inference. Such a node is run once, alone, on zeros. A data-dependent size is the given one (`--dim
<tensor>.<axis>=SIZE`, or by its name in the model), else the largest that ONNX allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.ort_analysis.cuda.rewrites import cover_gpu_only, has_gpu_only_nodes, is_gpu_only
from hase.ort_analysis.graph.bodies import analyse_bodies, captured
from hase.ort_analysis.graph.nodes import ONNX_DOMAINS, AnalysedBodies, InferredTensors, Shape, SizeNotKnown, Values, bodies_of
from hase.records.kernel_record import KernelInput, session_dtype, type_code, type_name, zeros
from hase.records.operators import operator_row
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.lazy import onnx
from hase.utils.model_files import tensor_array
from hase.utils.model_graphs import at_root, is_hollow, values_of
from hase.utils.ort_sessions import PROVIDER_NAMES, model_errors, open_session, outputs_by_schema

if TYPE_CHECKING:
    import onnx


DETECTIONS = "detections"  # the name, for --dim, of the number of boxes that all NonMaxSuppressions of a model select
SMALL_INTS = 64  # the values of integer constants up to this many elements are kept: shapes, axes, splits
SMALL_BYTES = 1024  # a larger constant is left out of a shape query
FRESH = "hase.fresh"  # an additional input (`add_fresh_input`)


def selects_boxes(graph: onnx.GraphProto) -> bool:
    """Whether a graph or one of its bodies contains NonMaxSuppression."""
    return any(node.op_type == "NonMaxSuppression" or any(selects_boxes(attribute.g) for attribute in node.attribute
                                                          if attribute.HasField("g")) for node in graph.node)


def shapes_when_run(node: onnx.NodeProto, proto: onnx.ModelProto, tensors: Mapping[str, KernelInput],
                    name: str) -> dict[str, tuple[int, ...]]:
    """The output shapes of a node, from running it alone on zeros."""
    constants = {tensor.name: tensor for tensor in proto.graph.initializer
                 if tensor.name in node.input and tensor.data_location != onnx.TensorProto.EXTERNAL}
    inputs_fed = [value for value in dict.fromkeys(node.input) if value and value not in constants]
    if not all(tensors[value].is_tensor for value in inputs_fed):
        raise UserError(f"{name}: the rank of tensor {node.output[0]} is not known, and its node {node.name} ({node.op_type}) "
                        "takes more than tensors, so that it can't be tried alone")
    inputs = [onnx.helper.make_tensor_value_info(value, type_code(tensors[value].dtype), tensors[value].shape)
              for value in inputs_fed]
    graph = onnx.helper.make_graph([node], "node", inputs, [onnx.helper.ValueInfoProto(name=out) for out in node.output if out],
                              list(constants.values()))
    model = onnx.helper.make_model(graph, opset_imports=list(proto.opset_import), ir_version=proto.ir_version)
    session = open_session(model.SerializeToString(), "cpu", optimize="none", name=f"{name}: node {node.name}",
                           entries=at_root())
    feed = {value: zeros(tensors[value].shape, tensors[value].dtype) for value in inputs_fed}
    with model_errors(f"{name}: node {node.name}"):
        results = session.run(None, feed)
    return {out.name: tuple(value.shape) for out, value in zip(session.get_outputs(), results, strict=True)
            if isinstance(value, np.ndarray)}


def keeps_its_shape(node: onnx.NodeProto) -> bool:
    """Whether a node keeps its input's shape although its operator may change it: it drops no words of a text."""
    return node.op_type == "StringNormalizer" and not any(
        attribute.name == "stopwords" and attribute.strings for attribute in node.attribute)


def largest_shapes(node: onnx.NodeProto, shapes: Mapping[str, Shape], tensors: Mapping[str, KernelInput],
                   values: Mapping[str, tuple[int | float | bool, ...]]) -> dict[str, tuple[int, ...]]:
    """The largest shapes that ONNX allows for a node's outputs with data-dependent sizes; empty without a bound.

    NonMaxSuppression selects at most max_output_boxes_per_class boxes per class and image, and at most all boxes. NonZero,
    Compress and Unique return at most the input's elements (or its rows, along an axis), TopK and Slice at most the input's
    size per axis. A Reshape keeps the number of elements.
    """
    first = tensors.get(node.input[0]) if node.input else None
    if first is None:
        return {}
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    largest: dict[str, tuple[int, ...]] = {}
    for index, name in enumerate(node.output):
        shape = shapes.get(name)
        if not name or shape is None:
            continue
        if node.op_type == "NonMaxSuppression":
            bounds: tuple[int, ...] = (_most_boxes(node, tensors, values), 3)
        elif node.op_type == "NonZero":
            bounds = (len(first.shape), first.elements)
        elif node.op_type in ("Compress", "Unique"):
            bounds = first.shape if axis is not None and index == 0 else (
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


@dataclass
class GivenSizes:
    """The user's sizes of data-dependent tensors in one graph."""

    dims: Mapping[str, int]  # all given sizes, by name
    prefix: str  # of the names of a body's tensors
    selects: bool  # the graph selects boxes; their number may set other sizes too
    used: set[str] = field(default_factory=set)  # the names of the given sizes that were used

    def _take(self, *names: str) -> int | None:
        name = next((name for name in names if name in self.dims), None)
        self.used |= {name} if name else set()
        return self.dims[name] if name else None

    def shape(self, tensor: str, shape: Shape, boxes: bool) -> tuple[int, ...] | None:
        """A tensor's shape with the given sizes, which also define an unknown rank; None if a size is still open. `boxes`: the
        tensor's first axis counts boxes that a node selects."""
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
        """A shape with every open size replaced by the given number of boxes; None if none is given."""
        if shape is None or (number := self._take(DETECTIONS)) is None:
            return None
        return tuple(size if isinstance(size, int) else number for size in shape)

    def refusal(self, name: str, tensor: str, shape: Shape) -> SizeNotKnown:
        """The error for a tensor with unknown shape; it says how to give the sizes."""
        full = f"{self.prefix}{tensor}"
        if shape is None:
            return SizeNotKnown(
                f"{name}: the rank of tensor {full} is not known; export the model with the shapes of its inputs, or give all "
                f"sizes of this tensor, for example, where it has two axes, {_options(full, range(2))}", full)
        sizes = ", ".join(str(size) or "?" for size in shape)
        options = _options(full, [axis for axis, size in enumerate(shape) if not isinstance(size, int)])
        boxes = f", or --dim {DETECTIONS}=100 for all such sizes" if self.selects else ""
        return SizeNotKnown(f"{name}: the shape of tensor {full} ([{sizes}]) depends on data or on an open dimension; give "
                            f"its size, for example {options}{boxes} (benchmark/sizes_of_a_run.py shows those of a run)", full)


def _options(tensor: str, axes: Iterable[int]) -> str:
    """The command-line options that set sizes of a tensor."""
    return " ".join(f"--dim {quote(f'{tensor}.{axis}=100')}" for axis in axes)


def constant_inputs(graph: onnx.GraphProto) -> dict[str, KernelInput]:
    """The constants of a graph by name, with values of small ones and ranges of index tables."""
    ranges = index_ranges(graph)
    keep_floats = {name for node in graph.node if operator_row(node.op_type).float_sizes for name in node.input[1:] if name}
    return {tensor.name: constant_input(tensor, tensor.name in keep_floats).model_copy(
        update={"value_range": ranges.get(tensor.name)}) for tensor in graph.initializer}


def constant_input(tensor: onnx.TensorProto, keep_floats: bool) -> KernelInput:
    """An initializer as a constant tensor, with its values if they decide what the kernel does."""
    dtype, shape = type_name(tensor.data_type), tuple(tensor.dims)
    plain = KernelInput(dtype=dtype, shape=shape, constant=True)
    if onnx.external_data_helper.uses_external_data(tensor) or dtype == "string":
        return plain
    whole = dtype.startswith(("int", "uint", "bool"))
    if not (plain.elements <= SMALL_INTS if whole or keep_floats else plain.elements == 1):
        return plain
    return plain.model_copy(update={"values": tuple(tensor_array(tensor).ravel().tolist())})


def index_ranges(graph: onnx.GraphProto) -> dict[str, tuple[int, int]]:
    """The smallest and largest value of each large integer constant (index table) whose values exist."""
    ranges = {}
    for tensor in graph.initializer:
        if tensor.data_type not in (onnx.TensorProto.INT32, onnx.TensorProto.INT64) or math.prod(tensor.dims) <= SMALL_INTS:
            continue
        if is_hollow(tensor):
            continue
        array = tensor_array(values_of(tensor))
        ranges[tensor.name] = (int(array.min()), int(array.max()))
    return ranges


def add_fresh_input(graph: onnx.GraphProto) -> None:
    """Adds an input to a graph, whose size a session fixes (`dims={FRESH: 1}`). Without a change, a session would save the
    graph without shapes and default attributes."""
    graph.input.append(onnx.helper.make_tensor_value_info(FRESH, onnx.TensorProto.FLOAT, [FRESH]))


def remove_fresh_input(graph: onnx.GraphProto) -> None:
    """Removes the input that `add_fresh_input` added."""
    for value in [value for value in graph.input if value.name == FRESH]:
        graph.input.remove(value)


def shape_query(proto: onnx.ModelProto, dims: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of a graph with every tensor as an output, weights in other files as inputs, and fixed `dims`."""
    query = onnx.ModelProto()
    query.CopyFrom(proto)
    graph = query.graph
    outside = [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    inside = [tensor for tensor in graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    declared = {value.name for value in graph.input}
    graph.input.extend(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                       for tensor in outside if tensor.name not in declared)
    add_fresh_input(graph)
    del graph.initializer[:]
    graph.initializer.extend(inside)
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]
    known = {value.name for value in graph.output}
    for node in proto.graph.node:
        graph.output.extend(onnx.helper.ValueInfoProto(name=out) for out in node.output if out and out not in known)
    return query


def without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose large constants have only a shape."""
    light = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    graph = proto.graph
    light.graph.MergeFrom(onnx.GraphProto(name=graph.name, node=graph.node, input=graph.input, output=graph.output,
                                          value_info=graph.value_info))
    for tensor in graph.initializer:
        small = tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() <= SMALL_BYTES
        light.graph.initializer.append(tensor if small else onnx.TensorProto(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=onnx.TensorProto.EXTERNAL))
    return light


def types_by_schema(query: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """The output types of a shape query by name, as far as the schemas tell, even without kernels. A scalar counts as a tensor
    of unknown rank, since ONNX Runtime shows both alike."""
    return {value.name: onnx.helper.make_tensor_type_proto(type_code(session_dtype(value.type)), value.shape or None)
            for value in outputs_by_schema(query.SerializeToString()) if value.type.startswith("tensor(")}


@dataclass(frozen=True)
class ShapeAnswer:
    """ORT's answer to a shape query."""

    dtypes: dict[str, str]  # by tensor
    shapes: dict[str, Shape]  # by tensor; None if the rank is unknown, or for a sequence or map
    values: dict[str, Values]  # of small integer tensors
    providers: dict[str, str]  # by node name

    def is_open(self, tensor: str) -> bool:
        """Whether the shape of `tensor` is not fully known."""
        shape = self.shapes[tensor]
        if shape is None:
            return "(" not in self.dtypes[tensor]  # sequences and maps have none
        return any(isinstance(size, str) for size in shape)

    def unknown(self, besides: Mapping[str, KernelInput]) -> list[str]:
        """The tensors, except `besides`, without a fully known shape."""
        return [tensor for tensor in self.shapes if tensor not in besides and self.is_open(tensor)]


def infer_shapes(query: onnx.ModelProto, device: str, name: str, fold: bool) -> ShapeAnswer:
    """Makes ORT answer a shape query; with `fold`, it also computes what depends only on shapes and constants."""
    with temporary_folder() as folder:
        saved = Path(folder) / "query.onnx"
        if device == "cpu" and has_gpu_only_nodes(query.graph):
            covered = onnx.ModelProto()
            covered.CopyFrom(query)
            query = cover_gpu_only(covered, types_by_schema(query))
        session = open_session(query.SerializeToString(), device, optimize="basic" if fold else "none", name=name,
                               dims={FRESH: 1}, save_to=saved,
                               entries={"session.record_ep_graph_assignment_info": "1", **at_root()})
        graph = onnx.load(str(saved), load_external_data=False).graph
    dtypes, shapes, values = {}, {}, {}
    for value in (value for value in [*graph.input, *graph.output] if value.name != FRESH):
        dtypes[value.name] = value_type(value.type)
        shapes[value.name] = shape_of(value.type)
    for tensor in graph.initializer:  # a tensor that was folded keeps its name
        constant = constant_input(tensor, keep_floats=True)
        if constant.values is not None:
            values[tensor.name] = constant.values
        if tensor.name in shapes:
            shapes[tensor.name] = tuple(tensor.dims)
    return ShapeAnswer(dtypes, shapes, values, dict(assignments(session)))


def declare_shapes(query: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> None:
    """Declares the shapes of some outputs of a shape query, so that ORT relies on them."""
    for value in query.graph.output:
        if value.name in shapes:
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, type_code(dtypes[value.name]), shapes[value.name]))


def shapes_of_any_size(proto: onnx.ModelProto, name: str) -> dict[str, Shape]:
    """The tensor shapes that ORT knows while it optimises, without given sizes; an open size is its name."""
    return infer_shapes(shape_query(proto, {}), "cpu", name, fold=False).shapes


def value_type(kind: onnx.TypeProto) -> str:
    """A tensor's element type; for other values the type as text: `sequence(map(int64,float32))`."""
    field = kind.WhichOneof("value")
    if field == "tensor_type":
        return type_name(kind.tensor_type.elem_type)
    if field == "sparse_tensor_type":
        return f"sparse({type_name(kind.sparse_tensor_type.elem_type)})"
    if field == "map_type":
        return f"map({type_name(kind.map_type.key_type)},{value_type(kind.map_type.value_type)})"
    if field in ("sequence_type", "optional_type"):
        return f"{field.removesuffix('_type')}({value_type(getattr(kind, field).elem_type)})"
    return f"{field or 'unknown'}()"


def shape_of(kind: onnx.TypeProto) -> Shape:
    """The shape in a tensor's type, with names for unknown sizes; None if the rank is unknown or it is no tensor."""
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param
                 for dim in kind.tensor_type.shape.dim)


def assignments(session: Any) -> Iterator[tuple[str, str]]:
    """Pairs of a node's name and its provider, as ORT assigned it."""
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            yield node.name, PROVIDER_NAMES.get(part.ep_name, part.ep_name)


Shapes = dict[str, tuple[int, ...]]  # by tensor
AnalyseBodies = Callable[["onnx.NodeProto", Mapping[str, KernelInput], Mapping[str, Values]], "AnalysedBodies | None"]


def infer_tensors(proto: onnx.ModelProto, device: str, name: str, dims: Mapping[str, int] | None = None,
                  inside: str = "") -> InferredTensors:
    """Type and shape of every tensor, and the provider of every node, of an optimised graph with named nodes. `dims` are
    dynamic dimensions and data-dependent sizes. `inside` is the node whose body the graph is."""
    constants = constant_inputs(proto.graph)
    query = shape_query(proto, dims or {})
    answer = infer_shapes(query, device, name, fold=False)
    providers, plain = answer.providers, answer.shapes
    if answer.unknown(constants):
        answer = infer_shapes(query, device, name, fold=True)
    assumed: Shapes = {}
    declared: Shapes = {}
    sizes = GivenSizes(dims or {}, f"{inside}/" if inside else "", selects_boxes(proto.graph))

    def infer_body(body: onnx.ModelProto, holder: str) -> InferredTensors:
        return infer_tensors(body, device, f"{name}: {holder}", dims, holder)

    def held_by(node: onnx.NodeProto, tensors: Mapping[str, KernelInput],
                values: Mapping[str, Values]) -> AnalysedBodies | None:
        return analyse_bodies(node, proto, tensors, values, dims or {}, infer_body)

    while answer.unknown(constants):
        shapes, bounds = _derived_shapes(answer, proto, constants, name, sizes, held_by)
        assumed |= bounds
        declared |= shapes | bounds
        declare_shapes(query, shapes | bounds, answer.dtypes)
        answer = infer_shapes(query, device, name, fold=True)
        for tensor, shape in declared.items():  # ORT does not use every declared shape
            if tensor in answer.shapes and answer.is_open(tensor):
                answer.shapes[tensor] = shape
    tensors = constants | _known_tensors(answer, constants.keys())
    computed = {tensor: values for tensor, values in answer.values.items() if tensor in tensors and tensor not in constants}
    held = {node.name: held_body for node in proto.graph.node if (held_body := held_by(node, tensors, computed)) is not None}
    used = sizes.used.union(*(body.inferred.used for node_bodies in held.values() for body in node_bodies.bodies))
    return InferredTensors(tensors, computed, providers, assumed, plain, held, frozenset(used))


def _derived_shapes(answer: ShapeAnswer, proto: onnx.ModelProto, constants: Mapping[str, KernelInput], name: str,
                    sizes: GivenSizes, held_by: AnalyseBodies) -> tuple[Shapes, Shapes]:
    """Certain or given shapes, and largest possible ones, of at least one tensor that ORT leaves open. These are outputs of
    nodes whose inputs do not depend on open shapes. Later sizes may depend on them, so ORT is asked again afterwards."""
    waiting = set(answer.unknown(constants))
    _check_inputs(answer, proto, waiting, name)
    known = {**constants, **_known_tensors(answer, constants.keys() | waiting)}
    shapes: Shapes = {}
    bounds: Shapes = {}
    open_before: set[str] = set()  # open tensors, and those computed from them
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
            shapes |= {out: shape for out, shape in held.shapes.items() if out in outputs}
            continue
        sure, largest = _output_shapes(node, outputs, answer, known, proto, name, sizes)
        shapes |= sure
        bounds |= largest
    return shapes, bounds


def _check_inputs(answer: ShapeAnswer, proto: onnx.ModelProto, waiting: set[str], name: str) -> None:
    """Refuses a graph with an input of unknown shape."""
    computed = {out for node in proto.graph.node for out in node.output}
    for tensor in sorted(waiting - computed):
        what = "rank" if answer.shapes[tensor] is None else "shape"
        raise UserError(f"{name}: the {what} of tensor {tensor}, an input, is not known; export the model with the shapes of "
                        "its inputs")


def _known_tensors(answer: ShapeAnswer, besides: AbstractSet[str]) -> dict[str, KernelInput]:
    """The tensors in an answer except `besides`; their shapes must be known."""
    return {tensor: KernelInput(dtype=dtype, shape=tuple(int(size) for size in answer.shapes[tensor] or ()))
            for tensor, dtype in answer.dtypes.items() if tensor not in besides}


def _output_shapes(node: onnx.NodeProto, outputs: set[str], answer: ShapeAnswer, known: Mapping[str, KernelInput],
                   proto: onnx.ModelProto, name: str, sizes: GivenSizes) -> tuple[Shapes, Shapes]:
    """Certain or given shapes, and largest possible ones, of a node's open `outputs`; its inputs are `known`."""
    selects = node.op_type == "NonMaxSuppression"
    shapes = {out: shape for out in sorted(outputs) if (shape := sizes.shape(out, answer.shapes[out], selects)) is not None}
    if keeps_its_shape(node):
        shapes |= {node.output[0]: known[node.input[0]].shape}
    left = sorted(outputs - set(shapes))
    bounds: Shapes = {}
    row = operator_row(node.op_type)
    if left and node.domain in ONNX_DOMAINS and (row.operator_class == "convolution" or row.kind == "pool"):
        given = "×".join(map(str, known[node.input[0]].shape))  # all sizes are known, and none depends on data
        raise UserError(f"{name}: {node.name} ({node.op_type}) can't take an input of {given}, which is smaller than its "
                        "window; give larger sizes")
    by_values = row.shape_needs_values or any(answer.shapes[out] is not None for out in left)
    if node.domain in ONNX_DOMAINS and by_values:
        largest = largest_shapes(node, answer.shapes, known, answer.values)
        for out in left:
            if out in largest:
                bounds[out] = largest[out]
            elif (shape := sizes.as_many_as_boxes(answer.shapes[out])) is not None:
                shapes[out] = shape
            else:
                raise sizes.refusal(name, out, answer.shapes[out])
    elif left and is_gpu_only(node):  # a kernel that this machine can't run
        raise sizes.refusal(name, left[0], answer.shapes[left[0]])
    elif left:
        shapes |= {out: shape for out, shape in shapes_when_run(node, proto, known, name).items() if out in left}
        if left[0] not in shapes:
            raise sizes.refusal(name, left[0], answer.shapes[left[0]])
    return shapes, bounds
