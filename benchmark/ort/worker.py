"""The process that runs kernels and models under ONNX Runtime for the collector and the evaluator, by runtimes/protocol.py.

By hand: echo '{"do": "canary", "device": "cpu", "effort": {}}' | python -m hase.benchmark.ort.worker
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hase.benchmark.measuring.gpu_trace import trace
from hase.benchmark.measuring.quiet_host import all_samples_ms, off_the_workers_cores, quiet_samples_ms
from hase.benchmark.metrics.power import HeldMemory, PowerMonitor, energy_of_runs, open_power_sensor
from hase.benchmark.ort.carriers import TRACED_RUNS, time_carrier
from hase.benchmark.ort.probes import CANARY, canary, host_probe, probe
from hase.benchmark.ort.profile import labels_of, profile_model, trip_ms
from hase.benchmark.ort.runner import Runner, bind, device_binding, dispatcher, open_runner
from hase.ort_analysis.graph.analysis import kernel_of
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import ENERGY, GPU_LABEL, KERNELS, UNPROFILED, Effort, Measurement
from hase.records.operators import CONTROL_FLOW
from hase.records.traces import GpuRun
from hase.runtimes import protocol
from hase.runtimes.protocol import Reply, Request
from hase.utils.errors import UserError
from hase.utils.ort_sessions import model_errors
from hase.utils.timing import pause, timed, turns

CAPTURING_RUNS = 3  # ONNX Runtime runs a model twice before it captures it
REST_S = 0.5  # idle window of an energy measurement: the session is open, and nothing runs
CALM_S = 0.3  # pause before that window, since the sensor still shows earlier runs


def open_model(request: Request, cuda_graph: bool = False) -> Runner:
    """A request's model in an open session, with tensors on the device."""
    return open_runner(Path(request.paths[0]), request.device, dims=request.dims, cuda_graph=cuda_graph,
                       provider_options=request.provider_options, static=request.static, inputs=request.inputs_file)


def time_session(request: Request) -> Reply:
    """Times whole runs of a model for one label, and measures the memory that its session holds. The label is `latency`,
    `host_io` (numpy arrays in and out) or `cuda_graph`."""
    (label,) = request.labels or ("latency",)
    path, device, effort = Path(request.paths[0]), request.device, request.effort
    # opened first, so that its session does not count as the model's memory
    probe = host_probe(device) if request.watch_host else None
    memory = HeldMemory(device)
    runner = open_runner(path, device, dims=request.dims, io="host" if label == "host_io" else "device",
                         cuda_graph=label == "cuda_graph", static=request.static, inputs=request.inputs_file)
    memory.opened()
    if probe:
        runner.warm_up(effort.warmup)
        measured = quiet_samples_ms(probe, {label: runner.run_s}, effort)[label]._asdict()
    else:
        measured = {"samples_ms": runner.time(warmup=effort.warmup, budget_s=effort.budget_s).samples_ms}
    return Reply(measurements=(model_measurement(request.model_name, label, **measured),), memory_mib=memory.peak_mib)


def time_canary(request: Request) -> Reply:
    """Times the canary as often as the effort says."""
    timing = canary(request.device).time_as(request.effort)
    return Reply(measurements=(Measurement(subject=CANARY, id=CANARY, label="run", context="alone", place="alone",
                                           samples_ms=timing.samples_ms),))


def time_alone(request: Request) -> Reply:
    """Times a kernel in its own session by wall time (label `run`)."""
    path = Path(request.paths[0])
    runner = open_runner(path, request.device, provider_options=request.provider_options)
    return Reply(measurements=(Measurement(subject="kernel", id=path.stem, label="run", context="alone", place="alone",
                                           samples_ms=runner.time_as(request.effort).samples_ms),))


def time_model(request: Request) -> Reply:
    """Times a whole model (and, on a GPU, the host's dispatch) and its kernels in it, and measures the model's energy."""
    path, device, effort = Path(request.paths[0]), request.device, request.effort
    name = request.model_name
    runner = open_model(request)
    one_run_s = runner.warm_up(effort.warmup + 1, effort.warmup_s)
    clocks = {"latency": runner.run_s}
    if request.host:
        binding = device_binding(runner.session, runner.feed, "cuda", shared=runner.shared)
        clocks["host"] = dispatcher(runner.session, binding)
    if request.host_io:
        clocks["host_io"] = timed(bind(runner.session, runner.feed, device, "host"))

    def in_model() -> list[Measurement]:
        return [m for m in model_labels(path, request) if m.label in request.labels] if request.labels else []

    measurements = ([*beside_the_probe(name, clocks, request), *in_model()] if request.watch_host else
                    in_halves(name, runner, clocks, effort.runs(one_run_s), effort, in_model))
    if request.energy_s:
        facts = {"subject": "model", "id": name, "label": ENERGY, "context": name, "place": "alone"}
        measurements.append(_energy(facts, device, runner.run_once, request.energy_s))
    return Reply(measurements=tuple(measurements))


