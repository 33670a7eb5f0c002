"""The sampler: further kernels around those of the models, all of them valid, the same for the same seed."""

from __future__ import annotations

import json
import math
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_script
from conftest import TORCH_MODELS, build_workspace, free_kernel, small_model

from hase.kernel_model.building.dummy_data import dummy_inputs, dummy_tensor
from hase.kernel_model.building.kernel_models import build_model, check_kernel, write_kernel
from hase.kernel_model.kernel_sampler import FREE, MOST_MIB, Drawn, footprint_mib, sample_free, sample_near_models
from hase.kernel_model.sampling.draws import FLOAT_TYPES, SEED_FILE, draw_kernel, in_float_type, on_cuda, read_seeds
from hase.kernel_model.sampling.free_shapes.table import DRAWS
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.source import built_kernel
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Tensor
from hase.records.kernel_record_files import build_index, index_path, read_index
from hase.records.kernel_types import describe_kernel
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.ort_sessions import open_session
from hase.utils.paths import ROOT, Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"


def entries_of(*records: ModelRecord) -> list[Drawn]:
    index = build_index(records[0].flavour, list(records))
    return [(entry.kernel, index.groups_of(entry)) for entry in index.entries()]


@pytest.fixture(scope="module")
def entries(torch_models: dict[str, Path]) -> list[Drawn]:
    """The index of the torch models on the CPU: three families."""
    return entries_of(*(analyze(torch_models[name], "cpu") for name in TORCH_MODELS))


def draw(entries: list[Drawn], count: int = 60, seed: int = 0, gflop: float = 0.2, without: tuple[str, ...] = (),
         existing: frozenset[str] = frozenset()) -> dict[str, tuple[str, ...]]:
    drawn, _ = sample_near_models(entries, count, np.random.default_rng(seed), [1, 4], gflop, without=without,
                                  existing=existing)
    return {name: families for name, (_, families) in drawn.items()}


@pytest.mark.slow
def test_sampled_kernels_are_new_valid_and_within_limits(entries: list[Drawn]) -> None:
    drawn, refused = sample_near_models(entries, 60, np.random.default_rng(0), [1, 4], 0.05)
    assert len(drawn) == 60
    def shape(kernel: Kernel) -> tuple[Any, ...]:
        return kernel.type, tuple(tensor.shape for tensor in kernel.inputs)

    seed_ids, types = {kernel.id for kernel, _ in entries}, {kernel.type for kernel, _ in entries}
    for name, (kernel, _) in drawn.items():
        assert kernel.id == name not in seed_ids
        assert kernel.type in types
        assert kernel.flops <= 0.05e9
        assert footprint_mib(kernel) <= MOST_MIB
        session = open_session(build_model(kernel).SerializeToString(), "cpu", optimize="none")
        assert [tuple(output.shape) for output in session.get_outputs()] == [
            tensor.shape for tensor in kernel.outputs if tensor.present]
    assert len({shape(kernel) for kernel, _ in drawn.values()} - {shape(kernel) for kernel, _ in entries}) > 50
    assert len({kernel.type for kernel, _ in drawn.values()}) > 10
    assert refused["too large"] > 0


@pytest.mark.slow
def test_a_draw_of_every_type_runs(entries: list[Drawn], tmp_path: Path) -> None:
    """Attention's products and ORT's blocked layouts too."""
    generator = np.random.default_rng(0)
    for kernel_type in sorted({kernel.type for kernel, _ in entries if "Reshape" not in kernel.type}):
        kernel = next(kernel for kernel, _ in entries if kernel.type == kernel_type)
        drawn = None
        for _ in range(8):
            with suppress(UserError, ValueError):  # the sizes don't fit together: draw again
                drawn = drawn or draw_kernel(kernel, 2, generator)
        assert drawn is not None, kernel_type
        assert drawn.type == kernel_type
        check_kernel(write_kernel(drawn, tmp_path), drawn, "cpu")


