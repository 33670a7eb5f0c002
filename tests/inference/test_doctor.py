"""`hase doctor`: a row for each check, and what to do where something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import printed

from hase.inference import doctor
from hase.inference.doctor import machine_checks, target_checks
from hase.runtimes import local_target
from hase.utils.paths import Workspace


def test_this_machine_and_what_comes_with_hase(tmp_path: Path) -> None:
    rows = json.loads(printed("inference/doctor.py", "--json", "--workspace", tmp_path))
    by_name = {row["what"]: row for row in rows}
    assert by_name["predictors"]["found"] == "nvidia-h200-cuda-ort1.31-all, which come with Hase"
    here = by_name["this machine's cpu"]
    assert (here["state"], local_target("cpu").name in here["found"]) == ("missing", True)
    assert here["do"].startswith("python recipes/this_device/measure_this_device.py")
    assert by_name["workspace"] == {"what": "workspace", "state": "ok", "found": str(tmp_path), "do": ""}


def test_what_was_learned_here_is_named(tmp_path: Path) -> None:
    folder = Workspace(tmp_path).predictors(local_target("cpu").name)
    folder.mkdir(parents=True)
    (folder / "predictors.json").write_text("{}")
    checks = {check.what: check for check in target_checks(Workspace(tmp_path))}
    assert (checks["this machine's cpu"].state, checks["this machine's cpu"].found) == ("ok", local_target("cpu").name)


@pytest.mark.parametrize(("version", "installed", "state", "do"), [
    ("1.31.1", {"onnxruntime": "here"}, "ok", ""),
    ("1.31.1", {"onnxruntime": "here", "onnxruntime-gpu": "before it on the path"}, "ok", ""),
    ("", {}, "broken", "pip install onnxruntime==1.31.*"),
    ("1.30.0", {"onnxruntime": "here"}, "broken", "pip install onnxruntime==1.31.*, or predict with --force"),
    ("1.31.1", {"onnxruntime": "here", "onnxruntime-gpu": "here"}, "broken",
     "pip uninstall --yes onnxruntime onnxruntime-gpu, and install one of them")])
def test_the_wrong_onnx_runtime(monkeypatch: pytest.MonkeyPatch, version: str, installed: dict[str, str], state: str,
                                do: str) -> None:
    monkeypatch.setattr(doctor, "ort_version", lambda: version)
    monkeypatch.setattr(doctor, "installed_in", lambda name: installed.get(name, ""))
    check = next(check for check in machine_checks() if check.what == "ONNX Runtime")
    assert (check.state, check.do) == (state, do)
