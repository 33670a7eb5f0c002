"""A model in half precision, without its file being written: float32 becomes float16, as ONNX Runtime's own converter does it,
which is that of onnxconverter-common. Operators that it leaves in single precision get Casts around them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.model_files import locations
from hase.utils.model_graphs import hollow

SUFFIX = "_fp16"  # of the model's name


def in_half(proto: onnx.ModelProto, shown: str) -> onnx.ModelProto:
    """A model with its floats in half precision. Values of large weights are not kept: only their sizes matter.

    Args:
        proto: whose large tensors refer to files, as `hase.utils.model_graphs` describes it.
        shown: its name in errors.

    Raises:
        UserError: nothing in it is in single precision.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    logging.getLogger("onnxruntime.transformers").setLevel(logging.ERROR)  # it warns of each number that is rounded to 0
    single = onnx.TensorProto.FLOAT
    if not any(value.type.tensor_type.elem_type == single for value in (*proto.graph.input, *proto.graph.output)) and not any(
            tensor.data_type == single for tensor in proto.graph.initializer):
        raise UserError(f"{shown}: nothing in it is float32, so it can't be predicted in half precision; leave --dtype out")
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    far = [tensor for tensor in proto.graph.initializer if any(locations(tensor))]  # the converter would read their values
    of_file = {tensor.name for tensor in far}
    near = [tensor for tensor in made.graph.initializer if tensor.name not in of_file]
    declared = [value for value in made.graph.input if value.name not in of_file]
    _replace(made.graph.initializer, near)
    _replace(made.graph.input, [*declared, *(onnx.helper.make_tensor_value_info(
        tensor.name, tensor.data_type, list(tensor.dims)) for tensor in far)])
    made = convert_float_to_float16(made, keep_io_types=False)
    types = {value.name: value.type.tensor_type.elem_type for value in made.graph.input}
    _replace(made.graph.input, [value for value in made.graph.input if value.name not in of_file])
    _replace(made.graph.node, _once_each(made.graph.node))
    for tensor in far:
        added = made.graph.initializer.add()
        added.CopyFrom(tensor)
        if types[tensor.name] != tensor.data_type:
            added.data_type = types[tensor.name]
            hollow(added)  # its file holds numbers of another length
    return made


def _once_each(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes, each of them once: the converter adds the same Cast for each operator in single precision that reads it."""
    casts, kept = set[bytes](), []
    for node in nodes:
        if node.op_type == "Cast":
            if (same := node.SerializeToString(deterministic=True)) in casts:
                continue
            casts.add(same)
        kept.append(node)
    return kept


def _replace(repeated: Any, values: Iterable[Any]) -> None:
    """Puts other messages into a field of a message."""
    kept = [type(value).FromString(value.SerializeToString()) for value in values]
    del repeated[:]
    repeated.extend(kept)
