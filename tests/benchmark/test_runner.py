"""The runner, ONNX Runtime's profile, and the worker: what a timing holds, and that labels belong to the right kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from command import printed, run_script
from conftest import build_workspace, small_model
from onnx import TensorProto, helper, numpy_helper

from hase.benchmark.ort.profile import kernel_times_ms, node_spans_ms, read_profile
from hase.benchmark.ort.runner import open_runner
from hase.benchmark.ort.worker import WORK, answer
from hase.benchmark.ort_kernel_runner import measure
from hase.benchmark.sizes_of_a_run import read_inputs
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import Effort
from hase.runtimes.protocol import Reply, Request
from hase.utils import files, timing
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.paths import ROOT, Workspace

pytestmark = pytest.mark.measuring

FEW = Effort(warmup=1, budget_s=0.01, least_runs=4, most_runs=6)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Flavour]:
    """A model of a few milliseconds, its record and its kernels."""
    workspace = Workspace(tmp_path_factory.mktemp("runner"))
    return workspace, build_workspace(workspace, {"anet_b1": small_model(channels=64, side=64)})


@pytest.fixture
def model(built: tuple[Workspace, Flavour]) -> Path:
    return built[0].models / "anet_b1.onnx"


@pytest.fixture
def kernels(built: tuple[Workspace, Flavour]) -> list[Path]:
    return sorted((built[0].kernel_onnx / built[1].name).glob("*.onnx"))


# the runner --------------------------------------------------------------------------------------------------------------

def test_a_timing(model: Path) -> None:
    before = datetime.now(UTC)
    measured = measure(model, "cpu", warmup=2, loops=7)
    started, ended = datetime.fromisoformat(measured.started), datetime.fromisoformat(measured.ended)
    assert before < started < ended < datetime.now(UTC)
    assert sum(measured.samples_ms) <= (ended - started).total_seconds() * 1000
    statistics = measured.statistics
    assert len(measured.samples_ms) == statistics.runs == 7
    assert 0 < statistics.min_ms <= statistics.median_ms <= statistics.p95_ms <= statistics.max_ms
    assert statistics.mean_ms == pytest.approx(np.mean(measured.samples_ms))


def test_how_often_a_model_runs(model: Path) -> None:
    """A number of runs or a budget; warm-up runs are run and not counted."""
    runner = open_runner(model, "cpu")
    assert len(runner.time(budget_s=1e-9, least_runs=4).samples_ms) == 4
    runs, run_once = [], runner.run_once
    runner.run_once = lambda: runs.append(run_once())
    assert (len(runner.time(warmup=3, loops=2).samples_ms), len(runs)) == (2, 5)
    effort = Effort(warmup=0, budget_s=0.1, least_runs=3, most_runs=20)
    assert [effort.runs(seconds) for seconds in (0.0, 0.001, 0.01, 0.02, 1.0)] == [20, 20, 10, 5, 3]


def test_a_dynamic_model_needs_its_sizes(tmp_path: Path) -> None:
    path = tmp_path / "dynamic.onnx"
    onnx.save(small_model(batch="batch"), path)
    with pytest.raises(UserError, match="dimension batch"):
        measure(path, "cpu", loops=1)
    assert open_runner(path, "cpu", dims={"batch": 3}, io="host").run_once()[0].shape == (3, 4)


@pytest.mark.parametrize("io", ["device", "host"])
def test_a_model_that_fails_while_running_is_a_user_error(tmp_path: Path, io: Any) -> None:
    """Its weights do not fit its input, which ORT notices in the first run."""
    proto, path = small_model(), tmp_path / "wrong.onnx"
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((8, 5, 3, 3), np.float32), "w1"))
    onnx.save(proto, path)
    with pytest.raises(UserError, match="wrong"):
        measure(path, "cpu", loops=1, io=io)


def run(workspace: Workspace, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("benchmark/ort_kernel_runner.py", "--workspace", workspace.root, "--device", "cpu", "--model",
                      "anet_b1.onnx", *options)


def test_the_command(built: tuple[Workspace, Flavour], tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    row = json.loads(run(built[0], "--loops", "5", "--json", "--raw", raw).stdout)
    written = json.loads(raw.read_text())
    assert {name: written[name] for name in ("samples_ms", "started", "ended")}.items() <= row.items()
    assert len(written["samples_ms"]) == row["runs"] == 5
    _, values = run(built[0], "--no-warmup", "--budget-s", "0.01", "--io", "host").stdout.splitlines()
    assert values.split("\t")[:3] == ["anet_b1", "cpu", "host"]


def test_an_unstable_timing_is_reported(built: tuple[Workspace, Flavour], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "UNSTABLE_SPREAD", -1.0)
    error = run(built[0], "--loops", "3").stderr
    assert "unstable" in error
    assert "close other work on this device, or run longer" in error


# the profile -------------------------------------------------------------------------------------------------------------

def test_a_real_profile(model: Path, tmp_path: Path) -> None:
    runner = open_runner(model, "cpu", profile_prefix=tmp_path / "profile")
    for _ in range(5):
        runner.run_once()
    runs = read_profile(Path(runner.session.end_profiling()))
    names = [node.node for node in runs[0].nodes]
    assert (len(runs), len(set(names))) == (5, len(names))
    times, spans = kernel_times_ms(runs), node_spans_ms(runs)
    assert set(times) == set(spans) == set(names)
    covered = []
    for number, run in enumerate(runs):
        assert [node.node for node in run.nodes] == names
        assert all(run.start_us <= node.start_us < node.end_us <= run.end_us + 1 for node in run.nodes)
        whole_ms = (run.end_us - run.start_us) / 1000
        covered.append(sum(values[number] for values in spans.values()) / whole_ms)
        assert sum(values[number] for values in times.values()) <= whole_ms * 1.02
        assert all(times[name][number] <= spans[name][number] + 0.002 for name in names[:-1])  # whole microseconds
    assert 0.8 < np.median(covered) < 1.01


# the worker --------------------------------------------------------------------------------------------------------------

def test_a_model_and_its_kernels_in_it(built: tuple[Workspace, Flavour], model: Path) -> None:
    workspace, flavour = built
    record_file = record_path(workspace, flavour, "anet_b1")
    record = read_model_record(record_file)
    request = Request(do="model", device="cpu", effort=FEW, paths=(str(model),), record=str(record_file),
                      labels=("kernel_time", "node_span"))
    replies = [answer(request) for _ in range(3)]  # other work may disturb all runs of one reply
    assert {(m.label, m.id, m.context, m.place) for m in replies[0].measurements} == {
        ("latency", "anet_b1", "anet_b1", "alone"),
        *((label, name, "anet_b1", "in_model") for label in request.labels for name in record.kernels)}
    uses = {name: sum(node.kernel_id == name for node in record.nodes) for name in record.kernels}
    assert len({len(m.samples_ms) / uses[m.id] for m in replies[0].measurements
                if m.label == "kernel_time"}) == 1  # a sample a run, for each node that is this kernel
    least: dict[tuple[str, str], float] = {}
    for m in (m for reply in replies for m in reply.measurements):
        least[m.label, m.id] = min(*m.samples_ms, least.get((m.label, m.id), np.inf))
    assert max(record.kernels, key=lambda name: least["kernel_time", name]) == max(
        (name for name, kernel in record.kernels.items() if kernel.op_type == "Conv"),
        key=lambda name: record.kernels[name].flops)
    assert 0.25 < sum(least["node_span", node.kernel_id] for node in record.nodes) / least["latency", "anet_b1"] < 4
    assert {m.label for m in answer(request.model_copy(update={"labels": ()})).measurements} == {"latency"}


@pytest.mark.slow
def test_every_kind_of_work_gives_a_whole_reply(built: tuple[Workspace, Flavour], model: Path, kernels: list[Path]) -> None:
    """A kernel alone, a carrier, a session, traced runs and the canary. What only a GPU can do is tested on a GPU."""
    assert set(WORK) == set(get_args(Request.model_fields["do"].annotation))

    def ask(do: str, *paths: Path, labels: tuple[str, ...] = ()) -> set[tuple[str, str, str, str, str]]:
        reply = answer(Request.model_validate({
            "do": do, "device": "cpu", "effort": FEW, "paths": tuple(map(str, paths)), "labels": labels}))
        assert Reply.model_validate_json(reply.model_dump_json()) == reply
        assert (reply.error, bool(reply.runs)) == ("", do == "model_trace")
        assert all(m.status == "ok" and (min(m.samples_ms) > 0) is (m.label != "gpu") for m in reply.measurements)
        assert all(4 <= len(m.samples_ms) <= 6 for m in reply.measurements if do in ("alone", "carrier", "canary"))
        assert {(m.started, m.ended) for m in reply.measurements} <= {(reply.started, reply.ended)}
        assert datetime.fromisoformat(reply.started) < datetime.fromisoformat(reply.ended)
        return {(m.subject, m.id, m.label, m.context, m.place) for m in reply.measurements}

    first = kernels[0]
    assert ask("alone", first) == {("kernel", first.stem, "run", "alone", "alone")}
    assert ask("carrier", *kernels, labels=("kernel_time", "node_span")) == {
        ("kernel", path.stem, label, "carrier", "carrier") for path in kernels for label in ("kernel_time", "node_span")}
    assert ask("session", model) == {("model", "anet_b1", "latency", "anet_b1", "alone")}
    assert ask("model_gpu", model) == {("model", "anet_b1", "gpu", "anet_b1", "alone")}
    assert ask("model_trace", model) == set()
    assert ask("canary") == {("canary", "canary", "run", "alone", "alone")}


def test_a_model_that_differs_from_its_record(built: tuple[Workspace, Flavour], model: Path, tmp_path: Path) -> None:
    workspace, flavour = built
    record = read_model_record(record_path(workspace, flavour, "anet_b1"))
    shorter = tmp_path / "record.json"
    files.write_json(shorter, record.model_copy(update={"nodes": record.nodes[1:]}))
    reply = answer(Request(do="model", device="cpu", effort=FEW, paths=(str(model),), record=str(shorter),
                           labels=("kernel_time",)))
    assert "ORT's graph is not the one in its record; make the record again" in reply.error


# the thread that is timed keeps off the cores that other threads are pinned to -------------------------------------------

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
BESIDE_A_WORKER = """
import os, threading
from hase.benchmark.measuring.quiet_host import free_cores, off_the_workers_cores

