"""Asks ONNX Runtime for the types and shapes of all tensors of a graph.

A shape query is a copy of the graph in which every tensor is an output and large weights are inputs. A session opens it and
saves it again: the outputs of the saved graph carry what ORT inferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records.elements import type_code, type_name
from records.kernel_record import KernelInput
from runtimes.ort.graph.constants import constant_input
from runtimes.ort.graph.inferred import Values
from runtimes.ort.graph.open_shapes import Shape
from utils.lazy import onnx
from utils.ort_sessions import PROVIDER_NAMES, open_session
from utils.temporary import temporary_folder

# An additional input of a shape query, with an open dimension: a session saves shapes only if it changed the graph.
FRESH = "hase.fresh"


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
    return query


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
        session = open_session(query.SerializeToString(), device, optimize="basic" if fold else "none", name=name,
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
