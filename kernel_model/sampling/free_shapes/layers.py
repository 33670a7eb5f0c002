"""Draws layers of networks: convolutions, pools, products, recurrent layers, reductions and normalisations.

The last functions draw sizes that are rare elsewhere: channels that no library is tuned for, first layers of one channel,
grouped signals, products with few columns and very many rows, attention to thousands of tokens, wide recurrent layers.
Predictions for held-out model collections had their largest errors there; no size is copied from a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hase.kernel_model.sampling.free_shapes.sizes import (
    ABSENT,
    CONTRIB,
    HEAD_WIDTHS,
    HEADS,
    SIDES,
    TOKENS,
    Generator,
    SizesByLetter,
    as_float32,
    channels,
    channels_at,
    heads_and_tokens,
    inferred,
    kernel,
    log_uniform,
    numbers,
    pick,
    scalar,
    side,
    tensor,
    with_weight,
)
from hase.records.kernel_record import Kernel, Tensor

WINDOWS, WINDOW_WEIGHTS = ((1, 1), (3, 3), (5, 5), (7, 7), (1, 7), (7, 1), (1, 3), (3, 1), (2, 2), (11, 11)), (
    0.38, 0.42, 0.06, 0.04, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01)
BIASED = 0.85  # share of convolutions and products with a bias
GROUP_WIDTHS = (2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 168, 232, 264)
FRAMES = (1, 2, 4, 8, 16, 32)
VIDEO_WINDOWS = ((1, 1, 1), (3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 7, 7), (7, 7, 7), (3, 7, 7), (2, 2, 2), (5, 1, 1))
ROWS = (16, 49, 50, 64, 144, 196, 197, 256, 784, 3136)  # tokens of an image, or pixels
LONG = (1125, 1569, 2048, 3136, 4096, 6272)  # tokens of a video, a large image, a long text
SUMS = (  # equation, operands by the letters of `SizesByLetter`, and whether the second is a weight
    ("ibnd,jbnd->bnij", "tbhd", "lbhd", "bhtl", False), ("bnij,jbnd->ibnd", "bhtl", "lbhd", "tbhd", False),
    ("ibh,hnd->ibnd", "tbx", "xhd", "tbhd", True), ("ibnd,hnd->ibh", "tbhd", "xhd", "tbx", True),
    ("byhwc,hkc->byhwk", "bhssd", "std", "bhsst", True), ("byhwc,wkc->byhwk", "bhssd", "std", "bhsst", True),
    ("bhid,bhjd->bhij", "bhtd", "bhld", "bhtl", False), ("bijk,jkd->bijd", "bswd", "wdx", "bswx", True))
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
HIDDEN = (16, 32, 48, 64, 96, 100, 128, 192, 256, 300, 384, 512, 640, 768, 1024, 1536)


def convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An image convolution: dense, depthwise, grouped, a network's first, or one that cuts the image into patches."""
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
        group_width = pick(GROUP_WIDTHS, generator)
        group = max(2, round(channels_at(height // stride, generator) / group_width))
        cin = cout = group_width * group
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
    """A 1-D convolution: dense, dilated, depthwise, grouped, a network's first, or over tokens. Grouped ones may also replace
    products, or be as wide as a position embedding."""
    length = round(log_uniform(16, 16384, generator))
    kind = generator.choice(["dense", "dilated", "depthwise", "grouped", "first"], p=[0.3, 0.1, 0.28, 0.22, 0.1])
    width = channels_at(max(int(length ** 0.5), 2), generator)
    k, stride, dilation, cin, cout, group = pick([1, 3, 5, 7, 9], generator), pick([1, 1, 1, 2], generator), 1, width, width, 1
    if kind == "dense":
        cout = channels(generator, 16, 2048)
    elif kind == "dilated":
        k, stride, dilation = 3, 1, pick([2, 4, 8, 16, 32, 64, 128], generator)
    elif kind == "depthwise":
        k, group = pick([3, 4, 7, 9, 15, 31, 31, 51], generator), width
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
    """A 3-D convolution of a video or a volume: dense, depthwise, or a network's first."""
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
    """A transposed convolution, which makes an image or a signal larger."""
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
    """Max or average pooling of an image, a signal or a video."""
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
    own_attributes = {"count_include_pad": 1} if op == "AveragePool" else {"storage_order": 0, "dilations": [1] * rank}
    return kernel(op, [tensor(dtype, batch, wide, *sizes)], [(batch, wide, *out)], kernel_shape=window,
                  strides=strides, pads=[*pads, *pads], ceil_mode=0, auto_pad="NOTSET", **own_attributes)


def global_pool(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The mean or maximum of a whole image."""
    near = side(generator)
    wide = channels_at(near, generator)
    sizes = (near, near) if generator.random() < 0.8 else (pick(FRAMES, generator), near, near)
    return kernel(str(generator.choice(["GlobalAveragePool", "GlobalMaxPool"])), [tensor(dtype, batch, wide, *sizes)],
                  [(batch, wide, *[1] * len(sizes))])


def gemm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product with a constant matrix: of a classifier (a row per image) or a transformer (a row per token)."""
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
    """A product of tokens, or of a channels-last image, with a constant matrix, without bias."""
    sizes = SizesByLetter(batch, generator)
    lead = sizes.shape(str(generator.choice(["bt", "bss", "bnw", "r"], p=[0.6, 0.2, 0.1, 0.1])))
    depth, columns = channels(generator, 32, 5120), channels(generator, 32, 5120)
    if generator.random() < 0.04:
        columns = sizes["v"]
    return kernel("MatMul", [tensor(dtype, *lead, depth), tensor(dtype, depth, columns, constant=True)], [(*lead, columns)])


def batched_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Attention's products, of three to five dimensions: queries by keys (scaled, as ORT fuses it), or weights by values. Some
    have another image's number of keys, share keys among heads, attend to a long sequence, or have one query, as in a decoder,
    which may have a long cache."""
    images, heads, count, width = heads_and_tokens(batch, generator)
    if generator.random() < 0.1:
        count = pick(LONG, generator)
    lead = [(images, heads), (images * heads,), (images, heads, pick([2, 4, 16], generator))][int(generator.choice(
        3, p=[0.75, 0.13, 0.12]))]
    keys = count if generator.random() < 0.6 else heads_and_tokens(batch, generator)[2] + pick([0, 1], generator)
    queries = 1 if generator.random() < 0.12 else count
    if queries == 1 and generator.random() < 0.5:
        keys = pick(LONG, generator) + pick([0, 1], generator)
    shared = (lead[0], *[1] * (len(lead) - 1)) if len(lead) == 2 and generator.random() < 0.08 else lead
    if generator.random() < 0.5:
        transposed = generator.random() < 0.35
        return kernel("FusedMatMul", [tensor(dtype, *lead, queries, width),
                                      tensor(dtype, *shared, *((keys, width) if transposed else (width, keys)))],
                      [(*lead, queries, keys)], CONTRIB, alpha=as_float32(width ** -0.5),
                      transA=0, transB=int(transposed), transBatchA=0, transBatchB=0)
    if generator.random() < 0.2:
        return kernel("FusedMatMul", [tensor(dtype, *lead, keys, queries), tensor(dtype, *shared, keys, width)],
                      [(*lead, queries, width)], CONTRIB, alpha=1.0, transA=1, transB=0, transBatchA=0, transBatchB=0)
    return kernel("MatMul", [tensor(dtype, *lead, queries, keys), tensor(dtype, *shared, keys, width)],
                  [(*lead, queries, width)])


def attention_sum(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Attention's products as an Einsum, with or without an axis of image windows."""
    images, heads, count, width = heads_and_tokens(batch, generator)
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
    sizes = SizesByLetter(batch, generator)
    equation, left, right, result, constant = SUMS[int(generator.integers(len(SUMS)))]
    return kernel("Einsum", [tensor(dtype, *sizes.shape(left)), tensor(dtype, *sizes.shape(right), constant=constant)],
                  [sizes.shape(result)], equation=equation)


def recurrent_layer(op: str, dtype: str, steps: int, rows: int, wide: int, hidden: int, directions: int = 1,
                    begins: bool = False, last_states: bool = True) -> Kernel:
    """A recurrent layer (LSTM, GRU or RNN) over `steps` steps of `rows` sequences, with `wide` numbers each. `begins`: it has
    initial states as inputs. `last_states`: it also returns the last states."""
    gates, state = GATES[op] * hidden, tensor(dtype, directions, rows, hidden, constant=True)
    inputs = [tensor(dtype, steps, rows, wide), tensor(dtype, directions, gates, wide, constant=True),
              tensor(dtype, directions, gates, hidden, constant=True), tensor(dtype, directions, 2 * gates, constant=True)]
    if begins:
        inputs += [ABSENT, state, *([state] if op == "LSTM" else [])]
    last = (directions, rows, hidden)
    outputs = [(steps, directions, rows, hidden), last, *([last] if op == "LSTM" else [])]
    own_attributes: dict[str, dict[str, Any]] = {"LSTM": {"input_forget": 0}, "GRU": {"linear_before_reset": 1},
                                              "RNN": {"activations": ["Tanh"] * directions}}
    return kernel(op, inputs, outputs if last_states else outputs[:1], hidden_size=hidden, layout=0,
                  direction="bidirectional" if directions == 2 else "forward", **own_attributes[op])


def recurrent(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A recurrent layer over words, frames, or the rows of an image; in one direction or both."""
    op = str(generator.choice(list(GATES), p=[0.42, 0.33, 0.25]))
    steps, directions = max(1, round(log_uniform(1, 512, generator))), 2 if generator.random() < 0.4 else 1
    rows = batch * (pick([14, 28, 56], generator) if generator.random() < 0.15 else 1)  # of an image, each a sequence
    hidden = pick(HIDDEN, generator)
    wide = hidden * directions if generator.random() < 0.4 else channels(generator, 16, 1024)
    begins, last_states = generator.random() < 0.8, generator.random() >= 0.3
    return recurrent_layer(op, dtype, steps, rows, wide, hidden, directions, begins, last_states)


# reductions and normalisations -------------------------------------------------------------------------------------------

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
    """The length of each vector of attention, or a sum or extreme along the last axis."""
    images, heads, count, width = heads_and_tokens(batch, generator)
    op = str(generator.choice(["ReduceL2", "ReduceSum", "ReduceMax"], p=[0.5, 0.25, 0.25]))
    return kernel(op, [tensor(dtype, images, count, heads, width), numbers(3)], [(images, count, heads, 1)],
                  keepdims=1, noop_with_empty_axes=0)


def _reduced(shape: tuple[int, ...], axes: tuple[int, ...], keep: bool) -> tuple[int, ...]:
    """The shape after a reduction along `axes`; with `keep`, these have size 1."""
    reduced = {axis % len(shape) for axis in axes}
    return tuple(1 if axis in reduced else size for axis, size in enumerate(shape) if keep or axis not in reduced)


def reduction(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A reduction along the axes that models reduce."""
    op = str(generator.choice(list(OPERATORS), p=list(OPERATORS.values())))
    letters, axes = FORMS[int(generator.integers(len(FORMS)))]
    shape, keep = SizesByLetter(batch, generator).shape(letters), generator.random() < 0.5
    return kernel(op, [tensor(dtype, *shape), numbers(*axes)], [_reduced(shape, axes, keep)], keepdims=int(keep),
                  noop_with_empty_axes=0)


def largest_index(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ArgMax or ArgMin over classes, words, or image channels."""
    sizes = SizesByLetter(batch, generator)
    letters, axis = [("rx", -1), ("btx", -1), ("bx", 1), ("bcss", 1), ("bhtt", -1), ("bv", -1)][int(generator.integers(6))]
    shape, keep = sizes.shape(letters), generator.random() < 0.3
    return kernel(str(generator.choice(["ArgMax", "ArgMin"], p=[0.8, 0.2])), [tensor(dtype, *shape)],
                  [Tensor(dtype="int64", shape=_reduced(shape, (axis,), keep))], axis=axis, keepdims=int(keep),
                  select_last_index=0)


def running_sum(dtype: str, batch: int, generator: Generator) -> Kernel:
    """CumSum along tokens, of numbers or positions."""
    sizes = SizesByLetter(batch, generator)
    kind = dtype if generator.random() < 0.6 else "int64"
    shape, axis = [(sizes.shape("bt"), -1), (sizes.shape("bt"), 1), (sizes.shape("bss"), 1), (sizes.shape("btx"), 1)][
        int(generator.integers(4 if kind == dtype else 3))]
    return kernel("CumSum", [tensor(kind, *shape), scalar("int64", axis)], [shape], exclusive=0, reverse=0)


def largest(dtype: str, batch: int, generator: Generator) -> Kernel:
    """TopK along the last axis: of boxes, classes, experts, or words in a beam search."""
    sizes = SizesByLetter(batch, generator)
    shape = sizes.shape(str(generator.choice(["bx", "rx", "bl", "bt", "bv"])))
    if generator.random() < 0.12:
        shape = (1, sizes["v"] * sizes["k"]) if generator.random() < 0.5 else (1, round(log_uniform(4096, 2e6, generator)))
    count = min(pick([1, 2, 5, 8, 10, 100, 300, 1000], generator), shape[-1])
    result_shape = (*shape[:-1], count)
    return kernel("TopK", [tensor(dtype, *shape), numbers(count)], [result_shape, Tensor(dtype="int64", shape=result_shape)],
                  axis=-1, largest=1, sorted=1)


def layer_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A layer normalisation over the last channels, of any rank; perhaps with the addition before it, or without the mean."""
    sizes = SizesByLetter(batch, generator)
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
    """An instance normalisation per channel, or per group of channels, as GroupNorm is exported (one row per group)."""
    sizes = SizesByLetter(batch, generator)
    if generator.random() < 0.4:
        groups = pick([1, 2, 4, 8, 16, 32, 32], generator)
        shape: tuple[int, ...] = (batch, groups, max(sizes["c"] // groups, 1) * sizes["s"] * sizes["s"])
    else:
        shape = sizes.shape(str(generator.choice(["bcss", "bcl", "bcfss"], p=[0.6, 0.2, 0.2])))
    scale = tensor(dtype, shape[1], constant=True)
    return kernel("InstanceNormalization", [tensor(dtype, *shape), scale, scale], [shape], epsilon=as_float32(1e-5))


def batch_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A batch normalisation that is not fused into a convolution."""
    letters = str(generator.choice(["bcss", "bx", "bxt", "bcfss"], p=[0.7, 0.08, 0.1, 0.12]))
    shape = SizesByLetter(batch, generator).shape(letters)
    scale = tensor(dtype, shape[1], constant=True)
    return kernel("BatchNormalization", [tensor(dtype, *shape), *[scale] * 4], [shape], epsilon=as_float32(1e-5),
                  momentum=as_float32(0.9), training_mode=0)


def softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A softmax or log-softmax over the keys of attention, the classes, or another axis."""
    sizes = SizesByLetter(batch, generator)
    op = str(generator.choice(["Softmax", "LogSoftmax"], p=[0.65, 0.35]))
    letters, axis = [("Bhtt", -1), ("Bhtl", -1), ("Bhkd", -1), ("bkhtt", -1), ("bxt", -1), ("rx", -1), ("bx", -1),
                     ("bthd", 1), ("bhtd", -2), ("bkx11", 1), ("bcss", 1), ("btlh", 2)][int(generator.choice(
                         12, p=[0.36, 0.12, 0.05, 0.05, 0.08, 0.08, 0.05, 0.05, 0.04, 0.04, 0.04, 0.04]))]
    shape = sizes.shape(letters)
    return kernel(op, [tensor(dtype, *shape)], [shape], axis=axis)


def biased_softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A softmax over the keys of attention, plus a mask (per image, or for all) or a table (per head). `is_inner_broadcast`:
    the mask is broadcast along the axes before the last, otherwise along the first ones."""
    images, heads, count, _ = heads_and_tokens(batch, generator)
    keys = count if generator.random() < 0.7 else heads_and_tokens(batch, generator)[2]
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


# rare sizes --------------------------------------------------------------------------------------------------------------

LONGEST_SIDE = {1: 20000, 2: 256, 3: 64}  # by rank
RARE_BIASED = 0.8  # the same for the rare layers below
MOST_NUMBERS = 2.0 ** 26  # of an image with all its channels and its batch


def whole(low: float, high: float, generator: Generator) -> int:
    """A log-uniform integer; half of them are multiples of eight."""
    size = round(log_uniform(low, high, generator))
    return max(8, size // 8 * 8) if generator.random() < 0.5 else size


def _sides(rank: int, least: int, numbers_each: int, generator: Generator) -> list[int]:
    """The sides of a signal, image or volume, mostly equal, with `numbers_each` numbers per point."""
    most = max(min(LONGEST_SIDE[rank], (MOST_NUMBERS / numbers_each) ** (1 / rank)), least + 1)
    side = max(least, round(log_uniform(max(least, 4), most, generator)))
    return [side] * rank if generator.random() < 0.6 else [
        max(least, int(side * generator.uniform(0.5, 1.3))) for _ in range(rank)]


def _convolved(dtype: str, batch: int, channels: tuple[int, int], group: int, window: Sequence[int], generator: Generator,
               strides: Sequence[int] = (1,), dilations: Sequence[int] = (1,)) -> Kernel:
    """A convolution from `channels[0]` to `channels[1]` channels, with one of the strides and dilations."""
    rank, (before, after), dilation = len(window), channels, pick(dilations, generator)
    reach = [dilation * (size - 1) + 1 for size in window]
    pads = [size // 2 if generator.random() < 0.85 else 0 for size in reach]
    image = tensor(dtype, batch, before, *_sides(rank, max(reach), batch * max(channels), generator))
    inputs = with_weight(image, (after, before // group, *window), after, RARE_BIASED, generator)
    return inferred("Conv", inputs, kernel_shape=list(window), strides=[pick(strides, generator)] * rank, pads=[*pads, *pads],
                    dilations=[dilation] * rank, group=group)


def rare_convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A dense convolution of a signal, an image or a volume, with any number of channels."""
    rank = int(generator.choice([1, 2, 3], p=[0.4, 0.4, 0.2]))
    wide = pick([1, 2, 3, 3, 3, 4, 5, 7] if rank > 1 else [1, 2, 3, 3, 5, 7, 9, 16, 31, 63], generator)
    most = {1: 1024, 2: 768, 3: 256}[rank]
    return _convolved(dtype, batch, (whole(3, most, generator), whole(3, most, generator)), 1, [wide] * rank, generator,
                      [1, 1, 1, 2], [1, 1, 1, 1, 2, 4, 8])


def rare_transposed_convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A transposed convolution, with any number of channels, that enlarges an image or keeps its size."""
    rank = int(generator.choice([1, 2, 3], p=[0.45, 0.4, 0.15]))
    before, after, wide = whole(3, 640, generator), whole(3, 640, generator), pick([2, 3, 4, 5, 7, 9, 16], generator)
    stride, pad = min(wide, pick([1, 1, 2, 4], generator)), (wide - 1) // 2 if generator.random() < 0.6 else 0
    inputs = [tensor(dtype, batch, before, *_sides(rank, wide, 4 * batch * max(before, after), generator)),
              tensor(dtype, before, after, *[wide] * rank, constant=True)]
    return inferred("ConvTranspose", inputs, kernel_shape=[wide] * rank, strides=[stride] * rank, pads=[pad] * 2 * rank,
                    dilations=[1] * rank, output_padding=[0] * rank, group=1)


def first_layer(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A network's first convolution, with one to four input channels."""
    rank = int(generator.choice([1, 2, 3], p=[0.4, 0.25, 0.35]))
    wide = pick({1: [3, 5, 7, 10, 10, 16, 25, 64], 2: [3, 3, 4, 5, 7, 7, 9, 11], 3: [3, 3, 3, 5, 7]}[rank], generator)
    channels = pick([1, 1, 1, 2, 3, 4], generator), whole(8, 768, generator)
    return _convolved(dtype, batch, channels, 1, [wide] * rank, generator, [1, 1, 2, 5] if rank == 1 else [1, 2])


def grouped_signal(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A 1-D convolution in few groups: products per group, or windows as wide as a position embedding."""
    group = pick([2, 3, 4, 6, 8, 12, 16, 32, 64], generator)
    before = group * max(1, whole(64, 3072, generator) // group)
    if generator.random() < 0.45:
        after = pick([before, before, 4 * before, group * max(1, before // (4 * group))], generator)
        return _convolved(dtype, batch, (before, after), group, [1], generator)
    wide = pick([3, 5, 7, 9, 15, 19, 31, 32, 64, 95, 96, 128], generator)
    return _convolved(dtype, batch, (before, before), group, [wide], generator, [1, 1, 1, 2])


def grouped_image(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An image convolution in groups of two to a few dozen channels."""
    width, group = whole(2, 96, generator), max(2, round(log_uniform(2, 96, generator)))
    after = width if generator.random() < 0.7 else pick([1, 2 * width, max(1, width // 2)], generator)
    return _convolved(dtype, batch, (group * width, group * after), group, [pick([1, 3, 3, 3, 5, 7], generator)] * 2, generator,
                      [1, 1, 2])


def thin_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product of very many rows with a small constant matrix."""
    rows, depth, columns = (round(log_uniform(low, high, generator)) for low, high in ((1e3, 2e6), (1, 96), (1, 96)))
    return _product(dtype, rows, depth, columns, generator)


def deep_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product of a few rows with a large constant matrix."""
    rows, depth, columns = batch * pick([1, 1, 2, 7], generator), whole(1024, 32768, generator), whole(32, 8192, generator)
    return _product(dtype, rows, depth, columns, generator)


def _product(dtype: str, rows: int, depth: int, columns: int, generator: Generator) -> Kernel:
    """A product with a constant matrix: as MatMul, or as Gemm with or without bias."""
    transposed = bool(generator.random() < 0.5)
    if generator.random() < 0.3:
        return inferred("MatMul", [tensor(dtype, rows, depth), tensor(dtype, depth, columns, constant=True)])
    weight = (columns, depth) if transposed else (depth, columns)
    inputs = with_weight(tensor(dtype, rows, depth), weight, columns, RARE_BIASED, generator)
    return inferred("Gemm", inputs, transB=int(transposed))


def attention_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Attention's products for hundreds or thousands of tokens; half of them with one query."""
    heads, width = pick([1, 2, 3, 4, 6, 8, 12, 14, 16, 32], generator), pick([*HEAD_WIDTHS, 192, 256], generator)
    keys = round(log_uniform(128, 8193, generator))
    queries, shared = (1 if generator.random() < 0.5 else min(keys, 4096)), heads if generator.random() < 0.8 else 1
    if generator.random() < 0.5:
        return inferred("MatMul", [tensor(dtype, batch, heads, queries, keys), tensor(dtype, batch, shared, keys, width)])
    return kernel("FusedMatMul", [tensor(dtype, batch, heads, queries, width), tensor(dtype, batch, shared, width, keys)],
                  [(batch, heads, queries, keys)], CONTRIB, alpha=as_float32(width ** -0.5), transA=0, transB=0, transBatchA=0,
                  transBatchB=0)


def rare_softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A softmax over thousands of keys, or over the few heads of each pair of tokens."""
    heads, count = pick([1, 2, 3, 4, 6, 8, 12, 16], generator), round(log_uniform(64, 4096, generator))
    shape = (batch, count, count, heads) if generator.random() < 0.25 else (batch, heads, count, count)
    return inferred("Softmax", [tensor(dtype, *shape)], axis=pick([-1, -1, -1, -2, 1], generator) % 4)


def rare_recurrent(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A wide recurrent layer with one or many sequences."""
    op = str(generator.choice(list(GATES), p=[0.45, 0.3, 0.25]))
    steps, hidden = round(log_uniform(4, 256, generator)), whole(192, 2048, generator)
    directions = 2 if generator.random() < 0.3 else 1
    wide = hidden * directions if generator.random() < 0.5 else whole(32, 2048, generator)
    return recurrent_layer(op, dtype, steps, batch, wide, hidden, directions, begins=bool(generator.random() < 0.8),
                           last_states=bool(generator.random() < 0.7))


def rare_channel_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A normalisation of each channel of a signal, an image or a volume."""
    rank, channels = pick([1, 2, 3, 3], generator), whole(8, 768, generator)
    scale = tensor(dtype, channels, constant=True)
    return inferred("InstanceNormalization", [tensor(dtype, batch, channels, *_sides(rank, 1, batch * channels, generator)),
                                              scale, scale])
