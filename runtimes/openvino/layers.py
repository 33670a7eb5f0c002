"""The layers of a compiled graph.

A layer is a step of OpenVINO's own graph: mostly several ONNX nodes in one (`originalLayersNames`), sometimes a part of a node,
or a copy of a tensor into another memory layout, which OpenVINO inserts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hase.records.kernel_record import Tensor
from hase.runtimes.openvino.package import refused
from hase.runtimes.openvino.prepared import PLACE

CONSTANT, INPUT, OUTPUT = "Const", "Input", "Output"  # kinds of layers that compute nothing
INSERTED = ("Reorder", "Convert")  # kinds that OpenVINO inserts; they then stand for no layer of the model as it was read
# A layer that copies this much takes longer than a microsecond, the resolution of OpenVINO's times, so one that takes less does
# not copy: its output lies where its input does.
COPIED_BYTES = 1 << 14


class Layer(NamedTuple):
    """A layer of a compiled graph.

    Attributes:
        name: unique in the graph; OpenVINO's times have it.
        kind: OpenVINO's name of its operation.
        layout: the order of its first output's dimensions in memory: `abcd` is ONNX's own, `acdb` has the channels last.
        output: its first output.
        nodes: the places of the ONNX nodes in it.
        sources: the layers that it reads, without constants.
        inserted: whether OpenVINO inserted it, to copy a tensor: it is a kernel of its own, and computes no ONNX node.
        in_place: whether its output lies where its input does, so that it takes no time.
    """

    name: str
    kind: str
    layout: str
    output: Tensor
    nodes: frozenset[int]
    sources: tuple[str, ...]
    inserted: bool
    in_place: bool

    @property
    def computes(self) -> bool:
        return self.kind not in (INPUT, OUTPUT)


def zero_inputs(compiled: Any) -> dict[Any, np.ndarray]:
    """Zeros for the inputs of a compiled model."""
    return {port: np.zeros(tuple(port.shape), port.get_element_type().to_dtype()) for port in compiled.inputs}


def times_us(request: Any) -> dict[str, float]:
    """By layer, the mean time of all runs of a request's model so far, in whole microseconds; layers that do not run have 0."""
    return {timed.node_name: timed.real_time.total_seconds() * 1e6 for timed in request.get_profiling_info()}


def layers_of(compiled: Any, name: str, made_by: Mapping[str, int]) -> dict[str, Layer]:
    """The layers of a compiled model by name, in the order in which they run, without constants. Runs the model once.

    Args:
        compiled: the model.
        name: of the model, for messages.
        made_by: by the name of a tensor, the place of the ONNX node that writes it.

    Raises:
        UserError: OpenVINO can't run it.
    """
    request = compiled.create_infer_request()
    try:
        request.infer(zero_inputs(compiled), share_inputs=True)
    except RuntimeError as error:
        raise refused(name, error) from error
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
        places = {int(place) for place in PLACE.findall(names)}
        if kind not in (INPUT, OUTPUT):  # the layer that writes an output of the model has the output's name
            places |= {made_by[tensor] for tensor in (layer, *names.split(",")) if tensor in made_by}
        port = operation.outputs()[0] if operation.outputs() else operation.input_values()[0]
        output = Tensor(dtype=str(np.dtype(port.get_element_type().to_dtype())), shape=tuple(port.get_shape()))
        layers[layer] = Layer(layer, kind, str(facts["outputLayouts"]).split(",")[0], output, frozenset(places), sources,
                              inserted=kind in INSERTED and not names,
                              in_place=not first_us.get(layer, 0.0) and output.bytes >= COPIED_BYTES)
    return layers


def readers_of(layers: Mapping[str, Layer]) -> dict[str, list[str]]:
    """By layer, the layers that read it."""
    readers: dict[str, list[str]] = defaultdict(list)
    for layer in layers.values():
        for source in layer.sources:
            readers[source].append(layer.name)
    return readers
