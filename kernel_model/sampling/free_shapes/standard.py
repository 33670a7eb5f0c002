"""Kernels of no model, of operators that ONNX itself defines for language models since its operator set 23, of quantised
networks, and of networks in bfloat16.

Exporters write attention as one node since then. Quantisers write networks with nodes that round to eight bits and back, which
a GPU runs one by one, or products of whole numbers.
"""

from __future__ import annotations

from typing import Any

from hase.kernel_model.sampling.free_shapes import language, products, reductions
from hase.kernel_model.sampling.free_shapes.language import decoder, encoder, product_sizes, rows
from hase.kernel_model.sampling.free_shapes.sizes import (
    Generator,
    activation_shape,
    as_float32,
    channels,
    indices,
    kernel,
    pick,
    tensor,
)
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel

ATTENTION_OPSET, BFLOAT16_OPSET = 23, 22
OF_NETWORKS = (products.convolution, products.convolution, products.gemm, products.layer_product, products.batched_product,
               products.pool, products.global_pool, reductions.layer_norm, reductions.softmax, reductions.mean)


def attention(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ONNX's Attention: of an encoder, from one text to another, of a prompt, or of one token after others; with the heads
    before the tokens, as exporters write it, or in three dimensions."""
    kind = str(generator.choice(["self", "cross", "prompt", "decoding"], p=[0.35, 0.1, 0.3, 0.25]))
    if kind in ("self", "cross"):
        sizes = encoder(batch, generator)
        texts, heads, kv_heads, head_size = sizes.texts, sizes.heads, sizes.heads, sizes.head_size
        keys, queries = sizes.tokens, sizes.tokens if kind == "self" else pick([1, 4, 77], generator)
    else:
        of = decoder(generator)
        heads, kv_heads, head_size = of.heads, of.kv_heads if generator.random() < 0.5 else of.heads, of.head_size
        keys = language.length(generator, high=8192)
        queries = keys if kind == "prompt" else 1
        texts = max(1, min(batch, language.MOST_ROWS // max(queries, keys // 8)))
    in_heads = generator.random() < 0.8

    def part(tokens: int, count: int) -> KernelInput:
        return tensor(dtype, *((texts, count, tokens, head_size) if in_heads else (texts, tokens, count * head_size)))

    inputs = [part(queries, heads), part(keys, kv_heads), part(keys, kv_heads)]
    causal = kind == "prompt" and generator.random() < 0.6
    if generator.random() < (0.4 if kind != "prompt" else 0.0 if causal else 0.8):
        inputs.append(tensor(dtype if generator.random() < 0.7 else "bool", pick([1, texts], generator), 1, queries, keys))
    of_heads: dict[str, Any] = {} if in_heads else {"q_num_heads": heads, "kv_num_heads": kv_heads}
    return kernel("Attention", inputs, [inputs[0].shape], opset=ATTENTION_OPSET, is_causal=int(causal), qk_matmul_output_mode=0,
                  scale=as_float32(head_size ** -0.5), softcap=0.0, **of_heads)


def norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """RMSNormalization of a layer, or of the heads of queries or keys."""
    of, lead = decoder(generator), rows(batch, generator)
    shape = (*lead, of.width) if generator.random() < 0.75 else (lead[0], of.heads, lead[1], of.head_size)
    return kernel("RMSNormalization", [tensor(dtype, *shape), tensor(dtype, shape[-1], constant=True)], [shape],
                  opset=ATTENTION_OPSET, axis=-1, epsilon=as_float32(1e-5), stash_type=1)


def rotary(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Queries or keys turned by their places."""
    of, (texts, tokens) = decoder(generator), rows(batch, generator)
    places = max(tokens, pick([2048, 4096, 32768], generator))
    shape = (texts, pick([of.heads, of.kv_heads], generator), tokens, of.head_size)
    return kernel("RotaryEmbedding", [tensor(dtype, *shape), *[tensor(dtype, places, of.rotated // 2, constant=True)] * 2,
                                      indices((texts, tokens), places)], [shape], opset=ATTENTION_OPSET, interleaved=0,
                  num_heads=0, rotary_embedding_dim=0 if of.rotated == of.head_size else of.rotated)


def integer_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product of whole numbers of eight bits."""
    depth, columns = product_sizes(generator) if generator.random() < 0.5 else (
        channels(generator, 32, 4096), channels(generator, 32, 4096))
    lead = rows(batch, generator)
    return kernel("MatMulInteger", [tensor("int8", *lead, depth), tensor("int8", depth, columns, constant=True)],
                  [Tensor(dtype="int32", shape=(*lead, columns))])


def quantised_activation(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An activation to whole numbers of eight bits, or back."""
    return _rounded(dtype, activation_shape(batch, generator), 0, generator, to_whole=generator.random() < 0.6)


def quantised_weight(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A weight of eight bits to floating numbers: of a convolution or a product, with one scale, or one for each channel."""
    if generator.random() < 0.5:
        window = [pick([1, 3, 3, 5, 7], generator)] * 2
        shape = (channels(generator), 1 if generator.random() < 0.25 else channels(generator, 8, 1024), *window)
        return _rounded(dtype, shape, shape[0], generator, axis=0)
    shape = product_sizes(generator) if generator.random() < 0.3 else (
        channels(generator, 32, 4096), channels(generator, 32, 4096))
    return _rounded(dtype, shape, shape[1], generator, axis=1)


def _rounded(dtype: str, shape: tuple[int, ...], scales: int, generator: Generator, to_whole: bool = False,
             axis: int = 1) -> Kernel:
    """Numbers rounded to eight bits, or the reverse; with one scale, or mostly as many as `scales` where that is not 0."""
    about = (scales,) if scales and generator.random() < 0.7 else ()
    whole = str(generator.choice(["int8", "uint8"]))
    first, made = (dtype, whole) if to_whole else (whole, dtype)
    of_operator: dict[str, Any] = {"saturate": 1} if to_whole else {}
    inputs = [tensor(first, *shape, constant=bool(scales)), tensor(dtype, *about, constant=True),
              tensor(whole, *about, constant=True)]
    return kernel("QuantizeLinear" if to_whole else "DequantizeLinear", inputs, [Tensor(dtype=made, shape=shape)], axis=axis,
                  **of_operator)


def in_bfloat16(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A kernel of a network in bfloat16."""
    drawn = OF_NETWORKS[int(generator.integers(len(OF_NETWORKS)))]("bfloat16", batch, generator)
    return describe_kernel(drawn.op_type, drawn.domain, drawn.opset if drawn.domain else BFLOAT16_OPSET, drawn.attributes,
                           drawn.inputs, drawn.outputs)
