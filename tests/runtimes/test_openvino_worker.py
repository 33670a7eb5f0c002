"""Kernels and models timed under OpenVINO, and its times of layers, which are means of all runs in whole microseconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from onnx_files import saved
from optional_packages import needs

from hase.records.measurement import Effort, Measurement
from hase.runtimes.openvino.compiling import compile_model
from hase.runtimes.openvino.recording import build_kernel, parse
from hase.runtimes.openvino.runs import usual_us
from hase.runtimes.openvino.worker import WORK
from hase.runtimes.protocol import Reply, Request, RuntimeSetting, answer
from hase.utils import files

pytestmark = pytest.mark.measuring
QUICK = Effort(warmup=1, budget_s=0.01, least_runs=3, most_runs=5)
ONE_THREAD = RuntimeSetting(level="fused", threads=1)


@pytest.fixture(autouse=True)
def _openvino() -> None:
    needs("openvino", "requirements-openvino.txt")


def convolutions(path: Path, channels: int = 16, side: int = 32) -> Path:
    """Two convolutions with the same sizes, each with a Relu."""
    weights = np.random.default_rng(0).normal(0, 0.1, (channels, channels, 3, 3)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["r"]),
             helper.make_node("Conv", ["r", "w"], ["d"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["d"], ["y"])]
    shape = [1, channels, side, side]
    return saved(path, nodes, {"x": shape}, {"y": shape}, {"w": weights})


def ask(do: str, *paths: Path, **more: object) -> Reply:
    request = Request.model_validate({"do": do, "device": "cpu", "effort": QUICK, "paths": tuple(map(str, paths)),
                                      "setting": ONE_THREAD, **more})
    return answer(WORK, request)


def by_label(reply: Reply) -> dict[str, list[Measurement]]:
    assert reply.error == ""
    labels: dict[str, list[Measurement]] = {}
    for measured in reply.measurements:
        labels.setdefault(measured.label, []).append(measured)
        assert min(measured.samples_ms) > 0
    return labels


FIRST, BLOCK, RUNS = 4, 10, 124  # runs before the first reading, between two, and altogether


def read_back(times_us: np.ndarray) -> float:
    """The usual time in µs, from OpenVINO's readings: the mean of the runs so far, cut to whole microseconds like each run."""
    runs = np.arange(FIRST, RUNS + 1, BLOCK)
    return usual_us(np.array([np.floor(np.floor(times_us[:count]).mean()) for count in runs]), runs)


@pytest.mark.parametrize("usual", [0.3, 3.7, 12.2, 480.0])
def test_the_time_of_a_layer_is_known_to_a_microsecond(usual: float) -> None:
    times = np.random.default_rng(1).normal(usual, 0.1 * usual, RUNS)
    times[0] = 20 * usual + 3000.0  # code is generated
    assert read_back(times) == pytest.approx(times[FIRST:].mean(), abs=1.0)
    disturbed = np.full(RUNS, 50.4)
    disturbed[[10, 60, 61]] = 4000.0  # by other work
    assert read_back(disturbed) == pytest.approx(50.4, abs=4.0)


@pytest.mark.slow
def test_a_model_has_a_latency_and_the_times_of_its_kernels(tmp_path: Path) -> None:
    model, record_file = convolutions(tmp_path / "two.onnx"), tmp_path / "two.json"
    record = parse(model).record
    files.write_json(record_file, record)
    labels = by_label(ask("model", model, record=str(record_file), labels=("kernel_time",)))
    [latency] = labels["latency"]
    assert (latency.subject, latency.id, latency.place) == ("model", "two", "alone")
    assert {(measured.id, measured.place) for measured in labels["kernel_time"]} == {
        (node.kernel_id, "in_model") for node in record.nodes if record.kernel_of(node).moves_data}
    assert by_label(ask("model_labels", model, record=str(record_file))).keys() == {"kernel_time"}
    session = ask("session", model)
    assert by_label(session).keys() == {"latency"}
    assert session.memory_mib is not None
    files.write_json(record_file, parse(convolutions(tmp_path / "other.onnx", side=16)).record)
    error = ask("model", model, record=str(record_file)).error
    assert "OpenVINO's graph is not the one in its record" in error
    assert "--runtime openvino" in error


@pytest.mark.slow
def test_kernels_alone_and_in_a_carrier(tmp_path: Path) -> None:
    kernels = list(parse(convolutions(tmp_path / "two.onnx")).record.kernels.values())
    paths = [build_kernel(kernel, tmp_path) for kernel in kernels]
    [alone] = by_label(ask("alone", paths[0]))["run"]
    assert (alone.id, alone.place) == (kernels[0].id, "alone")
    carried = by_label(ask("carrier", *paths))["kernel_time"]
    assert sorted((measured.id, measured.place) for measured in carried) == sorted((kernel.id, "carrier") for kernel in kernels)
    assert by_label(ask("canary"))["run"][0].id == "canary"


def test_it_computes_in_float32(tmp_path: Path) -> None:
    """With bfloat16, OpenVINO's default on CPUs that have it, outputs are off by a hundredth."""
    model = convolutions(tmp_path / "two.onnx", channels=64)
    image = np.random.default_rng(2).normal(0, 1, (1, 64, 32, 32)).astype(np.float32)
    compiled = compile_model(parse(model).model, "two")
    [output] = compiled({"x": image}).values()
    [expected] = onnxruntime.InferenceSession(model).run(None, {"x": image})
    assert np.abs(output - expected).max() < 1e-4


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    model = convolutions(tmp_path / "two.onnx")
    assert "memory_limit_mib" in ask("session", model, setting=RuntimeSetting(level="fused", memory_limit_mib=10)).error
    assert "cores: 4096" in ask("session", model, setting=RuntimeSetting(level="fused", cores=4096)).error
