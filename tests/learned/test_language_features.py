"""Which CUDA kernels ONNX Runtime picks for language models, by its rules."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hase.graph_model.simulation.pipeline import NodeKind, PipelineCosts, Runs, Tracks, node_kind, pipeline_ms
from hase.kernel_model.sampling.free_shapes.sizes import ABSENT, CONTRIB, kernel, tensor
from hase.learned.kernels.features import LANGUAGE_GROUPS, language_features
from hase.ort_analysis.cuda.kernel_choice import Gpu, attention_algorithm, language_algorithm, product_algorithm
from hase.records.attention import kernel_grouped_query_sizes, with_lengths
from hase.records.kernel_record import Kernel, KernelInput


def attention(queries: int = 1, cache: int = 2048, total: int = 1025, heads: int = 32, kv_heads: int = 8, head_size: int = 128,
              batch: int = 1, dtype: str = "float16", **attributes: Any) -> Kernel:
    inputs = [tensor(dtype, batch, queries, (heads + 2 * kv_heads) * head_size), ABSENT, ABSENT,
              *[tensor(dtype, batch, kv_heads, cache, head_size)] * 2, tensor("int32", batch), tensor("int32")]
    present = (batch, kv_heads, max(cache, total), head_size)
    return kernel("GroupQueryAttention", with_lengths(inputs, total), [(batch, queries, heads * head_size), present, present],
                  CONTRIB, num_heads=heads, kv_num_heads=kv_heads, **attributes)


def product(rows: int, bits: int = 4, depth: int = 4096, columns: int = 4096) -> Kernel:
    inputs = [tensor("float16", rows, depth), tensor("uint8", columns, depth // 32, 4 * bits, constant=True),
              tensor("float16", columns, depth // 32, constant=True)]
    return kernel("MatMulNBits", inputs, [(rows, columns)], CONTRIB, K=depth, N=columns, bits=bits, block_size=32)


HOPPER, AMPERE = Gpu(), Gpu(capability=8.0)


@pytest.mark.parametrize(("sizes", "gpu", "algorithm"), [
    ({}, HOPPER, "xqa"), ({"head_size": 96}, HOPPER, "cudnn"), ({"heads": 24}, HOPPER, "cudnn"),  # 3 heads share keys
    ({"cache": 1024}, HOPPER, "cudnn"), ({"softcap": 50.0}, HOPPER, "flash decoding"),
    ({"softcap": 50.0, "cache": 1024}, HOPPER, "flash"), ({"local_window_size": 128}, HOPPER, "xqa"),
    ({"queries": 1024, "total": 1024}, HOPPER, "cudnn"), ({"queries": 1024, "total": 1024}, AMPERE, "flash"),
    ({"queries": 1024, "total": 1024, "local_window_size": 128}, HOPPER, "flash"), ({"dtype": "bfloat16"}, HOPPER, "xqa"),
    ({"head_size": 512}, HOPPER, "memory efficient"), ({"head_size": 260}, HOPPER, "unfused"),
    ({"dtype": "float32"}, HOPPER, "")])
def test_attention(sizes: dict[str, Any], gpu: Gpu, algorithm: str) -> None:
    described = attention(**sizes)
    attended = kernel_grouped_query_sizes(described)
    assert attended is not None
    assert attention_algorithm(described, attended, gpu) == algorithm


def plain(*inputs: KernelInput, name: str = "MultiHeadAttention", domain: str = CONTRIB) -> Kernel:
    """Attention with four heads by another operator."""
    return kernel(name, list(inputs), [inputs[0].shape], domain, num_heads=4)


def text(queries: int = 512, dtype: str = "float16", width: int = 256, batch: int = 2) -> KernelInput:
    return tensor(dtype, batch, queries, width)


def projected(dtype: str, *more: KernelInput, width: int = 256) -> Kernel:
    weights = (tensor(dtype, width, 3 * width, constant=True), tensor(dtype, 3 * width, constant=True))
    return plain(text(dtype=dtype, width=width), *weights, *more, name="Attention")


def packed(queries: int, in_one: bool) -> Kernel:
    rows = [tensor("float16", 2 * queries, 4, 3, 64), ABSENT, ABSENT] if in_one else [tensor("float16", 2 * queries, 256)] * 3
    return plain(*rows, ABSENT, tensor("int32", 2, queries), tensor("int32", 3), name="PackedMultiHeadAttention")


MASK, ENDS, STARTS = tensor("int32", 2, 512), tensor("int32", 2), tensor("int32", 3 * 2 + 2)
PAST = [tensor("float16", 2, 4, 100, 64)] * 2
ADDED = tensor("float16", 1, 4, 512, 512)


@pytest.mark.parametrize(("described", "algorithm"), [
    (plain(*[text()] * 3), "cudnn"),
    (plain(*[text(1)] * 3, *[ABSENT] * 3, *PAST), "cudnn"), (plain(*[text()] * 3, ABSENT, ENDS), "cudnn"),
    (plain(*[text()] * 3, ABSENT, MASK), "unfused"), (plain(*[text()] * 3, ABSENT, STARTS), "memory efficient"),
    (plain(*[text()] * 3, ABSENT, ABSENT, ADDED), "cudnn"), (plain(*[text(width=4 * 264)] * 3), "memory efficient"),
    (plain(*[text(width=4 * 60)] * 3), "unfused"),
    (plain(*[text(dtype="float32")] * 3), "memory efficient"), (plain(*[text(255, "float32")] * 3), "unfused"),
    (plain(text(4, "float32"), *[text(256, "float32")] * 2), "memory efficient"),
    (projected("float16"), "cudnn"), (projected("float16", MASK), "unfused"), (projected("float16", ENDS), "cudnn"),
    (projected("float16", STARTS), "memory efficient"), (projected("bfloat16", STARTS), "unfused"),
    (projected("float32"), "memory efficient"),
    (packed(512, True), "memory efficient"), (packed(513, True), "flash"), (packed(64, False), "flash"),
    (plain(*[tensor("float16", 2, 4, 512, 64)] * 3, name="Attention", domain=""), "")])
def test_attention_of_other_operators_on_hopper(described: Kernel, algorithm: str) -> None:
    assert language_algorithm(described) == algorithm


@pytest.mark.parametrize(("rows", "bits", "depth", "columns", "algorithm"), [
    (1, 4, 4096, 4096, "vector"), (2, 4, 4096, 4096, "rows"), (16, 4, 4096, 4096, "rows"), (17, 4, 4096, 4096, "dequantised"),
    (1, 8, 4096, 4096, "vector"), (5, 8, 4096, 4096, "rows"), (6, 8, 4096, 4096, "dequantised"), (1, 4, 2880, 32, "router"),
    (1, 4, 4096, 4099, "dequantised"), (1024, 4, 4096, 128256, "dequantised in parts"),
    (1, 4, 131072, 4096, "dequantised")])  # the last one's scales exceed the memory of a block of threads
def test_products_with_quantised_matrices(rows: int, bits: int, depth: int, columns: int, algorithm: str) -> None:
    assert product_algorithm(product(rows, bits, depth, columns)) == algorithm


@pytest.mark.parametrize(("described", "kind"), [
    (product(16), NodeKind.OWN), (product(17), NodeKind.PRODUCT), (attention(), NodeKind.OWN),
    (attention(head_size=96), NodeKind.ATTENTION)])
def test_what_they_cost_the_host_depends_on_how_they_are_computed(described: Kernel, kind: NodeKind) -> None:
    """Only those that call a library cost more than a kernel of ONNX Runtime's own."""
    assert (node_kind(described), node_kind(described, on_gpu=False)) == (kind, NodeKind.OWN)
    tracks = Tracks(np.array([0.0]), np.array([1.0]), np.array([kind]))
    costs = PipelineCosts(node_ms=1.0, view_ms=0.0, launch_ms=2.0, start_ms=0.0, gap_ms=0.0, lead_ms=0.0, end_ms=0.0,
                          product_ms=10.0, attention_ms=20.0)
    added_ms = {NodeKind.OWN: 0.0, NodeKind.PRODUCT: 10.0, NodeKind.ATTENTION: 20.0}[kind]
    assert pipeline_ms(tracks, costs) == Runs([(tracks, 1.0, None)]).latencies_ms(costs)[0] == 3.0 + added_ms


