"""Half precision where only the CPU provider is at hand: it would cast to single precision and hide the CUDA graph.

A model that is wholly in half precision is optimised as if it were in single precision, and what comes out is read as
half precision again: the fusions of the CUDA provider do not ask which of the two it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ort_analysis.records import KernelInput
from utils.errors import UserError

if TYPE_CHECKING:
    import onnx

FLOATING = ("FLOAT", "DOUBLE", "BFLOAT16")


def holds_half(graph: onnx.GraphProto) -> bool:
    """Whether inputs, weights or casts of a graph are of half precision."""
    from onnx import TensorProto

    return TensorProto.FLOAT16 in set(element_types(graph))


def element_types(graph: onnx.GraphProto) -> Iterator[int]:
    """ONNX's numbers of the types of a graph's inputs, outputs, weights, constants and casts."""
    for value in (*graph.input, *graph.output):
        yield value.type.tensor_type.elem_type
    for tensor in graph.initializer:
        yield tensor.data_type
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type in ("Cast", "CastLike") and attribute.name == "to":
                yield attribute.i
            elif attribute.HasField("t"):
                yield attribute.t.data_type


def as_single(loadable: Path | bytes, name: str) -> bytes:
    """A model wholly in half precision, serialised as the same model in single precision.

    Raises:
        UserError: the model computes in other floating types besides.
    """
    import numpy as np
    import onnx
    from onnx import TensorProto, numpy_helper

    proto = onnx.load(str(loadable)) if isinstance(loadable, Path) else onnx.load_from_string(loadable)
    graph = proto.graph
    others = set(element_types(graph)) & {TensorProto.DataType.Value(kind) for kind in FLOATING}
    if others:
        kinds = ", ".join(sorted(TensorProto.DataType.Name(kind).lower() for kind in others))
        raise UserError(f"{name}: its CUDA graph can't be derived without a GPU, since it mixes half precision with {kinds}; "
                        "analyse it on a machine with a GPU, or for --device cpu")

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == TensorProto.FLOAT16:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))

    for tensor in graph.initializer:
        widen(tensor)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]  # ORT works the types out anew
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                widen(attribute.t)
            elif attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
    return proto.SerializeToString()


def in_half(tensors: Mapping[str, KernelInput]) -> dict[str, KernelInput]:
    """Tensors of a graph that `as_single` made, as they are in half precision."""
    return {name: tensor.model_copy(update={"dtype": "float16"}) if tensor.dtype == "float32" else tensor
            for name, tensor in tensors.items()}
