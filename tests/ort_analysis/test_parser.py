"""The graph parser: ONNX Runtime's own graph with every shape, and a clear error for a file that is no model."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import run_script
from conftest import small_model
from onnx import helper, numpy_helper

from hase.ort_analysis.graph.parsing import node_rows, parse_graph
from hase.ort_analysis.graph.source import read_source
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.model_files import DEFAULT_DIMS_KEY

without_gpu = pytest.mark.skipif(has_cuda(), reason="this machine has a GPU: its graph is not derived")


@pytest.mark.slow
def test_resnet18_node_by_node(torch_models: dict[str, Path]) -> None:
    graph = parse_graph(torch_models["resnet18"], "cpu")
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in graph.tensors.items()}
    assert shapes["input"] == ("float32", (2, 3, 64, 64))
    assert shapes["output"] == ("float32", (2, 1000))
    first = next(node for node in graph.nodes if node.op_type.endswith("Conv"))
    assert graph.tensors[first.inputs[0]].shape == (2, 3, 64, 64)
    assert graph.tensors[first.inputs[1]].shape == (64, 3, 7, 7)
    assert graph.tensors[first.inputs[1]].constant
    assert graph.tensors[first.outputs[0]].shape == (2, 64, 32, 32)
    assert first.attributes["strides"] == [2, 2]
    assert Counter(node.op_type.removeprefix("Fused") for node in graph.nodes)["Conv"] == 20
    assert {node.provider for node in graph.nodes} == {"cpu"}
    assert not graph.derived
    rows = node_rows(graph)
    assert rows[-1]["op_type"] == "Gemm"
    assert rows[-1]["inputs"].startswith("float32[2,512] ")
    assert rows[-1]["outputs"] == "float32[2,1000]"


@pytest.mark.slow
@without_gpu
def test_the_cuda_graph_without_a_gpu(torch_models: dict[str, Path]) -> None:
    """The counts are those of the graph that the CUDA provider saves on a GPU."""
    graph = parse_graph(torch_models["resnet18"], "cuda")
    counts = Counter(node.op_type for node in graph.nodes)
    assert (counts["Conv"], counts["Relu"], counts["Add"]) == (20, 17, 8)
    assert graph.derived
    assert graph.flavour.device == "cuda"
    assert not any(node.domain.endswith("nchwc") for node in graph.nodes)
    assert {node.provider for node in graph.nodes} == {"cuda"}


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["cpu", "cuda"])
@pytest.mark.parametrize("model", ["resnet18", "mobilenet_v3_small", "vit_tiny"])
def test_every_tensor_has_the_shape_it_has_when_run(torch_models: dict[str, Path], model: str, provider: str) -> None:
    """ORT's operators too, where ONNX's shape inference stops."""
    graph = parse_graph(torch_models[model], provider)
    names = {name for node in graph.nodes for name in (*node.inputs, *node.outputs)}
    assert all(graph.tensors[name].present for name in names if name)
    assert all(size > 0 for name in names for size in graph.tensors[name].shape)
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)
    if model == "vit_tiny":
        contrib = {node.op_type for node in graph.nodes if node.domain == "com.microsoft"}
        assert {"FusedMatMul", "SkipLayerNormalization"} <= contrib
        product = next(node for node in graph.nodes if node.op_type == "FusedMatMul")
        assert [graph.tensors[name].shape for name in product.inputs] == [(5, 2, 2, 16), (5, 2, 2, 16)]
        assert graph.tensors[product.outputs[0]].shape == (2, 2, 5, 5)


@pytest.mark.slow
def test_small_constants_keep_their_values(torch_models: dict[str, Path]) -> None:
    graph = parse_graph(torch_models["resnet18"], "cpu")
    reshape = next(node for node in graph.nodes if node.op_type == "Reshape")
    shape = graph.tensors[reshape.inputs[1]]
    assert (shape.dtype, shape.constant) == ("int64", True)
    assert shape.values is not None
    assert tuple(shape.values) in ((2, 512), (2, -1), (-1, 512))


# dynamic dimensions ------------------------------------------------------------------------------------------------------

def test_dynamic_dimension(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    onnx.save(small_model(batch="batch"), path)
    graph = parse_graph(path, "cpu", {"batch": 3})
    assert graph.tensors["output"].shape == (3, 4)
    assert graph.source.dims == {"batch": 3}
    with pytest.raises(UserError, match=r"dimension batch \(input, axis 0\) is open; give its size, for example --dim batch=1"):
        parse_graph(path, "cpu")
    with pytest.raises(UserError, match="no dynamic dimension btach; its dynamic dimensions are batch"):
        parse_graph(path, "cpu", {"btach": 3})


def test_fixed_dimensions_take_no_size() -> None:
    with pytest.raises(UserError, match="no dynamic dimension batch; all its dimensions are fixed"):
        read_source(small_model(), {"batch": 2}, "small")


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_dimension_without_a_name_gets_one(tmp_path: Path, in_memory: bool) -> None:
    proto = small_model(batch="batch")
    proto.graph.input[0].type.tensor_type.shape.dim[0].ClearField("dim_param")
    path = tmp_path / "unnamed.onnx"
    onnx.save(proto, path)
    model = proto if in_memory else path
    with pytest.raises(UserError, match=r"--dim input\.0=1"):
        parse_graph(model, "cpu")
    assert parse_graph(model, "cpu", {"input.0": 5}).tensors["output"].shape == (5, 4)


def test_sizes_written_into_the_file(tmp_path: Path) -> None:
    proto = small_model(batch="batch")
    helper.set_model_props(proto, {DEFAULT_DIMS_KEY: '{"batch": 2}'})
    path = tmp_path / "stamped.onnx"
    onnx.save(proto, path)
    assert parse_graph(path, "cpu").tensors["output"].shape == (2, 4)
    assert parse_graph(path, "cpu", {"batch": 7}).tensors["output"].shape == (7, 4)


def test_a_model_in_memory_is_the_model_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    onnx.save(small_model(), path)
    memory, disk = parse_graph(small_model(), "cpu"), parse_graph(path, "cpu")
    assert memory.nodes == disk.nodes
    assert memory.tensors == disk.tensors


@pytest.mark.slow
def test_names_are_the_same_each_time(torch_models: dict[str, Path]) -> None:
    """Profiles are matched to records by node name. ORT numbers its layout changes in another order each time."""
    names = {tuple((node.name, node.outputs) for node in parse_graph(torch_models["mobilenet_v3_small"], "cpu").nodes)
             for _ in range(4)}
    assert len(names) == 1


def test_nodes_without_names_get_different_names() -> None:
    proto = small_model()
    for node in proto.graph.node:
        node.ClearField("name")
    graph = parse_graph(proto, "cuda")
    assert all(node.name for node in graph.nodes)
    assert len({node.name for node in graph.nodes}) == len(graph.nodes) == 8


# bad input ---------------------------------------------------------------------------------------------------------------

def with_external_weights(path: Path) -> Path:
    onnx.save_model(small_model(channels=32), path, save_as_external_data=True, location="weights.bin", size_threshold=64)
    return path.parent / "weights.bin"


def not_onnx(path: Path) -> None:
    path.write_text("batch,latency\n1,0.5\n" * 40)


def truncated(path: Path) -> None:
    content = small_model().SerializeToString()
    path.write_bytes(content[:len(content) // 2])


def empty_file(path: Path) -> None:
    path.write_bytes(b"")


def empty_graph(path: Path) -> None:
    graph = helper.make_graph([], "empty", [], [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)


def unsupported_op(path: Path) -> None:
    proto = small_model()
    proto.graph.node[1].op_type = "ReluOfTheFuture"
    onnx.save(proto, path)


def unknown_domain(path: Path) -> None:
    proto = small_model()
    proto.graph.node[1].domain = "org.example"
    proto.opset_import.append(helper.make_opsetid("org.example", 1))
    onnx.save(proto, path)


def external_missing(path: Path) -> None:
    with_external_weights(path).unlink()


def external_short(path: Path) -> None:
    weights = with_external_weights(path)
    weights.write_bytes(weights.read_bytes()[:100])


def not_matching(path: Path) -> None:
    proto = small_model()
    proto.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.zeros((9, 4), np.float32), "w3"))
    onnx.save(proto, path)


BAD: dict[Callable[[Path], None], str] = {
    not_onnx: "not an ONNX model, or cut short",
    truncated: "not an ONNX model, or cut short",
    empty_file: "no ONNX model with nodes in it",
    empty_graph: "no ONNX model with nodes in it (an empty graph)",
    unsupported_op: "an operator that this ONNX Runtime can't run",
    unknown_domain: "an operator that this ONNX Runtime can't run",
    external_missing: "weights.bin, which is missing from",
    external_short: "weights.bin: too short for weight w",
    not_matching: "ShapeInferenceError",
}


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_bad_models_give_one_clear_error(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "bad.onnx"
    make(path)
    with pytest.raises(UserError) as raised:
        parse_graph(path, "cpu")
    assert BAD[make] in str(raised.value)
    assert "bad" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("make", [not_onnx, truncated, empty_graph, unsupported_op, external_missing, external_short],
                         ids=lambda make: make.__name__)
def test_bad_models_on_the_command_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "bad.onnx"
    make(path)
    done = parse(path, "--workspace", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert BAD[make] in done.stderr


def parse(model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_script("ort_analysis/ort_graph_parser.py", "--model", model, "--device", "cpu", *options)


def test_the_command_prints_the_nodes(tmp_path: Path) -> None:
    path = tmp_path / "model_zoo" / "models" / "small.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(small_model(batch="batch"), path)
    done = parse(Path("small.onnx"), "--workspace", str(tmp_path), "--dim", "batch=2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["dims"] == {"batch": 2}
    assert report["nodes"][-1]["outputs"] == "float32[2,4]"
    table = parse(Path("small.onnx"), "--workspace", str(tmp_path), "--dim", "batch=2").stdout.splitlines()
    assert table[0].split("\t")[:4] == ["#", "node", "op_type", "provider"]
    assert len(table) == 1 + len(report["nodes"])
