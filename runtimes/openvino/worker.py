"""The process that runs kernels and models under OpenVINO for the collector. Speaks runtimes/protocol.py."""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.benchmark.measuring.held_memory import HeldMemory
from hase.benchmark.measuring.run_times import Effort
from hase.kernel_model.building.dummy_data import dummy_inputs, random_floats
from hase.kernel_model.building.kernel_models import read_built
from hase.records.kernel_record import zeros
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import Measurement, Place
from hase.runtimes.openvino.layers import Layer, layers_of
from hase.runtimes.openvino.package import FUSED, REMAKE, check_openvino, compile_model
from hase.runtimes.openvino.prepared import read
from hase.runtimes.openvino.recording import Parsed, parse
from hase.runtimes.openvino.runs import CUT_US, Session, Timed, time_sessions
from hase.runtimes.protocol import Reply, Request, Setting, serve
from hase.utils.errors import UserError
from hase.utils.lazy import networkx, onnx

IN_MODEL = "kernel_time"
CANARY_SIDE = 384  # of the matrices: about two milliseconds
NAME = "canary"
KERNEL = re.compile(r"k(\d+)/")  # the number of a kernel, in the names of its tensors in a carrier


@functools.cache
def settled(setting: Setting) -> None:
    """Gives this process its cores.

    Raises:
        UserError: there are fewer cores; or a memory limit is asked for, which this runtime does not have.
    """
    check_openvino()
    allowed = sorted(os.sched_getaffinity(0))
    if setting.cores > len(allowed):
        raise UserError(f"cores: {setting.cores}, but this process may use {len(allowed)}")
    if setting.memory_limit_mib:
        raise UserError("memory_limit_mib: OpenVINO does not say how much memory a model will take; leave it out")
    if setting.cores:
        os.sched_setaffinity(0, allowed[:setting.cores])


def threads_of(request: Request) -> int:
    """The threads of a request, in a process with the cores of its setting.

    Raises:
        UserError: there are fewer cores; or a memory limit is asked for, which this runtime does not have.
    """
    setting = request.setting or Setting(level=FUSED)
    settled(setting)
    return setting.threads


@functools.cache
def canary(threads: int) -> Session:
    """A product of two matrices."""
    side = [CANARY_SIDE, CANARY_SIDE]
    described = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, side) for name in "abc"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["a", "b"], ["c"])], NAME, described[:2], described[2:])
    values = random_floats((CANARY_SIDE, CANARY_SIDE), "float32")
    return Session(compile_model(read(onnx.helper.make_model(graph), NAME), NAME, threads), {"a": values, "b": values}, NAME)


def time_canary(request: Request) -> Reply:
    """The canary, as often as the effort says."""
    return Reply(measurements=(Measurement(subject=NAME, id=NAME, label="run", context="alone", place="alone",
                                           samples_ms=canary(threads_of(request)).time(request.effort, layers=False).runs_ms),))


def of_kernel(name: str, label: str, place: Place, samples_ms: Sequence[float], context: str = "") -> Measurement:
    return Measurement(subject="kernel", id=name, label=label, context=context or place, place=place,
                       samples_ms=tuple(round(sample, 6) for sample in samples_ms))


def time_alone(request: Request) -> Reply:
    """Label `run`: a kernel in a session of its own, by the clock."""
    path, threads = Path(request.paths[0]), threads_of(request)
    built, kernel = read_built(path)
    model = read(built, path.stem)
    session = Session(compile_model(model, path.stem, threads), dummy_inputs(kernel), path.stem)
    timed = session.time(request.effort, layers=False)
    return Reply(measurements=(of_kernel(kernel.id, "run", "alone", timed.runs_ms),))


