"""What the GPU did, by run and by kernel, and where a run's time goes. This machine may have no GPU: traces are made up, in the
form of torch's profiler and with the names of ONNX Runtime's CUDA kernels."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import printed, run_script
from conftest import small_model
from fake_worker import FakeWorker
from made_up_dataset import conv

from hase.benchmark.measuring import gpu_trace
from hase.benchmark.measuring.gpu_trace import gpu_runs, split_carrier
from hase.benchmark.ort import carriers
from hase.benchmark.ort.carriers import INPUTS_WRITTEN, MOST_QUEUED, TracedCarrier, groups_to_queue, time_carrier
from hase.benchmark.ort.worker import answer
from hase.benchmark.run_anatomy import TracedModel, as_json, measure, row, runs_of
from hase.kernel_model.building.kernel_models import write_kernel
from hase.records.kernel_record import Kernel
from hase.records.measurement import Effort, Measurement
from hase.records.traces import MEASURED, PARTS, GpuRun, GpuWork, Launch, anatomy_of, measured_trace, read_processes
from hase.runtimes.protocol import Reply, Request
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.timing import covered_us

ABS = "void onnxruntime::cuda::_UnaryElementWise<float, float, onnxruntime::cuda::OP_Abs<float>, 256, 4>(float const*)"
RELU = ABS.replace("OP_Abs", "OP_Relu")


def annotation(number: int, start: float, duration: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"hase:{number}", "ts": start, "dur": duration}


def launch(correlation: int, at: float, category: str = "cuda_runtime") -> dict[str, Any]:
    return {"cat": category, "name": "cudaLaunchKernel", "ts": at, "dur": 2.0, "args": {"correlation": correlation}}


def kernel(name: str, correlation: int, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration, "args": {"correlation": correlation}}


def test_work_belongs_to_the_run_that_launched_it() -> None:
    """So does work that ends after its run's range, since the GPU lags the host; and so do copies and driver launches."""
    events = [
        kernel("late", 3, 131.0, 4.0), annotation(1, 120.0, 10.0), annotation(0, 100.0, 15.0), launch(1, 101.0),
        launch(2, 104.0, "cuda_driver"), launch(3, 125.0), kernel("first", 1, 106.0, 5.0),
        kernel("copy", 2, 112.0, 3.0, "gpu_memcpy"), {"cat": "cpu_op", "name": "aten::add", "ts": 102.0, "dur": 1.0},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    first, second, third = gpu_runs(events, 3)
    assert [work.name for work in first.work] == ["first", "copy"]
    assert (first.host_us, first.busy_us, first.span_us) == (15.0, 8.0, 9.0)
    assert [work.name for work in second.work] == ["late"]
    assert (third.host_us, third.busy_us, third.work) == (0.0, 0.0, ())


def test_concurrent_work_counts_once() -> None:
    """As cuDNN runs the groups of a convolution: from 1 to 4 on two streams at once, and after a pause for 2 more."""
    work = tuple(GpuWork(name, start, lasts) for name, start, lasts in (
        ("group 0", 1.0, 2.0), ("group 1", 1.5, 2.5), ("group 2", 2.0, 1.0), ("after", 10.0, 2.0)))
    run = GpuRun(host_us=20.0, work=work)
    assert (run.busy_us, run.span_us) == (5.0, 11.0)
    assert covered_us((split_carrier(run, ["kernel_0"], "abs_") or {})["kernel_0"]) == 5.0


def test_work_knows_its_stream_and_outside_every_run_belongs_to_none() -> None:
    events = [annotation(0, 100.0, 10.0), launch(1, 90.0), launch(2, 111.0), kernel("before", 1, 95.0, 1.0),
              kernel("after", 2, 112.0, 1.0), kernel("without a launch", 9, 105.0, 1.0)]
    assert gpu_runs(events, 1)[0].work == ()
    events += [launch(3, 101.0), launch(4, 102.0), kernel("first", 3, 103.0, 1.0), kernel("second", 4, 104.0, 1.0)]
    events[-1]["args"]["stream"] = 7
    assert [work.stream for work in gpu_runs(events, 1)[0].work] == [0, 7]


ABSES = ["abs_0_0", "kernel_0", "abs_1_0", "kernel_1", "abs_2_0", "kernel_2"]


@pytest.mark.parametrize(("names", "order", "own", "expected"), [
    # two inputs for the first kernel, nothing on the GPU for the second, three launches for the third
    ((ABS, ABS, "add", ABS, ABS, "to_nhwc", "conv", "bias"),
     ["abs_0_0", "abs_0_1", "kernel_0", "abs_1_0", "kernel_1", "abs_2_0", "kernel_2"], (),
     {"kernel_0": ["add"], "kernel_1": [], "kernel_2": ["to_nhwc", "conv", "bias"]}),
    # a kernel of the writers' own operator has one piece of work
    ((ABS, ABS, ABS, RELU, ABS, ABS), ABSES, ("kernel_0", "kernel_2"),
     {"kernel_0": [ABS], "kernel_1": [RELU], "kernel_2": [ABS]}),
    ((ABS, ABS, ABS, RELU, ABS), ABSES, ("kernel_0", "kernel_2"), None),
    (("gather",), ["kernel_0"], (), {"kernel_0": ["gather"]}),  # no inputs are written
    ((ABS, RELU, "gather"), ["abs_0_0", "kernel_0", "kernel_1"], (), None),  # which of the two kernels did what?
    ((ABS, RELU), ["abs_0_0", "kernel_0", "abs_1_0", "kernel_1"], (), None),  # a writer is missing
    ((ABS, RELU, ABS, RELU), ["abs_0_0", "kernel_0"], (), None),  # one too many
    ((RELU, ABS), ["abs_0_0", "kernel_0"], (), None)])  # work before any kernel
def test_a_carriers_work_is_split_at_the_nodes_that_write_inputs(
        names: tuple[str, ...], order: list[str], own: tuple[str, ...], expected: dict[str, list[str]] | None) -> None:
    run = GpuRun(host_us=1.0, work=tuple(GpuWork(name, float(at), 1.0) for at, name in enumerate(names)))
    split = split_carrier(run, order, "abs_", set(own))
    names_of = None if split is None else {kernel: [piece.name for piece in work] for kernel, work in split.items()}
    assert names_of == expected


# work on several streams is traced again with its launches queued --------------------------------------------------------

def of_kernel(name: str, launches: int, time_ms: float = 1.0, queued: bool = False) -> Measurement:
    return Measurement(subject="kernel", id=name, label="gpu", context="carrier", place="carrier", samples_ms=(time_ms,),
                       launches=launches, queued=queued)


def test_a_group_has_no_more_launches_than_can_wait() -> None:
    """Those of the nodes that write the kernels' inputs among them."""
    half = MOST_QUEUED // 2 - INPUTS_WRITTEN
    measured = [of_kernel(name, launches) for name, launches in (("a", half), ("b", half), ("c", 1), ("many", MOST_QUEUED),
                                                                 ("d", MOST_QUEUED - INPUTS_WRITTEN), ("e", 2))]
    assert [[m.id for m in group] for group in groups_to_queue(measured)] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert not list(groups_to_queue([]))


def test_work_on_several_streams_is_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces what the first trace said of such kernels, and of these alone."""
    kernels = [conv(side=side, group=4) for side in (8, 16, 32)]
    asked: list[tuple[list[str], tuple[str, ...], int]] = []

    def made_up(of: Sequence[Kernel], request: Request, queued: int = 0) -> TracedCarrier:
        asked.append(([kernel.id for kernel in of], request.labels, queued))
        measured = [of_kernel(kernel.id, 5, 0.2 if queued else 0.9, bool(queued)) for kernel in of]
        return TracedCarrier(measured, measured[1:])

    monkeypatch.setattr(carriers, "run_carrier", made_up)
    paths = tuple(str(write_kernel(kernel, tmp_path)) for kernel in kernels)
    reply = time_carrier(Request(do="carrier", device="cuda", paths=paths, labels=("gpu", "node_span"), effort=Effort()))
    ids = [kernel.id for kernel in kernels]
    assert asked == [(ids, ("gpu", "node_span"), 0), (ids[1:], ("gpu",), 2 * (5 + INPUTS_WRITTEN))]
    assert [(m.id, m.samples_ms, m.queued) for m in reply.measurements] == [
        (ids[0], (0.9,), False), (ids[1], (0.2,), True), (ids[2], (0.2,), True)]


# processes that share one GPU: any number prepare at the same time, one measures alone -----------------------------------

ROUNDS, WORKERS = 3, 3


def _take_turns(folder: str, out: Any) -> None:
    for _ in range(ROUNDS):
        with gpu_trace.preparing_on_gpu(folder):
            began = time.monotonic()
            time.sleep(0.03)
            out.put(("preparing", began, time.monotonic()))
        with gpu_trace.alone_on_gpu(folder):
            began = time.monotonic()
            time.sleep(0.01)
            out.put(("alone", began, time.monotonic()))


@pytest.mark.slow
@pytest.mark.measuring
def test_one_process_measures_alone_and_none_starves(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    out: Any = context.Queue()
    workers = [context.Process(target=_take_turns, args=(str(tmp_path), out)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    spans = [out.get(timeout=60) for _ in range(2 * ROUNDS * WORKERS)]
    for worker in workers:
        worker.join(10)
    alone = [span for span in spans if span[0] == "alone"]
    assert len(alone) == ROUNDS * WORKERS
    for span in alone:
        assert not [overlap for overlap in spans if overlap is not span and overlap[1] < span[2] and span[1] < overlap[2]]


# where a run's time goes -------------------------------------------------------------------------------------------------

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


CALL = Launch("cudaGraphLaunch", 0.0, 8.0)


@pytest.mark.parametrize(("run", "expected", "launching_us"), [
    # Before: 10. The second was launched (12 to 15) while the first ran: a gap of 3. The third's call ended (at 60) after the
    # second's end (at 50): 12 of waiting, of which 2 came after the call.
    (run_of(((2, 5), (10, 30)), ((12, 15), (33, 50)), ((55, 60), (62, 90))),
     {"before_us": 10, "kernels_us": 20 + 17 + 28, "gaps_us": 3, "waiting_us": 12, "after_us": 10}, 3 + 3 + 5),
    # a call that ends with the previous work is no waiting
    (run_of(((0, 1), (1, 20)), ((15, 20), (22, 100))), {"before_us": 1, "kernels_us": 97, "gaps_us": 2}, 6),
    # copies and fills are no kernels
    (run_of(((0, 1), (5, 25)), ((2, 3), (30, 40)), category="gpu_memcpy"),
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


def test_the_real_trace_begins_with_the_run_and_is_read_back_under_another_number(tmp_path: Path) -> None:
    trace = measured_trace(run_of(((2, 5), (10, 30)), ((12, 15), (33, 50))))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["tid"], event["name"], event["ts"], event["dur"]) for event in spans] == [
        (1, "run", 0, 100), (1, "cudaLaunchKernel", 2, 3), (1, "cudaLaunchKernel", 12, 3), (2, "k0", 10, 20), (2, "k1", 33, 17)]
    path = tmp_path / "real.json"
    files.write_json(path, trace)
    assert [event | {"pid": 1} for event in read_processes(path, MEASURED, 2)] == files.read_json(path)["traceEvents"]


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not valid JSON"), ('{"traceEvents": 3}', "no such trace"),
    ('{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "ts": 0, "dur": 1}]}', "without a process named measured")])
def test_files_that_are_no_such_trace(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(UserError, match=rf"real\.json.*{message}"):
        read_processes(tmp_path / "real.json", MEASURED, 2)


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
    assert as_json(anatomy)["share_%"] == pytest.approx({name: 100 * time_us / 90 for name, time_us in {
        "host": 50, "launching": 3, "traced_run": 99, "kernels": 20, "copies": 0, "waiting": 0, "gaps": 0, "before": 10,
        "after": 69}.items()})
    assert row(anatomy)["kernels (µs)"] == "20 (22%)"


@pytest.mark.slow
def test_a_worker_needs_no_record(tmp_path: Path) -> None:
    """On the CPU provider, which leaves a GPU nothing to do: the runs come with their times on the host."""
    onnx.save(small_model(batch="batch"), tmp_path / "net.onnx")
    request = Request(do="model", device="cpu", paths=(str(tmp_path / "net.onnx"),), dims={"batch": 2},
                      watch_host="quiet", effort=Effort(budget_s=0.02, least_runs=3, most_runs=20))
    (timed,) = answer(request).measurements
    (at_any_moment,) = answer(request.model_copy(update={"watch_host": "all"})).measurements
    runs = answer(request.model_copy(update={"do": "model_trace"})).runs
    assert (timed.id, timed.label) == ("net@batch=2,dynamic", "latency")
    assert (timed.disturbance is None, at_any_moment.disturbance is None) == (False, True)
    assert at_any_moment.probe_us == pytest.approx(timed.probe_us, rel=5.0)
    assert len(runs) == 5
    assert all(run.host_us > 0 and not run.work for run in runs)
    assert all(before.end_us <= after.start_us for before, after in itertools.pairwise(runs))


@pytest.mark.slow
def test_a_case_a_model_and_size(tmp_path: Path) -> None:
    """Only the sizes of a model's own dimensions; a fixed model once."""
    onnx.save(small_model(batch="batch"), tmp_path / "dynamic.onnx")
    onnx.save(small_model(batch=2), tmp_path / "fixed.onnx")
    paths = [tmp_path / "dynamic.onnx", tmp_path / "fixed.onnx", tmp_path / "fixed.onnx"]
    assert [(model.name, model.batch) for model in runs_of(paths, {"batch": [1, 16]})] == [
        ("dynamic@batch=1,dynamic", 1), ("dynamic@batch=16,dynamic", 16), ("fixed", 2)]
    with pytest.raises(UserError, match="--dim width: not a dynamic dimension of any of these models"):
        runs_of(paths, {"batch": [1], "width": [3]})


def test_the_command_needs_a_gpu(tmp_path: Path) -> None:
    done = run_script("benchmark/run_anatomy.py", "--workspace", tmp_path, "--model", "x.onnx", "--device", "cpu")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: this command needs a GPU")


@pytest.mark.skipif(not has_cuda(), reason="traces a GPU")
def test_the_command_on_a_gpu(tmp_path: Path) -> None:
    """The parts add up, and the GPU's own work takes no longer than the untraced run."""
    onnx.save(small_model(channels=64, side=64, batch="batch"), tmp_path / "net.onnx")
    (report,) = json.loads(printed(
        "benchmark/run_anatomy.py", "--workspace", tmp_path, "--model", tmp_path / "net.onnx", "--dim", "batch=8", "--budget-s",
        "0.2", "--json"))
    traced = report["traced"]
    assert sum(traced[name] for name in PARTS) == pytest.approx(traced["run_us"], abs=0.01)  # the trace rounds to nanoseconds
    assert 0 < traced["kernels_us"] < 1000 * report["latency_ms"]
    assert 0 < traced["launching_us"] < traced["run_us"]
