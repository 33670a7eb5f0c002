"""Inputs for kernels and models that nobody gave: random numbers, or values that let an operator run.

How long a kernel takes may depend on these values: a NonMaxSuppression compares each box that it keeps with all others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from records.kernel_record import Kernel, KernelInput, numpy_dtype
from records.operators import operator_row
from runtimes.ort.graph.nodes import first_taught

GRID = 10.0  # distance of boxes that do not overlap
SIDE = 4.0  # of a box
POOL_ELEMENTS = 1 << 22


def chosen(kernel: Kernel, position: int) -> np.ndarray | None:
    """The value of an input, not yet of its type; None where any value does, or where no value gives this output."""
    if kernel.domain:
        return None
    make = {("NonZero", 0): _nonzero, ("Compress", 1): _condition, ("NonMaxSuppression", 0): _boxes,
            ("Unique", 0): _repeated}.get((kernel.op_type, position))
    return make(kernel) if make else None


def spread(count: int, places: int) -> np.ndarray:
    """`count` of `places` truth values are true, evenly spread."""
    at = np.arange(places + 1) * min(count, places) // max(places, 1)
    return np.diff(at) > 0


def _nonzero(kernel: Kernel) -> np.ndarray:
    shape = kernel.inputs[0].shape
    return spread(kernel.outputs[0].shape[-1], math.prod(shape)).reshape(shape)


def _condition(kernel: Kernel) -> np.ndarray:
    axis = kernel.attributes.get("axis")
    kept = kernel.outputs[0].shape[int(axis) if axis is not None else 0]
    return spread(kept, kernel.inputs[1].shape[0])


def _repeated(kernel: Kernel) -> np.ndarray | None:
    """As many different values as come out; None along an axis, where rows would have to differ."""
    if kernel.attributes.get("axis") is not None:
        return None
    shape = kernel.inputs[0].shape
    return (np.arange(math.prod(shape)) % max(kernel.outputs[0].shape[0], 1)).reshape(shape)


def _boxes(kernel: Kernel) -> np.ndarray | None:
    """As many places as boxes are kept, on a grid, each taken by boxes that coincide. None with several images or classes."""
    batch, boxes, _ = kernel.inputs[0].shape
    if batch != 1 or kernel.inputs[1].shape[1] != 1:
        return None
    place = np.arange(boxes) % max(kernel.outputs[0].shape[0], 1)
    wide = math.isqrt(boxes) + 1
    corner = GRID * np.stack([place // wide, place % wide], 1)
    return np.concatenate([corner, corner + SIDE], 1)[None]


@functools.cache
def _pool() -> np.ndarray:
    """Random numbers in [-1, 1), none of them smaller than 1e-3 in size, that tensors are cut from; twice in a row."""
    values = np.random.default_rng(0).uniform(1e-3, 1.0, POOL_ELEMENTS).astype(np.float32)
    values[1::2] *= -1
    return np.tile(values, 2)


def random_floats(shape: tuple[int, ...], dtype: str, offset: int = 0, positive: bool = False) -> np.ndarray:
    """Random numbers in [-1, 1), or (0, 1) when `positive`; the same for the same arguments."""
    count = int(np.prod(shape, dtype=np.int64))
    start = offset % POOL_ELEMENTS
    values = np.resize(_pool()[start:start + min(max(count, 1), POOL_ELEMENTS)], count).reshape(shape)
    return (np.abs(values) if positive else values).astype(numpy_dtype(dtype))


def index_limit(kernel: Kernel, position: int) -> int | None:
    """One more than the largest index that input `position` may hold; None where it holds no indices."""
    row = operator_row(kernel.op_type)
    if row.index_input != position:
        return None
    data = kernel.inputs[row.table_inputs[0] if row.table_inputs else 0].shape
    if row.index_per_axis and data:
        first = int(kernel.attributes.get("batch_dims", 0))
        return max(1, min(data[first:first + kernel.inputs[1].shape[-1]], default=1))
    return max(1, data[int(kernel.attributes.get("axis", 0))]) if data else 1


def dummy_tensor(kernel: Kernel, position: int, seed: int = 0) -> np.ndarray:
    """A value for input `position` of `kernel`: the recorded one where there is one, else random and acceptable."""
    tensor: KernelInput = kernel.inputs[position]
    row = operator_row(kernel.op_type)
    if tensor.dtype == "string":
        return np.full(tensor.shape, first_taught(kernel.attributes), object)
    dtype = numpy_dtype(tensor.dtype)
    if tensor.values is not None:
        return np.asarray(tensor.values).astype(dtype).reshape(tensor.shape)
    if (value := chosen(kernel, position)) is not None:
        return value.astype(dtype)
    generator = np.random.default_rng([seed, position])
    if np.issubdtype(dtype, np.floating) or tensor.dtype == "bfloat16":
        positive = row.positive_inputs or (tensor.constant and len(tensor.shape) <= 1)
        return random_floats(tensor.shape, tensor.dtype, seed * 7919 + position * 104729, positive)
    if dtype == np.bool_:
        return generator.integers(0, 2, tensor.shape).astype(dtype)
    limit = index_limit(kernel, position)
    if tensor.value_range is not None:
        low, high = tensor.value_range
        if limit is not None:  # of a kernel drawn near another, which may be larger
            low, high = max(low, -limit), min(max(high, low), limit - 1)
        return generator.integers(min(low, high), high + 1, tensor.shape).astype(dtype)
    if row.shape_input == position:
        return np.asarray(kernel.outputs[0].shape, dtype)
    if limit is not None:
        return generator.integers(0, limit, tensor.shape).astype(dtype)
    return np.ones(tensor.shape, dtype)


def input_name(position: int) -> str:
    """The name that a built kernel gives its input `position`."""
    return f"x{position}"


def output_name(position: int) -> str:
    """The name that a built kernel gives its output `position`."""
    return f"y{position}"


def dummy_inputs(kernel: Kernel, seed: int = 0) -> dict[str, np.ndarray]:
    """A value for every input that changes from run to run, by its name in the built model.

    Raises:
        UserError: an element type that numpy lacks.
    """
    return {input_name(position): dummy_tensor(kernel, position, seed)
            for position, tensor in enumerate(kernel.inputs) if tensor.present and not tensor.constant}


def weight_value(kernel: Kernel, position: int, given: Mapping[int, Any] | None = None) -> np.ndarray:
    """A value for constant input `position`: the one in `given`, else a dummy."""
    return np.asarray(given[position]) if given and position in given else dummy_tensor(kernel, position)
