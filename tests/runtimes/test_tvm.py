"""Models under TVM: all operators and kernels are kept, and functions compute the same as ONNX Runtime. For a GPU they are
taken apart and compiled to machine code here, but nothing runs on one: where times are needed, they are drawn."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from command import run_script
from onnx import helper
from onnx_files import layers, saved
from optional_packages import needs

from hase.records.kernel_record_files import read_index, read_model_record, record_path
from hase.records.operators import VIEWS
from hase.runtimes.tvm import compiling, tune_kernels
from hase.runtimes.tvm.compiling import FUSED, UNFUSED, compile_function, function_path, gpu_target, tvm_flavour
from hase.runtimes.tvm.lowering import onnx_name
from hase.runtimes.tvm.recording import TvmModel, parse, write_parsed
from hase.utils.errors import UserError
from hase.utils.fingerprint import WITHOUT_GPU
from hase.utils.lazy import tvm
from hase.utils.paths import Workspace

pytestmark = pytest.mark.measuring

# Without the driver's library, TVM can't load its part; with it, all GPUs are hidden.
NO_GPU = "device cuda: TVM (can't load its part for NVIDIA GPUs|finds no NVIDIA GPU)"


def residual(path: Path) -> Path:
    """Convolutions (one depthwise), Relu, a sum, a pool, a product and a softmax; dimension `batch` is open."""
    numbers = np.random.default_rng(0)
    nodes = [helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c1"], ["r1"]),
             helper.make_node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1], group=8),
             helper.make_node("Add", ["r1", "c2"], ["s"]),
             helper.make_node("MaxPool", ["s"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
             helper.make_node("Flatten", ["p"], ["f"]), helper.make_node("Gemm", ["f", "w3", "b3"], ["g"]),
             helper.make_node("Softmax", ["g"], ["y"], axis=-1)]
    return saved(path, nodes, {"x": ["batch", 3, 16, 16]}, {"y": ["batch", 10]}, {
        name: numbers.standard_normal(shape).astype(np.float32) / 8
        for name, shape in (("w1", (8, 3, 3, 3)), ("b1", 8), ("w2", (8, 1, 3, 3)), ("w3", (512, 10)), ("b3", 10))})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("tvm", "tvm")
    return residual(tmp_path_factory.mktemp("tvm") / "residual.onnx")


@pytest.fixture(scope="module")
def parsed(model: Path) -> dict[str, TvmModel]:
    return parse(model, {"batch": 2})


@pytest.mark.slow
def test_operators_and_kernels(parsed: dict[str, TvmModel]) -> None:
    unfused, fused = (parsed[level].record for level in (UNFUSED, FUSED))
    assert [unfused.kernel_of(node).type for node in unfused.nodes] == [
        "Conv", "Add", "Relu", "Conv", "Add", "MaxPool", "Reshape", "MatMul", "Add", "Softmax"]
    assert [fused.kernel_of(node).type for node in fused.nodes] == [
        "Conv_Add_Relu", "Conv_Add", "MaxPool", "Reshape", "MatMul_Add", "Softmax"]
    before, after = (Counter(name for node in record.nodes for name in record.kernel_of(node).attributes["operators"]
                             if onnx_name(name) not in VIEWS) for record in (unfused, fused))
    assert before == after  # no operator is lost
    first, second = (fused.kernel_of(node) for node in fused.nodes[:2])
    assert (first.attributes["kernel_shape"], first.attributes["pads"]) == ([3, 3], [1, 1, 1, 1])
    assert (second.attributes["group"], second.outputs[0].shape) == (8, (2, 8, 16, 16))
    assert [(tensor.shape, tensor.constant) for tensor in first.inputs] == [
        ((2, 3, 16, 16), False), ((8, 3, 3, 3), True), ((1, 8, 1, 1), True)]
    assert first.flops == 2 * 8 * 16 * 16 * (2 * 3 * 3 * 3 + 1)
    assert (fused.flavour.runtime, fused.flavour.optimization) == ("tvm", FUSED)


@pytest.mark.slow
def test_kernels_in_a_row_compute_the_same_as_onnx_runtime(parsed: dict[str, TvmModel], model: Path) -> None:
    """The records name the right functions and tensors: run in this order, they give the model's output."""
    graph, main = parsed[FUSED].graph, parsed[FUSED].lowered.module["main"]
    x = np.random.default_rng(1).standard_normal((2, 3, 16, 16)).astype(np.float32)
    tensors = {graph.inputs[0]: x}
    weights = [[part.data.numpy() if hasattr(part, "data") else part.value.numpy() for part in binding.value.args[1].fields
                if not isinstance(part, tvm.relax.Var)] if len(binding.value.args) > 1 and
               isinstance(binding.value.args[1], tvm.relax.Tuple) else [] for binding in main.body.blocks[0].bindings]
    for node, constants in zip(graph.nodes, weights, strict=True):
        kernel, unused = graph.kernels[node.kernel_id], iter(constants)
        out = np.empty(kernel.outputs[0].shape, kernel.outputs[0].dtype)
        if node.kernel_id not in graph.functions:
            tensors[node.outputs[0]] = tensors[node.inputs[0]].reshape(out.shape)
            continue
        function = graph.functions[node.kernel_id].with_attr("global_symbol", "main")
        built = tvm.compile(tvm.IRModule({"main": function}), compiling.llvm_target(1))
        arguments = [tvm.runtime.tensor(tensors[name] if name else next(unused)) for name in node.inputs]
        result = tvm.runtime.tensor(out)
        built["main"](*arguments, result)
        tensors[node.outputs[0]] = result.numpy()
    expected = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    np.testing.assert_allclose(tensors[graph.outputs[0]], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_kernels_of_one_kind_have_one_id_and_a_function_on_disk(parsed: dict[str, TvmModel], model: Path,
                                                                workspace: Workspace) -> None:
    fused = parsed[FUSED]
    write_parsed(workspace, parsed)
    of_batch_3 = parse(model, {"batch": 3})[FUSED].record
    assert not set(of_batch_3.kernels) & {name for name, kernel in fused.record.kernels.items() if kernel.moves_data}
    for name, function in fused.graph.functions.items():
        path = function_path(workspace, fused.record.flavour, name)
        hashes = [compiling.function_hash(of) for of in (compiling.read_function(path), function)]
        assert hashes == [fused.record.kernels[name].attributes["function"]] * 2
    path.write_text("{")
    with pytest.raises(UserError, match="not a function of this TVM"):
        compiling.read_function(path)


@pytest.mark.slow
def test_the_command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_script("runtimes/tvm/relax_parser.py", "--model", model, "--dim", "batch=1,4", "--workspace", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["records"]
    assert [(row["model"], row["operators"], row["runs"], row["network"]) for row in rows] == [
        ("residual@batch=1", 10, 6, "convolutional"), ("residual@batch=4", 10, 6, "convolutional")]
    index = read_index(Workspace(tmp_path).kernel_records / tvm_flavour(level=UNFUSED).name / "index.json")
    assert set(index.kernels) == {"Conv", "Add", "Relu", "MaxPool", "Reshape", "MatMul", "Softmax"}
    odd = saved(tmp_path / "odd.onnx", [helper.make_node("Unheard", ["x"], ["y"])], {"x": [1]}, {"y": [1]}, {})
    with pytest.raises(UserError, match=r"odd: TVM can't take this model apart: .*"):
        parse(odd)
    monkeypatch.setattr("hase.runtimes.tvm.compiling.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[tvm\]'"):
        compiling.check_tvm()


@pytest.mark.slow
def test_a_program_of_pytorch_is_a_model(workspace: Workspace) -> None:
    """A file of torch.export; a wrong one gives an error of one line."""
    needs("tvm", "tvm")
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)).eval()
    workspace.models.mkdir(parents=True, exist_ok=True)
    path = workspace.models / "network.pt2"
    torch.export.save(torch.export.export(network, (torch.ones(1, 3, 8, 8),)), path)
    command = ("runtimes/tvm/relax_parser.py", "--workspace", workspace.root)
    done = run_script(*command)
    assert done.returncode == 0, done.stderr
    record = read_model_record(record_path(workspace, tvm_flavour(), "network"))
    assert [tensor.shape for tensor in (*record.inputs.values(), *record.outputs.values())] == [(1, 3, 8, 8), (1, 5)]
    assert record.weight_bytes == sum(4 * parameter.numel() for parameter in network.parameters())
    done = run_script(*command, "--model", "network.pt2", "--dim", "n=2")
    assert (done.returncode, "the sizes of a program of PyTorch are fixed, so n can't be set" in done.stderr) == (1, True)
    path.write_bytes(b"no program")
    done = run_script(*command, "--model", "network.pt2")
    assert (done.returncode, "network.pt2: no program of PyTorch; write it with torch.export.save" in done.stderr) == (1, True)


