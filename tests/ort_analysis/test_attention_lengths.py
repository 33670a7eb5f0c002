"""Records of decoders know how many tokens their attention attends to; runs share the buffer of past and present."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoders import DecoderSize, write_decoder

from hase.benchmark.ort.runner import open_runner
from hase.ort_analysis.graph.analysis import analyze
from hase.records.attention import kernel_grouped_query_sizes
from hase.records.kernel_record import Kernel

TINY = DecoderSize(layers=1, hidden=64, intermediate=64, heads=4, key_heads=2, words=64, positions=4096)
CASES = {  # sizes of batch, sequence, past and total, and the tokens for which the present has room
    "a prompt, empty cache": ((1, 1024, 0, 1024), 1024), "a prompt in a buffer": ((2, 24, 64, 24), 64),
    "decoding in a buffer": ((2, 1, 2048, 1025), 2048), "decoding, cache of its length": ((2, 1, 1024, 1025), 1025),
    "a part, cache of its length": ((1, 16, 16, 32), 32), "a part in a buffer": ((1, 16, 64, 32), 64)}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("decoder"), TINY, "fp32")


def dims_of(case: str) -> dict[str, int]:
    (batch, length, past, total), _ = CASES[case]
    return TINY.dims(batch, length, past) | {"total_sequence_length": total}


def attention_of(path: Path, case: str, device: str = "cpu", static: bool = False) -> Kernel:
    record = analyze(path, device, dims_of(case), static=static)
    return next(kernel for kernel in record.kernels.values() if kernel.op_type == "GroupQueryAttention")


@pytest.mark.parametrize("case", CASES)
def test_lengths_are_those_of_the_dimensions_and_a_run_writes_into_the_buffer_of_the_past(decoder: Path, case: str) -> None:
    (batch, queries, past, total), present = CASES[case]
    kernel, shares = attention_of(decoder, case), past >= total
    assert [tensor.values for tensor in kernel.inputs[5:7]] == [(total - 1,) * batch, (total,)]
    assert [tensor.shape for tensor in kernel.outputs] == [
        (batch, queries, TINY.hidden), *[(batch, TINY.key_heads, present, TINY.head)] * 2]
    sizes = kernel_grouped_query_sizes(kernel)
    assert sizes is not None
    assert (sizes.total, sizes.cache, sizes.rotary, sizes.shares_buffer) == (total, past, TINY.head, shares)
    runner = open_runner(decoder, "cpu", dims=dims_of(case))
    assert runner.shared == ({f"present.0.{name}": f"past_key_values.0.{name}" for name in ("key", "value")} if shares else {})
    before = {name: array.copy() for name, array in runner.feed.items()}
    runner.run_once()
    for name in ("past_key_values.0.key", "past_key_values.0.value"):  # a bound input on the CPU is the array itself
        changed = (runner.feed[name] != before[name]).any(axis=(0, 1, 3))
        assert changed.tolist() == [shares and total - queries <= place < total for place in range(past)]


def test_the_kernel_is_the_same_however_the_model_is_optimised(decoder: Path) -> None:
    assert len({attention_of(decoder, "decoding in a buffer", device, static).id
                for device in ("cpu", "cuda") for static in (False, True)}) == 1
    assert len({attention_of(decoder, case).id for case in CASES}) == len(CASES)
