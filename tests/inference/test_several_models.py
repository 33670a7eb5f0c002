"""Several models, and several batches of one: their ranks, and which batch to take."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest
from command import run_script
from conftest import small_model

from inference import Predictor
from inference.core.ranking import order_of, said_of_order
from utils.paths import Workspace

pytestmark = pytest.mark.slow

NAMES = ("narrow", "wide", "open")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a narrow and a wide model at batch 1, and one that takes any batch."""
    folder = tmp_path_factory.mktemp("zoo")
    for name, proto in (("narrow", small_model(8, 32)), ("wide", small_model(128, 64)), ("open", small_model(16, 32, "batch"))):
        onnx.save(proto, folder / f"{name}.onnx")
    return folder


def shell(*options: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("inference/predict_model_latency.py", "--target", "nvidia-h200", "--host-pace", "1", *options)


def rows(text: str) -> list[dict[str, str]]:
    """The rows of the first table."""
    header, *lines = (line.split("\t") for line in text.split("\n\n")[0].splitlines() if "\t" in line)
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_a_row_for_each_model_the_fastest_first(models: Path) -> None:
    done = shell("--model", models / "wide.onnx", models / "narrow.onnx")
    assert done.returncode == 0, done.stderr
    first, second = rows(done.stdout)
    assert (first["model"], second["model"]) == ("narrow", "wide")
    predictor = Predictor(target="nvidia-h200")
    alone = [predictor.predict(models / f"{name}.onnx", host_pace=1.0) for name in ("narrow", "wide")]
    assert [float(row["latency (ms)"]) for row in (first, second)] == pytest.approx(
        [one.latency_ms for one in alone], rel=1e-3)
    ratio = alone[1].latency_ms / alone[0].latency_ms
    assert f"ranked by latency: narrow is {ratio:.3g} times as fast as wide" in done.stdout


def test_repeated_options_folders_and_patterns_name_the_same_models(models: Path) -> None:
    named = [shell(*options, "--dim", "batch=4", "--json") for options in (
        ("--model", models), ("--model", models / "*.onnx"),
        ("--model", models / "open.onnx", "--model", models / "narrow.onnx", models / "wide.onnx", models / "open.onnx"))]
    answers = [json.loads(done.stdout) for done in named]
    assert answers[0] == answers[1] == answers[2]
    assert sorted(answer["file"] for answer in answers[0]) == sorted(str(models / f"{name}.onnx") for name in NAMES)
    per_item = [answer["latency_ms"] / answer["batch"] for answer in answers[0]]
    assert per_item == sorted(per_item)  # batches differ: only one of the models takes another than 1
    assert {answer["model"]: answer["batch"] for answer in answers[0]} == {"narrow": 1, "wide": 1, "open@batch=4,dynamic": 4}


def test_the_order_says_whether_it_is_sure(models: Path) -> None:
    predictor = Predictor(target="nvidia-h200")
    narrow, wide = (predictor.predict(models / f"{name}.onnx", host_pace=1.0) for name in ("narrow", "wide"))
    sure = wide.model_copy(update={"latency_ms": 10 * narrow.latency_ms, "interval_ms": (5 * narrow.latency_ms, 20.0)})
    assert said_of_order([narrow, sure]).endswith("10 times as fast as wide, and their intervals do not overlap")
    alike = wide.model_copy(update={"latency_ms": 1.01 * narrow.latency_ms, "interval_ms": narrow.interval_ms})
    assert said_of_order([narrow, alike]).endswith("1.01 times as fast as wide, but their intervals overlap")
    assert order_of([sure, narrow, narrow.model_copy(update={"fits_memory": False})]) == [1, 0, 2]
    in_batches = sure.model_copy(update={"batch": 32})
    assert order_of([narrow, in_batches]) == [1, 0]
    assert said_of_order([in_batches, narrow]).startswith("ranked by latency per item, since batches differ: wide is 3.2 times")


def test_models_of_one_name_show_their_files(models: Path, tmp_path: Path) -> None:
    shutil.copy2(models / "wide.onnx", tmp_path / "narrow.onnx")
    done = shell("--model", models / "narrow.onnx", tmp_path / "narrow.onnx")
    assert [row["file"] for row in rows(done.stdout)] == [str(models / "narrow.onnx"), str(tmp_path / "narrow.onnx")]


def test_a_model_that_fails_costs_its_row_only(models: Path, tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("not a model at all")
    done = shell("--model", models / "narrow.onnx", tmp_path / "text.onnx", models / "wide.onnx", "--quiet")
    assert done.returncode == 1
    assert [row["model"] for row in rows(done.stdout)] == ["narrow", "wide"]
    assert f"{tmp_path / 'text.onnx'}: not an ONNX model" in done.stderr
    assert "1 of 3 models have no prediction" in done.stderr


def test_options_of_one_model_refuse_several(models: Path, tmp_path: Path) -> None:
    for options in (("--trace", tmp_path / "t.json"), ("--watch",), ("--measure-missing", "--inputs", tmp_path / "rows.npz")):
        done = shell("--model", models / "narrow.onnx", models / "wide.onnx", *options)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "--model names 2: " in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = shell("--model", models, "--dim", "bacth=2")
    assert done.returncode == 1
    assert "none of the 3 models has a size named bacth: check --dim" in done.stderr


def test_patterns_leave_out_what_is_no_model(models: Path, tmp_path: Path) -> None:
    for name in ("a.onnx", "b.ort.onnx", ".c.onnx", "d.pb", "e.json"):
        (tmp_path / name).touch()
    found = Workspace(tmp_path).find_models([tmp_path / "*", models / "n*.onnx"])
    assert found == [tmp_path / "a.onnx", tmp_path / "e.json", models / "narrow.onnx"]
