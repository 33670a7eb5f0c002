"""Operators that were never measured on a GPU: estimated from measured operators of their class."""

from __future__ import annotations

import pytest
from forgotten_types import forget
from onnx import TensorProto, helper

from hase.inference import predict
from hase.inference.prediction.answers import Prediction
from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow

TARGET = "nvidia-h200-cuda-ort1.31-all"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """With predictors that know no ThresholdedRelu, Sign or LpNormalization."""
    made = Workspace(tmp_path_factory.mktemp("estimates"))
    forget(made, TARGET, "ThresholdedRelu", "Sign", "LpNormalization")
    return made


def predicted(workspace: Workspace, op_type: str, shape: list[int]) -> Prediction:
    """One operator on a float32 tensor, without look-ups."""
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"])], op_type.lower(), [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)], [helper.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return predict(model, workspace=workspace, target=TARGET, strict=True)


def test_an_unmeasured_activation_costs_about_as_much_as_a_measured_one(workspace: Workspace) -> None:
    """It is marked as an estimate and has a wider interval, and grows with its tensors."""
    measured, estimated = (predicted(workspace, op, [32, 256, 56, 56]) for op in ("Sigmoid", "ThresholdedRelu"))
    assert estimated.kernels[0].latency_ms == pytest.approx(measured.kernels[0].latency_ms, rel=0.3)
    assert (estimated.kernels[0].type, estimated.kernels[0].provenance) == ("ThresholdedRelu", "estimated")
    assert estimated.estimated_operators == ("ThresholdedRelu",)
    assert measured.estimated_operators == measured.doubtful_operators == ()
    assert estimated.interval_ms[1] / estimated.latency_ms > measured.interval_ms[1] / measured.latency_ms
    assert any("ThresholdedRelu: never measured and estimated from operators of their class" in text
               for text in estimated.warnings)
    small, large = (predicted(workspace, "Sign", [batch, 256, 56, 56]).kernels[0].latency_ms for batch in (8, 64))
    assert 4 < large / small < 12


def test_an_operator_without_a_class_is_an_estimate_too(workspace: Workspace) -> None:
    assert predicted(workspace, "LpNormalization", [64, 256]).estimated_operators == ("LpNormalization",)
