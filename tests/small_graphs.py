"""ONNX models of a few nodes, for tests of what happens to certain operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, HALF, INT32, INT64, BOOL = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64,
                                   TensorProto.BOOL)
CONTRIB, ML = "com.microsoft", "ai.onnx.ml"


def node(op_type: str, inputs: Sequence[str], outputs: str | Sequence[str] = "y", name: str | None = None, domain: str = "",
         **attributes: Any) -> onnx.NodeProto:
    """A node. Outputs may be a string, if there is one."""
    return helper.make_node(op_type, list(inputs), [outputs] if isinstance(outputs, str) else list(outputs), name=name,
                            domain=domain, **attributes)


def value(name: str, *shape: int | str, kind: int = FLOAT) -> onnx.ValueInfoProto:
    """An input or an output."""
    return helper.make_tensor_value_info(name, kind, shape)


def unranked(name: str, kind: int = FLOAT) -> onnx.ValueInfoProto:
    """An input or an output of which only the type is known."""
    return helper.make_tensor_value_info(name, kind, None)


def constant(name: str, number: Any) -> onnx.TensorProto:
    """Whole numbers become int64, others float32, unless they are an array or a tensor already."""
    if isinstance(number, onnx.TensorProto):
        made = onnx.TensorProto()
        made.CopyFrom(number)
        made.name = name
        return made
    array = np.asarray(number)
    return numpy_helper.from_array(array if isinstance(number, np.ndarray | np.generic) or array.dtype.kind != "f"
                                   else array.astype(np.float32), name)


def graph(nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto] = (),
          outputs: Sequence[onnx.ValueInfoProto | str] = ("y",), constants: Mapping[str, Any] | None = None) -> onnx.GraphProto:
    """A graph, or the body of a node. Outputs may be names alone."""
    return helper.make_graph(
        list(nodes), "graph", list(inputs), [helper.ValueInfoProto(name=output) if isinstance(output, str) else output
                                             for output in outputs],
        [constant(name, number) for name, number in (constants or {}).items()])


def model(nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto] = (),
          outputs: Sequence[onnx.ValueInfoProto | str] = ("y",), constants: Mapping[str, Any] | None = None, opset: int = 20,
          **more: Any) -> onnx.ModelProto:
    """A model of one graph, with the operators of ONNX Runtime and of scikit-learn's converter."""
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1), helper.make_opsetid(ML, 3)]
    return helper.make_model(graph(nodes, inputs, outputs, constants), opset_imports=opsets, ir_version=10, **more)
