"""Graphs with operators that only GPUs run, derived on a machine without one; and models that a target refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hase.inference import predict
from hase.ort_analysis.cuda.placement import cuda_kernel
from hase.ort_analysis.cuda.rewrites import BY_SCHEMA, COVERS
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import ModelRecord
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda

CONTRIB = "com.microsoft"
without_gpu = pytest.mark.skipif(has_cuda(), reason="with a GPU the graph is not derived")
GAMMA, BETA = np.ones(16, np.float32), np.zeros(16, np.float32)


def of(op_type: str, inputs: Sequence[str], output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, list(inputs), [output], name=op_type.lower(), domain=CONTRIB, **attributes)


def model(nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, Sequence[int | str]], weights: Mapping[str, np.ndarray],
          dtype: int = TensorProto.FLOAT16, opset: int = 20) -> onnx.ModelProto:
    """Its output is `y`. Weights of float64 become those of `dtype`."""
    numpy_type = helper.tensor_dtype_to_np_dtype(dtype)
    made = [numpy_helper.from_array(value.astype(numpy_type) if value.dtype == np.float64 else value, name)
            for name, value in weights.items()]
    graph = helper.make_graph(
        list(nodes), "model", [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", dtype, None)], made)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset),
                                                                  helper.make_opsetid(CONTRIB, 1)])


def outputs(record: ModelRecord) -> list[tuple[str, str, tuple[int, ...], str]]:
    """The first output's type and shape, and the provider, of each node."""
    tensors = [(node, record.kernels[node.kernel_id]) for node in record.nodes]
    return [(kernel.op_type, kernel.outputs[0].dtype, kernel.outputs[0].shape, node.provider) for node, kernel in tensors]


ONES = {shape: np.ones(shape) for shape in ((16,), (24, 3, 3, 16), (16, 24))}
ALONE: dict[str, tuple[onnx.NodeProto, dict[str, Sequence[int]], dict[str, np.ndarray], tuple[int, ...]]] = {
    "NhwcConv": (of("NhwcConv", "xwb", kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2]), {"x": (2, 32, 32, 16)},
                 {"w": ONES[24, 3, 3, 16], "b": np.ones(24)}, (2, 16, 16, 24)),
    "GroupNorm": (of("GroupNorm", "xgb", groups=4, activation=1), {"x": (2, 32, 32, 16)}, {"g": GAMMA, "b": BETA},
                  (2, 32, 32, 16)),
    "SkipGroupNorm": (of("SkipGroupNorm", "xgbs", groups=4, activation=0), {"x": (2, 8, 8, 16), "s": (2, 16)},
                      {"g": GAMMA, "b": BETA}, (2, 8, 8, 16)),
    "BiasAdd": (of("BiasAdd", "xbs"), {"x": (2, 64, 16), "s": (2, 64, 16)}, {"b": ONES[16,]}, (2, 64, 16)),
    "BiasSplitGelu": (of("BiasSplitGelu", "xb"), {"x": (2, 64, 16)}, {"b": ONES[16,]}, (2, 64, 8)),
    "BiasSoftmax": (of("BiasSoftmax", "xb", axis=3, is_inner_broadcast=0), {"x": (2, 4, 16, 16), "b": (1, 4, 16, 16)}, {},
                    (2, 4, 16, 16)),
}


@without_gpu
@pytest.mark.parametrize("opset", [13, 20])
@pytest.mark.parametrize("name", ALONE)
def test_an_operator_for_gpus_only(name: str, opset: int) -> None:
    node, inputs, weights, shape = ALONE[name]
    record = analyze(model([node], inputs, weights, opset=opset), "cuda", name="alone")
    assert outputs(record) == [(name, "float16", shape, "cuda")]
    (kernel,) = record.kernels.values()
    assert [tensor.constant for tensor in kernel.inputs] == [letter in weights for letter in node.input]
    assert [tensor.dtype for tensor in kernel.inputs if tensor.constant] == [
        "float32" if value.dtype == np.float32 else "float16" for value in weights.values()]
    (origin,) = record.nodes[0].origins
    assert (origin.name, origin.op_type) == (name.lower(), name)


def attention(op_type: str, inputs: Sequence[str], output: str = "y", **attributes: Any) -> tuple[
        onnx.NodeProto, dict[str, np.ndarray]]:
    """A node with 4 heads of 8 numbers each, and its weights."""
    return of(op_type, inputs, output, num_heads=4, **attributes), {"w": np.ones((32, 96)), "b": np.ones(96)}


@without_gpu
def test_shapes_from_schemas() -> None:
    """Operators of which only ONNX Runtime's schemas tell the shapes, in a chain and at any batch."""
    layers: list[onnx.NodeProto] = []
    for number, (before, after) in enumerate((("x", "a1"), ("a1", "a2"))):
        longformer, weights = attention("LongformerAttention", [before, "w", "b", "m", "w", "b", "g"], f"l{number}", window=8)
        longformer.name = f"longformer{number}"
        layers += [longformer, helper.make_node("Add", [f"l{number}", before], [after], name=f"add{number}")]
    layers.append(helper.make_node("Relu", ["a2"], ["y"]))
    built = model(layers, {"x": ("batch", 16, 32), "m": ("batch", 16)}, weights)
    built.graph.input.append(helper.make_tensor_value_info("g", TensorProto.INT32, ["batch", 16]))
    for static in (False, True):
        record = analyze(built, "cuda", {"batch": 2}, "schemas", static=static)
        assert outputs(record) == [(name, "float16", (2, 16, 32), "cuda") for name in (
            *("LongformerAttention", "Add") * 2, "Relu")]
    with pytest.raises(UserError, match="holds an operator that this ONNX Runtime can't run"):
        analyze(built, "cpu", {"batch": 2}, "refused")


