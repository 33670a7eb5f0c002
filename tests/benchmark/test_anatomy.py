"""Where a run's time goes on a GPU. This machine may have none: the traced runs are made up, with values known by hand, and
so are the workers that would time and trace; models, sizes, files and commands are real."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import printed, run_script
from conftest import small_model
from fake_worker import FakeWorker

from hase.benchmark.measuring.gpu_trace import attribute
from hase.benchmark.ort.worker import answer
from hase.benchmark.run_anatomy import TracedModel, as_json, measure, row, runs_of
from hase.records.measurement import Effort, Measurement
from hase.records.traces import (
    MEASURED,
    PARTS,
    GpuRun,
    GpuWork,
    Launch,
    anatomy_of,
    measured_trace,
    read_processes,
    typical_run,
)
from hase.runtimes.protocol import Reply, Request
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.processes import WorkerFailed

EFFORT = Effort(least_runs=3, most_runs=3)


def run_of(*pairs: tuple[tuple[float, float], tuple[float, float]], host_us: float = 100.0, start_us: float = 1000.0,
           category: str = "kernel") -> GpuRun:
    """A made-up run: for each piece of work, when its launch call began and ended, and when the work itself did; in µs from the
    run's start."""
    work = tuple(GpuWork(f"k{place}", start_us + begin, end - begin, category) for place, (_, (begin, end)) in enumerate(pairs))
    launches = tuple(Launch("cudaLaunchKernel", start_us + begin, end - begin) for (begin, end), _ in pairs)
    return GpuRun(host_us, work, start_us, launches)


def parts(run: GpuRun) -> dict[str, float]:
    """The parts that are not 0, which always add up to the whole run."""
    anatomy = anatomy_of(run)
    named = {name: getattr(anatomy, name) for name in PARTS}
    assert sum(named.values()) == pytest.approx(anatomy.run_us)
    return {name: time for name, time in named.items() if time}


def joined(*runs: GpuRun) -> GpuRun:
    return GpuRun(100.0, tuple(work for run in runs for work in run.work), 1000.0,
                  tuple(launch for run in runs for launch in run.launches))


CALL = Launch("cudaGraphLaunch", 0.0, 8.0)


@pytest.mark.parametrize(("run", "expected", "launching_us"), [
    # Before: 10. The second was launched (12 to 15) while the first ran: a gap of 3. The third's call ended (at 60) after the
    # second's end (at 50): 12 of waiting, of which 2 came after the call.
    (run_of(((2, 5), (10, 30)), ((12, 15), (33, 50)), ((55, 60), (62, 90))),
     {"before_us": 10, "kernels_us": 20 + 17 + 28, "gaps_us": 3, "waiting_us": 12, "after_us": 10}, 3 + 3 + 5),
    # a call that ends with the previous work is no waiting
    (run_of(((0, 1), (1, 20)), ((15, 20), (22, 100))), {"before_us": 1, "kernels_us": 97, "gaps_us": 2}, 6),
    # copies and fills are no kernels
    (joined(run_of(((0, 1), (5, 25)), category="gpu_memcpy"), run_of(((2, 3), (30, 40)), category="gpu_memset")),
     {"before_us": 5, "copies_us": 30, "gaps_us": 5, "after_us": 60}, 2),
    # what overlaps or outlasts the run counts once
    (run_of(((0, 1), (10, 50)), ((2, 3), (40, 60)), ((4, 5), (20, 30)), ((6, 7), (90, 120))),
     {"before_us": 10, "kernels_us": 60, "gaps_us": 30}, 4),
    # one call may launch much, as that of a CUDA graph does
    (GpuRun(50.0, (GpuWork("a", 5.0, 10.0), GpuWork("b", 16.0, 10.0)), 0.0, (CALL, CALL)),
     {"before_us": 5, "kernels_us": 20, "waiting_us": 0, "gaps_us": 1, "after_us": 24}, 8),
    (GpuRun(30.0, ()), {"after_us": 30.0}, 0)])
def test_each_pause_has_its_cause(run: GpuRun, expected: dict[str, float], launching_us: float) -> None:
    assert parts(run) == {name: time for name, time in expected.items() if time}
    anatomy = anatomy_of(run)
    assert (anatomy.launches, anatomy.launching_us, anatomy.run_us) == (len(run.work), launching_us, run.host_us)


