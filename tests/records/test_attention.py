"""What attention attends to, and what follows: operations and bytes. First of GroupQueryAttention, then of others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hase.kernel_model.sampling.free_shapes.sizes import ABSENT, CONTRIB, kernel, tensor
from hase.records.attention import AttentionSizes, kernel_attention_sizes, kernel_grouped_query_sizes, with_lengths
from hase.records.kernel_record import Kernel, KernelInput


def grouped(batch: int = 1, queries: int = 1, cache: int = 64, total: int | None = 33, heads: int = 8, kv_heads: int = 2,
              head_size: int = 32, packed: bool = True, rotary: int = 0, **attributes: Any) -> Kernel:
    """A GroupQueryAttention in half precision; without `total`, nothing says how many tokens there are."""
    wide, narrow = heads * head_size, kv_heads * head_size
    inputs = [tensor("float16", batch, queries, wide + 2 * narrow * packed), *(
        [ABSENT] * 2 if packed else [tensor("float16", batch, queries, narrow)] * 2)]
    inputs += [*[tensor("float16", batch, kv_heads, cache, head_size)] * 2, tensor("int32", batch), tensor("int32")]
    inputs += [tensor("float16", 2048, rotary // 2, constant=True)] * 2 * bool(rotary)
    inputs = inputs if total is None else with_lengths(inputs, total)
    present = (batch, kv_heads, max(cache, total or cache + queries), head_size)
    return kernel("GroupQueryAttention", inputs, [(batch, queries, wide), present, present], CONTRIB, num_heads=heads,
                  kv_num_heads=kv_heads, do_rotary=int(bool(rotary)), **attributes)


@pytest.mark.parametrize("packed", [True, False])
def test_sizes_are_read_from_shapes_and_values(packed: bool) -> None:
    wanted = AttentionSizes(batch=2, queries=1, heads=8, kv_heads=2, head_size=32, total=33, cache=64, window=128, rotary=16,
                            packed=packed)
    assert kernel_grouped_query_sizes(grouped(batch=2, packed=packed, rotary=16, local_window_size=128)) == wanted
    assert (wanted.past, wanted.present, wanted.shares_buffer) == (32, 64, True)
    full = kernel_grouped_query_sizes(grouped(queries=3, cache=5, total=None))  # the new tokens follow a full cache
    assert full is not None
    assert (full.total, full.past, full.present, full.shares_buffer) == (8, 5, 8, False)


def test_pairs_are_those_of_a_causal_mask_and_a_window() -> None:
    for queries, past, window in itertools.product((1, 2, 5, 9), (0, 1, 4, 20), (0, 1, 3, 7, 100)):
        wanted = sum(min(place + 1, window or place + 1) for place in range(past, past + queries))
        total = past + queries
        sizes = AttentionSizes(1, queries, 1, 1, 8, total, total, window, 0, True)
        assert sizes.pairs == wanted, (queries, past, window)


def test_operations_grow_with_the_attended_length_not_with_the_buffer() -> None:
    decoding = grouped(cache=2048, total=1025)
    assert decoding.flops == 4 * 8 * 32 * 1025
    assert decoding.flops == grouped(cache=4096, total=1025).flops
    prompt = grouped(queries=100, cache=0, total=100)
    assert prompt.flops == 4 * 8 * 32 * 100 * 101 // 2  # half of the products, and the diagonal
    assert grouped(rotary=16).flops - grouped().flops == 3 * (8 + 2) * 16


def test_norms_of_heads_count() -> None:
    """Queries and keys of models with such norms are described so on a GPU."""
    plain = grouped(packed=False)
    inputs = [*plain.inputs, *[ABSENT] * 7, *[tensor("float16", 32, constant=True)] * 2]
    normed = kernel("GroupQueryAttention", inputs, plain.outputs, CONTRIB, **plain.attributes)
    assert normed.flops - plain.flops == 4 * (8 + 2) * 32
    assert normed.bytes_read - plain.bytes_read == 2 * 2 * 32


def test_bytes_are_those_of_attended_tokens() -> None:
    token = 2 * 2 * 2 * 32  # keys and values of one, in half precision
    around, out = 2 * 384 + 4 + 4, 2 * 256
    for described, read, wrote in ((grouped(cache=2048, total=1025), 1024, 1),
                                   (grouped(cache=2048, total=1025, local_window_size=128), 127, 1),
                                   (grouped(cache=1024, total=1025), 1024, 1025)):  # the whole cache is written anew
        assert (described.bytes_read, described.bytes_written) == (around + read * token, out + wrote * token)
    assert grouped(rotary=16).bytes_read - grouped().bytes_read == 2 * 2 * 8  # a row of each table


def test_quantised_weights_are_read_packed_with_their_scales() -> None:
    quantised = kernel("MatMulNBits", [tensor("float16", 4, 64), tensor("uint8", 96, 2, 16, constant=True),
                                       tensor("float16", 96, 2, constant=True)], [(4, 96)], CONTRIB, K=64, N=96, bits=4,
                       block_size=32)
    assert (quantised.flops, quantised.bytes_read) == (2 * 4 * 64 * 96, 2 * 4 * 64 + 96 * 32 + 2 * 96 * 2)
    table = [tensor("uint8", 1000, 64, constant=True), tensor("int64", 1, 4), tensor("float16", 1000, 4, constant=True)]
    gathered = kernel("GatherBlockQuantized", table, [(1, 4, 128)], CONTRIB, bits=4, block_size=32)
    assert gathered.bytes_read == 4 * 64 + 8 * 4 + 4 * 4 * 2  # rows of an embedding


def test_experts_count_as_often_as_tokens_choose_them() -> None:
    def mixture(tokens: int) -> Kernel:
        inputs = [tensor("float16", tokens, 64), tensor("float16", tokens, 8), tensor("float16", 8, 128, 64, constant=True),
                  ABSENT, tensor("float16", 8, 64, 128, constant=True)]
        return kernel("MoE", inputs, [(tokens, 64)], CONTRIB, k=2)

    assert mixture(1).flops == 2 * 2 * (128 * 64 + 64 * 128)
    weights = 2 * 8 * 2 * 128 * 64
    assert mixture(1).bytes_read == weights // 4 + 2 * (64 + 8)  # two of eight experts
    assert mixture(100).bytes_read == weights + 2 * 100 * (64 + 8)


# attention by other operators -------------------------------------------------------------------------------------------------

BATCH, QUERIES, HEADS, SIZE = 2, 16, 4, 8
WIDTH = HEADS * SIZE
ROW = tensor("float16", BATCH, QUERIES, WIDTH)
CACHE = tensor("float16", BATCH, HEADS, 31, SIZE)


def attention(*inputs: KernelInput, name: str = "MultiHeadAttention", domain: str = CONTRIB, **attributes: Any) -> Kernel:
    return kernel(name, list(inputs), [(BATCH, QUERIES, WIDTH)], domain, **{"num_heads": HEADS, **attributes})


def attended(**changed: Any) -> AttentionSizes:
    """The sizes of attention of each token to all of its text."""
    return AttentionSizes(batch=BATCH, queries=QUERIES, heads=HEADS, kv_heads=HEADS, head_size=SIZE, total=QUERIES, cache=0,
                          window=0, rotary=0, packed=False, causal=False)._replace(**changed)


PACKED_ROWS = (tensor("int32", BATCH, QUERIES), tensor("int32", BATCH + 1))
PROJECTION = (tensor("float16", 24, 3 * WIDTH, constant=True), tensor("float16", 3 * WIDTH, constant=True))
WANTED: dict[str, tuple[Kernel, AttentionSizes]] = {
    "three tensors": (attention(ROW, ROW, ROW), attended()),
    "causal": (attention(ROW, ROW, ROW, unidirectional=1), attended(causal=True)),
    "one tensor": (attention(tensor("float16", BATCH, QUERIES, HEADS, 3, SIZE)), attended(packed=True)),
    "another text, heads first": (attention(ROW, *[tensor("float16", BATCH, HEADS, 77, SIZE)] * 2), attended(total=77)),
    "old tokens": (attention(*[tensor("float16", BATCH, 1, WIDTH)] * 3, *[ABSENT] * 3, CACHE, CACHE),
                   attended(queries=1, total=32, cache=31)),
    "a mask of keys": (attention(ROW, ROW, ROW, ABSENT, tensor("int32", BATCH, QUERIES)), attended(mask="keys")),
    "added numbers": (attention(ROW, ROW, ROW, ABSENT, ABSENT, tensor("float16", 1, 1, QUERIES, QUERIES)),
                      attended(mask="added")),
    "projected": (attention(tensor("float16", BATCH, QUERIES, 24), *PROJECTION, name="Attention"), attended()),
    "without padding": (attention(*[tensor("float16", 20, WIDTH)] * 3, ABSENT, *PACKED_ROWS, name="PackedMultiHeadAttention"),
                        attended(unpadded=20)),
    "ONNX's own": (attention(*[tensor("float16", BATCH, HEADS, QUERIES, SIZE)] * 3, name="Attention", domain="", is_causal=1),
                   attended(causal=True)),
    "ONNX's own, few heads of keys": (
        attention(ROW, *[tensor("float16", BATCH, QUERIES, WIDTH // 2)] * 2, tensor("float16", QUERIES, QUERIES),
                  name="Attention", domain="", q_num_heads=HEADS, kv_num_heads=2), attended(kv_heads=2, mask="added"))}


@pytest.mark.parametrize("name", WANTED)
def test_sizes_of_other_operators_are_read_from_shapes(name: str) -> None:
    described, wanted = WANTED[name]
    assert kernel_attention_sizes(described) == wanted


def test_what_is_stored_between_steps_counts_as_written_and_read() -> None:
    plain = attention(ROW, ROW, ROW)
    assert (plain.bytes_read, plain.bytes_written) == (3 * ROW.bytes, ROW.bytes)
    bias = tensor("float16", 3 * WIDTH, constant=True)
    biased = attention(ROW, ROW, ROW, bias)
    assert (biased.bytes_read, biased.bytes_written) == (6 * ROW.bytes + bias.bytes, 4 * ROW.bytes)
    mask = tensor("int32", BATCH, QUERIES)
    scores = 2 * BATCH * HEADS * QUERIES * QUERIES
    masked = attention(ROW, ROW, ROW, ABSENT, mask)
    assert (masked.bytes_read, masked.bytes_written) == (3 * ROW.bytes + mask.bytes + 2 * scores, ROW.bytes + 2 * scores)


def test_a_projection_is_a_product_whose_result_is_stored_twice() -> None:
    text = tensor("float16", BATCH, QUERIES, 24)
    described = attention(text, *PROJECTION, name="Attention")
    tokens = BATCH * QUERIES
    assert described.flops == 4 * tokens * WIDTH * QUERIES + 2 * tokens * 24 * 3 * WIDTH
    assert described.bytes_written == ROW.bytes + 2 * 3 * ROW.bytes


@pytest.mark.parametrize(("name", "flops"), [
    ("three tensors", 4 * BATCH * QUERIES * WIDTH * QUERIES),
    ("causal", 4 * BATCH * WIDTH * QUERIES * (QUERIES + 1) // 2),  # half of the products, and the diagonal
    ("old tokens", 4 * BATCH * WIDTH * 32),
    ("without padding", 4 * 20 * WIDTH * QUERIES),
])
def test_operations_of_other_operators(name: str, flops: int) -> None:
    assert WANTED[name][0].flops == flops
