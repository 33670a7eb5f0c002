"""The process that runs kernels and models under OpenVINO for the collector; it uses runtimes/protocol.py."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.benchmark.metrics.power import HeldMemory
from hase.kernel_model.building.dummy_data import dummy_inputs, random_floats
from hase.kernel_model.building.kernel_models import read_built
from hase.records.kernel_record import zeros
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import Effort, Measurement, Placement
from hase.runtimes.openvino.compiling import FUSED, REMAKE, Layer, check_openvino, compile_model, layers_by_name, read_model
from hase.runtimes.openvino.recording import OpenvinoModel, parse
from hase.runtimes.openvino.runs import CUT_US, SessionTimes, TimedSession, time_sessions
from hase.runtimes.protocol import Reply, Request, RuntimeSetting, serve
from hase.utils.errors import UserError
from hase.utils.lazy import networkx, onnx

IN_MODEL = "kernel_time"  # the label of kernels in a model or carrier
CANARY_SIDE = 384  # of the matrices: about two milliseconds
CANARY = "canary"
KERNEL = re.compile(r"k(\d+)/")  # the number of a kernel, in the names of its tensors in a carrier


@functools.cache
def _restrict_to_cores(setting: RuntimeSetting) -> None:
    """Restricts this process to its cores."""
    check_openvino()
    if setting.memory_limit_mib:
        raise UserError("memory_limit_mib: OpenVINO does not say how much memory a model will take; leave it out")
    setting.take_cores()


def threads_of(request: Request) -> int:
    """The threads of a request, after restricting this process to its setting's cores."""
    setting = request.setting or RuntimeSetting(level=FUSED)
    _restrict_to_cores(setting)
    return setting.threads


@functools.cache
def canary(threads: int) -> TimedSession:
    """A product of two matrices, ready for timing."""
    side = [CANARY_SIDE, CANARY_SIDE]
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, side) for name in "abc"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["a", "b"], ["c"])], CANARY, tensors[:2], tensors[2:])
    values = random_floats((CANARY_SIDE, CANARY_SIDE), "float32")
    compiled = compile_model(read_model(onnx.helper.make_model(graph), CANARY), CANARY, threads)
    return TimedSession(compiled, {"a": values, "b": values}, CANARY)


def time_canary(request: Request) -> Reply:
    """Times the canary."""
    return Reply(measurements=(Measurement(subject=CANARY, id=CANARY, label="run", context="alone", place="alone",
                                           samples_ms=canary(threads_of(request)).time(request.effort, layers=False).runs_ms),))


def kernel_times(name: str, label: str, place: Placement, samples_ms: Sequence[float], context: str = "") -> Measurement:
    return Measurement(subject="kernel", id=name, label=label, context=context or place, place=place,
                       samples_ms=tuple(round(sample, 6) for sample in samples_ms))


def time_alone(request: Request) -> Reply:
    """Times a kernel in its own session by the clock (label `run`)."""
    path, threads = Path(request.paths[0]), threads_of(request)
    built, kernel = read_built(path)
    model = read_model(built, path.stem)
    session = TimedSession(compile_model(model, path.stem, threads), dummy_inputs(kernel), path.stem)
    timed = session.time(request.effort, layers=False)
    return Reply(measurements=(kernel_times(kernel.id, "run", "alone", timed.runs_ms),))


