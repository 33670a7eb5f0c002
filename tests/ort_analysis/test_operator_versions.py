"""A kernel's identity across operator sets, and descriptions that hold all that a single-node model needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from small_graphs import model, node, value

from hase.learned.kernels.features import KERNEL_FEATURES, kernel_features
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import canonical_description, describe_kernel


def cell(opset: int) -> onnx.ModelProto:
    """A piece of MobileNetV2 (Conv, Clip, a mean, Gemm) beside a Split, a Cast and a pool, as exported at an operator set."""
    weight = np.random.default_rng(0).standard_normal
    mean: Any = (["c6", "axes"], {}) if opset >= 18 else (["c6"], {"axes": [2, 3]})
    parts: Any = {"num_outputs": 2} if opset >= 18 else {}
    nodes = [node("Conv", ["x", "w"], "c", pads=[1, 1, 1, 1]), node("Clip", ["c", "low", "high"], "c6"),
             node("ReduceMean", mean[0], "m", keepdims=0, **mean[1]), node("Gemm", ["m", "head"]),
             node("Split", ["c6"], ["left", "right"], axis=1, **parts),
             node("AveragePool", ["left"], "pool", kernel_shape=[2, 2]), node("Cast", ["right"], "half", to=TensorProto.DOUBLE)]
    return model(nodes, [value("x", 2, 4, 8, 8)], ["y", "pool", "half"], {
        "w": weight((8, 4, 3, 3)).astype(np.float32), "head": weight((8, 5)).astype(np.float32), "axes": [2, 3], "low": 0.0,
        "high": 6.0}, opset)


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_a_model_has_the_same_kernels_at_every_operator_set(provider: str) -> None:
    reference = set(analyze(cell(20), provider).kernels)
    assert len(reference) >= 7
    for opset in (13, 17, 18, 19, 21, 22, 23, 24):
        assert set(analyze(cell(opset), provider).kernels) == reference, opset


def version(op_type: str, opset: int, inputs: Sequence[Any] = ("float32",), outputs: int = 1, **attributes: Any) -> int:
    """The operator set in the description of a node from operator set `opset`."""
    tensors = [KernelInput(dtype=dtype, shape=(2, 4)) for dtype in inputs]
    return canonical_description(op_type, "", opset, attributes, tensors, [Tensor(dtype="float32", shape=(2, 4))] * outputs)[0]


def test_operators_whose_meaning_changed_keep_their_version() -> None:
    assert [version("Relu", opset) for opset in (6, 13, 14, 20, 24)] == [20] * 5
    assert [version("Softmax", opset, axis=1) for opset in (11, 13, 18)] == [11, 20, 20]
    three_inputs = ("float32",) * 3
    assert [version("GroupNormalization", opset, three_inputs, num_groups=2) for opset in (18, 20, 21, 23)] == [20, 20, 21, 21]
    assert [version("AveragePool", opset, kernel_shape=[2], ceil_mode=ceil) for opset, ceil in ((17, 0), (17, 1), (22, 1))] == [
        20, 11, 20]
    assert version("Relu", 22, ["bfloat16"]) == version("Relu", 14, ["bfloat16"]) == 20
    assert [version("Mish", 22, [dtype]) for dtype in ("float32", "bfloat16")] == [20, 22]  # 20 does not take bfloat16
    assert [version("Cast", 24, to=1, saturate=1, round_mode=mode) for mode in ("up", "down")] == [20, 24]
    assert [version("RMSNormalization", opset, three_inputs[:2]) for opset in (23, 24)] == [23, 23]
    assert [version("Attention", opset, ("float32",) * count) for opset, count in ((23, 3), (24, 3), (24, 7))] == [23, 23, 24]
    assert canonical_description("Conv", "com.microsoft.nchwc", 1, {}, [], [])[0] == 1
    assert version("NobodyKnows", 18) == 18


def test_bounds_and_axes_that_were_attributes() -> None:
    x = KernelInput(dtype="float32", shape=(2, 4))
    outputs = [Tensor(dtype="float32", shape=(2, 4))]
    relu6 = canonical_description("Clip", "", 6, {"min": 0.0, "max": 6.0}, [x], outputs)
    assert relu6[0] == 20
    assert relu6[1] == {}
    assert [tensor.values for tensor in relu6[2]] == [None, (0.0,), (6.0,)]
    low = canonical_description("Clip", "", 6, {"min": 0.0, "max": 3.4028234663852886e38}, [x], outputs)
    assert [tensor.values for tensor in low[2]] == [None, (0.0,)]
    squeezed = canonical_description("Squeeze", "", 11, {"axes": [0]}, [x], outputs)
    assert (squeezed[0], squeezed[2][1].values, squeezed[2][1].dtype) == (20, (0,), "int64")


def gather(rows: int, lookups: int) -> Kernel:
    return describe_kernel("Gather", "", 20, {"axis": 0},
                           [KernelInput(dtype="float32", shape=(rows, 64), constant=True),
                            KernelInput(dtype="int64", shape=(lookups,))], [Tensor(dtype="float32", shape=(lookups, 64))])


def test_a_gather_costs_as_much_as_it_reads() -> None:
    assert gather(10_000_000, 32).bytes_read == 32 * 64 * 4 + 32 * 8
    assert gather(8, 32).bytes_read == 8 * 64 * 4 + 32 * 8  # a small table is read once
    assert gather(10_000_000, 32).weight_bytes == 10_000_000 * 64 * 4


def lstm(sequence: int, batch: int, layout: int = 0, hidden: int = 16, size: int = 8) -> Kernel:
    x = (batch, sequence, size) if layout else (sequence, batch, size)
    constants = [KernelInput(dtype="float32", shape=shape, constant=True)
                 for shape in ((2, 4 * hidden, size), (2, 4 * hidden, hidden), (2, 8 * hidden))]
    return describe_kernel("LSTM", "", 22, {"direction": "bidirectional", "hidden_size": hidden, "layout": layout},
                           [KernelInput(dtype="float32", shape=x), *constants],
                           [Tensor(dtype="float32", shape=(sequence, 2, batch, hidden))])


def test_a_recurrent_layer_costs_its_steps() -> None:
    layer = lstm(sequence=30, batch=3)
    assert layer.flops == 2 * 2 * 30 * 3 * 4 * 16 * (8 + 16)
    assert lstm(sequence=30, batch=3, layout=1).flops == layer.flops
    assert layer.bytes_read - lstm(sequence=29, batch=3).bytes_read == 3 * 8 * 4 + 2 * 4 * 16 * 16 * 4  # an input, and R again
    waits = [kernel_features(kernel)[KERNEL_FEATURES.index("tables")] for kernel in (layer, lstm(30, 3, layout=1), lstm(1, 3))]
    assert waits == [29, 29, 0]
