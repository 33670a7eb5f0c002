"""The DAG of a record, and times over it."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import onnx
import pytest
from command import printed, run_script
from conftest import small_model

from hase.graph_model.simulation.dag import (
    build_dag,
    calculate_latency,
    dag_file,
    dag_of,
    longest_path,
    read_dag,
    record_of_dag,
)
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record_files import record_path
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace


@pytest.fixture
def diamond() -> nx.DiGraph:
    return nx.DiGraph([("start", "left"), ("start", "right"), ("right", "far"), ("left", "end"), ("far", "end")])


TIMES = {"start": 1.0, "left": 7.0, "right": 2.0, "far": 3.0, "end": 0.5}


def test_sum_and_longest_path_of_a_diamond(diamond: nx.DiGraph) -> None:
    assert calculate_latency(diamond, TIMES) == calculate_latency(diamond, TIMES, "sum") == 13.5
    assert calculate_latency(diamond, TIMES, "critical_path") == 8.5
    assert longest_path(diamond, TIMES) == (8.5, ["start", "left", "end"])
    assert longest_path(diamond, TIMES | {"far": 6.0}) == (9.5, ["start", "right", "far", "end"])


def test_separate_parts_and_nothing(diamond: nx.DiGraph) -> None:
    apart = nx.DiGraph([("a", "b")])
    apart.add_node("c")
    assert longest_path(apart, {"a": 1.0, "b": 1.0, "c": 5.0}) == (5.0, ["c"])
    assert longest_path(nx.DiGraph(), {}) == (0.0, [])
    assert calculate_latency(nx.DiGraph(), {}) == 0.0
    with pytest.raises(UserError, match="node end: no time"):
        calculate_latency(diamond, {name: 1.0 for name in diamond if name != "end"})
    diamond.add_edge("end", "start")
    with pytest.raises(UserError, match="cycle"):
        longest_path(diamond, TIMES)


def test_each_node_is_visited_once_however_many_paths_there_are() -> None:
    """2^2000 paths: it would not end."""
    ladder = nx.DiGraph([((layer, side), (layer + 1, next_side)) for layer in range(2000) for side in (0, 1)
                         for next_side in (0, 1)])
    assert longest_path(ladder, dict.fromkeys(ladder, 1.0))[0] == 2001


def test_dag_of_a_real_graph() -> None:
    record = analyze(small_model(), "cuda", name="small")  # Conv, Relu and Add apart, as the CUDA provider runs them
    dag = build_dag(record)
    assert list(dag) == [node.name for node in record.nodes]
    types = {name: dag.nodes[name]["type"] for name in dag}
    add = next(name for name, kind in types.items() if kind == "Add")
    assert sorted(types[name] for name in dag.predecessors(add)) == ["Conv", "Relu"]
    assert {dag.nodes[node.name]["kernel_id"] for node in record.nodes} == set(record.kernels)
    assert next(iter(dag.in_edges(add, data=True)))[2]["bytes"] == 1 * 8 * 16 * 16 * 4
    assert calculate_latency(dag, dict.fromkeys(dag, 1.0), "critical_path") == len(dag)  # the second Conv lies between: a chain


def test_files_hold_the_whole_dag(tmp_path: Path) -> None:
    record = analyze(small_model(), "cpu", name="small")
    path, whole = tmp_path / "small.json", dag_file(record)
    files.write_json(path, whole)
    assert read_dag(path) == whole
    assert nx.utils.graphs_equal(dag_of(read_dag(path)), build_dag(record))
    files.write_json(path, whole.model_copy(update={"nodes": whole.nodes[:-1]}))
    with pytest.raises(UserError, match=rf"damaged.*{whole.nodes[-1].name}.*is no node.*dag_critical_path"):
        read_dag(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))
    with pytest.raises(UserError, match=r"version 0.*dag_critical_path"):
        read_dag(path)


def test_the_record_of_a_dag(workspace: Workspace) -> None:
    record = analyze(small_model(), "cpu", name="small")
    path, of_record = workspace.root / "dag.json", record_path(workspace, record.flavour, record.model)
    files.write_json(path, dag_file(record))
    with pytest.raises(UserError, match=r"small\.json, which describes its kernels, is missing.*fusion_detector"):
        record_of_dag(path, workspace)
    files.write_json(of_record, record)
    assert record_of_dag(path, workspace) == of_record
    files.write_json(of_record, record.model_copy(update={"nodes": record.nodes[:-1]}))
    with pytest.raises(UserError, match="has changed since the DAG was made of it"):
        record_of_dag(path, workspace)


def test_the_command_writes_one_dag_per_record(workspace: Workspace) -> None:
    done = run_script("graph_model/dag_critical_path.py", "--workspace", workspace.root)
    assert (done.returncode, "fusion_detector" in done.stderr) == (1, True)
    onnx.save(small_model(), workspace.root / "small.onnx")
    for provider in ("cpu", "cuda"):
        record = analyze(workspace.root / "small.onnx", provider)
        files.write_json(record_path(workspace, record.flavour, record.model), record)
    rows = json.loads(printed("graph_model/dag_critical_path.py", "--workspace", workspace.root, "--json"))
    assert len(rows) == 2
    for row in rows:
        assert row["nodes"] == len(read_dag(Path(row["file"])).nodes)
        assert Path(row["file"]).parent == workspace.model_dag(row["flavour"])