def built_carrier(paths: Sequence[Path]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model with several built kernels side by side, and values for its inputs.

    OpenVINO runs them one after another and fuses nothing across them, since they share no tensor. As in a network, other
    kernels evict each one's weights from the near caches.
    """
    carrier, values = onnx.ModelProto(), dict[str, np.ndarray]()
    for number, path in enumerate(paths):
        built, kernel = read_built(path)
        part = onnx.compose.add_prefix(built, prefix=f"k{number}/", inplace=True)
        values |= {f"k{number}/{name}": value for name, value in dummy_inputs(kernel).items()}
        for node in part.graph.node:
            carrier.graph.node.append(node)
        for field in ("input", "output", "initializer"):
            getattr(carrier.graph, field).extend(getattr(part.graph, field))
        if not number:
            carrier.ir_version = part.ir_version
            carrier.opset_import.extend(part.opset_import)
    carrier.graph.name = "carrier"
    return carrier, values


def layers_by_kernel(layers: Mapping[str, Layer]) -> dict[int, list[str]]:
    """The layers of each kernel of a carrier, by kernel index. Copies to other memory layouts, inserted by OpenVINO, do not
    count: in a network they are separate kernels."""
    graph: Any = networkx.Graph()
    graph.add_nodes_from(layers)
    graph.add_edges_from((source, layer.name) for layer in layers.values() for source in layer.sources)
    by_kernel: dict[int, list[str]] = {}
    for part in networkx.connected_components(graph):
        numbers = {int(number) for name in part for number in KERNEL.findall(name)}
        for number in numbers:
            by_kernel[number] = [name for name in part if layers[name].computes and not layers[name].inserted]
    return by_kernel


def time_carrier(request: Request) -> Reply:
    """Times several kernels side by side, in a model per operator set (label `kernel_time`)."""
    threads, by_opsets = threads_of(request), defaultdict(list)
    for path in map(Path, request.paths):
        opsets = onnx.load(path, load_external_data=False).opset_import
        by_opsets[tuple(sorted((opset.domain, opset.version) for opset in opsets))].append(path)
    return Reply(measurements=tuple(measured for paths in by_opsets.values()
                                    for measured in side_by_side(paths, request.effort, threads)))


def side_by_side(paths: Sequence[Path], effort: Effort, threads: int) -> Iterator[Measurement]:
    """Times built kernels with the same operator set side by side (label `kernel_time`)."""
    proto, values = built_carrier(paths)
    model = read_model(proto, "carrier")
    layers = layers_by_kernel(layers_by_name(compile_model(model, "carrier", threads), "carrier", {}))
    sessions = time_sessions(model, values, "carrier", effort, threads)
    for number, path in enumerate(paths):
        yield kernel_times(path.stem, IN_MODEL, "carrier", [sum_ms(timed, layers.get(number, ())) for timed in sessions])


def sum_ms(timed: SessionTimes, layers: Sequence[str]) -> float:
    """The total time of some layers, at least the resolution of OpenVINO's clock."""
    return max(sum(timed.layers_ms.get(name, 0.0) for name in layers), 1e-3 * CUT_US)


def parsed_model(request: Request, threads: int) -> OpenvinoModel:
    """The analysed model of a request."""
    parsed = parse(Path(request.paths[0]), request.dims, threads)
    if request.record and not parsed.record.same_kernels(read_model_record(Path(request.record))):
        raise UserError(f"{request.paths[0]}: OpenVINO's graph is not the one in its record; make the record anew: {REMAKE}")
    return parsed


def model_sessions(parsed: OpenvinoModel, effort: Effort, threads: int) -> list[SessionTimes]:
    """A model's times in several sessions, with random inputs (zeros for integers)."""
    inputs = {name: random_floats(tensor.shape, tensor.dtype) if "float" in tensor.dtype else zeros(tensor.shape, tensor.dtype)
              for name, tensor in parsed.record.inputs.items()}
    return time_sessions(parsed.model, inputs, parsed.record.model, effort, threads)


def kernels_in_model(parsed: OpenvinoModel, sessions: Sequence[SessionTimes]) -> Iterator[Measurement]:
    """The times of a model's kernels (label `kernel_time`): per session, the mean over the nodes with the kernel."""
    record, times_ms = parsed.record, defaultdict(list)
    for node, layers in zip(record.nodes, parsed.layers, strict=True):
        if record.kernel_of(node).moves_data:
            times_ms[node.kernel_id].append([sum_ms(timed, layers) for timed in sessions])
    for name, node_times_ms in times_ms.items():
        yield kernel_times(name, IN_MODEL, "in_model", np.mean(node_times_ms, axis=0).tolist(), record.model)


def latency_of(request: Request, sessions: Sequence[SessionTimes]) -> Measurement:
    return Measurement(subject="model", id=request.model_name, label="latency", context=request.model_name, place="alone",
                       samples_ms=tuple(round(sample, 6) for timed in sessions for sample in timed.runs_ms))


def time_model(request: Request) -> Reply:
    """Times a whole model and, if requested, its kernels in it."""
    threads = threads_of(request)
    parsed = parsed_model(request, threads)
    sessions = model_sessions(parsed, request.effort, threads)
    latency = latency_of(request, sessions)
    return Reply(measurements=(latency, *(kernels_in_model(parsed, sessions) if IN_MODEL in request.labels else ())))


def time_kernels_in_model(request: Request) -> Reply:
    """Times only a model's kernels in it."""
    threads = threads_of(request)
    parsed = parsed_model(request, threads)
    return Reply(measurements=tuple(kernels_in_model(parsed, model_sessions(parsed, request.effort, threads))))


def time_session(request: Request) -> Reply:
    """Times a whole model without a record, and reads its memory."""
    threads = threads_of(request)
    parsed = parse(Path(request.paths[0]), request.dims, threads)
    memory = HeldMemory("cpu")
    memory.opened()
    sessions = model_sessions(parsed, request.effort, threads)
    return Reply(measurements=(latency_of(request, sessions),), memory_mib=memory.peak_mib)


def prepare(request: Request) -> Reply:
    """Loads OpenVINO and runs the canary."""
    time_canary(request)
    return Reply()


WORK: dict[str, Callable[[Request], Reply]] = {
    "alone": time_alone, "carrier": time_carrier, "model": time_model, "model_labels": time_kernels_in_model,
    "session": time_session, "canary": time_canary, "prepare": prepare}


if __name__ == "__main__":
    serve(WORK)