@pytest.mark.slow
def test_kernels_and_whole_models_compile_to_code_for_a_gpu(tmp_path: Path) -> None:
    """A GPU's graph is the CPU's. A function without a schedule would be refused: it binds no threads."""
    needs("tvm", "tvm")
    path = layers(tmp_path / "layers.onnx", 2)
    parsed = parse(path, device="cuda")[FUSED]
    assert parsed.record.kernels == parse(path)[FUSED].record.kernels
    assert parsed.record.flavour.name == tvm_flavour("cuda").name
    assert {node.provider for node in parsed.record.nodes} == {"cuda"}
    for function in parsed.graph.functions.values():
        [code] = compile_function(function, gpu_target()).imports
        assert code.kind == "cuda"
        assert "threadIdx.x" in code.inspect_source("cuda")
    model = compiling.compile_lowered(parsed.lowered.module, gpu_target())
    [model_code] = [part for module in (model.mod, *model.mod.imports) for part in module.imports if part.kind == "cuda"]
    assert model_code.inspect_source("cuda").count("__global__") >= len(parsed.graph.functions)


@pytest.mark.slow
def test_a_rule_that_fails_leaves_the_function_to_the_next_one(tmp_path: Path) -> None:
    """A channel's mean sets its weight. TVM fuses the product with the convolution before it; its rule for products takes this
    convolution, and then finds that it can't inline what uses the result."""
    needs("tvm", "tvm")
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["mean"]), helper.make_node("Conv", ["mean", "w", "b"], ["c"]),
             helper.make_node("Sigmoid", ["c"], ["share"]), helper.make_node("Mul", ["share", "x"], ["y"])]
    path = saved(tmp_path / "excitation.onnx", nodes, {"x": [2, 8, 6, 6]}, {"y": [2, 8, 6, 6]},
                 {name: np.full(shape, 0.1, np.float32) for name, shape in (("w", (8, 8, 1, 1)), ("b", 8))})
    functions = parse(path, device="cuda")[FUSED].graph.functions
    [function] = [function for name, function in functions.items() if name.startswith("Conv_Add_Sigmoid_Mul")]
    with gpu_target(), pytest.raises(AssertionError, match="not properly inlined"):
        tvm.s_tir.dlight.gpu.Matmul().apply(function, gpu_target(), False)
    [code] = compile_function(function, gpu_target()).imports
    assert "threadIdx.x" in code.inspect_source("cuda")


