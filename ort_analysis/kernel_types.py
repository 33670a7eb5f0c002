"""Names and costs of kernels: the canonical type, the readable id, floating-point operations and bytes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ort_analysis.records import SHORT_DTYPE, Kernel, KernelInput, Tensor
from utils.safe_names import as_file_name

# Operators that absorb an activation or an addition, and what they are without it.
BASE_NAMES = {"FusedConv": "Conv", "FusedGemm": "Gemm"}
SUM_INPUT = {"Conv": 3}  # the input that a fused Conv adds to its result (Z of FusedConv, Sum of the NCHWc Conv)

# Operators that only give a tensor another shape: ORT lets the output share the input's memory.
VIEW_OPS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}

# Values that mean the same as leaving the attribute out.
NEUTRAL = {"auto_pad": "NOTSET", "group": 1, "ceil_mode": 0, "storage_order": 0, "count_include_pad": 0}

# Operations an element costs, where it is not one. Transcendental functions are counted as the ten or so operations
# that polynomial implementations take; only their order matters, since such kernels are bound by memory.
ELEMENT_FLOPS = {
    "Sigmoid": 10, "Tanh": 10, "Exp": 10, "Log": 10, "Erf": 10, "Gelu": 15, "FastGelu": 15, "BiasGelu": 16,
    "QuickGelu": 12, "HardSigmoid": 3, "HardSwish": 4, "Softmax": 13, "LogSoftmax": 14, "LayerNormalization": 8,
    "SkipLayerNormalization": 9, "BatchNormalization": 2, "InstanceNormalization": 8, "GroupNorm": 8, "Pow": 10, "Sqrt": 4,
    "BiasSoftmax": 14, "LRN": 12,
}
MOVE_OPS = VIEW_OPS | {"Transpose", "Concat", "Split", "Slice", "Gather", "Expand", "Cast", "Pad", "ReorderInput",
                       "ReorderOutput", "MemcpyToHost", "MemcpyFromHost", "Shape", "Tile", "DepthToSpace", "SpaceToDepth"}
TYPE_LIMIT = 3  # inputs spelled out in an id
LAUNCHED_INPUTS = 32  # of a Concat that a launch itself carries; for more, tables are copied from the host


def kernel_type(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> str:
    """The canonical name of what executes: operator, then an absorbed addition, then an absorbed activation."""
    parts = [BASE_NAMES.get(op_type, op_type)]
    position = SUM_INPUT.get(parts[0])
    if position is not None and len(inputs) > position and inputs[position].present:
        parts.append("Add")
    if attributes.get("activation"):
        parts.append(str(attributes["activation"]))
    return "_".join(parts)


def normalize(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes without those that hold a neutral value, so that one kernel has one description."""
    kept = {}
    for name, value in attributes.items():
        if name in NEUTRAL and value == NEUTRAL[name]:
            continue
        if name == "dilations" and all(item == 1 for item in value):
            continue
        if name == "pads" and not any(value):
            continue
        kept[name] = value
    if "kernel_shape" in kept:  # ids and features name the strides, so their default is spelled out
        kept.setdefault("strides", [1] * len(kept["kernel_shape"]))
    return kept


