"""Graphs with operators that only GPUs run, derived on a machine without one; and models that a target refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from small_graphs import BOOL, CONTRIB, FLOAT, HALF, INT32, graph, model, node, unranked, value

from hase.inference import predict
from hase.ort_analysis.cuda.placement import cuda_kernel
from hase.ort_analysis.cuda.rewrites import BY_SCHEMA, COVERS
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import ModelRecord
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda

without_gpu = pytest.mark.skipif(has_cuda(), reason="with a GPU the graph is not derived")
GAMMA, BETA = np.ones(16, np.float32), np.zeros(16, np.float32)


def of(op_type: str, inputs: Sequence[str], output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return node(op_type, inputs, output, op_type.lower(), CONTRIB, **attributes)


def built(nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, Sequence[int | str]], weights: Mapping[str, np.ndarray],
          dtype: int = HALF, opset: int = 20, more: Sequence[onnx.ValueInfoProto] = ()) -> onnx.ModelProto:
    """Its output is `y`. Weights of float64 become those of `dtype`."""
    numpy_type = helper.tensor_dtype_to_np_dtype(dtype)
    return model(nodes, [*(value(name, *shape, kind=dtype) for name, shape in inputs.items()), *more], [unranked("y", dtype)],
                 {name: array.astype(numpy_type) if array.dtype == np.float64 else array for name, array in weights.items()},
                 opset)


def outputs(record: ModelRecord) -> list[tuple[str, str, tuple[int, ...], str]]:
    """The first output's type and shape, and the provider, of each node."""
    kernels = [(record.kernel_of(entry), entry.provider) for entry in record.nodes]
    return [(kernel.op_type, kernel.outputs[0].dtype, kernel.outputs[0].shape, provider) for kernel, provider in kernels]


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
    alone, inputs, weights, shape = ALONE[name]
    record = analyze(built([alone], inputs, weights, opset=opset), "cuda", name="alone")
    assert outputs(record) == [(name, "float16", shape, "cuda")]
    (kernel,) = record.kernels.values()
    assert [tensor.constant for tensor in kernel.inputs] == [letter in weights for letter in alone.input]
    assert [tensor.dtype for tensor in kernel.inputs if tensor.constant] == [
        "float32" if array.dtype == np.float32 else "float16" for array in weights.values()]
    assert [(origin.name, origin.op_type) for origin in record.nodes[0].origins] == [(name.lower(), name)]


HEADS: dict[str, np.ndarray] = {"w": np.ones((32, 96)), "b": np.ones(96)}  # the weights of an attention


@without_gpu
def test_shapes_from_schemas() -> None:
    """Operators of which only ONNX Runtime's schemas tell the shapes, in a chain and at any batch."""
    layers: list[onnx.NodeProto] = []
    for before, after in (("x", "a1"), ("a1", "a2")):
        layers += [of("LongformerAttention", [before, "w", "b", "m", "w", "b", "g"], f"of_{after}", num_heads=4, window=8),
                   node("Add", [f"of_{after}", before], after, name=after)]
        layers[-2].name = f"longformer_{after}"
    chain = built([*layers, node("Relu", ["a2"])], {"x": ("batch", 16, 32), "m": ("batch", 16)}, HEADS,
                  more=[value("g", "batch", 16, kind=INT32)])
    for static in (False, True):
        record = analyze(chain, "cuda", {"batch": 2}, "schemas", static=static)
        assert outputs(record) == [(name, "float16", (2, 16, 32), "cuda") for name in (
            *("LongformerAttention", "Add") * 2, "Relu")]
    with pytest.raises(UserError, match="holds an operator that this ONNX Runtime can't run"):
        analyze(chain, "cpu", {"batch": 2}, "refused")


@without_gpu
def test_more_outputs_and_sizes_by_data() -> None:
    """A cache that stays as long as it is; and a size that depends on data, which the user gives."""
    cache = (2, 2, 4, 20, 8)
    masked = built([of("DecoderMaskedSelfAttention", ["x", "w", "b", "", "c"], num_heads=4, past_present_share_buffer=1)],
                   {"x": (2, 1, 32), "c": cache}, HEADS)
    masked.graph.node[0].output.append("after")
    masked.graph.output.append(unranked("after", HALF))
    (kernel,) = analyze(masked, "cuda", name="masked").kernels.values()
    assert [tensor.shape for tensor in kernel.outputs] == [(2, 1, 32), cache]
    padding = built([of("RemovePadding", ["x", "n"], "p"), node("Relu", ["p"])], {"x": (2, 16, 32)}, {},
                    more=[value("n", 2, kind=INT32)])
    padding.graph.node[0].output.extend(["places", "before", "longest"])
    with pytest.raises(UserError, match=r"tensor p \(\[\?, 32\]\) depends on data .* --dim p.0=100"):
        analyze(padding, "cuda", name="padding")
    record = analyze(padding, "cuda", {"p.0": 20, "longest.0": 1}, "padding")
    assert outputs(record)[-1] == ("Relu", "float16", (20, 32), "cuda")


