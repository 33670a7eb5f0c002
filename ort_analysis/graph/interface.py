"""Reads the inputs and outputs that an ONNX file declares."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hase.ort_analysis.graph.fitting_sizes import sizes_set_by_model
from hase.ort_analysis.graph.source import check_sound, open_dims
from hase.records.interface import Interface, OpenTensor
from hase.records.kernel_record import type_name
from hase.utils.lazy import onnx
from hase.utils.model_files import check_plain_file
from hase.utils.ort_sessions import model_errors


def interface_of(model: Path) -> Interface:
    """The inputs and outputs of the ONNX file `model`; its weights are not read. A dynamic dimension without a name is called
    `<input>.<axis>`.

    Raises:
        UserError: it can't be read, or is damaged.
    """
    check_plain_file(model)
    with model_errors(str(model)):
        proto = onnx.load(str(model), load_external_data=False)
    check_sound(proto, str(model))
    open_dims(proto)
    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in constants]
    return Interface(inputs=_tensors(inputs), outputs=_tensors(proto.graph.output),
                     set_by_model=sizes_set_by_model(proto, model.stem))


def _tensors(values: Iterable[onnx.ValueInfoProto]) -> dict[str, OpenTensor]:
    """The tensors among some values, by name."""
    return {value.name: OpenTensor(dtype=type_name(value.type.tensor_type.elem_type),
                                   shape=tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim))
            for value in values if value.type.HasField("tensor_type")}
