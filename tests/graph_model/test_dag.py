"""The DAG of a record, and times over it; the overlap simulator, on made-up events and on a real profile."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import numpy as np
import onnx
import onnxruntime
import pytest
from command import printed, run_script
from conftest import small_model
from trained_workspace import conv_net

from hase.benchmark.ort.profile import NodeEvent, ProfiledRun, read_profile
from hase.graph_model.simulation import dag as dags
from hase.graph_model.simulation.dag import DagEdge, DagFile, DagNode, build_dag, dag_file, longest_path, read_dag
from hase.ort_analysis.graph.analysis import analyze
from hase.overlap_simulator import critical_path, overlap_of, whole_times_ms, with_names_of
from hase.records.kernel_record_files import record_path
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace


def test_sum_and_longest_path_of_a_diamond() -> None:
    diamond = nx.DiGraph([("start", "left"), ("start", "right"), ("right", "far"), ("left", "end"), ("far", "end")])
    times = {"start": 1.0, "left": 7.0, "right": 2.0, "far": 3.0, "end": 0.5}
    assert dags.calculate_latency(diamond, times) == dags.calculate_latency(diamond, times, "sum") == 13.5
    assert dags.calculate_latency(diamond, times, "critical_path") == 8.5
    assert longest_path(diamond, times) == (8.5, ["start", "left", "end"])
    assert longest_path(diamond, times | {"far": 6.0}) == (9.5, ["start", "right", "far", "end"])
    assert longest_path(nx.DiGraph(), {}) == (0.0, [])
    with pytest.raises(UserError, match="node end: no time"):
        dags.calculate_latency(diamond, {name: 1.0 for name in diamond if name != "end"})
    diamond.add_edge("end", "start")
    with pytest.raises(UserError, match="cycle"):
        longest_path(diamond, times)


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
    assert next(iter(dag.in_edges(add, data=True)))[2]["bytes"] == 1 * 8 * 16 * 16 * 4
    assert dags.calculate_latency(dag, dict.fromkeys(dag, 1.0), "critical_path") == len(dag)  # a chain


def test_the_file_of_a_dag_and_its_record(workspace: Workspace) -> None:
    record = analyze(small_model(), "cpu", name="small")
    path, of_record, whole = workspace.root / "dag.json", record_path(workspace, record.flavour, record.model), dag_file(record)
    document = whole.model_dump(mode="json")
    for changes, message in (({"nodes": document["nodes"][:-1]}, "is no node"), ({"version": 0}, "version 0")):
        files.write_json(path, document | changes)
        with pytest.raises(UserError, match=rf"{message}.*dag_critical_path"):
            read_dag(path)
    files.write_json(path, whole)
    assert read_dag(path) == whole
    assert nx.utils.graphs_equal(dags.dag_of(read_dag(path)), build_dag(record))
    with pytest.raises(UserError, match=r"small\.json, which describes its kernels, is missing.*fusion_detector"):
        dags.record_of_dag(path, workspace)
    files.write_json(of_record, record)
    assert dags.record_of_dag(path, workspace) == of_record
    files.write_json(of_record, record.model_copy(update={"nodes": record.nodes[:-1]}))
    with pytest.raises(UserError, match="has changed since the DAG was made of it"):
        dags.record_of_dag(path, workspace)


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


def event(name: str, start_us: float, duration_us: float, op_type: str = "Conv") -> NodeEvent:
    return NodeEvent(name, op_type, "CPUExecutionProvider", start_us, duration_us)


def run(*nodes: NodeEvent) -> ProfiledRun:
    return ProfiledRun(start_us=0.0, end_us=1000.0, nodes=nodes)


def test_serial_and_concurrent_kernels() -> None:
    """Also a loop and what is inside."""
    overlap = overlap_of([run(event("a", 10, 100.5), event("b", 110, 200.5), event("c", 400, 100.5))])
    assert (overlap.serial, overlap.overlap_ms, overlap.run_ms) == (True, 0.0, 1.0)
    assert (overlap.busy_ms, overlap.gap_ms, overlap.gap_share) == pytest.approx((0.4015, 0.0895, 0.0895))
    looped = overlap_of([run(event("loop", 0, 500, "Loop"), event("inside", 100, 100), event("after", 500, 10))])
    assert (looped.serial, looped.busy_ms) == (True, pytest.approx(0.51))
    overlap = overlap_of([run(event("a", 0, 300), event("b", 100, 100), event("c", 250, 150), event("d", 400, 10))])
    assert (overlap.serial, overlap.overlapping) == (False, ("b", "c"))
    assert (overlap.overlap_ms, overlap.busy_ms) == pytest.approx((0.150, 0.410))  # b whole, c's first 50 µs


def test_critical_path_of_branches() -> None:
    """Loops count all their runs."""
    branches = {"conv1": 1.0, "conv3": 3.0, "conv5": 5.0}
    nodes = tuple(DagNode(name=name, kernel_id=name, type="Conv") for name in (*branches, "join"))
    edges = tuple(DagEdge(producer=name, consumer="join", tensor=name, bytes=4) for name in branches)
    path = critical_path(DagFile(model="m", flavour="f", nodes=nodes, edges=edges), branches | {"join": 0.5})
    assert (path.sum_ms, path.path_ms, path.possible_speedup) == (9.5, 5.5, pytest.approx(9.5 / 5.5))
    assert [node.node for node in path.path] == ["conv5", "join"]
    looped = (DagNode(name="loop", kernel_id="loop", type="Loop"), DagNode(name="in", kernel_id="r", type="Relu", runs=5.0))
    times_ms = whole_times_ms(DagFile(model="m", flavour="f", nodes=looped, edges=()), {"loop": 20.0, "in": 2.0})
    assert times_ms == {"loop": 0.0, "in": 10.0}


@pytest.mark.slow
def test_the_command_profiles_a_model(workspace: Workspace) -> None:
    onnx.save(small_model(batch="batch"), workspace.root / "small.onnx")
    command = ("overlap_simulator.py", "--workspace", workspace.root, "--model", workspace.root / "small.onnx", "--dim",
               "batch=2", "--device", "cpu", "--loops", "3")
    report = json.loads(printed(*command, "--json"))
    assert report["overlap"]["serial"] is True
    assert 0 < report["critical_path"]["path_ms"] <= report["critical_path"]["sum_ms"]
    assert "Kernels ran one after another." in printed(*command)


def test_the_command_reads_a_profile_and_finds_its_record(workspace: Workspace) -> None:
    record = analyze(small_model(), "cpu", name="small")
    events = [{"cat": "Node", "name": f"{node.name}_kernel_time", "ts": 10 + 20 * place, "dur": 19,
               "args": {"op_name": "Conv", "provider": "CPUExecutionProvider"}} for place, node in enumerate(record.nodes)]
    events.append({"cat": "Session", "name": "model_run", "ts": 0, "dur": 1000})
    profile, dag = workspace.root / "profile.json", workspace.root / "dag.json"
    profile.write_text(json.dumps(events))
    command = ("overlap_simulator.py", "--workspace", workspace.root, "--profile", profile, "--json")
    done = run_script(*command)
    assert json.loads(done.stdout)["critical_path"] is None
    assert "no kernel record has" in done.stderr
    path = record_path(workspace, record.flavour, record.model)
    files.write_json(path, record)
    report = json.loads(printed(*command))
    assert report["critical_path"]["sum_ms"] == pytest.approx(len(record.nodes) * 0.0195)
    path.unlink()
    files.write_json(dag, dag_file(record))
    assert json.loads(printed(*command, "--dag", dag)) == report
    files.write_json(dag, dag_file(analyze(conv_net(workspace.models / "net.onnx", channels=8), "cpu")))
    done = run_script(*command, "--dag", dag)
    assert f"{dag}: its nodes are not those of the profile" in done.stderr
    for text, message in (("{", "not valid JSON"), ("{}", "not an ONNX Runtime profile")):
        profile.write_text(text)
        done = run_script(*command)
        assert (done.returncode, message in done.stderr) == (1, True)


def test_a_profile_of_the_users_own_session(workspace: Workspace) -> None:
    """ONNX Runtime calls nodes without names, and some of its own, otherwise than their record does."""
    model = conv_net(workspace.models / "net.onnx", channels=16)
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(workspace.root / "own")
    session = onnxruntime.InferenceSession(str(model), options)
    for _ in range(2):
        session.run(None, {"x": np.zeros((1, 8, 16, 16), np.float32)})
    runs, record = read_profile(Path(session.end_profiling())), analyze(model, "cpu")
    in_order = [node.name for node in record.nodes]
    assert [node.node for node in runs[0].nodes] != in_order
    for run in with_names_of(dag_file(record), runs) or []:
        assert [node.node for node in run.nodes] == in_order
    assert with_names_of(dag_file(analyze(conv_net(workspace.models / "more.onnx", extra="Sigmoid"), "cpu")), runs) is None
    files.write_json(workspace.root / "dag.json", dag_file(record))
    (profile,) = workspace.root.glob("own*.json")
    report = json.loads(printed("overlap_simulator.py", "--workspace", workspace.root, "--profile", profile, "--dag",
                                workspace.root / "dag.json", "--json"))
    assert [node["node"] for node in report["critical_path"]["path"]] == in_order
