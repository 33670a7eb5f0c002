"""Fixtures shared by the tests: small real models, exported or built once a session."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from chromium import browser_or_skip
from filelock import FileLock
from onnx import TensorProto, helper, numpy_helper

from hase.kernel_model.building.kernel_models import write_kernel
from hase.kernel_model.sampling.free_shapes.table import DRAWS
from hase.model_zoo.exporting.torch_models import group_of
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import Kernel
from hase.records.kernel_record_files import record_path, update_index
from hase.runtimes import local_flavour
from hase.utils import files
from hase.utils.cache_folder import OFF, VARIABLE
from hase.utils.fingerprint import Flavour
from hase.utils.locks import FOLDER_VARIABLE
from hase.utils.model_files import GROUP_KEY
from hase.utils.paths import ROOT, Workspace

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TORCH_MODELS = {"resnet18": 64, "mobilenet_v3_small": 64, "vit_tiny": 32}  # name: side of the image
TORCH_BATCH = 2
NIGHTLY = ("tests/extras/", "tests/extras/convolutions/", "tests/extras/graph_stages/", "tests/runtimes/test_tvm",
           "tests/runtimes/test_openvino")  # their slow tests
LONGEST = "test_readme.py"  # takes minutes: begins first, or one worker would wait for the other
QUICK_S = 2.0  # what takes longer, its fixtures included, is to be marked slow
Once = Callable[[str, Callable[[Path], object]], Path]  # the type of the fixture `once`


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that two workers end at about the same time; those that measure and others in turn,
    so that two workers seldom wait for each other (`measures_alone`)."""
    for item in items:
        if item.get_closest_marker("slow") and item.path.relative_to(ROOT).as_posix().startswith(NIGHTLY):
            item.add_marker("nightly")
    measuring = {item.path for item in items if item.get_closest_marker("measuring")}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    files = sorted({item.path for item in items}, key=lambda path: (path not in slow, path.name != LONGEST, path))
    position = {path: (path not in slow, number) for kind in (True, False)
                for number, path in enumerate(path for path in files if (path in measuring) is kind)}
    items.sort(key=lambda item: (*position[item.path], item.path))


@pytest.fixture(autouse=True)
def measures_alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No two tests marked `measuring` run at once."""
    if request.node.get_closest_marker("measuring") is None:
        yield
        return
    with FileLock(shared_folder(tmp_path_factory) / "measuring.lock"):
        yield


@pytest.fixture(autouse=True)
def stays_in_its_folder() -> Iterator[None]:
    """A test that leaves the folder would fail those after it, which read files by relative paths."""
    before = Path.cwd()
    yield
    assert Path.cwd() == before, "the test left its folder: use monkeypatch.chdir"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests that `make quick` runs although they take long: to be sped up, or to be marked."""
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports
                   if isinstance(report, pytest.TestReport)):
        if "slow" not in report.keywords:
            seconds[report.nodeid] += report.duration  # type: ignore[assignment]
    if late := {name: took_s for name, took_s in seconds.most_common() if took_s > QUICK_S}:
        terminalreporter.section(f"over {QUICK_S:.0f} s, but not marked slow")
        for name, took_s in late.items():
            terminalreporter.write_line(f"{took_s:.1f} s  {name}")


def torch_model(name: str) -> Any:
    """One of TORCH_MODELS in evaluation mode: residual, squeeze-and-excite, or attention (a vision transformer, small)."""
    import torch
    import torchvision

    torch.manual_seed(0)
    if name == "vit_tiny":
        model = torchvision.models.VisionTransformer(image_size=TORCH_MODELS[name], patch_size=16, num_layers=2, num_heads=2,
                                                     hidden_dim=32, mlp_dim=64, num_classes=10)
    else:
        model = torchvision.models.get_model(name, weights=None)
    return model.eval()


