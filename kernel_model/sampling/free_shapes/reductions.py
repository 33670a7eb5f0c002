"""Sums, means and extremes along axes."""

from __future__ import annotations

from kernel_model.sampling.free_shapes.sizes import (
    Generator,
    Sizes,
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
from records.kernel_record import Kernel, Tensor

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
    found = (*shape[:-1], count)
    return kernel("TopK", [tensor(dtype, *shape), numbers(count)], [found, Tensor(dtype="int64", shape=found)], axis=-1,
                  largest=1, sorted=1)
