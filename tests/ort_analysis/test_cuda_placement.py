"""Which nodes a CUDA session gives to which provider, predicted without a GPU. The expected values follow ONNX Runtime 1.31's
rules; that these are right is checked on GPU machines (recipes/kinds/compare_on_gpu.py)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from hase.ort_analysis.cuda.placement import cuda_kernel, placement_of, refuses
from hase.ort_analysis.graph.parsing import ParsedGraph, parse_graph
from hase.records.kernel_record import KernelInput
from hase.utils.fingerprint import has_cuda
from hase.utils.ort_sessions import open_session

pytestmark = pytest.mark.skipif(has_cuda(), reason="with a GPU nothing is derived")
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def derived(nodes: list[Any], inputs: dict[str, list[int]], outputs: list[str], constants: list[Any] = [],  # noqa: B006
            opset: int = 20, kinds: dict[str, int] = {}) -> ParsedGraph:  # noqa: B006
    """The CUDA graph of a model made of `nodes`, whose inputs are float32 unless `kinds` gives another type."""
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info(name, kinds.get(name, FLOAT), shape) for name, shape in inputs.items()],
        [helper.ValueInfoProto(name=name) for name in outputs], constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return parse_graph(helper.make_model(graph, opset_imports=opsets, ir_version=9), "cuda")


def placed(graph: ParsedGraph) -> list[tuple[str, str]]:
    return [(node.op_type, node.provider) for node in graph.nodes]


def node(op_type: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> Any:
    return helper.make_node(op_type, inputs, outputs, name=outputs[0], domain=domain, **attributes)


@pytest.mark.parametrize(("op_type", "domain", "opset", "inputs", "outputs", "on_cuda"), [
    ("Conv", "", 20, ["float32", "float32"], ["float32"], True),
    ("Conv", "com.microsoft.nchwc", 1, ["float32", "float32"], ["float32"], False),
    ("QLinearConv", "", 20, ["uint8"], ["uint8"], False),
    ("MatMulInteger", "", 20, ["int8", "int8"], ["int32"], True),
    ("MatMulInteger", "", 20, ["uint8", "int8"], ["int32"], False),
    ("DynamicQuantizeLinear", "", 20, ["float32"], ["uint8", "float32", "uint8"], False),
    ("Relu", "", 12, ["bfloat16"], ["bfloat16"], False),
    ("Relu", "", 13, ["bfloat16"], ["bfloat16"], True),
    ("SimplifiedLayerNormalization", "", 14, ["bfloat16", "bfloat16"], ["bfloat16"], True),
    ("TreeEnsembleClassifier", "ai.onnx.ml", 3, ["float32"], ["int64", "float32"], False),
    ("Sinh", "", 20, ["float32"], ["float32"], False),
])
def test_the_table_of_kernels(op_type: str, domain: str, opset: int, inputs: list[str], outputs: list[str],
                              on_cuda: bool) -> None:
    assert (cuda_kernel(op_type, domain, opset, inputs, outputs) is not None) == on_cuda


def test_kernels_list_what_they_keep_in_host_memory() -> None:
    shape, reshape = (cuda_kernel(*operator) for operator in (("Shape", "", 20, ["float32"], ["int64"]),
                                                              ("Reshape", "", 20, ["float32", "int64"], ["float32"])))
    assert shape is not None
    assert reshape is not None
    assert (shape.host_outputs, reshape.host_inputs) == ((0,), (1,))


def test_sizes_are_computed_on_the_cpu_without_copies() -> None:
    """A graph whose sizes depend on data, as ONNX Runtime sees it: without shapes."""
    nodes = [node("NonZero", ["x"], ["n"]), node("Shape", ["n"], ["s"]), node("Gather", ["s", "one"], ["count"]),
             node("Mul", ["count", "two"], ["double"]), node("ConstantOfShape", ["double"], ["y"])]
    tensors = {name: KernelInput(dtype="int64", constant=name in ("one", "two"), shape=(1,))
               for name in ("n", "s", "one", "two", "count", "double")}
    tensors |= {"x": KernelInput(dtype="float32", shape=(4, 8)), "y": KernelInput(dtype="float32")}
    assert placement_of(nodes, tensors, {"": 20}, ["x"]).providers == ("cuda", "cuda", "cpu", "cpu", "cuda")


def test_an_operator_that_cuda_lacks_is_reached_by_copies() -> None:
    chain = [node("Relu", ["x"], ["r"]), node("Sinh", ["r"], ["s"]), node("Sigmoid", ["s"], ["y"])]
    graph = derived(chain, {"x": [4, 8]}, ["y"])
    assert placed(graph) == [("Relu", "cuda"), ("MemcpyToHost", "cuda"), ("Sinh", "cpu"), ("MemcpyFromHost", "cuda"),
                             ("Sigmoid", "cuda")]
    assert graph.nodes[1].inputs == ("r",)
    assert graph.nodes[2].inputs == graph.nodes[1].outputs
    assert graph.tensors[graph.nodes[1].outputs[0]].shape == (4, 8)


def test_a_tensor_is_copied_once_for_all_its_readers() -> None:
    graph = derived([node("Relu", ["x"], ["r"]), node("Sinh", ["r"], ["s"]), node("Cosh", ["r"], ["c"]),
                     node("Sigmoid", ["r"], ["y"])], {"x": [4, 8]}, ["s", "c", "y"])
    assert Counter(op_type for op_type, _ in placed(graph))["MemcpyToHost"] == 1
    assert Counter(provider for _, provider in placed(graph)) == {"cuda": 3, "cpu": 2}


def test_only_an_input_that_both_providers_read_is_copied() -> None:
    read_by_both = derived([node("Relu", ["x"], ["y"]), node("Sinh", ["x"], ["z"])], {"x": [4, 8]}, ["y", "z"])
    assert sorted(placed(read_by_both)) == [("MemcpyFromHost", "cuda"), ("Relu", "cuda"), ("Sinh", "cpu")]
    read_by_cpu = derived([node("Sinh", ["x"], ["z"])], {"x": [4, 8]}, ["z"])
    assert placed(read_by_cpu) == [("Sinh", "cpu")]


def quantized(integer_conv: bool) -> ParsedGraph:
    """A convolution of quantised tensors: as one operator, or in floating point between DequantizeLinear and QuantizeLinear."""
    constants = [helper.make_tensor("scale", FLOAT, [], [0.1]), helper.make_tensor("zero", TensorProto.UINT8, [], [128]),
                 helper.make_tensor("w", TensorProto.INT8, [8, 8, 3, 3], [1] * 576),
                 helper.make_tensor("wzero", TensorProto.INT8, [], [0])]
    if integer_conv:
        middle = [node("QLinearConv", ["q", "scale", "zero", "w", "scale", "wzero", "scale", "zero"], ["c"])]
    else:
        middle = [node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
                  node("DequantizeLinear", ["w", "scale", "wzero"], ["dw"]), node("Conv", ["d", "dw"], ["f"]),
                  node("QuantizeLinear", ["f", "scale", "zero"], ["c"])]
    around = [node("QuantizeLinear", ["x", "scale", "zero"], ["q"]), node("DequantizeLinear", ["c", "scale", "zero"], ["y"])]
    nodes = [around[0], *middle, around[1]]
    return derived(nodes, {"x": [1, 8, 16, 16]}, ["y"], constants)


def test_quantised_convolutions_run_on_the_cpu_and_convolutions_of_dequantised_tensors_on_cuda() -> None:
    operator = dict(placed(quantized(integer_conv=True)))
    assert operator["QLinearConv"] == "cpu"
    assert {"MemcpyToHost", "MemcpyFromHost"} <= set(operator)
    assert ("Conv", "cuda") in placed(quantized(integer_conv=False))
    assert {provider for _, provider in placed(quantized(integer_conv=False))} == {"cuda"}


def test_a_pool_between_quantised_convolutions_runs_on_cuda_and_their_transposes_on_the_cpu() -> None:
    constants = [helper.make_tensor("scale", FLOAT, [], [0.1]), helper.make_tensor("zero", TensorProto.UINT8, [], [128]),
                 helper.make_tensor("w", TensorProto.UINT8, [8, 8, 3, 3], [1] * 576)]
    around = ["scale", "zero", "w", "scale", "zero", "scale", "zero"]
    nodes = [node("QLinearConv", ["x", *around], ["a"]), node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
             node("QLinearConv", ["p", *around], ["y"])]
    graph = derived(nodes, {"x": [1, 8, 32, 32]}, ["y"], constants, kinds={"x": TensorProto.UINT8})
    assert Counter(placed(graph)) == {
        ("QLinearConv", "cpu"): 2, ("Transpose", "cpu"): 4, ("MaxPool", "cuda"): 1, ("MemcpyFromHost", "cuda"): 1,
        ("MemcpyToHost", "cuda"): 1}


def test_work_after_a_product_of_integers_is_on_cuda() -> None:
    constants = [helper.make_tensor("w", TensorProto.INT8, [64, 64], [1] * 4096),
                 helper.make_tensor("wzero", TensorProto.INT8, [], [0]), helper.make_tensor("factor", FLOAT, [], [0.5])]
    nodes = [node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
             node("MatMulInteger", ["q", "w", "zero", "wzero"], ["m"]), node("Cast", ["m"], ["f"], to=FLOAT),
             node("Mul", ["scale", "factor"], ["both"]), node("Mul", ["f", "both"], ["y"])]
    providers = placed(derived(nodes, {"x": [8, 64]}, ["y"], constants))
    assert {(op_type, provider) for op_type, provider in providers if "Memcpy" not in op_type} == {
        ("DynamicQuantizeLinear", "cpu"), ("MatMulInteger", "cpu"), ("Cast", "cuda"), ("Mul", "cuda")}


def test_a_graph_that_the_cpu_provider_optimised_before_keeps_its_convolutions_on_the_cpu(tmp_path: Path) -> None:
    weights = helper.make_tensor("w", FLOAT, [16, 16, 3, 3], [0.01] * (16 * 16 * 9))
    graph = helper.make_graph([node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["y"])], "conv",
                              [helper.make_tensor_value_info("x", FLOAT, [1, 16, 32, 32])],
                              [helper.ValueInfoProto(name="y")], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    saved = tmp_path / "saved.onnx"
    open_session(model.SerializeToString(), "cpu", save_to=saved)
    if not any(entry.domain == "com.microsoft.nchwc" for entry in onnx.load(saved).graph.node):
        pytest.skip("this CPU has no blocked layout")
    assert {entry.provider for entry in parse_graph(saved, "cuda").nodes if entry.op_type == "Conv"} == {"cpu"}


@pytest.mark.parametrize(("made", "refused"), [
    (node("LSTM", ["x", "w", "r"], ["y"], hidden_size=4), False),
    (node("LSTM", ["x", "w", "r"], ["y"], hidden_size=4, clip=1.0), True),
    (node("LSTM", ["x", "w", "r", "", "", "", "", "p"], ["y"], hidden_size=4), True),
    (node("LSTM", ["x", "w", "r"], ["y"], hidden_size=4, activations=["Sigmoid", "Tanh", "Relu"]), True),
    (node("GRU", ["x", "w", "r"], ["y"], hidden_size=4), True),
    (node("GRU", ["x", "w", "r"], ["y"], hidden_size=4, linear_before_reset=0), True),
    (node("GRU", ["x", "w", "r"], ["y"], hidden_size=4, linear_before_reset=1), False),
    (node("ConvTranspose", ["x", "w"], ["y"], pads=[0, 0, 1, 1]), True),
    (node("ConvTranspose", ["x", "w"], ["y"], pads=[1, 1, 1, 1]), False),
    (node("ConvTranspose", ["x", "w"], ["y"], auto_pad="SAME_UPPER"), True),
    (node("Cast", ["x"], ["y"], to=TensorProto.STRING), True),
    (node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16), False),
])
def test_nodes_that_the_cuda_provider_refuses_although_it_has_a_kernel(made: Any, refused: bool) -> None:
    assert refuses(made) == refused
