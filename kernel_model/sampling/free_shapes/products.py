"""Convolutions and pools, matrix products, and recurrent layers of free shapes."""

from __future__ import annotations

from typing import Any

from hase.kernel_model.sampling.free_shapes.sizes import (
    ABSENT,
    CONTRIB,
    HEADS,
    SIDES,
    TOKENS,
    Generator,
    Sizes,
    as_float32,
    channels,
    channels_at,
    kernel,
    log_uniform,
    pick,
    side,
    tensor,
    tokens,
    with_weight,
)
from hase.records.kernel_record import Kernel

WINDOWS, WINDOW_WEIGHTS = ((1, 1), (3, 3), (5, 5), (7, 7), (1, 7), (7, 1), (1, 3), (3, 1), (2, 2), (11, 11)), (
    0.38, 0.42, 0.06, 0.04, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01)
BIASED = 0.85  # of convolutions and products
GROUP_WIDTHS = (2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 168, 232, 264)
FRAMES = (1, 2, 4, 8, 16, 32)
VIDEO_WINDOWS = ((1, 1, 1), (3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 7, 7), (7, 7, 7), (3, 7, 7), (2, 2, 2), (5, 1, 1))
ROWS = (16, 49, 50, 64, 144, 196, 197, 256, 784, 3136)  # tokens of an image, or pixels
LONG = (1125, 1569, 2048, 3136, 4096, 6272)  # tokens of a video, a large image, a long text
SUMS = (  # equation, operands by the letters of `Sizes`, and whether the second is a weight
    ("ibnd,jbnd->bnij", "tbhd", "lbhd", "bhtl", False), ("bnij,jbnd->ibnd", "bhtl", "lbhd", "tbhd", False),
    ("ibh,hnd->ibnd", "tbx", "xhd", "tbhd", True), ("ibnd,hnd->ibh", "tbhd", "xhd", "tbx", True),
    ("byhwc,hkc->byhwk", "bhssd", "std", "bhsst", True), ("byhwc,wkc->byhwk", "bhssd", "std", "bhsst", True),
    ("bhid,bhjd->bhij", "bhtd", "bhld", "bhtl", False), ("bijk,jkd->bijd", "bswd", "wdx", "bswx", True))
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
HIDDEN = (16, 32, 48, 64, 96, 100, 128, 192, 256, 300, 384, 512, 640, 768, 1024, 1536)


def convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Dense, depthwise, grouped, the first of a network, or one that cuts an image into patches; mostly with a bias."""
    kind = generator.choice(["dense", "depthwise", "grouped", "first", "patches"], p=[0.51, 0.17, 0.2, 0.05, 0.07])
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
        wide = pick(GROUP_WIDTHS, generator)
        group = max(2, round(channels_at(height // stride, generator) / wide))
        cin = cout = wide * group
        window = [int(generator.choice([1, 3, 5], p=[0.05, 0.9, 0.05]))] * 2
    elif kind == "first":
        cin, cout = 3, channels(generator, 8, 128)
        height = width = pick([size for size in SIDES if size >= 96], generator)
        window = [int(generator.choice([3, 4, 7, 11], p=[0.4, 0.15, 0.35, 0.1]))] * 2
        stride = int(generator.choice([1, 2, 4], p=[0.2, 0.55, 0.25]))
    elif kind == "patches":
        patch = pick([2, 4, 8, 14, 16, 32], generator)
        cells = int(generator.integers(2, 25)) if patch > 2 else side(generator) // 2 + 1
        height = width = patch * cells
        if patch == 2 or (patch < 14 and generator.random() < 0.5):  # within a network: attention to fewer pixels
            cin, cout = channels_at(height, generator), channels_at(cells, generator)
        else:
            cin, cout = 3, channels(generator, 32, 1280)
        window, stride = [patch, patch], patch
    pads = [0, 0] if kind == "patches" or generator.random() < 0.06 else [size // 2 for size in window]
    out = [max((size + 2 * pad - k) // stride + 1, 0) for size, pad, k in zip((height, width), pads, window, strict=True)]
    inputs = with_weight(tensor(dtype, batch, cin, height, width), (cout, cin // group, *window), cout, BIASED, generator)
    return kernel("Conv", inputs, [(batch, cout, *out)], kernel_shape=window, strides=[stride] * 2, pads=[*pads, *pads],
                  dilations=[1, 1], group=group, auto_pad="NOTSET")


def signal_convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Of a signal: dense, dilated, depthwise, the first of a network, or over tokens; grouped ones also instead of products, or
    as wide as a position embedding."""
    length = round(log_uniform(16, 16384, generator))
    kind = generator.choice(["dense", "dilated", "depthwise", "grouped", "first"], p=[0.3, 0.1, 0.28, 0.22, 0.1])
    wide = channels_at(max(int(length ** 0.5), 2), generator)
    k, stride, dilation, cin, cout, group = pick([1, 3, 5, 7, 9], generator), pick([1, 1, 1, 2], generator), 1, wide, wide, 1
    if kind == "dense":
        cout = channels(generator, 16, 2048)
    elif kind == "dilated":
        k, stride, dilation = 3, 1, pick([2, 4, 8, 16, 32, 64, 128], generator)
    elif kind == "depthwise":
        k, group = pick([3, 4, 7, 9, 15, 31, 31, 51], generator), wide
    elif kind == "grouped":
        group, k, stride = pick([2, 4, 8, 16, 32], generator), pick([1, 1, 1, 3, 5, 9, 31, 128], generator), 1
        cin = group * max(channels(generator, 64, 3072) // group, 1)
        cout = pick([cin, cin, 4 * cin, group * max(cin // (4 * group), 1)], generator) if k == 1 else cin
        length = min(length, 4096)
    else:
        cin, cout, k, stride = pick([1, 80], generator), channels(generator, 16, 512), pick([3, 10, 11, 25], generator), pick(
            [1, 2, 5], generator)
        length *= stride
    pad = dilation * (k - 1) // 2
    out = (length + 2 * pad - dilation * (k - 1) - 1) // stride + 1
    inputs = with_weight(tensor(dtype, batch, cin, length), (cout, cin // group, k), cout, BIASED, generator)
    return kernel("Conv", inputs, [(batch, cout, max(out, 0))], kernel_shape=[k], strides=[stride], pads=[pad, pad],
                  dilations=[dilation], group=group, auto_pad="NOTSET")


def video_convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Of a video or a volume: dense, depthwise, or the first of a network."""
    near, frames = min(side(generator), 128), pick(FRAMES, generator)
    if generator.random() < 0.25:
        frames = near  # a volume
    window, strides = list(VIDEO_WINDOWS[int(generator.choice(len(VIDEO_WINDOWS), p=(
        0.28, 0.25, 0.16, 0.1, 0.05, 0.03, 0.05, 0.05, 0.03)))]), [1, 1, 1]
    cin, cout, group = min(channels_at(near, generator), 1024), min(channels_at(near, generator), 1024), 1
    if generator.random() < 0.12:
        cin = pick([1, 3], generator)
    elif generator.random() < 0.12:
        cin = cout = group = cout
        window = [3, 3, 3]
    if generator.random() < 0.25 or window == [2, 2, 2]:
        strides = [pick([1, 2], generator), 2, 2]
    pads = [0, 0, 0] if window == [2, 2, 2] else [size // 2 for size in window]
    out = [max((size + 2 * pad - k) // stride + 1, 0)
           for size, pad, k, stride in zip((frames, near, near), pads, window, strides, strict=True)]
    inputs = with_weight(tensor(dtype, batch, cin, frames, near, near), (cout, cin // group, *window), cout, BIASED, generator)
    return kernel("Conv", inputs, [(batch, cout, *out)], kernel_shape=window, strides=strides, pads=[*pads, *pads],
                  dilations=[1, 1, 1], group=group, auto_pad="NOTSET")


def transposed_convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """One that makes an image or a signal larger."""
    rank = int(generator.choice([1, 2, 3], p=[0.12, 0.76, 0.12]))
    near = min(side(generator), 160) if rank > 1 else round(log_uniform(16, 4096, generator))
    k, stride, pad = [(2, 2, 0), (4, 4, 0), (4, 2, 1), (3, 2, 1), (3, 1, 1), (16, 8, 4)][int(generator.choice(
        6, p=[0.36, 0.14, 0.2, 0.12, 0.08, 0.1]))]
    if rank == 3:
        near, k, stride, pad = min(near, 48), 2, 2, 0
    more = stride - 1 if k == 3 else 0  # to exactly `stride` times as large
    cin = channels_at(near, generator)
    cout = max(8, cin // pick([1, 2, 2, 4, 8], generator))
    out = (near - 1) * stride + k - 2 * pad + more
    inputs = with_weight(tensor(dtype, batch, cin, *[near] * rank), (cin, cout, *[k] * rank), cout, BIASED, generator)
    return kernel("ConvTranspose", inputs, [(batch, cout, *[out] * rank)], kernel_shape=[k] * rank, strides=[stride] * rank,
                  pads=[pad] * 2 * rank, output_padding=[more] * rank, dilations=[1] * rank, group=1, auto_pad="NOTSET")


def pool(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The largest or the mean of a window of an image, a signal or a video."""
    rank = int(generator.choice([1, 2, 3], p=[0.12, 0.7, 0.18]))
    near, k = side(generator), pick([2, 3], generator)
    wide, sizes = channels_at(near, generator), [near] * rank
    if rank == 3:
        near = min(near, 112)
        sizes = [pick(FRAMES, generator), near, near]
    elif rank == 1:
        sizes = [near * near]
    window = [k] * rank if rank < 3 or generator.random() < 0.6 else [1, k, k]
    pad, stride = (1 if k == 3 and generator.random() < 0.5 else 0), pick([1, 2], generator)
    strides = [stride if size > 1 else 1 for size in window]
    pads = [pad if size > 1 else 0 for size in window]
    out = [max((size + 2 * p - w) // s + 1, 0) for size, p, w, s in zip(sizes, pads, window, strides, strict=True)]
    op = str(generator.choice(["MaxPool", "AveragePool"]))
    more = {"count_include_pad": 1} if op == "AveragePool" else {"storage_order": 0, "dilations": [1] * rank}
    return kernel(op, [tensor(dtype, batch, wide, *sizes)], [(batch, wide, *out)], kernel_shape=window,
                  strides=strides, pads=[*pads, *pads], ceil_mode=0, auto_pad="NOTSET", **more)


def global_pool(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The mean or the largest of a whole image."""
    near = side(generator)
    wide = channels_at(near, generator)
    sizes = (near, near) if generator.random() < 0.8 else (pick(FRAMES, generator), near, near)
    return kernel(str(generator.choice(["GlobalAveragePool", "GlobalMaxPool"])), [tensor(dtype, batch, wide, *sizes)],
                  [(batch, wide, *[1] * len(sizes))])


def gemm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A matrix product with a constant matrix: a classifier's, with a row an image, or a transformer's, a row a token."""
    rows = batch * (1 if generator.random() < 0.25 else pick(ROWS, generator))
    depth, columns = channels(generator, 32, 4096), channels(generator, 32, 4096)
    if generator.random() < 0.1:
        columns = pick([1, 2, 10, 1000], generator)
    if generator.random() < 0.12:  # from heads to heads, for each pair of tokens
        rows, depth, columns = batch * pick(TOKENS[:18], generator) ** 2, pick(HEADS, generator), pick(HEADS, generator)
    transposed = generator.random() < 0.4
    weight = (columns, depth) if transposed else (depth, columns)
    inputs = with_weight(tensor(dtype, rows, depth), weight, columns, BIASED, generator)
    return kernel("Gemm", inputs, [(rows, columns)], alpha=1.0, beta=1.0, transA=0, transB=int(transposed))


def layer_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Tokens, or an image whose channels come last, by a constant matrix, without a bias."""
    sizes = Sizes(batch, generator)
    lead = sizes.shape(str(generator.choice(["bt", "bss", "bnw", "r"], p=[0.6, 0.2, 0.1, 0.1])))
    depth, columns = channels(generator, 32, 5120), channels(generator, 32, 5120)
    if generator.random() < 0.04:
        columns = sizes["v"]
    return kernel("MatMul", [tensor(dtype, *lead, depth), tensor(dtype, depth, columns, constant=True)], [(*lead, columns)])


def batched_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Attention's products: queries by keys (scaled, as ORT fuses it), or weights by values; of three to five dimensions.

    Some have as many keys as another image has, share keys among heads, attend to a long sequence, or take one query, as a
    decoder does, which may have a long cache.
    """
    images, heads, count, width = tokens(batch, generator)
    if generator.random() < 0.1:
        count = pick(LONG, generator)
    lead = [(images, heads), (images * heads,), (images, heads, pick([2, 4, 16], generator))][int(generator.choice(
        3, p=[0.75, 0.13, 0.12]))]
    keys = count if generator.random() < 0.6 else tokens(batch, generator)[2] + pick([0, 1], generator)
    queries = 1 if generator.random() < 0.12 else count
    if queries == 1 and generator.random() < 0.5:
        keys = pick(LONG, generator) + pick([0, 1], generator)
    shared = (lead[0], *[1] * (len(lead) - 1)) if len(lead) == 2 and generator.random() < 0.08 else lead
    if generator.random() < 0.5:
        turned = generator.random() < 0.35
        return kernel("FusedMatMul", [tensor(dtype, *lead, queries, width),
                                      tensor(dtype, *shared, *((keys, width) if turned else (width, keys)))],
                      [(*lead, queries, keys)], CONTRIB, alpha=as_float32(width ** -0.5),
                      transA=0, transB=int(turned), transBatchA=0, transBatchB=0)
    if generator.random() < 0.2:
        return kernel("FusedMatMul", [tensor(dtype, *lead, keys, queries), tensor(dtype, *shared, keys, width)],
                      [(*lead, queries, width)], CONTRIB, alpha=1.0, transA=1, transB=0, transBatchA=0, transBatchB=0)
    return kernel("MatMul", [tensor(dtype, *lead, queries, keys), tensor(dtype, *shared, keys, width)],
                  [(*lead, queries, width)])


def attention_sum(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Attention's products as an Einsum, with windows of an image apart or with images alone."""
    images, heads, count, width = tokens(batch, generator)
    windows = pick([1, 4, 16, 64], generator)
    before = (max(images // windows, 1), windows, heads) if generator.random() < 0.7 else (images, heads)
    letters = "B G H" if len(before) == 3 else "B H"
    queries, weights = (*before, count, width), (*before, count, count)
    if generator.random() < 0.5:
        equation, operands, result = f"{letters} I D, {letters} J D -> {letters} I J", (queries, queries), weights
    else:
        equation, operands, result = f"{letters} I J, {letters} J D -> {letters} I D", (weights, queries), queries
    return kernel("Einsum", [tensor(dtype, *shape) for shape in operands], [result], equation=equation)


def sum_of_products(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An Einsum as language models and vision transformers write it."""
    sizes = Sizes(batch, generator)
    equation, left, right, result, constant = SUMS[int(generator.integers(len(SUMS)))]
    return kernel("Einsum", [tensor(dtype, *sizes.shape(left)), tensor(dtype, *sizes.shape(right), constant=constant)],
                  [sizes.shape(result)], equation=equation)


def recurrent_layer(op: str, dtype: str, steps: int, rows: int, wide: int, hidden: int, directions: int = 1,
                    begins: bool = False, last_states: bool = True) -> Kernel:
    """A layer over `steps` steps of `rows` sequences, `wide` numbers each.

    Args:
        op: LSTM, GRU or RNN.
        dtype: of all tensors.
        steps, rows, wide: of the input.
        hidden: numbers of a state.
        directions: 1, or 2 for a layer that also runs backwards.
        begins: whether it is given the states that it begins with.
        last_states: whether it also puts out the last states, and not the sequence alone.
    """
    gates, state = GATES[op] * hidden, tensor(dtype, directions, rows, hidden, constant=True)
    inputs = [tensor(dtype, steps, rows, wide), tensor(dtype, directions, gates, wide, constant=True),
              tensor(dtype, directions, gates, hidden, constant=True), tensor(dtype, directions, 2 * gates, constant=True)]
    if begins:
        inputs += [ABSENT, state, *([state] if op == "LSTM" else [])]
    last = (directions, rows, hidden)
    outputs = [(steps, directions, rows, hidden), last, *([last] if op == "LSTM" else [])]
    of_operator: dict[str, dict[str, Any]] = {"LSTM": {"input_forget": 0}, "GRU": {"linear_before_reset": 1},
                                              "RNN": {"activations": ["Tanh"] * directions}}
    return kernel(op, inputs, outputs if last_states else outputs[:1], hidden_size=hidden, layout=0,
                  direction="bidirectional" if directions == 2 else "forward", **of_operator[op])


def recurrent(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A layer over a sequence of words, frames, or the rows of an image; in one direction or both."""
    op = str(generator.choice(list(GATES), p=[0.42, 0.33, 0.25]))
    steps, directions = max(1, round(log_uniform(1, 512, generator))), 2 if generator.random() < 0.4 else 1
    rows = batch * (pick([14, 28, 56], generator) if generator.random() < 0.15 else 1)  # of an image, each a sequence
    hidden = pick(HIDDEN, generator)
    wide = hidden * directions if generator.random() < 0.4 else channels(generator, 16, 1024)
    begins, last_states = generator.random() < 0.8, generator.random() >= 0.3
    return recurrent_layer(op, dtype, steps, rows, wide, hidden, directions, begins, last_states)
