"""Operators that were never measured on a GPU: estimated from measured operators of their class."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from inference import predict
from inference.core.answers import Prediction

TARGET = "nvidia-h200"  # its dataset holds nothing of ThresholdedRelu, Sign and LpNormalization


def predicted(op_type: str, inputs: list[list[int]], domain: str = "") -> Prediction:
    """One operator of float32 tensors of these shapes, all kernels predicted."""
    names = [f"x{place}" for place in range(len(inputs))]
    nodes = [helper.make_node(op_type, names, ["y"], domain=domain)]
    graph = helper.make_graph(nodes, op_type.lower(), [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                                                       for name, shape in zip(names, inputs, strict=True)],
                              [helper.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return predict(model, target=TARGET, strict=True)


def test_an_activation_costs_about_what_another_one_does() -> None:
    """And is marked as an estimate, with a wider interval."""
    known, unknown = (predicted(op, [[32, 256, 56, 56]]) for op in ("Sigmoid", "ThresholdedRelu"))
    assert unknown.kernels[0].latency_ms == pytest.approx(known.kernels[0].latency_ms, rel=0.3)
    assert (unknown.kernels[0].type, unknown.kernels[0].provenance) == ("ThresholdedRelu", "estimated")
    assert unknown.estimated_operators == ("ThresholdedRelu",)
    assert known.estimated_operators == known.doubtful_operators == ()
    assert unknown.interval_ms[1] / unknown.latency_ms > known.interval_ms[1] / known.latency_ms
    said = "ThresholdedRelu: never measured and estimated from operators of their class"
    assert [text for text in unknown.warnings if said in text]


def test_an_estimate_grows_with_its_tensors() -> None:
    small, large = (predicted("Sign", [[batch, 256, 56, 56]]).kernels[0].latency_ms for batch in (8, 64))
    assert 4 < large / small < 12


def test_an_operator_without_a_class_is_an_estimate_too() -> None:
    assert predicted("LpNormalization", [[64, 256]]).estimated_operators == ("LpNormalization",)
