"""Writes graphs of kinds that no exporter writes (control flow, scikit-learn pipelines, …), and converts models to int8, half
precision, and ONNX Runtime's saved form.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.records.kernel_record import type_code
from hase.utils.lazy import onnx, onnxruntime
from hase.utils.ort_sessions import open_session

IR_VERSION = 10
ML = "ai.onnx.ml"


def weight(name: str, *shape: int, scale: float | None = None, dtype: str = "float32") -> onnx.TensorProto:
    """A random constant, always the same for the same name."""
    generator = np.random.default_rng([ord(letter) for letter in name])
    size = scale if scale is not None else 1.0 / np.sqrt(max(1, shape[0] if len(shape) < 3 else int(np.prod(shape[1:]))))
    return onnx.numpy_helper.from_array((generator.standard_normal(shape) * size).astype(dtype), name)


def numbers(name: str, values: Any, dtype: str = "int64") -> onnx.TensorProto:
    """A constant with given values."""
    return onnx.numpy_helper.from_array(np.asarray(values, dtype), name)


def value(name: str, shape: Sequence[int | str] | None, dtype: str = "float32") -> onnx.ValueInfoProto:
    """A graph's input or output."""
    return onnx.helper.make_tensor_value_info(name, type_code(dtype), shape)


def save(path: Path, nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto],
         outputs: Sequence[onnx.ValueInfoProto], constants: Sequence[onnx.TensorProto] = (), opset: int = 18,
         ml: int = 0) -> None:
    """Writes a checked model."""
    graph = onnx.helper.make_graph(list(nodes), path.stem, list(inputs), list(outputs), list(constants))
    opsets = [onnx.helper.make_opsetid("", opset), *([onnx.helper.make_opsetid(ML, ml)] if ml else [])]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    onnx.checker.check_model(proto)
    onnx.save(proto, path)


def node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **options: Any) -> onnx.NodeProto:
    """A node; `options` are its attributes and domain."""
    return onnx.helper.make_node(op_type, inputs, outputs, **options)


def write_loop(path: Path, trips: int = 12, width: int = 512) -> None:
    """Writes a Loop with a constant number of trips; each multiplies a state by a matrix and keeps it."""
    body = onnx.helper.make_graph(
        [node("MatMul", ["state", "w"], ["product"]), node("Add", ["product", "b"], ["sum"]), node("Tanh", ["sum"], ["next"]),
         node("Identity", ["next"], ["kept"]), node("Identity", ["go_on"], ["go_on_out"])],
        "body", [value("step", [], "int64"), value("go_on", [], "bool"), value("state", [8, width])],
        [value("go_on_out", [], "bool"), value("next", [8, width]), value("kept", [8, width])])
    save(path, [node("Loop", ["trips", "true", "x"], ["last", "all"], body=body)], [value("x", [8, width])],
         [value("last", [8, width]), value("all", [trips, 8, width])],
         [numbers("trips", trips), numbers("true", True, "bool"), weight("w", width, width), weight("b", width)])


def write_loop_by_input(path: Path, width: int = 512) -> None:
    """Writes the same Loop with its number of trips as a model input."""
    body = onnx.helper.make_graph(
        [node("MatMul", ["state", "w"], ["product"]), node("Tanh", ["product"], ["next"]),
         node("Identity", ["go_on"], ["go_on_out"])],
        "body", [value("step", [], "int64"), value("go_on", [], "bool"), value("state", [8, width])],
        [value("go_on_out", [], "bool"), value("next", [8, width])])
    save(path, [node("Loop", ["trips", "true", "x"], ["last"], body=body)],
         [value("trips", [], "int64"), value("x", [8, width])], [value("last", [8, width])],
         [numbers("true", True, "bool"), weight("w", width, width)])


def write_scan(path: Path, length: int = 24, width: int = 384) -> None:
    """Writes a recurrence over a sequence with Scan."""
    body = onnx.helper.make_graph(
        [node("MatMul", ["state", "w"], ["a"]), node("MatMul", ["item", "v"], ["b"]), node("Add", ["a", "b"], ["c"]),
         node("Tanh", ["c"], ["next"]), node("Identity", ["next"], ["kept"])],
        "body", [value("state", [4, width]), value("item", [4, width])], [value("next", [4, width]), value("kept", [4, width])])
    save(path, [node("Scan", ["start", "x"], ["last", "all"], body=body, num_scan_inputs=1)],
         [value("start", [4, width]), value("x", [length, 4, width])],
         [value("last", [4, width]), value("all", [length, 4, width])], [weight("w", width, width), weight("v", width, width)])