@pytest.mark.slow
def test_left_out_families_seed_nothing(entries: list[Drawn]) -> None:
    assert {name for families in draw(entries).values() for name in families} == {"resnet", "mobilenet", "vit"}
    assert set(draw(entries, without=("resnet", "vit")).values()) == {("mobilenet",)}
    assert draw(entries, without=("resnet", "mobilenet", "vit")) == {}


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
    for draw, weight in DRAWS:
        for _ in range(4):
            kernel = draw(dtype, 2, generator)
            if not all(output.elements for output in kernel.outputs):
                continue
            assert weight > 0
            assert on_cuda(kernel), kernel.id
            assert describe_again(kernel).id == kernel.id
            drawn_types.add(kernel.op_type)
    assert len(drawn_types) > 70
    assert drawn_types & {"LSTM", "GRU", "RNN"}  # one draw, three operators
    assert drawn_types >= {"ConvTranspose", "InstanceNormalization", "SkipSimplifiedLayerNormalization", "BiasSoftmax",
                           "ScatterND", "GatherElements", "Resize", "CumSum", "IsNaN", "Where", "Einsum", "Reciprocal", "Elu"}


def describe_again(kernel: Kernel) -> Kernel:
    return describe_kernel(kernel.op_type, kernel.domain, kernel.opset, kernel.attributes, kernel.inputs, kernel.outputs)


def test_free_draws_run() -> None:
    """One small kernel of each draw gives the shapes that it describes and no NaN, where the CPU provider has the operator."""
    generator, run = np.random.default_rng(4), 0
    for draw, _ in DRAWS:
        kernel = next((kernel for kernel in (draw("float32", 1, generator) for _ in range(40)) if footprint_mib(kernel) < 2
                       and kernel.flops < 1e8 and all(output.elements for output in kernel.outputs)), None)
        if kernel is None or kernel.op_type == "BiasSoftmax":  # the CPU provider lacks it
            continue
        session = open_session(build_model(kernel).SerializeToString(), "cpu", optimize="none", name=kernel.id)
        outputs = session.run(None, dummy_inputs(kernel))
        assert [output.shape for output in outputs] == [output.shape for output in kernel.outputs], kernel.id
        assert not any(output.dtype.kind == "f" and np.isnan(output).any() for output in outputs), kernel.id
        run += 1
    assert run > 0.9 * len(DRAWS)


def test_kernels_of_models_are_drawn_in_half_precision_too() -> None:
    """The half-precision twin has half the bytes, constants within its type's range, and the id of a kernel in that type."""
    lowest = KernelInput(dtype="float32", shape=(), constant=True, values=(-3.4028234663852886e38,))
    mask = KernelInput(dtype="bool", shape=(1, 1, 16, 16))
    scores = KernelInput(dtype="float32", shape=(1, 4, 16, 16))
    where = describe_kernel("Where", "", 20, {}, [mask, scores, lowest], [Tensor(dtype="float32", shape=(1, 4, 16, 16))])
    twin = in_float_type(where, "float16")
    assert twin.inputs[2].values == (-65504.0,)
    assert [tensor.dtype for tensor in (*twin.inputs, *twin.outputs)] == ["bool", "float16", "float16", "float16"]
    assert twin.bytes_written * 2 == where.bytes_written
    assert in_float_type(twin, "float16") is twin
    assert in_float_type(in_float_type(twin, "float32"), "float16").id == twin.id
    cast = describe_kernel("Cast", "", 20, {"to": 1, "saturate": 1}, [mask], [Tensor(dtype="float32", shape=(1, 1, 16, 16))])
    assert in_float_type(cast, "float16").attributes["to"] == 10
    resize = free_kernel("Resize", "float32")
    halved = in_float_type(resize, "float16")
    assert halved.inputs[0].dtype == "float16"
    assert all(t.dtype != "float16" for t in halved.inputs[1:])
    with pytest.raises(UserError, match="CUDA provider has no GridSample in float16"):
        in_float_type(free_kernel("GridSample", "float32"), "float16")

    entries = entries_of(analyze(small_model(channels=64, side=56), "cpu"))
    drawn, _ = sample_near_models(entries, 40, np.random.default_rng(0), [1, 2], 2.0, dtypes=FLOAT_TYPES)
    assert {kernel.dtype for kernel, _ in drawn.values()} == {"float32", "float16"}
    assert all(kernel.id == name == describe_again(kernel).id for name, (kernel, _) in drawn.items())
    only, _ = sample_near_models(entries, 20, np.random.default_rng(0), [1, 2], 2.0, dtypes=["float16"])
    assert {kernel.dtype for kernel, _ in only.values()} == {"float16"}


