"""Predictions for GPUs that were never measured, from their data sheets, with what ships with Hase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command import run_script
from decoder_models import genai_folder

from hase.inference.library.predictor import Predictor
from hase.inference.llm.predicting import predict_language_model
from hase.inference.prediction.targets import fitted_for
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

H200 = "nvidia-h200"


@pytest.fixture(scope="module")
def resnet(torch_models: dict[str, Path]) -> Path:
    return torch_models["resnet18"]


@pytest.mark.slow
def test_a_card_alike_takes_about_as_long_and_a_small_one_longer(resnet: Path) -> None:
    on = {name: Predictor(target=f"{name}-from-data-sheet").predict(resnet, host_pace=1.0)
          for name in ("h100", "t4", "p4", "h200")}
    measured = Predictor(target=H200).predict(resnet, host_pace=1.0)
    assert on["h200"].latency_ms == pytest.approx(measured.latency_ms)
    assert measured.latency_ms <= on["h100"].latency_ms < 1.3 * measured.latency_ms
    assert on["h100"].latency_ms < on["t4"].latency_ms < on["p4"].latency_ms
    assert on["t4"].device_memory_mib == 16 * 1024


def test_such_answers_are_marked_and_their_intervals_are_wider(resnet: Path) -> None:
    # kernels of ONNX Runtime were measured on an H100; the public tables have an A100, and nothing of a P4's generation
    h200, h100, a100, p4 = (Predictor(target=name).predict(resnet, host_pace=1.0) for name in (
        H200, "h100-from-data-sheet", "a100-from-data-sheet", "p4-from-data-sheet"))
    assert any("from the data sheet: never measured on NVIDIA A100-SXM4-80GB" in warning for warning in a100.warnings)
    assert not any("never measured" in warning for warning in h200.warnings)
    widths = [prediction.interval_ms[1] / prediction.interval_ms[0] for prediction in (h200, h100, a100, p4)]
    assert widths[0] < widths[1] < widths[2] < widths[3]
    assert a100.target == "a100-from-data-sheet-cuda-ort1.31-all"
    assert a100.time_share["measured"] == 0


def test_a_card_of_ones_own(resnet: Path, tmp_path: Path) -> None:
    own = {"name": "NVIDIA L40S", "aka": ["my-l40s"], "generation": "ada", "compute_capability": 8.9, "sms": 142,
           "boost_mhz": 2520, "memory_gib": 48, "bandwidth_gb_s": 864, "l2_mb": 96, "power_w": 350, "fp32_tflop_s": 91.6,
           "fp16_tflop_s": 362, "bf16_tflop_s": 362, "tf32_tflop_s": 183, "link": "pcie4", "source": "its data sheet"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"gpus": [own]}), encoding="utf-8")
    done = run_script("inference/predict_model_latency.py", "--model", resnet, "--gpu", path, "--host-pace", "1", "--json")
    known = Predictor(target="l40s-from-data-sheet").predict(resnet, host_pace=1.0)
    assert json.loads(done.stdout)[0]["latency_ms"] == pytest.approx(known.latency_ms)


@pytest.mark.parametrize(("name", "message"), [
    ("mi300x", "predictions are for ONNX Runtime with CUDA, and AMD's cards run ROCm"),
    ("tensorrt", "TensorRT compiles kernels of its own"),
    ("h300", "no such card is known; choose one of")])
def test_what_nobody_knows_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fitted_for(Workspace(), f"{name}-from-data-sheet")


def test_energy_is_scaled_by_the_power_limits_and_marked(resnet: Path) -> None:
    h200, h100, l4 = (Predictor(target=name).energy(resnet, host_pace=1.0) for name in (
        H200, "h100-from-data-sheet", "l4-from-data-sheet"))
    assert h100.energy_j == pytest.approx(h200.energy_j, rel=0.15)  # the same limit and peak
    assert l4.idle_j / l4.latency_ms == pytest.approx(h200.idle_j / h200.latency_ms * 72 / 700)
    assert h200.idle_j / h200.latency_ms < h200.mean_power_w
    assert 10 < l4.mean_power_w <= 72
    assert l4.rough_estimate
    assert any("scaled by the power limits" in warning for warning in l4.warnings)
    assert l4.interval_j[1] / l4.interval_j[0] > 2 > h200.interval_j[1] / h200.interval_j[0]


def test_what_a_data_sheet_can_not_say_is_refused(resnet: Path) -> None:
    predictor = Predictor(target="l4-from-data-sheet")
    with pytest.raises(UserError, match="l4-from-data-sheet"):
        predictor.curve(resnet)


@pytest.mark.slow
def test_generation_on_a_card_by_its_data_sheet(tmp_path: Path) -> None:
    folder = genai_folder(tmp_path / "model")
    h200, h100, l4 = (predict_language_model(folder, prompt=512, generate=16, target=name, host_pace=1.0) for name in (
        H200, "h100-from-data-sheet", "l4-from-data-sheet"))
    assert h200.ttft.ms == pytest.approx(l4.ttft.ms, rel=0.05)  # a tiny model waits for the host, which is the same
    assert h200.genai_loop_ms == h100.genai_loop_ms  # the host's
    assert l4.device_memory_mib == 24 * 1024
    assert any("from the data sheet: never measured on NVIDIA L4" in warning for warning in l4.warnings)
    assert h200.energy is not None
    assert h100.energy is not None
    assert h100.energy.rough_estimate
