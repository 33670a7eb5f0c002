"""Turns a kernel into numbers. Training and prediction use the same feature schema, so they can't drift apart.

Features of a form describe the variant of an operator: along which axes it works, which ones it broadcasts, how it moves.
Libraries choose their algorithms by these. A set of axes is a bit mask from the last axis (1), which is contiguous in memory,
to the one before (2), and so on.

Features of language models decide the time of their operators. They lower the mean error on held-out kernels of an H200: of
GroupQueryAttention from 21.8 to 9.0 %, products with int4 and int8 weights from 8.8 to 7.0 %, MultiHeadAttention from 16 to 14
%, Attention (with the bytes that it stores between its steps) from 20 to 12 %, experts with such weights from 26 to 22 %
(cross-validated on the kernels of recipes/llm).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hase.ort_analysis.cuda import kernel_choice
from hase.records.attention import MASKS, kernel_attention_sizes, kernel_grouped_query_sizes
from hase.records.kernel_costs import (
    MatrixProduct,
    alignment,
    einsum_product,
    experts_used,
    matrix_product,
    waits_between_launches,
)
from hase.records.kernel_record import DTYPE_BYTES, Kernel, KernelInput, Tensor, input_at
from hase.records.kernel_types import channels_last, worked_axes
from hase.records.operators import operator_row
from hase.utils.timing import Floats

T = TypeVar("T")
SLACK = 1e-6  # how far a feature may exceed its range, for rounding


@dataclass(frozen=True)
class FeatureSchema(Generic[T]):
    """The features of a unit (a kernel, a convolution) that estimators read.

    Name and version are saved with estimators, which can only predict with the schema of their training.

    Attributes:
        version: changes whenever the names, their order or the values of `compute` change.
        groups: feature names by group, in the order of the values. Names of logarithms to base 2 begin with `log_`.
        compute: returns the values of one unit, one for each name.
        codes: names of features that are no sizes, so that no value is beyond another (`times_beyond`).
    """

    name: str
    version: int
    groups: Mapping[str, tuple[str, ...]]
    compute: Callable[[T], Sequence[float]]
    codes: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the features in the order of their values."""
        return tuple(itertools.chain.from_iterable(self.groups.values()))

    @cached_property
    def logarithmic(self) -> npt.NDArray[np.bool_]:
        """A mask of the features that are logarithms to base 2."""
        return np.array([name.startswith("log_") for name in self.names], dtype=bool)

    def index(self, name: str) -> int:
        """The column of a feature."""
        if name not in self.names:
            raise KeyError(f"feature schema {self} has no feature {name}")
        return self.names.index(name)

    def matrix(self, units: Iterable[T]) -> Floats:
        """The features of units as an array, units × features."""
        rows = [self.compute(unit) for unit in units]
        return np.array(rows, dtype=float).reshape(len(rows), len(self.names))


@dataclass(frozen=True, kw_only=True)
class KernelRows:
    """Kernels as estimators read them, a row each: rows × features, and rows × metrics of the load (None: an idle device)."""

    types: npt.NDArray[np.str_]
    features: Floats
    flops: Floats
    bytes_moved: Floats
    load: Floats | None = None

    def __len__(self) -> int:
        return len(self.types)

    @classmethod
    def of(cls, kernels: Sequence[Kernel], features: Floats, load: Sequence[float] | None = None) -> KernelRows:
        """The rows of `kernels`, all under one load (a value for each metric)."""
        return cls(types=np.array([kernel.type for kernel in kernels], dtype=np.str_), features=features,
                   flops=np.array([kernel.flops for kernel in kernels], dtype=float),
                   bytes_moved=np.array([kernel.bytes_read + kernel.bytes_written for kernel in kernels], dtype=float),
                   load=None if load is None else np.tile(np.array(load, dtype=float), (len(kernels), 1)))


def times_beyond(schema: FeatureSchema, features: Floats, low: Floats, high: Floats) -> Floats:
    """The factor by which each kernel exceeds the training's range (`low`, `high`), the largest over its features; 1 within."""
    sized = np.array([name not in schema.codes for name in schema.names], dtype=bool)
    beyond = sized & ((features < low - SLACK) | (features > high + SLACK))
    sizes, least, most = (np.where(schema.logarithmic, values, np.log2(1.0 + np.abs(values)))
                          for values in (features, low, high))
    doublings = np.where(beyond, np.maximum(sizes - most, least - sizes), 0.0).max(axis=1)
    return np.asarray(2.0 ** np.maximum(doublings, 0.0))


