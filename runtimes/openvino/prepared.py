"""A model as OpenVINO is given it: sizes fixed, constants folded, and each ONNX node named by its place.

OpenVINO says of each layer of its compiled graph which nodes it computes, by their names. So the names have to be unique.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.ort_analysis.graph.source import Source
from hase.ort_analysis.graph.tensor_shapes import constant_inputs
from hase.records.kernel_record import KernelInput, Tensor
from hase.records.operators import operator_row
from hase.runtimes.openvino.package import check_openvino, refused
from hase.utils.lazy import onnx, openvino
from hase.utils.model_files import array_of, read_whole_model

if TYPE_CHECKING:
    import onnx.reference

PLACE = re.compile(r"(?:^|[,/ ])(\d+)#")  # of a node, in the names that OpenVINO makes of its own
SHAPE = "Shape"


@dataclass(frozen=True)
class Prepared:
    """A model that OpenVINO can compile.

    Attributes:
        source: the model as the user gave it.
        nodes: its ONNX nodes that are left, in order.
        names: the names that they had.
        tensors: by name, constants with their small values.
        opset: of ONNX's own operators.
        inputs, outputs: of the graph, by name.
        model: OpenVINO's, not compiled.
    """

    source: Source
    nodes: tuple[onnx.NodeProto, ...]
    names: tuple[str, ...]
    tensors: Mapping[str, KernelInput]
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    model: Any


def prepare(source: Source) -> Prepared:
    """Reads a model into OpenVINO.

    Raises:
        UserError: OpenVINO is not installed, or can't read this model.
    """
    check_openvino()
    proto = (read_whole_model(source.loadable) if isinstance(source.loadable, Path)
             else onnx.load_model_from_string(source.loadable))
    fix_sizes(proto, source.dims)
    asks_sizes = any(node.op_type == SHAPE for node in proto.graph.node)
    shapes = tensors_of(read(proto, source.name)) if asks_sizes else {}
    fold(proto, shapes)
    names = tuple(node.name or (node.output[0] if node.output else "") for node in proto.graph.node)
    for place, node in enumerate(proto.graph.node):
        node.name = node_name(place, node.op_type)
    model = read(proto, source.name)
    tensors = {name: KernelInput(**tensor.model_dump()) for name, tensor in {**shapes, **tensors_of(model)}.items()}
    constants = constant_inputs(proto.graph)
    return Prepared(
        source, tuple(proto.graph.node), names,
        {**tensors, **constants},
        next((opset.version for opset in proto.opset_import if opset.domain in ("", "ai.onnx")), 1),
        tuple(value.name for value in proto.graph.input if value.name not in constants),
        tuple(value.name for value in proto.graph.output), model)


def node_name(place: int, op_type: str) -> str:
    """The name of a node, in which PLACE finds its place again."""
    return f"{place}#{op_type}"


def fix_sizes(proto: onnx.ModelProto, dims: Mapping[str, int]) -> None:
    """Writes sizes into the inputs of a model in place of their dynamic dimensions."""
    for value in proto.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]


def read(proto: onnx.ModelProto, name: str) -> Any:
    """OpenVINO's model of an ONNX model.

    Raises:
        UserError: OpenVINO can't read it.
    """
    try:
        return openvino.Core().read_model(proto.SerializeToString())
    except (RuntimeError, ValueError) as error:  # ValueError: protobuf writes at most 2 GiB
        raise refused(name, error) from error


def tensors_of(model: Any) -> dict[str, Tensor]:
    """The tensors of OpenVINO's model that have ONNX's names and a fixed shape."""
    return {name: Tensor(dtype=str(np.dtype(output.get_element_type().to_dtype())), shape=tuple(output.get_shape()))
            for node in model.get_ordered_ops() for output in node.outputs() if output.get_partial_shape().is_static
            for name in output.get_names()}


def fold(proto: onnx.ModelProto, shapes: Mapping[str, Tensor]) -> None:
    """Replaces nodes whose outputs do not depend on the model's inputs by constants, as OpenVINO does.

    Args:
        proto: the model, which is changed.
        shapes: of its tensors, by name.
    """
    graph = proto.graph
    constants = {tensor.name: array_of(tensor) for tensor in graph.initializer}
    kept = []
    for node in graph.node:
        values = dict(folded(node, constants, shapes, proto.opset_import))
        constants |= values
        if values:
            graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def folded(node: onnx.NodeProto, constants: Mapping[str, np.ndarray], shapes: Mapping[str, Tensor],
           opsets: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The outputs of a node by name, if they can be computed from constants and shapes alone."""
    if node.op_type == SHAPE and node.input[0] in shapes and not node.attribute:
        yield node.output[0], np.array(shapes[node.input[0]].shape, np.int64)
        return
    if (operator_row(node.op_type).random or not all(name in constants for name in node.input if name)
            or any(attribute.HasField("g") for attribute in node.attribute)):
        return
    given = [name for name in node.input if name]
    graph = onnx.helper.make_graph([node], "node", [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(given)],
                                   [onnx.ValueInfoProto(name=name) for name in node.output if name])
    try:
        evaluator = onnx.reference.ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets))
        values = evaluator.run(None, {name: constants[name] for name in given})
    except Exception:  # noqa: BLE001  ONNX's evaluator raises all sorts where it lacks an operator; OpenVINO then computes it
        return
    yield from zip((name for name in node.output if name), map(np.asarray, values), strict=True)
