"""Which nodes a CUDA session gives to which provider, predicted without a GPU. The expected values follow ONNX Runtime 1.31's
rules; that these are right is checked on GPU machines (recipes/kinds/compare_on_gpu.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from small_graphs import FLOAT, model, node, value

from hase.ort_analysis.cuda.placement import cuda_kernel, placement_of, refuses
from hase.ort_analysis.graph.parsing import ParsedGraph, parse_graph
from hase.records.kernel_record import KernelInput
from hase.utils.fingerprint import has_cuda
from hase.utils.ort_sessions import open_session

pytestmark = pytest.mark.skipif(has_cuda(), reason="with a GPU nothing is derived")
ZERO, EIGHT = np.uint8(128), (8, 8, 3, 3)


def derived(nodes: list[Any], x: Sequence[int], outputs: Sequence[str] = ("y",), constants: Mapping[str, Any] | None = None,
            kind: int = FLOAT) -> ParsedGraph:
    """The CUDA graph of a model of these nodes, whose input is `x`."""
    return parse_graph(model(nodes, [value("x", *x, kind=kind)], outputs, constants), "cuda")


def placed(graph: ParsedGraph) -> list[tuple[str, str]]:
    return [(entry.op_type, entry.provider) for entry in graph.nodes]


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


def test_sizes_are_computed_on_the_cpu_without_copies() -> None:
    """A graph whose sizes depend on data, as ONNX Runtime sees it: without shapes."""
    nodes: list[Any] = [node("NonZero", ["x"], "n"), node("Shape", ["n"], "s"), node("Gather", ["s", "one"], "count"),
                        node("Mul", ["count", "two"], "double"), node("ConstantOfShape", ["double"])]
    tensors = {name: KernelInput(dtype="int64", constant=name in ("one", "two"), shape=(1,))
               for name in ("n", "s", "one", "two", "count", "double")}
    tensors |= {"x": KernelInput(dtype="float32", shape=(4, 8)), "y": KernelInput(dtype="float32")}
    assert placement_of(nodes, tensors, {"": 20}, ["x"]).providers == ("cuda", "cuda", "cpu", "cpu", "cuda")


def test_an_operator_that_cuda_lacks_is_reached_by_copies() -> None:
    graph = derived([node("Relu", ["x"], "r"), node("Sinh", ["r"], "s"), node("Sigmoid", ["s"])], [4, 8])
    assert placed(graph) == [("Relu", "cuda"), ("MemcpyToHost", "cuda"), ("Sinh", "cpu"), ("MemcpyFromHost", "cuda"),
                             ("Sigmoid", "cuda")]
    assert graph.nodes[1].inputs == ("r",)
    assert graph.nodes[2].inputs == graph.nodes[1].outputs
    assert graph.tensors[graph.nodes[1].outputs[0]].shape == (4, 8)


def test_a_tensor_is_copied_once_for_all_its_readers_and_an_input_only_if_both_providers_read_it() -> None:
    graph = derived([node("Relu", ["x"], "r"), node("Sinh", ["r"], "s"), node("Cosh", ["r"], "c"), node("Sigmoid", ["r"])],
                    [4, 8], ["s", "c", "y"])
    assert Counter(op_type for op_type, _ in placed(graph))["MemcpyToHost"] == 1
    assert Counter(provider for _, provider in placed(graph)) == {"cuda": 3, "cpu": 2}
    read_by_both = derived([node("Relu", ["x"]), node("Sinh", ["x"], "z")], [4, 8], ["y", "z"])
    assert sorted(placed(read_by_both)) == [("MemcpyFromHost", "cuda"), ("Relu", "cuda"), ("Sinh", "cpu")]
    assert placed(derived([node("Sinh", ["x"])], [4, 8])) == [("Sinh", "cpu")]


def quantized(middle: list[Any]) -> ParsedGraph:
    """Nodes between a QuantizeLinear and a DequantizeLinear."""
    return derived([node("QuantizeLinear", ["x", "scale", "zero"], "q"), *middle,
                    node("DequantizeLinear", ["c", "scale", "zero"])], [1, 8, 16, 16], ["y"],
                   {"scale": 0.1, "zero": ZERO, "w": np.ones(EIGHT, np.int8), "wzero": np.int8(0)})


def test_quantised_convolutions_run_on_the_cpu_and_convolutions_of_dequantised_tensors_on_cuda() -> None:
    operator = dict(placed(quantized(
        [node("QLinearConv", ["q", "scale", "zero", "w", "scale", "wzero", "scale", "zero"], "c")])))
    assert operator["QLinearConv"] == "cpu"
    assert {"MemcpyToHost", "MemcpyFromHost"} <= set(operator)
    floating = placed(quantized([node("DequantizeLinear", ["q", "scale", "zero"], "d"),
                                 node("DequantizeLinear", ["w", "scale", "wzero"], "dw"), node("Conv", ["d", "dw"], "f"),
                                 node("QuantizeLinear", ["f", "scale", "zero"], "c")]))
    assert ("Conv", "cuda") in floating
    assert {provider for _, provider in floating} == {"cuda"}


def test_a_pool_between_quantised_convolutions_runs_on_cuda_and_their_transposes_on_the_cpu() -> None:
    around = ["scale", "zero", "w", "scale", "zero", "scale", "zero"]
    nodes = [node("QLinearConv", ["x", *around], "a"), node("MaxPool", ["a"], "p", kernel_shape=[2, 2], strides=[2, 2]),
             node("QLinearConv", ["p", *around])]
    graph = derived(nodes, [1, 8, 32, 32], ["y"], {"scale": 0.1, "zero": ZERO, "w": np.ones(EIGHT, np.uint8)},
                    TensorProto.UINT8)
    assert Counter(placed(graph)) == {
        ("QLinearConv", "cpu"): 2, ("Transpose", "cpu"): 4, ("MaxPool", "cuda"): 1, ("MemcpyFromHost", "cuda"): 1,
        ("MemcpyToHost", "cuda"): 1}


def test_work_after_a_product_of_integers_is_on_cuda() -> None:
    nodes = [node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
             node("MatMulInteger", ["q", "w", "zero", "wzero"], "m"), node("Cast", ["m"], "f", to=FLOAT),
             node("Mul", ["scale", "factor"], "both"), node("Mul", ["f", "both"])]
    providers = placed(derived(nodes, [8, 64], ["y"], {"w": np.ones((64, 64), np.int8), "wzero": np.int8(0), "factor": 0.5}))
    assert {(op_type, provider) for op_type, provider in providers if "Memcpy" not in op_type} == {
        ("DynamicQuantizeLinear", "cpu"), ("MatMulInteger", "cpu"), ("Cast", "cuda"), ("Mul", "cuda")}


def test_a_graph_that_the_cpu_provider_optimised_before_keeps_its_convolutions_on_the_cpu(tmp_path: Path) -> None:
    saved = tmp_path / "saved.onnx"
    made = model([node("Conv", ["x", "w"], "c"), node("Relu", ["c"])], [value("x", 1, 16, 32, 32)], ["y"],
                 {"w": np.full((16, 16, 3, 3), 0.01, np.float32)})
    open_session(made.SerializeToString(), "cpu", save_to=saved)
    if not any(entry.domain == "com.microsoft.nchwc" for entry in onnx.load(saved).graph.node):
        pytest.skip("this CPU has no blocked layout")
    assert {entry.provider for entry in parse_graph(saved, "cuda").nodes if entry.op_type == "Conv"} == {"cpu"}


@pytest.mark.parametrize(("made", "refused"), [
    (node("LSTM", "xwr", hidden_size=4), False),
    (node("LSTM", "xwr", hidden_size=4, clip=1.0), True),
    (node("LSTM", ["x", "w", "r", "", "", "", "", "p"], hidden_size=4), True),
    (node("LSTM", "xwr", hidden_size=4, activations=["Sigmoid", "Tanh", "Relu"]), True),
    (node("GRU", "xwr", hidden_size=4), True),
    (node("GRU", "xwr", hidden_size=4, linear_before_reset=0), True),
    (node("GRU", "xwr", hidden_size=4, linear_before_reset=1), False),
    (node("ConvTranspose", "xw", pads=[0, 0, 1, 1]), True),
    (node("ConvTranspose", "xw", pads=[1, 1, 1, 1]), False),
    (node("ConvTranspose", "xw", auto_pad="SAME_UPPER"), True),
    (node("Cast", "x", to=TensorProto.STRING), True),
    (node("Cast", "x", to=TensorProto.FLOAT16), False),
])
def test_nodes_that_the_cuda_provider_refuses_although_it_has_a_kernel(made: Any, refused: bool) -> None:
    assert refuses(made) == refused
