"""The overlap simulator, on made-up events and on a real profile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from command import printed, run_script
from conftest import small_model
from onnx import TensorProto, helper, numpy_helper
from trained_workspace import conv_net

from hase.benchmark.ort.profile import NodeEvent, ProfiledRun, profile_model, read_profile
from hase.graph_model.simulation.dag import DagEdge, DagFile, DagNode, dag_file
from hase.ort_analysis.graph.analysis import analyze, record_of
from hase.overlap_simulator import critical_path, node_times_ms, overlap_of, whole_times_ms, with_names_of
from hase.records.kernel_record_files import record_path
from hase.records.measurement import Effort
from hase.utils import files
from hase.utils.paths import Workspace


def event(name: str, start_us: float, duration_us: float, op_type: str = "Conv") -> NodeEvent:
    return NodeEvent(node=name, op_type=op_type, provider="CPUExecutionProvider", start_us=start_us, duration_us=duration_us)


def run(*nodes: NodeEvent, end_us: float = 1000.0) -> ProfiledRun:
    return ProfiledRun(start_us=0.0, end_us=end_us, nodes=nodes)


def test_serial_kernels() -> None:
    """Also a loop and what is inside."""
    overlap = overlap_of([run(event("a", 10, 100.5), event("b", 110, 200.5), event("c", 400, 100.5))])
    assert (overlap.serial, overlap.overlap_ms, overlap.run_ms) == (True, 0.0, 1.0)
    assert (overlap.busy_ms, overlap.gap_ms, overlap.gap_share) == pytest.approx((0.4015, 0.0895, 0.0895))
    means = overlap_of([run(event("a", 0, 100)), run(event("a", 0, 300), end_us=2000)])
    assert (means.busy_ms, means.run_ms, means.runs, means.kernels) == (pytest.approx(0.2), pytest.approx(1.5), 2, 1)
    looped = overlap_of([run(event("loop", 0, 500, "Loop"), event("inside", 100, 100), event("after", 500, 10))])
    assert (looped.serial, looped.busy_ms) == (True, pytest.approx(0.51))


def test_concurrent_kernels() -> None:
    overlap = overlap_of([run(event("a", 0, 300), event("b", 100, 100), event("c", 250, 150), event("d", 400, 10))])
    assert (overlap.serial, overlap.overlapping) == (False, ("b", "c"))
    # b whole, c's first 50 µs
    assert (overlap.overlap_ms, overlap.busy_ms, overlap.overlap_share) == pytest.approx((0.150, 0.410, 0.15))


def branches() -> onnx.ModelProto:
    """One input, three Convs that do not wait for each other, one Concat."""
    weights = [numpy_helper.from_array(np.ones((8, 3, side, side), np.float32), f"w{side}") for side in (1, 3, 5)]
    nodes = [helper.make_node("Conv", ["x", f"w{side}"], [f"c{side}"], pads=[side // 2] * 4, name=f"conv{side}")
             for side in (1, 3, 5)]
    nodes.append(helper.make_node("Concat", ["c1", "c3", "c5"], ["y"], axis=1, name="join"))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, 32, 32])
              for name, channels in (("x", 3), ("y", 24))]
    graph = helper.make_graph(nodes, "branches", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def test_critical_path_of_branches() -> None:
    record = analyze(branches(), "cuda", name="branches")
    times = {node.name: {"conv1": 1.0, "conv3": 3.0, "conv5": 5.0}.get(node.name, 0.5) for node in record.nodes}
    path = critical_path(dag_file(record), times)
    assert (path.sum_ms, path.path_ms, path.possible_speedup) == (9.5, 5.5, pytest.approx(9.5 / 5.5))
    assert [node.node for node in path.path] == ["conv5", "join"]
    assert path.path[0].share == pytest.approx(5 / 5.5)


def test_a_real_run_is_serial(tmp_path: Path) -> None:
    onnx.save(branches(), tmp_path / "branches.onnx")
    runs, graph, _ = profile_model(tmp_path / "branches.onnx", "cpu", {}, Effort(least_runs=4, most_runs=4))
    assert len(runs) == 4
    assert set(node_times_ms(runs)) == {node.name for node in record_of(graph).nodes}
    assert overlap_of(runs).serial
    assert 0 < overlap_of(runs).busy_ms <= overlap_of(runs).run_ms


@pytest.mark.slow
def test_the_command_profiles_a_model(workspace: Workspace) -> None:
    onnx.save(small_model(batch="batch"), workspace.root / "small.onnx")
    command = ("overlap_simulator.py", "--workspace", workspace.root, "--model", workspace.root / "small.onnx", "--dim",
               "batch=2", "--device", "cpu", "--loops", "3")
    report = json.loads(printed(*command, "--json"))
    assert report["overlap"]["serial"] is True
    assert report["critical_path"]["path_ms"] <= report["critical_path"]["sum_ms"]
    shown = printed(*command)
    assert "Kernels ran one after another." in shown
    assert "Critical path:" in shown


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
    files.write_json(dag, dag_file(analyze(branches(), "cpu", name="branches")))
    done = run_script(*command, "--dag", dag)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{dag}: its nodes are not those of the profile" in done.stderr
    for text, message in (("{", "not valid JSON"), ("{}", "not an ONNX Runtime profile"), ("[]", "without node events")):
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
    assert with_names_of(dag_file(analyze(branches(), "cpu", name="branches")), runs) is None
    files.write_json(workspace.root / "dag.json", dag_file(record))
    (profile,) = workspace.root.glob("own*.json")
    report = json.loads(printed("overlap_simulator.py", "--workspace", workspace.root, "--profile", profile, "--dag",
                                workspace.root / "dag.json", "--json"))
    assert [node["node"] for node in report["critical_path"]["path"]] == in_order


def test_two_numberings_are_not_mixed_up() -> None:
    nodes = tuple(DagNode(name=name, kernel_id=name, type="Gemm") for name in ("Gemm_3", "Gemm_5"))
    graph = DagFile(model="m", flavour="f", nodes=nodes, edges=(
        DagEdge(producer="Gemm_3", consumer="Gemm_5", tensor="t", bytes=4),))
    (named,) = with_names_of(graph, [run(event("Gemm_5", 0, 10, "Gemm"), event("Gemm_7", 20, 30, "Gemm"))]) or []
    assert [(node.node, node.duration_us) for node in named.nodes] == [("Gemm_3", 10), ("Gemm_5", 30)]


def test_loops_count_all_their_runs() -> None:
    nodes = (DagNode(name="loop", kernel_id="loop", type="Loop"), DagNode(name="in", kernel_id="relu", type="Relu", runs=5.0))
    graph = DagFile(model="m", flavour="f", nodes=nodes, edges=())
    assert whole_times_ms(graph, {"loop": 20.0, "in": 2.0}) == {"loop": 0.0, "in": 10.0}
