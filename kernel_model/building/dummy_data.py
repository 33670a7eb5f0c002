"""Dummy inputs for kernels and models: standardised random numbers, or values with which an operator can run.

A kernel's time may depend on them (`time_by_values` in records/operators.py): a NonMaxSuppression compares each box that it
keeps with all others, and rows that take the same branches of a tree are faster than rows that take different ones. So signs
and sizes are in random order, and rows for trees are near the trees' thresholds.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hase.ort_analysis.graph.bodies import PASSED_ON, captured
from hase.ort_analysis.graph.nodes import attribute_value, bodies_of, first_known_word
from hase.records import attention
from hase.records.kernel_record import Kernel, numpy_dtype
from hase.records.operators import operator_row

if TYPE_CHECKING:
    import onnx

GRID = 10.0  # distance between the corners of boxes that do not overlap
SIDE = 4.0  # of a box
POOL_ELEMENTS = 1 << 22
LEAST = 1e-3  # smaller numbers could make quotients and powers overflow
ML = "ai.onnx.ml"
TREES = ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")
COMPARING = ("Shape", "Size", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")  # they take any whole number
RANGE_KEEPING = ("Identity", "Cast", "Imputer")  # they do not change the range of a column


def required_value(kernel: Kernel, position: int) -> np.ndarray | None:
    """A value of an input with which the kernel has the recorded output shape, or computes as usual; None if any value will do,
    or none is known. Its type may be another one than the input's."""
    if (sizes := attention.kernel_grouped_query_sizes(kernel)) and position in (attention.LAST_PLACES, attention.TOTAL):
        return np.full(kernel.inputs[position].shape, sizes.total - (position == attention.LAST_PLACES))
    if position == attention.TOKEN_OFFSETS.get(kernel.op_type):  # as rows have no padding, each token is at its padded position
        return np.arange(kernel.inputs[position].elements).reshape(kernel.inputs[position].shape)
    if position - 1 == attention.TOKEN_OFFSETS.get(kernel.op_type):  # the first token of each row, and how many there are
        return np.arange(kernel.inputs[position].elements) * kernel.inputs[position - 1].shape[-1]
    if position == attention.KEY_MASKS.get(kernel.op_type) and (sizes := attention.kernel_attention_sizes(kernel)):
        return _all_keys(sizes, kernel.inputs[position].shape)
    if kernel.domain == ML and kernel.op_type in TREES and not position:
        rows = random_floats(kernel.inputs[0].shape, "float32")
        return threshold_ranges(kernel.attributes).around(rows)
    if kernel.domain:
        return None
    make = {("NonZero", 0): _nonzero, ("Compress", 1): _condition, ("NonMaxSuppression", 0): _boxes,
            ("Unique", 0): _repeated, ("GridSample", 1): _within_one, ("Acos", 0): _within_one, ("Asin", 0): _within_one,
            ("Atanh", 0): _within_one, ("Acosh", 0): _above_one}.get((kernel.op_type, position))
    return make(kernel) if make else None


def _all_keys(sizes: attention.AttentionSizes, shape: tuple[int, ...]) -> np.ndarray | None:
    """A mask that includes all keys of each row of a batch; None for boolean masks. It has the end of each row's keys, perhaps
    followed by their starts; or, for rows stored one after another, lengths, and then the starts of queries and keys."""
    ends, starts = np.full(sizes.batch, sizes.total), np.arange(sizes.batch + 1)
    known: dict[tuple[int, ...], np.ndarray] = {
        (sizes.batch,): ends, (2 * sizes.batch,): np.concatenate([ends, np.zeros(sizes.batch)]),
        (3 * sizes.batch + 2,): np.concatenate([ends, starts * sizes.queries, starts * sizes.total])}
    return known.get(shape)


def random_truths(count: int, size: int) -> np.ndarray:
    """`size` booleans in random order, `count` of them true."""
    return np.random.default_rng(0).permutation(size) < min(count, size)


def _nonzero(kernel: Kernel) -> np.ndarray:
    shape = kernel.inputs[0].shape
    return random_truths(kernel.outputs[0].shape[-1], math.prod(shape)).reshape(shape)


def _condition(kernel: Kernel) -> np.ndarray:
    axis = kernel.attributes.get("axis")
    kept = kernel.outputs[0].shape[int(axis) if axis is not None else 0]
    return random_truths(kept, kernel.inputs[1].shape[0])


def _within_one(kernel: Kernel) -> np.ndarray:
    return np.tanh(random_floats(kernel.inputs[-1].shape, "float32"))


def _above_one(kernel: Kernel) -> np.ndarray:
    return 1.0 + random_floats(kernel.inputs[0].shape, "float32", positive=True)


