"""Describes an operator the same way for all operator sets in which it means the same, so that its kernels have one id in all.

The operator set of a model defines how its nodes are read. From one set to the next, mostly nothing changes: new element types,
or a new optional attribute or input. A node that uses none of these is described in operator set REFERENCE, that of the models
in the shipped dataset. An operator that is newer is described in its first version. Where an attribute became an input, the
description has the input.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from records.kernel_record import KernelInput, Tensor
from records.operators import operator_row
from utils.lazy import onnx

if TYPE_CHECKING:
    from onnx.defs import OpSchema

REFERENCE = 20
CLIP_BY_INPUTS = 11  # since this version, Clip's bounds are inputs
CLIP_BOUNDS = (("min", -3.4028234663852886e38), ("max", 3.4028234663852886e38))  # older: attributes with these defaults
SPLIT_COUNTED = 18  # since this version, a Split has the number of equal parts


def canonical(op_type: str, domain: str, opset: int, attributes: Mapping[str, Any], inputs: Sequence[KernelInput],
              outputs: Sequence[Tensor]) -> tuple[int, dict[str, Any], list[KernelInput]]:
    """The operator set, attributes and inputs that describe a node: the same in all models where the node means the same.

    Args:
        op_type, domain, opset: as in the model.
        attributes: of the node, with defaults, since ORT writes them out.
        inputs, outputs: of the node.
    """
    unchanged = dict(attributes), list(inputs)
    if domain or opset == REFERENCE or (schema := _schema(op_type, opset)) is None:
        return opset, *unchanged
    newer = _schema(op_type, max(REFERENCE, _first_version(op_type)))
    reference = max(REFERENCE, newer.since_version) if newer else opset
    version = schema.since_version
    if newer and version == newer.since_version:
        return reference, *unchanged
    translated, given = _inputs_for_attributes(op_type, version, reference, attributes, list(inputs), outputs)
    if newer is None or newer.deprecated or _meaning_changed(op_type, version, newer.since_version, attributes):
        return version, *unchanged
    for name, value in list(translated.items()):
        if name not in newer.attributes:
            if name not in schema.attributes or value != _default(schema, name):
                return version, *unchanged
            del translated[name]
    for name in newer.attributes:
        if name not in translated and name not in schema.attributes and (value := _default(newer, name)) is not None:
            translated[name] = value
    return (reference, translated, given) if _takes(newer, given) else (version, *unchanged)


@functools.cache
def _schema(op_type: str, opset: int) -> OpSchema | None:
    """ONNX's definition of an operator in an operator set; None where there is no such operator."""
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


@functools.cache
def _first_version(op_type: str) -> int:
    """The first operator set with an operator of this name."""
    return min(schema.since_version for schema in onnx.defs.get_all_schemas_with_history()
               if schema.name == op_type and not schema.domain)


def _default(schema: OpSchema, name: str) -> Any:
    """The default value of an attribute as plain data; None where there is none."""
    value = schema.attributes[name].default_value
    if not value.type:
        return None
    plain = onnx.helper.get_attribute_value(value)
    return plain.decode() if isinstance(plain, bytes) else plain


def _meaning_changed(op_type: str, old: int, new: int, attributes: Mapping[str, Any]) -> bool:
    """Whether the meaning of such a node changed between two versions."""
    row = operator_row(op_type)
    versions = row.changed_in + (row.ceiling_changed_in if attributes.get("ceil_mode") else ())
    return any(min(old, new) < version <= max(old, new) for version in versions)


def _inputs_for_attributes(op_type: str, version: int, reference: int, attributes: Mapping[str, Any], inputs: list[KernelInput],
                           outputs: Sequence[Tensor]) -> tuple[dict[str, Any], list[KernelInput]]:
    """The attributes and inputs of a node, translated from an old version to a newer one."""
    kept, given = dict(attributes), list(inputs)
    since, name = operator_row(op_type).input_since or (0, "")
    if version < since <= reference and kept.get(name) is not None:
        values = tuple(int(value) for value in kept.pop(name))
        given.append(KernelInput(dtype="int64", shape=(len(values),), constant=True, values=values))
    if op_type == "Split" and version < SPLIT_COUNTED <= reference and len(given) == 1:
        kept["num_outputs"] = len(outputs)
    if op_type == "Clip" and version < CLIP_BY_INPUTS:
        for name, unbound in CLIP_BOUNDS:
            bound = kept.pop(name, unbound)
            given.append(KernelInput(dtype="") if bound == unbound else KernelInput(
                dtype=given[0].dtype, constant=True, values=(bound,)))
        while not given[-1].present:
            given.pop()
    return kept, given


def _takes(schema: OpSchema, inputs: Sequence[KernelInput]) -> bool:
    """Whether an operator takes inputs of this number and these types."""
    if len(inputs) > schema.max_input:
        return False
    places = [min(place, len(schema.inputs) - 1) for place in range(len(inputs))]  # the last one may be variadic
    return all(not tensor.is_tensor or f"tensor({_onnx_name(tensor.dtype)})" in schema.inputs[place].types
               for place, tensor in zip(places, inputs, strict=True))


def _onnx_name(dtype: str) -> str:
    """The name of an element type in ONNX's schemas."""
    return {"float32": "float", "float64": "double"}.get(dtype, dtype)