cores = os.sched_getaffinity(0)
ready, done = threading.Event(), threading.Event()

def pinned():  # as ONNX Runtime pins its workers
    os.sched_setaffinity(0, {max(cores)})
    ready.set()
    done.wait(30)

threading.Thread(target=pinned).start()
ready.wait(10)
try:
    assert free_cores() == cores - {max(cores)}
    with off_the_workers_cores("cuda"):
        assert os.sched_getaffinity(0) == cores  # the only free core would be the same for processes on several GPUs
    with off_the_workers_cores("cpu"):
        assert os.sched_getaffinity(0) == free_cores() == cores - {max(cores)}
    try:
        with off_the_workers_cores("cpu"):
            raise KeyError
    except KeyError:
        print(os.sched_getaffinity(0) == cores)
finally:
    done.set()
"""


@pytest.mark.slow
@two_cores
def test_off_the_core_of_a_pinned_thread_and_back_again_also_after_an_error() -> None:
    """In a process of its own: this one may hold sessions whose workers are pinned, too."""
    done = subprocess.run([sys.executable, "-c", BESIDE_A_WORKER], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


PINNED = """
import os, sys
from pathlib import Path
from hase.runtimes import local_target
from hase.utils.ort_sessions import open_session
session = open_session(Path(sys.argv[1]), "cpu")
print(local_target("cpu").threads, {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")})
"""


@pytest.mark.slow
@two_cores
def test_a_process_that_may_use_one_core_measures_with_one_thread_there(tmp_path: Path) -> None:
    """ONNX Runtime, left to itself, would start a thread on another core."""
    (tmp_path / "net.onnx").write_bytes(small_model().SerializeToString())
    core = min(CORES)
    done = subprocess.run([sys.executable, "-c", PINNED, tmp_path / "net.onnx"], cwd=ROOT, capture_output=True, text=True,
                          preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    assert done.stdout == f"1 {{frozenset({{{core}}})}}\n", done.stderr


# sizes that depend on data: those of a run, and the same in an analysis --------------------------------------------------

def chooser() -> onnx.ModelProto:
    """As many numbers as x has positive ones: zeros, or from four on their exponentials."""
    node = helper.make_node
    if_true = helper.make_graph([node("ConstantOfShape", ["above"], ["zeros"]), node("Exp", ["zeros"], ["many"])], "then", [],
                                [helper.ValueInfoProto(name="many")])
    if_false = helper.make_graph([node("ConstantOfShape", ["above"], ["few"])], "else", [], [helper.ValueInfoProto(name="few")])
    nodes = [node("Greater", ["x", "zero"], ["mask"]), node("Cast", ["mask"], ["ones"], to=TensorProto.INT64),
             node("ReduceSum", ["ones"], ["above"]), node("Greater", ["above", "three"], ["flag"]),
             node("If", ["flag"], ["y"], name="pick", then_branch=if_true, else_branch=if_false)]
    constants = [numpy_helper.from_array(np.zeros((), np.float32), "zero"), numpy_helper.from_array(np.array([3]), "three")]
    graph = helper.make_graph(nodes, "chooser", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64])],
                              [helper.ValueInfoProto(name="y")], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.mark.slow
@pytest.mark.parametrize(("above", "branch", "sizes"), [(40, "then", {"pick/zeros.0": 40}), (3, "else", {"pick/few.0": 3})])
def test_the_branch_that_ran_is_taken_and_the_other_needs_no_sizes(tmp_path: Path, above: int, branch: str,
                                                                  sizes: dict[str, int]) -> None:
    path = tmp_path / "chooser.onnx"
    onnx.save(chooser(), path)
    x = np.where(np.arange(64) < above, 1.0, -1.0).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x)
    dims = json.loads(printed("benchmark/sizes_of_a_run.py", "--model", path, "--inputs", tmp_path / "inputs.npz", "--json"))
    (real,) = sizes.values()
    assert dims == {f"pick.{branch}": 1, **sizes}
    with pytest.raises(UserError, match=r"numpy\.savez"):
        read_inputs(path)
    for device in ("cpu", "cuda"):
        record = analyze(path, device, dims)
        assert (record.assumed, record.guessed, record.outputs["y"].shape) == ({}, {}, (real,))
        ran = [record.kernel_of(node).op_type for node in record.nodes if node.inside == "pick"]
        assert ran == (["ConstantOfShape", "Exp"] if branch == "then" else ["ConstantOfShape"])