def write_if(path: Path, width: int = 768) -> None:
    """Writes an If decided by an input: one branch has three products, the other one."""
    def branch(name: str, steps: int) -> onnx.GraphProto:
        nodes, last = [], "x"
        for step in range(steps):
            nodes += [node("MatMul", [last, f"w{step}"], [f"{name}_p{step}"]),
                      node("Relu", [f"{name}_p{step}"], [f"{name}_{step}"])]
            last = f"{name}_{step}"
        return onnx.helper.make_graph(nodes, name, [], [value(last, [32, width])])

    save(path, [node("If", ["deep"], ["y"], then_branch=branch("long", 3), else_branch=branch("short", 1))],
         [value("deep", [], "bool"), value("x", [32, width])], [value("y", [32, width])],
         [weight(f"w{step}", width, width) for step in range(3)])


def write_gated_if(path: Path, width: int = 512) -> None:
    """Writes a cheap network that decides whether an expensive one runs: the condition depends on data."""
    then = onnx.helper.make_graph([node("MatMul", ["h", "w1"], ["t1"]), node("Relu", ["t1"], ["t2"]),
                              node("MatMul", ["t2", "w2"], ["t3"])], "deep", [], [value("t3", [64, width])])
    otherwise = onnx.helper.make_graph([node("Identity", ["h"], ["e"])], "early", [], [value("e", [64, width])])
    save(path, [node("MatMul", ["x", "w0"], ["h"]), node("ReduceMean", ["h"], ["m"], keepdims=0),
                node("Greater", ["m", "limit"], ["c"]), node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise)],
         [value("x", [64, width])], [value("y", [64, width])],
         [weight("w0", width, width), weight("w1", width, width), weight("w2", width, width), numbers("limit", 0.5, "float32")])


def write_nms_detector(path: Path, side: int = 128, width: int = 32, classes: int = 8) -> None:
    """Writes a one-stage detector: convolutions, boxes and scores per position, NonMaxSuppression, selected boxes."""
    positions = (side // 8) ** 2
    conv: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = []
    last = "image"
    for number in range(3):
        nodes += [node("Conv", [last, f"w{number}"], [f"c{number}"], strides=[2, 2], **conv),
                  node("LeakyRelu", [f"c{number}"], [f"r{number}"], alpha=0.1)]
        last = f"r{number}"
    nodes += [
        node("Conv", [last, "wb"], ["b0"], **conv), node("Reshape", ["b0", "box_shape"], ["b1"]),
        node("Transpose", ["b1"], ["boxes"], perm=[0, 2, 1]),
        node("Conv", [last, "ws"], ["s0"], **conv), node("Reshape", ["s0", "score_shape"], ["s1"]),
        node("Sigmoid", ["s1"], ["scores"]),
        node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["kept"]),
        node("Gather", ["kept", "two"], ["which"], axis=1), node("Squeeze", ["boxes", "zero"], ["flat"]),
        node("Gather", ["flat", "which"], ["found"], axis=0),
    ]
    save(path, nodes, [value("image", [1, 3, side, side])], [value("found", ["detections", 4]),
                                                            value("kept", ["detections", 3], "int64")],
         [weight("w0", width, 3, 3, 3), weight("w1", 2 * width, width, 3, 3), weight("w2", 4 * width, 2 * width, 3, 3),
          weight("wb", 4, 4 * width, 3, 3), weight("ws", classes, 4 * width, 3, 3), numbers("box_shape", [1, 4, positions]),
          numbers("score_shape", [1, classes, positions]), numbers("most", [50]), numbers("overlap", [0.5], "float32"),
          numbers("least", [0.4], "float32"), numbers("two", 2), numbers("zero", [0])])


