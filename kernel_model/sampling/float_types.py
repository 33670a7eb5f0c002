"""A kernel in another floating type, as a model in that type has it."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from records.elements import type_code
from records.kernel_record import Kernel, KernelInput, Tensor
from records.kernel_types import describe_kernel
from records.operators import operator_row
from runtimes.ort.cuda.kernels import cuda_kernel
from utils.errors import UserError

FLOAT_TYPES = ("float32", "float16")  # that a kernel may be drawn in
AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def float_types(kernel: Kernel) -> set[str]:
    """The types in FLOAT_TYPES that a kernel's tensors have, except those that are of one type in all models."""
    single = operator_row(kernel.op_type).single_inputs
    tensors = [t for position, t in enumerate(kernel.inputs) if position not in single] + list(kernel.outputs)
    return {t.dtype for t in tensors}.intersection(FLOAT_TYPES)


def in_float_type(kernel: Kernel, dtype: str) -> Kernel:
    """The kernel with all its floating tensors of `dtype`, one of FLOAT_TYPES; itself where none would change.

    Constants take the nearest value that the type has.

    Raises:
        UserError: the kernel mixes floating types, or the CUDA provider computes it in its own type and not in this one.
    """
    types = float_types(kernel)
    if types <= {dtype}:
        return kernel
    if len(types) > 1:
        raise UserError(f"{kernel.id}: mixes floating types, so it has no counterpart in {dtype}")
    single = operator_row(kernel.op_type).single_inputs
    inputs = [t if position in single else _typed(t, dtype) for position, t in enumerate(kernel.inputs)]
    attributes: dict[str, Any] = {
        name: value | {"dtype": dtype} if isinstance(value, dict) and value.get("dtype") in FLOAT_TYPES else value
        for name, value in kernel.attributes.items()}
    if kernel.op_type == "Cast" and kernel.outputs[0].dtype in FLOAT_TYPES:
        attributes["to"] = type_code(dtype)
    twin = describe_kernel(kernel.op_type, kernel.domain, kernel.opset, attributes, inputs,
                           [_typed(output, dtype) for output in kernel.outputs])
    if on_cuda(kernel) and not on_cuda(twin):
        raise UserError(f"{kernel.id}: the CUDA provider has no {kernel.op_type} in {dtype}")
    return twin


def _typed(tensor: AnyTensor, dtype: str) -> AnyTensor:
    if tensor.dtype not in FLOAT_TYPES:
        return tensor
    changed: dict[str, Any] = {"dtype": dtype}
    if isinstance(tensor, KernelInput) and tensor.values is not None:
        limits = np.finfo(dtype)
        values = np.asarray(tensor.values, np.float64)
        finite = np.where(np.isfinite(values), np.clip(values, limits.min, limits.max), values)
        changed["values"] = tuple(finite.astype(dtype).tolist())
    return tensor.model_copy(update=changed)


def on_cuda(kernel: Kernel) -> bool:
    """Whether the CUDA provider has a kernel for it; else the CPU provider runs it."""
    return cuda_kernel(kernel.op_type, kernel.domain, kernel.opset, [t.dtype for t in kernel.inputs],
                       [t.dtype for t in kernel.outputs]) is not None
