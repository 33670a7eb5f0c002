"""Names of kernels: the canonical type and the readable id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from records.elements import SHORT_DTYPE
from records.kernel_costs import bytes_read, bytes_written, flops
from records.kernel_record import Kernel, KernelInput, Tensor
from records.operator_versions import canonical
from records.operators import operator_row
from utils.safe_names import as_file_name

# Default values: the same kernel as without the attribute.
NEUTRAL = {"auto_pad": "NOTSET", "group": 1, "ceil_mode": 0, "storage_order": 0, "count_include_pad": 0}

TYPE_LIMIT = 3  # inputs spelled out in an id


def kernel_type(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> str:
    """The canonical name of an operation: the operator, then a fused addition, then a fused activation."""
    row = operator_row(op_type)
    parts = [row.base_name]
    if row.sum_input is not None and len(inputs) > row.sum_input and inputs[row.sum_input].present:
        parts.append("Add")
    if attributes.get("activation"):
        parts.append(str(attributes["activation"]))
    return "_".join(parts)


def operator_of(type_name: str) -> str:
    """The operator in a name that `kernel_type` made, without what is fused into it. No operator's name has an underscore."""
    return type_name.partition("_")[0]


def form_of(kernel: Kernel) -> str:
    """Element type and rank of a kernel, such as `float32 of rank 4`; for a product the type alone, since its rank matters
    little."""
    if operator_row(kernel.op_type).operator_class == "product":
        return kernel.dtype
    first = next((tensor for tensor in kernel.inputs if tensor.dtype), None)
    return f"{kernel.dtype} of rank {len(first.shape) if first else 0}"


def normalize(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes without default values, so that every kernel has exactly one description."""
    kept = {}
    for name, value in attributes.items():
        if name in NEUTRAL and value == NEUTRAL[name]:
            continue
        if name == "dilations" and all(item == 1 for item in value):
            continue
        if name == "pads" and not any(value):
            continue
        kept[name] = value
    if "kernel_shape" in kept:  # ids and features use the strides, so the default is written out
        kept.setdefault("strides", [1] * len(kept["kernel_shape"]))
    return kept


def spatial(inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Height and width for a kernel's id: the last two dimensions of its first input; 1 for a missing one."""
    shape = next((tensor.shape for tensor in inputs if tensor.present), ())
    return tuple((1, 1, *shape)[-2:])  # type: ignore[return-value]


def kernel_id(type_name: str, op_type: str, domain: str, opset: int, attributes: Mapping[str, Any],
              inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> str:
    """`<type>_<H>x<W>_<input shapes>_<kernel, stride, group>_<dtype>_<hash>`: readable, and unique by its hash."""
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
    """The kernel of one node, with its id, operations and bytes.

    Whatever the model's operator set, the kernel is described in one common operator set if the operator means the same there
    (see `operator_versions`).
    """
    if operator_row(op_type).base_name == "Conv":
        attributes = {"kernel_shape": list(inputs[1].shape[2:]), **attributes}  # may be omitted: the weights say it
    opset, attributes, inputs = canonical(op_type, domain, opset, attributes, inputs, outputs)
    kept = normalize(attributes)
    name = kernel_type(op_type, kept, inputs)
    return Kernel(
        id=kernel_id(name, op_type, domain, opset, kept, inputs, outputs), type=name, op_type=op_type, domain=domain,
        opset=opset, attributes=kept, inputs=tuple(inputs), outputs=tuple(outputs),
        flops=flops(op_type, kept, inputs, outputs), bytes_read=bytes_read(op_type, kept, inputs, outputs),
        bytes_written=bytes_written(op_type, outputs), weight_bytes=sum(tensor.bytes for tensor in inputs if tensor.constant),
    )
