"""Kernels of no model, as language models have them: a decoder of half a billion to 14 billion parameters is made up, and one
of its operators drawn, as the builder of onnxruntime-genai, ONNX Runtime's transformer optimiser or its quantisers write it.

Sizes lie around those of families that people deploy. Three configs and those of one family are left out, to judge predictions
by.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hase.kernel_model.sampling.free_shapes.sizes import (
    ABSENT,
    CONTRIB,
    Generator,
    as_float32,
    indices,
    kernel,
    log_uniform,
    numbers,
    pick,
    tensor,
)
from hase.records.attention import NORM, with_lengths
from hase.records.kernel_record import Kernel, KernelInput, Tensor


class Family(NamedTuple):
    """What the decoders of a family have in common: widths, the width of the layer between as a multiple, sizes of a head,
    query heads for each head of keys, words, windows of attention (0: none), the part of a head that is rotated."""

    widths: tuple[int, ...]
    multiples: tuple[float, ...]
    head_sizes: tuple[int, ...]
    groups: tuple[int, ...]
    vocabularies: tuple[int, ...]
    windows: tuple[int, ...] = (0,)
    rotated: tuple[float, ...] = (1.0,)


FAMILIES = (
    Family((2048, 2560, 3072, 4096, 5120), (2.6875, 3.5, 4.0), (64, 128), (1, 3, 3, 4, 8), (32000, 128256)),  # llama
    Family((3072, 4096, 5120), (2.8, 3.5, 3.0), (128,), (4, 3), (32000, 32768, 131072), (0, 0, 4096)),  # mistral
    Family((1152, 2048, 2304, 2560, 3584, 3840), (4.0, 6.0, 8.0), (256,), (1, 2, 4, 8), (256000, 262144),
           (0, 512, 1024, 4096)),  # gemma
    Family((2048, 2560, 3072, 5120), (2.6667, 3.5, 4.0), (64, 80, 96, 128), (1, 3, 3, 4), (32064, 51200, 100352, 200064),
           (0, 0, 2047), (0.4, 0.5, 0.75, 1.0)),  # phi
    Family((1536, 2048, 2560, 4096), (2.6667, 3.125, 4.0), (64, 128), (1, 2, 3, 4), (49152, 49160)),  # granite
    Family((576, 960, 1536, 2048), (2.6667, 4.0), (64,), (1, 3), (49152, 128256)))  # smollm
HELD_OUT = {  # widths of a decoder and of the layer between: three configs, and those of a family
    (2048, 8192), (3072, 8192), (1024, 3072),
    (896, 4864), (1536, 8960), (2048, 11008), (3584, 18944), (5120, 13824), (5120, 27648), (8192, 29568),
    (2048, 6144), (2560, 9728), (4096, 12288), (5120, 17408), (5120, 25600)}
HEADS_HELD_OUT = {(32, 8, 64), (32, 32, 96), (16, 8, 128)}  # of queries, of keys, and the size of one: of the three configs
MIXTURES = ((8, 2, 4096, 14336), (16, 2, 4096, 6400), (32, 4, 2880, 2880), (32, 8, 1536, 512), (40, 8, 1536, 512),
            (8, 2, 2048, 4096), (64, 8, 2048, 1024))  # experts, how many compute a token, and their widths
MOST_TOKENS = 32768  # of a context
MOST_ROWS = 16384  # tokens of a batch at a time
ACTIVATIONS = ("QuickGelu", "Gelu", "FastGelu", "BiasGelu")


class Decoder(NamedTuple):
    """The sizes of a decoder."""

    width: int
    between: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    window: int
    rotated: int


def decoder(generator: Generator) -> Decoder:
    """A decoder near one of a family: half have its sizes, half others nearby."""
    family = FAMILIES[int(generator.integers(len(FAMILIES)))]
    head_size, group = pick(family.head_sizes, generator), pick(family.groups, generator)
    near, step = generator.random() < 0.5, pick([64, 128, 256], generator)
    while True:
        width, multiple = pick(family.widths, generator), float(generator.choice(family.multiples))
        if near:
            width, multiple = _rounded(width * generator.uniform(0.75, 1.25), step), multiple * generator.uniform(0.8, 1.2)
        between = _rounded(width * multiple, step)
        share = 1.0 if head_size < 256 else float(generator.choice([0.5, 0.7, 1.0]))
        kv_heads = max(1, round(width * share / head_size / group))
        if (width, between) not in HELD_OUT and (kv_heads * group, kv_heads, head_size) not in HEADS_HELD_OUT:
            return Decoder(width, between, kv_heads * group, kv_heads, head_size, pick(family.vocabularies, generator),
                           pick(family.windows, generator),
                           _rounded(head_size * float(generator.choice(family.rotated)), 16))


def _rounded(size: float, step: int) -> int:
    return max(step, round(size / step) * step)


def length(generator: Generator, low: int = 16, high: int = MOST_TOKENS) -> int:
    """Tokens of a text: all magnitudes alike, half of them a power of two."""
    tokens = log_uniform(low, high, generator)
    return min(2 ** round(math.log2(tokens)), high) if generator.random() < 0.5 else round(tokens)


def rows(batch: int, generator: Generator) -> tuple[int, int]:
    """The first two dimensions of an activation: texts, and new tokens of each. One token in decoding, as often as all else."""
    if generator.random() < 0.55:
        return (1 if generator.random() < 0.45 else batch), 1
    tokens = length(generator, high=8192)
    return max(1, min(batch, MOST_ROWS // tokens)), min(tokens, MOST_ROWS)


def products(of: Decoder) -> tuple[tuple[int, int], ...]:
    """Depth and columns of a decoder's matrix products, but for the last one."""
    inner = of.heads * of.head_size
    return ((of.width, inner + 2 * of.kv_heads * of.head_size), (inner, of.width), (of.width, of.between),
            (of.width, of.between), (of.between, of.width), (of.width, 2 * of.between))