def _repeated(kernel: Kernel) -> np.ndarray | None:
    """Values in random order, as many different ones as the output has; None along an axis, where whole rows are compared."""
    if kernel.attributes.get("axis") is not None:
        return None
    shape = kernel.inputs[0].shape
    return (np.random.default_rng(0).permutation(math.prod(shape)) % max(kernel.outputs[0].shape[0], 1)).reshape(shape)


def _boxes(kernel: Kernel) -> np.ndarray | None:
    """Boxes, of which as many are kept as recorded: one in each grid cell. None for several images or classes."""
    batch, boxes, _ = kernel.inputs[0].shape
    if batch != 1 or kernel.inputs[1].shape[1] != 1:
        return None
    cell = np.arange(boxes) % max(kernel.outputs[0].shape[0], 1)
    columns = math.isqrt(boxes) + 1
    corner = GRID * np.stack([cell // columns, cell % columns], 1)
    return np.concatenate([corner, corner + SIDE], 1)[None]


class ColumnRanges(NamedTuple):
    """Mean and spread of the columns of a table of features."""

    mean: np.ndarray
    spread: np.ndarray

    def around(self, standardised: np.ndarray) -> np.ndarray:
        """Moves standardised rows into these ranges; the last axis is the columns. Columns without a range stay."""
        mean, spread = np.zeros(standardised.shape[-1]), np.ones(standardised.shape[-1])
        mean[:len(self.mean)], spread[:len(self.spread)] = self.mean[:len(mean)], self.spread[:len(spread)]
        return np.asarray(mean + spread * standardised)


def threshold_ranges(attributes: Mapping[str, Any]) -> ColumnRanges:
    """The range of a tree ensemble's thresholds per column; rows in these ranges take all branches."""
    columns = np.asarray(attributes["nodes_featureids"])
    given = next(attributes[name] for name in ("nodes_splits", "nodes_values", "nodes_values_as_tensor") if name in attributes)
    splits = np.asarray(given["values"] if isinstance(given, Mapping) else given, float)
    compared = np.isfinite(splits)
    if "nodes_splits" not in attributes:  # before version 5 of ai.onnx.ml, leaves are among the nodes
        compared &= np.array([mode != "LEAF" for mode in attributes["nodes_modes"]])
    columns, splits = columns[compared], splits[compared]
    count = np.maximum(np.bincount(columns), 1)
    mean = np.bincount(columns, splits) / count
    variance = np.maximum(np.bincount(columns, splits ** 2) / count - mean ** 2, 0.0)
    return ColumnRanges(mean, np.where(variance > 0, np.sqrt(variance), 1.0))


def input_ranges(graph: onnx.GraphProto) -> dict[str, ColumnRanges]:
    """The ranges of those model inputs that a Scaler standardises, or whose columns trees compare."""
    ranges, source_of = dict[str, ColumnRanges](), {value.name: value.name for value in graph.input}
    for node in graph.node:
        source = source_of.get(node.input[0], "") if node.input else ""
        if source and node.op_type in RANGE_KEEPING:
            source_of[node.output[0]] = source
        elif source and node.domain == ML and node.op_type in ("Scaler", *TREES):
            attributes = {attribute.name: attribute_value(attribute) for attribute in node.attribute}
            if node.op_type in TREES:
                ranges.setdefault(source, threshold_ranges(attributes))
            elif {"offset", "scale"} <= attributes.keys():
                scale = np.asarray(attributes["scale"], float)
                spread = np.divide(1.0, scale, out=np.ones_like(scale), where=scale != 0)
                ranges.setdefault(source, ColumnRanges(np.asarray(attributes["offset"], float), spread))
    return ranges


def table_indices(graph: onnx.GraphProto) -> dict[str, int]:
    """The model inputs that are only indices into weight tables (such as word ids), with the number of rows of the smallest
    table. Dummy indices should differ, since reading one row of a large table again and again is faster than reading many."""
    rows = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    source_of = {value.name: value.name for value in graph.input if value.name not in rows}
    rows_read, otherwise = dict[str, int](), set[str]()
    for node in graph.node:
        inner = [name for body in bodies_of(node).values() for name in captured(body)]
        for position, name in enumerate([*node.input, *inner]):
            if not (source := source_of.get(name, "")) or node.op_type in COMPARING:
                continue
            if node.op_type in PASSED_ON and not position:
                source_of[node.output[0]] = source
            elif node.op_type == "Gather" and position == 1 and node.input[0] in rows:
                axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
                rows_read[source] = min(rows[node.input[0]][axis], rows_read.get(source, sys.maxsize))
            else:
                otherwise.add(source)
    return {name: count for name, count in rows_read.items() if count and name not in otherwise}


@functools.cache
def _pool() -> np.ndarray:
    """Standard normal numbers of at least the size LEAST, twice in a row, from which tensors are cut."""
    values = np.random.default_rng(0).standard_normal(POOL_ELEMENTS, np.float32)
    return np.tile(np.where(np.abs(values) < LEAST, np.copysign(np.float32(LEAST), values), values), 2)


@functools.cache
def _byte_pool() -> np.ndarray:
    """Random bytes, twice in a row, from which tensors are cut."""
    return np.tile(np.random.default_rng(0).integers(0, 256, POOL_ELEMENTS, np.uint8), 2)


def _cut(pool: np.ndarray, shape: tuple[int, ...], offset: int) -> np.ndarray:
    """As many numbers of a pool as a tensor has, or the whole pool for a larger tensor."""
    start = offset % POOL_ELEMENTS
    return pool[start:start + min(max(math.prod(shape), 1), POOL_ELEMENTS)]


def random_floats(shape: tuple[int, ...], dtype: str, offset: int = 0, positive: bool = False) -> np.ndarray:
    """Standard normal numbers, or their absolute values if `positive`; deterministic."""
    values = _cut(_pool(), shape, offset)
    return np.resize((np.abs(values) if positive else values).astype(numpy_dtype(dtype)), shape)


def random_bytes(shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0) -> np.ndarray:
    """Random integers of a one-byte type, below 8 for half-byte types; deterministic."""
    values = np.resize(_cut(_byte_pool(), shape, offset), shape)
    return values.view(dtype) if dtype in (np.uint8, np.int8) else (values % 8).astype(dtype)


def index_limit(kernel: Kernel, position: int) -> int | None:
    """One more than the largest valid index in input `position`; None if it holds no indices."""
    row = operator_row(kernel.op_type)
    if row.index_input != position:
        return None
    data = kernel.inputs[row.table_inputs[0] if row.table_inputs else 0].shape
    if row.index_per_axis and data:
        first = int(kernel.attributes.get("batch_dims", 0))
        return max(1, min(data[first:first + kernel.inputs[1].shape[-1]], default=1))
    return max(1, data[int(kernel.attributes.get("axis", 0))]) if data else 1


def dummy_tensor(kernel: Kernel, position: int, seed: int = 0) -> np.ndarray:
    """A value for input `position` of a kernel: the recorded one, else a random one that the operator accepts."""
    tensor, row, offset = kernel.inputs[position], operator_row(kernel.op_type), seed * 7919 + position * 104729
    if tensor.dtype == "string":
        return np.full(tensor.shape, first_known_word(kernel.attributes), object)
    dtype = numpy_dtype(tensor.dtype)
    if tensor.values is not None:
        return np.asarray(tensor.values).astype(dtype).reshape(tensor.shape)
    if (value := required_value(kernel, position)) is not None:
        return np.asarray(value, dtype)  # numpy's functions return no array for a single number
    generator = np.random.default_rng([seed, position])
    if np.issubdtype(dtype, np.floating) or tensor.dtype == "bfloat16":
        positive = row.positive_inputs or (tensor.constant and len(tensor.shape) <= 1)
        return random_floats(tensor.shape, tensor.dtype, offset, positive)
    if position in row.packed_inputs:
        return random_bytes(tensor.shape, dtype, offset)
    if dtype == np.bool_:
        return generator.integers(0, 2, tensor.shape).astype(dtype)
    limit = index_limit(kernel, position)
    if tensor.value_range is not None:
        low, high = tensor.value_range
        if limit is not None:  # a drawn kernel may have a smaller table than the kernel with this recorded range
            low, high = max(low, -limit), min(max(high, low), limit - 1)
        return generator.integers(min(low, high), high + 1, tensor.shape).astype(dtype)
    if row.shape_input == position:
        return np.asarray(kernel.outputs[0].shape, dtype)
    if limit is not None:
        return generator.integers(0, limit, tensor.shape).astype(dtype)
    return np.ones(tensor.shape, dtype)


def is_initializer(kernel: Kernel, position: int) -> bool:
    """Whether a built kernel contains an input's value: a constant, or an attention's lengths (to avoid a copy to the host)."""
    return kernel.inputs[position].constant or (
        kernel.op_type == attention.OPERATOR and position in (attention.LAST_PLACES, attention.TOTAL))


def input_name(position: int) -> str:
    """The name of input `position` in a built kernel."""
    return f"x{position}"


def output_name(position: int) -> str:
    """The name of output `position` in a built kernel."""
    return f"y{position}"


def dummy_inputs(kernel: Kernel, seed: int = 0) -> dict[str, np.ndarray]:
    """A value for every input of the built kernel, by name."""
    return {input_name(position): dummy_tensor(kernel, position, seed)
            for position, tensor in enumerate(kernel.inputs) if tensor.present and not is_initializer(kernel, position)}
