"""The process that runs kernels and models under ONNX Runtime for the collector and the evaluator.

Reads one Request a line on standard input, writes one Reply a line on standard output, and ends when its input does.
The collector starts it. To start it manually:
echo '{"do": "canary", "device": "cpu", "effort": {}}' | python -m hase.benchmark.ort.worker
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.benchmark.measuring.gpu_trace import GpuRun, trace
from hase.benchmark.measuring.held_memory import HeldMemory
from hase.benchmark.measuring.quiet_host import all_samples_ms, off_the_workers_cores, quiet_samples_ms
from hase.benchmark.measuring.run_times import Effort
from hase.benchmark.ort.carriers import TRACED_RUNS, time_carrier
from hase.benchmark.ort.energy import energy_of_kernels, energy_of_model
from hase.benchmark.ort.probes import NAME, canary, host_probe
from hase.benchmark.ort.profile import labels_of, profile_model, trip_ms
from hase.benchmark.ort.runner import Runner, bind, device_binding, dispatcher, open_runner, timer
from hase.benchmark.ort.sharing_probe import probe
from hase.ort_analysis.graph.analysis import kernel_of
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import GPU_LABEL, UNPROFILED, Measurement
from hase.records.operators import CONTROL_FLOW
from hase.runtimes import protocol
from hase.runtimes.protocol import Reply, Request
from hase.utils.errors import UserError
from hase.utils.ort_sessions import model_errors

if TYPE_CHECKING:
    pass

CAPTURING_RUNS = 3  # ONNX Runtime runs a model twice before it captures it


def time_session(request: Request) -> Reply:
    """Times a whole model's runs as the request's one label says, with the memory that its session holds.

    The label is `latency`, `host_io` (numpy arrays in and out) or `cuda_graph`.
    """
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
    name = request.model_name
    return Reply(measurements=(Measurement(subject="model", id=name, label=label, context=name, place="alone", **measured),),
                 memory_mib=memory.peak_mib)


def time_canary(request: Request) -> Reply:
    """The canary, as often as the effort says."""
    timing = canary(request.device).time_as(request.effort)
    return Reply(measurements=(Measurement(subject=NAME, id=NAME, label="run", context="alone", place="alone",
                                           samples_ms=timing.samples_ms),))


def probe_sharing(request: Request) -> Reply:
    """How long tiny work waits for other processes."""
    return Reply(probe=probe(request.device, request.effort.budget_s))


def time_alone(request: Request) -> Reply:
    """Label `run`: a kernel in a session of its own, wall time."""
    path = Path(request.paths[0])
    runner = open_runner(path, request.device, provider_options=request.provider_options)
    return Reply(measurements=(Measurement(subject="kernel", id=path.stem, label="run", context="alone", place="alone",
                                           samples_ms=runner.time_as(request.effort).samples_ms),))


def time_model(request: Request) -> Reply:
    """A whole model's latency (and, on a GPU, the host's dispatch), its kernels' in-model labels, and its energy."""
    path, device, effort = Path(request.paths[0]), request.device, request.effort
    name = request.model_name
    runner = open_runner(path, device, dims=request.dims, provider_options=request.provider_options, static=request.static,
                         inputs=request.inputs_file)
    one_run_s = runner.warm_up(effort.warmup + 1, effort.warmup_s)
    timed = {"latency": runner.run_s}
    if request.host:
        binding = device_binding(runner.session, runner.feed, "cuda", shared=runner.shared)
        timed["host"] = dispatcher(runner.session, binding)
    if request.host_io:
        timed["host_io"] = timer(bind(runner.session, runner.feed, device, "host"))

    def in_model() -> list[Measurement]:
        return [m for m in model_labels(path, request) if m.label in request.labels] if request.labels else []

    measurements = ([*beside_the_probe(name, timed, request), *in_model()] if request.watch_host else
                    in_halves(name, runner, timed, effort.runs(one_run_s), effort, in_model))
    energy = [energy_of_model(runner, name, request.energy_s)] if request.energy_s else []
    return Reply(measurements=(*measurements, *energy))


def of_model(model: str, label: str, **fields: Any) -> Measurement:
    """A measurement of a whole model; `fields` are its further fields."""
    return Measurement(subject="model", id=model, label=label, context=model, place="alone", **fields)


def beside_the_probe(model: str, timed: Mapping[str, Callable[[], float]], request: Request) -> list[Measurement]:
    """Samples of a model's runs, by label, between readings of the host's probe: of all moments, or of those in which the host
    was undisturbed."""
    probe = host_probe(request.device)
    if request.watch_host == "all":
        samples = {label: all_samples_ms(probe, run_s, request.effort) for label, run_s in timed.items()}
        return [of_model(model, label, samples_ms=of_label.samples_ms, probe_us=of_label.probe_us)
                for label, of_label in samples.items()]
    return [of_model(model, label, **of_label._asdict())
            for label, of_label in quiet_samples_ms(probe, timed, request.effort).items()]


def time_model_as_graph(request: Request) -> Reply:
    """A whole model, captured once as a CUDA graph and then replayed; tensors on the device.

    Raises:
        UserError: ONNX Runtime can't capture it (see hase.ort_analysis.cuda.capture), load it or run it.
    """
    runner = open_runner(Path(request.paths[0]), "cuda", dims=request.dims, cuda_graph=True,
                         provider_options=request.provider_options, static=request.static, inputs=request.inputs_file)
    one_run_s = runner.warm_up(request.effort.warmup + CAPTURING_RUNS, request.effort.warmup_s)
    timed = {"cuda_graph": runner.run_s}
    if request.watch_host:
        return Reply(measurements=tuple(beside_the_probe(request.model_name, timed, request)))
    runs = request.effort.runs(one_run_s)
    return Reply(measurements=tuple(in_halves(request.model_name, runner, timed, runs, request.effort, list)))


