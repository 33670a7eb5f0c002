"""Converts models: quantised, in half precision, or as ONNX Runtime saves them."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.utils.lazy import onnx, onnxruntime
from hase.utils.ort_sessions import open_session

Write = Callable[[Path], None]
IN_SINGLE = ("Softmax", "LayerNormalization", "GlobalAveragePool", "ReduceMean", "Resize")  # operators that stay in float32
HALF_LIMIT = 65504.0  # the largest number of float16


@contextlib.contextmanager
def written(write: Write) -> Iterator[Path]:
    """The path of the model that `write` writes; it is removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix="hase-kinds-") as folder:
        path = Path(folder) / "model.onnx"
        write(path)
        yield path


class RandomFeeds:
    """Calibration data for onnxruntime.quantization: a few random batches."""

    def __init__(self, path: Path, batches: int = 2) -> None:
        session = open_session(path, "cpu", optimize="none")
        generator = np.random.default_rng(0)
        shapes = {model_input.name: model_input.shape for model_input in session.get_inputs()}
        self._feeds = iter([{name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
                            for _ in range(batches)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def write_static_int8(path: Path, write: Write, as_qdq: bool) -> None:
    """Quantises a model to 8 bits by calibration: with QuantizeLinear and DequantizeLinear, or with integer operators."""
    logging.disable(logging.WARNING)
    with written(write) as plain:
        prepared = plain.with_name("prepared.onnx")
        onnxruntime.quantization.shape_inference.quant_pre_process(plain, prepared, skip_symbolic_shape=True)
        reader: Any = RandomFeeds(prepared)
        formats, types = onnxruntime.quantization.QuantFormat, onnxruntime.quantization.QuantType
        onnxruntime.quantization.quantize_static(
            prepared, path, reader, quant_format=formats.QDQ if as_qdq else formats.QOperator, per_channel=False,
            activation_type=types.QUInt8, weight_type=types.QInt8)


def write_dynamic_int8(path: Path, write: Write) -> None:
    """Quantises a model's weights to 8 bits; activations are quantised while the model runs."""
    logging.disable(logging.WARNING)
    with written(write) as plain:
        onnxruntime.quantization.quantize_dynamic(plain, path, weight_type=onnxruntime.quantization.QuantType.QUInt8)


def write_mixed_fp16(path: Path, write: Write, single: Sequence[str] = IN_SINGLE) -> None:
    """Converts a model to float16, with inputs and outputs in float32. The operators `single` compute in float32, with casts
    around them.

    Every float32 tensor becomes float16, except those that the operators in `single` read and write.
    """
    with written(write) as plain:
        proto = onnx.shape_inference.infer_shapes(onnx.load(plain))
    graph = proto.graph
    single_typed = {value.name for value in [*graph.value_info, *graph.input, *graph.output]
                    if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    nodes: list[onnx.NodeProto] = []
    renamed: dict[str, str] = {}
    for value in graph.input:
        if value.name in single_typed and value.name not in weights:
            renamed[value.name] = f"{value.name}_half"
            nodes.append(onnx.helper.make_node("Cast", [value.name], [renamed[value.name]], to=onnx.TensorProto.FLOAT16))
    for number, node in enumerate(graph.node):
        names = [renamed.get(name, name) for name in node.input]
        outputs = list(node.output)
        if node.op_type in single:
            for place, name in enumerate(node.input):
                if name in single_typed or name in weights:
                    single_name = names[place] = f"{name}_single_{number}"
                    half_name = renamed.get(name, name)
                    nodes.append(onnx.helper.make_node("Cast", [half_name], [single_name], to=onnx.TensorProto.FLOAT))
            outputs = [f"{name}_single" if name in single_typed else name for name in node.output]
        made = onnx.helper.make_node(node.op_type, names, outputs, name=node.name, domain=node.domain)
        made.attribute.extend(node.attribute)
        for attribute in made.attribute:
            if node.op_type == "Constant" and attribute.t.data_type == onnx.TensorProto.FLOAT:
                attribute.t.CopyFrom(_half(attribute.t))
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.FLOAT16
        nodes.append(made)
        if node.op_type in single:
            nodes += [onnx.helper.make_node("Cast", [f"{name}_single"], [name], to=onnx.TensorProto.FLOAT16)
                      for name in node.output if name in single_typed]
    for value in graph.output:
        if value.name in single_typed:
            nodes = [_with_output(node, value.name, f"{value.name}_half") for node in nodes]
            nodes.append(onnx.helper.make_node("Cast", [f"{value.name}_half"], [value.name], to=onnx.TensorProto.FLOAT))
    for tensor in weights.values():
        tensor.CopyFrom(_half(tensor))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    onnx.save(proto, path)


def _half(tensor: onnx.TensorProto) -> onnx.TensorProto:
    values = np.clip(onnx.numpy_helper.to_array(tensor), -HALF_LIMIT, HALF_LIMIT).astype(np.float16)
    return onnx.numpy_helper.from_array(values, tensor.name)


def _with_output(node: onnx.NodeProto, old: str, new: str) -> onnx.NodeProto:
    """The node with a tensor renamed, in place."""
    for names in (node.input, node.output):
        for place, name in enumerate(names):
            if name == old:
                names[place] = new
    return node


def write_saved_by_ort(path: Path, write: Write, optimize: str, dims: dict[str, int] | None = None) -> None:
    """Writes the graph that ONNX Runtime's CPU provider saves: at level `all` with its own layouts, at `extended` with
    fusions."""
    with written(write) as plain:
        open_session(plain, "cpu", optimize=optimize, dims=dims, save_to=path)