def test_events_become_an_anatomy() -> None:
    """From a made-up trace in the form of torch's profiler: two launches, one of them the driver's, and a wait for the end."""
    events = [
        {"cat": "user_annotation", "name": "hase:0", "ts": 100.0, "dur": 50.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 104.0, "dur": 4.0, "args": {"correlation": 1}},
        {"cat": "kernel", "name": "conv", "ts": 110.0, "dur": 10.0, "args": {"correlation": 1}},
        {"cat": "cuda_driver", "name": "cuLaunchKernel", "ts": 121.0, "dur": 2.0, "args": {"correlation": 2}},
        {"cat": "kernel", "name": "relu", "ts": 125.0, "dur": 5.0, "args": {"correlation": 2}},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 124.0, "dur": 8.0, "args": {"correlation": 3}}]
    (run,) = attribute(events, 1)
    assert run.launches == (Launch("cudaLaunchKernel", 104.0, 4.0), Launch("cuLaunchKernel", 121.0, 2.0))
    assert parts(run) == {"before_us": 10, "kernels_us": 15, "waiting_us": 5, "after_us": 20}
    assert anatomy_of(run).launching_us == 6


@pytest.mark.parametrize(("lengths", "typical"), [((5.0, 9.0, 1.0), 5.0), ((4.0, 3.0, 2.0, 1.0), 2.0), ((7.0,), 7.0)])
def test_the_typical_run_is_one_of_them(lengths: tuple[float, ...], typical: float) -> None:
    assert typical_run([GpuRun(length, ()) for length in lengths]).host_us == typical


def spans(trace: dict[str, Any], track: int) -> list[tuple[str, float, float]]:
    return [(event["name"], event["ts"], event["dur"]) for event in trace["traceEvents"]
            if event["ph"] == "X" and event["tid"] == track]


def test_the_real_trace_begins_with_the_run_and_is_read_back_under_another_number(tmp_path: Path) -> None:
    trace = measured_trace(run_of(((2, 5), (10, 30)), ((12, 15), (33, 50))))
    assert spans(trace, 1) == [("run", 0, 100), ("cudaLaunchKernel", 2, 3), ("cudaLaunchKernel", 12, 3)]
    assert spans(trace, 2) == [("k0", 10, 20), ("k1", 33, 17)]
    of_graph = GpuRun(50.0, (GpuWork("a", 5.0, 10.0), GpuWork("b", 16.0, 10.0)), 0.0, (CALL, CALL))
    assert [name for name, _, _ in spans(measured_trace(of_graph), 1)] == ["run", "cudaGraphLaunch"]
    path = tmp_path / "real.json"
    files.write_json(path, trace)
    events = read_processes(path, MEASURED, 2)
    assert {event["pid"] for event in events} == {2}
    assert [event | {"pid": 1} for event in events] == files.read_json(path)["traceEvents"]


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not valid JSON"), ("[]", "no such trace"), ('{"traceEvents": 3}', "no such trace"),
    ('{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "ts": "soon", "dur": 1}]}', "no such trace"),
    ('{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "ts": 0, "dur": 1}]}', "without a process named measured"),
    ('{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "measured"}}]}',
     "without a process named measured")])
def test_files_that_are_no_such_trace(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "real.json"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"real\.json.*{message}"):
        read_processes(path, MEASURED, 2)


def test_one_process_times_and_another_traces() -> None:
    timer = FakeWorker(reply=Reply(measurements=tuple(
        Measurement(subject="model", id="net", context="net", place="alone", label=label, samples_ms=samples_ms,
                    disturbance=disturbance)
        for label, samples_ms, disturbance in (("latency", (0.09, 0.08, 0.5), 0.02), ("host", (0.04, 0.06, 0.05), 0.1)))))
    runs = tuple(run_of(((2, 5), (10, 30)), host_us=length) for length in (300.0, 90.0, 99.0))
    tracer = FakeWorker(reply=Reply.model_validate_json(Reply(runs=runs).model_dump_json()))  # as through the pipe
    anatomy, run = measure(TracedModel(Path("net.onnx"), {"batch": 4}, 4), timer, tracer, EFFORT)
    assert [(request.do, request.host, request.watch_host, request.labels, request.dims, request.static)
            for request in timer.asked] == [("model", True, "quiet", (), {"batch": 4}, False)]
    assert [request.do for request in tracer.asked] == ["model_trace"]
    assert run == runs[2]
    assert (anatomy.model, anatomy.batch, anatomy.latency_ms, anatomy.host_ms, anatomy.disturbance) == (
        "net@batch=4,dynamic", 4, 0.09, 0.05, 0.1)
    shares = as_json(anatomy)["share_%"]
    assert shares == pytest.approx({name: 100 * time_us / 90 for name, time_us in {
        "host": 50, "launching": 3, "traced_run": 99, "kernels": 20, "copies": 0, "waiting": 0, "gaps": 0, "before": 10,
        "after": 69}.items()})
    cells = row(anatomy)
    assert cells["latency (µs)"] == pytest.approx(90)
    assert (cells["host alone (µs)"], cells["kernels (µs)"], cells["traced run (µs)"]) == (
        "50 (56%)", "20 (22%)", "99 (110%)")