def write_nonzero(path: Path, width: int = 512) -> None:
    """Writes a graph that selects rows by a condition on data (NonZero), then multiplies them."""
    save(path, [node("MatMul", ["x", "gate"], ["g"]), node("Greater", ["g", "limit"], ["c"]), node("NonZero", ["c"], ["n"]),
                node("Gather", ["n", "first"], ["rows"], axis=0), node("Gather", ["x", "rows"], ["chosen"], axis=0),
                node("MatMul", ["chosen", "w"], ["y"])],
         [value("x", [256, width])], [value("y", ["chosen_rows", width])],
         [weight("gate", width, 1), numbers("limit", 0.0, "float32"), numbers("first", 0), weight("w", width, width)])


def write_group_norm_21(path: Path, width: int = 64, side: int = 64) -> None:
    """Writes GroupNormalization of operator set 21, which ONNX Runtime expands as a function."""
    nodes, last = [], "image"
    for number in range(3):
        nodes += [node("Conv", [last, f"w{number}"], [f"c{number}"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
                  node("GroupNormalization", [f"c{number}", f"scale{number}", f"bias{number}"], [f"n{number}"], num_groups=8),
                  node("Relu", [f"n{number}"], [f"r{number}"])]
        last = f"r{number}"
    constants = [weight(f"w{number}", width, 3 if number == 0 else width, 3, 3) for number in range(3)]
    constants += [weight(f"{part}{number}", width, scale=1.0) for number in range(3) for part in ("scale", "bias")]
    save(path, nodes, [value("image", [1, 3, side, side])], [value(last, [1, width, side, side])], constants, opset=21)


def write_bf16(path: Path, width: int = 1024, whole: bool = False) -> None:
    """Writes linear layers with bfloat16 weights, cast to float32 before each product, or (`whole`) all in bfloat16."""
    nodes, constants, last = [], [], "x"
    if whole:
        nodes.append(node("Cast", ["x"], ["x16"], to=onnx.TensorProto.BFLOAT16))
        last = "x16"
    for number in range(4):
        plain = onnx.numpy_helper.to_array(weight(f"w{number}", width, width))
        bits = (np.ascontiguousarray(plain).view(np.uint32) >> 16).astype(np.uint16)  # the bits of bfloat16
        constants.append(onnx.helper.make_tensor(f"w{number}", type_code("bfloat16"), plain.shape, bits.tobytes(), raw=True))
        weight_name = f"w{number}"
        if not whole:
            nodes.append(node("Cast", [weight_name], [f"f{number}"], to=onnx.TensorProto.FLOAT))
            weight_name = f"f{number}"
        nodes += [node("MatMul", [last, weight_name], [f"p{number}"]), node("Relu", [f"p{number}"], [f"r{number}"])]
        last = f"r{number}"
    nodes.append(node("Cast", [last], ["y"], to=onnx.TensorProto.FLOAT))
    save(path, nodes, [value("x", [16, width])], [value("y", [16, width])], constants)


def _trees(trees: int, depth: int, features: int, targets: int) -> dict[str, Any]:
    """Full binary trees as attributes of TreeEnsembleClassifier."""
    generator = np.random.default_rng(0)
    split_nodes, all_nodes = 2**depth - 1, 2 ** (depth + 1) - 1
    attributes: dict[str, Any] = {key: [] for key in (
        "nodes_treeids", "nodes_nodeids", "nodes_featureids", "nodes_modes", "nodes_values", "nodes_truenodeids",
        "nodes_falsenodeids", "class_treeids", "class_nodeids", "class_ids", "class_weights")}
    for tree in range(trees):
        for index in range(all_nodes):
            split = index < split_nodes
            for key, entry in (("treeids", tree), ("nodeids", index), ("modes", "BRANCH_LEQ" if split else "LEAF"),
                               ("featureids", int(generator.integers(features)) if split else 0),
                               ("values", float(generator.standard_normal()) if split else 0.0),
                               ("truenodeids", 2 * index + 1 if split else 0), ("falsenodeids", 2 * index + 2 if split else 0)):
                attributes[f"nodes_{key}"].append(entry)
            if not split:
                for key, entry in (("treeids", tree), ("nodeids", index), ("ids", tree % targets),
                                   ("weights", float(generator.standard_normal()) / trees)):
                    attributes[f"class_{key}"].append(entry)
    return attributes


def write_forest(path: Path, trees: int = 200, depth: int = 8, features: int = 40, classes: int = 3) -> None:
    """Writes a scikit-learn pipeline: a scaler, a forest, and class probabilities as a sequence of maps."""
    nodes = [
        node("Scaler", ["x"], ["scaled"], domain=ML, offset=[0.1] * features, scale=[0.9] * features),
        node("TreeEnsembleClassifier", ["scaled"], ["label", "odds"], domain=ML, classlabels_int64s=list(range(classes)),
             post_transform="SOFTMAX", **_trees(trees, depth, features, classes)),
        node("ZipMap", ["odds"], ["probabilities"], domain=ML, classlabels_int64s=list(range(classes))),
    ]
    probability_maps = onnx.helper.make_sequence_type_proto(onnx.helper.make_map_type_proto(
        onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])))
    save(path, nodes, [value("x", ["rows", features])],
         [value("label", ["rows"], "int64"), onnx.helper.make_value_info("probabilities", probability_maps)], opset=17, ml=3)


