"""What was never measured: GPUs known by their data sheets, and operators, estimated from measured ones of their class."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command import printed
from decoder_models import TINY, genai_folder
from forgotten_types import forget
from onnx import TensorProto, helper

from hase.inference import predict
from hase.inference.library.predictor import Predictor
from hase.inference.llm.predicting import predict_language_model
from hase.inference.prediction.answers import Prediction
from hase.inference.prediction.targets import fitted_for
from hase.records.kernel_record import ModelRecord
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

H200 = "nvidia-h200"


@functools.cache
def predictor(name: str) -> Predictor:
    return Predictor(target=name if name == H200 else f"{name}-from-data-sheet")


@pytest.fixture(scope="module")
def resnet(torch_models: dict[str, Path]) -> ModelRecord:
    return predictor(H200).record(torch_models["resnet18"])


@pytest.mark.slow
def test_other_cards_take_longer_and_are_less_sure(resnet: ModelRecord) -> None:
    """Kernels of ONNX Runtime were measured on an H100; the public tables have an A100, and nothing of a P4's generation."""
    on = {name: predictor(name).predict(resnet, host_pace=1.0) for name in (H200, "h200", "h100", "a100", "t4", "p4")}
    measured_ms = on[H200].latency_ms
    assert on["h200"].latency_ms == pytest.approx(measured_ms)
    assert measured_ms <= on["h100"].latency_ms < min(1.3 * measured_ms, on["t4"].latency_ms)
    assert on["t4"].latency_ms < on["p4"].latency_ms
    assert on["t4"].device_memory_mib == 16 * 1024
    assert any("from the data sheet: never measured on NVIDIA A100-SXM4-80GB" in warning for warning in on["a100"].warnings)
    widths = [on[name].interval_ms[1] / on[name].interval_ms[0] for name in (H200, "h100", "a100", "p4")]
    assert widths[0] < widths[1] < widths[2] < widths[3]
    assert (on["a100"].target, on["a100"].time_share["measured"]) == ("a100-from-data-sheet-cuda-ort1.31-all", 0)


@pytest.mark.slow
def test_a_card_of_ones_own(torch_models: dict[str, Path], tmp_path: Path) -> None:
    own = {"name": "NVIDIA L40S", "aka": ["my-l40s"], "generation": "ada", "compute_capability": 8.9, "sms": 142,
           "boost_mhz": 2520, "memory_gib": 48, "bandwidth_gb_s": 864, "l2_mb": 96, "power_w": 350, "fp32_tflop_s": 91.6,
           "fp16_tflop_s": 362, "bf16_tflop_s": 362, "tf32_tflop_s": 183, "link": "pcie4", "source": "its data sheet"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"gpus": [own]}), encoding="utf-8")
    (answer,) = json.loads(printed("inference/predict_model_latency.py", "--model", torch_models["resnet18"], "--gpu",
                                   tmp_path / "mine.yaml", "--host-pace", "1", "--json"))
    known = predictor("l40s").predict(torch_models["resnet18"], host_pace=1.0)
    assert answer["latency_ms"] == pytest.approx(known.latency_ms)


@pytest.mark.parametrize(("name", "message"), [
    ("mi300x", "predictions are for ONNX Runtime with CUDA, and AMD's cards run ROCm"),
    ("tensorrt", "TensorRT compiles kernels of its own"),
    ("h300", r"no such card is known \(did you mean h200.*\); give one of")])
def test_what_nobody_knows_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fitted_for(Workspace(), f"{name}-from-data-sheet")


@pytest.mark.slow
def test_energy_is_scaled_by_the_power_limits_and_marked(resnet: ModelRecord) -> None:
    h200, h100, l4 = (predictor(name).energy(resnet, host_pace=1.0) for name in (H200, "h100", "l4"))
    assert h100.energy_j == pytest.approx(h200.energy_j, rel=0.15)  # the same limit and peak
    assert l4.idle_j / l4.latency_ms == pytest.approx(h200.idle_j / h200.latency_ms * 72 / 700)
    assert (10 < l4.mean_power_w <= 72, l4.rough_estimate) == (True, True)
    assert any("scaled by the power limits" in warning for warning in l4.warnings)
    assert l4.interval_j[1] / l4.interval_j[0] > 2 > h200.interval_j[1] / h200.interval_j[0]
    with pytest.raises(UserError, match="l4-from-data-sheet"):  # how it is shared is not on a data sheet
        predictor("l4").curve(resnet)


@pytest.mark.slow
def test_generation_on_a_card_by_its_data_sheet(tmp_path: Path) -> None:
    folder = genai_folder(tmp_path / "model", replace(TINY, layers=1))
    h200, l4 = (predict_language_model(folder, prompt=512, generate=3, target=name, host_pace=1.0) for name in (
        H200, "l4-from-data-sheet"))
    assert h200.ttft.ms == pytest.approx(l4.ttft.ms, rel=0.05)  # a tiny model waits for the host, which is the same
    assert (h200.genai_loop_ms, l4.device_memory_mib) == (l4.genai_loop_ms, 24 * 1024)
    assert any("from the data sheet: never measured on NVIDIA L4" in warning for warning in l4.warnings)
    assert l4.energy
    assert l4.energy.rough_estimate


@pytest.mark.slow
def test_an_unmeasured_operator_costs_about_as_much_as_a_measured_one(tmp_path: Path) -> None:
    """With predictors that know three operators less, and without look-ups. An estimate is marked and has a wider interval, and
    grows with its tensors. So it is with an operator without a class, LpNormalization."""
    forget(Workspace(tmp_path), "nvidia-h200-cuda-ort1.31-all", "ThresholdedRelu", "Sign", "LpNormalization")

    def predicted(op_type: str, *shape: int) -> Prediction:
        graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"])], op_type.lower(), [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)], [helper.ValueInfoProto(name="y")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        return predict(model, workspace=Workspace(tmp_path), target=H200, strict=True)

    measured, estimated = (predicted(op, 32, 256, 56, 56) for op in ("Sigmoid", "ThresholdedRelu"))
    assert estimated.kernels[0].latency_ms == pytest.approx(measured.kernels[0].latency_ms, rel=0.3)
    assert (estimated.kernels[0].type, estimated.kernels[0].provenance) == ("ThresholdedRelu", "estimated")
    assert (estimated.estimated_operators, measured.estimated_operators) == (("ThresholdedRelu",), ())
    assert estimated.interval_ms[1] / estimated.latency_ms > measured.interval_ms[1] / measured.latency_ms
    assert any("ThresholdedRelu: never measured and estimated from operators of their class" in text
               for text in estimated.warnings)
    small, large = (predicted("Sign", batch, 256, 56, 56).kernels[0].latency_ms for batch in (8, 64))
    assert 4 < large / small < 12
    assert predicted("LpNormalization", 64, 256).estimated_operators == ("LpNormalization",)
