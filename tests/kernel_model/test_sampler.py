"""The sampler: further kernels around those of the models, of rare forms, that the CPU provider runs in CUDA sessions, and of
language models; all of them valid, the same for the same seed."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_script
from conftest import TORCH_MODELS, build_workspace, free_kernel, small_model
from drawn_kernels import small_draws

from hase.benchmark.ort.runner import bind, open_runner
from hase.kernel_model.building.dummy_data import dummy_inputs, dummy_tensor
from hase.kernel_model.building.kernel_models import build_carrier, build_model, carrier_bytes, check_kernel, write_kernel
from hase.kernel_model.kernel_sampler import FREE, MOST_MIB, Drawn, sample_free, sample_near_models
from hase.kernel_model.sampling.draws import (
    FLOAT_TYPES,
    SEED_FILE,
    draw_kernel,
    footprint_mib,
    in_float_type,
    on_cpu,
    on_cuda,
    read_seeds,
)
from hase.kernel_model.sampling.free_shapes import language, on_host
from hase.kernel_model.sampling.free_shapes.sizes import ABSENT, CONTRIB, indices, numbers, tensor
from hase.kernel_model.sampling.free_shapes.sizes import kernel as kernel_of
from hase.kernel_model.sampling.free_shapes.table import DRAWS, FORMS, HOST, LANGUAGE, RARE, STANDARD, Draw
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.nodes import shared_caches
from hase.ort_analysis.graph.source import built_kernel
from hase.records.attention import kernel_grouped_query_sizes, with_lengths
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Tensor
from hase.records.kernel_record_files import build_index, index_path, read_index
from hase.records.kernel_types import describe_kernel
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.ort_sessions import open_session
from hase.utils.paths import ROOT, Workspace


def entries_of(*records: ModelRecord) -> list[Drawn]:
    index = build_index(records[0].flavour, list(records))
    return [(entry.kernel, index.groups_of(entry)) for entry in index.entries()]


@pytest.fixture(scope="module")
def entries(torch_models: dict[str, Path]) -> list[Drawn]:
    """The index of the torch models on the CPU: three families."""
    return entries_of(*(analyze(torch_models[name], "cpu") for name in TORCH_MODELS))


@pytest.mark.slow
def test_sampled_kernels_are_new_valid_and_within_limits(entries: list[Drawn]) -> None:
    """Families that are left out seed nothing."""
    drawn, refused = sample_near_models(entries, 60, np.random.default_rng(0), [1, 4], 0.05)
    assert len(drawn) == 60
    assert {name for _, families in drawn.values() for name in families} == {"resnet", "mobilenet", "vit"}
    seed_ids, types = {kernel.id for kernel, _ in entries}, {kernel.type for kernel, _ in entries}
    for name, (kernel, _) in drawn.items():
        assert kernel.id == name not in seed_ids
        assert kernel.type in types
        assert kernel.flops <= 0.05e9
        assert footprint_mib(kernel) <= MOST_MIB
        session = open_session(build_model(kernel).SerializeToString(), "cpu", optimize="none")
        assert [tuple(output.shape) for output in session.get_outputs()] == [
            each.shape for each in kernel.outputs if each.present]
    assert len({kernel.type for kernel, _ in drawn.values()}) > 10
    assert refused["too large"] > 0
    of_one, _ = sample_near_models(entries, 60, np.random.default_rng(0), [1, 4], 0.2, without=("resnet", "vit"))
    assert {families for _, families in of_one.values()} == {("mobilenet",)}


def test_sizes_spread_around_the_seed() -> None:
    record = analyze(small_model(channels=64, side=56), "cpu")
    drawn, _ = sample_near_models(entries_of(record), 60, np.random.default_rng(0), [1, 2, 8], 2.0)
    convs = [kernel for kernel, _ in drawn.values() if kernel.op_type == "Conv"]
    assert {kernel.inputs[0].shape[0] for kernel in convs} == {1, 2, 8}
    sides = {kernel.inputs[0].shape[2] for kernel in convs}
    assert min(sides) < 40 < 70 < max(sides) <= 112
    assert all(kernel.inputs[1].shape[0] % 8 == 0 for kernel in convs)
    products = [math.prod(kernel.inputs[1].shape) for kernel in convs]
    assert max(products) > 4 * min(products)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_the_cuda_provider_runs_every_free_draw(dtype: str) -> None:
    """Each draw works in both types. ORT's table of CUDA kernels has its types, and its sizes are what ONNX infers."""
    generator = np.random.default_rng(1)
    drawn_types = set()
    for draw, _ in DRAWS:
        for _ in range(4):
            kernel = draw(dtype, 2, generator)
            if not all(output.elements for output in kernel.outputs):
                continue
            assert on_cuda(kernel), kernel.id
            assert describe_again(kernel).id == kernel.id
            drawn_types.add(kernel.op_type)
    assert len(drawn_types) > 70


