"""What a GroupQueryAttention attends to, and what follows: operations and bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hase.kernel_model.sampling.free_shapes.sizes import ABSENT, CONTRIB, kernel, tensor
from hase.records.attention import AttentionSizes, kernel_grouped_query_sizes, with_lengths
from hase.records.kernel_record import Kernel


def attention(batch: int = 1, queries: int = 1, cache: int = 64, total: int | None = 33, heads: int = 8, kv_heads: int = 2,
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


def sizes_of(described: Kernel) -> AttentionSizes:
    sizes = kernel_grouped_query_sizes(described)
    assert sizes is not None
    return sizes


@pytest.mark.parametrize("packed", [True, False])
def test_sizes_are_read_from_shapes_and_values(packed: bool) -> None:
    sizes = sizes_of(attention(batch=2, packed=packed, rotary=16, local_window_size=128))
    assert sizes == AttentionSizes(batch=2, queries=1, heads=8, kv_heads=2, head_size=32, total=33, cache=64, window=128,
                                   rotary=16, packed=packed)
    assert (sizes.past, sizes.present, sizes.shares_buffer) == (32, 64, True)


def test_without_lengths_the_new_tokens_follow_a_full_cache() -> None:
    sizes = sizes_of(attention(queries=3, cache=5, total=None))
    assert (sizes.total, sizes.past, sizes.present, sizes.shares_buffer) == (8, 5, 8, False)
    assert [sizes_of(attention(cache=cache)).shares_buffer for cache in (33, 32)] == [True, False]  # of 33 tokens


def test_pairs_are_those_of_a_causal_mask_and_a_window() -> None:
    for queries, past, window in itertools.product((1, 2, 5, 9), (0, 1, 4, 20), (0, 1, 3, 7, 100)):
        wanted = sum(min(place + 1, window or place + 1) for place in range(past, past + queries))
        total = past + queries
        sizes = AttentionSizes(1, queries, 1, 1, 8, total, total, window, 0, True)
        assert sizes.pairs == wanted, (queries, past, window)


def test_operations_grow_with_the_attended_length_not_with_the_buffer() -> None:
    decoding = attention(cache=2048, total=1025)
    assert decoding.flops == 4 * 8 * 32 * 1025
    assert decoding.flops == attention(cache=4096, total=1025).flops
    prompt = attention(queries=100, cache=0, total=100)
    assert prompt.flops == 4 * 8 * 32 * 100 * 101 // 2  # half of the products, and the diagonal
    assert attention(rotary=16).flops - attention().flops == 3 * (8 + 2) * 16


def test_norms_of_heads_count() -> None:
    """Queries and keys of models with such norms are described so on a GPU."""
    plain = attention(packed=False)
    inputs = [*plain.inputs, *[ABSENT] * 7, *[tensor("float16", 32, constant=True)] * 2]
    normed = kernel("GroupQueryAttention", inputs, plain.outputs, CONTRIB, **plain.attributes)
    assert (sizes_of(normed).normed, normed.flops - plain.flops) == (True, 4 * (8 + 2) * 32)
    assert normed.bytes_read - plain.bytes_read == 2 * 2 * 32


def test_bytes_are_those_of_attended_tokens() -> None:
    token = 2 * 2 * 2 * 32  # keys and values of one, in half precision
    around = 2 * 384 + 4 + 4
    shared = attention(cache=2048, total=1025)
    assert shared.bytes_read == around + 1024 * token
    assert shared.bytes_written == 2 * 256 + token
    windowed = attention(cache=2048, total=1025, local_window_size=128)
    assert windowed.bytes_read == around + 127 * token
    copied = attention(cache=1024, total=1025)  # the whole cache is written anew
    assert copied.bytes_read == around + 1024 * token
    assert copied.bytes_written == 2 * 256 + 1025 * token
    assert attention(rotary=16).bytes_read - attention().bytes_read == 2 * 2 * 8  # a row of each table


def test_kernels_of_other_lengths_have_other_ids() -> None:
    kernels = [attention(cache=2048, total=total) for total in (1024, 1025)] + [attention(cache=4096, total=1025)]
    assert len({described.id for described in kernels}) == 3


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
