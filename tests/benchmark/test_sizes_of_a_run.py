"""Sizes that depend on data, as a run shows them, and analyses with these sizes: the same work as in the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import printed
from onnx import TensorProto, helper, numpy_helper

from hase.benchmark.ort.runner import open_runner
from hase.benchmark.ort.sizes_of_a_run import see_a_run, sizes_of_a_run
from hase.benchmark.sizes_of_a_run import read_inputs
from hase.ort_analysis.graph.analysis import analyze
from hase.recipes.kinds.make_models import make
from hase.utils.errors import UserError
from tests.ort_analysis.test_sizes_by_data import detector

FLOAT = TensorProto.FLOAT


def positives() -> onnx.ModelProto:
    """The positive numbers of x, squared in a branch where a flag is set, and as many zeros as there are of them."""
    node = helper.make_node
    if_true = helper.make_graph([node("NonZero", ["some"], ["where"]), node("Mul", ["where", "where"], ["squares"])], "then",
                                [], [helper.ValueInfoProto(name="squares")])
    if_false = helper.make_graph([node("Constant", [], ["none"], value=numpy_helper.from_array(np.zeros((1, 0), np.int64)))],
                                 "else", [], [helper.ValueInfoProto(name="none")])
    nodes = [node("Greater", ["x", "zero"], ["passed"]), node("Compress", ["x", "passed"], ["some"]),
             node("If", ["flag"], ["y"], name="pick", then_branch=if_true, else_branch=if_false),
             node("Cast", ["passed"], ["ones"], to=TensorProto.INT64), node("ReduceSum", ["ones"], ["count"]),
             node("ConstantOfShape", ["count"], ["z"])]
    graph = helper.make_graph(
        nodes, "positives", [helper.make_tensor_value_info("x", FLOAT, [64]), helper.make_tensor_value_info(
            "flag", TensorProto.BOOL, [])], [helper.ValueInfoProto(name=name) for name in ("y", "z")],
        [numpy_helper.from_array(np.zeros((), np.float32), "zero")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def test_the_sizes_of_a_run_are_those_of_the_analysis(tmp_path: Path) -> None:
    path = tmp_path / "positives.onnx"
    onnx.save(positives(), path)
    values = np.linspace(-1.0, 1.0, 64, dtype=np.float32)[:40]
    inputs = {"x": np.concatenate([values, -np.ones(24, np.float32)]), "flag": np.array(True)}
    passed = int((inputs["x"] > 0).sum())
    sizes = sizes_of_a_run(path, {"then": 1}, inputs)
    assert sizes == {"some.0": passed, "pick/where.1": passed, "z.0": passed}
    real = see_a_run(path, {}, inputs).shapes
    for device in ("cpu", "cuda"):
        record = analyze(path, device, {"then": 1, **sizes})
        assert record.assumed == {}
        assert {name: tensor.shape for name, tensor in record.outputs.items()} == {name: real[name] for name in ("y", "z")}


def test_a_detector_measured_and_predicted_at_the_same_sizes(tmp_path: Path) -> None:
    path = tmp_path / "detector.onnx"
    onnx.save(detector(), path)
    sizes = sizes_of_a_run(path, {})
    runner = open_runner(path, "cpu", dims=sizes, io="host")
    assert analyze(path, "cpu", sizes).outputs["y"].shape == runner.run_once()[0].shape
    np.savez(tmp_path / "inputs.npz", scores=np.zeros((1, 3, 50), np.float32))
    shown = printed("benchmark/sizes_of_a_run.py", "--model", path, "--inputs", tmp_path / "inputs.npz", "--json")
    assert json.loads(shown) == {"selected.0": 0}
    for wrong, message in ((path, r"numpy\.savez"), (tmp_path / "missing.npz", "no such file")):
        with pytest.raises(UserError, match=message):
            read_inputs(wrong)


def test_the_manifest_gives_the_sizes_that_measuring_sees(tmp_path: Path) -> None:
    made = make("rows_by_nonzero", tmp_path)
    assert not isinstance(made, str)
    assert made.dims
    assert analyze(tmp_path / made.file, "cpu", made.dims).assumed == {}


def chooser() -> onnx.ModelProto:
    """As many ones as x has positive numbers where there are more than four of them, else as many zeros as negative ones."""
    node = helper.make_node
    value = {sign: numpy_helper.from_array(np.array([sign], np.float32)) for sign in (0.0, 1.0)}
    if_true = helper.make_graph([node("ConstantOfShape", ["above"], ["ones"], value=value[1.0]),
                                 node("Exp", ["ones"], ["many"])], "then", [], [helper.ValueInfoProto(name="many")])
    if_false = helper.make_graph([node("ConstantOfShape", ["below"], ["few"], value=value[0.0])], "else", [],
                                 [helper.ValueInfoProto(name="few")])
    nodes = [step for name, op in (("above", "Greater"), ("below", "Less")) for step in (
        node(op, ["x", "zero"], [f"{name}_mask"]), node("Cast", [f"{name}_mask"], [f"{name}_ones"], to=TensorProto.INT64),
        node("ReduceSum", [f"{name}_ones"], [name]))]
    nodes += [node("Greater", ["above", "four"], ["flag"]),
              node("If", ["flag"], ["y"], name="pick", then_branch=if_true, else_branch=if_false)]
    constants = [numpy_helper.from_array(np.zeros((), np.float32), "zero"), numpy_helper.from_array(np.array([4]), "four")]
    graph = helper.make_graph(nodes, "chooser", [helper.make_tensor_value_info("x", FLOAT, [64])],
                              [helper.ValueInfoProto(name="y")], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.mark.parametrize(("above", "branch", "sizes"), [(40, "then", {"pick/ones.0": 40}), (3, "else", {"pick/few.0": 61})])
def test_the_branch_that_ran_is_taken_and_the_other_needs_no_sizes(tmp_path: Path, above: int, branch: str,
                                                                  sizes: dict[str, int]) -> None:
    path = tmp_path / "chooser.onnx"
    onnx.save(chooser(), path)
    x = np.where(np.arange(64) < above, 1.0, -1.0).astype(np.float32)
    dims = sizes_of_a_run(path, {}, {"x": x})
    assert dims == {f"pick.{branch}": 1, **sizes}
    for device in ("cpu", "cuda"):
        record = analyze(path, device, dims)
        assert (record.assumed, record.guessed) == ({}, {})
        ran = [record.kernel_of(node).op_type for node in record.nodes if node.inside == "pick"]
        assert ran == (["ConstantOfShape", "Exp"] if branch == "then" else ["ConstantOfShape"])