def test_every_free_draw_runs_where_the_cpu_provider_has_it() -> None:
    """One small kernel of each gives the shapes that it describes, and no NaN."""
    generator, run = np.random.default_rng(4), 0
    for draw, _ in DRAWS:
        made = next((made for made in (draw("float32", 1, generator) for _ in range(40)) if footprint_mib(made) < 2 and
                     made.flops < 1e8 and all(output.elements for output in made.outputs)), None)
        if made is not None and made.op_type != "BiasSoftmax":  # the CPU provider lacks it
            arrays = open_session(build_model(made).SerializeToString(), "cpu", optimize="none").run(None, dummy_inputs(made))
            assert [array.shape for array in arrays] == [output.shape for output in made.outputs], made.id
            assert not any(array.dtype.kind == "f" and np.isnan(array).any() for array in arrays), made.id
            run += 1
    assert run > 0.9 * len(DRAWS)


def describe_again(kernel: Kernel) -> Kernel:
    return describe_kernel(kernel.op_type, kernel.domain, kernel.opset, kernel.attributes, kernel.inputs, kernel.outputs)


def test_kernels_of_models_are_drawn_in_half_precision_too() -> None:
    """The half-precision twin has half the bytes, constants within its type's range, and the id of a kernel in that type."""
    lowest = KernelInput(dtype="float32", shape=(), constant=True, values=(-3.4028234663852886e38,))
    mask, scores = tensor("bool", 1, 1, 16, 16), tensor("float32", 1, 4, 16, 16)
    where = describe_kernel("Where", "", 20, {}, [mask, scores, lowest], [Tensor(dtype="float32", shape=(1, 4, 16, 16))])
    twin = in_float_type(where, "float16")
    assert twin.inputs[2].values == (-65504.0,)
    assert [each.dtype for each in (*twin.inputs, *twin.outputs)] == ["bool", "float16", "float16", "float16"]
    assert twin.bytes_written * 2 == where.bytes_written
    assert in_float_type(in_float_type(twin, "float32"), "float16").id == twin.id
    cast = describe_kernel("Cast", "", 20, {"to": 1, "saturate": 1}, [mask], [Tensor(dtype="float32", shape=(1, 1, 16, 16))])
    assert in_float_type(cast, "float16").attributes["to"] == 10
    halved = in_float_type(free_kernel("Resize", "float32"), "float16")
    assert [each.dtype == "float16" for each in halved.inputs] == [True, *[False] * (len(halved.inputs) - 1)]
    with pytest.raises(UserError, match="CUDA provider has no GridSample in float16"):
        in_float_type(free_kernel("GridSample", "float32"), "float16")

    entries = entries_of(analyze(small_model(channels=64, side=56), "cpu"))
    drawn, _ = sample_near_models(entries, 40, np.random.default_rng(0), [1, 2], 2.0, dtypes=FLOAT_TYPES)
    assert {kernel.dtype for kernel, _ in drawn.values()} == {"float32", "float16"}
    assert all(kernel.id == name == describe_again(kernel).id for name, (kernel, _) in drawn.items())


def test_indices_of_a_smaller_kernel_stay_in_range() -> None:
    """Whatever its seed was. Each indexed axis has its own limit."""
    x, places = tensor("float32", 128, 64, 5), tensor("int64", 1000, 2)
    assert dummy_inputs(kernel_of("GatherND", [x, places], [(1000, 5)], batch_dims=0))["x1"].max() == 63
    table = KernelInput(dtype="int64", shape=(500,), constant=True, value_range=(0, 1022))
    assert dummy_tensor(kernel_of("Gather", [x, table], [(128, 500, 5)], axis=1), 1).max() == 63


