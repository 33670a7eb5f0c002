"""Reductions and normalisations of free shapes."""

from __future__ import annotations

from hase.kernel_model.sampling.free_shapes.sizes import (
    CONTRIB,
    Generator,
    Sizes,
    as_float32,
    channels_at,
    kernel,
    log_uniform,
    numbers,
    pick,
    scalar,
    side,
    tensor,
    tokens,
)
from hase.records.kernel_record import Kernel, Tensor

# The tensors that models reduce, and along which axes.
FORMS = (("bcss", (2, 3)), ("bcss", (-1, -2)), ("bssc", (1, 2)), ("btx", (-1,)), ("btx", (1,)), ("bhtt", (-1,)), ("bhtd", (3,)),
         ("bkcss", (1,)), ("bcfss", (2, 3, 4)), ("bfssc", (1, 2, 3)), ("bcss", (1,)), ("bx", (-1,)), ("rx", (-1,)),
         ("kbx", (0,)), ("bkhtd", (4,)), ("bhnwnd", (3,)), ("bcl", (2,)), ("bxt", (-1,)))
OPERATORS = {"ReduceMean": 0.26, "ReduceSum": 0.18, "ReduceMax": 0.15, "ReduceL2": 0.15, "ReduceMin": 0.07,
             "ReduceSumSquare": 0.05, "ReduceL1": 0.05, "ReduceProd": 0.04, "ReduceLogSumExp": 0.05}


