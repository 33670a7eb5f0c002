"""Sizes and costs of attention by operators other than GroupQueryAttention."""

from __future__ import annotations

from typing import Any

import pytest

from hase.kernel_model.sampling.free_shapes.sizes import ABSENT, CONTRIB, kernel, tensor
from hase.records.attention import AttentionSizes, kernel_attention_sizes
from hase.records.kernel_record import Kernel, KernelInput

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
    "keys and values in one": (attention(ROW, tensor("float16", BATCH, 77, HEADS, 2, SIZE)), attended(total=77)),
    "another text": (attention(ROW, *[tensor("float16", BATCH, 77, WIDTH)] * 2), attended(total=77)),
    "another text, heads first": (attention(ROW, *[tensor("float16", BATCH, HEADS, 77, SIZE)] * 2), attended(total=77)),
    "old tokens": (attention(*[tensor("float16", BATCH, 1, WIDTH)] * 3, *[ABSENT] * 3, CACHE, CACHE),
                   attended(queries=1, total=32, cache=31)),
    "a mask of keys": (attention(ROW, ROW, ROW, ABSENT, tensor("int32", BATCH, QUERIES)), attended(mask="keys")),
    "added numbers": (attention(ROW, ROW, ROW, ABSENT, ABSENT, tensor("float16", 1, 1, QUERIES, QUERIES)),
                      attended(mask="added")),
    "projected": (attention(tensor("float16", BATCH, QUERIES, 24), *PROJECTION, name="Attention"), attended()),
    "projected, old tokens": (attention(tensor("float16", BATCH, QUERIES, 24), *PROJECTION, ABSENT,
                                        tensor("float16", 2, BATCH, HEADS, 5, SIZE), name="Attention"),
                              attended(total=QUERIES + 5, cache=5)),
    "without padding": (attention(*[tensor("float16", 20, WIDTH)] * 3, ABSENT, *PACKED_ROWS, name="PackedMultiHeadAttention"),
                        attended(unpadded=20)),
    "without padding, one tensor": (attention(tensor("float16", 20, HEADS, 3, SIZE), *[ABSENT] * 3, *PACKED_ROWS,
                                              name="PackedMultiHeadAttention"), attended(unpadded=20, packed=True)),
    "ONNX's own": (attention(*[tensor("float16", BATCH, HEADS, QUERIES, SIZE)] * 3, name="Attention", domain="", is_causal=1),
                   attended(causal=True)),
    "ONNX's own, few heads of keys": (
        attention(ROW, *[tensor("float16", BATCH, QUERIES, WIDTH // 2)] * 2, tensor("float16", QUERIES, QUERIES),
                  name="Attention", domain="", q_num_heads=HEADS, kv_num_heads=2), attended(kv_heads=2, mask="added"))}


@pytest.mark.parametrize("name", WANTED)
def test_sizes_are_read_from_shapes(name: str) -> None:
    described, wanted = WANTED[name]
    assert kernel_attention_sizes(described) == wanted


def test_other_operators_have_no_such_sizes() -> None:
    assert kernel_attention_sizes(kernel("MatMul", [ROW, tensor("float16", WIDTH, WIDTH)], [(BATCH, QUERIES, WIDTH)])) is None
    assert kernel_attention_sizes(attention(tensor("float16"), name="Attention")) is None  # a shape that is not known


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
def test_operations(name: str, flops: int) -> None:
    assert WANTED[name][0].flops == flops