@pytest.mark.slow
def test_free_kernels_are_described_like_those_of_models() -> None:
    """A model of one such kernel has the same kernel, by its id. Ranges of indices are known only of drawn ones."""
    drawn, _ = sample_free(150, np.random.default_rng(5), [1, 2], 0.05)
    kernels = [made for made, _ in drawn.values() if "Gather" not in made.op_type and "Scatter" not in made.op_type]
    found = {made.id: set(analyze(build_model(made), "cuda").kernels) for made in kernels if made.op_type != "Cast"}
    assert [name for name, analysed in found.items() if analysed != {name}] == []
    assert {made.op_type for made in kernels} >= {"Conv", "Gemm", "MatMul", "BiasSoftmax", "Transpose", "ReduceSum", "Resize"}


def run_sampler(workspace: Workspace, *options: str) -> subprocess.CompletedProcess[str]:
    return run_script("kernel_model/kernel_sampler.py", "--workspace", workspace.root, "--json", *options)


@pytest.mark.slow
def test_a_second_call_tops_up(workspace: Workspace) -> None:
    flavour = build_workspace(workspace, {"anet_b1": small_model(), "bnet_b1": small_model(side=24)})
    folder = workspace.kernel_onnx / flavour.name

    def sampled(*options: str) -> dict[str, Any]:
        done = run_sampler(workspace, *options, "--batch-sizes", "1,2")
        assert done.returncode == 0, done.stderr
        [row] = json.loads(done.stdout)
        assert {path.stem for path in folder.glob("*.onnx")} == model_ids | set(read_seeds(folder))
        return {key: row[key] for key in ("sampled", "free", "there_before")}

    model_ids = {path.stem for path in folder.glob("*.onnx")}
    assert sampled("--count", "12") == {"sampled": 12, "free": 0, "there_before": 0}
    seeds, times_before = read_seeds(folder), {path: path.stat().st_mtime_ns for path in folder.glob("*.onnx")}
    assert set(seeds.values()) == {("anet",), ("anet", "bnet"), ("bnet",)}  # both families seed near a kernel that both have
    assert sampled("--count", "40")["sampled"] == 28
    more = read_seeds(folder)
    assert (len(more), seeds.items() <= more.items()) == (40, True)
    assert all(path.stat().st_mtime_ns == when for path, when in times_before.items())
    assert sampled("--count", "40", "--free", "30", "--jobs", "2") == {"sampled": 0, "free": 30, "there_before": 40}
    assert list(read_seeds(folder).values()).count(FREE) == 30
    assert {kernel.id for kernel in read_index(index_path(workspace, flavour)).all_kernels()} == model_ids  # unchanged


def test_seeds_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    assert read_seeds(tmp_path) == {}
    files.write_json(tmp_path / SEED_FILE, {"Relu_1": "anet"})
    with pytest.raises(UserError, match=r"sampled.json: written by another version; remove .*kernel_sampler.py"):
        read_seeds(tmp_path)


def test_the_same_seed_draws_the_same_and_earlier_samples_are_not_drawn_again() -> None:
    entries = entries_of(analyze(small_model(), "cpu"))
    first, again, other = (sample_near_models(entries, 12, np.random.default_rng(seed), [1, 4], 0.2)[0] for seed in (1, 1, 2))
    assert first == again != other
    further, _ = sample_near_models(entries, 12, np.random.default_rng(1), [1, 4], 0.2, existing=frozenset(first))
    assert not set(first) & set(further)


@pytest.mark.parametrize(("kind", "options"), [
    ("language", ("--dtypes", "float32", "--most-gflop", "0.5", "--most-mib", "40")),
    ("host", ("--most-gflop", "0.01", "--most-mib", "4"))])
def test_free_kernels_of_a_kind_are_drawn_without_an_index(workspace: Workspace, kind: str, options: tuple[str, ...]) -> None:
    done = run_sampler(workspace, "--count", "0", "--free", "3", "--free-kind", kind, *options)
    assert done.returncode == 0, done.stderr
    built = list(workspace.kernel_onnx.glob("*/*.onnx"))
    assert len(built) == 3
    assert kind == "language" or {path.parent.name[:4] for path in built} == {"cpu-"}