@pytest.mark.slow
def test_all_kernels_and_models_are_compiled_ahead(workspace: Workspace) -> None:
    """The layer's kernel, and the model's own piece of machine code."""
    needs("tvm", "tvm")
    workspace.models.mkdir(parents=True)
    script = ("runtimes/tvm/cuda_compiler.py", "--workspace", workspace.root, "--arch", "sm_90", "--jobs", "1", "--json")
    write_parsed(workspace, parse(layers(workspace.models / "layers.onnx", 1, 32), device="cuda"))
    folder = workspace.kernel_onnx / tvm_flavour("cuda").name
    done = run_script(*script)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"arch": "sm_90", "compiled": 2, "failed": 0}]
    assert len(list((folder / compiling.CUBINS).glob("*.cubin"))) == 2
    [function] = folder.glob("*.tvm")
    function.write_text("{}", encoding="utf-8")
    failed = run_script(*script)
    assert (failed.returncode, json.loads(failed.stdout)) == (1, [{"arch": "sm_90", "compiled": 1, "failed": 1}])
    assert f"{function.name}: {function}: not a function of this TVM" in failed.stderr


@pytest.mark.slow
def test_schedules_are_searched_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial is compiled to machine code; its time is drawn, since there is no GPU. The first trial fails when it runs. Two
    trials of an elementwise kernel test the path, but find no good schedule."""
    needs("tvm", "tvm")
    path = saved(tmp_path / "relu.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": [64, 1024]}, {"y": [64, 1024]}, {})
    graph = parse(path, device="cuda")[FUSED].graph
    [(name, function)] = graph.functions.items()
    compiled: list[str] = []

    def drawn_ms(built: Any, *_: Any) -> tuple[float, ...]:
        compiled.extend(compiling.cuda_sources(built))
        if len(compiled) == 1:
            raise UserError("launch failed")
        return (1.0 / len(compiled),)

    monkeypatch.setattr(tune_kernels, "local_tvm_target", lambda device, threads: gpu_target("sm_90"))
    monkeypatch.setattr(tune_kernels, "tensor_for", lambda described, device: described)
    monkeypatch.setattr(tune_kernels, "time_main_ms", drawn_ms)
    logging.getLogger("tvm.s_tir.meta_schedule").addHandler(logging.NullHandler())  # other tests leave one there
    tuned = tune_kernels.tune(function, graph.kernels[name], "cuda", 1, 2, tmp_path / "database")
    assert tuned.worked == 1
    assert (tuned.before_ms, tuned.after_ms) == (1 / 3, 1 / 4)  # after two trials: by TVM's rules, then the best trial
    assert all("threadIdx.x" in source for source in compiled)
    assert compiling.compile_cubin(compiled[-1], "sm_90").startswith(b"\x7fELF")
    [code] = compile_function(tuned.function, gpu_target("sm_90")).imports  # the rules do not change the found schedule
    assert code.inspect_source("cuda") == compiled[-1]


@pytest.mark.slow
def test_without_a_gpu_nothing_runs_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its architecture must be named to compile for it."""
    needs("tvm", "tvm")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_script("runtimes/tvm/cuda_compiler.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(f"error: {NO_GPU}", done.stderr)
    monkeypatch.setenv(WITHOUT_GPU, "1")
    with pytest.raises(UserError, match=NO_GPU):
        compiling.local_tvm_target("cuda")
