"""The canonical name and the id of a kernel, equal across models and operator versions.

The operator set of a model defines the meaning of its nodes. Operator sets differ little: new element types, or a new optional
attribute or input. A node that uses none of these is described in operator set REFERENCE, that of the shipped dataset's models.
A newer operator is described in its first version. If an attribute became an input, the description has the input.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hase.records.kernel_costs import bytes_read, bytes_written, flops
from hase.records.kernel_record import SHORT_DTYPE, Kernel, KernelInput, Tensor
from hase.records.operators import operator_row
from hase.utils.lazy import onnx
from hase.utils.paths import as_file_name

if TYPE_CHECKING:
    from onnx.defs import OpSchema

REFERENCE = 20  # operator set
CLIP_BY_INPUTS = 11  # since this version, Clip's bounds are inputs
CLIP_BOUNDS = (("min", -3.4028234663852886e38), ("max", 3.4028234663852886e38))  # older: attributes with these defaults
SPLIT_COUNTED = 18  # since this version, a Split has the number of equal parts
# Default values of attributes: with them, a kernel is the same as without the attribute.
NEUTRAL = {"auto_pad": "NOTSET", "group": 1, "ceil_mode": 0, "storage_order": 0, "count_include_pad": 0}
SHAPES_IN_ID = 3  # inputs whose shapes an id spells out
OPERATORS_IN_TYPE = 6  # further operators that the type of a fused kernel spells out; the others are counted
WINDOWS = (1, 3, 7, 15, 31, 63)  # the widest window of each class; the last class has wider ones


def canonical_description(op_type: str, domain: str, opset: int, attributes: Mapping[str, Any], inputs: Sequence[KernelInput],
                          outputs: Sequence[Tensor]) -> tuple[int, dict[str, Any], list[KernelInput]]:
    """The operator set, attributes and inputs that describe a node; equal in all models where the node means the same.
    `attributes` include defaults, since ORT writes them out."""
    unchanged = dict(attributes), list(inputs)
    if domain or opset == REFERENCE or (schema := _schema(op_type, opset)) is None:
        return opset, *unchanged
    newer = _schema(op_type, max(REFERENCE, _first_version(op_type)))
    reference = max(REFERENCE, newer.since_version) if newer else opset
    version = schema.since_version
    if newer and version == newer.since_version:
        return reference, *unchanged
    translated, translated_inputs = _inputs_for_attributes(op_type, version, reference, attributes, list(inputs), outputs)
    if newer is None or newer.deprecated or _meaning_changed(op_type, version, newer.since_version, attributes):
        return version, *unchanged
    for name, value in list(translated.items()):
        if name not in newer.attributes:
            if name not in schema.attributes or value != default_of(schema, name):
                return version, *unchanged
            del translated[name]
    for name in newer.attributes:
        if name not in translated and name not in schema.attributes and (value := default_of(newer, name)) is not None:
            translated[name] = value
    return (reference, translated, translated_inputs) if _accepts(newer, translated_inputs) else (version, *unchanged)


@functools.cache
def _schema(op_type: str, opset: int) -> OpSchema | None:
    """ONNX's definition of an operator in an operator set, or None."""
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


@functools.cache
def _first_version(op_type: str) -> int:
    """The first operator set with an operator of this name."""
    return min(schema.since_version for schema in onnx.defs.get_all_schemas_with_history()
               if schema.name == op_type and not schema.domain)


def default_of(schema: OpSchema, name: str) -> Any:
    """The default value of an attribute as plain data, or None."""
    value = schema.attributes[name].default_value
    if not value.type:
        return None
    plain = onnx.helper.get_attribute_value(value)
    return plain.decode() if isinstance(plain, bytes) else plain


def _meaning_changed(op_type: str, old: int, new: int, attributes: Mapping[str, Any]) -> bool:
    """Whether the meaning of a node changed between two versions of its operator."""
    row = operator_row(op_type)
    versions = row.changed_in + (row.ceiling_changed_in if attributes.get("ceil_mode") else ())
    return any(min(old, new) < version <= max(old, new) for version in versions)


