"""Matrix products and recurrent layers of free shapes."""

from __future__ import annotations

from typing import Any

from kernel_model.sampling.free_shapes.sizes import (
    ABSENT,
    CONTRIB,
    HEADS,
    TOKENS,
    Generator,
    Sizes,
    as_float32,
    channels,
    kernel,
    log_uniform,
    pick,
    tensor,
    tokens,
)
from records.kernel_record import Kernel

ROWS = (16, 49, 50, 64, 144, 196, 197, 256, 784, 3136)  # tokens of an image, or pixels
LONG = (1125, 1569, 2048, 3136, 4096, 6272)  # tokens of a video, a large image, a long text
SUMS = (  # equation, operands by the letters of `Sizes`, and whether the second is a weight
    ("ibnd,jbnd->bnij", "tbhd", "lbhd", "bhtl", False), ("bnij,jbnd->ibnd", "bhtl", "lbhd", "tbhd", False),
    ("ibh,hnd->ibnd", "tbx", "xhd", "tbhd", True), ("ibnd,hnd->ibh", "tbhd", "xhd", "tbx", True),
    ("byhwc,hkc->byhwk", "bhssd", "std", "bhsst", True), ("byhwc,wkc->byhwk", "bhssd", "std", "bhsst", True),
    ("bhid,bhjd->bhij", "bhtd", "bhld", "bhtl", False), ("bijk,jkd->bijd", "bswd", "wdx", "bswx", True))


def gemm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A matrix product with a constant matrix: a classifier's, with a row an image, or a transformer's, a row a token."""
    rows = batch * (1 if generator.random() < 0.25 else pick(ROWS, generator))
    depth, columns = channels(generator, 32, 4096), channels(generator, 32, 4096)
    if generator.random() < 0.1:
        columns = pick([1, 2, 10, 1000], generator)
    if generator.random() < 0.12:  # from heads to heads, for each pair of tokens
        rows, depth, columns = batch * pick(TOKENS[:18], generator) ** 2, pick(HEADS, generator), pick(HEADS, generator)
    transposed = generator.random() < 0.4
    inputs = [tensor(dtype, rows, depth),
              tensor(dtype, *((columns, depth) if transposed else (depth, columns)), constant=True)]
    if generator.random() < 0.85:
        inputs.append(tensor(dtype, columns, constant=True))
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


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
HIDDEN = (16, 32, 48, 64, 96, 100, 128, 192, 256, 300, 384, 512, 640, 768, 1024, 1536)


def recurrent(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A layer over a sequence of words, frames, or the rows of an image; in one direction or both."""
    op = str(generator.choice(list(GATES), p=[0.42, 0.33, 0.25]))
    steps, bidirectional = max(1, round(log_uniform(1, 512, generator))), generator.random() < 0.4
    rows = batch * (pick([14, 28, 56], generator) if generator.random() < 0.15 else 1)  # of an image, each a sequence
    hidden, ways = pick(HIDDEN, generator), 2 if bidirectional else 1
    wide = hidden * ways if generator.random() < 0.4 else channels(generator, 16, 1024)
    gates = GATES[op] * hidden
    state = tensor(dtype, ways, rows, hidden, constant=True)
    inputs = [tensor(dtype, steps, rows, wide), tensor(dtype, ways, gates, wide, constant=True),
              tensor(dtype, ways, gates, hidden, constant=True), tensor(dtype, ways, 2 * gates, constant=True)]
    if generator.random() < 0.8:
        inputs += [ABSENT, state, *([state] if op == "LSTM" else [])]
    last = (ways, rows, hidden)
    outputs = [(steps, ways, rows, hidden), last, *([last] if op == "LSTM" else [])]
    of_operator: dict[str, dict[str, Any]] = {"LSTM": {"input_forget": 0}, "GRU": {"linear_before_reset": 1},
                                              "RNN": {"activations": ["Tanh"] * ways}}
    return kernel(op, inputs, outputs[:1] if generator.random() < 0.3 else outputs,
                  direction="bidirectional" if bidirectional else "forward", hidden_size=hidden, layout=0, **of_operator[op])
