"""Type and shape of every tensor of a graph, as ONNX Runtime infers them.

The optimised graph that ORT saves has no shapes, and ONNX's own inference does not know ORT's operators. So ORT is asked by a
shape query: a copy of the graph in which every tensor is an output and large weights are inputs. A session opens it and saves
it again, and the outputs of the saved graph carry what ORT inferred. If shapes depend on integers that the graph computes from
other shapes, ORT's constant folding computes these. If they depend on data, they are the given ones, or the largest possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hase.ort_analysis.cuda.gpu_only import cover, holds_gpu_only, is_gpu_only
from hase.ort_analysis.graph.bodies import captured, hold
from hase.ort_analysis.graph.nodes import ONNX_DOMAINS, bodies_of
from hase.ort_analysis.graph.open_shapes import (
    GivenSizes,
    Held,
    InferredTensors,
    Shape,
    Values,
    keeps_its_shape,
    largest_shapes,
    selects_boxes,
    shapes_when_run,
)
from hase.records.kernel_record import KernelInput, session_dtype, type_code, type_name
from hase.records.operators import operator_row
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.model_files import array_of
from hase.utils.model_graphs import at_root, is_hollow, values_of
from hase.utils.ort_sessions import PROVIDER_NAMES, open_session, outputs_by_schema
from hase.utils.temporary import temporary_folder

SMALL_INTS = 64  # the values of integer constants up to this many elements are kept: shapes, axes, splits
SMALL_BYTES = 1024  # a larger constant is left out of a shape query
FRESH = "hase.fresh"  # an additional input (`add_fresh_input`)


def constant_inputs(graph: onnx.GraphProto) -> dict[str, KernelInput]:
    keep_floats, ranges = small_values_by_use(graph), index_ranges(graph)
    return {tensor.name: constant_input(tensor, tensor.name in keep_floats).model_copy(
        update={"value_range": ranges.get(tensor.name)}) for tensor in graph.initializer}


def constant_input(tensor: onnx.TensorProto, keep_floats: bool) -> KernelInput:
    """An initializer as a constant tensor; its values are kept if they decide what the kernel does."""
    dtype, shape = type_name(tensor.data_type), tuple(tensor.dims)
    plain = KernelInput(dtype=dtype, shape=shape, constant=True)
    if onnx.external_data_helper.uses_external_data(tensor) or dtype == "string":
        return plain
    whole = dtype.startswith(("int", "uint", "bool"))
    if not (plain.elements <= SMALL_INTS if whole or keep_floats else plain.elements == 1):
        return plain
    return plain.model_copy(update={"values": tuple(array_of(tensor).ravel().tolist())})


def small_values_by_use(graph: onnx.GraphProto) -> set[str]:
    """The names of the tensors whose floating-point values set an output's shape."""
    return {name for node in graph.node if operator_row(node.op_type).float_sizes for name in node.input[1:] if name}


def index_ranges(graph: onnx.GraphProto) -> dict[str, tuple[int, int]]:
    """The smallest and the largest value of each large integer constant of `graph` (index tables) that is not missing."""
    ranges = {}
    for tensor in graph.initializer:
        if tensor.data_type not in (onnx.TensorProto.INT32, onnx.TensorProto.INT64) or math.prod(tensor.dims) <= SMALL_INTS:
            continue
        if is_hollow(tensor):
            continue
        array = array_of(values_of(tensor))
        ranges[tensor.name] = (int(array.min()), int(array.max()))
    return ranges


def add_fresh_input(graph: onnx.GraphProto) -> None:
    """Gives a graph one more input, whose size a session fixes (`dims={FRESH: 1}`). A session that changes nothing in a graph
    saves it as it was, without shapes and without default attributes."""
    graph.input.append(onnx.helper.make_tensor_value_info(FRESH, onnx.TensorProto.FLOAT, [FRESH]))


def remove_fresh_input(graph: onnx.GraphProto) -> None:
    """Removes that input."""
    for value in [value for value in graph.input if value.name == FRESH]:
        graph.input.remove(value)


