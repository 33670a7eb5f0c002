"""The graph that the CUDA provider runs, made without a GPU, also of operators that only GPUs run; and what a target refuses.
Ids and shapes named here are from graphs saved on an H200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import small_model
from onnx import TensorProto, helper
from small_graphs import CONTRIB, FLOAT, HALF, INT32, INT64, model, node, unranked, value

from hase.ort_analysis.cuda.placement import cuda_kernel
from hase.ort_analysis.cuda.rewrites import BY_SCHEMA, COVERS, bias_alignment
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.parsing import parse_graph
from hase.records.kernel_record import ModelRecord
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda

without_gpu = pytest.mark.skipif(has_cuda(), reason="with a GPU the graph is not derived")


@pytest.mark.parametrize(("left", "right", "axis", "opset", "alignment"), [
    ((128, 3, 49, 49), (1, 3, 49, 49), -1, 20, (False, 3, False)),  # swin: one bias for all windows
    ((1, 3, 49, 49), (128, 3, 49, 49), -1, 20, (True, 3, False)),  # the bias on the left
    ((8, 12, 128, 128), (8, 1, 1, 128), -1, 20, (False, 3, True)),  # a mask per sentence
    ((8, 12, 128), (8, 12, 128), 1, 20, None),  # another axis than the last
    ((8, 12, 128), (8, 12, 128), None, 11, (False, 1, True)),  # before operator set 13: over all from axis 1 on
    ((4, 3, 5, 7), (4, 1, 5, 7), -1, 20, None),  # neither inner nor outer
])
def test_when_a_sum_and_a_softmax_run_as_one(left: tuple[int, ...], right: tuple[int, ...], axis: int | None, opset: int,
                                             alignment: tuple[bool, int, bool] | None) -> None:
    assert bias_alignment(left, right, axis, opset) == alignment


@without_gpu
def test_a_biased_softmax_is_the_kernel_of_the_gpu() -> None:
    shape = (128, 3, 49, 49)
    nodes = [node("Neg", ["x"], "n"), node("Add", ["n", "bias"], "a"), node("Softmax", ["a"], "s", axis=-1), node("Neg", ["s"])]
    record = analyze(model(nodes, [value("x", *shape)], [value("y", *shape)],
                           {"bias": np.ones((1, 3, 49, 49), np.float32)}), "cuda")
    assert [entry.kernel_id.partition("_")[0] for entry in record.nodes] == ["Neg", "BiasSoftmax", "Neg"]
    assert record.nodes[1].kernel_id == "BiasSoftmax_49x49_in128x3x49x49-1x3x49x49_fp32_f9bab575"
    assert [origin.op_type for origin in record.nodes[1].origins] == ["Add", "Softmax"]
    read_twice = [node("Add", ["x", "z"], "a"), node("Softmax", ["a"], "s", axis=-1), node("Mul", ["s", "a"])]
    graph = parse_graph(model(read_twice, [value("x", 4, 8), value("z", 4, 8)], [value("y", 4, 8)]), "cuda")
    assert [entry.op_type for entry in graph.nodes] == ["Add", "Softmax", "Mul"]


@without_gpu
def test_half_precision_runs_the_same_kernels_as_single_precision() -> None:
    float16, float32 = analyze(small_model(dtype="float16"), "cuda"), analyze(small_model(), "cuda")
    assert float16.derived
    assert [float16.kernels[node.kernel_id].type for node in float16.nodes] == [
        float32.kernels[node.kernel_id].type for node in float32.nodes]
    assert {kernel.dtype for kernel in float16.kernels.values()} == {"float16"}
    assert 2 * float16.weight_bytes == float32.weight_bytes
    assert {tensor.dtype for tensor in (*float16.inputs.values(), *float16.outputs.values())} == {"float16"}


def mixed(middle: int, opset: int = 17) -> onnx.ModelProto:
    """A product in single precision and one in the type `middle`, casts between them, and a whole-number input that is cast to
    that type and multiplied."""
    nodes = [node("MatMul", ["x", "w"], "first", "first_product"), node("Cast", ["first"], "narrow", "to_narrow", to=middle),
             node("MatMul", ["narrow", "v"], "second", "second_product"),
             node("Cast", ["n"], "counted", "from_whole", to=middle), node("Mul", ["second", "counted"], "sum", "scaled"),
             node("Cast", ["sum"], "wide", "to_wide", to=FLOAT), node("Relu", ["wide"], "y", "last")]
    v = helper.make_tensor("v", middle, [8, 8], np.ones(64))
    return model(nodes, [value("x", 4, 8), value("n", 4, 8, kind=INT64)], [value("y", 4, 8)],
                 {"w": np.ones((8, 8), np.float32), "v": v}, opset)


@without_gpu
@pytest.mark.parametrize(("middle", "dtype"), [(TensorProto.FLOAT16, "float16"), (TensorProto.BFLOAT16, "bfloat16")])
def test_mixed_types_and_their_casts_are_kept(middle: int, dtype: str) -> None:
    graph = parse_graph(mixed(middle), "cuda")
    types = {name: tensor.dtype for name, tensor in graph.tensors.items()}
    by_name = {entry.name: (entry.op_type, [types[name] for name in entry.inputs], types[entry.outputs[0]])
               for entry in graph.nodes}
    assert {name.split("/")[0]: value for name, value in by_name.items()} == {
        "first_product": ("MatMul", ["float32", "float32"], "float32"), "to_narrow": ("Cast", ["float32"], dtype),
        "second_product": ("MatMul", [dtype, dtype], dtype), "from_whole": ("Cast", ["int64"], dtype),
        "scaled": ("Mul", [dtype, dtype], dtype), "to_wide": ("Cast", [dtype], "float32"),
        "last": ("Relu", ["float32"], "float32")}
    assert {entry.provider for entry in graph.nodes} == {"cuda"}


@without_gpu
def test_gelu_in_half_precision_is_fused_as_on_a_gpu() -> None:
    """As exporters write it, with √2 rounded to half precision."""
    nodes = [node("Div", ["x", "root"], "d"), node("Erf", ["d"], "e"), node("Add", ["e", "one"], "a"),
             node("Mul", ["x", "a"], "m"), node("Mul", ["m", "half"])]
    made = model(nodes, [value("x", 4, 8, kind=HALF)], [value("y", 4, 8, kind=HALF)],
                 {"root": np.float16(2 ** 0.5), "one": np.float16(1), "half": np.float16(0.5)})
    assert [entry.op_type for entry in parse_graph(made, "cuda").nodes] == ["Gelu"]


@without_gpu
def test_a_model_that_mixes_types_in_an_old_operator_set_is_refused() -> None:
    with pytest.raises(UserError, match="mixes floating types in operator set 9"):
        parse_graph(mixed(TensorProto.FLOAT16, 9), "cuda")


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
    made = model([node("Add", ["x", "bias"], "sum"), node("Softmax", ["sum"], axis=-1)],
                 [value("x", "batch", 4, "rows", "columns"), value("bias", 1, 1, 1, "others")], opset=17)
    types = [entry.op_type for entry in parse_graph(made, "cuda", {"batch": 2, "rows": 8, "columns": 8, "others": 8},
                                                    static=static).nodes]
    assert types == (["BiasSoftmax"] if fused else ["Add", "Softmax"])


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


ALONE: dict[str, tuple[onnx.NodeProto, dict[str, Sequence[int]], dict[str, np.ndarray], tuple[int, ...]]] = {
    "NhwcConv": (of("NhwcConv", "xwb", kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2]), {"x": (2, 32, 32, 16)},
                 {"w": np.ones((24, 3, 3, 16)), "b": np.ones(24)}, (2, 16, 16, 24)),
    "GroupNorm": (of("GroupNorm", "xgb", groups=4, activation=1), {"x": (2, 32, 32, 16)}, {"g": GAMMA, "b": BETA},
                  (2, 32, 32, 16)),
    "BiasAdd": (of("BiasAdd", "xbs"), {"x": (2, 64, 16), "s": (2, 64, 16)}, {"b": np.ones(16)}, (2, 64, 16)),
    "BiasSoftmax": (of("BiasSoftmax", "xb", axis=3, is_inner_broadcast=0), {"x": (2, 4, 16, 16), "b": (1, 4, 16, 16)}, {},
                    (2, 4, 16, 16)),
}


@without_gpu
@pytest.mark.parametrize("name", ALONE)
def test_an_operator_for_gpus_only(name: str) -> None:
    alone, inputs, weights, shape = ALONE[name]
    record = analyze(built([alone], inputs, weights, opset=13), "cuda", name="alone")
    assert outputs(record) == [(name, "float16", shape, "cuda")]
    (kernel,) = record.kernels.values()
    assert [tensor.constant for tensor in kernel.inputs] == [letter in weights for letter in alone.input]
    assert [tensor.dtype for tensor in kernel.inputs if tensor.constant] == [
        "float32" if array.dtype == np.float32 else "float16" for array in weights.values()]
    assert [(origin.name, origin.op_type) for origin in record.nodes[0].origins] == [(name.lower(), name)]


@without_gpu
def test_shapes_from_schemas() -> None:
    """An operator of which only ONNX Runtime's schemas tell the shapes, at any batch."""
    chain = built([of("LongformerAttention", ["x", "w", "b", "m", "w", "b", "g"], "a", num_heads=4, window=8),
                   node("Add", ["a", "x"], "s", name="sum"), node("Relu", ["s"])],
                  {"x": ("batch", 16, 32), "m": ("batch", 16)}, {"w": np.ones((32, 96)), "b": np.ones(96)},
                  more=[value("g", "batch", 16, kind=INT32)])
    for static in (False, True):
        record = analyze(chain, "cuda", {"batch": 2}, "schemas", static=static)
        assert outputs(record) == [(name, "float16", (2, 16, 32), "cuda") for name in ("LongformerAttention", "Add", "Relu")]
    with pytest.raises(UserError, match="holds an operator that this ONNX Runtime can't run"):
        analyze(chain, "cpu", {"batch": 2}, "refused")


@without_gpu
def test_a_size_that_depends_on_data() -> None:
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