def mean(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The mean of an image, or of tokens."""
    near = side(generator)
    wide = channels_at(near, generator)
    if generator.random() < 0.85:
        return kernel("ReduceMean", [tensor(dtype, batch, wide, near, near), numbers(-1, -2)], [(batch, wide, 1, 1)],
                      keepdims=1, noop_with_empty_axes=0)
    return kernel("ReduceMean", [tensor(dtype, batch, near, near, wide), numbers(1, 2)], [(batch, 1, 1, wide)],
                  keepdims=1, noop_with_empty_axes=0)


def norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The length of each vector of attention, or a sum or an extreme along the last axis."""
    images, heads, count, width = tokens(batch, generator)
    op = str(generator.choice(["ReduceL2", "ReduceSum", "ReduceMax"], p=[0.5, 0.25, 0.25]))
    return kernel(op, [tensor(dtype, images, count, heads, width), numbers(3)], [(images, count, heads, 1)],
                  keepdims=1, noop_with_empty_axes=0)


def _reduced(shape: tuple[int, ...], axes: tuple[int, ...], keep: bool) -> tuple[int, ...]:
    gone = {axis % len(shape) for axis in axes}
    return tuple(1 if axis in gone else size for axis, size in enumerate(shape) if keep or axis not in gone)


def reduction(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Any reduction along any axes."""
    op = str(generator.choice(list(OPERATORS), p=list(OPERATORS.values())))
    letters, axes = FORMS[int(generator.integers(len(FORMS)))]
    shape, keep = Sizes(batch, generator).shape(letters), generator.random() < 0.5
    return kernel(op, [tensor(dtype, *shape), numbers(*axes)], [_reduced(shape, axes, keep)], keepdims=int(keep),
                  noop_with_empty_axes=0)


def largest_place(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ArgMax and ArgMin: of classes, words, or the channels of an image."""
    sizes = Sizes(batch, generator)
    letters, axis = [("rx", -1), ("btx", -1), ("bx", 1), ("bcss", 1), ("bhtt", -1), ("bv", -1)][int(generator.integers(6))]
    shape, keep = sizes.shape(letters), generator.random() < 0.3
    return kernel(str(generator.choice(["ArgMax", "ArgMin"], p=[0.8, 0.2])), [tensor(dtype, *shape)],
                  [Tensor(dtype="int64", shape=_reduced(shape, (axis,), keep))], axis=axis, keepdims=int(keep),
                  select_last_index=0)


def running_sum(dtype: str, batch: int, generator: Generator) -> Kernel:
    """CumSum along tokens, of numbers or of positions."""
    sizes = Sizes(batch, generator)
    kind = dtype if generator.random() < 0.6 else "int64"
    shape, axis = [(sizes.shape("bt"), -1), (sizes.shape("bt"), 1), (sizes.shape("bss"), 1), (sizes.shape("btx"), 1)][
        int(generator.integers(4 if kind == dtype else 3))]
    return kernel("CumSum", [tensor(kind, *shape), scalar("int64", axis)], [shape], exclusive=0, reverse=0)


def largest(dtype: str, batch: int, generator: Generator) -> Kernel:
    """TopK along the last axis: of boxes, classes, experts, or the words that continue the beams of a text."""
    sizes = Sizes(batch, generator)
    shape = sizes.shape(str(generator.choice(["bx", "rx", "bl", "bt", "bv"])))
    if generator.random() < 0.12:
        shape = (1, sizes["v"] * sizes["k"]) if generator.random() < 0.5 else (1, round(log_uniform(4096, 2e6, generator)))
    count = min(pick([1, 2, 5, 8, 10, 100, 300, 1000], generator), shape[-1])
    result_shape = (*shape[:-1], count)
    return kernel("TopK", [tensor(dtype, *shape), numbers(count)], [result_shape, Tensor(dtype="int64", shape=result_shape)],
                  axis=-1, largest=1, sorted=1)


def layer_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Over the last channels, of any rank; also with the addition before it, and without the mean."""
    sizes = Sizes(batch, generator)
    shape = sizes.shape(str(generator.choice(["btx", "bssc", "bhtd", "bfssc", "rx", "bnnwwc"],
                                             p=[0.55, 0.2, 0.1, 0.06, 0.06, 0.03])))
    x, scale = tensor(dtype, *shape), tensor(dtype, shape[-1], constant=True)
    epsilon = as_float32(float(generator.choice([1e-6, 1e-5, 1e-12])))
    kind = generator.choice(["Layer", "Skip", "Simplified", "SkipSimplified"], p=[0.3, 0.2, 0.25, 0.25])
    if kind == "Simplified":
        return kernel("SimplifiedLayerNormalization", [x, scale], [shape], axis=-1, epsilon=epsilon, stash_type=1)
    if kind == "Layer":
        return kernel("LayerNormalization", [x, scale, scale], [shape], axis=-1, epsilon=epsilon, stash_type=1)
    shape = sizes.shape(str(generator.choice(["btx", "rx"], p=[0.9, 0.1])))  # others are not fused
    x, scale = tensor(dtype, *shape), tensor(dtype, shape[-1], constant=True)
    if kind == "SkipSimplified":
        return kernel("SkipSimplifiedLayerNormalization", [x, x, scale], [shape], CONTRIB, epsilon=epsilon)
    bias = [scale] if generator.random() < 0.2 else []
    return kernel("SkipLayerNormalization", [x, x, scale, scale, *bias], [shape], CONTRIB, epsilon=epsilon)


def instance_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Of each channel of a signal, an image or a video, or of each group of channels, as a GroupNorm is exported: each group is
    one row."""
    sizes = Sizes(batch, generator)
    if generator.random() < 0.4:
        groups = pick([1, 2, 4, 8, 16, 32, 32], generator)
        shape: tuple[int, ...] = (batch, groups, max(sizes["c"] // groups, 1) * sizes["s"] * sizes["s"])
    else:
        shape = sizes.shape(str(generator.choice(["bcss", "bcl", "bcfss"], p=[0.6, 0.2, 0.2])))
    scale = tensor(dtype, shape[1], constant=True)
    return kernel("InstanceNormalization", [tensor(dtype, *shape), scale, scale], [shape], epsilon=as_float32(1e-5))


def batch_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A normalisation that no convolution before it could take in, of rows, a signal, an image or a video."""
    shape = Sizes(batch, generator).shape(str(generator.choice(["bcss", "bx", "bxt", "bcfss"], p=[0.7, 0.08, 0.1, 0.12])))
    scale = tensor(dtype, shape[1], constant=True)
    return kernel("BatchNormalization", [tensor(dtype, *shape), *[scale] * 4], [shape], epsilon=as_float32(1e-5),
                  momentum=as_float32(0.9), training_mode=0)


def softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Over the keys of attention, the classes, or another axis; also its logarithm."""
    sizes = Sizes(batch, generator)
    op = str(generator.choice(["Softmax", "LogSoftmax"], p=[0.65, 0.35]))
    letters, axis = [("Bhtt", -1), ("Bhtl", -1), ("Bhkd", -1), ("bkhtt", -1), ("bxt", -1), ("rx", -1), ("bx", -1),
                     ("bthd", 1), ("bhtd", -2), ("bkx11", 1), ("bcss", 1), ("btlh", 2)][int(generator.choice(
                         12, p=[0.36, 0.12, 0.05, 0.05, 0.08, 0.08, 0.05, 0.05, 0.04, 0.04, 0.04, 0.04]))]
    shape = sizes.shape(letters)
    return kernel(op, [tensor(dtype, *shape)], [shape], axis=axis)


def biased_softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Over the keys of attention, to which a mask (of each image, or of all) or a table (for each head) is added.

    `is_inner_broadcast` says that the mask is broadcast along the axes before the last, else along the first ones.
    """
    images, heads, count, _ = tokens(batch, generator)
    keys = count if generator.random() < 0.7 else tokens(batch, generator)[2]
    if generator.random() < 0.2:
        shape: tuple[int, ...] = (images * heads, count, keys)
        forms: list[tuple[tuple[int, ...], int]] = [((count, keys), 0), (shape, 1)]
    else:
        shape = (images, heads, count, keys)
        forms = [((images, 1, 1, keys), 1), ((1, 1, count, keys), 0), ((1, heads, count, keys), 0), ((heads, count, keys), 0),
                 (shape, 1)]
    bias, inner = forms[int(generator.integers(len(forms)))]
    operands = [tensor(dtype, *shape), tensor(dtype, *bias, constant=bool(generator.random() < 0.6))]
    return kernel("BiasSoftmax", operands, [shape], CONTRIB, axis=len(shape) - 1, is_inner_broadcast=inner)
