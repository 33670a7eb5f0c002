"""Models under TVM for a GPU: taken apart and compiled to machine code on a machine without a GPU. Nothing runs on a GPU
here: where times are needed, they are those of a CPU, or drawn."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_script
from onnx import helper
from onnx_files import layers, saved
from optional_packages import needs

from hase.runtimes.tvm import tune_kernels
from hase.runtimes.tvm.compiling import (
    FOLDER,
    FUSED,
    LEVELS,
    built_function,
    check_tvm,
    compiled_cubin,
    compiled_model,
    cuda_sources,
    gpu_target,
    kept_cubin,
    target_to_run_on,
    tvm_flavour,
)
from hase.runtimes.tvm.recording import TvmModel, parse, parse_at, write_parsed
from hase.utils.errors import UserError
from hase.utils.fingerprint import WITHOUT_GPU
from hase.utils.lazy import tvm
from hase.utils.paths import Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow]

# Without the driver's library, TVM can't load its part; with it, all GPUs are hidden.
NO_GPU = "device cuda: TVM (can't load its part for NVIDIA GPUs|finds no NVIDIA GPU)"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    needs("tvm", "requirements-tvm.txt")
    return layers(tmp_path / "layers.onnx", 3)


@pytest.fixture
def parsed(model: Path) -> TvmModel:
    return parse(model, device="cuda")[FUSED]


def test_a_gpus_graph_is_the_cpus_on_another_device(model: Path, parsed: TvmModel) -> None:
    """No operator of these networks is computed by another routine on a GPU."""
    on_cpu = parse(model)[FUSED].record
    assert parsed.record.kernels == on_cpu.kernels
    assert parsed.record.flavour.name == tvm_flavour("cuda").name
    assert parsed.record.flavour.name.startswith("cuda-tvm")
    assert {node.provider for node in parsed.record.nodes} == {"cuda"}
    assert [parse_at(level, model, device="cuda").record.flavour.optimization for level in LEVELS] == list(LEVELS)


def test_kernels_and_whole_models_compile_to_code_for_a_gpu(parsed: TvmModel) -> None:
    """A function without a schedule would be refused: it binds no threads."""
    for function in parsed.graph.functions.values():
        [code] = built_function(function, gpu_target()).imports
        assert code.kind == "cuda"
        assert "threadIdx.x" in code.inspect_source("cuda")
    model = compiled_model(parsed.lowered.module, gpu_target())
    [model_code] = [part for module in (model.mod, *model.mod.imports) for part in module.imports if part.kind == "cuda"]
    assert model_code.inspect_source("cuda").count("__global__") >= len(parsed.graph.functions)


def excitation(path: Path) -> Path:
    """A channel's mean sets its weight. TVM fuses the product with the convolution before it."""
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["mean"]), helper.make_node("Conv", ["mean", "w", "b"], ["c"]),
             helper.make_node("Sigmoid", ["c"], ["share"]), helper.make_node("Mul", ["share", "x"], ["y"])]
    return saved(path, nodes, {"x": [2, 8, 6, 6]}, {"y": [2, 8, 6, 6]},
                 {name: np.full(shape, 0.1, np.float32) for name, shape in (("w", (8, 8, 1, 1)), ("b", 8))})


def test_a_rule_that_fails_leaves_the_function_to_the_next_one(tmp_path: Path) -> None:
    """TVM's rule for products takes this convolution, and then finds that it can't inline what uses the result."""
    needs("tvm", "requirements-tvm.txt")
    functions = parse(excitation(tmp_path / "excitation.onnx"), device="cuda")[FUSED].graph.functions
    [function] = [function for name, function in functions.items() if name.startswith("Conv_Add_Sigmoid_Mul")]
    with gpu_target(), pytest.raises(AssertionError, match="not properly inlined"):
        tvm.s_tir.dlight.gpu.Matmul().apply(function, gpu_target(), False)
    [code] = built_function(function, gpu_target()).imports
    assert "threadIdx.x" in code.inspect_source("cuda")


