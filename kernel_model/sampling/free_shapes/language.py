"""Draws operators of language models.

A decoder of 0.5 to 14 billion parameters is drawn, and then one of its operators, in the form of onnxruntime-genai's builder,
ONNX Runtime's transformer optimiser or its quantisers. Sizes are near those of families that people deploy. Three configs, and
all of one family, are left out to judge predictions.

The last functions draw operators that ONNX itself defines for language models since opset 23 (exporters now write attention as
one node), operators of quantised networks (nodes that quantise and dequantise, which a GPU runs one by one, or integer
products), and networks in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hase.kernel_model.sampling.free_shapes import layers
from hase.kernel_model.sampling.free_shapes.sizes import (
    ABSENT,
    CONTRIB,
    Generator,
    activation_shape,
    as_float32,
    channels,
    indices,
    kernel,
    log_uniform,
    numbers,
    pick,
    tensor,
)
from hase.records.attention import NORM, with_lengths
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel


class DecoderFamily(NamedTuple):
    """Common sizes of a family's decoders: widths, relative width of the feed-forward layer, head sizes, query heads per key
    head, words, attention windows (0: none), rotated part of a head."""

    widths: tuple[int, ...]
    multiples: tuple[float, ...]
    head_sizes: tuple[int, ...]
    groups: tuple[int, ...]
    vocabularies: tuple[int, ...]
    windows: tuple[int, ...] = (0,)
    rotated: tuple[float, ...] = (1.0,)


FAMILIES = (
    DecoderFamily((2048, 2560, 3072, 4096, 5120), (2.6875, 3.5, 4.0), (64, 128), (1, 3, 3, 4, 8), (32000, 128256)),  # llama
    DecoderFamily((3072, 4096, 5120), (2.8, 3.5, 3.0), (128,), (4, 3), (32000, 32768, 131072), (0, 0, 4096)),  # mistral
    DecoderFamily((1152, 2048, 2304, 2560, 3584, 3840), (4.0, 6.0, 8.0), (256,), (1, 2, 4, 8), (256000, 262144),
           (0, 512, 1024, 4096)),  # gemma
    DecoderFamily((2048, 2560, 3072, 5120), (2.6667, 3.5, 4.0), (64, 80, 96, 128), (1, 3, 3, 4), (32064, 51200, 100352, 200064),
           (0, 0, 2047), (0.4, 0.5, 0.75, 1.0)),  # phi
    DecoderFamily((1536, 2048, 2560, 4096), (2.6667, 3.125, 4.0), (64, 128), (1, 2, 3, 4), (49152, 49160)),  # granite
    DecoderFamily((576, 960, 1536, 2048), (2.6667, 4.0), (64,), (1, 3), (49152, 128256)))  # smollm
HELD_OUT = {  # widths of a decoder and its feed-forward layer: three configs, and those of a family
    (2048, 8192), (3072, 8192), (1024, 3072),
    (896, 4864), (1536, 8960), (2048, 11008), (3584, 18944), (5120, 13824), (5120, 27648), (8192, 29568),
    (2048, 6144), (2560, 9728), (4096, 12288), (5120, 17408), (5120, 25600)}
HEADS_HELD_OUT = {(32, 8, 64), (32, 32, 96), (16, 8, 128)}  # query heads, key heads and head size of the three configs
MIXTURES = ((8, 2, 4096, 14336), (16, 2, 4096, 6400), (32, 4, 2880, 2880), (32, 8, 1536, 512), (40, 8, 1536, 512),
            (8, 2, 2048, 4096), (64, 8, 2048, 1024))  # experts, how many compute a token, and their widths
MOST_TOKENS = 32768  # of a context
MOST_ROWS = 16384  # tokens of a batch at a time
ACTIVATIONS = ("QuickGelu", "Gelu", "FastGelu", "BiasGelu")


class DrawnDecoder(NamedTuple):
    """The sizes of a decoder."""

    width: int
    between: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    window: int
    rotated: int


def decoder(generator: Generator) -> DrawnDecoder:
    """A decoder near one of a family: half have its sizes, half have nearby ones."""
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
            return DrawnDecoder(width, between, kv_heads * group, kv_heads, head_size, pick(family.vocabularies, generator),
                           pick(family.windows, generator), _rounded(head_size * float(generator.choice(family.rotated)), 16))


def _rounded(size: float, step: int) -> int:
    return max(step, round(size / step) * step)


def length(generator: Generator, low: int = 16, high: int = MOST_TOKENS) -> int:
    """A log-uniform number of tokens; half of them are a power of two."""
    tokens = log_uniform(low, high, generator)
    return min(2 ** round(math.log2(tokens)), high) if generator.random() < 0.5 else round(tokens)


def rows(batch: int, generator: Generator) -> tuple[int, int]:
    """The first two dimensions of an activation: texts, and new tokens of each. About half have one token, as in decoding."""
    if generator.random() < 0.55:
        return (1 if generator.random() < 0.45 else batch), 1
    tokens = length(generator, high=8192)
    return max(1, min(batch, MOST_ROWS // tokens)), min(tokens, MOST_ROWS)


def products(sizes: DrawnDecoder) -> tuple[tuple[int, int], ...]:
    """Depth and columns of a decoder's matrix products, except the last one."""
    inner = sizes.heads * sizes.head_size
    return ((sizes.width, inner + 2 * sizes.kv_heads * sizes.head_size), (inner, sizes.width), (sizes.width, sizes.between),
            (sizes.width, sizes.between), (sizes.between, sizes.width), (sizes.width, 2 * sizes.between))


