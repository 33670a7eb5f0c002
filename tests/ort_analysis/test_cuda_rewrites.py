"""The graph that the CUDA provider runs, made without a GPU. Ids and shapes named here are from graphs saved on an H200."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hase.ort_analysis.cuda.rewrites import bias_alignment
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.parsing import parse_graph
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from tests.conftest import small_model

without_gpu = pytest.mark.skipif(has_cuda(), reason="with a GPU the graph is not derived")


def model(nodes: Sequence[onnx.NodeProto], inputs: dict[str, Sequence[int]], output: tuple[str, Sequence[int]],
          weights: dict[str, Sequence[int]] | None = None) -> onnx.ModelProto:
    made = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in (weights or {}).items()]
    graph = helper.make_graph(
        list(nodes), "model", [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(output[0], TensorProto.FLOAT, output[1])], made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(("left", "right", "axis", "opset", "alignment"), [
    ((128, 3, 49, 49), (1, 3, 49, 49), -1, 20, (False, 3, False)),  # swin: one bias for all windows
    ((2, 64, 2, 49, 49), (1, 2, 49, 49), -1, 20, (False, 4, False)),  # maxvit: of a lower rank
    ((1, 3, 49, 49), (128, 3, 49, 49), -1, 20, (True, 3, False)),  # the bias on the left
    ((8, 12, 128, 128), (8, 1, 1, 128), -1, 20, (False, 3, True)),  # a mask per sentence
    ((8, 12, 128), (8, 12, 128), None, 20, (False, 2, True)),  # nothing to broadcast
    ((8, 12, 128), (8, 12, 128), 1, 20, None),  # another axis than the last
    ((8, 12, 128), (8, 12, 128), None, 11, (False, 1, True)),  # before operator set 13: over all from axis 1 on
    ((8, 12, 128), (8, 1, 128), None, 11, None),
    ((8, 12, 128), (1,), -1, 20, None),
    ((4, 3, 5, 7), (4, 1, 5, 7), -1, 20, None),  # neither inner nor outer
])
def test_when_a_sum_and_a_softmax_run_as_one(left: tuple[int, ...], right: tuple[int, ...], axis: int | None, opset: int,
                                             alignment: tuple[bool, int, bool] | None) -> None:
    assert bias_alignment(left, right, axis, opset) == alignment


@without_gpu
def test_a_biased_softmax_is_the_kernel_of_the_gpu() -> None:
    shape = [128, 3, 49, 49]
    nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("Add", ["n", "bias"], ["a"], name="add"),
             helper.make_node("Softmax", ["a"], ["s"], axis=-1, name="softmax"), helper.make_node("Neg", ["s"], ["y"])]
    record = analyze(model(nodes, {"x": shape}, ("y", shape), {"bias": [1, 3, 49, 49]}), "cuda")
    assert [node.kernel_id.partition("_")[0] for node in record.nodes] == ["Neg", "BiasSoftmax", "Neg"]
    fused = record.nodes[1]
    assert fused.kernel_id == "BiasSoftmax_49x49_in128x3x49x49-1x3x49x49_fp32_f9bab575"
    assert [origin.op_type for origin in fused.origins] == ["Add", "Softmax"]


@without_gpu
def test_a_sum_with_a_second_reader_stays() -> None:
    nodes = [helper.make_node("Add", ["x", "z"], ["a"]), helper.make_node("Softmax", ["a"], ["s"], axis=-1),
             helper.make_node("Mul", ["s", "a"], ["y"])]
    record = analyze(model(nodes, {"x": [4, 8], "z": [4, 8]}, ("y", [4, 8])), "cuda")
    assert Counter(kernel.type for kernel in record.kernels.values()) == {"Add": 1, "Softmax": 1, "Mul": 1}


@without_gpu
def test_hard_swish_is_one_kernel_where_the_model_has_it() -> None:
    shape = [2, 240, 28, 28]
    nodes = [helper.make_node("HardSwish", ["x"], ["h"], name="swish"), helper.make_node("HardSigmoid", ["h"], ["g"]),
             helper.make_node("Mul", ["g", "h"], ["y"])]
    record = analyze(model(nodes, {"x": shape}, ("y", shape)), "cuda")
    assert record.nodes[0].kernel_id == "HardSwish_28x28_in2x240x28x28_fp32_60a26842"
    assert [record.kernels[node.kernel_id].type for node in record.nodes] == ["HardSwish", "HardSigmoid", "Mul"]
    assert [origin.name for origin in record.nodes[0].origins] == ["swish"]


@without_gpu
def test_half_precision_runs_the_same_kernels_as_single_precision() -> None:
    float16, float32 = analyze(small_model(dtype="float16"), "cuda"), analyze(small_model(), "cuda")
    assert float16.derived
    assert [float16.kernels[node.kernel_id].type for node in float16.nodes] == [
        float32.kernels[node.kernel_id].type for node in float32.nodes]
    assert {kernel.dtype for kernel in float16.kernels.values()} == {"float16"}
    assert 2 * float16.weight_bytes == float32.weight_bytes
    assert {tensor.dtype for tensor in (*float16.inputs.values(), *float16.outputs.values())} == {"float16"}


def mixed(middle: int) -> onnx.ModelProto:
    """A product in single precision and one in the type `middle`, casts between them, and a whole-number input that is cast to
    that type and multiplied."""
    weights = np.ones((8, 8), np.float32)
    constants = [helper.make_tensor("w", TensorProto.FLOAT, [8, 8], weights.ravel()),
                 helper.make_tensor("v", middle, [8, 8], weights.ravel())]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["first"], "first_product"),
             helper.make_node("Cast", ["first"], ["narrow"], "to_narrow", to=middle),
             helper.make_node("MatMul", ["narrow", "v"], ["second"], "second_product"),
             helper.make_node("Cast", ["n"], ["counted"], "from_whole", to=middle),
             helper.make_node("Mul", ["second", "counted"], ["sum"], "scaled"),
             helper.make_node("Cast", ["sum"], ["wide"], "to_wide", to=TensorProto.FLOAT),
             helper.make_node("Relu", ["wide"], ["y"], "last")]
    inputs = [helper.make_tensor_value_info(name, element, [4, 8]) for name, element in (("x", TensorProto.FLOAT),
                                                                                         ("n", TensorProto.INT64))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 8])]
    graph = helper.make_graph(nodes, "mixed", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@without_gpu
@pytest.mark.parametrize(("middle", "dtype"), [(TensorProto.FLOAT16, "float16"), (TensorProto.BFLOAT16, "bfloat16")])
def test_mixed_types_and_their_casts_are_kept(middle: int, dtype: str) -> None:
    graph = parse_graph(mixed(middle), "cuda")
    types = {name: tensor.dtype for name, tensor in graph.tensors.items()}
    by_name = {node.name: (node.op_type, [types[name] for name in node.inputs], types[node.outputs[0]]) for node in graph.nodes}
    assert {name.split("/")[0]: value for name, value in by_name.items()} == {
        "first_product": ("MatMul", ["float32", "float32"], "float32"), "to_narrow": ("Cast", ["float32"], dtype),
        "second_product": ("MatMul", [dtype, dtype], dtype), "from_whole": ("Cast", ["int64"], dtype),
        "scaled": ("Mul", [dtype, dtype], dtype), "to_wide": ("Cast", [dtype], "float32"),
        "last": ("Relu", ["float32"], "float32")}
    assert {node.provider for node in graph.nodes} == {"cuda"}


@without_gpu
def test_gelu_in_half_precision_is_fused_as_on_a_gpu() -> None:
    """As exporters write it, with √2 rounded to half precision."""
    constants = [helper.make_tensor(name, TensorProto.FLOAT16, [], np.array([value], np.float16))
                 for name, value in (("root", 2 ** 0.5), ("one", 1.0), ("half", 0.5))]
    nodes = [helper.make_node("Div", ["x", "root"], ["d"]), helper.make_node("Erf", ["d"], ["e"]),
             helper.make_node("Add", ["e", "one"], ["a"]), helper.make_node("Mul", ["x", "a"], ["m"]),
             helper.make_node("Mul", ["m", "half"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [4, 8]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "gelu", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert [node.op_type for node in parse_graph(model, "cuda").nodes] == ["Gelu"]


@without_gpu
def test_a_model_that_mixes_types_in_an_old_operator_set_is_refused() -> None:
    proto = mixed(TensorProto.FLOAT16)
    proto.opset_import[0].version = 9
    with pytest.raises(UserError, match="mixes floating types in operator set 9"):
        parse_graph(proto, "cuda")


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU: compares its own graphs with derived ones")
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_tiny"])
def test_the_derived_graph_equals_the_gpus(torch_models: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = analyze(torch_models[name], "cuda")
    monkeypatch.setattr("hase.ort_analysis.graph.parsing.has_cuda", lambda: False)
    derived = analyze(torch_models[name], "cuda")
    assert derived.derived
    assert not real.derived
    assert [(node.kernel_id, node.inputs, node.outputs) for node in derived.nodes] == [
        (node.kernel_id, node.inputs, node.outputs) for node in real.nodes]


@without_gpu
@pytest.mark.parametrize(("static", "fused"), [(True, True), (False, False)])
def test_a_session_that_takes_any_sizes_fuses_only_what_it_knows(static: bool, fused: bool) -> None:
    """A bias whose last size is not the open dimension of the scores: equal at these sizes, but the session can't know."""
    scores = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, "rows", "columns"])
    bias = helper.make_tensor_value_info("bias", TensorProto.FLOAT, [1, 1, 1, "others"])
    nodes = [helper.make_node("Add", ["x", "bias"], ["sum"]), helper.make_node("Softmax", ["sum"], ["y"], axis=-1)]
    graph = helper.make_graph(nodes, "softmax", [scores, bias], [helper.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    dims = {"batch": 2, "rows": 8, "columns": 8, "others": 8}
    types = [node.op_type for node in parse_graph(model, "cuda", dims, static=static).nodes]
    assert types == (["BiasSoftmax"] if fused else ["Add", "Softmax"])
