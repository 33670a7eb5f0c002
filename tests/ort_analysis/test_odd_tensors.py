"""Odd tensors: scalars, empty ones, those of unknown rank, and values that are no tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from small_graphs import FLOAT, INT64, ML, model, node, unranked, value

from hase.benchmark.ort.profile import profile_model
from hase.benchmark.ort.runner import open_runner
from hase.inference.memory.session import peak_memory
from hase.kernel_model.building.dummy_data import dummy_inputs
from hase.kernel_model.building.kernel_models import build_model
from hase.learned.kernels.features import KERNEL_FEATURES, kernel_features
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.parsing import parse_graph
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import Effort
from hase.utils import cli, files
from hase.utils.errors import UserError


def test_a_record_holds_infinite_values(tmp_path: Path) -> None:
    """A MaxPool with unequal borders is exported as a Pad with -Infinity and a MaxPool without borders."""
    pad = model([node("Pad", ["x", "borders", "least"])], [value("x", 2, 3)], [value("y", 2, 5)],
                {"borders": [0, 1, 0, 1], "least": -math.inf})
    record = analyze(pad, "cpu", name="pad")
    files.write_json(tmp_path / "pad.json", record)
    read = read_model_record(tmp_path / "pad.json")
    assert read == record
    assert [tensor.values for kernel in read.kernels.values() for tensor in kernel.inputs][-1] == (-math.inf,)


def sklearn_pipeline() -> onnx.ModelProto:
    """The export by skl2onnx of a StandardScaler before a tree, whose probabilities become maps."""
    nodes = [node("Scaler", ["x"], "scaled", domain=ML, offset=[0.0] * 4, scale=[1.0] * 4),
             node("TreeEnsembleClassifier", ["scaled"], ["label", "probabilities"], domain=ML, nodes_treeids=[0, 0, 0],
                  nodes_nodeids=[0, 1, 2], nodes_featureids=[1, 0, 0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
                  nodes_values=[0.5, 0.0, 0.0], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], class_treeids=[0, 0],
                  class_nodeids=[1, 2], class_ids=[0, 1], class_weights=[1.0, 1.0], classlabels_int64s=[0, 1],
                  post_transform="NONE"),
             node("ZipMap", ["probabilities"], "maps", domain=ML, classlabels_int64s=[0, 1])]
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, [])))
    return model(nodes, [value("x", "rows", 4)], [value("label", "rows", kind=INT64), helper.make_value_info("maps", maps)])


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_a_reduction_to_a_scalar(provider: str) -> None:
    record = analyze(model([node("Abs", ["x"], "a"), node("ReduceMax", ["a"], keepdims=0)], [value("x", 2, 3, 8)],
                           [value("y")]), provider)
    kernel = record.kernel_of(record.nodes[-1])
    assert (kernel.op_type, kernel.outputs[0].shape, kernel.bytes_written) == ("ReduceMax", (), 4)
    assert len(kernel_features(kernel)) == len(KERNEL_FEATURES.names)


def test_an_unknown_rank_is_no_scalar() -> None:
    unknown = model([node("Relu", ["x"])], [unranked("x")])
    with pytest.raises(UserError, match="the rank of tensor x, an input, is not known"):
        parse_graph(unknown, "cpu")


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_a_scikit_learn_pipeline(provider: str) -> None:
    record = analyze(sklearn_pipeline(), provider, {"rows": 8})
    kernels = {record.kernel_of(entry).op_type: record.kernel_of(entry) for entry in record.nodes}
    assert kernels["Scaler"].outputs[0].shape == (8, 4)
    assert [output.shape for output in kernels["TreeEnsembleClassifier"].outputs] == [(8,), (8, 2)]
    maps = kernels["ZipMap"].outputs[0]
    assert (maps.dtype, maps.is_tensor, maps.bytes) == ("sequence(map(int64,float32))", False, 0)
    assert (kernels["ZipMap"].bytes_read, kernels["ZipMap"].opset) == (8 * 2 * 4, 3)
    assert record.outputs["maps"].dtype == maps.dtype
    assert peak_memory(record).peak_mib > 0
    with pytest.raises(UserError, match="only kernels of tensors can be built alone"):
        build_model(kernels["ZipMap"])
    build_model(kernels["TreeEnsembleClassifier"])


def test_a_size_of_zero() -> None:
    """A decoder's first step has an empty cache."""
    joined = model([node("Concat", ["past", "x"], axis=1)], [value("past", 2, "past_length"), value("x", 2, 3)],
                   [value("y", 2, "total")])
    record = analyze(joined, "cpu", {"past_length": 0})
    kernel = record.kernel_of(record.nodes[0])
    assert [tensor.shape for tensor in (*kernel.inputs, *kernel.outputs)] == [(2, 0), (2, 3), (2, 3)]
    assert kernel.bytes_read == 24
    assert len(kernel_features(kernel)) == len(KERNEL_FEATURES.names)
    assert analyze(model([node("Relu", ["x"])], [value("x", 2, 0)], [value("y", 2, 0)]), "cpu").inputs["x"].shape == (2, 0)
    assert cli.parse_dims(["past=0,5"]) == {"past": [0, 5]}
    with pytest.raises(UserError, match="whole numbers"):
        cli.parse_dims(["past=-1"])


