"""The inputs with which kernels and models are measured: realistic ones by default, or one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import printed
from conftest import small_model
from onnx import TensorProto, helper

from hase.benchmark.ort.runner import open_runner
from hase.kernel_model.building.dummy_data import dummy_inputs, random_floats
from hase.kernel_model.sampling.free_shapes.sizes import inferred, tensor
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import Kernel
from hase.utils.errors import UserError
from hase.utils.ort_sessions import ort_value

COLUMNS = 20
SCALES = 10.0 ** np.linspace(-3, 6, COLUMNS)  # of the columns, as in a table that nobody standardised


def tree_model(path: Path, rows: int, scales: np.ndarray = SCALES, scaler: bool = False, trees: int = 100,
               depth: int = 8) -> Path:
    """A TreeEnsembleRegressor of random full trees, which compare each column with numbers of its scale; behind a Scaler,
    if asked for, with numbers of scale 1."""
    draw, inner, whole = np.random.default_rng(0), 2**depth - 1, 2 ** (depth + 1) - 1
    place = np.tile(np.arange(whole), trees)
    split, tree = place < inner, np.repeat(np.arange(trees), whole)
    columns = np.where(split, draw.integers(0, COLUMNS, len(place)), 0)
    values = np.where(split, draw.standard_normal(len(place)) * (1.0 if scaler else scales[columns]), 0.0)
    nodes: dict[str, Any] = {
        "treeids": tree, "nodeids": place, "featureids": columns, "values": values.astype(np.float32),
        "truenodeids": np.where(split, 2 * place + 1, 0), "falsenodeids": np.where(split, 2 * place + 2, 0)}
    leaves = {"treeids": tree[~split], "nodeids": place[~split], "ids": 0 * place[~split],
              "weights": draw.standard_normal((~split).sum()).astype(np.float32)}
    ensemble = helper.make_node(
        "TreeEnsembleRegressor", ["standard" if scaler else "x"], ["y"], domain="ai.onnx.ml", n_targets=1,
        nodes_modes=np.where(split, "BRANCH_LEQ", "LEAF").tolist(),
        **{f"nodes_{key}": of.tolist() for key, of in nodes.items()},
        **{f"target_{key}": of.tolist() for key, of in leaves.items()})
    first = [helper.make_node("Scaler", ["x"], ["standard"], domain="ai.onnx.ml", offset=(3.0 * scales).tolist(),
                              scale=(1.0 / scales).tolist())] if scaler else []
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, width])]
                       for name, width in (("x", COLUMNS), ("y", 1)))
    graph = helper.make_graph([*first, ensemble], "trees", inputs, outputs)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[
        helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]), path)
    return path


def save(path: Path, arrays: Mapping[str, Any]) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("scaler", [False, True])
def test_rows_for_trees_take_all_branches(tmp_path: Path, scaler: bool) -> None:
    """Also where the columns have scales of their own, which the trees' thresholds or a Scaler tell. Rows that all take one
    branch, such as zeros, need less than half of the time."""
    path = tree_model(tmp_path / "trees.onnx", rows=64, scaler=scaler, depth=5)
    runner = open_runner(path, "cpu")
    assert len(np.unique(np.asarray(runner.session.run(None, dict(runner.feed))[0]))) == 64  # different sums of leaves
    means, spreads = (of(runner.feed["x"].astype(float), axis=0) / SCALES for of in (np.mean, np.std))
    assert np.abs(means - (3.0 if scaler else 0.0)).max() < 0.6
    assert 0.5 < spreads.min() < spreads.max() < 1.5


def test_random_numbers_are_standardised_and_in_no_order() -> None:
    """With alternating signs, each column of a table had one sign, and a PRelu took a seventh of its time."""
    numbers = random_floats((1000, 20), "float32")
    assert (numbers.mean(), numbers.std()) == pytest.approx((0.0, 1.0), abs=0.02)
    assert np.abs(numbers).min() >= 1e-3
    assert np.abs((numbers > 0).mean(axis=0) - 0.5).max() < 0.1
    assert (np.diff(np.sign(numbers.ravel())) != 0).mean() == pytest.approx(0.5, abs=0.02)


def test_places_in_a_table_are_drawn_and_other_whole_numbers_are_zeros(tmp_path: Path) -> None:
    """`both` also is an index of an activation, which may have fewer rows."""
    names = {"words": [64, 8], "kinds": [64, 8], "both": [8], "mask": [64, 8]}
    weights = {"large": np.ones((500, 4), np.float32), "small": np.ones((3, 4), np.float32), "one": np.array([1])}
    nodes = [helper.make_node("Unsqueeze", ["words", "one"], ["w"]), helper.make_node("Gather", ["large", "w"], ["a"]),
             helper.make_node("Gather", ["large", "kinds"], ["b"]), helper.make_node("Gather", ["small", "kinds"], ["c"]),
             helper.make_node("Gather", ["a", "both"], ["d"]), helper.make_node("Gather", ["large", "both"], ["e"]),
             helper.make_node("Cast", ["mask"], ["f"], to=TensorProto.FLOAT),
             helper.make_node("Equal", ["words", "kinds"], ["g"])]
    graph = helper.make_graph(nodes, "places", [helper.make_tensor_value_info(name, TensorProto.INT64, shape)
                                                for name, shape in names.items()],
                              [helper.make_empty_tensor_value_info(name) for name in "bcdefg"],
                              [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "places.onnx")
    runner = open_runner(tmp_path / "places.onnx", "cpu", io="host")
    runner.run_once()
    assert runner.feed["words"].max() > 400
    assert set(runner.feed["kinds"].ravel()) == {0, 1, 2}
    assert (runner.feed["both"].any(), runner.feed["mask"].any()) == (False, False)


def kernel_of(op: str, shape: list[int], tmp_path: Path, dims: dict[str, int] | None = None) -> Kernel:
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], op,
                              [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
                              [helper.make_empty_tensor_value_info("y")])
    path = tmp_path / f"{op}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    [kernel] = analyze(path, "cpu", dims).kernels.values()
    return kernel


def test_operators_get_numbers_that_they_are_for(tmp_path: Path) -> None:
    """Values to be found in no order; and a single number, of which numpy makes a bare one that ONNX Runtime refuses."""
    drawn = dummy_inputs(kernel_of("NonZero", [40, 50], tmp_path, dims={"y.1": 500}))["x0"]
    assert np.count_nonzero(drawn) == 500
    assert len(set(np.diff(np.flatnonzero(drawn)).tolist())) > 3
    assert dummy_inputs(kernel_of("Acosh", [1000], tmp_path))["x0"].min() >= 1.0
    assert np.abs(dummy_inputs(kernel_of("Atanh", [1000], tmp_path))["x0"]).max() < 1.0
    assert ort_value(dummy_inputs(inferred("Acos", [tensor("float32")]))["x0"]).numpy().shape == ()


def test_one_s_own_inputs_are_run(tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "net.onnx")
    [(name, made_up)] = open_runner(tmp_path / "net.onnx", "cpu").feed.items()
    save(tmp_path / "own.npz", {name: np.full(made_up.shape, 0.5)})  # 64 bits are fine
    given = open_runner(tmp_path / "net.onnx", "cpu", inputs=tmp_path / "own.npz").feed[name]
    assert (given.dtype, (given == 0.5).all()) == (made_up.dtype, True)
    shown = printed("benchmark/ort_kernel_runner.py", "--model", tmp_path / "net.onnx", "--inputs", tmp_path / "own.npz",
                    "--loops", "3", "--json", "--device", "cpu")
    assert len(json.loads(shown)["samples_ms"]) == 3


def test_inputs_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "net.onnx")
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 no archive")
    for inputs, message in (
            (save(tmp_path / "other.npz", {"other": np.zeros(3)}), r"other\.npz: the model has no input other; its inputs "),
            (save(tmp_path / "shape.npz", {"input": np.zeros(3)}), r"has shape \[3\], and the model takes \[1, "),
            (save(tmp_path / "text.npz", {"input": np.full((1, 3, 16, 16), "t")}), "is <U1, and the model takes f"),
            (tmp_path / "damaged.npz", "not a file of arrays by name, as numpy.savez writes them")):
        with pytest.raises(UserError, match=message):
            open_runner(tmp_path / "net.onnx", "cpu", inputs=inputs)
