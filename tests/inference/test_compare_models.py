"""Two models, operator by operator: what adds up to what, and what explains it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import printed, run_script
from conftest import small_model

from hase.inference import Predictor
from hase.inference.compare.model_differences import OperatorTime, causes

pytestmark = pytest.mark.slow

SCRIPT = "inference/compare_models.py"


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
    assert answer["ratio"] == pytest.approx(b.latency_ms / a.latency_ms)
    rows = answer["operators"]
    assert sum(row["difference_ms"] for row in rows) + answer["outside_kernels_ms"] == pytest.approx(answer["difference_ms"])
    for side, prediction in (("a", a), ("b", b)):
        assert sum(row[side]["time_ms"] for row in rows) == pytest.approx(prediction.kernel_sum_ms)
        of_conv = [kernel for kernel in prediction.kernels if kernel.type.startswith("Conv")]
        conv = next(row for row in rows if row["operator"] == "Conv")
        assert conv[side]["time_ms"] == pytest.approx(sum(kernel.total_ms for kernel in of_conv))
        assert conv[side]["runs"] == 2
    for row in rows:
        assert row["by_runs_ms"] + row["by_work_ms"] + row["by_rate_ms"] == pytest.approx(row["difference_ms"])
        assert row["share"] == pytest.approx(row["difference_ms"] / answer["difference_ms"])
    assert conv["b"]["flops"] == pytest.approx(64 * conv["a"]["flops"])
    assert (conv["by_runs_ms"], conv["unit"]) == (0.0, "FLOP")
    assert "64 times the FLOPs of a run (+" in conv["explanation"]
    relu = next(row for row in rows if row["operator"] == "Relu")
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
    turned = compared(models / "sigmoid.onnx", models / "fixed.onnx")
    assert turned["difference_ms"] == pytest.approx(-answer["difference_ms"])
    assert {row["operator"]: row["explanation"] for row in turned["operators"]}["Sigmoid"] == "only in A, 1 run"


def test_the_answer_begins_with_the_difference(models: Path) -> None:
    asked = models / "open.onnx", models / "open.onnx", "--dim", "batch=1", "--b-dim", "batch=128"
    sentences, table = compare(*asked).split("\n\n")
    first, second, third, fourth = sentences.splitlines()
    answer = compared(*asked)
    assert first.startswith("A = open@batch=1,dynamic, B = open@batch=128,dynamic: "
                            f"B takes {answer['difference_ms']:.4g} ms longer than A (")
    assert first.endswith("; their intervals do not overlap")
    largest = answer["operators"][0]
    assert f"{largest['operator']} {largest['difference_ms']:+.3g} ms ({100 * largest['share']:.0f} %)" in second
    assert third.startswith("the GPU works for ")
    assert fourth == ("A is at batch 1 and B at 128: times are of whole runs; per item they are "
                      f"{answer['a']['latency_ms']:.4g} and {answer['b']['latency_ms'] / 128:.4g} ms")
    header, *rows = (line.split("\t") for line in table.splitlines())
    assert [name for name in header if name.startswith("B")] == ["B (ms)", "B - A (ms)"]
    assert len(rows) == len(answer["operators"]) + 1
    differences = [float(row[header.index("B - A (ms)")]) for row in rows]
    assert sum(differences) == pytest.approx(answer["difference_ms"], rel=0.01)


def test_the_same_model_twice_differs_in_nothing(models: Path) -> None:
    answer = compared(models / "fixed.onnx", models / "fixed.onnx", "--by", "type")
    assert (answer["difference_ms"], answer["ratio"], answer["intervals_overlap"]) == (0.0, 1.0, True)
    assert {row["explanation"] for row in answer["operators"]} == {"the same"}
    assert {row["share"] for row in answer["operators"]} == {None}
    said = compare(models / "fixed.onnx", models / "fixed.onnx").splitlines()
    assert said[:2] == [f"A = fixed, B = fixed: both take {answer['a']['latency_ms']:.4g} ms", ""]


def test_a_captured_graph_does_not_wait_for_its_host(models: Path) -> None:
    said = compare(models / "fixed.onnx", models / "sigmoid.onnx", "--cuda-graph")
    assert "the GPU works for " in said
    assert "waits for the host" not in said


def test_causes_leave_no_rest() -> None:
    """Twice the runs, of four times the work, at half the time of a FLOP: four times as long in all."""
    a, b = OperatorTime(runs=2, time_ms=1.0, flops=100.0), OperatorTime(runs=4, time_ms=4.0, flops=800.0)
    found = causes(a, b, "FLOP")
    assert (found.runs_ms, found.work_ms, found.rate_ms) == pytest.approx(
        tuple(3.0 * math.log(times) / math.log(4) for times in (2, 4, 0.5)))
    assert (causes(OperatorTime(), b, "FLOP").runs_ms, causes(a, a, "FLOP").rate_ms) == (4.0, 0.0)
    unknown = causes(a, OperatorTime(runs=2, time_ms=3.0), "FLOP")
    assert (unknown.work_ms, unknown.rate_ms) == (0.0, pytest.approx(2.0))


@pytest.mark.parametrize(("options", "code", "message"), [
    (["fixed.onnx"], 2, "MODEL"), (["fixed.onnx", "none.onnx"], 1, "no such model"),
    (["fixed.onnx", "open.onnx"], 1, "batch"), (["fixed.onnx", "open.onnx", "--dim", "batch=1,2"], 1, "takes one size"),
    (["fixed.onnx", "open.onnx", "--dim", "bacth=2"], 1, "none of the 2 models has a size named bacth")])
def test_wrong_models_and_sizes_are_told(options: list[str], code: int, message: str, models: Path) -> None:
    done = run_script(SCRIPT, "--target", "nvidia-h200", "--quiet", *(
        models / word if word.endswith(".onnx") else word for word in options))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done.stderr
    assert message in done.stderr
