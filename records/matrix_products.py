"""The sizes of a matrix product, by which libraries choose their kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hase.records.kernel_record import Kernel

MOST_ALIGNMENT = 64


class Product(NamedTuple):
    """The matrix product behind a convolution, MatMul or Gemm: `matrices` products of m×k by k×n.

    `transposed` is 1 where the left matrices are given by columns, plus 2 where the right ones are.
    """

    matrices: int
    m: int
    n: int
    k: int
    transposed: int


def matrix_product(kernel: Kernel) -> Product:
    """The product of a MatMul or Gemm whose result has at least two dimensions."""
    inputs, out = [tensor for tensor in kernel.inputs if tensor.dtype], kernel.outputs[0].shape
    by_columns, transposed_b = (bool(kernel.attributes.get(name)) for name in ("transA", "transB"))
    shape: Sequence[int] = inputs[0].shape if inputs else ()
    k = shape[-2 if by_columns else -1] if len(shape) >= 2 else math.prod(shape)
    matrices, m = math.prod(out[:-2]), out[-2]
    if matrices > 1 and len(inputs) > 1 and len(inputs[1].shape) == 2:  # one matrix for the whole batch: one product
        matrices, m = 1, m * matrices
    return Product(matrices, m, out[-1], k, int(by_columns) + 2 * int(transposed_b))


def alignment(size: int) -> int:
    """The largest power of two that divides a size, at most MOST_ALIGNMENT; 0 for 0."""
    return min(size & -size, MOST_ALIGNMENT)