def model_measurement(model: str, label: str, **fields: Any) -> Measurement:
    """A measurement of a whole model with further `fields`."""
    return Measurement(subject="model", id=model, label=label, context=model, place="alone", **fields)


def beside_the_probe(model: str, clocks: Mapping[str, Callable[[], float]], request: Request) -> list[Measurement]:
    """Samples of a model's runs, by label, between readings of the host's probe: all, or only undisturbed ones."""
    probe = host_probe(request.device)
    if request.watch_host == "all":
        samples = {label: all_samples_ms(probe, run_s, request.effort) for label, run_s in clocks.items()}
        return [model_measurement(model, label, samples_ms=taken.samples_ms, probe_us=taken.probe_us)
                for label, taken in samples.items()]
    return [model_measurement(model, label, **taken._asdict())
            for label, taken in quiet_samples_ms(probe, clocks, request.effort).items()]


def time_model_as_graph(request: Request) -> Reply:
    """Times a whole model as a CUDA graph with tensors on the device. Raises UserError if ORT cannot capture it."""
    runner = open_model(request, cuda_graph=True)
    one_run_s = runner.warm_up(request.effort.warmup + CAPTURING_RUNS, request.effort.warmup_s)
    clocks = {"cuda_graph": runner.run_s}
    if request.watch_host:
        return Reply(measurements=tuple(beside_the_probe(request.model_name, clocks, request)))
    runs = request.effort.runs(one_run_s)
    return Reply(measurements=tuple(in_halves(request.model_name, runner, clocks, runs, request.effort, list)))


