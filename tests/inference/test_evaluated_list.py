"""The evaluator on a list of models: against latencies in a file, and against measurements here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import printed, run_script
from trained_workspace import conv_net

from hase.inference import predict
from hase.inference.evaluation.comparison import Comparison, marks_in_words, marks_of
from hase.inference.evaluation.models import MANIFEST, MadeModel, Manifest
from hase.inference.prediction.conditions import HostPace
from hase.utils import files
from hase.utils.paths import Workspace

H200 = "nvidia-h200"


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A folder with a list of two models, and a third that is no model."""
    conv_net(tmp_path / "fixed.onnx")
    conv_net(tmp_path / "open.onnx", batch="batch")
    (tmp_path / "broken.onnx").write_text("no model")
    models = [MadeModel(name=name, file=f"{name}.onnx", kind=kind, opset=17, dims=dims) for name, kind, dims in (
        ("fixed", "nets", {}), ("open", "nets", {"batch": 4}), ("broken", "others", {}))]
    files.write_json(tmp_path / MANIFEST, Manifest(versions={}, models=tuple(models)))
    (tmp_path / "workspace").mkdir()
    return tmp_path


@pytest.mark.slow
def test_listed_models_are_compared_with_latencies_of_a_file(listed: Path) -> None:
    """They are predicted at the pace of the host that was measured beside them; what was not measured is a failure."""
    latencies = listed / "on_gpu.json"
    files.write_json(latencies, {"models": [
        {"model": "fixed", "way": "static", "latency_ms": 0.1, "runs": 20, "host_probe_us": 400.0},
        {"model": "broken", "way": "static", "latency_ms": 0.1, "runs": 20}]})
    command = ("evaluator.py", "--workspace", listed / "workspace", "--manifest", listed / MANIFEST, "--target", H200,
               "--measured", latencies)
    done = run_script(*command, "--json")
    assert done.returncode == 1, done.stderr  # two of the three failed
    evaluation = json.loads(done.stdout)
    assert (evaluation["source"], set(evaluation["failures"])) == ("listed", {"open", "broken"})
    (row,) = evaluation["comparisons"]
    assert (row["model"], row["kind"], row["measured_ms"]) == ("fixed", "nets", 0.1)
    at_pace = predict(listed / "fixed.onnx", target=H200, workspace=Workspace(listed), host_pace=HostPace(
        row["host_pace"], "measured"))
    assert row["host_pace"] > 1
    assert row["predicted_ms"] == at_pace.latency_ms
    assert "of 1 predictions are marked as rough estimates" in printed(*command, "--only", "fixed")


@pytest.mark.measuring
@pytest.mark.slow
@pytest.mark.usefixtures("canary")
def test_listed_models_are_measured_here_after_their_kernels(listed: Path) -> None:
    """Nothing was learned of this CPU before; each model runs at the sizes that the list gives it."""
    rows = json.loads(printed("evaluator.py", "--workspace", listed / "workspace", "--manifest", listed, "--only", "fixed",
                              "open", "--measure-missing", "--rounds", "1", "--budget-s", "0.05", "--json"))["comparisons"]
    assert [(row["model"], row["batch"]) for row in rows] == [("fixed", 1), ("open@batch=4,dynamic", 4)]
    # a share is a quotient of sums in two orders, so whole ones differ in the last digit
    assert {row["model"]: row["measured_share"] for row in rows} == pytest.approx({row["model"]: 1.0 for row in rows})
    assert all(row["measured_ms"] > 0 and row["runs"] >= 3 for row in rows), rows


@pytest.mark.parametrize(("options", "status", "message"), [
    (["fixed.onnx", "--measured", "x.json"], 2, "go with --manifest FILE"),
    (["--manifest", "LIST", "--recorded"], 2, "run as usual, on an idle device"),
    (["--manifest", "LIST", "--measured", "x.json", "--measure-missing"], 2, "nothing is measured here"),
    (["--manifest", "LIST", "--only", "nothing"], 1, "no model with the name nothing")])
def test_options_of_a_list_go_with_it(options: list[str], status: int, message: str, listed: Path) -> None:
    done = run_script("evaluator.py", *(listed if word == "LIST" else word for word in options))
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr


def test_marks_in_words() -> None:
    rows = []
    for error, rough, high in ((0.5, True, 2.0), (0.1, False, 1.2), (-0.2, False, 0.95)):
        read: dict[str, Any] = {"error": error, "rough_estimate": rough, "measured_ms": 1.0, "interval_low_ms": 0.9,
                                "interval_high_ms": high}  # the other fields are not read
        rows.append(Comparison.model_construct(**read))
    assert marks_of([]).mape is None
    assert marks_in_words(marks_of(rows)) == (
        "1 of 3 predictions are marked as rough estimates; the others err by 15.0% on the mean, 15.0% in the median, 20.0% at "
        "most; 66.7% of the 90 % intervals hold what was measured")