def product_sizes(generator: Generator) -> tuple[int, int]:
    """Depth and columns of a matrix product."""
    of = decoder(generator)
    if generator.random() < 0.12:
        return of.width, of.vocabulary
    chosen = products(of)
    return chosen[int(generator.integers(len(chosen)))]


def matrix_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product with a constant matrix, without a bias."""
    depth, columns = product_sizes(generator)
    lead = rows(batch, generator)
    return kernel("MatMul", [tensor(dtype, *lead, depth), tensor(dtype, depth, columns, constant=True)], [(*lead, columns)])


def quantised_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product with a matrix in blocks of 4 or 8 bits: on a CPU, activations are quantised, too."""
    depth, columns = product_sizes(generator)
    lead = rows(batch, generator)
    bits = int(generator.choice([4, 8], p=[0.8, 0.2]))
    block = int(generator.choice([16, 32, 64, 128], p=[0.08, 0.52, 0.1, 0.3]))
    blocks = -(-depth // block)
    inputs = [tensor(dtype, *lead, depth), tensor("uint8", columns, blocks, block * bits // 8, constant=True),
              tensor(dtype, columns, blocks, constant=True)]
    if generator.random() < 0.3:
        inputs.append(tensor("uint8", columns, -(-blocks * bits // 8), constant=True))
    if generator.random() < 0.12:
        inputs += [ABSENT] * (5 - len(inputs)) + [tensor(dtype, columns, constant=True)]
    return kernel("MatMulNBits", inputs, [(*lead, columns)], CONTRIB, K=depth, N=columns, bits=bits, block_size=block,
                  accuracy_level=4 if dtype == "float32" else 0, weight_prepacked=0)


def grouped_attention(dtype: str, batch: int, generator: Generator) -> Kernel:
    """One new token of each text after a cache, or a whole prompt, or a further part of one; mostly with one buffer for the
    longest text, in which old tokens stay where they are."""
    of = decoder(generator)
    kind = generator.choice(["decoding", "prompt", "part"], p=[0.62, 0.3, 0.08])
    if kind == "decoding":
        total, queries = length(generator), 1
        batch = 1 if generator.random() < 0.25 else batch
    else:
        total = queries = length(generator, high=16384)
        batch = 1 if kind == "part" else max(1, min(batch, MOST_ROWS // queries))
        if kind == "part":
            total = min(queries + length(generator, high=16384), MOST_TOKENS)
    shares = generator.random() < (0.8 if kind == "decoding" else 0.6)
    cache = total - queries
    if shares:
        cache = pick([total, min(2 * total, MOST_TOKENS), max(total, round(log_uniform(total, MOST_TOKENS + 1, generator)))],
                     generator)
    wide, narrow = of.heads * of.head_size, of.kv_heads * of.head_size
    if generator.random() < 0.7:
        inputs = [tensor(dtype, batch, queries, wide + 2 * narrow), ABSENT, ABSENT]
    else:
        inputs = [tensor(dtype, batch, queries, wide), *[tensor(dtype, batch, queries, narrow)] * 2]
    past, present = (batch, of.kv_heads, cache, of.head_size), (batch, of.kv_heads, max(cache, total), of.head_size)
    inputs += [*[tensor(dtype, *past)] * 2, tensor("int32", batch), tensor("int32")]
    rotates = generator.random() < 0.85 and of.head_size % 16 == 0
    if rotates:
        places = max(max(cache, total), pick([2048, 4096, 8192, 32768], generator))
        inputs += [tensor(dtype, places, of.rotated // 2, constant=True)] * 2
    if inputs[1].present and generator.random() < 0.6:  # on GPUs, ONNX Runtime fuses the norms of queries and keys into it
        inputs += [ABSENT] * (NORM - len(inputs)) + [tensor(dtype, of.head_size, constant=True)] * 2
    return kernel("GroupQueryAttention", with_lengths(inputs, total), [(batch, queries, wide), present, present], CONTRIB,
                  num_heads=of.heads, kv_num_heads=of.kv_heads, scale=as_float32(of.head_size ** -0.5),
                  local_window_size=of.window or -1, do_rotary=int(rotates), rotary_interleaved=0,
                  softcap=50.0 if of.head_size == 256 and generator.random() < 0.4 else 0.0, causal=1, k_quant_type="NONE",
                  v_quant_type="NONE", qk_norm_epsilon=as_float32(1e-6), qk_output=0, sliding_window_cache=0, smooth_softmax=-1)


def apart(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Queries, keys and values of one product, cut apart for attention with norms."""
    of, lead = decoder(generator), rows(batch, generator)
    parts = (of.heads * of.head_size, *[of.kv_heads * of.head_size] * 2)
    return kernel("Split", [tensor(dtype, *lead, sum(parts)), numbers(*parts)], [(*lead, part) for part in parts], axis=-1)


def norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The root-mean-square norm of a layer, or of the heads of queries or keys."""
    of = decoder(generator)
    shape: tuple[int, ...] = (*rows(batch, generator), of.width)
    if generator.random() < 0.25:
        texts, tokens, _ = shape
        shape = (texts, tokens * pick([of.heads, of.kv_heads], generator), of.head_size)
    return kernel("SimplifiedLayerNormalization", [tensor(dtype, *shape), tensor(dtype, shape[-1], constant=True)], [shape],
                  axis=-1, epsilon=as_float32(float(generator.choice([1e-5, 1e-6]))), stash_type=1)


def sum_and_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The sum with what skips a layer, and its root-mean-square norm; mostly both are put out."""
    shape = (*rows(batch, generator), decoder(generator).width)
    outputs: list[Tensor] = [Tensor(dtype=dtype, shape=shape)]
    if generator.random() < 0.9:
        outputs += [Tensor(dtype=""), Tensor(dtype=""), Tensor(dtype=dtype, shape=shape)]
    return kernel("SkipSimplifiedLayerNormalization", [*[tensor(dtype, *shape)] * 2, tensor(dtype, shape[-1], constant=True)],
                  outputs, CONTRIB, epsilon=as_float32(float(generator.choice([1e-5, 1e-6]))))


def sum_and_layer_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The same with mean and bias, as encoders have it."""
    shape = (*rows(batch, generator), pick([384, 512, 768, 1024, 1280, 2560, 4096], generator))
    weights = [tensor(dtype, shape[-1], constant=True)] * (3 if generator.random() < 0.6 else 2)
    return kernel("SkipLayerNormalization", [*[tensor(dtype, *shape)] * 2, *weights], [shape], CONTRIB,
                  epsilon=as_float32(1e-5))


def rotary(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Queries or keys turned by their places."""
    of, (texts, tokens) = decoder(generator), rows(batch, generator)
    heads, places = pick([of.heads, of.kv_heads], generator), max(tokens, pick([2048, 4096, 32768], generator))
    shape, whole = (texts, tokens, heads * of.head_size), of.rotated == of.head_size
    return kernel("RotaryEmbedding", [tensor(dtype, *shape), indices((texts, tokens), places),
                                      *[tensor(dtype, places, of.rotated // 2, constant=True)] * 2], [shape], CONTRIB,
                  interleaved=0, is_packed_batching=0, num_heads=0 if whole else heads,
                  rotary_embedding_dim=0 if whole else of.rotated, scale=1.0)


class Encoder(NamedTuple):
    """Texts, tokens, heads and their size, as encoders and speech models have them."""

    texts: int
    tokens: int
    heads: int
    head_size: int

    @property
    def width(self) -> int:
        return self.heads * self.head_size


def encoder(batch: int, generator: Generator) -> Encoder:
    tokens = int(generator.choice([64, 77, 128, 197, 256, 384, 512, 577, 1024, 1500, 2048]))
    return Encoder(min(batch, max(1, MOST_ROWS // tokens)), tokens, pick([6, 8, 12, 16, 20, 24, 32], generator),
                   pick([32, 64, 64, 64, 80, 128], generator))


def mask_of_keys(texts: int, keys: int, generator: Generator) -> KernelInput:
    """Which keys count: a number for each of them, or for each text where they end."""
    return tensor("int32", texts, *([keys] if generator.random() < 0.7 else []))


def attention(dtype: str, batch: int, generator: Generator) -> Kernel:
    """MultiHeadAttention: of an encoder, from one text to another, or of one token after a cache."""
    of, kind = encoder(batch, generator), generator.choice(["self", "cross", "decoding"], p=[0.6, 0.15, 0.25])
    queries = of.tokens if kind == "self" else 1 if kind == "decoding" or generator.random() < 0.5 else pick([4, 77], generator)
    keys = 1 if kind == "decoding" else of.tokens
    inputs = [tensor(dtype, of.texts, queries, of.width), *[tensor(dtype, of.texts, keys, of.width)] * 2]
    outputs: list[tuple[int, ...]] = [(of.texts, queries, of.width)]
    causal = kind != "cross" and generator.random() < 0.3
    if kind == "decoding":
        cache = length(generator, high=4096)
        past, present = ((of.texts, of.heads, tokens, of.head_size) for tokens in (cache, cache + 1))
        inputs += [ABSENT, ABSENT, ABSENT, *[tensor(dtype, *past)] * 2]
        outputs += [present, present]
    else:
        biased, masked, added = (generator.random() < share for share in (0.4, 0.2, 0.25))
        inputs += [tensor(dtype, 3 * of.width, constant=True) if biased else ABSENT,
                   mask_of_keys(of.texts, keys, generator) if masked else ABSENT]
        if added:
            inputs.append(tensor(dtype, pick([1, of.texts], generator), pick([1, of.heads], generator), queries, keys))
        while not inputs[-1].present:
            inputs.pop()
    return kernel("MultiHeadAttention", inputs, outputs, CONTRIB, num_heads=of.heads, mask_filter_value=-10000.0,
                  scale=as_float32(of.head_size ** -0.5), unidirectional=int(causal))


def fused_attention(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Attention with its projection, as the optimiser makes it from BERT and GPT-2."""
    of = encoder(batch, generator)
    inputs = [tensor(dtype, of.texts, of.tokens, of.width), tensor(dtype, of.width, 3 * of.width, constant=True),
              tensor(dtype, 3 * of.width, constant=True)]
    if generator.random() < 0.6:
        inputs.append(mask_of_keys(of.texts, of.tokens, generator))
    return kernel("Attention", inputs, [(of.texts, of.tokens, of.width)], CONTRIB, num_heads=of.heads, do_rotary=0,
                  mask_filter_value=-10000.0, past_present_share_buffer=0, rotary_embedding_dim=0, scale=0.0,
                  unidirectional=int(generator.random() < 0.3))


def packed_attention(dtype: str, batch: int, generator: Generator) -> Kernel:
    """PackedMultiHeadAttention: texts without padding, one after another."""
    of = encoder(batch, generator)
    tokens = of.texts * of.tokens
    inputs = [*[tensor(dtype, tokens, of.width)] * 3, tensor(dtype, 3 * of.width, constant=True)]
    if generator.random() < 0.4:
        inputs = [tensor(dtype, tokens, of.heads, 3, of.head_size), ABSENT, ABSENT, ABSENT]
    inputs += [tensor("int32", of.texts, of.tokens), tensor("int32", of.texts + 1)]
    return kernel("PackedMultiHeadAttention", inputs, [(tokens, of.width)], CONTRIB, num_heads=of.heads,
                  mask_filter_value=-10000.0, scale=as_float32(of.head_size ** -0.5))


def first_layer(dtype: str, batch: int, generator: Generator) -> Kernel:
    """EmbedLayerNormalization: the embeddings of words, places and segments, their sum, and its norm."""
    of = encoder(batch, generator)
    ids = tensor("int32", of.texts, of.tokens)
    tables = [tensor(dtype, size, of.width, constant=True) for size in (pick([21128, 30522, 50265], generator), 2048, 2)]
    inputs = [ids, ids, *tables, *[tensor(dtype, of.width, constant=True)] * 2, *[ids] * int(generator.random() < 0.5)]
    return kernel("EmbedLayerNormalization", inputs, [
        Tensor(dtype=dtype, shape=(of.texts, of.tokens, of.width)), Tensor(dtype="int32", shape=(of.texts,))], CONTRIB,
        epsilon=as_float32(1e-12), mask_index_type=0)


def activation(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The function between two layers; SiLU becomes QuickGelu."""
    shape = (*rows(batch, generator), decoder(generator).between)
    op = str(generator.choice(ACTIVATIONS, p=[0.4, 0.15, 0.3, 0.15]))
    biased = op == "BiasGelu" or (op == "FastGelu" and generator.random() < 0.4)
    of_operator: dict[str, dict[str, Any]] = {"QuickGelu": {"alpha": 1.0 if generator.random() < 0.8 else as_float32(1.702)},
                                              "Gelu": {"approximate": "tanh"}}
    return kernel(op, [tensor(dtype, *shape), *[tensor(dtype, shape[-1], constant=True)] * biased], [shape],
                  "" if op == "Gelu" else CONTRIB, **of_operator.get(op, {}))


def elementwise(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Gates, biases and sums around layers; SiLU as two nodes; conversions."""
    of, lead = decoder(generator), rows(batch, generator)
    shape = (*lead, pick([of.between, of.between, of.width], generator))
    op = str(generator.choice(["Mul", "Add", "Sigmoid", "Bias"], p=[0.5, 0.15, 0.2, 0.15]))
    if op == "Sigmoid":
        return kernel(op, [tensor(dtype, *shape)], [shape])
    other = tensor(dtype, shape[-1], constant=True) if op == "Bias" else tensor(dtype, *shape)
    return kernel("Add" if op == "Bias" else op, [tensor(dtype, *shape), other], [shape])


def embedding(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The embeddings of words."""
    of, lead = decoder(generator), rows(batch, generator)
    return kernel("Gather", [tensor(dtype, of.vocabulary, of.width, constant=True), indices(lead, of.vocabulary)],
                  [(*lead, of.width)], axis=0)


def quantised_embedding(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The same from a table in blocks of 4 or 8 bits."""
    of, lead = decoder(generator), rows(batch, generator)
    bits, block = pick([4, 4, 8], generator), pick([16, 32, 128], generator)
    blocks = -(-of.width // block)
    inputs = [tensor("uint8", of.vocabulary, of.width * bits // 8, constant=True), indices(lead, of.vocabulary),
              tensor(dtype, of.vocabulary, blocks, constant=True)]
    if generator.random() < 0.4:
        inputs.append(tensor("uint8", of.vocabulary, -(-blocks * bits // 8), constant=True))
    return kernel("GatherBlockQuantized", inputs, [Tensor(dtype=dtype, shape=(*lead, of.width))], CONTRIB, bits=bits,
                  block_size=block, gather_axis=0, quantize_axis=1)


class Experts(NamedTuple):
    """Tokens, and experts: how many there are, how many compute a token, and their widths."""

    tokens: int
    available: int
    chosen: int
    width: int
    between: int


def experts(batch: int, generator: Generator) -> Experts:
    texts, tokens = rows(batch, generator)
    available, chosen, width, between = MIXTURES[int(generator.integers(len(MIXTURES)))]
    return Experts(min(texts * tokens, 4096), available, chosen, width, between)


def mixture(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Experts of which each token takes a few."""
    of = experts(batch, generator)
    gated = generator.random() < 0.6
    inputs = [tensor(dtype, of.tokens, of.width), tensor(dtype, of.tokens, of.available),
              tensor(dtype, of.available, of.between * (1 + gated), of.width, constant=True), ABSENT,
              tensor(dtype, of.available, of.width, of.between, constant=True)]
    return kernel("MoE", inputs, [(of.tokens, of.width)], CONTRIB, k=of.chosen, normalize_routing_weights=1,
                  use_sparse_mixer=0, **_expert_activation(gated))


def quantised_mixture(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The same with weights of 4 or 8 bits."""
    of, bits = experts(batch, generator), pick([4, 4, 8], generator)
    gated = generator.random() < 0.6
    first, second = of.between * (1 + gated), of.width
    inputs = [tensor(dtype, of.tokens, of.width), tensor(dtype, of.tokens, of.available),
              tensor("uint8", of.available, first, of.width * bits // 8, constant=True),
              tensor(dtype, of.available, first, constant=True), ABSENT,
              tensor("uint8", of.available, second, of.between * bits // 8, constant=True),
              tensor(dtype, of.available, second, constant=True)]
    return kernel("QMoE", inputs, [(of.tokens, of.width)], CONTRIB, k=of.chosen, normalize_routing_weights=1,
                  use_sparse_mixer=0, expert_weight_bits=bits, **_expert_activation(gated))


def _expert_activation(gated: bool) -> dict[str, Any]:
    return {"activation_type": "swiglu", "swiglu_fusion": 1} if gated else {"activation_type": "silu"}


def quantise(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An activation to whole numbers of eight bits, or back."""
    shape, kind = (*rows(batch, generator), decoder(generator).width), str(generator.choice(["int8", "uint8"]))
    about = [tensor(dtype, constant=True), tensor(kind, constant=True)]
    if generator.random() < 0.5:
        return kernel("QuantizeLinear", [tensor(dtype, *shape), *about], [Tensor(dtype=kind, shape=shape)], axis=1, saturate=1)
    return kernel("DequantizeLinear", [tensor(kind, *shape), *about], [Tensor(dtype=dtype, shape=shape)], axis=1)