def write_linear_pipeline(path: Path, features: int = 64, classes: int = 10) -> None:
    """Writes a scikit-learn pipeline: imputer, scaler, linear classifier, normaliser."""
    generator = np.random.default_rng(0)
    nodes = [
        node("Imputer", ["x"], ["filled"], domain=ML, imputed_value_floats=[0.0] * features, replaced_value_float=float("nan")),
        node("Scaler", ["filled"], ["scaled"], domain=ML, offset=[0.2] * features, scale=[1.1] * features),
        node("LinearClassifier", ["scaled"], ["label", "scores"], domain=ML, classlabels_ints=list(range(classes)),
             coefficients=generator.standard_normal(features * classes).tolist(), intercepts=[0.0] * classes,
             post_transform="SOFTMAX"),
        node("Normalizer", ["scores"], ["odds"], domain=ML, norm="L1"),
    ]
    save(path, nodes, [value("x", ["rows", features])],
         [value("label", ["rows"], "int64"), value("odds", ["rows", classes])], opset=17, ml=3)


def write_tiny(path: Path) -> None:
    """Writes an addition and a ReLU of eight numbers: only the cost of a run itself."""
    save(path, [node("Add", ["x", "b"], ["s"]), node("Relu", ["s"], ["y"])], [value("x", [1, 8])], [value("y", [1, 8])],
         [weight("b", 8)])


def write_large(path: Path, width: int = 5000, layers: int = 24) -> None:
    """Writes linear layers with `layers` · 4 · width² bytes of weights (2.4 GB) in a second file."""
    outside = path.with_suffix(".weights")
    generator = np.random.default_rng(0)
    nodes, constants, last = [], [], "x"
    with outside.open("wb") as file:
        for number in range(layers):
            tensor = onnx.TensorProto(name=f"w{number}", data_type=onnx.TensorProto.FLOAT, dims=[width, width],
                                 data_location=onnx.TensorProto.EXTERNAL)
            data = generator.random((width, width), np.float32)
            data -= 0.5
            data *= 2.0 / np.sqrt(width)
            for key, text in (("location", outside.name), ("offset", str(file.tell())), ("length", str(data.nbytes))):
                tensor.external_data.add(key=key, value=text)
            file.write(data.data)
            constants.append(tensor)
            nodes += [node("MatMul", [last, f"w{number}"], [f"p{number}"]), node("Relu", [f"p{number}"], [f"r{number}"])]
            last = f"r{number}"
    graph = onnx.helper.make_graph(nodes, path.stem, [value("x", [1, width])], [value(last, [1, width])], constants)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=IR_VERSION), path)


# conversions of models ---------------------------------------------------------------------------------------------------

Write = Callable[[Path], None]
IN_SINGLE = ("Softmax", "LayerNormalization", "GlobalAveragePool", "ReduceMean", "Resize")  # operators that stay in float32
HALF_LIMIT = 65504.0  # the largest number of float16


