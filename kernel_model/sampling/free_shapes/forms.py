"""Draws operators in forms that are rare in networks: any rank, axes, groups, windows, odd and huge sizes.

A library may use another algorithm for such forms, so that a kernel takes many times as long as a similar one. A form that ONNX
Runtime refuses is drawn again. Outputs follow from the operators' schemas.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hase.kernel_model.sampling.free_shapes.layers import GATES
from hase.kernel_model.sampling.free_shapes.sizes import (
    ABSENT,
    Generator,
    as_float32,
    indices,
    inferred,
    kernel,
    log_uniform,
    numbers,
    pick,
    scalar,
    tensor,
    with_weight,
)
from hase.records.kernel_record import Kernel, Tensor, type_code
from hase.records.operators import TABLE
from hase.utils.lazy import onnx

LEAST_ELEMENTS, MOST_ELEMENTS = 16.0, 2.0**25  # of a tensor
ODD = (1, 2, 3, 5, 7, 11, 13, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1000, 1023, 1025, 4095, 4097)
EVEN = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int64", "int32", "int8", "uint8")
LOGICAL = ("And", "Or", "Xor", "Not")
COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "PRelu", *COMPARISONS, "And", "Or", "Xor")
REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
              "ReduceLogSum", "ReduceLogSumExp")


def any_size(generator: Generator, most: float = 8192.0) -> int:
    """A log-uniform size up to `most`: an odd one, a round one, or any."""
    kind = generator.random()
    if kind < 0.6:
        fitting = [size for size in (ODD if kind < 0.3 else EVEN) if size <= most]
        return pick(fitting or [1], generator)
    return round(log_uniform(1, max(most, 1.0), generator))


def any_shape(rank: int, generator: Generator, most: float = MOST_ELEMENTS) -> tuple[int, ...]:
    """A shape of `rank` axes of similar or different lengths, with at most about `most` elements."""
    if not rank:
        return ()
    logs = np.log(log_uniform(LEAST_ELEMENTS, most, generator)) * generator.dirichlet([pick([1, 4], generator)] * rank)
    sizes = np.maximum(1, np.round(np.exp(logs))).astype(int)
    if generator.random() < 0.5:  # to round numbers, as most sizes are
        sizes = np.where(sizes > 3, np.array(EVEN)[np.abs(np.log(np.divide.outer(sizes, EVEN))).argmin(axis=1)], sizes)
    if generator.random() < 0.2:
        sizes[generator.integers(rank)] = 1
    return tuple(int(size) for size in sizes)


def any_rank(generator: Generator, least: int = 1, most: int = 6) -> int:
    return int(generator.integers(least, most + 1))


def any_axis(shape: Sequence[int], generator: Generator) -> int:
    return int(generator.integers(len(shape)))


def any_axes(shape: Sequence[int], generator: Generator) -> list[int]:
    """One or more different axes, ascending."""
    return sorted(generator.choice(len(shape), int(generator.integers(1, len(shape) + 1)), replace=False).tolist())


def other_type(dtype: str, generator: Generator, others: Sequence[str], chance: float = 0.3) -> str:
    """`dtype`, or with probability `chance` one of `others`."""
    return str(generator.choice(others)) if generator.random() < chance else dtype


# convolutions and pools ----------------------------------------------------------------------------------------------------

def _window(rank: int, generator: Generator) -> list[int]:
    """The window of a convolution or pool, at most 128 wide in a signal, 31 in an image and 9 in a volume."""
    most = {1: 128, 2: 31, 3: 9}[rank]
    wide = round(log_uniform(1, most, generator))
    kind = str(generator.choice(["square", "flat", "any"], p=[0.6, 0.25, 0.15])) if rank > 1 else "square"
    if kind == "square":
        return [wide] * rank
    if kind == "flat":
        window = [1] * rank
        window[int(generator.integers(rank))] = wide
        return window
    return [round(log_uniform(1, most, generator)) for _ in range(rank)]


def _strides_and_pads(window: Sequence[int], generator: Generator) -> tuple[list[int], list[int], list[int], list[int]]:
    """Strides, dilations, pads and reach (the minimum image size) of a window, per axis."""
    rank = len(window)
    strides = list(window) if generator.random() < 0.1 else [pick([1, 1, 1, 1, 2, 2, 3, 4], generator)] * rank
    dilations = [pick([1, 1, 1, 1, 1, 2, 3, 4, 8, 16], generator)] * rank
    reach = [dilation * (size - 1) + 1 for size, dilation in zip(window, dilations, strict=True)]
    pads = [size // 2 if generator.random() < 0.7 else 0 for size in reach]
    return strides, dilations, [*pads, *pads], reach


def _image_sizes(least: Sequence[int], generator: Generator) -> list[int]:
    """The sizes of a signal, image or volume, often equal along all axes."""
    most = {1: 65536.0, 2: 512.0, 3: 64.0}[len(least)]
    if generator.random() < 0.6:
        return [max(any_size(generator, most), *least)] * len(least)
    return [max(any_size(generator, most), size) for size in least]


def _channels_and_groups(generator: Generator) -> tuple[int, int, int]:
    """Input channels, output channels and groups of a dense, grouped or depthwise convolution."""
    kind = str(generator.choice(["dense", "grouped", "depthwise", "several from each"], p=[0.2, 0.4, 0.3, 0.1]))
    if kind == "dense":
        return any_size(generator, 2048), any_size(generator, 2048), 1
    if kind == "grouped":
        group = max(2, any_size(generator, 256))
        width = any_size(generator, max(2048 / group, 1))
        return group * width, group * (width if generator.random() < 0.7 else any_size(generator, max(2048 / group, 1))), group
    channels = max(2, any_size(generator, 4096))
    return channels, channels * (1 if kind == "depthwise" else pick([2, 3, 4], generator)), channels


def convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A convolution of a signal, image or volume, with any groups and windows."""
    rank = int(generator.choice([1, 2, 3], p=[0.35, 0.4, 0.25]))
    window = _window(rank, generator)
    strides, dilations, pads, reach = _strides_and_pads(window, generator)
    before, after, group = _channels_and_groups(generator)
    image = tensor(dtype, batch, before, *_image_sizes(reach, generator))
    inputs = with_weight(image, (after, before // group, *window), after, 0.5, generator)
    return inferred("Conv", inputs, kernel_shape=window, strides=strides, pads=pads, dilations=dilations, group=group)


def transposed_convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A transposed convolution of a signal, image or volume, with any groups."""
    rank = any_rank(generator, 1, 3)
    window = _window(rank, generator)
    before, after, group = _channels_and_groups(generator)
    strides = [min(size, pick([1, 2, 2, 4], generator)) for size in window]
    inputs = [tensor(dtype, batch, before, *_image_sizes([1] * rank, generator)),
              tensor(dtype, before, after // group, *window, constant=True)]
    return inferred("ConvTranspose", inputs, kernel_shape=window, strides=strides, pads=[0] * 2 * rank, dilations=[1] * rank,
                    output_padding=[0] * rank, group=group)


def pool(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A maximum or mean over windows of any size, or over the whole image."""
    rank = any_rank(generator, 1, 3)
    op = str(generator.choice(["MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"], p=[0.35, 0.35, 0.15, 0.15]))
    channels = any_size(generator, 2048)
    if op.startswith("Global"):
        return inferred(op, [tensor(dtype, batch, channels, *_image_sizes([1] * rank, generator))])
    window = _window(rank, generator)
    strides, dilations, pads, reach = _strides_and_pads(window, generator)
    if op == "AveragePool":
        dilations, reach = [1] * rank, window
    pads = [min(pad, size // 2) for pad, size in zip(pads, [*window, *window], strict=True)]
    more: dict[str, Any] = {"count_include_pad": int(generator.integers(2))} if op == "AveragePool" else {}
    return inferred(op, [tensor(dtype, batch, channels, *_image_sizes(reach, generator))], kernel_shape=window, strides=strides,
                    pads=pads, dilations=dilations, **more)


# normalisations and reductions ---------------------------------------------------------------------------------------------

def channel_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A batch or instance normalisation, also with huge numbers of rows or channels."""
    op = str(generator.choice(["BatchNormalization", "InstanceNormalization"], p=[0.65, 0.35]))
    shape = any_shape(any_rank(generator, 2 if op == "BatchNormalization" else 3, 5), generator)
    scale = tensor(dtype, shape[1], constant=True)
    return inferred(op, [tensor(dtype, *shape), *[scale] * (4 if op == "BatchNormalization" else 2)])


def layer_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A layer normalisation over some of the last axes."""
    shape = any_shape(any_rank(generator, 2, 5), generator)
    axis = len(shape) - 1 if generator.random() < 0.6 else any_axis(shape, generator)
    x, scale = tensor(other_type(dtype, generator, ["bfloat16"], 0.15), *shape), shape[axis:]
    weight = tensor(x.dtype, *scale, constant=True)
    if generator.random() < 0.5:
        return kernel("SimplifiedLayerNormalization", [x, weight], [shape], axis=axis, epsilon=as_float32(1e-6), stash_type=1)
    return inferred("LayerNormalization", [x, weight, weight], axis=axis, epsilon=as_float32(1e-5))


def other_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """One of the normalisations that are rare in networks."""
    op = str(generator.choice(["LRN", "LpNormalization", "MeanVarianceNormalization", "GroupNormalization"]))
    shape = any_shape(any_rank(generator, 3, 5) if op != "LRN" else 4, generator)
    if op == "GroupNormalization":
        groups = next((count for count in (32, 16, 8, 4, 2) if shape[1] % count == 0), 1)
        scale = tensor(dtype, shape[1], constant=True)
        return inferred(op, [tensor(dtype, *shape), scale, scale], num_groups=groups)
    more: dict[str, dict[str, Any]] = {
        "LRN": {"size": pick([3, 5, 9], generator)}, "LpNormalization": {"axis": any_axis(shape, generator)}}
    return inferred(op, [tensor(dtype, *shape)], **more.get(op, {}))


def softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A softmax along any axis, over few or very many numbers."""
    op = str(generator.choice(["Softmax", "LogSoftmax", "Hardmax"], p=[0.5, 0.4, 0.1]))
    shape = any_shape(any_rank(generator, 1, 5), generator)
    return inferred(op, [tensor(other_type(dtype, generator, ["bfloat16", "float64"], 0.15), *shape)],
                    axis=len(shape) - 1 if generator.random() < 0.4 else any_axis(shape, generator))


def reduction(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A reduction along any axes, or all of them."""
    shape = any_shape(any_rank(generator), generator)
    axes = any_axes(shape, generator)
    return inferred(str(generator.choice(REDUCTIONS)),
                    [tensor(other_type(dtype, generator, ["int32", "bfloat16", "float64"], 0.2), *shape), numbers(*axes)],
                    keepdims=int(generator.integers(2)))


def along_an_axis(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ArgMax, ArgMin, CumSum or TopK along any axis."""
    op = str(generator.choice(["ArgMax", "ArgMin", "CumSum", "TopK"]))
    shape = any_shape(any_rank(generator, 1, 5), generator, 2.0**23)
    axis = any_axis(shape, generator)
    if op == "CumSum":
        return inferred(op, [tensor(dtype, *shape), scalar("int64", axis)], exclusive=int(generator.integers(2)),
                        reverse=int(generator.integers(2)))
    if op == "TopK":
        count = min(any_size(generator, 1024), shape[axis])
        result = tuple(count if index == axis else size for index, size in enumerate(shape))
        return kernel(op, [tensor(dtype, *shape), numbers(count)], [result, Tensor(dtype="int64", shape=result)], axis=axis,
                      largest=int(generator.integers(2)), sorted=1)
    return inferred(op, [tensor(dtype, *shape)], axis=axis, keepdims=int(generator.integers(2)))


# element by element --------------------------------------------------------------------------------------------------------

@functools.cache
def unary_operators() -> tuple[str, ...]:
    """The elementwise operators of ONNX that take one tensor."""
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == "" and schema.max_input == 1}
    return tuple(sorted(known & {row.name for row in TABLE if row.operator_class == "elementwise"}))


def unary(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An elementwise operator on one tensor of any rank."""
    op = str(generator.choice(unary_operators()))
    dtype = "bool" if op in LOGICAL else other_type(dtype, generator, [*FLOATS, *INTEGERS])
    return inferred(op, [tensor(dtype, *any_shape(any_rank(generator, 0, 6), generator))])


def binary(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An elementwise operator on two tensors that have equal shapes or are broadcast along any axes."""
    op = str(generator.choice(BINARY))
    dtype = "bool" if op in LOGICAL else other_type(dtype, generator, [*FLOATS, *INTEGERS])
    shape = any_shape(any_rank(generator), generator)
    kind = str(generator.choice(["same", "one", "both", "fewer axes", "number"], p=[0.3, 0.25, 0.15, 0.2, 0.1]))

    def with_ones() -> tuple[int, ...]:
        return tuple(size if generator.random() < 0.6 else 1 for size in shape)

    seconds = {"same": shape, "one": with_ones(), "both": with_ones(), "fewer axes": shape[any_axis(shape, generator):]}
    first, second = shape if kind != "both" else with_ones(), seconds.get(kind, ())
    operands = [tensor(dtype, *first), tensor(dtype, *second, constant=bool(generator.random() < 0.3 and kind != "same"))]
    return inferred(op, operands[::-1] if generator.random() < 0.2 and op != "PRelu" else operands)


def where(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Where, with its tensors broadcast along any axes."""
    shape = any_shape(any_rank(generator), generator)
    shapes = [tuple(size if generator.random() < chance else 1 for size in shape) for chance in (0.8, 0.8, 0.5)]
    dtype = other_type(dtype, generator, [*FLOATS, *INTEGERS])
    return inferred("Where", [tensor("bool", *shapes[0]), *(tensor(dtype, *each) for each in shapes[1:])])


def cast(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A cast between any two types."""
    names = [*FLOATS, *INTEGERS, "bool"]
    before, after = generator.choice(names, 2, replace=False).tolist()
    return inferred("Cast", [tensor(before, *any_shape(any_rank(generator), generator))], to=type_code(after))


# movement ------------------------------------------------------------------------------------------------------------------

def transpose(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A transpose of up to six axes to any order."""
    shape = any_shape(any_rank(generator, 2, 6), generator)
    return inferred("Transpose", [tensor(other_type(dtype, generator, [*INTEGERS, "bfloat16"]), *shape)],
                    perm=generator.permutation(len(shape)).tolist())


def concat(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Concat of two to twelve tensors along any axis."""
    shape, dtype = any_shape(any_rank(generator), generator, 2.0**22), other_type(dtype, generator, [*INTEGERS, "bfloat16"])
    axis, count, equal = any_axis(shape, generator), pick([2, 2, 3, 4, 8, 12], generator), generator.random() < 0.5
    parts = [shape[axis] if equal else any_size(generator, 2 * shape[axis]) for _ in range(count)]
    return inferred("Concat", [tensor(dtype, *shape[:axis], part, *shape[axis + 1:]) for part in parts], axis=axis)


def split(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Split into equal or unequal parts along any axis."""
    shape, dtype = any_shape(any_rank(generator), generator, 2.0**22), other_type(dtype, generator, [*INTEGERS, "bfloat16"])
    axis, count, equal = any_axis(shape, generator), pick([2, 2, 3, 4, 8], generator), generator.random() < 0.5
    parts = [shape[axis] if equal else any_size(generator, 2 * shape[axis]) for _ in range(count)]
    whole = (*shape[:axis], sum(parts), *shape[axis + 1:])
    return kernel("Split", [tensor(dtype, *whole), numbers(*parts)],
                  [(*shape[:axis], part, *shape[axis + 1:]) for part in parts], axis=axis)


def slice_axes(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Slice along some axes, with steps, perhaps backwards."""
    shape = any_shape(any_rank(generator), generator)
    axes = any_axes(shape, generator)
    steps = [pick([1, 1, 2, 3, -1], generator) for _ in axes]
    starts = [pick([0, 0, 1], generator) if step > 0 else -1 for step in steps]
    ends = [pick([shape[axis], max(shape[axis] // 2, 2), -1], generator) if step > 0 else -(2**62)
            for axis, step in zip(axes, steps, strict=True)]
    return inferred("Slice", [tensor(other_type(dtype, generator, INTEGERS), *shape), numbers(*starts), numbers(*ends),
                              numbers(*axes), numbers(*steps)])


def pad(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Pad around any axes: zeros, mirrored or repeated."""
    shape = any_shape(any_rank(generator, 1, 5), generator)
    wide = [[min(pick([1, 3, 16], generator), size - 1) if generator.random() < 0.5 else 0 for size in shape] for _ in range(2)]
    return inferred("Pad", [tensor(dtype, *shape), numbers(*wide[0], *wide[1])],
                    mode=str(generator.choice(["constant", "reflect", "edge"])))


def expand_or_tile(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Expand or Tile along any axes."""
    shape = any_shape(any_rank(generator, 1, 5), generator, 2.0**20)
    dtype = other_type(dtype, generator, [*INTEGERS, "bfloat16"])
    times = [pick([1, 1, 2, 5, 16], generator) for _ in shape]
    if generator.random() < 0.5:
        return inferred("Tile", [tensor(dtype, *shape), numbers(*times)])
    thin = tuple(1 if count > 1 else size for size, count in zip(shape, times, strict=True))
    return inferred("Expand", [tensor(dtype, *thin), numbers(*shape)])


def gather_or_scatter(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Gather, GatherElements or ScatterElements along any axis."""
    op = str(generator.choice(["Gather", "GatherElements", "ScatterElements"]))
    shape, dtype = any_shape(any_rank(generator, 1, 5), generator, 2.0**22), other_type(dtype, generator, ["int64"], 0.15)
    axis = any_axis(shape, generator)
    if op == "Gather":
        index_shape = any_shape(any_rank(generator, 0, 2), generator, 4096.0)
        return inferred(op, [tensor(dtype, *shape), indices(index_shape, shape[axis])], axis=axis)
    index_shape = tuple(any_size(generator, size) if index == axis else size for index, size in enumerate(shape))
    updates = [tensor(dtype, *index_shape)] if op == "ScatterElements" else []
    return inferred(op, [tensor(dtype, *shape), indices(index_shape, shape[axis]), *updates], axis=axis)


def resize(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A Resize of a signal, an image or a volume, in any of the modes."""
    rank = any_rank(generator, 1, 3)
    shape = (batch, any_size(generator, 512), *_image_sizes([1] * rank, generator))
    times = pick([1, 2, 2, 3, 4], generator)
    sizes = [max(1, size * times if generator.random() < 0.7 else size // (times + 1)) for size in shape[2:]]
    mode = str(generator.choice(["nearest", "linear", "cubic"] if rank == 2 else ["nearest", "linear"]))
    frame = str(generator.choice(["asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel"]))
    return inferred("Resize", [tensor(dtype, *shape), ABSENT, ABSENT, numbers(*shape[:2], *sizes)], mode=mode,
                    coordinate_transformation_mode=frame, nearest_mode="floor" if mode == "nearest" else "round_prefer_floor")


# products and recurrent layers ---------------------------------------------------------------------------------------------

def matrix_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product of one to five axes, perhaps of vectors, with odd depths and batches broadcast along any axis."""
    rows, depth, columns = (any_size(generator, 8192) for _ in range(3))
    lead = any_shape(any_rank(generator, 0, 3), generator, 512.0)
    dtype = other_type(dtype, generator, ["bfloat16", "float64"], 0.25)
    left, right = (*lead, rows, depth), (*lead, depth, columns)
    kind = str(generator.choice(["both", "weight", "broadcast", "vector"], p=[0.35, 0.35, 0.2, 0.1]))
    if kind == "weight":
        right = (depth, columns)
    elif kind == "broadcast":
        left = (*(size if generator.random() < 0.5 else 1 for size in lead), rows, depth)
    elif kind == "vector":
        left, right = ((depth,), right) if generator.random() < 0.5 else (left, (depth,))
    return inferred("MatMul", [tensor(dtype, *left), tensor(dtype, *right, constant=kind == "weight")])


def gemm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A Gemm of odd sizes, with either operand transposed, and a bias of any shape that fits."""
    rows, depth, columns = (any_size(generator, 8192) for _ in range(3))
    dtype, (trans_a, trans_b) = other_type(dtype, generator, ["bfloat16", "float64"], 0.25), generator.random(2) < 0.5
    inputs = [tensor(dtype, *((depth, rows) if trans_a else (rows, depth))),
              tensor(dtype, *((columns, depth) if trans_b else (depth, columns)), constant=bool(generator.random() < 0.7))]
    biases: list[tuple[int, ...]] = [(columns,), (1, columns), (rows, 1), (rows, columns), ()]
    if generator.random() < 0.7:
        inputs.append(tensor(dtype, *biases[int(generator.integers(len(biases)))], constant=True))
    return inferred("Gemm", inputs, transA=int(trans_a), transB=int(trans_b))


def recurrent(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A recurrent layer of any width, forwards, backwards or both."""
    op, direction = str(generator.choice(list(GATES))), str(generator.choice(["forward", "reverse", "bidirectional"]))
    steps, rows, width, hidden = (any_size(generator, most) for most in (256, 128, 1024, 1024))
    directions, gates = 2 if direction == "bidirectional" else 1, GATES[op] * hidden
    inputs = [tensor(dtype, steps, rows, width), tensor(dtype, directions, gates, width, constant=True),
              tensor(dtype, directions, gates, hidden, constant=True)]
    if generator.random() < 0.7:
        inputs.append(tensor(dtype, directions, 2 * gates, constant=True))
    more: dict[str, Any] = {"GRU": {"linear_before_reset": 1}, "RNN": {"activations": ["Tanh"] * directions}}
    return inferred(op, inputs, direction=direction, hidden_size=hidden, layout=0, **more.get(op, {}))