def in_halves(model: str, runner: Runner, timed: Mapping[str, Callable[[], float]], runs: int, effort: Effort,
              between: Callable[[], list[Measurement]]) -> list[Measurement]:
    """Runs of a model in two halves, before and after something else, so that a drift of the machine's speed affects both."""
    samples: dict[str, list[float]] = {label: [] for label in timed}
    meanwhile: list[Measurement] = []
    for second in (False, True):
        with model_errors(model), off_the_workers_cores(runner.device):
            for label, run_s in timed.items():
                samples[label] += [round(1000 * run_s(), 6) for _ in range(max(2, runs // 2))]
        if not second:
            meanwhile = between()
            runner.warm_up(effort.warmup, effort.warmup_s)
    return [*(of_model(model, label, samples_ms=tuple(times_ms)) for label, times_ms in samples.items()), *meanwhile]


def traced_runs(request: Request) -> list[GpuRun]:
    """A few whole runs of a model, traced."""
    runner = open_runner(Path(request.paths[0]), request.device, dims=request.dims,
                         provider_options=request.provider_options, static=request.static, inputs=request.inputs_file)
    runner.warm_up(request.effort.warmup + 1, request.effort.warmup_s)
    return trace([runner.run_once] * (TRACED_RUNS + 1))[1:]


def trace_model(request: Request) -> Reply:
    """The traced runs of a model themselves."""
    return Reply(runs=tuple(traced_runs(request)))


def time_model_on_gpu(request: Request) -> Reply:
    """Label `gpu` of a whole model: the GPU's own time per run, and the number of launches."""
    traced = traced_runs(request)
    return Reply(measurements=(of_model(request.model_name, GPU_LABEL, launches=len(traced[0].work),
                                        samples_ms=tuple(round(run.busy_us / 1000, 6) for run in traced)),))


def model_labels(path: Path, request: Request) -> list[Measurement]:
    """The in-model labels of a model's kernels, in half the time of its whole latency. Nodes that hold bodies get none: their
    times are those of the bodies.

    Args:
        path: the model.
        request: how to run it, and the model's record.

    Raises:
        UserError: the graph is not the one that the record describes.
    """
    effort = request.effort.model_copy(update={"budget_s": request.effort.budget_s / 2})
    runs, graph, plain_ms = profile_model(path, request.device, request.dims, effort, request.provider_options,
                                          request.static, plain=UNPROFILED in request.labels, inputs=request.inputs_file)
    ids, record = {node.name: kernel_of(graph, node).id for node in graph.nodes}, read_model_record(Path(request.record))
    if sorted(ids.values()) != sorted(node.kernel_id for node in record.nodes):
        raise UserError(f"{path}: ORT's graph is not the one in its record; make the record anew: "
                        "python ort_analysis/fusion_detector.py")
    ran = {event.node for run in runs for event in run.nodes}
    idle = {kernel for name, kernel in ids.items() if name not in ran}  # their body did not run: they are measured alone
    bodies_ms = sum(node.runs * trip_ms(kernel, request.device) for node in record.nodes
                    if is_control_flow(kernel := record.kernel_of(node)))
    return labels_of(runs, {node.name: ids[node.name] for node in graph.nodes
                            if ids[node.name] not in idle and node.op_type not in CONTROL_FLOW}, record.model, "in_model",
                     median(plain_ms) - bodies_ms if plain_ms else None)


def time_kernels_in_model(request: Request) -> Reply:
    """The in-model labels of a model's kernels alone.

    If several nodes run a kernel, the nodes' shortest samples are averaged, then their second shortest, and so on. The
    kernel's median is then the mean of its nodes' medians: multiplied by their number it is what they take together, and a
    disturbance of one node in some run does not count.
    """
    path, record = Path(request.paths[0]), read_model_record(Path(request.record))
    count = Counter(node.kernel_id for node in record.nodes)
    measurements = []
    for m in model_labels(path, request):
        by_node = np.array(m.samples_ms).reshape(count[m.id], -1)  # `labels_of` appends one node's samples to another's
        measurements.append(m.model_copy(update={"samples_ms": tuple(np.sort(by_node, axis=1).mean(axis=0).round(6).tolist())}))
    return Reply(measurements=tuple(m for m in measurements if m.label in request.labels))


def prepare(request: Request) -> Reply:
    """Loads ONNX Runtime and runs something on the device; for label `gpu` also loads torch and CUPTI, by tracing it."""
    runner = canary(request.device)
    runner.warm_up(1)
    if GPU_LABEL in request.labels:
        trace([runner.run_once])
    return Reply()


WORK: dict[str, Callable[[Request], Reply]] = {  # each returns the reply, without its times
    "alone": time_alone, "carrier": time_carrier, "model": time_model, "model_labels": time_kernels_in_model,
    "model_gpu": time_model_on_gpu, "session": time_session,
    "model_trace": trace_model, "model_graph": time_model_as_graph, "canary": time_canary, "sharing_probe": probe_sharing,
    "prepare": prepare, "kernels_energy": energy_of_kernels}


answer = functools.partial(protocol.answer, WORK)


def main() -> None:
    protocol.serve(WORK)


if __name__ == "__main__":
    main()
