"""Reads models into OpenVINO, compiles them for this CPU, and describes the compiled graph's layers.

OpenVINO gets a model with fixed sizes, folded constants, and ONNX nodes named by their indices. Each layer of the compiled
graph lists the nodes that it computes by name, so names must be unique.

A layer is a step of OpenVINO's graph: mostly several ONNX nodes (`originalLayersNames`), sometimes a part of a node, or an
inserted copy of a tensor into another memory layout.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hase.ort_analysis.graph.shapes import constant_inputs
from hase.ort_analysis.graph.source import Source
from hase.records.kernel_record import KernelInput, Tensor
from hase.records.operators import operator_row
from hase.utils.errors import UserError
from hase.utils.fingerprint import physical_cores
from hase.utils.lazy import onnx, openvino
from hase.utils.model_files import read_whole_model, tensor_array

if TYPE_CHECKING:
    import onnx.reference


NAME = "openvino"  # of the package, and of the runtime
FUSED = "fused"  # the only level: the kernels that OpenVINO makes of operators
REMAKE = "python ort_analysis/fusion_detector.py --runtime openvino"  # makes the records of models
INSTALL = "pip install '.[openvino]'"
NODE_INDEX = re.compile(r"(?:^|[,/ ])(\d+)#")  # index of a node, in OpenVINO's names
SHAPE = "Shape"
CONSTANT, INPUT, OUTPUT = "Const", "Input", "Output"  # kinds of layers that compute nothing
INSERTED = ("Reorder", "Convert")  # kinds that OpenVINO inserts, then without layers of the original model
# Copying this much takes longer than a microsecond, the resolution of OpenVINO's times. So a layer with such an output and a
# time of 0 does not copy: its output lies where its input does.
COPIED_BYTES = 1 << 14


def check_openvino() -> None:
    """Checks that OpenVINO is installed."""
    if find_spec(NAME) is None:
        raise UserError(f"the package openvino is not installed, and this needs it; {INSTALL}")


def compile_model(model: Any, name: str, threads: int = 0) -> Any:
    """Compiles an OpenVINO model for this CPU, with timed layers. `threads` 0: one per physical core; `name` is for messages.

    In float32, since OpenVINO would use bfloat16 on CPUs that have it. Threads are not pinned, as for a target without `cores`.
    """
    options = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "PERF_COUNT": True,
               "ENABLE_CPU_PINNING": False, "INFERENCE_NUM_THREADS": threads or physical_cores()}
    try:
        return openvino.Core().compile_model(model, "CPU", options)
    except RuntimeError as error:
        raise openvino_error(name, error) from error


def openvino_error(name: str, error: Exception) -> UserError:
    """The error for a model that OpenVINO can't read, compile or run, with the last line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(f"{name}: OpenVINO can't take this model: {lines[-1] if lines else type(error).__name__}")


@dataclass(frozen=True)
class PreparedModel:
    """A model that OpenVINO can compile."""

    source: Source  # the model as the user gave it
    nodes: tuple[onnx.NodeProto, ...]  # its ONNX nodes that are left, in order
    names: tuple[str, ...]  # the names that they had
    tensors: Mapping[str, KernelInput]  # by name, constants with their small values
    opset: int  # of ONNX's own operators
    inputs: tuple[str, ...]  # inputs, outputs: of the graph, by name
    outputs: tuple[str, ...]
    model: Any  # OpenVINO's, not compiled


def prepare_model(source: Source) -> PreparedModel:
    """Reads a model into OpenVINO."""
    check_openvino()
    proto = (read_whole_model(source.loadable) if isinstance(source.loadable, Path)
             else onnx.load_model_from_string(source.loadable))
    fix_sizes(proto, source.dims)
    reads_shapes = any(node.op_type == SHAPE for node in proto.graph.node)
    shapes = static_tensors(read_model(proto, source.name)) if reads_shapes else {}
    fold_constants(proto, shapes)
    names = tuple(node.name or (node.output[0] if node.output else "") for node in proto.graph.node)
    for index, node in enumerate(proto.graph.node):
        node.name = node_name(index, node.op_type)
    model = read_model(proto, source.name)
    tensors = {name: KernelInput(**tensor.model_dump()) for name, tensor in (shapes | static_tensors(model)).items()}
    constants = constant_inputs(proto.graph)
    return PreparedModel(
        source, tuple(proto.graph.node), names, tensors | constants,
        next((opset.version for opset in proto.opset_import if opset.domain in ("", "ai.onnx")), 1),
        tuple(value.name for value in proto.graph.input if value.name not in constants),
        tuple(value.name for value in proto.graph.output), model)


def node_name(index: int, op_type: str) -> str:
    """A node's name; NODE_INDEX finds the index in it."""
    return f"{index}#{op_type}"


def fix_sizes(proto: onnx.ModelProto, dims: Mapping[str, int]) -> None:
    """Replaces dynamic dimensions of a model's inputs by sizes."""
    for value in proto.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]


def read_model(proto: onnx.ModelProto, name: str) -> Any:
    """OpenVINO's version of an ONNX model."""
    try:
        return openvino.Core().read_model(proto.SerializeToString())
    except (RuntimeError, ValueError) as error:  # ValueError: protobuf writes at most 2 GiB
        raise openvino_error(name, error) from error


