"""Operators that were never measured on a GPU and are priced as measured ones of their kind."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from inference import predict
from inference.core.answers import Prediction

TARGET = "nvidia-h200"


def predicted(op_type: str, inputs: list[list[int]]) -> Prediction:
    """One operator of float32 tensors of these shapes, all kernels predicted."""
    names = [f"x{place}" for place in range(len(inputs))]
    nodes = [helper.make_node(op_type, names, ["y"])]
    graph = helper.make_graph(nodes, op_type.lower(), [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                                                       for name, shape in zip(names, inputs, strict=True)],
                              [helper.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return predict(model, target=TARGET, strict=True)


def test_an_activation_costs_what_another_one_does() -> None:
    known, unknown = (predicted(op, [[32, 256, 56, 56]]) for op in ("Sigmoid", "Softplus"))
    assert unknown.kernels[0].latency_ms == pytest.approx(known.kernels[0].latency_ms)
    assert (unknown.kernels[0].type, unknown.kernels[0].provenance) == ("Softplus", "predicted")
    assert unknown.doubtful_operators == ("Softplus",)
    assert known.doubtful_operators == ()
    assert unknown.interval_ms[1] / unknown.latency_ms > known.interval_ms[1] / known.latency_ms
    assert [text for text in unknown.warnings if "Softplus: never measured and taken to cost what a like operator does" in text]


def test_two_tensors_are_multiplied_or_compared_alike() -> None:
    known, unknown = (predicted(op, [[16, 64, 32, 32], [16, 64, 32, 32]]) for op in ("Mul", "Max"))
    assert unknown.kernels[0].latency_ms == pytest.approx(known.kernels[0].latency_ms)


def test_a_global_pool_costs_what_a_mean_over_the_image_does() -> None:
    pool = predicted("GlobalAveragePool", [[8, 512, 7, 7]])
    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    graph = helper.make_graph([helper.make_node("ReduceMean", ["x", "axes"], ["y"])], "mean",
                              [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 512, 7, 7])],
                              [helper.ValueInfoProto(name="y")], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    mean = predict(model, target=TARGET, strict=True)
    assert pool.kernels[0].latency_ms == pytest.approx(mean.kernels[0].latency_ms)
    assert not pool.estimated_operators


def test_what_nothing_stands_for_stays_an_estimate() -> None:
    assert predicted("LpNormalization", [[64, 256]]).estimated_operators == ("LpNormalization",)