def _inputs_for_attributes(op_type: str, version: int, reference: int, attributes: Mapping[str, Any], inputs: list[KernelInput],
                           outputs: Sequence[Tensor]) -> tuple[dict[str, Any], list[KernelInput]]:
    """A node's attributes and inputs, translated from an old version to a newer one."""
    kept, extended = dict(attributes), list(inputs)
    since, name = operator_row(op_type).input_since or (0, "")
    if version < since <= reference and kept.get(name) is not None:
        values = tuple(int(value) for value in kept.pop(name))
        extended.append(KernelInput(dtype="int64", shape=(len(values),), constant=True, values=values))
    if op_type == "Split" and version < SPLIT_COUNTED <= reference and len(extended) == 1:
        kept["num_outputs"] = len(outputs)
    if op_type == "Clip" and version < CLIP_BY_INPUTS:
        for name, unbound in CLIP_BOUNDS:
            bound = kept.pop(name, unbound)
            extended.append(KernelInput(dtype="") if bound == unbound else KernelInput(
                dtype=extended[0].dtype, constant=True, values=(bound,)))
        while not extended[-1].present:
            extended.pop()
    return kept, extended


def _accepts(schema: OpSchema, inputs: Sequence[KernelInput]) -> bool:
    """Whether an operator accepts inputs of this number and these types."""
    if len(inputs) > schema.max_input:
        return False
    indices = [min(index, len(schema.inputs) - 1) for index in range(len(inputs))]  # the last one may be variadic
    names = {"float32": "float", "float64": "double"}  # in ONNX's schemas
    return all(not tensor.is_tensor or f"tensor({names.get(tensor.dtype, tensor.dtype)})" in schema.inputs[index].types
               for index, tensor in zip(indices, inputs, strict=True))


