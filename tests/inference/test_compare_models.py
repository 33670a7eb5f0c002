"""Two models, operator by operator: what adds up to what, and what explains it; and a model on several devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import printed, run_script
from conftest import small_model

from hase.inference import Predictor
from hase.inference.compare.devices import DeviceComparison
from hase.inference.prediction.answers import chance_within

pytestmark = pytest.mark.slow

SCRIPT, ON_DEVICES = "inference/compare_models.py", "inference/compare_devices.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model at batch 1, one that takes any batch, and one with a Sigmoid in the place of the second Relu."""
    folder = tmp_path_factory.mktemp("zoo")
    onnx.save(small_model(32, 32), folder / "fixed.onnx")
    onnx.save(small_model(32, 32, "batch"), folder / "open.onnx")
    other = small_model(32, 32)
    other.graph.node[4].op_type = "Sigmoid"
    onnx.save(other, folder / "sigmoid.onnx")
    return folder


def compare(*options: str | Path) -> str:
    return printed(SCRIPT, "--target", "nvidia-h200", "--host-pace", "1", *options)


def compared(*options: str | Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(compare(*options, "--json"))
    return answer


def test_all_rows_add_up_to_the_difference(models: Path) -> None:
    answer = compared(models / "fixed.onnx", models / "open.onnx", "--dim", "batch=64")
    predictor = Predictor(target="nvidia-h200")
    a = predictor.predict(models / "fixed.onnx", host_pace=1.0)
    b = predictor.predict(models / "open.onnx", dims={"batch": 64}, host_pace=1.0)
    assert answer["difference_ms"] == pytest.approx(b.latency_ms - a.latency_ms)
    rows = answer["operators"]
    conv, relu = (next(row for row in rows if row["operator"] == name) for name in ("Conv", "Relu"))
    assert sum(row["difference_ms"] for row in rows) + answer["outside_kernels_ms"] == pytest.approx(answer["difference_ms"])
    for side, prediction in (("a", a), ("b", b)):
        assert sum(row[side]["time_ms"] for row in rows) == pytest.approx(prediction.kernel_sum_ms)
        assert conv[side]["time_ms"] == pytest.approx(sum(
            kernel.total_ms for kernel in prediction.kernels if kernel.type.startswith("Conv")))
    for row in rows:
        assert row["by_runs_ms"] + row["by_work_ms"] + row["by_rate_ms"] == pytest.approx(row["difference_ms"])
        assert row["share"] == pytest.approx(row["difference_ms"] / answer["difference_ms"])
    assert (conv["by_runs_ms"], conv["unit"], conv["b"]["runs"]) == (0.0, "FLOP", 2)
    assert conv["b"]["flops"] == pytest.approx(64 * conv["a"]["flops"])
    assert "64 times the FLOPs of a run (+" in conv["explanation"]
    assert (relu["unit"], relu["b"]["bytes"]) == ("byte", pytest.approx(64 * relu["a"]["bytes"]))
    assert rows == sorted(rows, key=lambda row: -abs(row["difference_ms"]))


def test_an_operator_of_one_model_only(models: Path) -> None:
    answer = compared(models / "fixed.onnx", models / "sigmoid.onnx")
    rows = {row["operator"]: row for row in answer["operators"]}
    assert rows["Sigmoid"]["explanation"] == "only in B, 1 run"
    assert rows["Sigmoid"]["by_runs_ms"] == rows["Sigmoid"]["difference_ms"] == rows["Sigmoid"]["b"]["time_ms"] > 0
    assert rows["Conv"]["explanation"] == "the same"
    assert "1 fewer run (-" in rows["Relu"]["explanation"]
    assert (rows["Relu"]["a"]["runs"], rows["Relu"]["b"]["runs"]) == (2, 1)


def test_the_answer_begins_with_the_difference(models: Path) -> None:
    asked = models / "open.onnx", models / "open.onnx", "--dim", "batch=1", "--b-dim", "batch=128"
    sentences, answer = compare(*asked).split("\n\n")[0].splitlines(), compared(*asked)
    assert sentences[0].startswith("A = open@batch=1,dynamic, B = open@batch=128,dynamic: "
                                   f"B takes {answer['difference_ms']:.4g} ms longer than A (")
    assert sentences[0].endswith("; their intervals do not overlap")
    largest = answer["operators"][0]
    assert f"{largest['operator']} {largest['difference_ms']:+.3g} ms ({100 * largest['share']:.0f} %)" in sentences[1]
    assert sentences[3].startswith("A is at batch 1 and B at 128: times are of whole runs; per item they are ")


def test_the_same_model_twice_differs_in_nothing(models: Path) -> None:
    answer = compared(models / "fixed.onnx", models / "fixed.onnx", "--by", "type")
    assert (answer["difference_ms"], answer["ratio"], answer["intervals_overlap"]) == (0.0, 1.0, True)
    assert {(row["explanation"], row["share"]) for row in answer["operators"]} == {("the same", None)}
    assert compare(models / "fixed.onnx", models / "fixed.onnx").startswith("A = fixed, B = fixed: both take ")


@pytest.mark.parametrize(("options", "code", "message"), [
    (["fixed.onnx"], 2, "MODEL"), (["fixed.onnx", "none.onnx"], 1, "no such model"),
    (["fixed.onnx", "open.onnx"], 1, "batch"), (["fixed.onnx", "open.onnx", "--dim", "batch=1,2"], 1, "takes one size"),
    (["fixed.onnx", "open.onnx", "--dim", "bacth=2"], 1, "none of the 2 models has a size named bacth")])
def test_wrong_models_and_sizes_are_told(options: list[str], code: int, message: str, models: Path) -> None:
    done = run_script(SCRIPT, "--target", "nvidia-h200", "--quiet", *(
        models / word if word.endswith(".onnx") else word for word in options))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done.stderr
    assert message in done.stderr


def test_rows_are_those_of_single_predictions_and_sorted_by_cost(torch_models: dict[str, Path], tmp_path: Path) -> None:
    model = torch_models["resnet18"]
    prices = tmp_path / "prices.yaml"
    prices.write_text("h200: 3.6\nl4: 0.36\np4: 0.036\n", encoding="utf-8")
    document = printed(ON_DEVICES, "--model", model, "--host-pace", "1", "--json", "--on", "h200,l4,p4", "--prices", prices,
                       "--slo-ms", "1", "--plot", tmp_path / "plot.svg")
    rows = DeviceComparison.model_validate_json(document).rows(1.0)
    costs = [row["a million items"] for row in rows]
    assert costs == sorted(costs)
    by_device = {str(row["device"]): row for row in rows}
    assert {name: row["from"] for name, row in by_device.items()} == {
        "h200": "measured card", "l4": "data sheet", "p4": "data sheet"}
    alone = Predictor(target="nvidia-h200").predict(model, host_pace=1.0)
    assert by_device["h200"]["latency (ms)"] == pytest.approx(alone.latency_ms)
    assert alone.items_per_second is not None
    assert by_device["h200"]["a million items"] == pytest.approx(3.6 / 3600 * 1e6 / alone.items_per_second)
    assert (tmp_path / "plot.svg").stat().st_size > 1000
    assert by_device["h200"]["chance of 1 ms"] == f"{chance_within(alone.latency_ms, alone.interval_ms, 1.0):.0%}"


@pytest.mark.parametrize(("gpus", "price", "message"), [
    ("h200", "-1", "greater than 0"), ("h200,l4", "1", "no price of l4; it has h200"),
    ("gaudi3", "", "Intel's cards have providers of their own"), ("h100,h100", "", "different devices")])
def test_wrong_names_and_prices_are_told(gpus: str, price: str, message: str, torch_models: dict[str, Path],
                                         tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(f"h200: {price}\n", encoding="utf-8")
    prices = ("--prices", tmp_path / "prices.yaml") if price else ()
    done = run_script(ON_DEVICES, "--model", torch_models["resnet18"], "--gpus", gpus, *prices)
    assert (done.returncode in (1, 2), message in done.stderr) == (True, True), done.stderr