def shape_query(proto: onnx.ModelProto, dims: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of a graph in which every tensor is an output, weights stored in other files are inputs, and `dims` are fixed."""
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
    """A model whose large constants have a shape, and no values."""
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
    """The types of a shape query's outputs by name, as far as the operators' schemas tell, whether or not there are kernels. A
    scalar counts as a tensor of unknown rank, since ONNX Runtime shows both alike."""
    return {value.name: onnx.helper.make_tensor_type_proto(type_code(session_dtype(value.type)), value.shape or None)
            for value in outputs_by_schema(query.SerializeToString()) if value.type.startswith("tensor(")}


@dataclass(frozen=True)
class ShapeAnswer:
    """What ORT infers of a shape query.

    Attributes:
        dtypes: by tensor.
        shapes: by tensor; None if the rank is unknown, or for a sequence or map.
        values: of small integer tensors.
        providers: by node name.
    """

    dtypes: dict[str, str]
    shapes: dict[str, Shape]
    values: dict[str, Values]
    providers: dict[str, str]

    def is_open(self, tensor: str) -> bool:
        """Whether the shape of `tensor` is not completely known."""
        shape = self.shapes[tensor]
        if shape is None:
            return "(" not in self.dtypes[tensor]  # sequences and maps have none
        return any(isinstance(size, str) for size in shape)

    def unknown(self, besides: Mapping[str, KernelInput]) -> list[str]:
        """The tensors, except `besides`, whose shapes are not completely known."""
        return [tensor for tensor in self.shapes if tensor not in besides and self.is_open(tensor)]


def ask(query: onnx.ModelProto, device: str, name: str, fold: bool) -> ShapeAnswer:
    """Lets ORT infer the shapes of a shape query; with `fold`, it also computes what depends on shapes and constants alone."""
    with temporary_folder() as folder:
        saved = Path(folder) / "query.onnx"
        if device == "cpu" and holds_gpu_only(query.graph):
            covered = onnx.ModelProto()
            covered.CopyFrom(query)
            query = cover(covered, types_by_schema(query))
        session = open_session(query.SerializeToString(), device, optimize="basic" if fold else "none", name=name,
                               dims={FRESH: 1}, save_to=saved,
                               entries={"session.record_ep_graph_assignment_info": "1", **at_root()})
        graph = onnx.load(str(saved), load_external_data=False).graph
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
    return ShapeAnswer(dtypes, shapes, values, dict(assignments(session)))


def declare_shapes(query: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> None:
    """Declares the shapes of some outputs of a shape query; ORT then relies on them."""
    for value in query.graph.output:
        if value.name in shapes:
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, type_code(dtypes[value.name]), shapes[value.name]))


def shapes_of_any_size(proto: onnx.ModelProto, name: str) -> dict[str, Shape]:
    """The shapes of a graph's tensors as ORT knows them while it optimises, without given sizes; an open size is its name."""
    return ask(shape_query(proto, {}), "cpu", name, fold=False).shapes


def value_type(kind: onnx.TypeProto) -> str:
    """The element type of a tensor; for other values the type as text: `sequence(map(int64,float32))`."""
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


def shape_of(kind: onnx.TypeProto) -> Shape:
    """The shape of a tensor's type, an unknown size as its name; None if the rank is unknown or it is not a tensor."""
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param
                 for dim in kind.tensor_type.shape.dim)


def assignments(session: Any) -> Iterator[tuple[str, str]]:
    """Pairs of a node's name and the provider that ORT assigned."""
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            yield node.name, PROVIDER_NAMES.get(part.ep_name, part.ep_name)


Shapes = dict[str, tuple[int, ...]]  # by tensor
HeldBy = Callable[["onnx.NodeProto", Mapping[str, KernelInput], Mapping[str, Values]], "Held | None"]