def kernel_type(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> str:
    """The canonical name of an operation: operator, fused addition, fused activation."""
    row = operator_row(op_type)
    parts = [row.base_name]
    if row.sum_input is not None and len(inputs) > row.sum_input and inputs[row.sum_input].present:
        parts.append("Add")
    if attributes.get("activation"):
        parts.append(str(attributes["activation"]))
    return "_".join(parts)


def operator_in_type(type_name: str) -> str:
    """The operator in a name from `kernel_type`, without fused parts. No operator's name has an underscore."""
    return type_name.partition("_")[0]


def kernel_form(kernel: Kernel) -> str:
    """What libraries choose algorithms by besides sizes, e.g. `float32 of rank 4`.

    Convolutions add grouping and window class, pools the window class, softmaxes and reductions whether they work along the
    last axis. A product's form is only its type, since its rank matters little. ONNX's Attention (without projection) differs
    from ONNX Runtime's.
    """
    row = operator_row(kernel.op_type)
    if row.operator_class == "product":
        return f"{kernel.dtype} by ONNX's definition" if kernel.op_type == "Attention" and not kernel.domain else kernel.dtype
    shape = next((tensor.shape for tensor in kernel.inputs if tensor.dtype), ())
    parts = [f"{kernel.dtype} of rank {len(shape)}"]
    if row.operator_class == "convolution":
        parts += [_groups(kernel, shape), *(["dilated"] if kernel.attributes.get("dilations") else [])]
    if (window := kernel.attributes.get("kernel_shape")) and row.operator_class in ("convolution", "reduction"):
        widest = max(window)
        parts.append(f"window to {next((wide for wide in WINDOWS if widest <= wide), f'over {WINDOWS[-1]}')}")
    if (row.kind == "softmax" or row.cost == "reduction") and (axes := worked_axes(kernel)):
        parts.append("along the last axis" if len(shape) - 1 in axes else "along other axes")
    return ", ".join(parts)


def _groups(kernel: Kernel, shape: Sequence[int]) -> str:
    """How a convolution groups its channels."""
    group = int(kernel.attributes.get("group", 1))
    return "dense" if group == 1 else "depthwise" if (group,) == (shape[-1:] if channels_last(kernel) else shape[1:2]) else (
        "grouped")


def channels_last(kernel: Kernel) -> bool:
    """Whether the channels are the last axis."""
    return (kernel.domain == "com.ms.internal.nhwc" or kernel.op_type.startswith("Nhwc")
            or bool(kernel.attributes.get("channels_last")))


def worked_axes(kernel: Kernel) -> list[int]:
    """The sorted axes that an operator treats specially; empty if none or unknown. These are the axes of a softmax, norm,
    reduction or running sum, or the axis that it joins, cuts or indexes."""
    row, axis = operator_row(kernel.op_type), kernel.attributes.get("axis")
    rank = len(kernel.inputs[0].shape) if kernel.inputs and kernel.inputs[0].dtype else 0
    axes_input = kernel.inputs[1] if len(kernel.inputs) > 1 else KernelInput(dtype="")
    if not rank:
        return []
    if row.kind == "layer norm":
        return list(range((int(axis) if isinstance(axis, int) else -1) % rank, rank))
    if isinstance(axis, int):
        return [axis % rank]
    if kernel.op_type.startswith("Reduce") or kernel.op_type == "CumSum":
        if axes_input.present and axes_input.values is None:
            return []
        return sorted({int(value) % rank for value in axes_input.values or range(rank)})
    return []


def without_defaults(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes without default values, so that a kernel has exactly one description."""
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
    """Height and width for a kernel's id: the last two dimensions of its first input; 1 if missing."""
    shape = next((tensor.shape for tensor in inputs if tensor.present), ())
    return tuple((1, 1, *shape)[-2:])  # type: ignore[return-value]


def kernel_id(type_name: str, op_type: str, domain: str, opset: int, attributes: Mapping[str, Any],
              inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> str:
    """`<type>_<H>x<W>_<input shapes>_<kernel, stride, group>_<dtype>_<hash>`: readable, and unique by its hash."""
    height, width = spatial(inputs)
    shapes = ["x".join(map(str, tensor.shape)) or "scalar" for tensor in inputs if tensor.present]
    text = "-".join(shapes[:SHAPES_IN_ID]) + (f"-and{len(shapes) - SHAPES_IN_ID}" if len(shapes) > SHAPES_IN_ID else "")
    geometry = ""
    for letter, name in (("k", "kernel_shape"), ("s", "strides"), ("g", "group")):
        value = attributes.get(name)
        if value is not None:
            sizes = list(value) if isinstance(value, (list, tuple)) else [value]
            geometry += letter + "x".join(map(str, sizes[:1] if len(set(sizes)) == 1 else sizes))
    dtype = next((SHORT_DTYPE.get(t.dtype, t.dtype) for t in (*inputs, *outputs) if t.present), "none")
    description = json.dumps(
        [op_type, domain, opset, dict(attributes), [t.model_dump(mode="json") for t in inputs],
         [t.model_dump(mode="json") for t in outputs]], sort_keys=True, default=str)
    digest = hashlib.sha256(description.encode()).hexdigest()[:8]
    parts = (type_name, f"{height}x{width}", f"in{text}"[:120], geometry, dtype, digest)
    return as_file_name("_".join(part for part in parts if part))


def describe_kernel(op_type: str, domain: str, opset: int, attributes: Mapping[str, Any], inputs: Sequence[KernelInput],
                    outputs: Sequence[Tensor]) -> Kernel:
    """The kernel of one node, with id, operations and bytes, in operator set REFERENCE if the operator means the same there."""
    if operator_row(op_type).base_name == "Conv":
        attributes = {"kernel_shape": list(inputs[1].shape[2:]), **attributes}  # may be omitted: the weights say it
    opset, attributes, inputs = canonical_description(op_type, domain, opset, attributes, inputs, outputs)
    kept = without_defaults(attributes)
    return kernel_of_type(kernel_type(op_type, kept, inputs), op_type, domain, opset, kept, inputs, outputs)


def kernel_of_type(type_name: str, op_type: str, domain: str, opset: int, attributes: Mapping[str, Any],
                   inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> Kernel:
    """The kernel with this type and description, with id, operations and bytes."""
    operation = op_type, attributes, inputs, outputs
    return Kernel(
        id=kernel_id(type_name, op_type, domain, opset, attributes, inputs, outputs), type=type_name, op_type=op_type,
        domain=domain, opset=opset, attributes=dict(attributes), inputs=tuple(inputs), outputs=tuple(outputs),
        flops=flops(*operation), bytes_read=bytes_read(*operation), bytes_written=bytes_written(*operation),
        weight_bytes=sum(tensor.bytes for tensor in inputs if tensor.constant))


def fused_type(main: str, others: Sequence[str]) -> str:
    """The type of a kernel of several operators: the main one's name, then the others'."""
    named, counted = others[:OPERATORS_IN_TYPE], others[OPERATORS_IN_TYPE:]
    return "_".join([main, *named]) + (f"_and{len(counted)}" if counted else "")