def in_halves(model: str, runner: Runner, clocks: Mapping[str, Callable[[], float]], runs: int, effort: Effort,
              between: Callable[[], list[Measurement]]) -> list[Measurement]:
    """Runs a model in two halves, before and after `between`, so that drift of the machine's speed affects both."""
    samples: dict[str, list[float]] = {label: [] for label in clocks}
    meanwhile: list[Measurement] = []
    for second in (False, True):
        with model_errors(model), off_the_workers_cores(runner.device):
            for label, run_s in clocks.items():
                samples[label] += [round(1000 * run_s(), 6) for _ in turns(max(2, runs // 2))]
        if not second:
            meanwhile = between()
            runner.warm_up(effort.warmup, effort.warmup_s)
    return [*(model_measurement(model, label, samples_ms=tuple(times_ms)) for label, times_ms in samples.items()), *meanwhile]


def traced_runs(request: Request) -> list[GpuRun]:
    """Traces a few whole runs of a model."""
    runner = open_model(request)
    runner.warm_up(request.effort.warmup + 1, request.effort.warmup_s)
    return trace([runner.run_once] * (TRACED_RUNS + 1))[1:]


def time_model_on_gpu(request: Request) -> Reply:
    """Measures the GPU's time per run of a whole model, and counts the launches (label `gpu`)."""
    traced = traced_runs(request)
    return Reply(measurements=(model_measurement(request.model_name, GPU_LABEL, launches=len(traced[0].work),
                                                 samples_ms=tuple(round(run.busy_us / 1000, 6) for run in traced)),))


def model_labels(path: Path, request: Request) -> list[Measurement]:
    """In-model labels of a model's kernels, in half the time of its latency. Raises UserError if the graph has changed."""
    effort = request.effort.model_copy(update={"budget_s": request.effort.budget_s / 2})
    runs, graph, plain_ms = profile_model(path, request.device, request.dims, effort, request.provider_options,
                                          request.static, plain=UNPROFILED in request.labels, inputs=request.inputs_file)
    ids, record = {node.name: kernel_of(graph, node).id for node in graph.nodes}, read_model_record(Path(request.record))
    if sorted(ids.values()) != sorted(node.kernel_id for node in record.nodes):
        raise UserError(f"{path}: ORT's graph is not the one in its record; make the record again: "
                        "python ort_analysis/fusion_detector.py")
    ran = {event.node for run in runs for event in run.nodes}
    unrun = {kernel for name, kernel in ids.items() if name not in ran}  # in a body that did not run: they are measured alone
    bodies_ms = sum(node.runs * trip_ms(kernel, request.device) for node in record.nodes
                    if is_control_flow(kernel := record.kernel_of(node)))
    return labels_of(runs, {node.name: ids[node.name] for node in graph.nodes
                            if ids[node.name] not in unrun and node.op_type not in CONTROL_FLOW}, record.model, "in_model",
                     median(plain_ms) - bodies_ms if plain_ms else None)


def time_kernels_in_model(request: Request) -> Reply:
    """Times only the in-model labels of a model's kernels.

    If several nodes run a kernel, their shortest samples are averaged, then the second shortest, and so on. The kernel's median
    is then the mean of its nodes' medians: times their number, it is their total, and a disturbance of one node does not count.
    """
    path, record = Path(request.paths[0]), read_model_record(Path(request.record))
    count = Counter(node.kernel_id for node in record.nodes)
    measurements = []
    for m in model_labels(path, request):
        by_node = np.array(m.samples_ms).reshape(count[m.id], -1)  # `labels_of` appends one node's samples to another's
        measurements.append(m.model_copy(update={"samples_ms": tuple(np.sort(by_node, axis=1).mean(axis=0).round(6).tolist())}))
    return Reply(measurements=tuple(m for m in measurements if m.label in request.labels))


def prepare(request: Request) -> Reply:
    """Loads ONNX Runtime and runs something on the device; for label `gpu` it is traced, which loads torch and CUPTI."""
    runner = canary(request.device)
    runner.warm_up(1)
    if GPU_LABEL in request.labels:
        trace([runner.run_once])
    return Reply()


def energy_of_kernels(request: Request) -> Reply:
    """Measures the energy of a batch of kernels in sequence (label `energy`); one alone is too short for a power sensor."""
    runners = [open_runner(Path(path), request.device, provider_options=request.provider_options) for path in request.paths]
    for runner in runners:
        runner.warm_up(request.effort.warmup + 1)

    def run_each() -> None:
        for runner in runners:
            runner.run_once()

    members = tuple(Path(path).stem for path in request.paths)
    facts = {"subject": KERNELS, "id": f"{len(members)} from {members[0]}", "label": ENERGY, "context": "alone",
             "place": "alone", "members": members}
    return Reply(measurements=(_energy(facts, request.device, run_each, request.energy_s),))


def _energy(facts: dict[str, Any], device: str, run: Callable[[], Any], seconds: float) -> Measurement:
    """A measurement of the energy of one `run`.

    Its quantities are `energy_j` (per run), `counter_j` (the same by the device's counter, if any), `power_w` (mean), `idle_w`
    (session open, nothing running), `window_s` and `runs`; its only sample is the mean time of a run. `error` holds doubts
    about the readings; if power cannot be read, the measurement fails with the reason.
    """
    try:
        with PowerMonitor(open_power_sensor(device)) as monitor, model_errors(facts["id"]), off_the_workers_cores(device):
            pause(CALM_S + monitor.sensor.averages_s)
            idle = monitor.rest(REST_S)
            measured = energy_of_runs(monitor, run, seconds)
    except UserError as error:
        return Measurement.model_validate(facts | {"status": "failed", "error": str(error)})
    used, runs = measured.used, len(measured.samples_ms)
    quantities = {"energy_j": measured.energy_j, "power_w": used.mean_w, "idle_w": idle.mean_w, "window_s": used.seconds,
                  "runs": float(runs)}
    if used.counter_j is not None:
        quantities["counter_j"] = used.counter_j / runs
    return Measurement.model_validate(facts | {
        "samples_ms": (round(1e3 * used.seconds / runs, 6),), "error": "; ".join(used.warnings),
        "quantities": {name: (float(f"{value:.7g}"),) for name, value in quantities.items()}})


WORK: dict[str, Callable[[Request], Reply]] = {  # each returns the reply, without its times
    "alone": time_alone, "carrier": time_carrier, "model": time_model, "model_labels": time_kernels_in_model,
    "model_gpu": time_model_on_gpu, "model_graph": time_model_as_graph, "session": time_session, "canary": time_canary,
    "model_trace": lambda request: Reply(runs=tuple(traced_runs(request))), "prepare": prepare,
    "sharing_probe": lambda request: Reply(probe=probe(request.device, request.effort.budget_s)),
    "kernels_energy": energy_of_kernels}
answer = functools.partial(protocol.answer, WORK)


if __name__ == "__main__":
    protocol.serve(WORK)
