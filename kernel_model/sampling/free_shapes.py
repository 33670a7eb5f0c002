"""Kernels of no model: the operators that image models are made of, their sizes drawn from the ranges that people use.

A sampled kernel close to those of one model family says little about a family unlike it: without RegNet no grouped convolution
of 24 channels per group is near anything. These kernels name no family, and nothing measured steers how they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ort_analysis.records.kernel_record import Kernel, KernelInput, Tensor
from ort_analysis.records.kernel_types import describe_kernel

SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 24, 27, 28, 32, 35, 36, 40, 48, 55, 56, 64, 72, 75, 80, 96,
         109, 112, 128, 144, 149, 150, 160, 192, 224, 256, 288, 320)
HALVED = (7, 14, 28, 56, 112, 224)  # an image of 224, halved again and again
CHANNEL_MULTIPLES, MULTIPLE_WEIGHTS = (2, 8, 16, 32, 64), (0.08, 0.34, 0.2, 0.18, 0.2)
POWERS = (16, 32, 64, 128, 256, 512, 1024, 2048)
WINDOWS, WINDOW_WEIGHTS = ((1, 1), (3, 3), (5, 5), (7, 7), (1, 7), (7, 1), (1, 3), (3, 1), (2, 2), (11, 11)), (
    0.38, 0.42, 0.06, 0.04, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01)
GROUP_WIDTHS = (2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 168, 232, 264)
ROWS = (16, 49, 50, 64, 144, 196, 197, 256, 784, 3136)  # tokens of an image, or pixels
WIDTH_SIDE = 3584  # channels × side of a typical image inside a network: 64 at 56, 512 at 7
OPSET = 20  # of the operators below, as torch exports them now
CONTRIB = "com.microsoft"
FLOATS = ("float32", "float16")
Generator = np.random.Generator


def _log_uniform(low: float, high: float, generator: Generator) -> float:
    return float(np.exp(generator.uniform(np.log(low), np.log(high))))


def channels(generator: Generator, low: float = 8, high: float = 2560) -> int:
    """A number of channels: a power of two or a multiple of a small number, all magnitudes alike."""
    size = _log_uniform(low, high, generator)
    if generator.random() < 0.25:
        return min(POWERS, key=lambda power: abs(np.log(power / size)))
    multiple = int(generator.choice(CHANNEL_MULTIPLES, p=MULTIPLE_WEIGHTS))
    return max(multiple, round(size / multiple) * multiple)


def channels_at(near: int, generator: Generator) -> int:
    """Channels of an image of that side: networks give small images many and large ones few; some draws heed nothing."""
    if generator.random() < 0.2:
        return channels(generator)
    usual = WIDTH_SIDE / max(near, 2)
    return channels(generator, min(max(usual / 8, 8), 512), min(max(usual * 6, 64), 2560))


def side(generator: Generator) -> int:
    """An image side, small ones as often as large ones."""
    return int(generator.choice(HALVED if generator.random() < 0.4 else SIDES))


def _float32(value: float) -> float:
    """As a model's file holds it, so that the same kernel has one id."""
    return float(np.float32(value))


def _tensor(dtype: str, *shape: int, constant: bool = False) -> KernelInput:
    return KernelInput(dtype=dtype, shape=shape, constant=constant)


def _numbers(*values: int) -> KernelInput:
    return KernelInput(dtype="int64", shape=(len(values),), constant=True, values=values)


def _kernel(op_type: str, inputs: Sequence[KernelInput], outputs: Sequence[Sequence[int]], domain: str = "",
            **attributes: Any) -> Kernel:
    return describe_kernel(op_type, domain, 1 if domain == CONTRIB else OPSET, attributes, inputs,
                           [Tensor(dtype=inputs[0].dtype, shape=tuple(shape)) for shape in outputs])


def convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Dense, depthwise, grouped, the first of a network, or one that cuts an image into patches; mostly with a bias."""
    kind = generator.choice(["dense", "depthwise", "grouped", "first", "patches"], p=[0.52, 0.18, 0.2, 0.05, 0.05])
    height = width = side(generator)
    if generator.random() < 0.1:
        width = side(generator)
    window = [int(size) for size in WINDOWS[int(generator.choice(len(WINDOWS), p=WINDOW_WEIGHTS))]]
    stride = int(generator.choice([1, 2], p=[0.8, 0.2]))
    cin, cout, group = channels_at(height, generator), channels_at(height // stride, generator), 1
    if kind == "depthwise":
        cin = cout = group = channels_at(height, generator)
        window = [int(generator.choice([3, 5, 7], p=[0.5, 0.25, 0.25]))] * 2
    elif kind == "grouped":
        wide = int(generator.choice(GROUP_WIDTHS))
        group = max(2, round(channels_at(height // stride, generator) / wide))
        cin = cout = wide * group
        window = [int(generator.choice([1, 3, 5], p=[0.05, 0.9, 0.05]))] * 2
    elif kind == "first":
        cin, cout = 3, channels(generator, 8, 128)
        height = width = int(generator.choice([size for size in SIDES if size >= 96]))
        window = [int(generator.choice([3, 4, 7, 11], p=[0.4, 0.15, 0.35, 0.1]))] * 2
        stride = int(generator.choice([1, 2, 4], p=[0.2, 0.55, 0.25]))
    elif kind == "patches":
        patch = int(generator.choice([2, 4, 8, 14, 16, 32]))
        cells = int(generator.integers(2, 25)) if patch > 2 else side(generator) // 2 + 1
        height = width = patch * cells
        cin, cout = (3, channels(generator, 32, 1280)) if patch > 2 else (channels_at(height, generator),
                                                                         channels_at(cells, generator))
        window, stride = [patch, patch], patch
    pads = [0, 0] if kind == "patches" or generator.random() < 0.06 else [size // 2 for size in window]
    out = [max((size + 2 * pad - k) // stride + 1, 0) for size, pad, k in zip((height, width), pads, window, strict=True)]
    inputs = [_tensor(dtype, batch, cin, height, width), _tensor(dtype, cout, cin // group, *window, constant=True)]
    if generator.random() < 0.85:
        inputs.append(_tensor(dtype, cout, constant=True))
    return _kernel("Conv", inputs, [(batch, cout, *out)], kernel_shape=window, strides=[stride] * 2, pads=[*pads, *pads],
                   dilations=[1, 1], group=group, auto_pad="NOTSET")


def gemm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A matrix product with a constant matrix: a classifier's, with a row an image, or a transformer's, a row a token."""
    rows = batch * (1 if generator.random() < 0.25 else int(generator.choice(ROWS)))
    depth, columns = channels(generator, 32, 4096), channels(generator, 32, 4096)
    if generator.random() < 0.1:
        columns = 1000
    transposed = generator.random() < 0.4
    inputs = [_tensor(dtype, rows, depth),
              _tensor(dtype, *((columns, depth) if transposed else (depth, columns)), constant=True)]
    if generator.random() < 0.85:
        inputs.append(_tensor(dtype, columns, constant=True))
    return _kernel("Gemm", inputs, [(rows, columns)], alpha=1.0, beta=1.0, transA=0, transB=int(transposed))


def tokens(batch: int, generator: Generator) -> tuple[int, int, int, int]:
    """Images or windows, heads, tokens of each, and the width of a head, as attention takes them."""
    windows = int(generator.choice([1, 1, 1, 4, 16, 64]))
    count = int(generator.choice([16, 32, 49, 50, 64, 65, 100, 144, 145, 196, 197, 256, 257, 400]))
    return batch * windows, int(generator.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])), count, int(
        generator.choice([16, 24, 32, 48, 64, 80, 96, 128]))


def batched_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Attention's products: queries by keys (scaled, as ORT fuses it), or weights by values."""
    images, heads, count, width = tokens(batch, generator)
    lead = (images, heads)
    if generator.random() < 0.5:
        return _kernel("FusedMatMul", [_tensor(dtype, *lead, count, width), _tensor(dtype, *lead, width, count)],
                       [(*lead, count, count)], CONTRIB, alpha=_float32(width ** -0.5),
                       transA=0, transB=0, transBatchA=0, transBatchB=0)
    return _kernel("MatMul", [_tensor(dtype, *lead, count, count), _tensor(dtype, *lead, count, width)],
                   [(*lead, count, width)])


def softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Over the keys of attention."""
    images, heads, count, _ = tokens(batch, generator)
    shape = (images, heads, count, count)
    return _kernel("Softmax", [_tensor(dtype, *shape)], [shape], axis=-1)


def layer_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Over the channels of tokens, or of an image whose channels come last; also with the addition before it."""
    near = side(generator)
    wide = channels_at(near, generator)
    shape = (batch, near, near, wide) if generator.random() < 0.5 else (batch, tokens(1, generator)[2], wide)
    x, scale = _tensor(dtype, *shape), _tensor(dtype, wide, constant=True)
    if len(shape) == 3 and generator.random() < 0.4:
        return _kernel("SkipLayerNormalization", [x, x, scale, scale], [shape], CONTRIB, epsilon=_float32(1e-6))
    return _kernel("LayerNormalization", [x, scale, scale], [shape], axis=-1, epsilon=_float32(1e-6), stash_type=1)


