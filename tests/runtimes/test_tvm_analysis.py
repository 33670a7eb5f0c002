"""Models under TVM: all operators and kernels are kept, and functions compute the same as ONNX Runtime."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from command import run_script
from onnx import helper
from onnx_files import saved
from optional_packages import needs

from hase.graph_model.simulation.dag import build_dag, longest_path
from hase.records.kernel_record_files import read_index, read_model_record, read_model_records, record_path
from hase.records.operators import VIEWS
from hase.runtimes.tvm.compiling import (
    FUSED,
    UNFUSED,
    check_tvm,
    function_path,
    hash_of,
    llvm_target,
    read_function,
    tvm_flavour,
)
from hase.runtimes.tvm.lowering import lower, onnx_name, relax_of_torch
from hase.runtimes.tvm.recording import TvmModel, graph_of, parse, write_parsed
from hase.utils.errors import UserError
from hase.utils.lazy import tvm
from hase.utils.paths import Workspace


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
    return residual(tmp_path_factory.mktemp("tvm") / "residual.onnx")


@pytest.fixture(scope="module")
def parsed(model: Path) -> dict[str, TvmModel]:
    needs("tvm", "requirements-tvm.txt")
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
    assert [tensor.shape for tensor in first.inputs] == [(2, 3, 16, 16), (8, 3, 3, 3), (1, 8, 1, 1)]
    assert [tensor.constant for tensor in first.inputs] == [False, True, True]
    assert first.flops == 2 * 8 * 16 * 16 * (2 * 3 * 3 * 3 + 1)
    assert (fused.flavour.runtime, fused.flavour.optimization) == ("tvm", FUSED)


@pytest.mark.slow
def test_kernels_are_in_the_order_of_their_tensors(parsed: dict[str, TvmModel]) -> None:
    for level in (UNFUSED, FUSED):
        record = parsed[level].record
        assert build_dag(record).number_of_nodes() == len(record.nodes)
        made = set(record.inputs)
        for node in record.nodes:
            assert {name for name in node.inputs if name} <= made
            made |= set(node.outputs)
    length, path = longest_path(build_dag(record), {node.name: 1.0 for node in record.nodes})
    assert length == len(path) == 6


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
        built = tvm.compile(tvm.IRModule({"main": function}), llvm_target(1))
        arguments = [tvm.runtime.tensor(tensors[name] if name else next(unused)) for name in node.inputs]
        result = tvm.runtime.tensor(out)
        built["main"](*arguments, result)
        tensors[node.outputs[0]] = result.numpy()
    expected = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    np.testing.assert_allclose(tensors[graph.outputs[0]], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_kernels_of_one_kind_have_one_id_and_a_function_on_disk(parsed: dict[str, TvmModel], model: Path,
                                                                tmp_path: Path) -> None:
    workspace, fused = Workspace(tmp_path), parsed[FUSED]
    write_parsed(workspace, parsed)
    assert parse(model, {"batch": 2})[FUSED].record == fused.record
    of_batch_3 = parse(model, {"batch": 3})[FUSED].record
    assert not set(of_batch_3.kernels) & {name for name, kernel in fused.record.kernels.items() if kernel.moves_data}
    for name, function in fused.graph.functions.items():
        path = function_path(workspace, fused.record.flavour, name)
        assert hash_of(read_function(path)) == hash_of(function) == fused.record.kernels[name].attributes["function"]
    assert read_model_records(workspace, tvm_flavour()) == [fused.record]
    path.write_text("{")
    with pytest.raises(UserError, match="not a function of this TVM"):
        read_function(path)


@pytest.mark.slow
def test_the_command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("tvm", "requirements-tvm.txt")
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
    with pytest.raises(UserError, match=r"pip install -r requirements-tvm\.txt"):
        check_tvm()


@pytest.mark.slow
def test_pytorch_without_onnx_in_between() -> None:
    """TVM splits the normalisation, and each of its operators keeps its name."""
    needs("tvm", "requirements-tvm.txt")
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1))
    module = relax_of_torch(network.eval(), (torch.ones(1, 3, 8, 8),), "network")
    graph = graph_of("network", lower("network", module)[UNFUSED])
    kernels = [graph.kernels[node.kernel_id] for node in graph.nodes]
    assert {"Sub", "Mul", "Add", "Relu"} <= {kernel.type for kernel in kernels}
    assert [kernel.attributes["kernel_shape"] for kernel in kernels if kernel.type == "Conv"] == [[3, 3], [1, 1]]


@pytest.mark.slow
def test_a_program_of_pytorch_is_a_model(workspace: Workspace) -> None:
    """A file of torch.export gives the same kernels as the module, and a wrong one an error of one line."""
    needs("tvm", "requirements-tvm.txt")
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
    assert sum(record.kernel_of(node).flops for node in record.nodes) > 2 * (3 * 9 * 4 * 36 + 144 * 5)

    done = run_script(*command, "--model", "network.pt2", "--dim", "n=2")
    assert (done.returncode, "the sizes of a program of PyTorch are fixed, so n can't be set" in done.stderr) == (1, True)
    path.write_bytes(b"no program")
    done = run_script(*command, "--model", "network.pt2")
    assert (done.returncode, "network.pt2: no program of PyTorch; write it with torch.export.save" in done.stderr) == (1, True)
