"""Models under TVM for a GPU: taken apart and compiled for one on a machine without. Nothing runs on a GPU here: where times
are needed, those of a CPU stand for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import run_script
from optional_packages import needs
from test_tvm_collection import CONFIG, layers

from benchmark.collecting.collect import collect
from benchmark.collecting.config import CollectorConfig
from benchmark.records.files import header_path, read_header
from benchmark.runtimes.protocol import Setting
from ort_analysis.graph.analysis import update_index
from tvm_analysis.compiling import built_function, compiled_model
from tvm_analysis.package import FUSED, LEVELS, gpu_target, target_to_run_on, tvm_flavour
from tvm_analysis.recording import Parsed, parse, parse_at, write_parsed
from utils import files
from utils.config import validate
from utils.errors import UserError
from utils.fingerprint import WITHOUT_GPU, Target
from utils.paths import Workspace


@pytest.fixture
def model(tmp_path: Path) -> Path:
    needs("tvm", "requirements-tvm.txt")
    return layers(tmp_path / "layers.onnx", 3)


@pytest.fixture
def parsed(model: Path) -> Parsed:
    return parse(model, device="cuda")[FUSED]


def test_a_graph_for_a_gpu_is_that_of_the_cpu_on_another_device(model: Path, parsed: Parsed) -> None:
    """No operator of these networks is computed by another routine on a GPU."""
    on_cpu = parse(model)[FUSED].record
    assert parsed.record.kernels == on_cpu.kernels
    assert parsed.record.flavour.name == tvm_flavour("cuda").name
    assert parsed.record.flavour.name.startswith("cuda-tvm")
    assert {node.provider for node in parsed.record.nodes} == {"cuda"}
    assert [parse_at(level, model, device="cuda").record.flavour.optimization for level in LEVELS] == list(LEVELS)


def test_kernels_and_whole_models_compile_to_code_for_a_gpu(parsed: Parsed) -> None:
    """A function without a schedule would be refused: it binds no threads."""
    for function in parsed.graph.functions.values():
        [code] = built_function(function, gpu_target()).imports
        assert code.kind == "cuda"
        assert "threadIdx.x" in code.inspect_source("cuda")
    whole = compiled_model(parsed.lowered.module, gpu_target())
    [of_whole] = [one for module in (whole.mod, *whole.mod.imports) for one in module.imports if one.kind == "cuda"]
    assert of_whole.inspect_source("cuda").count("__global__") >= len(parsed.graph.functions)


def test_without_a_gpu_nothing_runs_on_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT_GPU, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="device cuda: TVM"):
        target_to_run_on("cuda")


def test_a_gpu_is_a_target_that_is_learned_and_predicted(tmp_path: Path) -> None:
    """The times are those of this CPU, since no GPU is there."""
    needs("tvm", "requirements-tvm.txt")
    workspace, widths = Workspace(tmp_path), (64, 96, 128, 160, 192, 256)
    workspace.models.mkdir(parents=True)
    for width in widths:
        path = layers(workspace.models / f"wide{width}.onnx", 3, width)
        for device in ("cpu", "cuda"):
            write_parsed(workspace, parse(path, device=device))
    for device in ("cpu", "cuda"):
        update_index(workspace, tvm_flavour(device))
    measured = workspace.dataset(str(collect(workspace, validate(CONFIG, CollectorConfig, "test"))["target"]))
    gpu = Target(device_name="NVIDIA made up", flavour=tvm_flavour("cuda"))
    assert Setting.of(gpu, workspace.kernel_onnx) == Setting(
        level=FUSED, kernels=str(workspace.kernel_onnx / gpu.flavour.name))
    folder = workspace.dataset(gpu.name)
    shutil.copytree(measured, folder)
    files.write_json(header_path(folder), read_header(measured).model_copy(update={"target": gpu}))
    for script in ("training/train_kernel_model.py", "training/fit_composition.py"):
        done = run_script(script, "--workspace", workspace.root, "--target", gpu.name)
        assert done.returncode == 0, done.stderr
    done = run_script("inference/predict_model_latency.py", "--workspace", workspace.root, "--target", gpu.name,
                      "--model", "wide256.onnx", "--json")
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert found["flavour"] == tvm_flavour("cuda").name
    low_ms, high_ms = found["interval_ms"]
    assert 0 < low_ms < found["latency_ms"] < high_ms
