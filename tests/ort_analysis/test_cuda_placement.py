"""Which nodes a CUDA session gives to which provider, predicted without a GPU, and what it can't capture as a CUDA graph. The
expected values follow ONNX Runtime 1.31's rules; that these are right is checked on GPU machines
(recipes/kinds/compare_on_gpu.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from small_graphs import BOOL, FLOAT, graph, model, node, value

from hase.inference import predict
from hase.inference.prediction.conditions import RunMode
from hase.ort_analysis.cuda.placement import capture_obstacle, cuda_kernel, cuda_refuses, place_nodes
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.parsing import ParsedGraph, parse_graph
from hase.records.dataset_files import journal_path, read_header
from hase.records.kernel_record import KernelInput
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import Block
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.paths import Workspace

pytestmark = pytest.mark.skipif(has_cuda(), reason="with a GPU nothing is derived")
TARGET = "nvidia-h200-cuda-ort1.31-all"
CAPTURED = RunMode(cuda_graph=True)


def derived(nodes: list[Any], x: Sequence[int], outputs: Sequence[str] = ("y",), constants: Mapping[str, Any] | None = None
            ) -> ParsedGraph:
    """The CUDA graph of a model of these nodes, whose input is `x`."""
    return parse_graph(model(nodes, [value("x", *x)], outputs, constants), "cuda")


def placed(graph: ParsedGraph) -> list[tuple[str, str]]:
    return [(entry.op_type, entry.provider) for entry in graph.nodes]


@pytest.mark.parametrize(("op_type", "domain", "opset", "inputs", "outputs", "on_cuda"), [
    ("Conv", "", 20, ["float32", "float32"], ["float32"], True),
    ("Conv", "com.microsoft.nchwc", 1, ["float32", "float32"], ["float32"], False),
    ("MatMulInteger", "", 20, ["int8", "int8"], ["int32"], True),
    ("MatMulInteger", "", 20, ["uint8", "int8"], ["int32"], False),
    ("Relu", "", 12, ["bfloat16"], ["bfloat16"], False),
    ("Relu", "", 13, ["bfloat16"], ["bfloat16"], True),
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
    on_gpu = [kernel is not None for kernel in place_nodes(nodes, tensors, {"": 20}, {"x"})]
    assert on_gpu == [True, True, False, False, True]


def test_an_operator_that_cuda_lacks_is_reached_by_copies() -> None:
    """A tensor is copied once for all its readers, and an input only if both providers read it."""
    graph = derived([node("Relu", ["x"], "r"), node("Sinh", ["r"], "s"), node("Sigmoid", ["s"])], [4, 8])
    assert placed(graph) == [("Relu", "cuda"), ("MemcpyToHost", "cuda"), ("Sinh", "cpu"), ("MemcpyFromHost", "cuda"),
                             ("Sigmoid", "cuda")]
    assert (graph.nodes[1].inputs, graph.nodes[2].inputs) == (("r",), graph.nodes[1].outputs)
    assert graph.tensors[graph.nodes[1].outputs[0]].shape == (4, 8)
    graph = derived([node("Relu", ["x"], "r"), node("Sinh", ["r"], "s"), node("Cosh", ["r"], "c"), node("Sigmoid", ["r"])],
                    [4, 8], ["s", "c", "y"])
    assert Counter(op_type for op_type, _ in placed(graph))["MemcpyToHost"] == 1
    assert Counter(provider for _, provider in placed(graph)) == {"cuda": 3, "cpu": 2}
    read_by_both = derived([node("Relu", ["x"]), node("Sinh", ["x"], "z")], [4, 8], ["y", "z"])
    assert sorted(placed(read_by_both)) == [("MemcpyFromHost", "cuda"), ("Relu", "cuda"), ("Sinh", "cpu")]
    assert placed(derived([node("Sinh", ["x"])], [4, 8])) == [("Sinh", "cpu")]


def test_quantised_convolutions_run_on_the_cpu_and_convolutions_of_dequantised_tensors_on_cuda() -> None:
    by_name = {}
    for name, middle in (
            ("integers", [node("QLinearConv", ["q", "scale", "zero", "w", "scale", "wzero", "scale", "zero"], "c")]),
            ("floats", [node("DequantizeLinear", ["q", "scale", "zero"], "d"),
                        node("DequantizeLinear", ["w", "scale", "wzero"], "dw"), node("Conv", ["d", "dw"], "f"),
                        node("QuantizeLinear", ["f", "scale", "zero"], "c")])):
        by_name[name] = placed(derived(
            [node("QuantizeLinear", ["x", "scale", "zero"], "q"), *middle, node("DequantizeLinear", ["c", "scale", "zero"])],
            [1, 8, 16, 16], ["y"], {"scale": 0.1, "zero": np.uint8(128), "w": np.ones((8, 8, 3, 3), np.int8),
                                    "wzero": np.int8(0)}))
    assert {("QLinearConv", "cpu"), ("MemcpyToHost", "cuda"), ("MemcpyFromHost", "cuda")} <= set(by_name["integers"])
    assert ("Conv", "cuda") in by_name["floats"]
    assert {provider for _, provider in by_name["floats"]} == {"cuda"}


def test_a_pool_between_quantised_convolutions_runs_on_cuda_and_their_transposes_on_the_cpu() -> None:
    around = ["scale", "zero", "w", "scale", "zero", "scale", "zero"]
    nodes = [node("QLinearConv", ["x", *around], "a"), node("MaxPool", ["a"], "p", kernel_shape=[2, 2], strides=[2, 2]),
             node("QLinearConv", ["p", *around])]
    made = model(nodes, [value("x", 1, 8, 32, 32, kind=TensorProto.UINT8)], constants={
        "scale": 0.1, "zero": np.uint8(128), "w": np.ones((8, 8, 3, 3), np.uint8)})
    assert Counter(placed(parse_graph(made, "cuda"))) == {
        ("QLinearConv", "cpu"): 2, ("Transpose", "cpu"): 4, ("MaxPool", "cuda"): 1, ("MemcpyFromHost", "cuda"): 1,
        ("MemcpyToHost", "cuda"): 1}


def test_work_after_a_product_of_integers_is_on_cuda() -> None:
    nodes = [node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
             node("MatMulInteger", ["q", "w", "zero", "wzero"], "m"), node("Cast", ["m"], "f", to=FLOAT),
             node("Mul", ["scale", "factor"], "both"), node("Mul", ["f", "both"])]
    providers = placed(derived(nodes, [8, 64], ["y"], {"w": np.ones((64, 64), np.int8), "wzero": np.int8(0), "factor": 0.5}))
    assert {(op_type, provider) for op_type, provider in providers if "Memcpy" not in op_type} == {
        ("DynamicQuantizeLinear", "cpu"), ("MatMulInteger", "cpu"), ("Cast", "cuda"), ("Mul", "cuda")}


@pytest.mark.parametrize(("made", "refused"), [
    (node("LSTM", "xwr", hidden_size=4), False),
    (node("LSTM", "xwr", hidden_size=4, activations=["Sigmoid", "Tanh", "Relu"]), True),
    (node("GRU", "xwr", hidden_size=4, linear_before_reset=0), True),
    (node("GRU", "xwr", hidden_size=4, linear_before_reset=1), False),
    (node("ConvTranspose", "xw", pads=[0, 0, 1, 1]), True),
    (node("ConvTranspose", "xw", pads=[1, 1, 1, 1]), False),
    (node("Cast", "x", to=TensorProto.STRING), True),
])
def test_nodes_that_the_cuda_provider_refuses_although_it_has_a_kernel(made: Any, refused: bool) -> None:
    assert cuda_refuses(made) == refused


def wide(joined: int) -> onnx.ModelProto:
    """A Concat of `joined` tensors after a Relu."""
    names = [f"x{place}" for place in range(joined)]
    return model([node("Relu", names[:1], "r"), node("Concat", ["r", *names[1:]], name="wide", axis=1)],
                 [value(name, 1, 4, 8, 8) for name in names])


def after_relu(op: str, *inputs: str) -> onnx.ModelProto:
    return model([node("Relu", ["x"], "r"), node(op, ["r", *inputs], name="odd")],
                 [value("x", 16), *(value(name, 16, kind=BOOL) for name in inputs)])


BRANCHES = {name: graph([node(op, ["x"], f"z{op}")], [], [value(f"z{op}", 4)])
            for name, op in (("then_branch", "Relu"), ("else_branch", "Neg"))}


@pytest.mark.parametrize(("proto", "message"), [
    (after_relu("NonZero"), "odd (NonZero) makes the host wait for the size of its output"),
    (after_relu("Compress", "keep"), "odd (Compress) makes the host wait for the size of its output"),
    (after_relu("Acos"), "(MemcpyToHost) copies between the host and the GPU"),  # the CUDA provider has no Acos
    (model([node("Acos", ["x"], name="acos")], [value("x", 64)]), "acos (Acos) runs on the CPU"),  # and nothing is copied
    (wide(33), "wide joins 33 inputs, and a Concat of more than 32 copies tables from the host"), (wide(32), None),
    (model([node("If", ["condition"], name="choose", **BRANCHES)], [value("condition", kind=BOOL), value("x", 4)]),
     "choose (If) holds a graph of its own")])
def test_nodes_that_forbid_capture_as_a_cuda_graph(proto: onnx.ModelProto, message: str | None) -> None:
    obstacle = capture_obstacle(analyze(proto, "cuda"))
    assert obstacle is None if message is None else (obstacle or "").endswith(message)


@pytest.mark.slow
def test_which_models_of_the_shipped_dataset_can_be_captured(h200_workspace: Workspace) -> None:
    """For the shipped dataset, exactly the models whose capture failed have an obstacle."""
    folder = h200_workspace.dataset(TARGET)
    flavour = read_header(folder).target.flavour
    lines = journal_path(folder).read_text().splitlines()
    captures = [m for line in lines if '"cuda_graph"' in line for m in Block.model_validate_json(line).measurements
                if m.label == "cuda_graph"]
    failed = {m.id for m in captures if m.status != "ok"}
    obstacles = {name: capture_obstacle(read_model_record(record_path(h200_workspace, flavour, name)))
                 for name in {m.id for m in captures}}
    assert len(obstacles) == 270
    assert {name for name, obstacle in obstacles.items() if obstacle} == failed
    assert failed == {f"densenet169@batch={batch}" for batch in (1, 4, 16, 64)}


def test_a_model_that_cant_be_captured_is_refused() -> None:
    record = analyze(wide(33), "cuda")
    with pytest.raises(UserError, match=r"can't capture it as a CUDA graph: wide joins 33 inputs, and a Concat of more than 32 "
                                        r"copies tables from the host; predict it without --cuda-graph"):
        predict(record, target=TARGET, run_mode=CAPTURED)
    assert not any("capture" in text for text in predict(analyze(wide(32), "cuda"), target=TARGET, run_mode=CAPTURED).warnings)


def test_sizes_computed_on_the_cpu_give_a_warning() -> None:
    """Half the last axis, computed from a shape."""
    nodes = [node("Relu", ["x"], "r"), node("Shape", ["r"], "shape"), node("Gather", ["shape", "last"], "width", "width"),
             node("Div", ["width", "two"], "half", "half"), node("Concat", ["rest", "half"], "to", "to", axis=0),
             node("Reshape", ["r", "to"], "z"), node("Exp", ["z"])]
    record = analyze(model(nodes, [value("x", "batch", "width")], [value("y", "b", "w")],
                           {"last": np.array([1]), "two": [2], "rest": [-1]}), "cuda", {"batch": 2, "width": 64})
    assert {"half", "to"} <= {entry.name for entry in record.nodes if entry.provider == "cpu"}
    captured = predict(record, target=TARGET, run_mode=CAPTURED)
    assert [text for text in captured.warnings if "work out sizes on the CPU (width, half …)" in text]