def infer_tensors(proto: onnx.ModelProto, device: str, name: str, dims: Mapping[str, int] | None = None,
                  inside: str = "") -> InferredTensors:
    """Type and shape of every tensor of an optimised graph, and the provider of every node, as ORT knows them.

    Args:
        proto: the graph; its nodes have unique names.
        device: `cpu` or `cuda`.
        name: of the model, for errors.
        dims: sizes of its dynamic dimensions, and of tensors whose sizes depend on data.
        inside: the name of the node whose body it is; "" for the main graph.

    Raises:
        UserError: a shape depends on data without a bound, or a rank is not known; the message names the tensor.
    """
    constants = constant_inputs(proto.graph)
    query = shape_query(proto, dims or {})
    answer = ask(query, device, name, fold=False)
    providers, plain = answer.providers, answer.shapes
    if answer.unknown(constants):
        answer = ask(query, device, name, fold=True)
    assumed: Shapes = {}
    declared: Shapes = {}
    sizes = GivenSizes(dims or {}, f"{inside}/" if inside else "", selects_boxes(proto.graph))

    def infer_body(body: onnx.ModelProto, holder: str) -> InferredTensors:
        return infer_tensors(body, device, f"{name}: {holder}", dims, holder)

    def held_by(node: onnx.NodeProto, tensors: Mapping[str, KernelInput], values: Mapping[str, Values]) -> Held | None:
        return hold(node, proto, tensors, values, dims or {}, infer_body)

    while answer.unknown(constants):
        shapes, bounds = _derived_shapes(answer, proto, constants, name, sizes, held_by)
        assumed |= bounds
        declared |= shapes | bounds
        declare_shapes(query, shapes | bounds, answer.dtypes)
        answer = ask(query, device, name, fold=True)
        for tensor, shape in declared.items():  # ORT does not use every declared shape
            if tensor in answer.shapes and answer.is_open(tensor):
                answer.shapes[tensor] = shape
    tensors = constants | _known_tensors(answer, constants.keys())
    computed = {tensor: values for tensor, values in answer.values.items() if tensor in tensors and tensor not in constants}
    held = {node.name: held_body for node in proto.graph.node if (held_body := held_by(node, tensors, computed)) is not None}
    used = sizes.used.union(*(body.inferred.used for each in held.values() for body in each.bodies))
    return InferredTensors(tensors, computed, providers, assumed, plain, held, frozenset(used))


def _derived_shapes(answer: ShapeAnswer, proto: onnx.ModelProto, constants: Mapping[str, KernelInput], name: str,
                    sizes: GivenSizes, held_by: HeldBy) -> tuple[Shapes, Shapes]:
    """Shapes that ORT leaves open, of at least one tensor: of the outputs of each node whose inputs do not depend on open
    shapes.

    A later size may be computed from these shapes, so ORT is asked again when they are known.

    Returns:
        The certain or given shapes, and the largest possible ones.

    Raises:
        UserError: a shape can't be found; the message names the tensor.
    """
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
    """Refuses a graph with an input whose shape is open."""
    made = {out for node in proto.graph.node for out in node.output}
    for tensor in sorted(waiting - made):
        what = "rank" if answer.shapes[tensor] is None else "shape"
        raise UserError(f"{name}: the {what} of tensor {tensor}, an input, is not known; export the model with the shapes of "
                        "its inputs")


def _known_tensors(answer: ShapeAnswer, besides: AbstractSet[str]) -> dict[str, KernelInput]:
    """The tensors of an answer except `besides`; their shapes must be known."""
    return {tensor: KernelInput(dtype=dtype, shape=tuple(int(size) for size in answer.shapes[tensor] or ()))
            for tensor, dtype in answer.dtypes.items() if tensor not in besides}


def _output_shapes(node: onnx.NodeProto, outputs: set[str], answer: ShapeAnswer, known: Mapping[str, KernelInput],
                   proto: onnx.ModelProto, name: str, sizes: GivenSizes) -> tuple[Shapes, Shapes]:
    """The certain or given shapes of a node's open `outputs`, and the largest possible ones; its inputs are `known`.

    Raises:
        UserError: a shape can't be found; the message names the tensor.
    """
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