@without_gpu
def test_more_outputs_and_sizes_by_data() -> None:
    """A cache that stays as long as it is; and a size that depends on data, which the user gives."""
    node, weights = attention("DecoderMaskedSelfAttention", ["x", "w", "b", "", "c"], past_present_share_buffer=1)
    node.output.append("after")
    cache = (2, 2, 4, 20, 8)
    built = model([node], {"x": (2, 1, 32), "c": cache}, weights)
    built.graph.output.append(helper.make_tensor_value_info("after", TensorProto.FLOAT16, None))
    (kernel,) = analyze(built, "cuda", name="masked").kernels.values()
    assert [tensor.shape for tensor in kernel.outputs] == [(2, 1, 32), cache]
    built = model([of("RemovePadding", ["x", "n"], "p"), helper.make_node("Relu", ["p"], ["y"])], {"x": (2, 16, 32)}, {})
    built.graph.node[0].output.extend(["places", "before", "longest"])
    built.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT32, [2]))
    with pytest.raises(UserError, match=r"tensor p \(\[\?, 32\]\) depends on data .* --dim p.0=100"):
        analyze(built, "cuda", name="padding")
    record = analyze(built, "cuda", {"p.0": 20, "longest.0": 1}, "padding")
    assert outputs(record)[-1] == ("Relu", "float16", (20, 32), "cuda")


def test_the_gpu_has_a_kernel_for_each() -> None:
    assert {name for name in COVERS.keys() | BY_SCHEMA if cuda_kernel(name, CONTRIB, 1, (), ()) is None} == set()


@without_gpu
def test_what_stands_around_it_is_fused_as_ever() -> None:
    """A Gelu before it, a batch of any size, and weights over a kilobyte, which lie in another file meanwhile."""
    nodes = [of("NhwcConv", "xwc", "a", kernel_shape=[3, 3], pads=[1] * 4),
             helper.make_node("Gelu", ["a"], ["e"]), helper.make_node("Relu", ["e"], ["r"]),
             of("GroupNorm", "rgb", "n", groups=4, activation=1), helper.make_node("Identity", ["n"], ["i"]),
             helper.make_node("Add", ["i", "a"], ["y"], name="sum")]
    weights: dict[str, np.ndarray] = {"w": np.ones((16, 3, 3, 16)), "c": np.ones(16), "g": GAMMA, "b": BETA}
    record = analyze(model(nodes, {"x": ("batch", 32, 32, 16)}, weights), "cuda", {"batch": 4}, "around")
    shape = (4, 32, 32, 16)
    assert outputs(record) == [(name, "float16", shape, "cuda") for name in ("NhwcConv", "Gelu", "Relu", "GroupNorm", "Add")]
    assert record.weight_bytes == 2 * 16 * 9 * 16 + 2 * 16 + 4 * 16 * 2
    convolution = record.kernels[record.nodes[0].kernel_id]
    assert convolution.flops == 4 * 32 * 32 * 16 * (2 * 9 * 16 + 1)


@without_gpu
def test_in_a_body() -> None:
    def branch(name: str, node: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)])

    chosen = helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch("t", of("BiasSplitGelu", "xb", "t")),
                              else_branch=branch("e", of("BiasAdd", "hbh", "e")))
    half = helper.make_node("Split", ["x"], ["h", "rest"], axis=-1, num_outputs=2)
    built = model([half, chosen], {"x": (2, 64, 16)}, {"b": np.ones(16, np.float32)}, TensorProto.FLOAT)
    built.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    built.graph.node[1].attribute[1].g.node[0].input[1] = "b8"
    built.graph.initializer.append(numpy_helper.from_array(np.ones(8, np.float32), "b8"))
    for side, expected in (("then", "BiasSplitGelu"), ("else", "BiasAdd")):
        record = analyze(built, "cuda", {side: 1}, "body")
        assert [(kernel.op_type, kernel.outputs[0].shape) for kernel in record.kernels.values()
                if kernel.domain == CONTRIB] == [(expected, (2, 64, 8))]


@without_gpu
@pytest.mark.slow
def test_its_prediction_is_marked_as_a_guess() -> None:
    node, inputs, weights, _ = ALONE["GroupNorm"]
    prediction = predict(model([node], inputs, weights), target="nvidia-h200")
    assert prediction.rough_estimate
    assert prediction.time_share["estimated"] == 1.0
    assert prediction.interval_ms[0] < prediction.latency_ms < prediction.interval_ms[1]


# what a target refuses -----------------------------------------------------------------------------------------------------


def test_a_cpu_refuses_operators_for_gpus_only() -> None:
    node, inputs, weights, _ = ALONE["BiasAdd"]
    with pytest.raises(UserError, match="holds an operator that this ONNX Runtime can't run"):
        analyze(model([node], inputs, weights), "cpu", name="refused")


@without_gpu
def test_a_gpu_refuses_types_that_it_has_no_kernel_for() -> None:
    node, inputs, weights, _ = ALONE["BiasAdd"]
    with pytest.raises(UserError, match=r"the CUDA provider has no BiasAdd of bfloat16, and the CPU provider has none at all"):
        analyze(model([node], inputs, weights, TensorProto.BFLOAT16), "cuda", name="refused")


def test_a_cpu_refuses_packed_attention() -> None:
    """It opens a session of the model, but can't run it."""
    packed = model([of("MultiHeadAttention", ["x"], num_heads=4)], {"x": (1, 16, 4, 3, 16)}, {})
    with pytest.raises(UserError, match=r"^refused: ONNX Runtime refuses to run it on a CPU: multiheadattention: "):
        analyze(packed, "cpu", name="refused")
