"""TVM's operators: their names and attributes in ONNX's words, and their classes.

Records describe kernels in ONNX's words, so that costs and features are computed as for kernels of ONNX Runtime.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from hase.records.operators import operator_row

OperatorKind = Literal["linear", "multiplicative", "nonlinear"]
NetworkKind = Literal["fully connected", "convolutional", "other"]
NetworkScale = Literal["small", "medium", "large"]
SCALES: dict[NetworkScale, float] = {"small": 50, "medium": 150, "large": float("inf")}  # the most nodes of such a network
ONNX_NAMES = {  # of TVM's operators; the others' are the same but for capitals
    "conv1d": "Conv", "conv2d": "Conv", "conv3d": "Conv", "conv1d_transpose": "ConvTranspose", "conv2d_transpose":
    "ConvTranspose", "conv3d_transpose": "ConvTranspose", "matmul": "MatMul", "subtract": "Sub", "multiply": "Mul", "divide":
    "Div", "power": "Pow", "maximum": "Max", "minimum": "Min", "negative": "Neg", "leakyrelu": "LeakyRelu", "prelu": "PRelu",
    "max_pool1d": "MaxPool", "max_pool2d": "MaxPool", "max_pool3d": "MaxPool", "avg_pool1d": "AveragePool", "avg_pool2d":
    "AveragePool", "avg_pool3d": "AveragePool", "adaptive_avg_pool1d": "GlobalAveragePool", "adaptive_avg_pool2d":
    "GlobalAveragePool", "adaptive_avg_pool3d": "GlobalAveragePool", "mean": "ReduceMean", "sum": "ReduceSum", "max":
    "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd", "permute_dims": "Transpose", "expand_dims": "Unsqueeze",
    "broadcast_to": "Expand", "take": "Gather", "gather_nd": "GatherND", "scatter_nd": "ScatterND", "strided_slice": "Slice",
    "dynamic_strided_slice": "Slice", "astype": "Cast", "layer_norm": "LayerNormalization", "group_norm":
    "GroupNormalization", "instance_norm": "InstanceNormalization", "batch_norm": "BatchNormalization", "rms_norm":
    "RMSNormalization", "resize2d": "Resize", "resize3d": "Resize", "gelu_tanh": "Gelu", "logical_and": "And", "logical_or":
    "Or", "logical_not": "Not", "less_equal": "LessOrEqual", "greater_equal": "GreaterOrEqual", "argmax": "ArgMax", "argmin":
    "ArgMin", "cumsum": "CumSum", "topk": "TopK", "full": "ConstantOfShape", "arange": "Range"}
SUMS = ("Add", "Sub", "Neg", "Sum")  # linear operators that compute; the others move data, or nearly


class Operator(NamedTuple):
    """An operator of a graph in ONNX's words.

    Attributes:
        name: ONNX's, or TVM's in ONNX's style where ONNX has none.
        attributes: those that decide its costs and features.
        relax: TVM's own name.
    """

    name: str
    attributes: dict[str, Any]
    relax: str


def onnx_name(relax: str) -> str:
    """ONNX's name of an operator of TVM: `Conv` for `relax.nn.conv2d`."""
    last = relax.rpartition(".")[2].removeprefix("tir_")
    return ONNX_NAMES.get(last) or "".join(part[:1].upper() + part[1:] for part in last.split("_"))


def operator_of_function(function: str) -> str:
    """The name of the operator that a function of TVM computes: `add` for `add12`. TVM numbers functions of one name."""
    plain = function.removeprefix("tir_")
    base = plain if plain in ONNX_NAMES else re.sub(r"\d+$", "", plain)
    return {"transpose": "permute_dims"}.get(base, base)


def _numbers(values: Iterable[Any]) -> list[int]:
    return [int(value) for value in values]


def attributes_of(relax: str, attrs: Any) -> dict[str, Any]:
    """The attributes of a call of a Relax operator, by ONNX's names. Those of operators that are not listed are left out: the
    kernel's function says what it computes, and is part of its id.

    Args:
        relax: the operator's name.
        attrs: of the call; None where it has none.
    """
    last, attributes = relax.rpartition(".")[2], dict[str, Any]()
    for name, relax_name in (("strides", "strides"), ("pads", "padding"), ("dilations", "dilation"),
                             ("kernel_shape", "pool_size")):
        if (values := getattr(attrs, relax_name, None)) is not None and last.startswith(("conv", "max_pool", "avg_pool")):
            attributes[name] = _numbers(values)
    if last.startswith("conv"):
        attributes["group"] = int(attrs.groups)
    for name in ("ceil_mode", "count_include_pad"):
        if "pool" in last and (flag := getattr(attrs, name, None)) is not None:
            attributes[name] = int(flag)
    if last == "permute_dims" and attrs.axes is not None:
        attributes["perm"] = _numbers(attrs.axes)
    if (axis := getattr(attrs, "axis", None)) is not None:
        if isinstance(axis, int):
            attributes["axis"] = axis
        elif not hasattr(axis, "dtype"):
            attributes["axes"] = _numbers(axis)
    if last in ("layer_norm", "rms_norm"):
        attributes["axis"] = min(_numbers(attrs.axes))
    return attributes


def operator_kind(name: str) -> OperatorKind:
    """The class of an operator by its name in ONNX: linear (additions, comparisons, and what only moves data), multiplicative
    (products, matrix products, activations of single elements) or nonlinear (convolutions, pools, normalisations and the rest).

    The user's document on TVM counts activations twice, as multiplicative and as nonlinear. Since its fully connected networks
    have only linear and multiplicative operators, activations of single elements are multiplicative here.
    """
    linearity = operator_row(name).linearity
    return "nonlinear" if linearity == "convolutional" else linearity


def kind_of_all(names: Iterable[str]) -> OperatorKind:
    """The class of a kernel of several operators: that of the one that is furthest from linear."""
    kinds = {operator_kind(name) for name in names}
    return "nonlinear" if "nonlinear" in kinds else "multiplicative" if "multiplicative" in kinds else "linear"


def network_kind(names: Iterable[str]) -> NetworkKind:
    """The kind of network in the user's document on TVM, from the names of its operators. A softmax at the end of a fully
    connected network does not make it another one."""
    rows = [operator_row(name) for name in set(names) - {"Softmax", "LogSoftmax"}]
    if any(row.dispatch == "convolution" for row in rows):
        return "other" if any(row.linearity == "nonlinear" for row in rows) else "convolutional"
    return "other" if kind_of_all(row.name for row in rows) == "nonlinear" else "fully connected"


def network_scale(nodes: int) -> NetworkScale:
    """The size of a network in the user's document on TVM, by the nodes of its graph, with which the search for paths grows.
    AlexNet, ResNet-18 and SqueezeNet are small, MobileNet and GoogLeNet medium, RegNet and DenseNet large."""
    return next(scale for scale, most in SCALES.items() if nodes <= most)


def _rank(name: str) -> int:
    """How little an operator decides the time of a kernel that holds it; see `anchor`."""
    row = operator_row(name)
    if row.dispatch in ("convolution", "product"):
        return 0 if row.dispatch == "convolution" else 1
    if row.dispatch == "reducing" or row.cost == "reduction":
        return 2
    if row.cost == "view":
        return 5
    return 4 if row.linearity == "linear" and name not in SUMS else 3


def anchor(operators: Sequence[Operator]) -> int:
    """The place of the operator in a kernel that decides its time: the first convolution, else product, else reduction or
    normalisation, else one that computes, else one that moves data."""
    ranks = [_rank(operator.name) for operator in operators]
    return ranks.index(min(ranks))
