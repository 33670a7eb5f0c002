"""Shapes that ONNX Runtime's inference leaves open, and where else they can be had.

Operators outside ONNX's own set, such as those of ai.onnx.ml, often have no shape inference, nor do some that ONNX defines by
others (LessOrEqual): such a node is run once, alone, on zeros. A size that depends on data is the one given
(`--dim <tensor>.<axis>=SIZE`, or by the name that the model gives it), else the largest that ONNX allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ort_analysis.records.elements import type_code
from ort_analysis.records.kernel_record import KernelInput, zeros
from utils.errors import UserError
from utils.lazy import onnx
from utils.ort_sessions import model_errors, open_session

# Operators whose outputs' sizes follow from the values that they read, not from shapes alone: zeros would tell nothing.
SIZED_BY_VALUES = frozenset({
    "AffineGrid", "Bernoulli", "BlackmanWindow", "CenterCropPad", "Compress", "ConstantOfShape", "Crop", "DFT", "Expand",
    "HammingWindow", "HannWindow", "If", "Loop", "MelWeightMatrix", "NonMaxSuppression", "NonZero", "OneHot", "Pad", "Range",
    "Reshape", "Resize", "STFT", "Scan", "Slice", "Split", "SplitToSequence", "Squeeze", "StringSplit", "Tile", "TopK",
    "Unique", "Unsqueeze", "Upsample", "Col2Im", "MaxUnpool"})
DETECTIONS = "detections"  # how --dim calls the boxes that all NonMaxSuppressions of a model select
Shape = tuple[int | str, ...] | None  # a size that is not known is its name, "" where it has none; None: the rank is not known


def selects_boxes(graph: onnx.GraphProto) -> bool:
    """Whether a graph, or a body in it, selects boxes by NonMaxSuppression."""
    return any(node.op_type == "NonMaxSuppression" or any(selects_boxes(attribute.g) for attribute in node.attribute
                                                          if attribute.HasField("g")) for node in graph.node)


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
    """Whether a node gives what it reads in the same shape, though its operator need not: text of which it drops no words."""
    return node.op_type == "StringNormalizer" and not any(one.name == "stopwords" and one.strings for one in node.attribute)


def largest_shapes(node: onnx.NodeProto, shapes: Mapping[str, Shape], tensors: Mapping[str, KernelInput],
                   values: Mapping[str, tuple[int | float | bool, ...]]) -> dict[str, tuple[int, ...]]:
    """The largest shapes that ONNX allows the outputs of a node whose sizes depend on data; empty where it sets no bound.

    NonMaxSuppression selects no more than max_output_boxes_per_class boxes of each class and image, nor more than there are;
    NonZero, Compress and Unique no more than the input's elements (or rows, along an axis), TopK and Slice no more than the
    input has along each axis; a Reshape keeps the number of elements.

    Args:
        node: of ONNX's own operators.
        shapes: of its outputs, as far as they are known.
        tensors: type and shape of its inputs.
        values: of small whole-number tensors.
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
    """How many boxes a NonMaxSuppression selects at most."""
    batch, classes, boxes = tensors[node.input[1]].shape
    limit = node.input[2] if len(node.input) > 2 else ""
    given = (tensors[limit].values or values.get(limit)) if limit else (0,)  # ONNX: nothing is selected where it is left out
    return batch * classes * (boxes if given is None else min(int(given[0]), boxes))
