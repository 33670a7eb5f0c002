"""The graph parser: ONNX Runtime's own graph with every shape, and a clear error for a file that is no model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import run_script
from conftest import small_model
from onnx import helper
from small_graphs import constant, model

from hase.ort_analysis.graph.parsing import parse_graph
from hase.utils.errors import UserError
from hase.utils.model_files import DEFAULT_DIMS_KEY, with_contents


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
    with pytest.raises(UserError, match="no dynamic dimension width; all its dimensions are fixed"):
        parse_graph(small_model(), "cpu", {"width": 2})


@pytest.mark.parametrize(("name", "dims"), [("N", {"N": 3}), ("batch_size", {"batch_size": 3}), ("", {"input.0": 3}),
                                            (2, {"rebatch": 3}), (3, {})])
def test_a_batch_has_any_name(tmp_path: Path, name: str | int, dims: dict[str, int]) -> None:
    """The size `batch` is the model's batch, whatever it is called, and a new one where the model's is fixed."""
    onnx.save(small_model(batch=name), tmp_path / "model.onnx")
    graph = parse_graph(tmp_path / "model.onnx", "cpu", {"batch": 3})
    assert (graph.tensors["output"].shape, graph.source.dims) == ((3, 4), dims)


def test_a_length_is_no_batch(tmp_path: Path) -> None:
    onnx.save(small_model(batch="sequence"), tmp_path / "model.onnx")
    with pytest.raises(UserError, match="no dynamic dimension batch; its dynamic dimensions are sequence"):
        parse_graph(tmp_path / "model.onnx", "cpu", {"batch": 3})


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_dimension_without_a_name_gets_one(tmp_path: Path, in_memory: bool) -> None:
    proto = small_model(batch="batch")
    proto.graph.input[0].type.tensor_type.shape.dim[0].ClearField("dim_param")
    path = tmp_path / "unnamed.onnx"
    onnx.save(proto, path)
    source = proto if in_memory else path
    with pytest.raises(UserError, match=r"--dim input\.0=1"):
        parse_graph(source, "cpu")
    assert parse_graph(source, "cpu", {"input.0": 5}).tensors["output"].shape == (5, 4)


def test_sizes_written_into_the_file() -> None:
    proto = small_model(batch="batch")
    helper.set_model_props(proto, {DEFAULT_DIMS_KEY: '{"batch": 2}'})
    assert parse_graph(proto, "cpu").tensors["output"].shape == (2, 4)
    assert parse_graph(proto, "cpu", {"batch": 7}).tensors["output"].shape == (7, 4)


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


def changed(change: Callable[[onnx.ModelProto], object]) -> bytes:
    proto = small_model()
    change(proto)
    return proto.SerializeToString()


def of_another_domain(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].domain = "org.example"
    proto.opset_import.append(helper.make_opsetid("org.example", 1))


WHOLE = small_model().SerializeToString()
BAD: dict[str, tuple[bytes, str]] = {
    "not onnx": (b"batch,latency\n1,0.5\n" * 40, "not an ONNX model, or cut short"),
    "truncated": (WHOLE[:len(WHOLE) // 2], "not an ONNX model, or cut short"),
    "damaged": (with_contents(7, b"\xff" * 3000), "not an ONNX model, or cut short"),
    "empty file": (b"", "no ONNX model with nodes in it"),
    "empty graph": (model([], outputs=[]).SerializeToString(), "no ONNX model with nodes in it (an empty graph)"),
    "unsupported operator": (changed(lambda proto: setattr(proto.graph.node[1], "op_type", "ReluOfTheFuture")),
                             "an operator that this ONNX Runtime can't run"),
    "unknown domain": (changed(of_another_domain), "an operator that this ONNX Runtime can't run"),
    "not matching": (changed(lambda proto: proto.graph.initializer[2].CopyFrom(constant("w3", np.zeros((9, 4), np.float32)))),
                     "ShapeInferenceError"),
    "weights missing": (b"", "weights.bin, which is missing from"),
    "weights short": (bytes(100), "weights.bin: too short for weight w")}


@pytest.mark.parametrize("name", BAD)
def test_bad_models_give_one_clear_error(tmp_path: Path, name: str) -> None:
    path, (content, message) = tmp_path / "bad.onnx", BAD[name]
    path.write_bytes(content)
    if "weights" in name:
        onnx.save_model(small_model(channels=32), path, save_as_external_data=True, location="weights.bin", size_threshold=64)
        path.with_name("weights.bin").write_bytes(content)
        if not content:
            path.with_name("weights.bin").unlink()
    done = parse(path, "--workspace", str(tmp_path))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith("error: ")
    assert "bad" in done.stderr
    assert message in done.stderr


def parse(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_script("ort_analysis/ort_graph_parser.py", "--model", path, "--device", "cpu", *options)


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