NAMES = list(itertools.chain.from_iterable(LANGUAGE_GROUPS.values()))
EXPERTS = kernel("QMoE", [
    tensor("float16", 28, 64), tensor("float16", 28, 8), tensor("uint8", 8, 256, 32, constant=True),
    tensor("float16", 8, 256, constant=True), ABSENT, tensor("uint8", 8, 64, 64, constant=True),
    tensor("float16", 8, 64, constant=True)], [(28, 64)], CONTRIB, k=2, expert_weight_bits=4, activation_type="swiglu")


@pytest.mark.parametrize(("described", "expected"), [
    (attention(total=1023, cache=2047), {"log_attended": 10, "log_cache": 11, "heads_per_key_head": 4, "shares_buffer": 1}),
    (plain(text(1), *[text(511)] * 2, ABSENT, tensor("int32", 2, 511)), {
        "log_queries": 1, "log_attended": 9, "causal": 0, "mask": 1, "head_size": 64, "heads_per_key_head": 1}),
    (EXPERTS, {"weight_bits": 4, "log_rows": 3, "log_experts": np.log2(9), "experts_per_token": 2, "gated": 1})])  # of one
def test_features(described: Kernel, expected: dict[str, float]) -> None:
    values = dict(zip(NAMES, language_features(described), strict=True))
    assert {name: values[name] for name in expected} == expected