def test_machine_code_is_compiled_once(tmp_path: Path) -> None:
    needs("tvm", "requirements-tvm.txt")
    check_tvm()
    source = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
    code = kept_cubin(source, "sm_90", tmp_path)
    assert code.startswith(b"\x7fELF")
    [path] = tmp_path.glob("*.cubin")
    path.write_bytes(b"kept")
    assert kept_cubin(source, "sm_90", tmp_path) == b"kept"
    assert kept_cubin(source, "sm_80", tmp_path) not in (b"kept", code)
    with pytest.raises(RuntimeError, match=r"identifier .y. is undefined"):
        kept_cubin('extern "C" __global__ void wrong() { y = 1; }', "sm_90", tmp_path)


def test_all_kernels_and_models_are_compiled_ahead(tmp_path: Path) -> None:
    """The three layers have the same kernel. The model has its own piece of machine code."""
    needs("tvm", "requirements-tvm.txt")
    workspace = Workspace(tmp_path)
    workspace.models.mkdir(parents=True)
    script = ("runtimes/tvm/cuda_compiler.py", "--workspace", workspace.root, "--arch", "sm_90", "--jobs", "1", "--json")
    empty = run_script(*script)
    assert empty.returncode == 1
    assert "no kernels of TVM for a GPU; make some with: python runtimes/tvm/relax_parser.py --device cuda" in empty.stderr
    write_parsed(workspace, parse(layers(workspace.models / "layers.onnx", 3), device="cuda"))
    folder = workspace.kernel_onnx / tvm_flavour("cuda").name
    done = run_script(*script)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"arch": "sm_90", "compiled": 2, "failed": 0}]
    assert len(list((folder / FOLDER).glob("*.cubin"))) == 2
    [function] = folder.glob("*.tvm")
    function.write_text("{}", encoding="utf-8")
    failed = run_script(*script)
    assert failed.returncode == 1
    assert json.loads(failed.stdout) == [{"arch": "sm_90", "compiled": 1, "failed": 1}]
    assert f"{function.name}: {function}: not a function of this TVM" in failed.stderr


def test_schedules_are_searched_for_a_gpu(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial is compiled to machine code; its time is drawn, since there is no GPU. The first trial fails when it runs."""
    graph = parse(model, device="cuda")[FUSED].graph
    [(name, function)] = graph.functions.items()
    compiled: list[str] = []

    def drawn_ms(built: Any, *_: Any) -> tuple[float, ...]:
        compiled.extend(cuda_sources(built))
        if len(compiled) == 1:
            raise UserError("launch failed")
        return (1.0 / len(compiled),)

    monkeypatch.setattr(tune_kernels, "target_to_run_on", lambda device, threads: gpu_target("sm_90"))
    monkeypatch.setattr(tune_kernels, "tensor_for", lambda described, device: described)
    monkeypatch.setattr(tune_kernels, "samples_ms", drawn_ms)
    logging.getLogger("tvm.s_tir.meta_schedule").addHandler(logging.NullHandler())  # other tests leave one there
    tuned = tune_kernels.tune(function, graph.kernels[name], "cuda", 1, 3, tmp_path / "database")
    assert tuned.worked == 2
    assert (tuned.before_ms, tuned.after_ms) == (1 / 4, 1 / 5)  # after three trials: by TVM's rules, then the best trial
    assert all("threadIdx.x" in source for source in compiled)
    assert compiled_cubin(compiled[-1], "sm_90").startswith(b"\x7fELF")
    [code] = built_function(tuned.function, gpu_target("sm_90")).imports  # the rules do not change the found schedule
    assert code.inspect_source("cuda") == compiled[-1]


def test_without_a_gpu_nothing_runs_on_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its architecture must be named to compile for it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_script("runtimes/tvm/cuda_compiler.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(f"error: {NO_GPU}", done.stderr)
    monkeypatch.setenv(WITHOUT_GPU, "1")
    with pytest.raises(UserError, match=NO_GPU):
        target_to_run_on("cuda")
