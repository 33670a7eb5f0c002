"""Tensors that are odd: scalars, empty ones, ones of unknown rank, and what is no tensor at all."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from inference.memory import peak_memory
from kernel_model.kernel_builder import build_model
from ort_analysis.fusion_detector import analyze
from ort_analysis.ort_graph_parser import parse_graph
from training.features import FEATURES, kernel_features
from utils import cli
from utils.errors import UserError

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
ML = "ai.onnx.ml"


def graph(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], constants: Any = (),
          opset: int = 20) -> onnx.ModelProto:
    made = helper.make_graph(nodes, "odd", inputs, outputs, list(constants))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(ML, 3)], ir_version=10)


def value(name: str, *shape: int | str, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def absolute_maximum() -> onnx.ModelProto:
    """x.abs().max(): a scalar comes out."""
    return graph([helper.make_node("Abs", ["x"], ["a"]), helper.make_node("ReduceMax", ["a"], ["y"], keepdims=0)],
                 [value("x", 2, 3, 8)], [value("y")])


def sklearn_pipeline(classifier: str) -> onnx.ModelProto:
    """What skl2onnx makes of a StandardScaler before a tree or a linear model, whose probabilities become maps."""
    nodes = [helper.make_node("Scaler", ["x"], ["scaled"], domain=ML, offset=[0.0] * 4, scale=[1.0] * 4)]
    if classifier == "TreeEnsembleClassifier":
        nodes.append(helper.make_node(
            classifier, ["scaled"], ["label", "probabilities"], domain=ML, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2],
            nodes_featureids=[1, 0, 0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values=[0.5, 0.0, 0.0],
            nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], class_treeids=[0, 0], class_nodeids=[1, 2],
            class_ids=[0, 1], class_weights=[1.0, 1.0], classlabels_int64s=[0, 1], post_transform="NONE"))
    else:
        nodes += [helper.make_node(classifier, ["scaled"], ["label", "scores"], domain=ML, coefficients=[0.1] * 8,
                                   intercepts=[0.0] * 2, classlabels_ints=[0, 1], post_transform="SOFTMAX"),
                  helper.make_node("Normalizer", ["scores"], ["probabilities"], domain=ML, norm="L1")]
    nodes.append(helper.make_node("ZipMap", ["probabilities"], ["maps"], domain=ML, classlabels_int64s=[0, 1]))
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, [])))
    return graph(nodes, [value("x", "rows", 4)], [value("label", "rows", kind=INT64), helper.make_value_info("maps", maps)])


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_a_reduction_to_a_scalar(provider: str) -> None:
    record = analyze(absolute_maximum(), provider)
    kernel = record.kernel_of(record.nodes[-1])
    assert (kernel.op_type, kernel.outputs[0].shape, kernel.bytes_written) == ("ReduceMax", (), 4)
    assert len(kernel_features(kernel)) == len(FEATURES)


def test_an_unknown_rank_is_no_scalar() -> None:
    unknown = graph([helper.make_node("Relu", ["x"], ["y"])], [helper.make_tensor_value_info("x", FLOAT, None)],
                    [helper.ValueInfoProto(name="y")])
    with pytest.raises(UserError, match="the rank of tensor x, an input, is not known"):
        parse_graph(unknown, "cpu")


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
@pytest.mark.parametrize("classifier", ["TreeEnsembleClassifier", "LinearClassifier"])
def test_a_scikit_learn_pipeline(classifier: str, provider: str) -> None:
    record = analyze(sklearn_pipeline(classifier), provider, {"rows": 8})
    kernels = {record.kernel_of(node).op_type: record.kernel_of(node) for node in record.nodes}
    assert kernels["Scaler"].outputs[0].shape == (8, 4)
    assert [output.shape for output in kernels[classifier].outputs] == [(8,), (8, 2)]
    maps = kernels["ZipMap"].outputs[0]
    assert (maps.dtype, maps.is_tensor, maps.bytes) == ("sequence(map(int64,float32))", False, 0)
    assert (kernels["ZipMap"].bytes_read, kernels["ZipMap"].opset) == (8 * 2 * 4, 3)
    assert record.outputs["maps"].dtype == maps.dtype
    assert peak_memory(record).peak_mib > 0
    with pytest.raises(UserError, match="only kernels of tensors can be built alone"):
        build_model(kernels["ZipMap"])
    build_model(kernels[classifier])


def test_sequences_within_a_graph() -> None:
    nodes = [helper.make_node("SequenceConstruct", ["x", "x"], ["pair"]),
             helper.make_node("SequenceAt", ["pair", "place"], ["one"]),
             helper.make_node("Identity", ["pair"], ["y"])]
    record = analyze(graph(nodes, [value("x", 2, 3), value("place", kind=INT64)], [value("one", 2, 3), helper.make_value_info(
        "y", helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, [2, 3])))]), "cpu")
    construct, at = (next(kernel for kernel in record.kernels.values() if kernel.op_type == name)
                     for name in ("SequenceConstruct", "SequenceAt"))
    assert (construct.bytes_read, construct.bytes_written) == (2 * 24, 0)
    assert (at.bytes_read, at.bytes_written, at.outputs[0].shape) == (8, 24, (2, 3))


def test_a_size_of_zero() -> None:
    """A decoder's first step has an empty cache."""
    joined = graph([helper.make_node("Concat", ["past", "x"], ["y"], axis=1)],
                   [value("past", 2, "past_length"), value("x", 2, 3)], [value("y", 2, "total")])
    record = analyze(joined, "cpu", {"past_length": 0})
    kernel = record.kernel_of(record.nodes[0])
    assert [tensor.shape for tensor in (*kernel.inputs, *kernel.outputs)] == [(2, 0), (2, 3), (2, 3)]
    assert kernel.bytes_read == 24
    assert len(kernel_features(kernel)) == len(FEATURES)
    fixed = graph([helper.make_node("Relu", ["x"], ["y"])], [value("x", 2, 0)], [value("y", 2, 0)])
    assert analyze(fixed, "cpu").inputs["x"].shape == (2, 0)


@pytest.mark.parametrize("opset", [18, 21])
def test_group_normalization_which_onnx_defines_by_others(opset: int) -> None:
    """ORT puts its definition in the node's place as it loads, shape computations and all, and folds none of them."""
    length = 4 if opset == 18 else 8
    scale = [helper.make_tensor(name, FLOAT, [length], [1.0] * length) for name in ("scale", "bias")]
    node = helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["y"], num_groups=4)
    record = analyze(graph([node], [value("x", "batch", 8, 4, 4)], [value("y", "batch", 8, 4, 4)], scale, opset), "cpu",
                     {"batch": 2})
    assert record.outputs["y"].shape == (2, 8, 4, 4)
    mean = next(kernel for kernel in record.kernels.values() if kernel.op_type == "ReduceMean")
    assert mean.inputs[0].shape == (2, 4, 32)


def test_the_command_takes_a_size_of_zero() -> None:
    assert cli.parse_dims(["past=0,5"]) == {"past": [0, 5]}
    with pytest.raises(UserError, match="whole numbers"):
        cli.parse_dims(["past=-1"])
