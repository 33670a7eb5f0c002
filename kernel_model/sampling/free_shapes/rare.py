"""Layers that networks have, at sizes that the other draws rarely give.

Channels that no library is tuned for, first layers of one channel, signals in groups, products of a few columns and very many
rows, attention to thousands of tokens, wide recurrent layers. Predictions of models of collections that were left out were
furthest off there; no size is taken from a model.
"""

from __future__ import annotations

from collections.abc import Sequence

from hase.kernel_model.sampling.free_shapes.forms import inferred
from hase.kernel_model.sampling.free_shapes.products import GATES, recurrent_layer
from hase.kernel_model.sampling.free_shapes.sizes import (
    CONTRIB,
    HEAD_WIDTHS,
    Generator,
    as_float32,
    kernel,
    log_uniform,
    pick,
    tensor,
    with_weight,
)
from hase.records.kernel_record import Kernel

LONGEST_SIDE = {1: 20000, 2: 256, 3: 64}  # by rank
BIASED = 0.8  # of convolutions and products
MOST_NUMBERS = 2.0 ** 26  # of an image with all its channels and its batch


def whole(low: float, high: float, generator: Generator) -> int:
    """A whole number, all magnitudes alike; half of them are multiples of eight."""
    size = round(log_uniform(low, high, generator))
    return max(8, size // 8 * 8) if generator.random() < 0.5 else size


def _sides(rank: int, least: int, numbers_each: int, generator: Generator) -> list[int]:
    """The sides of a signal, an image or a volume: all alike, as a rule. `numbers_each` lie at each place of it."""
    most = max(min(LONGEST_SIDE[rank], (MOST_NUMBERS / numbers_each) ** (1 / rank)), least + 1)
    side = max(least, round(log_uniform(max(least, 4), most, generator)))
    return [side] * rank if generator.random() < 0.6 else [
        max(least, int(side * generator.uniform(0.5, 1.3))) for _ in range(rank)]


def _convolved(dtype: str, batch: int, channels: tuple[int, int], group: int, window: Sequence[int], generator: Generator,
               strides: Sequence[int] = (1,), dilations: Sequence[int] = (1,)) -> Kernel:
    """A convolution of channels before and after; one stride and one dilation of those given."""
    rank, (before, after), dilation = len(window), channels, pick(dilations, generator)
    reach = [dilation * (size - 1) + 1 for size in window]
    pads = [size // 2 if generator.random() < 0.85 else 0 for size in reach]
    image = tensor(dtype, batch, before, *_sides(rank, max(reach), batch * max(channels), generator))
    inputs = with_weight(image, (after, before // group, *window), after, BIASED, generator)
    return inferred("Conv", inputs, kernel_shape=list(window), strides=[pick(strides, generator)] * rank, pads=[*pads, *pads],
                    dilations=[dilation] * rank, group=group)


def convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Dense, of any channels, of a signal, an image or a volume."""
    rank = int(generator.choice([1, 2, 3], p=[0.4, 0.4, 0.2]))
    wide = pick([1, 2, 3, 3, 3, 4, 5, 7] if rank > 1 else [1, 2, 3, 3, 5, 7, 9, 16, 31, 63], generator)
    most = {1: 1024, 2: 768, 3: 256}[rank]
    return _convolved(dtype, batch, (whole(3, most, generator), whole(3, most, generator)), 1, [wide] * rank, generator,
                      [1, 1, 1, 2], [1, 1, 1, 1, 2, 4, 8])


def transposed_convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The same for one that makes an image larger, or keeps its size."""
    rank = int(generator.choice([1, 2, 3], p=[0.45, 0.4, 0.15]))
    before, after, wide = whole(3, 640, generator), whole(3, 640, generator), pick([2, 3, 4, 5, 7, 9, 16], generator)
    stride, pad = min(wide, pick([1, 1, 2, 4], generator)), (wide - 1) // 2 if generator.random() < 0.6 else 0
    inputs = [tensor(dtype, batch, before, *_sides(rank, wide, 4 * batch * max(before, after), generator)),
              tensor(dtype, before, after, *[wide] * rank, constant=True)]
    return inferred("ConvTranspose", inputs, kernel_shape=[wide] * rank, strides=[stride] * rank, pads=[pad] * 2 * rank,
                    dilations=[1] * rank, output_padding=[0] * rank, group=1)


def first_layer(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Of one to four channels."""
    rank = int(generator.choice([1, 2, 3], p=[0.4, 0.25, 0.35]))
    wide = pick({1: [3, 5, 7, 10, 10, 16, 25, 64], 2: [3, 3, 4, 5, 7, 7, 9, 11], 3: [3, 3, 3, 5, 7]}[rank], generator)
    channels = pick([1, 1, 1, 2, 3, 4], generator), whole(8, 768, generator)
    return _convolved(dtype, batch, channels, 1, [wide] * rank, generator, [1, 1, 2, 5] if rank == 1 else [1, 2])


def grouped_signal(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Of a signal, in few groups: products of each group alone, or windows as wide as a position embedding."""
    group = pick([2, 3, 4, 6, 8, 12, 16, 32, 64], generator)
    before = group * max(1, whole(64, 3072, generator) // group)
    if generator.random() < 0.45:
        after = pick([before, before, 4 * before, group * max(1, before // (4 * group))], generator)
        return _convolved(dtype, batch, (before, after), group, [1], generator)
    wide = pick([3, 5, 7, 9, 15, 19, 31, 32, 64, 95, 96, 128], generator)
    return _convolved(dtype, batch, (before, before), group, [wide], generator, [1, 1, 1, 2])


def grouped_image(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Of an image, in groups of two channels to a few dozen."""
    width, group = whole(2, 96, generator), max(2, round(log_uniform(2, 96, generator)))
    after = width if generator.random() < 0.7 else pick([1, 2 * width, max(1, width // 2)], generator)
    return _convolved(dtype, batch, (group * width, group * after), group, [pick([1, 3, 3, 3, 5, 7], generator)] * 2, generator,
                      [1, 1, 2])


def thin_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Very many rows by a constant matrix of a few rows and columns."""
    rows, depth, columns = (round(log_uniform(low, high, generator)) for low, high in ((1e3, 2e6), (1, 96), (1, 96)))
    return _product(dtype, rows, depth, columns, generator)


def deep_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A few rows by a large constant matrix."""
    rows, depth, columns = batch * pick([1, 1, 2, 7], generator), whole(1024, 32768, generator), whole(32, 8192, generator)
    return _product(dtype, rows, depth, columns, generator)


def _product(dtype: str, rows: int, depth: int, columns: int, generator: Generator) -> Kernel:
    """With a constant matrix: as MatMul, or as Gemm, with a bias or without."""
    turned = bool(generator.random() < 0.5)
    if generator.random() < 0.3:
        return inferred("MatMul", [tensor(dtype, rows, depth), tensor(dtype, depth, columns, constant=True)])
    weight = (columns, depth) if turned else (depth, columns)
    return inferred("Gemm", with_weight(tensor(dtype, rows, depth), weight, columns, BIASED, generator), transB=int(turned))


def attention_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Queries by keys, or weights by values, of hundreds or thousands of tokens; half of them of one query."""
    heads, width = pick([1, 2, 3, 4, 6, 8, 12, 14, 16, 32], generator), pick([*HEAD_WIDTHS, 192, 256], generator)
    keys = round(log_uniform(128, 8193, generator))
    queries, shared = (1 if generator.random() < 0.5 else min(keys, 4096)), heads if generator.random() < 0.8 else 1
    if generator.random() < 0.5:
        return inferred("MatMul", [tensor(dtype, batch, heads, queries, keys), tensor(dtype, batch, shared, keys, width)])
    return kernel("FusedMatMul", [tensor(dtype, batch, heads, queries, width), tensor(dtype, batch, shared, width, keys)],
                  [(batch, heads, queries, keys)], CONTRIB, alpha=as_float32(width ** -0.5), transA=0, transB=0, transBatchA=0,
                  transBatchB=0)


def softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Over thousands of keys, or over a few heads of each pair of tokens."""
    heads, count = pick([1, 2, 3, 4, 6, 8, 12, 16], generator), round(log_uniform(64, 4096, generator))
    shape = (batch, count, count, heads) if generator.random() < 0.25 else (batch, heads, count, count)
    return inferred("Softmax", [tensor(dtype, *shape)], axis=pick([-1, -1, -1, -2, 1], generator) % 4)


def recurrent(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Wide layers of one sequence or of many."""
    op = str(generator.choice(list(GATES), p=[0.45, 0.3, 0.25]))
    steps, hidden = round(log_uniform(4, 256, generator)), whole(192, 2048, generator)
    directions = 2 if generator.random() < 0.3 else 1
    wide = hidden * directions if generator.random() < 0.5 else whole(32, 2048, generator)
    return recurrent_layer(op, dtype, steps, batch, wide, hidden, directions, begins=bool(generator.random() < 0.8),
                           last_states=bool(generator.random() < 0.7))


def channel_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Of each channel of a signal, an image or a volume."""
    rank, channels = pick([1, 2, 3, 3], generator), whole(8, 768, generator)
    scale = tensor(dtype, channels, constant=True)
    return inferred("InstanceNormalization", [tensor(dtype, batch, channels, *_sides(rank, 1, batch * channels, generator)),
                                              scale, scale])
