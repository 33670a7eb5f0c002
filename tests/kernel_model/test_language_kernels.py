"""Kernels of language models: drawn, built, run, and many in a carrier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hase.benchmark.ort.runner import bind, open_runner
from hase.kernel_model.building.dummy_data import dummy_tensor
from hase.kernel_model.building.kernel_models import (
    build_carrier,
    build_model,
    carrier_bytes,
    check_kernel,
    write_kernel,
)
from hase.kernel_model.kernel_sampler import footprint_mib, sample_free
from hase.kernel_model.sampling.draws import on_cpu, on_cuda
from hase.kernel_model.sampling.free_shapes import language
from hase.kernel_model.sampling.free_shapes.sizes import ABSENT, CONTRIB, Generator, indices, kernel, tensor
from hase.kernel_model.sampling.free_shapes.table import LANGUAGE, STANDARD, Draw
from hase.ort_analysis.graph.nodes import shared_caches
from hase.ort_analysis.graph.source import built_kernel
from hase.records.attention import kernel_grouped_query_sizes, with_lengths
from hase.records.kernel_record import Kernel
from hase.utils.ort_sessions import open_session

SMALL = language.DecoderFamily((128, 192), (2.0, 3.0), (32, 64), (1, 2), (300, 500), (0, 24))  # tests can't run large ones


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws small decoders and short texts."""
    monkeypatch.setattr(language, "FAMILIES", (SMALL,))
    monkeypatch.setattr(language, "MIXTURES", ((8, 2, 64, 128),))
    monkeypatch.setattr(language, "MOST_ROWS", 64)
    monkeypatch.setattr(language, "MOST_TOKENS", 256)
    monkeypatch.setattr(language, "length", lambda generator, low=4, high=64: int(generator.integers(low, min(high, 64))))


def small_draw(draw: Draw, dtype: str, generator: Generator) -> Kernel:
    """A kernel that is small enough for a test, and that the CPU provider has."""
    return next(kernel for kernel in (draw(dtype, 2, generator) for _ in range(400))
                if footprint_mib(kernel) < 64 and kernel.flops < 2e9 and on_cpu(kernel))


@pytest.mark.parametrize("draw", [draw for draw, _ in (*LANGUAGE, *STANDARD)
                                  if draw not in (language.packed_attention, language.in_bfloat16)])
def test_draws_run_on_the_cpu(draw: Draw, small: None, tmp_path: Path) -> None:
    """They give the shapes that they describe, and no NaN; only CUDA has attention of packed rows."""
    generator = np.random.default_rng(1)
    for _ in range(3):
        drawn = small_draw(draw, "float32", generator)
        path = write_kernel(drawn, tmp_path)
        assert built_kernel(path) == drawn
        check_kernel(path, drawn, "cpu")
        session = open_runner(path, "cpu").session
        session_shapes = [tuple(output.shape) for output in session.get_outputs()]
        assert session_shapes == [output.shape for output in drawn.outputs if output.present]


@pytest.mark.parametrize("draw", [draw for draw, _ in LANGUAGE])
def test_the_cuda_provider_has_every_draw(draw: Draw) -> None:
    generator = np.random.default_rng(2)
    assert all(on_cuda(draw("float16", 4, generator)) for _ in range(10))


@pytest.mark.slow
def test_drawn_kernels_are_language_models_and_within_limits() -> None:
    drawn, _ = sample_free(400, np.random.default_rng(0), [1, 8, 64], 4000, 2048, kind="language", device="cuda")
    kernels = [kernel for kernel, _ in drawn.values()]
    assert len(kernels) == 400
    assert all(footprint_mib(kernel) <= 2048 and kernel.flops <= 4e12 for kernel in kernels)
    counted = Counter(kernel.op_type for kernel in kernels)
    assert counted["GroupQueryAttention"] > counted["SkipSimplifiedLayerNormalization"] > 0
    assert {kernel.dtype for kernel in kernels} >= {"float16", "bfloat16"}
    attended = [sizes for kernel in kernels if (sizes := kernel_grouped_query_sizes(kernel))]
    assert {sizes.shares_buffer for sizes in attended} == {sizes.packed for sizes in attended} == {True, False}
    assert max(sizes.total for sizes in attended) > 16384
    rows = [kernel.inputs[0].shape[0] * kernel.inputs[0].shape[1] for kernel in kernels if kernel.op_type == "MatMulNBits"]
    assert min(rows) == 1
    assert max(rows) > 2048


def test_configs_for_judging_are_never_drawn() -> None:
    generator = np.random.default_rng(3)
    drawn = [language.decoder(generator) for _ in range(3000)]
    assert not {(of.width, of.between) for of in drawn} & language.HELD_OUT
    assert not {(of.heads, of.kv_heads, of.head_size) for of in drawn} & language.HEADS_HELD_OUT
    assert {(2048, 8192), (3072, 8192), (1024, 3072)} <= language.HELD_OUT