@contextlib.contextmanager
def temporary_model(write: Write) -> Iterator[Path]:
    """Writes a model with `write` to a temporary file, which is removed at the end of the block; gives its path."""
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
    """Quantises a model to 8 bits with calibration, by QuantizeLinear and DequantizeLinear or by integer operators."""
    logging.disable(logging.WARNING)
    with temporary_model(write) as plain:
        prepared = plain.with_name("prepared.onnx")
        onnxruntime.quantization.shape_inference.quant_pre_process(plain, prepared, skip_symbolic_shape=True)
        reader: Any = RandomFeeds(prepared)
        formats, types = onnxruntime.quantization.QuantFormat, onnxruntime.quantization.QuantType
        onnxruntime.quantization.quantize_static(
            prepared, path, reader, quant_format=formats.QDQ if as_qdq else formats.QOperator, per_channel=False,
            activation_type=types.QUInt8, weight_type=types.QInt8)


def write_dynamic_int8(path: Path, write: Write) -> None:
    """Quantises a model's weights to 8 bits; activations are quantised at run time."""
    logging.disable(logging.WARNING)
    with temporary_model(write) as plain:
        onnxruntime.quantization.quantize_dynamic(plain, path, weight_type=onnxruntime.quantization.QuantType.QUInt8)


def write_mixed_fp16(path: Path, write: Write, single: Sequence[str] = IN_SINGLE) -> None:
    """Converts a model to float16, except inputs, outputs and the operators in `single`, which compute in float32."""
    with temporary_model(write) as plain:
        proto = onnx.shape_inference.infer_shapes(onnx.load(plain))
    graph = proto.graph
    single_typed = {info.name for info in [*graph.value_info, *graph.input, *graph.output]
                    if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    nodes: list[onnx.NodeProto] = []
    renamed: dict[str, str] = {}
    for info in graph.input:
        if info.name in single_typed and info.name not in weights:
            renamed[info.name] = f"{info.name}_half"
            nodes.append(onnx.helper.make_node("Cast", [info.name], [renamed[info.name]], to=onnx.TensorProto.FLOAT16))
    for number, node in enumerate(graph.node):
        names = [renamed.get(name, name) for name in node.input]
        outputs = list(node.output)
        if node.op_type in single:
            for index, name in enumerate(node.input):
                if name in single_typed or name in weights:
                    single_name = names[index] = f"{name}_single_{number}"
                    half_name = renamed.get(name, name)
                    nodes.append(onnx.helper.make_node("Cast", [half_name], [single_name], to=onnx.TensorProto.FLOAT))
            outputs = [f"{name}_single" if name in single_typed else name for name in node.output]
        converted = onnx.helper.make_node(node.op_type, names, outputs, name=node.name, domain=node.domain)
        converted.attribute.extend(node.attribute)
        for attribute in converted.attribute:
            if node.op_type == "Constant" and attribute.t.data_type == onnx.TensorProto.FLOAT:
                attribute.t.CopyFrom(_half(attribute.t))
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.FLOAT16
        nodes.append(converted)
        if node.op_type in single:
            nodes += [onnx.helper.make_node("Cast", [f"{name}_single"], [name], to=onnx.TensorProto.FLOAT16)
                      for name in node.output if name in single_typed]
    for info in graph.output:
        if info.name in single_typed:
            nodes = [_with_renamed(node, info.name, f"{info.name}_half") for node in nodes]
            nodes.append(onnx.helper.make_node("Cast", [f"{info.name}_half"], [info.name], to=onnx.TensorProto.FLOAT))
    for tensor in weights.values():
        tensor.CopyFrom(_half(tensor))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    onnx.save(proto, path)


def _half(tensor: onnx.TensorProto) -> onnx.TensorProto:
    values = np.clip(onnx.numpy_helper.to_array(tensor), -HALF_LIMIT, HALF_LIMIT).astype(np.float16)
    return onnx.numpy_helper.from_array(values, tensor.name)


def _with_renamed(node: onnx.NodeProto, old: str, new: str) -> onnx.NodeProto:
    """Renames a tensor of the node in place, and returns the node."""
    for names in (node.input, node.output):
        for index, name in enumerate(names):
            if name == old:
                names[index] = new
    return node


def write_saved_by_ort(path: Path, write: Write, optimize: str, dims: dict[str, int] | None = None) -> None:
    """Writes the graph that ONNX Runtime's CPU provider saves: at `all` with its own layouts, at `extended` with fusions."""
    with temporary_model(write) as plain:
        open_session(plain, "cpu", optimize=optimize, dims=dims, save_to=path)
