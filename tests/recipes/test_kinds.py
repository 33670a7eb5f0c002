"""Recipes that make models of every kind and compare their CUDA graphs: the commands, on a few tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from command import run_script

from hase.inference.evaluation.models import ListedModel, read_manifest
from hase.recipes.kinds import make_models
from hase.recipes.kinds.compare_on_gpu import (
    NodeList,
    NodeRow,
    compare,
    derived_nodes,
    difference_rows,
    every_node,
    named,
)
from hase.utils.ort_sessions import open_session

MAKE = "recipes/kinds/make_models.py"
TINY = ("tiny_add", "loop_constant_trips", "sklearn_linear")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TINY, as the script makes them."""
    folder = tmp_path_factory.mktemp("kinds")
    done = run_script(MAKE, "--out", folder, "--only", *TINY)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_models_are_made_listed_and_kept(made: Path) -> None:
    models = {model.name: model for model in read_manifest(made).models}
    assert set(models) == set(TINY)
    assert models["tiny_add"] == ListedModel(name="tiny_add", file="tiny_add.onnx", kind="tiny", opset=18, tiny=True)
    assert models["sklearn_linear"].dims == {"rows": 256}
    for model in models.values():
        session = open_session(made / model.file, "cpu", dims=model.dims)
        session.run(None, {value.name: np.ones(value.shape, np.float32) for value in session.get_inputs()})
    before = (made / "tiny_add.onnx").stat().st_mtime_ns
    (made / "sklearn_linear.onnx").unlink()
    assert run_script(MAKE, "--out", made, "--only", *TINY).returncode == 0
    assert (made / "tiny_add.onnx").stat().st_mtime_ns == before
    assert (made / "sklearn_linear.onnx").exists()


def test_a_model_that_cannot_be_made_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("no such\noperator")

    done = run_script(MAKE, "--out", tmp_path, "--only", "no_such_model")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no_such_model: no such model; there are classify_resnet18" in done.stderr
    monkeypatch.setattr(make_models, "RECIPES", (make_models.Recipe("bad", "tiny", fail),))
    assert make_models.make("bad", tmp_path) == "ValueError: no such operator"
    assert not list(tmp_path.iterdir())


def rows(*lines: str) -> tuple[NodeRow, ...]:
    """`Conv cuda a` as a node that makes tensor a."""
    return tuple(NodeRow(name=f"{number}", op_type=line.split()[0], provider=line.split()[1], outputs=(line.split()[2],),
                         types=("float32[1,2]",)) for number, line in enumerate(lines))


def test_graphs_are_compared_node_by_node() -> None:
    real = NodeList(model="m", way="static", opsets={"": 17}, kernels={"k1": 2, "k2": 1}, nodes=rows(
        "MemcpyFromHost cuda x1", "Conv cuda a", "Shape cpu s", "MatMul cuda t7", "Gemm cuda g", "TopK cuda v"))
    derived = NodeList(model="m", way="static", opsets={"": 17}, kernels={"k1": 1, "k2": 1}, nodes=rows(
        "Conv cuda a", "Shape cuda s", "MatMul cuda other_name", "FusedGemm cuda g", "Relu cuda r"))
    comparison = compare(real, derived)
    assert (comparison.nodes, comparison.same, comparison.agrees) == (5, 2, False)
    assert (comparison.copies, comparison.derived_copies) == ((0, 1), (0, 0))
    assert (comparison.kernels, comparison.same_kernels) == (3, 2)
    assert {(row.what, row.tensor, row.derived, row.real) for row in comparison.differences} == {
        ("provider", "s", "cuda", "cpu"), ("operator", "g", "FusedGemm cuda", "Gemm cuda"), ("only real", "v", "", "cuda"),
        ("only derived", "r", "cuda", "")}
    assert {"difference": "provider", "operator": "Shape", "opset": 17, "types": "float32", "derived": "cuda", "real": "cpu",
            "nodes": 1, "models": "m"} in difference_rows([comparison])


@pytest.mark.slow
def test_a_derived_graph_agrees_with_itself_and_bodies_have_names(made: Path, tmp_path: Path) -> None:
    models = {model.name: model for model in read_manifest(made).models}
    derived = derived_nodes(models["tiny_add"], made / "tiny_add.onnx", "static")
    assert [(node.op_type, node.provider, node.types[0]) for node in derived.nodes] == [
        ("Add", "cuda", "float32[1,8]"), ("Relu", "cuda", "float32[1,8]")]
    assert compare(derived, derived).agrees
    model_bytes = named(made / "loop_constant_trips.onnx")
    assert isinstance(model_bytes, bytes)
    inner = [(node.name, inside) for node, inside in every_node(onnx.load_from_string(model_bytes).graph) if inside]
    assert inner[0] == ("Loop_last/body/0_MatMul", "Loop_last")
    assert len({name for name, _ in inner}) == len(inner) == 5
    loop = derived_nodes(models["loop_constant_trips"], made / "loop_constant_trips.onnx", "static")
    assert {("Loop", ""), ("Gemm", "Loop_last"), ("Tanh", "Loop_last")} <= {(node.op_type, node.inside) for node in loop.nodes}
    done = run_script("recipes/kinds/compare_on_gpu.py", made, "--out", tmp_path, "--only", "tiny_add", "--derive-only")
    assert done.returncode == 1
    assert "real_nodes.json.gz: no such file" in done.stderr
