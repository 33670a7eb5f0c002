"""Shapes that ONNX Runtime's inference leaves open, and where else they can be had.

Operators outside ONNX's own set, such as those of ai.onnx.ml, often have no shape inference: such a node is run once, alone, on
zeros. A size that depends on data can't be had so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ort_analysis.records import KernelInput, numpy_dtype, type_code
from utils.errors import UserError
from utils.ort_sessions import model_errors, open_session

if TYPE_CHECKING:
    import onnx

ONNX_DOMAINS = ("", "ai.onnx")
Shape = tuple[int | str, ...] | None  # a size that is not known is its name, "" where it has none; None: the rank is not known


def shapes_when_run(node: onnx.NodeProto, proto: onnx.ModelProto, tensors: Mapping[str, KernelInput],
                    name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a node's output tensors, by running it alone on zeros.

    Args:
        node: of `proto`.
        proto: the graph; small constants inside.
        tensors: type and shape of the node's inputs.
        name: of the model, for errors.

    Raises:
        UserError: it can't be run alone.
    """
    import onnx
    from onnx import helper

    constants = {tensor.name: tensor for tensor in proto.graph.initializer
                 if tensor.name in node.input and tensor.data_location != onnx.TensorProto.EXTERNAL}
    fed = [value for value in dict.fromkeys(node.input) if value and value not in constants]
    if not all(tensors[value].is_tensor for value in fed):
        raise UserError(f"{name}: the rank of tensor {node.output[0]} is not known, and its node {node.name} ({node.op_type}) "
                        "takes more than tensors, so that it can't be tried alone")
    inputs = [helper.make_tensor_value_info(value, type_code(tensors[value].dtype),
                                            tensors[value].shape) for value in fed]
    graph = helper.make_graph([node], "node", inputs, [helper.ValueInfoProto(name=out) for out in node.output if out],
                              list(constants.values()))
    model = helper.make_model(graph, opset_imports=list(proto.opset_import), ir_version=proto.ir_version)
    session = open_session(model.SerializeToString(), "cpu", optimize="none", name=f"{name}: node {node.name}")
    feed = {value: np.zeros(tensors[value].shape, numpy_dtype(tensors[value].dtype)) for value in fed}
    with model_errors(f"{name}: node {node.name}"):
        made = session.run(None, feed)
    return {out.name: tuple(value.shape) for out, value in zip(session.get_outputs(), made, strict=True)
            if isinstance(value, np.ndarray)}
