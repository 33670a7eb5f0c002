"""Writes graphs node by node, of kinds that no exporter writes: control flow, pipelines of scikit-learn, and others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.records.kernel_record import type_code
from hase.utils.lazy import onnx

IR_VERSION = 10
ML = "ai.onnx.ml"


def weight(name: str, *shape: int, scale: float | None = None, dtype: str = "float32") -> onnx.TensorProto:
    """A random constant, the same for the same name."""
    generator = np.random.default_rng([ord(letter) for letter in name])
    size = scale if scale is not None else 1.0 / np.sqrt(max(1, shape[0] if len(shape) < 3 else int(np.prod(shape[1:]))))
    return onnx.numpy_helper.from_array((generator.standard_normal(shape) * size).astype(dtype), name)


def numbers(name: str, values: Any, dtype: str = "int64") -> onnx.TensorProto:
    """A constant of given values."""
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
    """A Loop with a constant number of trips: each multiplies a state by a matrix and keeps it."""
    body = onnx.helper.make_graph(
        [node("MatMul", ["state", "w"], ["product"]), node("Add", ["product", "b"], ["sum"]), node("Tanh", ["sum"], ["next"]),
         node("Identity", ["next"], ["kept"]), node("Identity", ["go_on"], ["go_on_out"])],
        "body", [value("step", [], "int64"), value("go_on", [], "bool"), value("state", [8, width])],
        [value("go_on_out", [], "bool"), value("next", [8, width]), value("kept", [8, width])])
    save(path, [node("Loop", ["trips", "true", "x"], ["last", "all"], body=body)], [value("x", [8, width])],
         [value("last", [8, width]), value("all", [trips, 8, width])],
         [numbers("trips", trips), numbers("true", True, "bool"), weight("w", width, width), weight("b", width)])


def write_loop_by_input(path: Path, width: int = 512) -> None:
    """The same with a number of trips that is an input of the model."""
    body = onnx.helper.make_graph(
        [node("MatMul", ["state", "w"], ["product"]), node("Tanh", ["product"], ["next"]),
         node("Identity", ["go_on"], ["go_on_out"])],
        "body", [value("step", [], "int64"), value("go_on", [], "bool"), value("state", [8, width])],
        [value("go_on_out", [], "bool"), value("next", [8, width])])
    save(path, [node("Loop", ["trips", "true", "x"], ["last"], body=body)],
         [value("trips", [], "int64"), value("x", [8, width])], [value("last", [8, width])],
         [numbers("true", True, "bool"), weight("w", width, width)])


def write_scan(path: Path, length: int = 24, width: int = 384) -> None:
    """A recurrence over a sequence, written with Scan."""
    body = onnx.helper.make_graph(
        [node("MatMul", ["state", "w"], ["a"]), node("MatMul", ["item", "v"], ["b"]), node("Add", ["a", "b"], ["c"]),
         node("Tanh", ["c"], ["next"]), node("Identity", ["next"], ["kept"])],
        "body", [value("state", [4, width]), value("item", [4, width])], [value("next", [4, width]), value("kept", [4, width])])
    save(path, [node("Scan", ["start", "x"], ["last", "all"], body=body, num_scan_inputs=1)],
         [value("start", [4, width]), value("x", [length, 4, width])],
         [value("last", [4, width]), value("all", [length, 4, width])], [weight("w", width, width), weight("v", width, width)])


def write_if(path: Path, width: int = 768) -> None:
    """An If by an input: one branch has three products, the other one."""
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
    """A cheap network decides whether an expensive one runs: the condition depends on data."""
    then = onnx.helper.make_graph([node("MatMul", ["h", "w1"], ["t1"]), node("Relu", ["t1"], ["t2"]),
                              node("MatMul", ["t2", "w2"], ["t3"])], "deep", [], [value("t3", [64, width])])
    otherwise = onnx.helper.make_graph([node("Identity", ["h"], ["e"])], "early", [], [value("e", [64, width])])
    save(path, [node("MatMul", ["x", "w0"], ["h"]), node("ReduceMean", ["h"], ["m"], keepdims=0),
                node("Greater", ["m", "limit"], ["c"]), node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise)],
         [value("x", [64, width])], [value("y", [64, width])],
         [weight("w0", width, width), weight("w1", width, width), weight("w2", width, width), numbers("limit", 0.5, "float32")])


def write_nms_detector(path: Path, side: int = 128, width: int = 32, classes: int = 8) -> None:
    """A one-stage detector: convolutions, boxes and scores of each position, NonMaxSuppression, the selected boxes."""
    places = (side // 8) ** 2
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
          weight("wb", 4, 4 * width, 3, 3), weight("ws", classes, 4 * width, 3, 3), numbers("box_shape", [1, 4, places]),
          numbers("score_shape", [1, classes, places]), numbers("most", [50]), numbers("overlap", [0.5], "float32"),
          numbers("least", [0.4], "float32"), numbers("two", 2), numbers("zero", [0])])


def write_nonzero(path: Path, width: int = 512) -> None:
    """Selects rows by a condition on data (NonZero), then multiplies them."""
    save(path, [node("MatMul", ["x", "gate"], ["g"]), node("Greater", ["g", "limit"], ["c"]), node("NonZero", ["c"], ["n"]),
                node("Gather", ["n", "first"], ["rows"], axis=0), node("Gather", ["x", "rows"], ["chosen"], axis=0),
                node("MatMul", ["chosen", "w"], ["y"])],
         [value("x", [256, width])], [value("y", ["chosen_rows", width])],
         [weight("gate", width, 1), numbers("limit", 0.0, "float32"), numbers("first", 0), weight("w", width, width)])


def write_group_norm_21(path: Path, width: int = 64, side: int = 64) -> None:
    """GroupNormalization of operator set 21, which ONNX Runtime expands as a function."""
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
    """Linear layers with weights in bfloat16: cast to float32 before each product, or (`whole`) everything in bfloat16."""
    nodes, constants, last = [], [], "x"
    if whole:
        nodes.append(node("Cast", ["x"], ["x16"], to=onnx.TensorProto.BFLOAT16))
        last = "x16"
    for number in range(4):
        plain = onnx.numpy_helper.to_array(weight(f"w{number}", width, width))
        high = (np.ascontiguousarray(plain).view(np.uint32) >> 16).astype(np.uint16)  # bfloat16: float32's upper half
        constants.append(onnx.helper.make_tensor(f"w{number}", type_code("bfloat16"), plain.shape, high.tobytes(), raw=True))
        used = f"w{number}"
        if not whole:
            nodes.append(node("Cast", [used], [f"f{number}"], to=onnx.TensorProto.FLOAT))
            used = f"f{number}"
        nodes += [node("MatMul", [last, used], [f"p{number}"]), node("Relu", [f"p{number}"], [f"r{number}"])]
        last = f"r{number}"
    nodes.append(node("Cast", [last], ["y"], to=onnx.TensorProto.FLOAT))
    save(path, nodes, [value("x", [16, width])], [value("y", [16, width])], constants)


def _trees(trees: int, depth: int, features: int, targets: int) -> dict[str, Any]:
    """Full binary trees as attributes of TreeEnsembleClassifier."""
    generator = np.random.default_rng(0)
    inner, whole = 2**depth - 1, 2 ** (depth + 1) - 1
    made: dict[str, Any] = {key: [] for key in (
        "nodes_treeids", "nodes_nodeids", "nodes_featureids", "nodes_modes", "nodes_values", "nodes_truenodeids",
        "nodes_falsenodeids", "class_treeids", "class_nodeids", "class_ids", "class_weights")}
    for tree in range(trees):
        for place in range(whole):
            split = place < inner
            for key, what in (("treeids", tree), ("nodeids", place), ("modes", "BRANCH_LEQ" if split else "LEAF"),
                              ("featureids", int(generator.integers(features)) if split else 0),
                              ("values", float(generator.standard_normal()) if split else 0.0),
                              ("truenodeids", 2 * place + 1 if split else 0), ("falsenodeids", 2 * place + 2 if split else 0)):
                made[f"nodes_{key}"].append(what)
            if not split:
                for key, what in (("treeids", tree), ("nodeids", place), ("ids", tree % targets),
                                  ("weights", float(generator.standard_normal()) / trees)):
                    made[f"class_{key}"].append(what)
    return made


def write_forest(path: Path, trees: int = 200, depth: int = 8, features: int = 40, classes: int = 3) -> None:
    """A scikit-learn pipeline: a scaler, a forest, the classes' probabilities as a sequence of maps."""
    nodes = [
        node("Scaler", ["x"], ["scaled"], domain=ML, offset=[0.1] * features, scale=[0.9] * features),
        node("TreeEnsembleClassifier", ["scaled"], ["label", "odds"], domain=ML, classlabels_int64s=list(range(classes)),
             post_transform="SOFTMAX", **_trees(trees, depth, features, classes)),
        node("ZipMap", ["odds"], ["probabilities"], domain=ML, classlabels_int64s=list(range(classes))),
    ]
    of_map = onnx.helper.make_sequence_type_proto(onnx.helper.make_map_type_proto(
        onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])))
    save(path, nodes, [value("x", ["rows", features])],
         [value("label", ["rows"], "int64"), onnx.helper.make_value_info("probabilities", of_map)], opset=17, ml=3)


def write_linear_pipeline(path: Path, features: int = 64, classes: int = 10) -> None:
    """A scikit-learn pipeline: missing values filled in, scaled, a linear classifier, normalised."""
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
    """An addition and a ReLU of eight numbers: only the cost of a run itself."""
    save(path, [node("Add", ["x", "b"], ["s"]), node("Relu", ["s"], ["y"])], [value("x", [1, 8])], [value("y", [1, 8])],
         [weight("b", 8)])


def write_large(path: Path, width: int = 5000, layers: int = 24) -> None:
    """Linear layers with `layers` · 4 · width² bytes of weights (2.4 GB) in a second file."""
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