@pytest.mark.parametrize(("options", "code", "message"), [
    (("--count", "0"), 2, "can't both be 0"),
    (("--dtypes", "bfloat16"), 2, "--count 0 and --free-kind language"),
    (("--cliffs", "nvidia-h200", "--free", "3"), 2, "don't go together"),
    (("--errors", "errors.json", "--free", "3"), 2, "don't go together"),
    (("--errors", "errors.json"), 1, "errors.json: no such file"),
    (("--cliffs", "nvidia-h200-cuda-ort1.31-all"), 1, "no such dataset; measure one with"),
    ((), 1, "python ort_analysis/fusion_detector.py"),
])
def test_wrong_arguments(workspace: Workspace, options: tuple[str, ...], code: int, message: str) -> None:
    done = run_sampler(workspace, *options)
    assert (done.returncode, "Traceback" in done.stderr, str(ROOT) in done.stderr) == (code, False, False)
    assert message in done.stderr


ON_HOST = {draw for draw, _ in HOST}
ON_EITHER = {on_host.moved_channels, on_host.on_shapes, on_host.newer_version}  # CUDA has them, but may leave them to the CPU


@pytest.mark.parametrize("op_type", ["LSTM", "GRU", "ConvTranspose", "InstanceNormalization", "BatchNormalization", "Expand",
                                     "Einsum", "DepthToSpace", "SpaceToDepth", "Resize"])
def test_kernels_with_related_sizes_are_drawn_near_and_run(op_type: str) -> None:
    seed, generator = free_kernel(op_type, "float32"), np.random.default_rng(2)
    drawn = [draw_kernel(seed, 4, generator, 0.5) for _ in range(20)]
    assert len({made.id for made in drawn}) > 5
    assert all(made.type == seed.type for made in drawn)
    for made in sorted(drawn, key=lambda made: made.flops + made.bytes_read)[:4]:  # large ones take long
        session = open_session(build_model(made).SerializeToString(), "cpu", optimize="none")
        assert [array.shape for array in session.run(None, dummy_inputs(made))] == [output.shape for output in made.outputs]


@pytest.mark.parametrize("draw", [draw for draw, _ in (*FORMS, *RARE, *HOST)])
def test_draws_run_and_put_out_what_they_describe(draw: Draw, tmp_path: Path) -> None:
    for drawn in small_draws(draw, 6):
        path = write_kernel(drawn, tmp_path)
        assert built_kernel(path) == drawn
        check_kernel(path, drawn, "cpu")
        assert draw not in ON_HOST - ON_EITHER or not on_cuda(drawn)


def test_a_gather_outside_its_axis_is_refused() -> None:
    seed = describe_kernel("Gather", "", 20, {"axis": 0}, [tensor("float32", 30, 8), numbers(29)],
                           [Tensor(dtype="float32", shape=(1, 8))])
    generator = np.random.default_rng(0)
    shrunk = seed.model_copy(update={"inputs": (tensor("float32", 20, 8), seed.inputs[1])})
    with pytest.raises(UserError, match="holds an index outside of its axis"):
        draw_kernel(shrunk, 4, generator, spread=0.1)


def test_quantised_kernels_compute_in_whole_numbers_and_cost_what_floating_ones_do() -> None:
    generator = np.random.default_rng(5)
    for draw, op_types in ((on_host.quantised_convolution, {"QLinearConv", "ConvInteger"}),
                           (on_host.quantised_product, {"QLinearMatMul", "QGemm"})):
        drawn = [draw("float32", 2, generator) for _ in range(40)]
        assert {made.op_type for made in drawn} == op_types
        for made in drawn:
            weights = made.inputs[1 if made.op_type == "ConvInteger" else 3].shape
            depth = np.prod(weights[1:]) if "Conv" in made.op_type else made.inputs[0].shape[-1]
            assert made.dtype == made.inputs[0].dtype in ("uint8", "int8")
            assert 0 <= made.flops / made.outputs[0].elements - 2 * depth <= 2  # products and sums, and a bias


SMALL = language.DecoderFamily((128, 192), (2.0, 3.0), (32, 64), (1, 2), (300, 500), (0, 24))  # tests can't run large ones


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "FAMILIES", (SMALL,))
    monkeypatch.setattr(language, "MIXTURES", ((8, 2, 64, 128),))
    monkeypatch.setattr(language, "MOST_ROWS", 64)
    monkeypatch.setattr(language, "MOST_TOKENS", 256)
    monkeypatch.setattr(language, "length", lambda generator, low=4, high=64: int(generator.integers(low, min(high, 64))))


