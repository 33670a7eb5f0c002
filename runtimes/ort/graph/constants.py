"""The constants of a graph: their types and shapes, and the values that decide what a kernel does."""

from __future__ import annotations

import math
from pathlib import Path

from records.elements import type_name
from records.kernel_record import KernelInput
from utils.lazy import onnx
from utils.model_files import with_values

SMALL_INTS = 64  # the values of integer constants up to this many elements are kept: shapes, axes, splits
FLOAT_VALUES_MATTER = {"Resize", "Upsample"}  # operators for which small floating-point constants set the output's shape


def constant_inputs(graph: onnx.GraphProto, folder: Path) -> dict[str, KernelInput]:
    keep_floats, ranges = small_values_by_use(graph), index_ranges(folder, graph)
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
    return plain.model_copy(update={"values": tuple(onnx.numpy_helper.to_array(tensor).ravel().tolist())})


def small_values_by_use(graph: onnx.GraphProto) -> set[str]:
    """The names of the tensors whose floating-point values set an output's shape."""
    return {name for node in graph.node if node.op_type in FLOAT_VALUES_MATTER for name in node.input[1:] if name}


def index_ranges(folder: Path, graph: onnx.GraphProto) -> dict[str, tuple[int, int]]:
    """The smallest and the largest value of each large integer constant of `graph` (index tables)."""
    ranges = {}
    for tensor in graph.initializer:
        if tensor.data_type not in (onnx.TensorProto.INT32, onnx.TensorProto.INT64) or math.prod(tensor.dims) <= SMALL_INTS:
            continue
        array = onnx.numpy_helper.to_array(with_values(tensor, folder))
        ranges[tensor.name] = (int(array.min()), int(array.max()))
    return ranges