@pytest.mark.parametrize(("reply", "message"), [
    (WorkerFailed("crashed", "the process ended with SIGSEGV"), r"net\.onnx: the process ended with SIGSEGV"),
    (Reply(error="net.onnx: does not fit in the memory"), "does not fit")])
def test_a_model_that_fails_says_why(reply: Reply | WorkerFailed, message: str) -> None:
    with pytest.raises(UserError, match=message):
        measure(TracedModel(Path("net.onnx"), {}, 1), FakeWorker(reply=reply), FakeWorker(), EFFORT)


@pytest.mark.slow
def test_a_worker_needs_no_record(tmp_path: Path) -> None:
    """On the CPU provider, which leaves a GPU nothing to do: the runs come with their times on the host."""
    onnx.save(small_model(batch="batch"), tmp_path / "net.onnx")
    request = Request(do="model", device="cpu", paths=(str(tmp_path / "net.onnx"),), dims={"batch": 2},
                      watch_host="quiet", effort=Effort(budget_s=0.02, least_runs=3, most_runs=20))
    tracing = request.model_copy(update={"do": "model_trace"})
    (timed,) = answer(request).measurements
    (at_any_moment,) = answer(request.model_copy(update={"watch_host": "all"})).measurements
    runs = Reply.model_validate_json(answer(tracing).model_dump_json()).runs  # as through the pipe
    assert "net.onnx: no dynamic dimension width" in answer(tracing.model_copy(update={"dims": {"width": 2}})).error
    assert (timed.id, timed.label) == ("net@batch=2,dynamic", "latency")
    assert timed.disturbance is not None
    assert timed.probe_us is not None
    assert at_any_moment.disturbance is None
    assert at_any_moment.probe_us == pytest.approx(timed.probe_us, rel=5.0)
    assert len(at_any_moment.samples_ms) >= 3
    assert len(runs) == 5
    assert all(run.host_us > 0 and not run.work for run in runs)
    assert all(before.end_us <= after.start_us for before, after in itertools.pairwise(runs))


def test_a_case_a_model_and_size(tmp_path: Path) -> None:
    """Only the sizes of a model's own dimensions; a fixed model once."""
    onnx.save(small_model(batch="batch"), tmp_path / "dynamic.onnx")
    onnx.save(small_model(batch=2), tmp_path / "fixed.onnx")
    paths = [tmp_path / "dynamic.onnx", tmp_path / "fixed.onnx", tmp_path / "fixed.onnx"]
    assert [(model.name, model.batch) for model in runs_of(paths, {"batch": [1, 16]})] == [
        ("dynamic@batch=1,dynamic", 1), ("dynamic@batch=16,dynamic", 16), ("fixed", 2)]
    with pytest.raises(UserError, match="--dim width: not a dynamic dimension of any of these models"):
        runs_of(paths, {"batch": [1], "width": [3]})
    with pytest.raises(UserError, match="dimension batch"):
        runs_of(paths, {})


@pytest.mark.parametrize("device", ["cpu", pytest.param("auto", marks=pytest.mark.skipif(has_cuda(), reason="a GPU is here"))])
def test_the_command_needs_a_gpu(device: str, tmp_path: Path) -> None:
    done = run_script("benchmark/run_anatomy.py", "--workspace", tmp_path, "--model", "x.onnx", "--device", device)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: this command needs a GPU")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not has_cuda(), reason="traces a GPU")
def test_the_command_on_a_gpu(tmp_path: Path) -> None:
    """The parts add up, and the GPU's own work takes no longer than the untraced run."""
    onnx.save(small_model(channels=64, side=64, batch="batch"), tmp_path / "net.onnx")
    (report,) = json.loads(printed(
        "benchmark/run_anatomy.py", "--workspace", tmp_path, "--model", tmp_path / "net.onnx", "--dim", "batch=8", "--budget-s",
        "0.2", "--trace", tmp_path / "real.json", "--json"))
    traced = report["traced"]
    assert sum(traced[name] for name in PARTS) == pytest.approx(traced["run_us"], abs=0.01)  # the trace rounds to nanoseconds
    assert 0 < traced["kernels_us"] < 1000 * report["latency_ms"]
    assert 0 < traced["launching_us"] < traced["run_us"]
    assert len([event for event in read_processes(tmp_path / "real.json", MEASURED, 2)
                if (event["ph"], event.get("tid")) == ("X", 2)]) == traced["launches"]