def static_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of OpenVINO's model with ONNX's names and fixed shapes."""
    return {name: Tensor(dtype=str(np.dtype(output.get_element_type().to_dtype())), shape=tuple(output.get_shape()))
            for node in model.get_ordered_ops() for output in node.outputs() if output.get_partial_shape().is_static
            for name in output.get_names()}


def fold_constants(proto: onnx.ModelProto, shapes: Mapping[str, Tensor]) -> None:
    """Replaces nodes that do not depend on the model's inputs by constants, like OpenVINO."""
    graph = proto.graph
    constants = {tensor.name: tensor_array(tensor) for tensor in graph.initializer}
    kept = []
    for node in graph.node:
        values = dict(folded_outputs(node, constants, shapes, proto.opset_import))
        constants |= values
        if values:
            graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def folded_outputs(node: onnx.NodeProto, constants: Mapping[str, np.ndarray], shapes: Mapping[str, Tensor],
                   opsets: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The outputs of a node by name, if constants and shapes alone determine them."""
    if node.op_type == SHAPE and node.input[0] in shapes and not node.attribute:
        yield node.output[0], np.array(shapes[node.input[0]].shape, np.int64)
        return
    inputs, outputs = (list(dict.fromkeys(filter(None, names))) for names in (node.input, node.output))
    if (operator_row(node.op_type).random or not constants.keys() >= set(inputs)
            or any(attribute.HasField("g") for attribute in node.attribute)):
        return
    graph = onnx.helper.make_graph([node], "node", [onnx.ValueInfoProto(name=name) for name in inputs],
                                   [onnx.ValueInfoProto(name=name) for name in outputs])
    try:
        evaluator = onnx.reference.ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets))
        values = evaluator.run(None, {name: constants[name] for name in inputs})
    except Exception:  # noqa: BLE001  ONNX's evaluator raises all sorts where it lacks an operator; OpenVINO then computes it
        return
    yield from zip(outputs, map(np.asarray, values), strict=True)


class Layer(NamedTuple):
    """A layer of a compiled graph."""

    name: str  # unique in the graph; OpenVINO's times have it
    kind: str  # OpenVINO's name of its operation
    layout: str  # the order of its first output's dimensions in memory: `abcd` is ONNX's own, `acdb` has the channels last
    output: Tensor  # its first output
    nodes: frozenset[int]  # the indices of the ONNX nodes in it
    sources: tuple[str, ...]  # the layers that it reads, without constants
    inserted: bool  # whether OpenVINO inserted it, to copy a tensor: it is a kernel of its own, and computes no ONNX node
    in_place: bool  # whether its output lies where its input does, so that it takes no time

    @property
    def computes(self) -> bool:
        return self.kind not in (INPUT, OUTPUT)


def times_us(request: Any) -> dict[str, float]:
    """The mean time per layer over all runs of a request's model so far, in whole microseconds; 0 if a layer does not run."""
    return {timed.node_name: timed.real_time.total_seconds() * 1e6 for timed in request.get_profiling_info()}


def layers_by_name(compiled: Any, name: str, writers: Mapping[str, int]) -> dict[str, Layer]:
    """The layers of a compiled model by name, in running order, without constants. Runs the model once. `writers`: by tensor
    name, the index of the ONNX node that writes it."""
    request = compiled.create_infer_request()
    zeros = {port: np.zeros(tuple(port.shape), port.get_element_type().to_dtype()) for port in compiled.inputs}
    try:
        request.infer(zeros, share_inputs=True)
    except RuntimeError as error:
        raise openvino_error(name, error) from error
    first_us = times_us(request)
    layers: dict[str, Layer] = {}
    for operation in compiled.get_runtime_model().get_ordered_ops():
        facts = {key: value.value if hasattr(value, "value") else value for key, value in operation.get_rt_info().items()}
        layer, kind = operation.get_friendly_name(), str(facts["layerType"])
        before = [port.get_node().get_friendly_name() for port in operation.input_values()]
        sources = tuple(source for source in before if source in layers)
        if kind == CONSTANT or (before and not sources):
            continue
        names = str(facts["originalLayersNames"])
        indices = {int(index) for index in NODE_INDEX.findall(names)}
        if kind not in (INPUT, OUTPUT):  # the layer that writes an output of the model has the output's name
            indices |= {writers[tensor] for tensor in (layer, *names.split(",")) if tensor in writers}
        port = operation.outputs()[0] if operation.outputs() else operation.input_values()[0]
        output = Tensor(dtype=str(np.dtype(port.get_element_type().to_dtype())), shape=tuple(port.get_shape()))
        layers[layer] = Layer(layer, kind, str(facts["outputLayouts"]).split(",")[0], output, frozenset(indices), sources,
                              inserted=kind in INSERTED and not names,
                              in_place=not first_us.get(layer, 0.0) and output.bytes >= COPIED_BYTES)
    return layers


def readers_by_layer(layers: Mapping[str, Layer]) -> dict[str, list[str]]:
    """The layers that read each layer, by name."""
    readers: dict[str, list[str]] = defaultdict(list)
    for layer in layers.values():
        for source in layer.sources:
            readers[source].append(layer.name)
    return readers