@pytest.mark.parametrize("opset", [18, 21])
def test_group_normalization_which_onnx_defines_by_other_operators(opset: int) -> None:
    """ORT replaces the node by its definition on loading, with all shape computations, and folds none of them."""
    scale = np.ones(4 if opset == 18 else 8, np.float32)
    record = analyze(model([node("GroupNormalization", ["x", "scale", "bias"], num_groups=4)], [value("x", "batch", 8, 4, 4)],
                           [value("y", "batch", 8, 4, 4)], {"scale": scale, "bias": scale}, opset), "cpu", {"batch": 2})
    assert record.outputs["y"].shape == (2, 8, 4, 4)
    mean = next(kernel for kernel in record.kernels.values() if kernel.op_type == "ReduceMean")
    assert mean.inputs[0].shape == (2, 4, 32)


def test_text_inputs_are_words_that_the_model_knows(tmp_path: Path) -> None:
    """The export by skl2onnx of a OneHotEncoder of two columns of text, which refuses unknown words."""
    nodes = []
    for column, words in enumerate((["red", "green"], ["small", "large", "vast"])):
        nodes += [node("ArrayFeatureExtractor", ["x", f"place{column}"], f"column{column}", domain=ML),
                  node("OneHotEncoder", [f"column{column}"], f"hot{column}", domain=ML, cats_strings=words, zeros=0)]
    nodes += [node("Concat", ["hot0", "hot1"], "both", axis=-1), node("Reshape", ["both", "flat"])]
    onnx.save(model(nodes, [value("x", "rows", 2, kind=TensorProto.STRING)], [value("y", "rows", 5)],
                    {"place0": [0], "place1": [1], "flat": [-1, 5]}), tmp_path / "text.onnx")
    runner = open_runner(tmp_path / "text.onnx", "cpu", dims={"rows": 3})
    assert runner.feed["x"].tolist() == [["red", "small"]] * 3
    assert runner.run_once()[0].tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0]] * 3
    record = analyze(tmp_path / "text.onnx", "cuda", {"rows": 3})
    assert record.outputs["y"].shape == (3, 5)
    encoder = next(kernel for kernel in record.kernels.values() if kernel.op_type == "OneHotEncoder")
    assert dummy_inputs(encoder)["x0"].tolist() == [[encoder.attributes["cats_strings"][0]]] * 3
    profiled = profile_model(tmp_path / "text.onnx", "cpu", {"rows": 3}, Effort(warmup=0, least_runs=2, most_runs=2))
    assert {event.node for event in profiled.runs[0].nodes} == {entry.name for entry in profiled.graph.nodes}


def test_a_size_whose_name_a_shell_would_split_is_quoted() -> None:
    with pytest.raises(UserError, match=r"--dim '2\*s1 \+ 1=1'$"):
        analyze(model([node("Relu", ["x"])], [value("x", "2*s1 + 1", 4)]), "cpu")


@pytest.mark.parametrize("within", ["initializer", "attribute"])
def test_a_constant_that_does_not_fit_its_shape(within: str) -> None:
    """In half precision, which is widened before ONNX Runtime sees the model."""
    half = TensorProto.FLOAT16
    short = onnx.TensorProto(name="short", data_type=half, dims=[4], raw_data=bytes(6))
    nodes = [node("Add", ["x", "short"])]
    if within == "attribute":
        nodes.insert(0, node("Constant", [], "short", value=short))
    damaged = model(nodes, [value("x", 4, kind=half)], [value("y", 4, kind=half)],
                    {"short": short} if within == "initializer" else {})
    with pytest.raises(UserError, match=r"the model is damaged: its constant short of shape \[4\] can't be read"):
        analyze(damaged, "cuda")