def test_the_gpu_has_a_kernel_for_each() -> None:
    assert {name for name in COVERS.keys() | BY_SCHEMA if cuda_kernel(name, CONTRIB, 1, (), ()) is None} == set()


@without_gpu
def test_what_stands_around_it_is_fused_as_ever() -> None:
    """A Gelu before it, a batch of any size, and weights over a kilobyte, which lie in another file meanwhile."""
    nodes = [of("NhwcConv", "xwc", "a", kernel_shape=[3, 3], pads=[1] * 4), node("Gelu", ["a"], "e"), node("Relu", ["e"], "r"),
             of("GroupNorm", "rgb", "n", groups=4, activation=1), node("Identity", ["n"], "i"), node("Add", ["i", "a"])]
    weights: dict[str, np.ndarray] = {"w": np.ones((16, 3, 3, 16)), "c": np.ones(16), "g": GAMMA, "b": BETA}
    record = analyze(built(nodes, {"x": ("batch", 32, 32, 16)}, weights), "cuda", {"batch": 4}, "around")
    shape = (4, 32, 32, 16)
    assert outputs(record) == [(name, "float16", shape, "cuda") for name in ("NhwcConv", "Gelu", "Relu", "GroupNorm", "Add")]
    assert record.weight_bytes == 2 * 16 * 9 * 16 + 2 * 16 + 4 * 16 * 2
    convolution = record.kernels[record.nodes[0].kernel_id]
    assert convolution.flops == 4 * 32 * 32 * 16 * (2 * 9 * 16 + 1)


@without_gpu
def test_in_a_body() -> None:
    chosen = node("If", ["c"], name="if", then_branch=graph([of("BiasSplitGelu", ["x", "b16"], "t")], [], [unranked("t")]),
                  else_branch=graph([of("BiasAdd", ["h", "b8", "h"], "e")], [], [unranked("e")]))
    branches = built([node("Split", ["x"], ["h", "rest"], axis=-1, num_outputs=2), chosen], {"x": (2, 64, 16)},
                     {"b16": np.ones(16), "b8": np.ones(8)}, FLOAT, more=[value("c", kind=BOOL)])
    for side, expected in (("then", "BiasSplitGelu"), ("else", "BiasAdd")):
        record = analyze(branches, "cuda", {side: 1}, "body")
        assert [(kernel.op_type, kernel.outputs[0].shape) for kernel in record.kernels.values()
                if kernel.domain == CONTRIB] == [(expected, (2, 64, 8))]


@without_gpu
def test_its_prediction_is_marked_as_a_guess() -> None:
    alone, inputs, weights, _ = ALONE["GroupNorm"]
    prediction = predict(built([alone], inputs, weights), target="nvidia-h200")
    assert prediction.rough_estimate
    assert prediction.time_share["estimated"] == 1.0
    assert prediction.interval_ms[0] < prediction.latency_ms < prediction.interval_ms[1]


def test_a_target_refuses_what_it_cant_run() -> None:
    """A CPU also refuses packed attention, of which it opens a session, but which it can't run."""
    alone, inputs, weights, _ = ALONE["BiasAdd"]
    packed = built([of("MultiHeadAttention", ["x"], num_heads=4)], {"x": (1, 16, 4, 3, 16)}, {})
    for refused, device, message in (
            (built([alone], inputs, weights), "cpu", "holds an operator that this ONNX Runtime can't run"),
            (built([alone], inputs, weights, TensorProto.BFLOAT16), "" if has_cuda() else "cuda",
             r"the CUDA provider has no BiasAdd of bfloat16, and the CPU provider has none at all"),
            (packed, "cpu", r"^refused: ONNX Runtime refuses to run it on a CPU: multiheadattention: ")):
        if device:
            with pytest.raises(UserError, match=message):
                analyze(refused, device, name="refused")
