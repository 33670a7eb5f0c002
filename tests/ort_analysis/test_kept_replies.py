"""A model is taken apart once: the next question about the same content is answered from the user's cache."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from conftest import small_model

from hase.ort_analysis.isolated import analysis
from hase.ort_analysis.isolated.messages import AnalysisReply, AnalysisTask
from hase.records.kernel_record import ModelRecord
from hase.runtimes import flavour_of
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the child was asked for."""
    monkeypatch.setenv("HASE_CACHE", str(tmp_path / "cache"))
    kinds: list[str] = []
    ask = analysis.Analyst.ask

    def counted(self: analysis.Analyst, task: AnalysisTask, size_gib: float, limit_s: float) -> AnalysisReply:
        kinds.append(task.do)
        return ask(self, task, size_gib, limit_s)

    monkeypatch.setattr(analysis.Analyst, "ask", counted)
    return kinds


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(small_model(batch="batch"), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def record_of(path: Path, device: str = "cuda", static: bool = False, half: bool = False, **dims: int) -> ModelRecord:
    return analysis.record_of(path, flavour_of(device), dims, static, analysis.weight_files(path), half=half)


def test_a_file_is_taken_apart_once(asked: list[str], model: Path, tmp_path: Path) -> None:
    first = record_of(model, batch=2)
    assert record_of(model, batch=2) == first
    assert asked == ["record"]
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(model, tmp_path / "elsewhere" / "net.onnx")
    assert record_of(Path(copy), batch=2) == first  # by its content
    assert asked == ["record"]
    assert analysis.own_names(model, ["batch"]) == analysis.own_names(model, ["batch"]) == {"batch"}
    assert asked == ["record", "sizes"]


def test_what_a_record_depends_on(asked: list[str], model: Path, tmp_path: Path) -> None:
    records = [record_of(model, batch=2), record_of(model, batch=3), record_of(model, static=True, batch=2),
               record_of(model, "cpu", batch=2), record_of(model, half=True, batch=2)]
    assert len(asked) == len({record.model_dump_json() for record in records}) == len(records)
    renamed = shutil.copy(model, tmp_path / "other.onnx")
    assert record_of(Path(renamed), batch=2).model == "other@batch=2,dynamic"
    onnx.save(small_model(channels=16, batch="batch"), model)
    assert record_of(model, batch=2).kernels.keys() != records[0].kernels.keys()


@pytest.mark.parametrize("of", ["ort_version", "instruction_set", "code_version"])
def test_another_version_takes_it_apart_anew(of: str, asked: list[str], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_of(model, batch=2)
    monkeypatch.setattr(analysis, of, lambda *_: "another")
    analysis._versions_and_code.cache_clear()
    try:
        record_of(model, batch=2)
        assert asked == ["record", "record"]
    finally:
        analysis._versions_and_code.cache_clear()


def test_weights_in_files(asked: list[str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A link to another folder is refused although the model was answered before."""
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="weights", size_threshold=16)
    first, weights = record_of(model, batch=2), model.parent / "weights"
    assert record_of(model, batch=2) == first
    assert asked == ["weights", "record"]
    os.utime(weights, (1000, 1000))
    record_of(model, batch=2)
    assert asked == ["weights", "record", "record"]
    moved = shutil.move(weights, tmp_path_factory.mktemp("outside"))
    with pytest.raises(UserError, match="which is missing"):
        record_of(model, batch=2)
    weights.symlink_to(moved)
    with pytest.raises(UserError, match="outside its own folder"):
        record_of(model, batch=2)


def test_failures_are_not_kept_and_damage_is_mended(asked: list[str], model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="no dynamic dimension depth"):
            record_of(model, batch=2, depth=3)
    assert asked == ["record", "record"]
    first = record_of(model, batch=2)
    for entry in (tmp_path / "cache").iterdir():
        files.write_bytes(entry, entry.read_bytes()[:50])
    assert record_of(model, batch=2) == first
    assert asked == ["record"] * 4


def test_what_the_analysis_said_is_said_again(asked: list[str], model: Path, caplog: pytest.LogCaptureFixture,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("hase"), "propagate", True)
    said = []
    for _ in range(2):
        caplog.clear()
        analysis.record_of(model, flavour_of("cuda"), {"batch": 2, "p.0": 7}, False)
        said.append([record.getMessage() for record in caplog.records])
    assert any("p.0=7 changes nothing" in line for line in said[0])
    assert said[0] == said[1]
    assert asked == ["record"]


@pytest.mark.slow
def test_the_second_command_starts_no_child_and_reads_no_booster(model: Path, tmp_path: Path) -> None:
    """Its answer is the same to the last digit."""
    def command(cache: str | Path, *python: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *python, "inference/predict_model_latency.py", "--model", model, "--dim",
                               "batch=2", "--target", "nvidia-h200", "--json"], cwd=ROOT, capture_output=True, text=True,
                              env=os.environ | {"HASE_CACHE": str(cache)}, check=True)

    answers = [command(*words) for words in (("off",), (tmp_path / "cache",), (tmp_path / "cache", "-X", "importtime"))]
    assert json.loads(answers[0].stdout) == json.loads(answers[1].stdout) == json.loads(answers[2].stdout)
    imported = {line.rpartition("|")[2].strip() for line in answers[2].stderr.splitlines()
                if line.startswith("import time:")}
    assert "numpy" in imported
    assert not imported & {"onnx", "onnxruntime", "xgboost", "scipy"}