@pytest.mark.parametrize("draw", [draw for draw, _ in (*LANGUAGE, *STANDARD)
                                  if draw not in (language.packed_attention, language.in_bfloat16)])
def test_draws_of_language_models_run_on_the_cpu(draw: Draw, small: None, tmp_path: Path) -> None:
    """They give the shapes that they describe, and no NaN; only CUDA has attention of packed rows."""
    generator = np.random.default_rng(1)
    for _ in range(3):
        drawn = next(made for made in (draw("float32", 2, generator) for _ in range(400))
                     if footprint_mib(made) < 64 and made.flops < 2e9 and on_cpu(made))
        path = write_kernel(drawn, tmp_path)
        assert built_kernel(path) == drawn
        check_kernel(path, drawn, "cpu")
        session = open_runner(path, "cpu").session
        session_shapes = [tuple(output.shape) for output in session.get_outputs()]
        assert session_shapes == [output.shape for output in drawn.outputs if output.present]


@pytest.mark.parametrize("draw", [draw for draw, _ in LANGUAGE])
def test_the_cuda_provider_has_every_draw_of_language_models(draw: Draw) -> None:
    generator = np.random.default_rng(2)
    assert all(on_cuda(draw("float16", 4, generator)) for _ in range(10))


@pytest.mark.slow
def test_drawn_kernels_are_language_models_and_within_limits() -> None:
    drawn, _ = sample_free(400, np.random.default_rng(0), [1, 8, 64], 4000, 2048, kind="language", device="cuda")
    kernels = [made for made, _ in drawn.values()]
    assert len(kernels) == 400
    assert all(footprint_mib(made) <= 2048 and made.flops <= 4e12 for made in kernels)
    assert {made.dtype for made in kernels} >= {"float16", "bfloat16"}
    attended = [sizes for made in kernels if (sizes := kernel_grouped_query_sizes(made))]
    assert {sizes.shares_buffer for sizes in attended} == {sizes.packed for sizes in attended} == {True, False}
    assert max(sizes.total for sizes in attended) > 16384
    rows = [made.inputs[0].shape[0] * made.inputs[0].shape[1] for made in kernels if made.op_type == "MatMulNBits"]
    assert (min(rows), max(rows) > 2048) == (1, True)


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
    return kernel_of("GroupQueryAttention", with_lengths(inputs, total), [(1, queries, 4 * 32), present, present], CONTRIB,
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


def test_bfloat16_is_built_and_bound(tmp_path: Path) -> None:
    """numpy lacks it, so ONNX Runtime takes its bits."""
    table = kernel_of("Gather", [tensor("bfloat16", 5000, 64, constant=True), indices((2, 3), 5000)], [(2, 3, 64)], axis=0)
    path = write_kernel(table, tmp_path)
    assert path.stat().st_size < 100_000 < table.weight_bytes
    check_kernel(path, table, "cpu")
    open_runner(path, "cpu").run_once()


@pytest.mark.parametrize(("shape", "wanted"), [((2,), [9, 9]), ((4,), [9, 9, 0, 0]), ((8,), [9, 9, 0, 6, 12, 0, 9, 18]),
                                               ((2, 9), [1] * 18)])
def test_all_keys_of_made_up_attention_count(shape: tuple[int, ...], wanted: list[int]) -> None:
    """With ones alone, ends of keys would leave one key of each text."""
    texts = [tensor("float32", 2, count, 32) for count in (6, 9, 9)]
    described = kernel_of("MultiHeadAttention", [*texts, ABSENT, tensor("int32", *shape)], [(2, 6, 32)], CONTRIB, num_heads=4)
    assert dummy_tensor(described, 4).reshape(-1).tolist() == wanted


def test_networks_in_bfloat16_have_operators_that_cuda_runs() -> None:
    generator = np.random.default_rng(0)
    drawn = [language.in_bfloat16("float32", 2, generator) for _ in range(200)]
    assert {made.dtype for made in drawn} == {"bfloat16"}
    assert all(made.opset >= 22 for made in drawn if made.op_type == "Conv")
    assert {made.op_type for made in drawn if on_cuda(made)} >= {"Conv", "Gemm", "MatMul", "AveragePool", "Softmax"}