def product_sizes(generator: Generator) -> tuple[int, int]:
    """Depth and columns of a matrix product."""
    sizes = decoder(generator)
    if generator.random() < 0.12:
        return sizes.width, sizes.vocabulary
    chosen = products(sizes)
    return chosen[int(generator.integers(len(chosen)))]


def matrix_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product with a constant matrix, without bias."""
    depth, columns = product_sizes(generator)
    lead = rows(batch, generator)
    return kernel("MatMul", [tensor(dtype, *lead, depth), tensor(dtype, depth, columns, constant=True)], [(*lead, columns)])


def quantised_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product with a matrix in blocks of 4 or 8 bits; on a CPU, activations are quantised too."""
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
    """GroupQueryAttention: one new token per text after a cache, a whole prompt, or a later part of one. Mostly with one buffer
    for the longest text, in which old tokens stay in place."""
    sizes = decoder(generator)
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
    q_width, k_width = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    if generator.random() < 0.7:
        inputs = [tensor(dtype, batch, queries, q_width + 2 * k_width), ABSENT, ABSENT]
    else:
        inputs = [tensor(dtype, batch, queries, q_width), *[tensor(dtype, batch, queries, k_width)] * 2]
    past, present = (batch, sizes.kv_heads, cache, sizes.head_size), (batch, sizes.kv_heads, max(cache, total), sizes.head_size)
    inputs += [*[tensor(dtype, *past)] * 2, tensor("int32", batch), tensor("int32")]
    rotates = generator.random() < 0.85 and sizes.head_size % 16 == 0
    if rotates:
        positions = max(max(cache, total), pick([2048, 4096, 8192, 32768], generator))
        inputs += [tensor(dtype, positions, sizes.rotated // 2, constant=True)] * 2
    if inputs[1].present and generator.random() < 0.6:  # on GPUs, ONNX Runtime fuses the norms of queries and keys into it
        inputs += [ABSENT] * (NORM - len(inputs)) + [tensor(dtype, sizes.head_size, constant=True)] * 2
    return kernel("GroupQueryAttention", with_lengths(inputs, total), [(batch, queries, q_width), present, present], CONTRIB,
                  num_heads=sizes.heads, kv_num_heads=sizes.kv_heads, scale=as_float32(sizes.head_size ** -0.5),
                  local_window_size=sizes.window or -1, do_rotary=int(rotates), rotary_interleaved=0,
                  softcap=50.0 if sizes.head_size == 256 and generator.random() < 0.4 else 0.0, causal=1, k_quant_type="NONE",
                  v_quant_type="NONE", qk_norm_epsilon=as_float32(1e-6), qk_output=0, sliding_window_cache=0, smooth_softmax=-1)


def apart(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Split of a product into queries, keys and values, for attention with norms."""
    sizes, lead = decoder(generator), rows(batch, generator)
    parts = (sizes.heads * sizes.head_size, *[sizes.kv_heads * sizes.head_size] * 2)
    return kernel("Split", [tensor(dtype, *lead, sum(parts)), numbers(*parts)], [(*lead, part) for part in parts], axis=-1)


def norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The RMS norm of a layer, or of the heads of queries or keys."""
    sizes = decoder(generator)
    shape: tuple[int, ...] = (*rows(batch, generator), sizes.width)
    if generator.random() < 0.25:
        texts, tokens, _ = shape
        shape = (texts, tokens * pick([sizes.heads, sizes.kv_heads], generator), sizes.head_size)
    return kernel("SimplifiedLayerNormalization", [tensor(dtype, *shape), tensor(dtype, shape[-1], constant=True)], [shape],
                  axis=-1, epsilon=as_float32(float(generator.choice([1e-5, 1e-6]))), stash_type=1)


def sum_and_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A residual sum and its RMS norm; mostly with both as outputs."""
    shape = (*rows(batch, generator), decoder(generator).width)
    outputs: list[Tensor] = [Tensor(dtype=dtype, shape=shape)]
    if generator.random() < 0.9:
        outputs += [Tensor(dtype=""), Tensor(dtype=""), Tensor(dtype=dtype, shape=shape)]
    return kernel("SkipSimplifiedLayerNormalization", [*[tensor(dtype, *shape)] * 2, tensor(dtype, shape[-1], constant=True)],
                  outputs, CONTRIB, epsilon=as_float32(float(generator.choice([1e-5, 1e-6]))))


def sum_and_layer_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A residual sum and its layer normalisation, as in encoders."""
    shape = (*rows(batch, generator), pick([384, 512, 768, 1024, 1280, 2560, 4096], generator))
    weights = [tensor(dtype, shape[-1], constant=True)] * (3 if generator.random() < 0.6 else 2)
    return kernel("SkipLayerNormalization", [*[tensor(dtype, *shape)] * 2, *weights], [shape], CONTRIB,
                  epsilon=as_float32(1e-5))


def rotary(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Rotary embedding of queries or keys."""
    sizes, (texts, tokens) = decoder(generator), rows(batch, generator)
    heads, positions = pick([sizes.heads, sizes.kv_heads], generator), max(tokens, pick([2048, 4096, 32768], generator))
    shape, rotates_all = (texts, tokens, heads * sizes.head_size), sizes.rotated == sizes.head_size
    return kernel("RotaryEmbedding", [tensor(dtype, *shape), indices((texts, tokens), positions),
                                      *[tensor(dtype, positions, sizes.rotated // 2, constant=True)] * 2], [shape], CONTRIB,
                  interleaved=0, is_packed_batching=0, num_heads=0 if rotates_all else heads,
                  rotary_embedding_dim=0 if rotates_all else sizes.rotated, scale=1.0)


class DrawnEncoder(NamedTuple):
    """Texts, tokens, heads and head size, as in encoders and speech models."""

    texts: int
    tokens: int
    heads: int
    head_size: int

    @property
    def width(self) -> int:
        return self.heads * self.head_size


def encoder(batch: int, generator: Generator) -> DrawnEncoder:
    tokens = int(generator.choice([64, 77, 128, 197, 256, 384, 512, 577, 1024, 1500, 2048]))
    return DrawnEncoder(min(batch, max(1, MOST_ROWS // tokens)), tokens, pick([6, 8, 12, 16, 20, 24, 32], generator),
                   pick([32, 64, 64, 64, 80, 128], generator))


def mask_of_keys(texts: int, keys: int, generator: Generator) -> KernelInput:
    """A mask of keys: a number per key, or per text where its keys end."""
    return tensor("int32", texts, *([keys] if generator.random() < 0.7 else []))


def attention(dtype: str, batch: int, generator: Generator) -> Kernel:
    """MultiHeadAttention: self-attention of an encoder, cross-attention, or one token after a cache."""
    sizes, kind = encoder(batch, generator), generator.choice(["self", "cross", "decoding"], p=[0.6, 0.15, 0.25])
    queries = sizes.tokens
    if kind != "self":
        queries = 1 if kind == "decoding" or generator.random() < 0.5 else pick([4, 77], generator)
    keys = 1 if kind == "decoding" else sizes.tokens
    inputs = [tensor(dtype, sizes.texts, queries, sizes.width), *[tensor(dtype, sizes.texts, keys, sizes.width)] * 2]
    outputs: list[tuple[int, ...]] = [(sizes.texts, queries, sizes.width)]
    causal = kind != "cross" and generator.random() < 0.3
    if kind == "decoding":
        cache = length(generator, high=4096)
        past, present = ((sizes.texts, sizes.heads, tokens, sizes.head_size) for tokens in (cache, cache + 1))
        inputs += [ABSENT, ABSENT, ABSENT, *[tensor(dtype, *past)] * 2]
        outputs += [present, present]
    else:
        biased, masked, added = (generator.random() < share for share in (0.4, 0.2, 0.25))
        inputs += [tensor(dtype, 3 * sizes.width, constant=True) if biased else ABSENT,
                   mask_of_keys(sizes.texts, keys, generator) if masked else ABSENT]
        if added:
            inputs.append(tensor(dtype, pick([1, sizes.texts], generator), pick([1, sizes.heads], generator), queries, keys))
        while not inputs[-1].present:
            inputs.pop()
    return kernel("MultiHeadAttention", inputs, outputs, CONTRIB, num_heads=sizes.heads, mask_filter_value=-10000.0,
                  scale=as_float32(sizes.head_size ** -0.5), unidirectional=int(causal))


def fused_attention(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Attention with projection, as the optimiser writes it for BERT and GPT-2."""
    sizes = encoder(batch, generator)
    inputs = [tensor(dtype, sizes.texts, sizes.tokens, sizes.width), tensor(dtype, sizes.width, 3 * sizes.width, constant=True),
              tensor(dtype, 3 * sizes.width, constant=True)]
    if generator.random() < 0.6:
        inputs.append(mask_of_keys(sizes.texts, sizes.tokens, generator))
    return kernel("Attention", inputs, [(sizes.texts, sizes.tokens, sizes.width)], CONTRIB, num_heads=sizes.heads, do_rotary=0,
                  mask_filter_value=-10000.0, past_present_share_buffer=0, rotary_embedding_dim=0, scale=0.0,
                  unidirectional=int(generator.random() < 0.3))


def packed_attention(dtype: str, batch: int, generator: Generator) -> Kernel:
    """PackedMultiHeadAttention: texts stored without padding."""
    sizes = encoder(batch, generator)
    tokens = sizes.texts * sizes.tokens
    inputs = [*[tensor(dtype, tokens, sizes.width)] * 3, tensor(dtype, 3 * sizes.width, constant=True)]
    if generator.random() < 0.4:
        inputs = [tensor(dtype, tokens, sizes.heads, 3, sizes.head_size), ABSENT, ABSENT, ABSENT]
    inputs += [tensor("int32", sizes.texts, sizes.tokens), tensor("int32", sizes.texts + 1)]
    return kernel("PackedMultiHeadAttention", inputs, [(tokens, sizes.width)], CONTRIB, num_heads=sizes.heads,
                  mask_filter_value=-10000.0, scale=as_float32(sizes.head_size ** -0.5))


def first_layer(dtype: str, batch: int, generator: Generator) -> Kernel:
    """EmbedLayerNormalization: the normalised sum of word, position and segment embeddings."""
    sizes = encoder(batch, generator)
    ids = tensor("int32", sizes.texts, sizes.tokens)
    tables = [tensor(dtype, size, sizes.width, constant=True) for size in (pick([21128, 30522, 50265], generator), 2048, 2)]
    inputs = [ids, ids, *tables, *[tensor(dtype, sizes.width, constant=True)] * 2, *[ids] * int(generator.random() < 0.5)]
    outputs = [Tensor(dtype=dtype, shape=(sizes.texts, sizes.tokens, sizes.width)), Tensor(dtype="int32", shape=(sizes.texts,))]
    return kernel("EmbedLayerNormalization", inputs, outputs, CONTRIB, epsilon=as_float32(1e-12), mask_index_type=0)


def activation(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The activation function between two layers; SiLU becomes QuickGelu."""
    shape = (*rows(batch, generator), decoder(generator).between)
    op = str(generator.choice(ACTIVATIONS, p=[0.4, 0.15, 0.3, 0.15]))
    biased = op == "BiasGelu" or (op == "FastGelu" and generator.random() < 0.4)
    own_attributes: dict[str, dict[str, Any]] = {"QuickGelu": {"alpha": 1.0 if generator.random() < 0.8 else as_float32(1.702)},
                                              "Gelu": {"approximate": "tanh"}}
    return kernel(op, [tensor(dtype, *shape), *[tensor(dtype, shape[-1], constant=True)] * biased], [shape],
                  "" if op == "Gelu" else CONTRIB, **own_attributes.get(op, {}))


def elementwise(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Gates, biases and sums around layers, SiLU as two nodes, casts."""
    sizes, lead = decoder(generator), rows(batch, generator)
    shape = (*lead, pick([sizes.between, sizes.between, sizes.width], generator))
    op = str(generator.choice(["Mul", "Add", "Sigmoid", "Bias"], p=[0.5, 0.15, 0.2, 0.15]))
    if op == "Sigmoid":
        return kernel(op, [tensor(dtype, *shape)], [shape])
    other = tensor(dtype, shape[-1], constant=True) if op == "Bias" else tensor(dtype, *shape)
    return kernel("Add" if op == "Bias" else op, [tensor(dtype, *shape), other], [shape])


def embedding(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Word embeddings."""
    sizes, lead = decoder(generator), rows(batch, generator)
    return kernel("Gather", [tensor(dtype, sizes.vocabulary, sizes.width, constant=True), indices(lead, sizes.vocabulary)],
                  [(*lead, sizes.width)], axis=0)


def quantised_embedding(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Word embeddings from a table in blocks of 4 or 8 bits."""
    sizes, lead = decoder(generator), rows(batch, generator)
    bits, block = pick([4, 4, 8], generator), pick([16, 32, 128], generator)
    blocks = -(-sizes.width // block)
    inputs = [tensor("uint8", sizes.vocabulary, sizes.width * bits // 8, constant=True), indices(lead, sizes.vocabulary),
              tensor(dtype, sizes.vocabulary, blocks, constant=True)]
    if generator.random() < 0.4:
        inputs.append(tensor("uint8", sizes.vocabulary, -(-blocks * bits // 8), constant=True))
    return kernel("GatherBlockQuantized", inputs, [Tensor(dtype=dtype, shape=(*lead, sizes.width))], CONTRIB, bits=bits,
                  block_size=block, gather_axis=0, quantize_axis=1)


class DrawnExperts(NamedTuple):
    """Tokens and experts: how many exist, how many each token uses, and their widths."""

    tokens: int
    available: int
    chosen: int
    width: int
    between: int


def experts(batch: int, generator: Generator) -> DrawnExperts:
    texts, tokens = rows(batch, generator)
    available, chosen, width, between = MIXTURES[int(generator.integers(len(MIXTURES)))]
    return DrawnExperts(min(texts * tokens, 4096), available, chosen, width, between)


def mixture(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A mixture of experts, of which each token uses a few."""
    sizes = experts(batch, generator)
    gated = generator.random() < 0.6
    inputs = [tensor(dtype, sizes.tokens, sizes.width), tensor(dtype, sizes.tokens, sizes.available),
              tensor(dtype, sizes.available, sizes.between * (1 + gated), sizes.width, constant=True), ABSENT,
              tensor(dtype, sizes.available, sizes.width, sizes.between, constant=True)]
    return kernel("MoE", inputs, [(sizes.tokens, sizes.width)], CONTRIB, k=sizes.chosen, normalize_routing_weights=1,
                  use_sparse_mixer=0, **_expert_activation(gated))


def quantised_mixture(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A mixture of experts with weights of 4 or 8 bits."""
    sizes, bits = experts(batch, generator), pick([4, 4, 8], generator)
    gated = generator.random() < 0.6
    first, second = sizes.between * (1 + gated), sizes.width
    inputs = [tensor(dtype, sizes.tokens, sizes.width), tensor(dtype, sizes.tokens, sizes.available),
              tensor("uint8", sizes.available, first, sizes.width * bits // 8, constant=True),
              tensor(dtype, sizes.available, first, constant=True), ABSENT,
              tensor("uint8", sizes.available, second, sizes.between * bits // 8, constant=True),
              tensor(dtype, sizes.available, second, constant=True)]
    return kernel("QMoE", inputs, [(sizes.tokens, sizes.width)], CONTRIB, k=sizes.chosen, normalize_routing_weights=1,
                  use_sparse_mixer=0, expert_weight_bits=bits, **_expert_activation(gated))


def _expert_activation(gated: bool) -> dict[str, Any]:
    return {"activation_type": "swiglu", "swiglu_fusion": 1} if gated else {"activation_type": "silu"}


def quantise(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An activation quantised to 8 bits, or dequantised."""
    shape, kind = (*rows(batch, generator), decoder(generator).width), str(generator.choice(["int8", "uint8"]))
    scale = [tensor(dtype, constant=True), tensor(kind, constant=True)]
    if generator.random() < 0.5:
        return kernel("QuantizeLinear", [tensor(dtype, *shape), *scale], [Tensor(dtype=kind, shape=shape)], axis=1, saturate=1)
    return kernel("DequantizeLinear", [tensor(kind, *shape), *scale], [Tensor(dtype=dtype, shape=shape)], axis=1)


ATTENTION_OPSET, BFLOAT16_OPSET = 23, 22
BFLOAT16_DRAWS = (layers.convolution, layers.convolution, layers.gemm, layers.layer_product, layers.batched_product,
                  layers.pool, layers.global_pool, layers.layer_norm, layers.softmax, layers.mean)


def onnx_attention(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ONNX's Attention: self-attention of an encoder, cross-attention, a prompt, or one token after others. With heads before
    tokens, as exporters write it, or in three dimensions."""
    kind = str(generator.choice(["self", "cross", "prompt", "decoding"], p=[0.35, 0.1, 0.3, 0.25]))
    if kind in ("self", "cross"):
        sizes = encoder(batch, generator)
        texts, heads, kv_heads, head_size = sizes.texts, sizes.heads, sizes.heads, sizes.head_size
        keys, queries = sizes.tokens, sizes.tokens if kind == "self" else pick([1, 4, 77], generator)
    else:
        model = decoder(generator)
        heads, kv_heads, head_size = model.heads, model.kv_heads if generator.random() < 0.5 else model.heads, model.head_size
        keys = length(generator, high=8192)
        queries = keys if kind == "prompt" else 1
        texts = max(1, min(batch, MOST_ROWS // max(queries, keys // 8)))
    in_heads = generator.random() < 0.8

    def part(tokens: int, count: int) -> KernelInput:
        return tensor(dtype, *((texts, count, tokens, head_size) if in_heads else (texts, tokens, count * head_size)))

    inputs = [part(queries, heads), part(keys, kv_heads), part(keys, kv_heads)]
    causal = kind == "prompt" and generator.random() < 0.6
    if generator.random() < (0.4 if kind != "prompt" else 0.0 if causal else 0.8):
        inputs.append(tensor(dtype if generator.random() < 0.7 else "bool", pick([1, texts], generator), 1, queries, keys))
    head_counts: dict[str, Any] = {} if in_heads else {"q_num_heads": heads, "kv_num_heads": kv_heads}
    return kernel("Attention", inputs, [inputs[0].shape], opset=ATTENTION_OPSET, is_causal=int(causal), qk_matmul_output_mode=0,
                  scale=as_float32(head_size ** -0.5), softcap=0.0, **head_counts)


def rms_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """RMSNormalization of a layer, or of the heads of queries or keys."""
    sizes, lead = decoder(generator), rows(batch, generator)
    shape = (*lead, sizes.width) if generator.random() < 0.75 else (lead[0], sizes.heads, lead[1], sizes.head_size)
    return kernel("RMSNormalization", [tensor(dtype, *shape), tensor(dtype, shape[-1], constant=True)], [shape],
                  opset=ATTENTION_OPSET, axis=-1, epsilon=as_float32(1e-5), stash_type=1)


def onnx_rotary(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Rotary embedding of queries or keys."""
    sizes, (texts, tokens) = decoder(generator), rows(batch, generator)
    positions = max(tokens, pick([2048, 4096, 32768], generator))
    shape = (texts, pick([sizes.heads, sizes.kv_heads], generator), tokens, sizes.head_size)
    return kernel("RotaryEmbedding", [tensor(dtype, *shape), *[tensor(dtype, positions, sizes.rotated // 2, constant=True)] * 2,
                                      indices((texts, tokens), positions)], [shape], opset=ATTENTION_OPSET, interleaved=0,
                  num_heads=0, rotary_embedding_dim=0 if sizes.rotated == sizes.head_size else sizes.rotated)


def integer_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product of 8-bit integers."""
    depth, columns = product_sizes(generator) if generator.random() < 0.5 else (
        channels(generator, 32, 4096), channels(generator, 32, 4096))
    lead = rows(batch, generator)
    return kernel("MatMulInteger", [tensor("int8", *lead, depth), tensor("int8", depth, columns, constant=True)],
                  [Tensor(dtype="int32", shape=(*lead, columns))])


def quantised_activation(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An activation quantised to 8 bits, or dequantised."""
    return _quantised(dtype, activation_shape(batch, generator), 0, generator, to_whole=generator.random() < 0.6)


def quantised_weight(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An 8-bit weight, of a convolution or product, dequantised with one scale or one per channel."""
    if generator.random() < 0.5:
        window = [pick([1, 3, 3, 5, 7], generator)] * 2
        shape = (channels(generator), 1 if generator.random() < 0.25 else channels(generator, 8, 1024), *window)
        return _quantised(dtype, shape, shape[0], generator, axis=0)
    shape = product_sizes(generator) if generator.random() < 0.3 else (
        channels(generator, 32, 4096), channels(generator, 32, 4096))
    return _quantised(dtype, shape, shape[1], generator, axis=1)


def _quantised(dtype: str, shape: tuple[int, ...], scales: int, generator: Generator, to_whole: bool = False,
             axis: int = 1) -> Kernel:
    """Numbers quantised to 8 bits, or dequantised; with one scale, or mostly with `scales` ones if that is not 0."""
    scale_shape = (scales,) if scales and generator.random() < 0.7 else ()
    integer_type = str(generator.choice(["int8", "uint8"]))
    from_type, to_type = (dtype, integer_type) if to_whole else (integer_type, dtype)
    own_attributes: dict[str, Any] = {"saturate": 1} if to_whole else {}
    inputs = [tensor(from_type, *shape, constant=bool(scales)), tensor(dtype, *scale_shape, constant=True),
              tensor(integer_type, *scale_shape, constant=True)]
    return kernel("QuantizeLinear" if to_whole else "DequantizeLinear", inputs, [Tensor(dtype=to_type, shape=shape)], axis=axis,
                  **own_attributes)


def in_bfloat16(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A kernel of a network in bfloat16."""
    drawn = BFLOAT16_DRAWS[int(generator.integers(len(BFLOAT16_DRAWS)))]("bfloat16", batch, generator)
    return describe_kernel(drawn.op_type, drawn.domain, drawn.opset if drawn.domain else BFLOAT16_OPSET, drawn.attributes,
                           drawn.inputs, drawn.outputs)