def attention(cache: int, total: int, queries: int = 1) -> Kernel:
    inputs = [tensor("float32", 1, queries, 8 * 32), ABSENT, ABSENT, *[tensor("float32", 1, 2, cache, 32)] * 2,
              tensor("int32", 1), tensor("int32")]
    present = (1, 2, max(cache, total), 32)
    return kernel("GroupQueryAttention", with_lengths(inputs, total), [(1, queries, 4 * 32), present, present], CONTRIB,
                  num_heads=4, kv_num_heads=2)


def test_a_carrier_gives_each_cache_a_place_of_its_own_and_shares_it() -> None:
    """Cold, as in a model, where a whole run lies between two uses; new tokens go into the buffer of the past."""
    kernels = [attention(64, 33), attention(32, 33), attention(64, 33)]
    assert [given.name for given in build_model(kernels[0]).graph.input] == ["x0", "x3", "x4"]  # lengths are inside
    carrier = build_carrier(kernels, "cpu")
    assert carrier.caches == [f"k{number}_x{place}" for number in range(3) for place in (3, 4)]
    shared = shared_caches(carrier.model.graph, {})
    assert shared == {f"k{number}_y{place - 2}": f"k{number}_x{place}" for number in (0, 2) for place in (3, 4)}
    session = open_session(carrier.model.SerializeToString(), "cpu", optimize="none", weights=carrier.weights)
    before = carrier.values["k0_x3"].copy()
    bind(session, carrier.values, "cpu", "device", shared)()
    changed = (carrier.values["k0_x3"] != before).any(axis=(0, 1, 3))
    assert np.flatnonzero(changed).tolist() == [32]
    assert sum(map(carrier_bytes, kernels)) >= sum(value.nbytes for value in carrier.values.values())


def test_on_a_gpu_every_kernel_of_a_carrier_reads_something_written() -> None:
    """Its work could else not be told from that of the kernel before it."""
    table = kernel("Gather", [tensor("float32", 100, 8, constant=True), indices((2, 3), 100)], [(2, 3, 8)], axis=0)
    names = {device: [node.op_type for node in build_carrier([table], device).model.graph.node] for device in ("cpu", "cuda")}
    assert names == {"cpu": ["Gather", "Shape"], "cuda": ["Abs", "Gather", "Shape"]}
    carrier = build_carrier([table], "cuda")
    assert carrier.values["in_k0_x1"].shape == (2, 3)


def test_bfloat16_is_built_and_bound(tmp_path: Path) -> None:
    """numpy lacks it, so ONNX Runtime takes its bits."""
    table = kernel("Gather", [tensor("bfloat16", 5000, 64, constant=True), indices((2, 3), 5000)], [(2, 3, 64)], axis=0)
    path = write_kernel(table, tmp_path)
    assert path.stat().st_size < 100_000 < table.weight_bytes
    check_kernel(path, table, "cpu")
    open_runner(path, "cpu").run_once()


def test_packed_weights_are_random_and_repeat(tmp_path: Path) -> None:
    packed = kernel("MatMulNBits", [tensor("float32", 2, 512), tensor("uint8", 1024, 16, 16, constant=True),
                                    tensor("float32", 1024, 16, constant=True)], [(2, 1024)], CONTRIB, K=512, N=1024, bits=4,
                    block_size=32, accuracy_level=4)
    path = write_kernel(packed, tmp_path)
    assert path.stat().st_size < 100_000 < packed.weight_bytes
    check_kernel(path, packed, "cpu")
    [weight] = [value for name, value in build_carrier([packed], "cpu").weights.items() if name.endswith("_x1")]
    assert len(np.unique(weight)) == 256


@pytest.mark.parametrize(("shape", "wanted"), [((2,), [9, 9]), ((4,), [9, 9, 0, 0]), ((8,), [9, 9, 0, 6, 12, 0, 9, 18]),
                                               ((2, 9), [1] * 18)])
def test_all_keys_of_made_up_attention_count(shape: tuple[int, ...], wanted: list[int]) -> None:
    """With ones alone, ends of keys would leave one key of each text."""
    texts = [tensor("float32", 2, count, 32) for count in (6, 9, 9)]
    described = kernel("MultiHeadAttention", [*texts, ABSENT, tensor("int32", *shape)], [(2, 6, 32)], CONTRIB, num_heads=4)
    assert dummy_tensor(described, 4).reshape(-1).tolist() == wanted


def test_networks_in_bfloat16_have_operators_that_cuda_runs() -> None:
    generator = np.random.default_rng(0)
    drawn = [language.in_bfloat16("float32", 2, generator) for _ in range(200)]
    assert {kernel.dtype for kernel in drawn} == {"bfloat16"}
    assert all(kernel.opset >= 22 for kernel in drawn if kernel.op_type == "Conv")
    assert {kernel.op_type for kernel in drawn if on_cuda(kernel)} >= {"Conv", "Gemm", "MatMul", "AveragePool", "Softmax"}
