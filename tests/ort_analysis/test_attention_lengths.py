"""Records of decoders know how many tokens their attention attends to; runs share the buffer of past and present."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from small_graphs import CONTRIB, INT32, INT64, model, node, value

from hase.benchmark.ort.runner import open_runner
from hase.ort_analysis.graph.analysis import analyze
from hase.records.attention import kernel_grouped_query_sizes
from hase.records.kernel_record import Kernel

HEADS, KV_HEADS, SIZE = 4, 2, 16
WIDE = (HEADS + 2 * KV_HEADS) * SIZE


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, as the builder of onnxruntime-genai writes it: lengths come from a mask, queries, keys and values are in one
    tensor, and the present has the total length."""
    nodes = [
        node("ReduceSum", ["mask", "one"], "sum", keepdims=0), node("Sub", ["sum", "one"], "last"),
        node("Cast", ["last"], "last32", to=INT32), node("Shape", ["mask"], "shape"),
        node("Gather", ["shape", "axis"], "size", axis=0), node("Cast", ["size"], "size32", to=INT32),
        node("MatMul", ["x", "w"], "qkv"),
        node("GroupQueryAttention", ["qkv", "", "", "past.key", "past.value", "last32", "size32", "cos", "sin"],
             ["y", "present.key", "present.value"], domain=CONTRIB, num_heads=HEADS, kv_num_heads=KV_HEADS, do_rotary=1)]
    inputs = [value("x", "batch", "sequence", 32), value("mask", "batch", "total", kind=INT64),
              *(value(f"past.{name}", "batch", KV_HEADS, "past", SIZE) for name in ("key", "value"))]
    outputs = [value("y", "batch", "sequence", HEADS * SIZE),
               *(value(f"present.{name}", "batch", KV_HEADS, "total", SIZE) for name in ("key", "value"))]
    rng = np.random.default_rng(0)
    tables = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {
        "w": (32, WIDE), "cos": (4096, SIZE // 2), "sin": (4096, SIZE // 2)}.items()}
    path = tmp_path_factory.mktemp("decoder") / "decoder.onnx"
    onnx.save(model(nodes, inputs, outputs, {**tables, "one": [1], "axis": 1}, 21), path)
    return path


CASES = {  # sizes of batch, sequence, past and total, and the tokens for which the present has room
    "a prompt, empty cache": ((1, 1024, 0, 1024), 1024), "a prompt in a buffer": ((2, 24, 64, 24), 64),
    "decoding in a buffer": ((2, 1, 2048, 1025), 2048), "decoding, cache of its length": ((2, 1, 1024, 1025), 1025),
    "a part, cache of its length": ((1, 16, 16, 32), 32), "a part in a buffer": ((1, 16, 64, 32), 64)}


def dims_of(case: str) -> dict[str, int]:
    return dict(zip(("batch", "sequence", "past", "total"), CASES[case][0], strict=True))


def attention_of(path: Path, case: str, device: str = "cpu", static: bool = False) -> Kernel:
    record = analyze(path, device, dims_of(case), static=static)
    return next(kernel for kernel in record.kernels.values() if kernel.op_type == "GroupQueryAttention")


@pytest.mark.parametrize("case", CASES)
def test_lengths_are_those_of_the_dimensions_and_a_run_writes_into_the_buffer_of_the_past(decoder: Path, case: str) -> None:
    (batch, queries, past, total), present = CASES[case]
    kernel = attention_of(decoder, case)
    assert [tensor.values for tensor in kernel.inputs[5:7]] == [(total - 1,) * batch, (total,)]
    assert [tensor.shape for tensor in kernel.outputs] == [
        (batch, queries, HEADS * SIZE), *[(batch, KV_HEADS, present, SIZE)] * 2]
    sizes, shares = kernel_grouped_query_sizes(kernel), past >= total
    assert sizes is not None
    assert (sizes.total, sizes.cache, sizes.rotary, sizes.shares_buffer) == (total, past, SIZE, shares)
    runner = open_runner(decoder, "cpu", dims=dims_of(case))
    assert runner.shared == ({"present.key": "past.key", "present.value": "past.value"} if shares else {})
    before = {name: array.copy() for name, array in runner.feed.items()}
    runner.run_once()
    for name in ("past.key", "past.value"):  # a bound input on the CPU is the array itself
        changed = (runner.feed[name] != before[name]).any(axis=(0, 1, 3))
        assert changed.tolist() == [shares and total - queries <= place < total for place in range(past)]


def test_the_kernel_is_the_same_however_the_model_is_optimised(decoder: Path) -> None:
    assert len({attention_of(decoder, "decoding in a buffer", device, static).id
                for device in ("cpu", "cuda") for static in (False, True)}) == 1
    assert len({attention_of(decoder, case).id for case in CASES}) == len(CASES)