def flops(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> int:
    """Floating-point operations of one run, a multiply-add counted as two. Data movement counts none."""
    base = BASE_NAMES.get(op_type, op_type)
    out = outputs[0].elements if outputs else 0
    first = inputs[0] if inputs else Tensor(dtype="")
    second = inputs[1] if len(inputs) > 1 else Tensor(dtype="")
    if base in ("Conv", "NhwcConv", "NhwcFusedConv"):
        weights = second.shape
        return out * (2 * math.prod(weights[1:]) + sum(tensor.present for tensor in inputs[2:4]))
    if base == "ConvTranspose":
        return 2 * first.elements * math.prod(second.shape[1:])
    if base == "Gemm":
        inner = _size(first, 0 if attributes.get("transA") else -1)
        return out * (2 * inner + (1 if len(inputs) > 2 and inputs[2].present else 0))
    if base in ("MatMul", "FusedMatMul", "MatMulInteger", "TransposeMatMul"):
        inner = _size(first, -2 if attributes.get("transA") else -1)
        return 2 * out * inner
    if base == "Einsum" and (product := einsum_product(attributes, inputs)):
        return 2 * math.prod(product)
    if base in ("Attention", "MultiHeadAttention"):
        return _attention_flops(base, first, second)
    if base in ("MaxPool", "AveragePool"):
        return out * math.prod(attributes.get("kernel_shape", [1]))
    if base.startswith(("Global", "Reduce", "Arg")):
        return first.elements
    if base in MOVE_OPS:
        return 0
    return max([out, *(tensor.elements for tensor in inputs[:1])]) * ELEMENT_FLOPS.get(base, 1)


def copied_tables(kernel: Kernel) -> int:
    """How many tables ONNX Runtime copies to a GPU as it runs a kernel: four for a Split into unequal parts or a Concat of more
    inputs than a launch carries, as traced on an H200."""
    unequal = kernel.op_type == "Split" and len({tensor.shape for tensor in kernel.outputs if tensor.present}) > 1
    return 4 if unequal or (kernel.op_type == "Concat" and len(kernel.inputs) > LAUNCHED_INPUTS) else 0


def einsum_product(attributes: Mapping[str, Any], inputs: Sequence[Tensor]) -> tuple[int, int, int, int] | None:
    """The products that an Einsum of two tensors amounts to, as (matrices, m, n, k): `matrices` products of m×k by k×n.

    None for another number of tensors, and for an equation that leaves its output or some indices open.
    """
    terms, arrow, result = str(attributes.get("equation", "")).replace(" ", "").partition("->")
    operands = terms.split(",")
    if not arrow or "." in terms or len(operands) != 2 or len(inputs) != 2 or any(
            len(indices) != len(tensor.shape) for indices, tensor in zip(operands, inputs, strict=True)):
        return None
    size = {index: length for indices, tensor in zip(operands, inputs, strict=True)
            for index, length in zip(indices, tensor.shape, strict=True)}
    first, second = operands

    def elements(of: Iterable[str]) -> int:
        return math.prod(size[index] for index in of)

    return (elements(i for i in size if i in first and i in second and i in result),
            elements(i for i in size if i in first and i not in second), elements(i for i in size if i not in first),
            elements(i for i in size if i in first and i in second and i not in result))


def _size(tensor: Tensor, axis: int) -> int:
    """A dimension of a tensor; 1 where it has not that many."""
    return tensor.shape[axis] if -len(tensor.shape) <= axis < len(tensor.shape) else 1


def _attention_flops(base: str, query: Tensor, second: Tensor) -> int:
    """Two products over the sequence; ORT's fused Attention, whose second input is a matrix, also projects its input to query,
    key and value. ONNX's own Attention takes query and key, and may hold its heads as a dimension of their own."""
    *_, sequence, hidden = (1, 1, *query.shape)
    projects = base == "Attention" and len(second.shape) == 2
    other = sequence if projects or not second.present else _size(second, -2 if base == "Attention" else 1)
    total = 4 * query.elements * other if query.shape else 0
    return total + (2 * (query.elements // max(hidden, 1)) * second.elements if projects else 0)


def spatial(inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Height and width that name a kernel: the last two dimensions of its first input (1 where it has fewer)."""
    shape = next((tensor.shape for tensor in inputs if tensor.present), ())
    return tuple((1, 1, *shape)[-2:])  # type: ignore[return-value]


def kernel_id(type_name: str, op_type: str, domain: str, opset: int, attributes: Mapping[str, Any],
              inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> str:
    """`<type>_<H>x<W>_<input shapes>_<kernel, stride, group>_<dtype>_<hash>`: readable first, unique by the hash."""
    height, width = spatial(inputs)
    shapes = ["x".join(map(str, tensor.shape)) or "scalar" for tensor in inputs if tensor.present]
    text = "-".join(shapes[:TYPE_LIMIT]) + (f"-and{len(shapes) - TYPE_LIMIT}" if len(shapes) > TYPE_LIMIT else "")
    marks = ""
    for letter, name in (("k", "kernel_shape"), ("s", "strides"), ("g", "group")):
        value = attributes.get(name)
        if value is not None:
            sizes = list(value) if isinstance(value, (list, tuple)) else [value]
            marks += letter + "x".join(map(str, sizes[:1] if len(set(sizes)) == 1 else sizes))
    dtype = next((SHORT_DTYPE.get(t.dtype, t.dtype) for t in (*inputs, *outputs) if t.present), "none")
    description = json.dumps(
        [op_type, domain, opset, dict(attributes), [t.model_dump(mode="json") for t in inputs],
         [t.model_dump(mode="json") for t in outputs]], sort_keys=True, default=str)
    digest = hashlib.sha256(description.encode()).hexdigest()[:8]
    parts = (type_name, f"{height}x{width}", f"in{text}"[:120], marks, dtype, digest)
    return as_file_name("_".join(part for part in parts if part))


def describe_kernel(op_type: str, domain: str, opset: int, attributes: Mapping[str, Any], inputs: Sequence[KernelInput],
                    outputs: Sequence[Tensor]) -> Kernel:
    """The kernel of one node: named, with its operations and bytes counted."""
    if BASE_NAMES.get(op_type, op_type) == "Conv":
        attributes = {"kernel_shape": list(inputs[1].shape[2:]), **attributes}  # a model may leave it to the weights
    kept = normalize(attributes)
    name = kernel_type(op_type, kept, inputs)
    view = op_type in VIEW_OPS
    return Kernel(
        id=kernel_id(name, op_type, domain, opset, kept, inputs, outputs), type=name, op_type=op_type, domain=domain,
        opset=opset, attributes=kept, inputs=tuple(inputs), outputs=tuple(outputs),
        flops=flops(op_type, kept, inputs, outputs),
        bytes_read=0 if view else sum(tensor.bytes for tensor in inputs),
        bytes_written=0 if view else sum(tensor.bytes for tensor in outputs),
        weight_bytes=sum(tensor.bytes for tensor in inputs if tensor.constant),
    )