# features of a form ------------------------------------------------------------------------------------------------------

FORM_GROUPS: Mapping[str, tuple[str, ...]] = {
    "form": ("axes", "axis_size", "axis_size_out", "log_behind_axes", "broadcast_axes", "log_steps", "mode", "out_rank"),
    "volume": ("depth", "kernel_depth", "last_stride")}
FORM_CODES = frozenset({"axes", "broadcast_axes", "mode", "out_rank"})  # sets of axes, and indices in a list
MODES = ("constant", "reflect", "edge", "wrap", "nearest", "linear", "cubic", "asymmetric", "half_pixel", "align_corners",
         "pytorch_half_pixel", "reverse", "bidirectional")
MODE_ATTRIBUTES = ("mode", "coordinate_transformation_mode", "direction")
MOST_AXES = 8  # axes this far from the last one, or farther, share a bit of a mask


def form_features(kernel: Kernel) -> list[float]:
    """The values of FORM_GROUPS, in its order; 0 where they do not apply."""
    shape, out = (next((tensor.shape for tensor in tensors if tensor.dtype), ()) for tensors in (kernel.inputs, kernel.outputs))
    axes = _axes(kernel, shape, out)
    behind = shape[axes[-1] + 1:] if axes else ()
    sizes, sizes_out = (math.prod(tensor[axis] for axis in axes) if axes and len(tensor) == len(shape) else 0
                        for tensor in (shape, out))
    steps = input_at(kernel.inputs, 4).values if kernel.op_type == "Slice" else None
    return [float(_mask(axes, len(shape))), float(sizes), float(sizes_out), math.log2(1 + math.prod(behind)) if axes else 0.0,
            float(_broadcast_axes(kernel, out)), math.log2(max((abs(step) for step in steps), default=1)) if steps else 0.0,
            _mode(kernel), float(len(out)), *_volume(kernel, shape)]


def _mask(axes: Iterable[int], rank: int) -> int:
    """A set of axes as a bit mask; the last axis is 1."""
    return sum(1 << min(rank - 1 - axis, MOST_AXES) for axis in axes)


