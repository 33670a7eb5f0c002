"""Element types: their names in numpy and in ONNX, and their sizes in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from utils.errors import UserError
from utils.lazy import onnx

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "float64": 8, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "string": 16, "complex64": 8, "complex128": 16,
    "float8e4m3fn": 1, "float8e5m2": 1, "int4": 0.5, "uint4": 0.5,
}
SHORT_DTYPE = {"float32": "fp32", "float16": "fp16", "float64": "fp64", "bfloat16": "bf16"}


def type_name(code: int) -> str:
    """numpy's name of an ONNX element type (ONNX's own where numpy has none)."""
    name = onnx.TensorProto.DataType.Name(code).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def type_code(dtype: str) -> int:
    """ONNX's number of an element type, given its name in the records."""
    name = {"float32": "float", "float64": "double"}.get(dtype, dtype).upper()
    return int(onnx.TensorProto.DataType.Value(name))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type for a tensor's `dtype`; strings are Python objects. `UserError` for a type that numpy lacks."""
    if name == "string":
        return np.dtype(object)
    try:
        return np.dtype(name)
    except TypeError:
        raise UserError(f"element type {name}: numpy has no such type, so no dummy tensor can be made") from None


def session_dtype(text: str) -> str:
    """The element type of a session's type: `float32` for `tensor(float)`."""
    inner = text[text.find("(") + 1:text.rfind(")")] if "(" in text else text
    return {"float": "float32", "double": "float64"}.get(inner, inner)
