"""The runner, ONNX Runtime's profile, and the worker: what a timing holds, and that labels belong to the right kernel."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
from command import run_script
from conftest import build_workspace, small_model
from onnx import numpy_helper

from hase.benchmark.ort.profile import kernel_times_ms, node_spans_ms, read_profile
from hase.benchmark.ort.runner import open_runner
from hase.benchmark.ort.worker import WORK, answer
from hase.benchmark.ort_kernel_runner import measure
from hase.ort_analysis.graph.source import built_kernel
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import Effort
from hase.runtimes.protocol import Reply, Request
from hase.utils import files, timing
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.paths import Workspace

pytestmark = pytest.mark.measuring

STATISTICS = ["runs", "mean_ms", "median_ms", "p95_ms", "std_ms", "min_ms", "max_ms"]
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
    assert started.utcoffset() is not None
    assert len(measured.samples_ms) == measured.statistics.runs == 7
    assert sum(measured.samples_ms) <= (ended - started).total_seconds() * 1000
    statistics = measured.statistics
    assert 0 < statistics.min_ms <= statistics.median_ms <= statistics.p95_ms <= statistics.max_ms
    assert statistics.min_ms <= statistics.mean_ms <= statistics.max_ms
    assert statistics.mean_ms == pytest.approx(np.mean(measured.samples_ms))
    assert (measured.model, measured.device, measured.io, measured.warmup) == ("anet_b1", "cpu", "device", 2)


def test_how_often_a_model_runs(model: Path) -> None:
    """A number of runs or a budget; warm-up runs are run and not counted."""
    runner = open_runner(model, "cpu")
    assert sum(runner.time(warmup=0, budget_s=0.05).samples_ms) > 30
    assert len(runner.time(budget_s=1e-9, least_runs=4).samples_ms) == 4
    runs, run_once = [], runner.run_once
    runner.run_once = lambda: runs.append(run_once())
    assert len(runner.time(warmup=3, loops=2).samples_ms) == 2
    assert len(runs) == 5
    effort = Effort(warmup=0, budget_s=0.1, least_runs=3, most_runs=20)
    assert [effort.runs(seconds) for seconds in (0.0, 0.001, 0.01, 0.02, 1.0)] == [20, 20, 10, 5, 3]


def test_host_and_device(model: Path) -> None:
    """Both run the same session; with `host`, numpy arrays go in and come out."""
    host, device = open_runner(model, "cpu", io="host"), open_runner(model, "cpu", io="device")
    outputs = host.run_once()
    assert [output.shape for output in outputs] == [(1, 4)]
    assert device.run_once() is None
    assert host.time(loops=1).io == "host"


def test_a_kernel_runs_as_it_is(kernels: list[Path]) -> None:
    """Optimising it again could change it. Its inputs are those of its description."""
    for path in kernels:
        runner = open_runner(path, "cpu")
        assert {value.name for value in runner.session.get_inputs()} == {
            f"x{i}" for i, tensor in enumerate(built_kernel(path).inputs) if tensor.present and not tensor.constant}
        assert len(runner.time(warmup=1, loops=2).samples_ms) == 2


def test_a_dynamic_model_needs_its_sizes(tmp_path: Path) -> None:
    path = tmp_path / "dynamic.onnx"
    onnx.save(small_model(batch="batch"), path)
    with pytest.raises(UserError, match="dimension batch"):
        measure(path, "cpu", loops=1)
    assert open_runner(path, "cpu", dims={"batch": 3}, io="host").run_once()[0].shape == (3, 4)


def test_a_model_that_fails_while_running_is_a_user_error(tmp_path: Path) -> None:
    """Its weights do not fit its input, which ORT notices in the first run."""
    proto = small_model()
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((8, 5, 3, 3), np.float32), "w1"))
    path = tmp_path / "wrong.onnx"
    onnx.save(proto, path)
    for io in ("device", "host"):
        with pytest.raises(UserError, match="wrong"):
            measure(path, "cpu", loops=1, io=io)


def run(workspace: Workspace, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("benchmark/ort_kernel_runner.py", "--workspace", workspace.root, "--device", "cpu", "--model",
                      "anet_b1.onnx", *options)


def test_the_command(built: tuple[Workspace, Flavour], tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    row = json.loads(run(built[0], "--loops", "5", "--json", "--raw", raw).stdout)
    assert list(row) == ["model", "device", "io", *STATISTICS, "started", "ended", "samples_ms"]
    written = json.loads(raw.read_text())
    assert {name: written[name] for name in ("samples_ms", "started", "ended")}.items() <= row.items()
    assert len(written["samples_ms"]) == row["runs"] == 5
    header, values = run(built[0], "--no-warmup", "--budget-s", "0.01", "--io", "host").stdout.splitlines()
    assert header.split("\t") == ["model", "device", "io", *STATISTICS, "started", "ended"]
    assert values.split("\t")[:3] == ["anet_b1", "cpu", "host"]


@pytest.mark.parametrize(("threshold", "warns"), [(-1.0, True), (1e9, False)])
def test_an_unstable_timing_is_reported(built: tuple[Workspace, Flavour], monkeypatch: pytest.MonkeyPatch, threshold: float,
                                        warns: bool) -> None:
    monkeypatch.setattr(timing, "UNSTABLE_SPREAD", threshold)
    error = run(built[0], "--loops", "3").stderr
    assert ("unstable" in error, "close other work on this device, or run longer" in error) == (warns, warns)


@pytest.mark.parametrize("options", [
    ["--loops", "0"], ["--warmup", "-1"], ["--budget-s", "0"], ["--loops", "2", "--budget-s", "1"]])
def test_wrong_options(workspace: Workspace, options: list[str]) -> None:
    done = run(workspace, *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


# the profile -------------------------------------------------------------------------------------------------------------

def test_a_real_profile(model: Path, tmp_path: Path) -> None:
    runner = open_runner(model, "cpu", profile_prefix=tmp_path / "profile")
    for _ in range(5):
        runner.run_once()
    runs = read_profile(Path(runner.session.end_profiling()))
    assert len(runs) == 5
    names = [node.node for node in runs[0].nodes]
    assert len(set(names)) == len(names) > 4
    for run in runs:
        assert [node.node for node in run.nodes] == names
        assert {node.provider for node in run.nodes} == {"CPUExecutionProvider"}
        assert all(run.start_us <= node.start_us < node.end_us <= run.end_us + 1 for node in run.nodes)
    times, spans = kernel_times_ms(runs), node_spans_ms(runs)
    assert set(times) == set(spans) == set(names)
    covered = []
    for number, run in enumerate(runs):
        whole_ms = (run.end_us - run.start_us) / 1000
        covered.append(sum(values[number] for values in spans.values()) / whole_ms)
        assert sum(values[number] for values in times.values()) <= whole_ms * 1.02
        for name in names[:-1]:
            assert times[name][number] <= spans[name][number] + 0.002  # whole microseconds
    assert 0.8 < np.median(covered) < 1.01


# the worker --------------------------------------------------------------------------------------------------------------

def samples_of(reply: Reply) -> dict[str, dict[str, tuple[float, ...]]]:
    """By label, then by id."""
    by_label: dict[str, dict[str, tuple[float, ...]]] = {}
    for samples in reply.measurements:
        by_label.setdefault(samples.label, {})[samples.id] = samples.samples_ms
    return by_label


def test_a_model_and_its_kernels_in_it(built: tuple[Workspace, Flavour], model: Path) -> None:
    workspace, flavour = built
    record_file = record_path(workspace, flavour, "anet_b1")
    record = read_model_record(record_file)
    request = Request(do="model", device="cpu", effort=FEW, paths=(str(model),), record=str(record_file),
                      labels=("kernel_time", "node_span"))
    reply = answer(request)
    assert {(m.context, m.place) for m in reply.measurements} == {("anet_b1", "alone"), ("anet_b1", "in_model")}
    by_label = samples_of(reply)
    assert set(by_label) == {"latency", "kernel_time", "node_span"}
    assert set(by_label["latency"]) == {"anet_b1"}
    assert set(by_label["kernel_time"]) == set(by_label["node_span"]) == set(record.kernels)
    uses = {name: sum(node.kernel_id == name for node in record.nodes) for name in record.kernels}
    lengths = {len(samples) / uses[name] for name, samples in by_label["kernel_time"].items()}
    assert len(lengths) == 1  # a sample a run, for each node that is this kernel
    replies = [by_label, *(samples_of(answer(request)) for _ in range(2))]  # other work may disturb all runs of one reply
    least = {label: {name: min(min(run[label][name]) for run in replies) for name in by_label[label]} for label in by_label}
    convs = [name for name in record.kernels if record.kernels[name].op_type == "Conv"]
    slowest = max(least["kernel_time"], key=lambda name: least["kernel_time"][name])
    assert slowest == max(convs, key=lambda name: record.kernels[name].flops)
    nodes_ms = sum(least["node_span"][node.kernel_id] for node in record.nodes)
    assert 0.25 < nodes_ms / least["latency"]["anet_b1"] < 4
    only = answer(request.model_copy(update={"labels": ()}))
    assert set(samples_of(only)) == {"latency"}


@pytest.mark.slow
def test_every_kind_of_work_gives_a_whole_reply(built: tuple[Workspace, Flavour], model: Path, kernels: list[Path]) -> None:
    """A kernel alone, a carrier, a session, traced runs and the canary. What only a GPU can do is tested on a GPU."""
    assert set(WORK) == set(get_args(Request.model_fields["do"].annotation))

    def ask(do: str, *paths: Path, labels: tuple[str, ...] = ()) -> set[tuple[str, str, str, str, str]]:
        reply = answer(Request.model_validate({
            "do": do, "device": "cpu", "effort": FEW, "paths": tuple(map(str, paths)), "labels": labels}))
        assert Reply.model_validate_json(reply.model_dump_json()) == reply
        assert not reply.error
        assert bool(reply.runs) == (do == "model_trace")
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


def test_a_damaged_kernel_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(b"no model")
    for do in ("alone", "carrier"):
        reply = answer(Request.model_validate({"do": do, "device": "cpu", "effort": FEW, "paths": (str(path),)}))
        assert not reply.measurements
        assert "bad.onnx: not an ONNX model" in reply.error