def built_carrier(paths: Sequence[Path]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model that holds several built kernels side by side, and values for its inputs.

    OpenVINO runs one after another, and fuses nothing across them, since they share no tensor. The weights of each are out of
    the near caches when its turn comes, as in a network.
    """
    whole, values = onnx.ModelProto(), dict[str, np.ndarray]()
    for number, path in enumerate(paths):
        built, kernel = read_built(path)
        part = onnx.compose.add_prefix(built, prefix=f"k{number}/", inplace=True)
        values |= {f"k{number}/{name}": value for name, value in dummy_inputs(kernel).items()}
        for node in part.graph.node:
            whole.graph.node.append(node)
        for field in ("input", "output", "initializer"):
            getattr(whole.graph, field).extend(getattr(part.graph, field))
        if not number:
            whole.ir_version = part.ir_version
            whole.opset_import.extend(part.opset_import)
    whole.graph.name = "carrier"
    return whole, values


def layers_by_kernel(layers: Mapping[str, Layer]) -> dict[int, list[str]]:
    """The layers of each kernel of a carrier, by its number. Copies to other memory layouts, which OpenVINO inserted, do not
    count: in a network, they are kernels of their own."""
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
    """Label `kernel_time` of several kernels, side by side in a model for each operator set."""
    threads, by_opsets = threads_of(request), defaultdict(list)
    for path in map(Path, request.paths):
        opsets = onnx.load(path, load_external_data=False).opset_import
        by_opsets[tuple(sorted((opset.domain, opset.version) for opset in opsets))].append(path)
    return Reply(measurements=tuple(measured for paths in by_opsets.values()
                                    for measured in side_by_side(paths, request.effort, threads)))


def side_by_side(paths: Sequence[Path], effort: Effort, threads: int) -> Iterator[Measurement]:
    """Label `kernel_time` of built kernels of one operator set."""
    proto, values = built_carrier(paths)
    model = read(proto, "carrier")
    layers = layers_by_kernel(layers_of(compile_model(model, "carrier", threads), "carrier", {}))
    sessions = time_sessions(model, values, "carrier", effort, threads)
    for number, path in enumerate(paths):
        yield of_kernel(path.stem, IN_MODEL, "carrier", [sum_ms(timed, layers.get(number, ())) for timed in sessions])


def sum_ms(timed: Timed, layers: Sequence[str]) -> float:
    """The time of some layers together; at least what OpenVINO's clock can tell from nothing."""
    return max(sum(timed.layers_ms.get(name, 0.0) for name in layers), 1e-3 * CUT_US)


def parsed_model(request: Request, threads: int) -> Parsed:
    """A model taken apart.

    Raises:
        UserError: OpenVINO's graph is not the one in its record.
    """
    parsed = parse(Path(request.paths[0]), request.dims, threads)
    if request.record:
        record = read_model_record(Path(request.record))
        if [node.kernel_id for node in parsed.record.nodes] != [node.kernel_id for node in record.nodes]:
            raise UserError(f"{request.paths[0]}: OpenVINO's graph is not the one in its record; make the record anew: "
                            f"{REMAKE}")
    return parsed


def model_sessions(parsed: Parsed, effort: Effort, threads: int) -> list[Timed]:
    """The times of a model in some sessions, with random numbers as inputs, and zeros for whole numbers."""
    inputs = {name: random_floats(tensor.shape, tensor.dtype) if "float" in tensor.dtype else zeros(tensor.shape, tensor.dtype)
              for name, tensor in parsed.record.inputs.items()}
    return time_sessions(parsed.model, inputs, parsed.record.model, effort, threads)


def kernels_in_model(parsed: Parsed, sessions: Sequence[Timed]) -> Iterator[Measurement]:
    """Label `kernel_time` of a model's kernels: of each session, the mean of the nodes that run the kernel."""
    record, of_kernels = parsed.record, defaultdict(list)
    for node, layers in zip(record.nodes, parsed.layers, strict=True):
        if record.kernel_of(node).moves_data:
            of_kernels[node.kernel_id].append([sum_ms(timed, layers) for timed in sessions])
    for name, of_nodes in of_kernels.items():
        yield of_kernel(name, IN_MODEL, "in_model", np.mean(of_nodes, axis=0).tolist(), record.model)


def time_model(request: Request) -> Reply:
    """A whole model's latency and, if asked for, the times of its kernels in it."""
    threads = threads_of(request)
    parsed = parsed_model(request, threads)
    sessions = model_sessions(parsed, request.effort, threads)
    latency = Measurement(subject="model", id=request.model_name, label="latency", context=request.model_name, place="alone",
                          samples_ms=tuple(round(sample, 6) for timed in sessions for sample in timed.runs_ms))
    return Reply(measurements=(latency, *(kernels_in_model(parsed, sessions) if IN_MODEL in request.labels else ())))


def time_kernels_in_model(request: Request) -> Reply:
    """The times of a model's kernels in it, alone."""
    threads = threads_of(request)
    parsed = parsed_model(request, threads)
    return Reply(measurements=tuple(kernels_in_model(parsed, model_sessions(parsed, request.effort, threads))))


def time_session(request: Request) -> Reply:
    """As `time_model`, without a record, and with the memory that the model holds."""
    threads = threads_of(request)
    parsed = parse(Path(request.paths[0]), request.dims, threads)
    memory = HeldMemory("cpu")
    memory.opened()
    sessions = model_sessions(parsed, request.effort, threads)
    return Reply(measurements=(Measurement(
        subject="model", id=request.model_name, label="latency", context=request.model_name, place="alone",
        samples_ms=tuple(sample for timed in sessions for sample in timed.runs_ms)),),
        memory_mib=memory.peak_mib)


def prepare(request: Request) -> Reply:
    """Loads OpenVINO and runs something."""
    time_canary(request)
    return Reply()


WORK: dict[str, Callable[[Request], Reply]] = {
    "alone": time_alone, "carrier": time_carrier, "model": time_model, "model_labels": time_kernels_in_model,
    "session": time_session, "canary": time_canary, "prepare": prepare}


def main() -> None:
    serve(WORK)


if __name__ == "__main__":
    main()