@pytest.fixture(scope="session", autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests don't wait for what else measures on this machine: they and the processes that they start have devices' locks of
    their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_cache() -> Iterator[None]:
    """Tests neither read nor fill the user's cache; those of the cache name a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, OFF)
        yield


@pytest.fixture(scope="session", autouse=True)
def beside_each_other() -> Iterator[None]:
    """Tests keep the CPU busy for each other. What they measure is not marked for that, and waits for no quiet moment."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("records.measurement", "benchmark.measuring.blocks"):
            patch.setattr(f"hase.{module}.BUSY_ADMITTED", 1.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """The hundreds of processes that tests start share what Python compiled of Hase, even where the environment has Python keep
    nothing: compiling takes each of them a quarter of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test session that all workers see."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # each worker has a folder of its own in it


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, make)` is a folder that `make(folder)` filled once in this test session, by whichever worker came first.

    It belongs to all workers: tests read it, and write into copies.
    """
    shared = shared_folder(tmp_path_factory)

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder, finished = shared / name, shared / f"{name}.finished"
        with FileLock(shared / f"{name}.lock"):
            if not finished.exists():
                shutil.rmtree(folder, ignore_errors=True)  # the rest of a failed attempt
                folder.mkdir()
                make(folder)
                finished.touch()
        return folder

    return folder_of


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for tests of pages."""
    with browser_or_skip() as browser:
        yield browser


@pytest.fixture(scope="session")
def torch_models(once: Once) -> dict[str, Path]:
    """TORCH_MODELS as ONNX files, batch TORCH_BATCH, input `input`, output `output`."""
    def export(folder: Path) -> None:
        import torch

        for name, size in TORCH_MODELS.items():
            path = folder / f"{name}.onnx"
            torch.onnx.export(torch_model(name), (torch.randn(TORCH_BATCH, 3, size, size),), str(path), dynamo=True,
                              external_data=False, input_names=["input"], output_names=["output"], verbose=False)
            proto = onnx.load(path)
            helper.set_model_props(proto, {GROUP_KEY: group_of(name)})
            onnx.save(proto, path)

    folder = once("zoo", export)
    return {name: folder / f"{name}.onnx" for name in TORCH_MODELS}


@pytest.fixture(scope="session")
def h200_workspace(once: Once) -> Workspace:
    """The dataset of the H200 that comes with Hase, and its records, unpacked."""
    return unpacked(once, "h200", "nvidia-h200-cuda-ort1.31-all.tar.xz")


def unpacked(once: Once, name: str, archive: str) -> Workspace:
    """A workspace that an archive of recipes/h200 is unpacked into, `once` for all tests."""
    def unpack(folder: Path) -> None:
        with tarfile.open(ROOT / "recipes" / "h200" / archive) as packed:
            packed.extractall(folder, filter="data")

    return Workspace(once(name, unpack))


@pytest.fixture(scope="module")
def trained_workspace(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The module's own copy of the workspace that is trained once a session (trained_workspace.py says what it holds)."""
    from trained_workspace import train

    trained = once("trained", train)
    return Workspace(shutil.copytree(trained, tmp_path_factory.mktemp("trained") / "workspace"))


def small_model(channels: int = 8, side: int = 16, batch: int | str = 1, dtype: str = "float32") -> onnx.ModelProto:
    """Conv, Relu, Conv, Add, Relu, GlobalAveragePool, Flatten, Gemm: a residual block with a head."""
    code = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[dtype]
    generator = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(generator.standard_normal(shape).astype(dtype) * np.asarray(0.1, dtype), name)

    conv: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["input", "w1"], ["c1"], name="conv1", **conv),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="conv2", **conv),
        helper.make_node("Add", ["c2", "r1"], ["a"], name="add"),
        helper.make_node("Relu", ["a"], ["r2"], name="relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["output"], name="head"),
    ]
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("input", code, [batch, 3, side, side])],
        [helper.make_tensor_value_info("output", code, [batch, 4])],
        [weight("w1", channels, 3, 3, 3), weight("w2", channels, channels, 3, 3), weight("w3", channels, 4), weight("b3", 4)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def free_kernel(op_type: str, dtype: str) -> Kernel:
    """A kernel of no model, of an operator that the sampler draws."""
    generator = np.random.default_rng(0)
    return next(kernel for draw, _ in DRAWS for _ in range(8) if (kernel := draw(dtype, 2, generator)).op_type == op_type)


def endless(path: Path) -> None:
    """A model whose loop runs for ever."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Identity", ["state"], ["next"])], "body",
        [value("number", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("state", TensorProto.FLOAT, [1])],
        [value("go_on", TensorProto.BOOL, []), value("next", TensorProto.FLOAT, [1])])
    graph = helper.make_graph(
        [helper.make_node("Loop", ["times", "go_in", "x"], ["y"], body=body)], "endless",
        [value("x", TensorProto.FLOAT, [1])], [value("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(np.array(2**62, np.int64), "times"), numpy_helper.from_array(np.array(True), "go_in")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def build_workspace(workspace: Workspace, models: Mapping[str, onnx.ModelProto]) -> Flavour:
    """Models as files with their CPU records, index and kernels, as the first three phases write them. What stands in front of
    the first "_" of a name is the model's group; their collection is `made up`."""
    for name, proto in models.items():
        files.write_bytes(workspace.models / f"{name}.onnx", proto.SerializeToString())
        record = analyze(workspace.models / f"{name}.onnx", "cpu", group=name.split("_")[0], collection="made up")
        files.write_json(record_path(workspace, record.flavour, record.model), record)
    flavour = local_flavour("cpu")
    for kernel in update_index(workspace, flavour).all_kernels():
        write_kernel(kernel, workspace.kernel_onnx / flavour.name)
    return flavour


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty workspace."""
    return Workspace(tmp_path)


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """See `steady_canary`."""
    return steady_canary(monkeypatch)


def steady_canary(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times of the collector's canary, ms, made up so that the machine is steady; the last one is repeated."""
    from hase.runtimes.protocol import Worker

    times_ms = [1.0]

    def canary_ms(*_: object) -> tuple[float, ...]:
        return (times_ms.pop(0) if len(times_ms) > 1 else times_ms[0],)

    monkeypatch.setattr(Worker, "canary_ms", canary_ms)
    return times_ms
