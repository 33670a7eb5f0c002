"""The stages as ONNX models: with dynamic sizes, or for one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from graph_stages.definition import TENSORS, GraphSize, Stage
from graph_stages.layer import Array, Weights
from utils.lazy import onnx

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

OPSET = 18  # the first whose ScatterND adds up
IR_VERSION = 10
WEIGHTS = ("weight", "bias")  # the constants that an FP16 file stores in FP16
Precision = Literal["FP32", "FP16"]


def stage_model(stage: Stage, weights: Weights, precision: Precision, size: GraphSize, static: bool,
                metadata: Mapping[str, str] | None = None) -> ModelProto:
    """One stage as an ONNX model.

    Args:
        stage: which.
        weights: of the layer.
        precision: in which the file stores the weights. At FP16 each is followed by a Cast to float32, which runtimes fold: in
            which precision they compute is theirs to choose. Inputs and outputs are float32 either way.
        size: of the graph; for a dynamic model only its widths count.
        static: whether nodes and edges are fixed. Such a model does not take `node_count`.
        metadata: further properties of the file.
    """
    nodes, constants = _body(stage, weights, size)
    made, initializers = [], []
    for name, value in constants.items():
        node, stored = _constant(name, value, precision)
        made += node
        initializers.append(stored)
    if static and "node_count" in stage.inputs:
        initializers.append(onnx.numpy_helper.from_array(np.array([size.nodes], np.int64), "node_count"))
    inputs = [name for name in stage.inputs if not (static and name == "node_count")]
    graph = onnx.helper.make_graph(
        [*made, *nodes], stage.name, [_described(name, size, static) for name in inputs],
        [_described(name, size, static) for name in stage.outputs], initializers)
    model = onnx.helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    onnx.helper.set_model_props(model, dict(metadata or {}))
    return model


def _described(name: str, size: GraphSize, static: bool) -> ValueInfoProto:
    """An input or output; widths are always fixed."""
    tensor = TENSORS[name]
    shape: list[int | str] = [dim if dim in ("nodes", "edges") and not static else length
                              for dim, length in zip(tensor.dims, tensor.shape(size), strict=True)]
    kind = onnx.TensorProto.FLOAT if tensor.dtype == "float32" else onnx.TensorProto.INT64
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def _constant(name: str, value: Array, precision: Precision) -> tuple[list[NodeProto], TensorProto]:
    """A constant of the graph, and the node that makes it float32 again where the file stores it in FP16."""
    if precision == "FP32" or name not in WEIGHTS:
        return [], onnx.numpy_helper.from_array(value, name)
    stored = onnx.numpy_helper.from_array(value.astype(np.float16), f"{name}_fp16")
    return [_node("Cast", [stored.name], name, to=onnx.TensorProto.FLOAT)], stored


def _node(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    return onnx.helper.make_node(kind, list(inputs), [output], name=output, **attributes)


def _filled(value: float) -> TensorProto:
    """What ConstantOfShape fills a tensor with."""
    return onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [value])


def _body(stage: Stage, weights: Weights, size: GraphSize) -> tuple[list[NodeProto], dict[str, Array]]:
    """The nodes of a stage, and its constants by name."""
    last = {"last_axis": np.array([1], np.int64)}
    bodies: dict[str, tuple[list[NodeProto], dict[str, Array]]] = {
        "gather": ([_node("Gather", ["x", "source"], "messages", axis=0)], {}),
        "sum": ([_node("Concat", ["node_count", "width"], "shape", axis=0),
                 _node("ConstantOfShape", ["shape"], "zeros", value=_filled(0.0)),
                 _node("Unsqueeze", ["target", "last_axis"], "rows"),
                 _node("ScatterND", ["zeros", "rows", "messages"], "sums", reduction="add")],
                last | {"width": np.array([size.features], np.int64)}),
        "count": ([_node("ConstantOfShape", ["node_count"], "zeros", value=_filled(0.0)),
                   _node("Shape", ["target"], "edge_count"),
                   _node("ConstantOfShape", ["edge_count"], "ones", value=_filled(1.0)),
                   _node("Unsqueeze", ["target", "last_axis"], "rows"),
                   _node("ScatterND", ["zeros", "rows", "ones"], "degrees", reduction="add")], last),
        "mean": ([_node("Max", ["degrees", "one"], "divisors"),
                  _node("Unsqueeze", ["divisors", "last_axis"], "column"),
                  _node("Div", ["sums", "column"], "means")], last | {"one": np.ones(1, np.float32)}),
        "transform_neighbours": ([_node("MatMul", ["means", "weight"], "product"),
                                  _node("Add", ["product", "bias"], "neighbours")],
                                 {"weight": np.ascontiguousarray(weights.neighbours.T), "bias": weights.bias}),
        "transform_self": ([_node("MatMul", ["x", "weight"], "product"),
                            _node("Add", ["product", "neighbours"], "combined")],
                           {"weight": np.ascontiguousarray(weights.own.T)}),
        "activate": ([_node("Relu", ["combined"], "output")], {}),
    }
    return bodies[stage.name]
