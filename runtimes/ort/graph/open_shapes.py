"""Shapes that ONNX Runtime's inference leaves open, and other ways to find them.

Operators outside ONNX's own set, such as those of ai.onnx.ml, often have no shape inference; nor have some that ONNX defines by
other operators (LessOrEqual). Such a node is run once, alone, on zeros. A size that depends on data is the given one
(`--dim <tensor>.<axis>=SIZE`, or by its name in the model), else the largest that ONNX allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from records.elements import type_code
from records.kernel_record import KernelInput, zeros
from utils.errors import UserError
from utils.lazy import onnx
from utils.ort_sessions import model_errors, open_session

# The output sizes of these operators depend on values, not on shapes alone, so a run on zeros would not show them.
SIZED_BY_VALUES = frozenset({
    "AffineGrid", "Bernoulli", "BlackmanWindow", "CenterCropPad", "Compress", "ConstantOfShape", "Crop", "DFT", "Expand",
    "HammingWindow", "HannWindow", "If", "Loop", "MelWeightMatrix", "NonMaxSuppression", "NonZero", "OneHot", "Pad", "Range",
    "Reshape", "Resize", "STFT", "Scan", "Slice", "Split", "SplitToSequence", "Squeeze", "StringSplit", "Tile", "TopK",
    "Unique", "Unsqueeze", "Upsample", "Col2Im", "MaxUnpool"})
DETECTIONS = "detections"  # the name, for --dim, of the number of boxes that all NonMaxSuppressions of a model select
Shape = tuple[int | str, ...] | None  # an unknown size is its name, or ""; None: the rank is unknown


def selects_boxes(graph: onnx.GraphProto) -> bool:
    """Whether a graph, or a body in it, selects boxes by NonMaxSuppression."""
    return any(node.op_type == "NonMaxSuppression" or any(selects_boxes(attribute.g) for attribute in node.attribute
                                                          if attribute.HasField("g")) for node in graph.node)


def shapes_when_run(node: onnx.NodeProto, proto: onnx.ModelProto, tensors: Mapping[str, KernelInput],
                    name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a node's outputs, found by running the node alone on zeros.

    Args:
        node: of `proto`.
        proto: the graph; small constants inside.
        tensors: type and shape of the node's inputs.
        name: of the model, for errors.

    Raises:
        UserError: it can't be run alone.
    """
    constants = {tensor.name: tensor for tensor in proto.graph.initializer
                 if tensor.name in node.input and tensor.data_location != onnx.TensorProto.EXTERNAL}
    fed = [value for value in dict.fromkeys(node.input) if value and value not in constants]
    if not all(tensors[value].is_tensor for value in fed):
        raise UserError(f"{name}: the rank of tensor {node.output[0]} is not known, and its node {node.name} ({node.op_type}) "
                        "takes more than tensors, so that it can't be tried alone")
    inputs = [onnx.helper.make_tensor_value_info(value, type_code(tensors[value].dtype),
                                            tensors[value].shape) for value in fed]
    graph = onnx.helper.make_graph([node], "node", inputs, [onnx.helper.ValueInfoProto(name=out) for out in node.output if out],
                              list(constants.values()))
    model = onnx.helper.make_model(graph, opset_imports=list(proto.opset_import), ir_version=proto.ir_version)
    session = open_session(model.SerializeToString(), "cpu", optimize="none", name=f"{name}: node {node.name}")
    feed = {value: zeros(tensors[value].shape, tensors[value].dtype) for value in fed}
    with model_errors(f"{name}: node {node.name}"):
        made = session.run(None, feed)
    return {out.name: tuple(value.shape) for out, value in zip(session.get_outputs(), made, strict=True)
            if isinstance(value, np.ndarray)}


def keeps_its_shape(node: onnx.NodeProto) -> bool:
    """Whether a node's output has the shape of its input although its operator may change it: it drops no words of a text."""
    return node.op_type == "StringNormalizer" and not any(one.name == "stopwords" and one.strings for one in node.attribute)


def largest_shapes(node: onnx.NodeProto, shapes: Mapping[str, Shape], tensors: Mapping[str, KernelInput],
                   values: Mapping[str, tuple[int | float | bool, ...]]) -> dict[str, tuple[int, ...]]:
    """The largest shapes that ONNX allows for the outputs of a node whose sizes depend on data; empty if there is no bound.

    NonMaxSuppression selects at most max_output_boxes_per_class boxes per class and image, and at most as many as there are.
    NonZero, Compress and Unique return at most the elements of the input (or its rows, along an axis), TopK and Slice at most
    the input's size along each axis. A Reshape keeps the number of elements.

    Args:
        node: of an operator of ONNX's own set.
        shapes: of its outputs, as far as they are known.
        tensors: type and shape of its inputs.
        values: of small integer tensors.
    """
    first = tensors.get(node.input[0]) if node.input else None
    if first is None:
        return {}
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    found: dict[str, tuple[int, ...]] = {}
    for place, name in enumerate(node.output):
        shape = shapes.get(name)
        if not name or shape is None:
            continue
        if node.op_type == "NonMaxSuppression":
            bounds: tuple[int, ...] = (_most_boxes(node, tensors, values), 3)
        elif node.op_type == "NonZero":
            bounds = (len(first.shape), first.elements)
        elif node.op_type in ("Compress", "Unique"):
            bounds = first.shape if axis is not None and place == 0 else (
                first.elements if axis is None else first.shape[axis],)
        elif node.op_type in ("TopK", "Slice"):
            bounds = first.shape
        elif node.op_type == "Reshape" and sum(isinstance(size, str) for size in shape) == 1:
            rest = math.prod(size for size in shape if isinstance(size, int))
            bounds = tuple(first.elements // max(rest, 1) if isinstance(size, str) else size for size in shape)
        else:
            continue
        if len(bounds) == len(shape):
            found[name] = tuple(bound if isinstance(size, str) else size for bound, size in zip(bounds, shape, strict=True))
    return found


def _most_boxes(node: onnx.NodeProto, tensors: Mapping[str, KernelInput],
                values: Mapping[str, tuple[int | float | bool, ...]]) -> int:
    """The largest number of boxes that a NonMaxSuppression can select."""
    batch, classes, boxes = tensors[node.input[1]].shape
    limit = node.input[2] if len(node.input) > 2 else ""
    given = (tensors[limit].values or values.get(limit)) if limit else (0,)  # ONNX: without this input nothing is selected
    return batch * classes * (boxes if given is None else min(int(given[0]), boxes))