def _axes(kernel: Kernel, shape: Sequence[int], out: Sequence[int]) -> list[int]:
    """The axes along which an operator works, if it does not treat all alike; sorted."""
    if kernel.op_type == "Pad":
        given = input_at(kernel.inputs, 3)
        named = [int(value) % len(shape) for value in given.values] if given.values else range(len(shape))
        pads = input_at(kernel.inputs, 1).values or ()
        return sorted({axis for index, axis in enumerate(named) if any(pads[index::max(len(pads) // 2, 1)])})
    if axes := worked_axes(kernel):
        return axes
    if len(shape) == len(out) and operator_row(kernel.op_type).kind_or_class in ("part", "gather"):
        return [axis for axis, (before, after) in enumerate(zip(shape, out, strict=True)) if before != after]
    return []


def _broadcast_axes(kernel: Kernel, out: Sequence[int]) -> int:
    """The axes along which some operand is repeated, as a bit mask."""
    if operator_row(kernel.op_type).operator_class not in ("elementwise", "product") or len(out) < 1:
        return 0
    matrix_axes = 2 if operator_row(kernel.op_type).operator_class == "product" else 0
    return _mask({axis for tensor in kernel.inputs if tensor.present and tensor.shape
                       for axis in range(len(out) - matrix_axes) if _repeated(tensor, axis, out)}, len(out))


def _repeated(tensor: KernelInput, axis: int, out: Sequence[int]) -> bool:
    """Whether a tensor is repeated along an axis of the output."""
    own_axis = axis - (len(out) - len(tensor.shape))
    return out[axis] > 1 and (own_axis < 0 or tensor.shape[own_axis] == 1)


def _mode(kernel: Kernel) -> float:
    """The kernel's modes, as one number."""
    indices = [MODES.index(value) + 1 for name in MODE_ATTRIBUTES if (value := kernel.attributes.get(name)) in MODES]
    return float(sum(index * (len(MODES) + 1) ** power for power, index in enumerate(indices)))


def _volume(kernel: Kernel, shape: Sequence[int]) -> tuple[float, float, float]:
    """The depth of a volume and of its window, and the window's stride along the last axis."""
    window, strides = kernel.attributes.get("kernel_shape") or [], kernel.attributes.get("strides") or []
    deep = len(shape) == 5 and len(window) == 3
    return (float(shape[1 if channels_last(kernel) else 2]) if deep else 0.0, float(window[0]) if deep else 0.0,
            float(strides[-1]) if strides else 0.0)


# features of language models ---------------------------------------------------------------------------------------------

LANGUAGE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("algorithm", "splits"),
    "attention": ("log_queries", "log_attended", "log_cache", "log_pairs", "heads_per_key_head", "key_heads", "head_size",
                  "attention_window", "rotated", "normed", "shares_buffer", "causal", "mask", "log_blocks", "log_waves",
                  "wave_fill"),
    "quantised": ("weight_bits", "weight_block", "zero_points", "log_rows"),
    "experts": ("log_experts", "experts_per_token", "gated")}


def language_features(kernel: Kernel, gpu: kernel_choice.Gpu = kernel_choice.H200) -> list[float]:
    """The values of LANGUAGE_GROUPS, in its order; 0 where they do not apply."""
    algorithm = kernel_choice.language_algorithm(kernel, gpu)
    attention, quantised, expert_values = (
        [0.0] * len(LANGUAGE_GROUPS[name]) for name in ("attention", "quantised", "experts"))
    parts = 0
    if sizes := kernel_grouped_query_sizes(kernel) or kernel_attention_sizes(kernel):
        parts = kernel_choice.splits(sizes, algorithm, gpu)
        lengths = (sizes.queries, sizes.total, sizes.cache, sizes.pairs)
        blocks = kernel_choice.thread_blocks(sizes, algorithm, parts)
        waves = math.ceil(blocks / gpu.multiprocessors)
        attention = [*(math.log2(1 + length) for length in lengths), kernel_choice.group_size(sizes), sizes.kv_heads,
                     sizes.head_size, sizes.window, sizes.rotary, float(sizes.normed), float(sizes.shares_buffer),
                     float(sizes.causal), float(MASKS.index(sizes.mask)), math.log2(1 + blocks), math.log2(1 + waves),
                        blocks / (gpu.multiprocessors * max(waves, 1))]
    elif kernel.op_type == "MatMulNBits":
        zeros = input_at(kernel.inputs, 3).present
        quantised = [float(kernel.attributes.get("bits", 4)), float(kernel.attributes.get("block_size", 32)), float(zeros),
                      math.log2(1 + kernel_choice.product_rows(kernel))]
    elif has_unsigned_weights(kernel):
        quantised = [0.0, 0.0, 1.0, 0.0]
    elif operator_row(kernel.op_type).cost == "experts":
        quantised, expert_values = _experts(kernel)
    return [float(kernel_choice.ALGORITHMS.index(algorithm)), float(parts), *attention, *quantised, *expert_values]


def has_unsigned_weights(kernel: Kernel) -> bool:
    """Whether a product has unsigned integer weights, which have a zero point."""
    return kernel.op_type == "MatMulInteger" and input_at(kernel.inputs, 1).dtype == "uint8"


def _experts(kernel: Kernel) -> tuple[list[float], list[float]]:
    """The groups `quantised` and `experts` of a mixture of experts; its rows are the mean rows per expert."""
    attributes, available = kernel.attributes, kernel.inputs[1].shape[-1] if kernel.inputs[1].shape else 1
    chosen, quantised = experts_used(attributes), kernel.op_type == "QMoE"
    rows = kernel_choice.product_rows(kernel) * chosen / max(available, 1)
    return ([float(attributes.get("expert_weight_bits", 4)) if quantised else 0.0, float(attributes.get("block_size", 0)), 0.0,
             math.log2(1 + rows)],
            [math.log2(1 + available), float(chosen), float(attributes.get("activation_type") == "swiglu")])


# features of every kernel ------------------------------------------------------------------------------------------------

OP_CLASSES = ("Conv", "Pool", "MatMul", "Gemm", "Attention", "Norm", "Softmax", "Reduce", "Arg", "Transpose", "Reorder",
              "Concat", "Split", "Slice", "Gather", "Scatter", "Pad", "Resize", "Cast", "Quantize", "Shape", "Expand", "Einsum")
ACTIVATIONS = ("Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "Gelu", "Silu", "Swish", "HardSwish")
DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "int8", "bool")
LAYOUTS = {"com.microsoft.nchwc": 1.0, "com.ms.internal.nhwc": 2.0}  # by domain; 0 is ONNX's own layout, channels first


class Sizes(NamedTuple):
    """Image sizes of a kernel's first input and output; (batch, tokens, channels) counts as an image of `tokens` × 1."""

    batch: int
    channels: int
    height: int
    width: int
    out_channels: int
    out_height: int
    out_width: int


class KernelWindow(NamedTuple):
    """The window of a convolution or pool, and a convolution's groups; 0 for other operations."""

    kernel_height: int
    kernel_width: int
    stride: int
    padding: int
    dilation: int
    group: int
    group_channels: int
    depthwise: float


def kernel_features(kernel: Kernel) -> list[float]:
    """The values of KERNEL_FEATURES; 0 for sizes that an operation lacks. Unknown ones: by tensors and costs."""
    inputs = [tensor for tensor in kernel.inputs if tensor.dtype]
    outputs = [tensor for tensor in kernel.outputs if tensor.dtype]
    shape: tuple[int, ...] = inputs[0].shape if inputs else ()
    out: tuple[int, ...] = outputs[0].shape if outputs else ()
    sizes = _sizes(kernel, shape, out)
    window = _kernel_window(kernel, sizes)
    product = _product(kernel, inputs, out, sizes, window)
    return [
        *sizes, *window, *product, *_tiles(product, 32), *_tiles(product, 128),
        alignment(sizes.channels), alignment(sizes.out_channels),
        *map(alignment, (product.m, product.n, product.k)), alignment(sizes.width),
        *_axis(kernel, shape, out), *_permutation(_permuted_blocks(kernel, shape)), _broadcast(inputs, out),
        *_operands(kernel, shape, inputs, len(outputs)), *_costs(kernel, math.prod(shape)),
        *_operation(kernel), *form_features(kernel), *language_features(kernel),
    ]


KERNEL_FEATURES = FeatureSchema("kernel", 5, {
    "sizes": Sizes._fields,
    "window": KernelWindow._fields,
    "product": MatrixProduct._fields,
    # how the product fills tiles: counts, and the share of the tiles' area that is used
    "tiles": ("log_tiles_32", "fill_32", "log_tiles_128", "fill_128"),
    # largest power of two (at most 64) that divides a size
    "alignment": ("channels_alignment", "out_channels_alignment", "m_alignment", "n_alignment", "k_alignment",
                  "width_alignment"),
    # how much is reduced into one value, and how much is contiguous in memory
    "axes": ("reduced", "axis_inner", "permutation", "permutation_inner", "block_1", "block_2", "block_3", "broadcast"),
    "operands": ("rank", "inputs", "activation_inputs", "constant_inputs", "outputs", "tables", "activation", "adds"),
    "costs": ("log_flops", "log_bytes", "log_read", "log_written", "log_weights", "log_elements", "intensity"),
    # kind of operation, layout and element type
    "operation": ("op_class", "layout", "dtype", "bits"),
    **FORM_GROUPS,
    **LANGUAGE_GROUPS,
}, kernel_features, FORM_CODES | {"m_alignment", "n_alignment"})


def _is_convolution(kernel: Kernel) -> bool:
    return operator_row(kernel.op_type).operator_class == "convolution"


def _is_spatial(kernel: Kernel) -> bool:
    """Whether the operation moves a window over an image."""
    return _is_convolution(kernel) or "Pool" in kernel.op_type


def _sizes(kernel: Kernel, shape: Sequence[int], out: Sequence[int]) -> Sizes:
    is_last, spatial = channels_last(kernel), _is_spatial(kernel)
    _, *out_sizes = image_sizes(out, is_last, spatial)
    return Sizes(*image_sizes(shape, is_last, spatial), *out_sizes)


def _kernel_window(kernel: Kernel, sizes: Sizes) -> KernelWindow:
    attributes = kernel.attributes
    kernel_height = kernel_width = stride = padding = dilation = 0
    group = int(attributes.get("group", 1)) if _is_convolution(kernel) else 0
    if _is_spatial(kernel):
        window = attributes.get("kernel_shape") or _unnamed_window(kernel, sizes)
        kernel_height, kernel_width = math.prod(window[:-1]), window[-1] if window else 1
        stride = math.prod(attributes.get("strides") or (1,))
        dilation = max(attributes.get("dilations") or (1,))
        padding = sum(attributes.get("pads") or (0,))
    return KernelWindow(kernel_height, kernel_width, stride, padding, dilation, group,
                        sizes.channels // group if group else 0, float(1 < group == sizes.channels))


def _unnamed_window(kernel: Kernel, sizes: Sizes) -> Sequence[int]:
    """The window if no attribute gives it: a convolution's from its weights, a global pool's is the image."""
    position = operator_row(kernel.op_type).weights_input
    if position is None:
        return (sizes.height, sizes.width)
    weights: Tensor = kernel.inputs[position]
    return weights.shape[2:] or (1,)


def _product(kernel: Kernel, inputs: Sequence[KernelInput], out: Sequence[int], sizes: Sizes,
             window: KernelWindow) -> MatrixProduct:
    """The matrix product of a kernel; all 0 if it has none. `inputs`: without absent ones; `out`: shape of the first output."""
    op, group, out_elements = kernel.op_type, window.group, math.prod(out)
    if _is_convolution(kernel):
        return MatrixProduct(group, sizes.batch * sizes.out_height * sizes.out_width, sizes.out_channels // max(group, 1),
                       window.group_channels * window.kernel_height * window.kernel_width, 0)
    if ("MatMul" in op or "Gemm" in op) and len(out) >= 2:
        return matrix_product(kernel)
    if op == "Einsum" and (product := einsum_product(kernel.attributes, inputs)):
        return MatrixProduct(*product, 0)
    if out_elements and kernel.flops > 8 * out_elements:  # Attention and similar: a mean depth
        width = (out or (1,))[-1]
        return MatrixProduct(1, out_elements // width, width, kernel.flops // (2 * out_elements), 0)
    return MatrixProduct(0, 0, 0, 0, 0)


def _broadcast(inputs: Sequence[KernelInput], out: Sequence[int]) -> float:
    """How many times the smallest activation is repeated in the output (log2)."""
    operands, out_elements = [tensor.elements for tensor in inputs if not tensor.constant], math.prod(out)
    return math.log2(out_elements / max(min(operands), 1)) if operands and out_elements else 0.0


def _operands(kernel: Kernel, shape: Sequence[int], inputs: Sequence[KernelInput], outputs: int) -> tuple[float, ...]:
    """Rank of the first input (`shape`), numbers of tensors, and fused operations."""
    activations, fused = sum(not tensor.constant for tensor in inputs), kernel.type.split("_")[1:]
    return (len(shape), len(inputs), activations, len(inputs) - activations, outputs, waits_between_launches(kernel),
            _activation(kernel), float("Add" in fused or "Sum" in fused))


def _costs(kernel: Kernel, elements: int) -> tuple[float, ...]:
    """FLOPs, bytes, and the `elements` of the first input."""
    bytes_moved = kernel.bytes_read + kernel.bytes_written
    return (_log(kernel.flops), _log(bytes_moved), _log(kernel.bytes_read), _log(kernel.bytes_written),
            _log(kernel.weight_bytes), _log(elements), kernel.flops / max(bytes_moved, 1))


def _operation(kernel: Kernel) -> tuple[float, ...]:
    """Class of the operation, layout, element type and its bits."""
    dtype = kernel.dtype
    return (_op_class(kernel.op_type), LAYOUTS.get(kernel.domain, 2.0 if channels_last(kernel) else 0.0),
            float(DTYPES.index(dtype)) if dtype in DTYPES else float(len(DTYPES)), 8 * DTYPE_BYTES.get(dtype, 4))


def image_sizes(shape: Sequence[int], is_last: bool, spatial: bool) -> tuple[int, int, int, int]:
    """Batch, channels, height and width of a tensor; a third spatial dimension counts as height.

    Args:
        is_last: the last dimension is the channels (from rank 4 on).
        spatial: a convolution or pool reads it, so that dimension 1 is the channels at rank 3 too.
    """
    rank = len(shape)
    if rank >= 4:
        if is_last:
            return shape[0], shape[-1], math.prod(shape[1:-2]), shape[-2]
        return shape[0], shape[1], math.prod(shape[2:-1]), shape[-1]
    if rank == 3:
        return (shape[0], shape[1], 1, shape[2]) if spatial and not is_last else (shape[0], shape[2], shape[1], 1)
    if rank == 2:
        return shape[0], shape[1], 1, 1
    return 1, (shape[0] if rank else 1), 1, 1


def _axis(kernel: Kernel, shape: Sequence[int], out: Sequence[int]) -> tuple[int, int]:
    """How many elements are reduced into one value, and how many are contiguous behind the reduced axis."""
    op, rank, elements, out_elements = kernel.op_type, len(shape), math.prod(shape), math.prod(out)
    axis = kernel.attributes.get("axis")
    if "Norm" in op or "Softmax" in op:
        if operator_row(op).kind == "channel norm" and op != "BatchNormalization":
            return elements // max(shape[0], 1) if rank else 0, 1
        first = (int(axis) if axis is not None else -1) % rank if rank else 0
        inner = math.prod(shape[first + 1:]) if "Softmax" in op and kernel.opset >= 13 else 1
        return math.prod(shape[first:]) // max(inner, 1), inner
    if op.startswith(("Reduce", "Arg", "Global")) or "Pool" in op:
        return elements // max(out_elements, 1), _behind_reduced(shape, out) if op.startswith(("Reduce", "Arg")) else 0
    if axis is not None and not isinstance(axis, list):
        sizes = out if op == "Concat" else shape
        return 0, math.prod(sizes[int(axis) % len(sizes) + 1:]) if sizes else 0
    return 0, 0


def _behind_reduced(shape: Sequence[int], out: Sequence[int]) -> int:
    """The elements behind the last reduced axis; 0 if none is reduced. Vanished axes are found by size, the last first."""
    if len(shape) == len(out):
        reduced = [axis for axis, (size, kept) in enumerate(zip(shape, out, strict=True)) if size != kept]
        return math.prod(shape[reduced[-1] + 1:]) if reduced else 0
    behind = 0
    while behind < min(len(shape), len(out)) and shape[-1 - behind] == out[-1 - behind]:
        behind += 1
    return math.prod(shape[len(shape) - behind:])


def _permuted_blocks(kernel: Kernel, shape: Sequence[int]) -> list[tuple[int, int]]:
    """The blocks of dimensions that a Transpose moves as one: first dimension and elements, in the order of the output."""
    if kernel.op_type != "Transpose":
        return []
    perm = kernel.attributes.get("perm") or range(len(shape) - 1, -1, -1)
    moving_axes = [axis for axis in range(len(shape)) if shape[axis] != 1]  # axes of size 1 move no memory
    next_axis = dict(itertools.pairwise(moving_axes))
    blocks: list[tuple[int, int]] = []
    expected: int | None = None
    for axis in (axis for axis in perm if shape[axis] != 1):
        if blocks and axis == expected:
            blocks[-1] = blocks[-1][0], blocks[-1][1] * shape[axis]
        else:
            blocks.append((axis, shape[axis]))
        expected = next_axis.get(axis)
    return blocks


def _permutation(blocks: Sequence[tuple[int, int]]) -> tuple[int, int, int, int, int]:
    """A Transpose's blocks, contiguous elements, and sizes of its last three blocks, by which ONNX Runtime picks kernels."""
    if not blocks:
        return 0, 0, 0, 0, 0
    sizes = [size for _, size in sorted(blocks, reverse=True)]
    inner = sizes[0] if blocks[-1] == max(blocks) else 1
    first, second, third = [*sizes, 0, 0][:3]
    return len(blocks), inner, first, second, third


def _tiles(product: MatrixProduct, size: int) -> tuple[float, float]:
    """How many size×size tiles cover the products (log2), and the share of their area that is used."""
    matrices, m, n = product.matrices, product.m, product.n
    tiles = matrices * math.ceil(m / size) * math.ceil(n / size)
    return (math.log2(tiles), matrices * m * n / (tiles * size * size)) if tiles > 0 else (0.0, 0.0)


def _log(amount: float) -> float:
    return math.log2(1.0 + amount)


def _activation(kernel: Kernel) -> float:
    """The fused activation: 0 for none, its index from 1 in ACTIVATIONS, or one more than the last for any other."""
    name: Any = kernel.attributes.get("activation")
    if not name:
        return 0.0
    return float(ACTIVATIONS.index(name) + 1) if name in ACTIVATIONS else float(len(ACTIVATIONS) + 1)


def _op_class(op_type: str) -> float:
    """The index from 1 of the first of OP_CLASSES in the operation's name; 0 for elementwise operations and the rest."""
    for number, name in enumerate(OP_CLASSES, 1):
        if name in op_type:
            return float(number)
    return 0.0
