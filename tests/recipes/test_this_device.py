"""Measuring the device at hand: the literal command on a tiny budget, interrupted and resumed, and how it spends its time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import printed, run_script
from conftest import small_model
from optional_packages import without

from hase.kernel_model.sampling.draws import read_seeds
from hase.recipes.this_device import measure_this_device
from hase.recipes.this_device.measure_this_device import link_models, measure
from hase.recipes.this_device.steps import (
    LEAST_MEASURING_SHARE,
    TRAINING_SHARE,
    Budget,
    build_chosen,
    read_chosen,
)
from hase.records.dataset_files import header_path, journal_path, read_journal
from hase.runtimes import local_target
from hase.utils import files
from hase.utils.cli import LEFT_OUT
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace

TARGET = local_target("cpu").name
SCRIPT = "recipes/this_device/measure_this_device.py"


def models(folder: Path) -> list[Path]:
    """Two small models of two families, with dynamic batches."""
    paths = []
    for name, proto in (("first", small_model(batch="batch")), ("second", small_model(channels=16, side=8, batch="batch"))):
        files.write_bytes(folder / f"{name}.onnx", proto.SerializeToString())
        paths.append(folder / f"{name}.onnx")
    return paths


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.measuring
def test_the_command_is_stopped_and_goes_on(tmp_path: Path) -> None:
    workspace, (first, second) = Workspace(tmp_path / "out"), models(tmp_path)
    workspace.root.mkdir()
    environment = without(LEFT_OUT, tmp_path / "hidden")  # on a CPU, the light install is enough
    options: list[str | Path] = [
        sys.executable, SCRIPT, "--workspace", workspace.root, "--device", "cpu", "--json", "--minutes", "0.2",
        "--model", first, "--model", second, "--dim", "batch=2"]
    journal = journal_path(workspace.dataset(TARGET))
    with subprocess.Popen(options, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=environment) as process:
        while process.poll() is None and not files.read_lines(journal):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr
    assert "stopped; what was measured is kept: run again to go on" in stderr
    before, spent_s = read_journal(journal.parent), json.loads(workspace.this_device.read_text())["seconds"]
    assert before
    done = subprocess.run(options, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["minutes"] > spent_s / 60
    after = read_journal(journal.parent)
    assert after[:len(before)] == before, "nothing is measured again"
    latencies = [m.id for block in after if block.attempts == 1 for m in block.measurements if m.subject == "model"]
    assert set(latencies) <= {"first@batch=2,dynamic", "second@batch=2,dynamic"}
    assert len(latencies) == len(set(latencies)) >= 1, "on a busy machine, the time may be over before the second"
    kernels, _, in_fit = result["expected"]
    assert (kernels["count"] >= 5, in_fit["count"]) == (True, len(latencies))
    predicted = printed(*result["predict"].split()[1:], "--json", "--dim", "batch=2")
    if "first@batch=2,dynamic" in latencies:
        assert json.loads(predicted)[0]["time_share"]["measured"] == pytest.approx(1.0)


def test_the_minutes_are_those_of_all_calls_and_samples_fit_them(tmp_path: Path) -> None:
    """On a CPU 25 kernels a second can be measured; 60 samples a second can be drawn, in a tenth of the time."""
    budget = Budget(tmp_path / "spent.json", 10.0)
    assert budget.measuring_s() == pytest.approx(600 * (1 - TRAINING_SHARE), abs=5)
    assert budget.samples("cpu", 0, 1) == 3600
    assert budget.samples("cpu", 10_000, 8) == pytest.approx(1.5 * (450 * 25 - 10_000), abs=200)
    budget.spent = budget.spent.model_copy(update={"seconds": 580.0})
    assert budget.measuring_s() == LEAST_MEASURING_SHARE * 600, "something is measured in any case"
    budget.save(measured=True)
    assert budget.measuring_s() == 0.0, "but once"
    assert Budget(tmp_path / "spent.json", 20.0).measuring_s() == pytest.approx(1200 * (1 - TRAINING_SHARE) - 580, abs=5)


@pytest.mark.parametrize("dataset", ["none", "there"])
def test_what_measuring_runs(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that is there keeps its labels, as after `predict_model_latency.py --measure-missing`, which has others."""
    workspace, budget, started = Workspace(tmp_path), Budget(tmp_path / "spent.json", 10.0), list[list[str]]()
    if dataset == "there":
        files.write_text(header_path(workspace.dataset(TARGET)), "{}")
    monkeypatch.setattr(measure_this_device, "run_json", lambda _, *words: started.append([*words]))
    measure(workspace, "cpu", 3, budget)
    assert [started[0][0], started[-1][0]] == ["kernel_model/kernel_sampler.py", "benchmark/collector.py"]
    assert ("labels=[]" in started[-1]) == (dataset == "there")


def test_git_ignores_what_is_written() -> None:
    workspace = Workspace()
    folders = [getattr(workspace, name) for name, value in vars(Workspace).items() if isinstance(value, property)]
    folders += [workspace.dataset("target"), workspace.model_dag("flavour"), workspace.predictors("target"),
                workspace.kernel_errors("target")]
    paths = [str(path if path.suffix else path / "a file") for path in folders]
    listed = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert listed == paths


def test_models_are_put_into_the_workspace(tmp_path: Path) -> None:
    workspace, given = Workspace(tmp_path / "out"), models(tmp_path)
    with pytest.raises(UserError, match="no models; name your own with --model"):
        link_models(workspace, [])
    assert [path.name for path in link_models(workspace, given)] == ["first.onnx", "second.onnx"]
    assert link_models(workspace, given[:1]) == link_models(workspace, [])
    namesake = tmp_path / "elsewhere" / "first.onnx"
    files.write_bytes(namesake, b"another model")
    with pytest.raises(UserError, match=r"first\.onnx exists and differs from"):
        link_models(workspace, [namesake])


@pytest.mark.slow
def test_the_kernels_that_tell_most_of_a_gpu_are_built_in_their_order(tmp_path: Path) -> None:
    workspace, target = Workspace(tmp_path), local_target("cpu").model_copy(update={"device_name": "NVIDIA L4"})
    for minutes, count in ((0.02, 6), (0.03, 9)):
        assert build_chosen(workspace, target, None, minutes) == count
        chosen = read_chosen(count)
        folder = workspace.kernel_onnx / target.flavour.name
        assert {path.stem for path in folder.glob("*.onnx")} == {kernel.id for kernel in chosen}
        assert read_seeds(folder) == {kernel.id: () for kernel in chosen}
    with pytest.raises(UserError, match="Some CPU: no such card is known"):
        build_chosen(workspace, target.model_copy(update={"device_name": "Some CPU"}), None, 1)


@pytest.mark.slow
def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    for options, message in (
            (("--start-from", "data-sheet"), "--start-from data-sheet is for GPUs; on a CPU, leave it out"),
            (("--gpu", "l4"), "--gpu goes with --start-from data-sheet")):
        done = run_script(SCRIPT, "--workspace", tmp_path, "--device", "cpu", "--json", *options)
        assert done.returncode in (1, 2)
        assert message in done.stderr