def activation(dtype: str, batch: int, generator: Generator) -> Kernel:
    """One value in, one out; of an image or of tokens."""
    near = side(generator)
    image = (batch, channels_at(near, generator), near, near)
    shape = image if generator.random() < 0.75 else (batch, tokens(1, generator)[2], channels(generator, 64, 5120))
    x = _tensor(dtype, *shape)
    op = str(generator.choice(["Relu", "Clip", "QuickGelu", "Gelu", "Sigmoid", "HardSigmoid", "HardSwish"],
                              p=[0.25, 0.2, 0.2, 0.15, 0.1, 0.05, 0.05]))
    if op == "Clip":
        bounds = [KernelInput(dtype=dtype, shape=(), constant=True, values=(value,)) for value in (0.0, 6.0)]
        return _kernel(op, [x, *bounds], [shape])
    if op == "QuickGelu":
        return _kernel(op, [x], [shape], CONTRIB, alpha=1.0)
    attributes: dict[str, dict[str, Any]] = {
        "Gelu": {"approximate": "none"}, "HardSigmoid": {"alpha": _float32(1 / 6), "beta": 0.5}}
    return _kernel(op, [x], [shape], **attributes.get(op, {}))


def arithmetic(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Two tensors in: of one shape, a scale for each channel of each image, or a constant for each of the last channels."""
    near = side(generator)
    wide = channels_at(near, generator)
    shape: tuple[int, ...] = (batch, wide, near, near)
    kind = generator.choice(["same", "scale", "last"], p=[0.5, 0.3, 0.2])
    op = str(generator.choice(["Add", "Mul", "Div", "Sub"], p=[0.4, 0.4, 0.1, 0.1] if kind == "same" else [0.5, 0.5, 0, 0]))
    other = _tensor(dtype, *shape)
    if kind == "scale":
        other = _tensor(dtype, batch, wide, 1, 1)
    elif kind == "last":
        shape = (batch, near, near, wide)
        other = _tensor(dtype, *((wide,) if op == "Add" else (1, 1, 1, wide)), constant=True)
    operands = [_tensor(dtype, *shape), other]
    return _kernel(op, operands[::-1] if generator.random() < 0.5 else operands, [shape])


def pool(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The largest or the mean of a window."""
    near, k = side(generator), int(generator.choice([2, 3]))
    wide = channels_at(near, generator)
    pad, stride = (1 if k == 3 and generator.random() < 0.5 else 0), int(generator.choice([1, 2]))
    out = max((near + 2 * pad - k) // stride + 1, 0)
    op = str(generator.choice(["MaxPool", "AveragePool"]))
    more = {"count_include_pad": 1} if op == "AveragePool" else {"storage_order": 0, "dilations": [1, 1]}
    return _kernel(op, [_tensor(dtype, batch, wide, near, near)], [(batch, wide, out, out)], kernel_shape=[k, k],
                   strides=[stride] * 2, pads=[pad] * 4, ceil_mode=0, auto_pad="NOTSET", **more)


def mean(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The mean of an image, or of tokens."""
    near = side(generator)
    wide = channels_at(near, generator)
    if generator.random() < 0.85:
        return _kernel("ReduceMean", [_tensor(dtype, batch, wide, near, near), _numbers(-1, -2)], [(batch, wide, 1, 1)],
                       keepdims=1, noop_with_empty_axes=0)
    return _kernel("ReduceMean", [_tensor(dtype, batch, near, near, wide), _numbers(1, 2)], [(batch, 1, 1, wide)],
                   keepdims=1, noop_with_empty_axes=0)


def norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The length of each vector of attention, or a sum or an extreme along the last axis."""
    images, heads, count, width = tokens(batch, generator)
    op = str(generator.choice(["ReduceL2", "ReduceSum", "ReduceMax"], p=[0.5, 0.25, 0.25]))
    return _kernel(op, [_tensor(dtype, images, count, heads, width), _numbers(3)], [(images, count, heads, 1)],
                   keepdims=1, noop_with_empty_axes=0)


def attention_sum(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Attention's products as an Einsum, with windows of an image apart or with images alone."""
    images, heads, count, width = tokens(batch, generator)
    windows = int(generator.choice([1, 4, 16, 64]))
    before = (max(images // windows, 1), windows, heads) if generator.random() < 0.7 else (images, heads)
    letters = "B G H" if len(before) == 3 else "B H"
    queries, weights = (*before, count, width), (*before, count, count)
    if generator.random() < 0.5:
        equation, operands, result = f"{letters} I D, {letters} J D -> {letters} I J", (queries, queries), weights
    else:
        equation, operands, result = f"{letters} I J, {letters} J D -> {letters} I D", (weights, queries), queries
    return _kernel("Einsum", [_tensor(dtype, *shape) for shape in operands], [result], equation=equation)


def pad(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An image filled up to whole windows, its channels last (often nothing is missing), or a border around it."""
    near, window = side(generator), int(generator.choice([7, 8]))
    wide = channels_at(near, generator)
    if generator.random() < 0.7:
        missing = -near % window
        shape, before, after = (batch, near, near, wide), (0, 0, 0, 0), (0, missing, missing, 0)
    else:
        border = int(generator.integers(1, 4))
        shape, before, after = (batch, wide, near, near), (0, 0, border, border), (0, 0, border, border)
    return _kernel("Pad", [_tensor(dtype, *shape), _numbers(*before, *after)],
                   [[sum(sizes) for sizes in zip(shape, before, after, strict=True)]], mode="constant")


def transpose(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Channels first to last and back, heads before tokens, the windows of an image, shuffled channels."""
    near = side(generator)
    wide = channels_at(near, generator)
    images, heads, count, width = tokens(batch, generator)
    window = int(generator.choice([7, 8]))
    tiles = max(near // window, 1)
    groups = int(generator.choice([2, 3, 4]))
    shape, order = [
        ((batch, wide, near, near), (0, 2, 3, 1)), ((batch, near, near, wide), (0, 3, 1, 2)),
        ((batch, wide, count), (0, 2, 1)), ((batch, count, wide), (1, 0, 2)), ((images, count, heads, width), (0, 2, 1, 3)),
        ((images, heads, count, width), (0, 1, 3, 2)), ((count, images * heads, width), (1, 0, 2)),
        ((images, count, 3, heads, width), (2, 0, 3, 1, 4)), ((batch, groups, wide, near, near), (0, 2, 1, 3, 4)),
        ((batch, tiles, window, tiles, window, wide), (0, 1, 3, 2, 4, 5)),
    ][int(generator.integers(10))]
    return _kernel("Transpose", [_tensor(dtype, *shape)], [[shape[axis] for axis in order]], perm=list(order))


def join(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Concat of images along their channels."""
    near = side(generator)
    parts = [max(channels_at(near, generator) // 2, 8) for _ in range(int(generator.integers(2, 9)))]
    return _kernel("Concat", [_tensor(dtype, batch, part, near, near) for part in parts], [(batch, sum(parts), near, near)],
                   axis=1)


def cut(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Split of an image's channels into halves, of tokens' into queries, keys and values, or of an image whose channels come
    last where its windows are shifted, into unequal parts."""
    near = side(generator)
    wide = channels_at(near, generator)
    kind = generator.choice(["halves", "three", "shifted"], p=[0.4, 0.3, 0.3])
    if kind == "halves":
        half = max(wide // 2, 8)
        return _kernel("Split", [_tensor(dtype, batch, 2 * half, near, near)], [(batch, half, near, near)] * 2, axis=1,
                       num_outputs=2)
    if kind == "three":
        images, _, count, _ = tokens(batch, generator)
        return _kernel("Split", [_tensor(dtype, images, count, 3 * wide)], [(images, count, wide)] * 3, axis=2, num_outputs=3)
    axis, last = int(generator.choice([1, 2])), min(int(generator.choice([3, 4])), near - 1)
    parts = [(batch, *((part, near) if axis == 1 else (near, part)), wide) for part in (near - last, last)]
    return _kernel("Split", [_tensor(dtype, batch, near, near, wide), _numbers(near - last, last)], parts, axis=axis)


def batch_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A normalisation that no convolution before it could take in."""
    near = side(generator)
    wide = channels_at(near, generator)
    return _kernel("BatchNormalization", [_tensor(dtype, batch, wide, near, near), *[_tensor(dtype, wide, constant=True)] * 4],
                   [(batch, wide, near, near)], epsilon=_float32(1e-5), momentum=_float32(0.9), training_mode=0)


Draw = Callable[[str, int, Generator], Kernel]
DRAWS: dict[Draw, float] = {  # how often; convolutions' times follow their shapes least simply
    convolution: 0.47, gemm: 0.1, batched_product: 0.06, activation: 0.06, arithmetic: 0.05, transpose: 0.06,
    layer_norm: 0.03, softmax: 0.02, pool: 0.03, mean: 0.02, norm: 0.01, join: 0.02, cut: 0.02, pad: 0.02,
    attention_sum: 0.01, batch_norm: 0.02}


def draw_free_kernel(batch: int, generator: Generator) -> Kernel:
    """A kernel of no model.

    Raises:
        ValueError: the sizes drawn leave nothing to put out.
    """
    draws = list(DRAWS)
    draw = draws[int(generator.choice(len(draws), p=list(DRAWS.values())))]
    kernel = draw(str(generator.choice(FLOATS, p=[0.6, 0.4])), batch, generator)
    if not all(output.elements for output in kernel.outputs):
        raise ValueError(f"{kernel.id}: no output")
    return kernel