def test_indices_of_a_smaller_kernel_stay_in_range() -> None:
    """Whatever its seed was. Each indexed axis has its own limit."""
    x = KernelInput(dtype="float32", shape=(128, 64, 5))
    places = KernelInput(dtype="int64", shape=(1000, 2))
    kernel = describe_kernel("GatherND", "", 20, {"batch_dims": 0}, [x, places], [Tensor(dtype="float32", shape=(1000, 5))])
    assert dummy_inputs(kernel)["x1"].max() == 63
    table = KernelInput(dtype="int64", shape=(500,), constant=True, value_range=(0, 1022))
    kernel = describe_kernel("Gather", "", 20, {"axis": 1}, [x, table], [Tensor(dtype="float32", shape=(128, 500, 5))])
    assert dummy_tensor(kernel, 1).max() == 63


@pytest.mark.slow
def test_free_kernels_are_described_like_those_of_models(torch_models: dict[str, Path]) -> None:
    """They have the attributes and input ranks of models' kernels, so equal kernels have the same id."""
    def form(kernel: Kernel) -> Any:
        return (kernel.op_type, kernel.domain, kernel.opset, *sorted(set(kernel.attributes) - {"pads", "group"}),
                *((len(tensor.shape), tensor.constant, tensor.values is not None) for tensor in kernel.inputs))

    models = [analyze(torch_models[name], "cuda") for name in TORCH_MODELS]
    of_models = {form(kernel) for model in models for kernel in model.kernels.values()}
    free = {form(kernel) for kernel, _ in sample_free(2000, np.random.default_rng(0), [1, 4], 1.0)[0].values()}
    assert {name for name, *_ in of_models & free} >= {"Conv", "Relu", "Add", "Gemm", "ReduceMean"}


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
    assert len(more) == 40
    assert seeds.items() <= more.items()
    assert all(path.stat().st_mtime_ns == when for path, when in times_before.items())
    assert all(built_kernel(folder / f"{name}.onnx").id == name for name in more)
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
    first = draw(entries, 12, seed=1)
    assert first == draw(entries, 12, seed=1) != draw(entries, 12, seed=2)
    assert not set(first) & set(draw(entries, 12, seed=1, existing=frozenset(first)))


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
    (("--batch-sizes", "1,x"), 2, "'x' is not a whole number, 1 or more"),
    (("--dtypes", "bfloat16"), 2, "--count 0 and --free-kind language"),
    (("--cliffs", TARGET, "--free", "3"), 2, "don't go together"),
    (("--errors", "errors.json", "--free", "3"), 2, "don't go together"),
    (("--errors", "errors.json"), 1, "errors.json: no such file"),
    (("--cliffs", TARGET), 1, "no such dataset; measure one with"),
    ((), 1, "python ort_analysis/fusion_detector.py"),
])
def test_wrong_arguments(workspace: Workspace, options: tuple[str, ...], code: int, message: str) -> None:
    done = run_sampler(workspace, *options)
    assert (done.returncode, "Traceback" in done.stderr, str(ROOT) in done.stderr) == (code, False, False)
    assert message in done.stderr
