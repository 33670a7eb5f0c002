"""Turns a kernel into numbers. Training and prediction use the same feature schema, so they can't drift apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hase.learned.kernels.form_features import FORM_CODES, FORM_GROUPS, form_features
from hase.learned.kernels.language_features import LANGUAGE_GROUPS, language_features
from hase.learned.kernels.schema import FeatureSchema
from hase.records.kernel_costs import copied_tables, einsum_product
from hase.records.kernel_record import DTYPE_BYTES, Kernel, KernelInput, Tensor
from hase.records.kernel_types import channels_last
from hase.records.matrix_products import Product, alignment, matrix_product
from hase.records.operators import operator_row

OP_CLASSES = ("Conv", "Pool", "MatMul", "Gemm", "Attention", "Norm", "Softmax", "Reduce", "Arg", "Transpose", "Reorder",
              "Concat", "Split", "Slice", "Gather", "Scatter", "Pad", "Resize", "Cast", "Quantize", "Shape", "Expand", "Einsum")
ACTIVATIONS = ("Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "Gelu", "Silu", "Swish", "HardSwish")
DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "int8", "bool")
LAYOUTS = {"com.microsoft.nchwc": 1.0, "com.ms.internal.nhwc": 2.0}  # by domain; 0 is ONNX's own layout, channels first


class Sizes(NamedTuple):
    """Image sizes of a kernel's first input and first output. A (batch, tokens, channels) tensor counts as an image of height
    `tokens` and width 1."""

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
    """The values of KERNEL_FEATURES, in its order. Sizes that an operation does not have are 0.

    Works for every operation: one that is not known is described by its tensors and costs.
    """
    inputs = [tensor for tensor in kernel.inputs if tensor.dtype]
    outputs = [tensor for tensor in kernel.outputs if tensor.dtype]
    shape: tuple[int, ...] = inputs[0].shape if inputs else ()
    out: tuple[int, ...] = outputs[0].shape if outputs else ()
    sizes = _sizes(kernel, shape, out)
    window = _kernel_window(kernel, sizes)
    product = _product(kernel, inputs, out, sizes, window)
    return [
        *sizes, *window, *product,
        *_tiles(product, 32), *_tiles(product, 128),
        alignment(sizes.channels), alignment(sizes.out_channels),
        *map(alignment, (product.m, product.n, product.k)), alignment(sizes.width),
        *_axis(kernel, shape, out), *_permutation(_permuted_blocks(kernel, shape)), _broadcast(inputs, out),
        *_operands(kernel, shape, inputs, len(outputs)),
        *_costs(kernel, math.prod(shape)),
        *_operation(kernel),
        *form_features(kernel),
        *language_features(kernel),
    ]


KERNEL_FEATURES = FeatureSchema("kernel", 5, {
    "sizes": Sizes._fields,
    "window": KernelWindow._fields,
    "product": Product._fields,
    # how the product fills tiles: counts, and the share of the tiles' area that is used
    "tiles": ("log_tiles_32", "fill_32", "log_tiles_128", "fill_128"),
    # largest power of two (at most 64) that divides a size
    "alignment": ("channels_alignment", "out_channels_alignment", "m_alignment", "n_alignment", "k_alignment",
                  "width_alignment"),
    # how much is reduced into one value, and how much lies next to each other in memory
    "axes": ("reduced", "axis_inner", "permutation", "permutation_inner", "block_1", "block_2", "block_3", "broadcast"),
    "operands": ("rank", "inputs", "activation_inputs", "constant_inputs", "outputs", "tables", "activation", "adds"),
    "costs": ("log_flops", "log_bytes", "log_read", "log_written", "log_weights", "log_elements", "intensity"),
    # what kind of operation, on what
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
    """The window where no attribute gives it: that of a convolution from its weights; that of a global pool is the image."""
    position = operator_row(kernel.op_type).weights_input
    if position is None:
        return (sizes.height, sizes.width)
    weights: Tensor = kernel.inputs[position]
    return weights.shape[2:] or (1,)


def _product(kernel: Kernel, inputs: Sequence[KernelInput], out: Sequence[int], sizes: Sizes, window: KernelWindow) -> Product:
    """The matrix product of a kernel; all 0 where it has none.

    Args:
        kernel: any.
        inputs: those that are present.
        out: shape of the first output.
        sizes, window: of the kernel.
    """
    op, group, out_elements = kernel.op_type, window.group, math.prod(out)
    if _is_convolution(kernel):
        return Product(group, sizes.batch * sizes.out_height * sizes.out_width, sizes.out_channels // max(group, 1),
                       window.group_channels * window.kernel_height * window.kernel_width, 0)
    if ("MatMul" in op or "Gemm" in op) and len(out) >= 2:
        return matrix_product(kernel)
    if op == "Einsum" and (product := einsum_product(kernel.attributes, inputs)):
        return Product(*product, 0)
    if out_elements and kernel.flops > 8 * out_elements:  # Attention and similar: a mean depth
        width = (out or (1,))[-1]
        return Product(1, out_elements // width, width, kernel.flops // (2 * out_elements), 0)
    return Product(0, 0, 0, 0, 0)


def _broadcast(inputs: Sequence[KernelInput], out: Sequence[int]) -> float:
    """How many times the smallest activation is repeated in the output (log2)."""
    operands, out_elements = [tensor.elements for tensor in inputs if not tensor.constant], math.prod(out)
    return math.log2(out_elements / max(min(operands), 1)) if operands and out_elements else 0.0


def _operands(kernel: Kernel, shape: Sequence[int], inputs: Sequence[KernelInput], outputs: int) -> tuple[float, ...]:
    """Rank of the first input (`shape`), numbers of tensors, and fused operations."""
    activations, fused = sum(not tensor.constant for tensor in inputs), kernel.type.split("_")[1:]
    return (len(shape), len(inputs), activations, len(inputs) - activations, outputs, copied_tables(kernel),
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
        shape: of the tensor, of any rank.
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
    """How many elements are reduced into one value, and how many are next to each other in memory behind the reduced axis."""
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
    """How many elements lie next to each other behind the last reduced axis; 0 where none is reduced. Reduced axes that vanish
    are found by their sizes, from the last axis on."""
    if len(shape) == len(out):
        gone = [axis for axis, (size, kept) in enumerate(zip(shape, out, strict=True)) if size != kept]
        return math.prod(shape[gone[-1] + 1:]) if gone else 0
    behind = 0
    while behind < min(len(shape), len(out)) and shape[-1 - behind] == out[-1 - behind]:
        behind += 1
    return math.prod(shape[len(shape) - behind:])


def _permuted_blocks(kernel: Kernel, shape: Sequence[int]) -> list[tuple[int, int]]:
    """The blocks of dimensions that a Transpose moves as one: first dimension and elements, in the order of the output."""
    if kernel.op_type != "Transpose":
        return []
    perm = kernel.attributes.get("perm") or range(len(shape) - 1, -1, -1)
    straight = [axis for axis in range(len(shape)) if shape[axis] != 1]  # axes of size 1 move no memory
    follower = dict(itertools.pairwise(straight))
    blocks: list[tuple[int, int]] = []
    follows: int | None = None
    for axis in (axis for axis in perm if shape[axis] != 1):
        if blocks and axis == follows:
            blocks[-1] = blocks[-1][0], blocks[-1][1] * shape[axis]
        else:
            blocks.append((axis, shape[axis]))
        follows = follower.get(axis)
    return blocks


def _permutation(blocks: Sequence[tuple[int, int]]) -> tuple[int, int, int, int, int]:
    """How many blocks of dimensions a Transpose moves, how many elements stay next to each other, and the elements of the
    input's last three blocks, last one first. ONNX Runtime picks its CUDA kernel by these."""
    if not blocks:
        return 0, 0, 0, 0, 0
    sizes = [size for _, size in sorted(blocks, reverse=True)]
    inner = sizes[0] if blocks[-1] == max(blocks) else 1
    first, second, third = [*sizes, 0, 0][:3]
    return len(blocks), inner, first, second, third


def _tiles(product: Product, size: int) -> tuple[float, float]:
    """How many size×size tiles cover the products (log2), and the share of their area that is used."""
    matrices, m, n = product.matrices, product.m, product.n
    tiles = matrices * math.ceil(m / size) * math.ceil(n / size)
    return (math.log2(tiles), matrices * m * n / (tiles * size * size)) if tiles > 0 else (0.0, 0.0)


def _log(amount: float) -> float:
    return math.log2(1.0 + amount)


def _activation(kernel: Kernel) -> float:
    """The fused activation: 0 for none, else its place in ACTIVATIONS, counted from 1; one more than the last for any other."""
    name: Any = kernel.attributes.get("activation")
    if not name:
        return 0.0
    return float(ACTIVATIONS.index(name) + 1) if name in ACTIVATIONS else float(len(ACTIVATIONS) + 1)


def _op_class(op_type: str) -> float:
    """The place, counted from 1, of the first of OP_CLASSES that is part of the operation's name; 0 for elementwise operations
    and the rest."""
    for number, name in enumerate(OP_CLASSES, 1):
        if name in op_type:
            return float(number)
    return 0.0
