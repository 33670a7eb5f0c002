"""Kernels measured for a prediction: which ones, on which machine, what they change, and what stays the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command import run_script
from trained_workspace import HELD_OUT, conv_net

from hase.benchmark.collecting.collect import collect_kernels
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.units import start_workers
from hase.inference import measure_missing, predict
from hase.inference.library import missing_kernels
from hase.inference.prediction import targets
from hase.inference.prediction.targets import fitted_for
from hase.learned.kernels.interface import TrainingConfig
from hase.learned.kernels.predictors import read_predictors
from hase.learned.kernels.sidecar import read_sidecar
from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import DatasetKernel, header_path, journal_path, read_header, read_journal
from hase.records.kernel_record import ModelRecord
from hase.records.measurement import Block
from hase.runtimes import local_target
from hase.training.composition.fitting import kept_composition
from hase.training.kernels.training_set import read_training_set
from hase.training.train_kernel_model import kept_sidecar
from hase.utils import files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine
from hase.utils.paths import Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow, pytest.mark.usefixtures("canary")]

TARGET = local_target("cpu").name
EFFORT = {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 3, "most_runs": 20}
CONFIG = CollectorConfig.model_validate({"window_s": 0.2, "attempts": 1, "patience_s": 0, "kernel": EFFORT, "model": EFFORT})


@pytest.fixture
def workspace(tmp_path: Path, trained_workspace: Workspace) -> Workspace:
    """A copy of the trained workspace that a test may add to."""
    return Workspace(Path(shutil.copytree(trained_workspace.root, tmp_path / "workspace")))


@pytest.fixture
def newnet(workspace: Workspace) -> Path:
    """A model whose first kernels were not measured."""
    return conv_net(workspace.models / "newnet.onnx", channels=20, size=12)


def command(script: str, workspace: Workspace, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script(script, "--workspace", workspace.root, *arguments)


def measured_here(workspace: Workspace) -> list[Block]:
    """The blocks of the journal that were really measured; the rest are made up."""
    return [block for block in read_journal(workspace.dataset(TARGET)) if block.machine == machine("cpu").uuid]


def run_ms(workspace: Workspace) -> dict[str, float]:
    return {m.id: float(np.median(m.samples_ms)) for block in measured_here(workspace) for m in block.measurements
            if m.label == "run"}


def learned(folder: Path) -> dict[str, bytes]:
    """The files of predictors, without the look-up and the file that names it."""
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.name != "predictors.json" and not path.name.startswith("measured-")}


def test_the_command_measures_unmeasured_kernels(workspace: Workspace, newnet: Path) -> None:
    record = analyze(newnet, "cpu")
    folder = workspace.predictors(TARGET)
    files_before, sidecar, before = learned(folder), read_sidecar(folder), read_predictors(folder).measured
    missing = set(record.kernels) - set(before)
    options = ("--model", newnet, "--target", TARGET, "--measure-missing", "--json")  # a machine with a GPU is a second target
    done = command("inference/predict_model_latency.py", workspace, *options)
    assert done.returncode == 0, done.stderr
    report = re.search(rf"measured {len(missing)} kernels in (\d+\.\d) s; (\d+\.\d) s in all", done.stderr)
    assert report
    assert 0 < float(report[1]) <= float(report[2])
    (answer,) = json.loads(done.stdout)
    assert answer["time_share"] == pytest.approx({"measured": 1.0, "predicted": 0.0, "estimated": 0.0})
    times = run_ms(workspace)
    assert set(times) == missing
    assert {kernel["id"]: kernel["latency_ms"] for kernel in answer["kernels"] if kernel["id"] in missing} == pytest.approx(
        times, abs=1e-6)
    used = answer["composition"]
    summed = sum((times | {name: labels["run"] for name, labels in before.items()})[node.kernel_id] for node in record.nodes)
    assert answer["latency_ms"] == pytest.approx(used["alpha"] * summed + used["beta_ms"], rel=1e-3)
    renewed = read_sidecar(folder)
    assert learned(folder) == files_before
    assert renewed == sidecar.model_copy(update={"measured": renewed.measured, "measured_sha256": renewed.measured_sha256})
    assert {name: times for name, times in read_predictors(folder).measured.items() if name in before} == before

    journal = journal_path(workspace.dataset(TARGET)).read_bytes()
    rerun = command("inference/predict_model_latency.py", workspace, *options)
    assert rerun.stdout == done.stdout
    assert "nothing to measure" in rerun.stderr
    assert journal_path(workspace.dataset(TARGET)).read_bytes() == journal


def test_the_next_training_learns_from_them_unless_the_model_is_held_out(workspace: Workspace, newnet: Path) -> None:
    settings = read_config(workspace.root / "training.yaml", TrainingConfig)
    held_out = conv_net(workspace.models / f"{HELD_OUT}_c44.onnx", channels=44, size=12)
    assert kept_sidecar(workspace, read_training_set(workspace, TARGET), settings) is not None
    measure_missing(held_out, target=TARGET, workspace=workspace, config=CONFIG)
    of_held_out = set(run_ms(workspace))
    measure_missing(newnet, target=TARGET, workspace=workspace, config=CONFIG)
    rows = read_training_set(workspace, TARGET)
    assert set(run_ms(workspace)) & set(rows.ids) == set(run_ms(workspace)) - of_held_out != set()
    assert kept_composition(workspace, TARGET, "sum") is not None
    assert kept_sidecar(workspace, rows, settings) is None
    command("training/train_kernel_model.py", workspace, "--config", workspace.root / "training.yaml")
    command("training/fit_composition.py", workspace)
    for path in (held_out, newnet):
        assert predict(path, target=TARGET, workspace=workspace).time_share["measured"] == pytest.approx(1.0)


def test_kernels_that_fail_are_named_and_stay_predicted(workspace: Workspace, newnet: Path) -> None:
    """The file of one kernel is damaged. Another one holds a subgraph, so it can't be built."""
    record = analyze(newnet, "cpu")
    damaged, looping = [name for name, kernel in record.kernels.items() if kernel.type == "Conv_Relu"]
    loop = record.kernels[looping].model_copy(update={"id": "loop", "attributes": {"body": {"graph": "0"}}})
    record = record.model_copy(update={
        "kernels": {name: kernel for name, kernel in record.kernels.items() if name != looping} | {"loop": loop},
        "nodes": tuple(node.model_copy(update={"kernel_id": "loop"}) if node.kernel_id == looping else node
                       for node in record.nodes)})
    folder = workspace.kernel_onnx / record.flavour.name
    folder.mkdir(parents=True)
    (folder / f"{damaged}.onnx").write_bytes(b"no model")
    first, second = (measure_missing(record, target=TARGET, workspace=workspace, config=CONFIG, force=True) for _ in range(2))
    assert set(first.left) == {damaged, "loop"}
    assert first.measured > 1
    assert (second.measured, set(second.left)) == (0, {damaged, "loop"})
    prediction = predict(record, target=TARGET, workspace=workspace)
    assert {kernel.id for kernel in prediction.kernels if kernel.provenance == "predicted"} == {damaged, "loop"}
    assert prediction.time_share["estimated"] == 0


def test_kernels_measured_but_not_noted_are_looked_up(workspace: Workspace, newnet: Path) -> None:
    """As after a kill between measuring and noting."""
    record = analyze(newnet, "cpu")
    missing = missing_kernels.missing_kernels(fitted_for(workspace, TARGET), [record])
    missing_kernels.build(missing, record.flavour, workspace)
    with start_workers(CONFIG, "cpu", ("run",)) as workers:
        collect_kernels(workspace, CONFIG.model_copy(update={"device": "cpu", "labels": ("run",)}), [
            DatasetKernel.held_by(kernel, [record]) for kernel in missing.values()], workers)
    assert predict(record, target=TARGET, workspace=workspace).kernel_count["predicted"] == len(missing)
    filled = measure_missing(record, target=TARGET, workspace=workspace, config=CONFIG)
    assert (filled.measured, filled.left) == (0, ())
    assert predict(record, target=TARGET, workspace=workspace).kernel_count["predicted"] == 0


def test_shipped_predictors_are_copied_and_a_dataset_begins(newnet: Path, workspace: Workspace, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, local = tmp_path / "shipped", Workspace(tmp_path / "own")
    shutil.copytree(workspace.predictors(TARGET), shipped / TARGET)
    monkeypatch.setattr(targets, "SHIPPED", shipped)
    before = {path: path.read_bytes() for path in (shipped / TARGET).iterdir()}
    shipped_times = read_predictors(shipped / TARGET).measured
    assert measure_missing(newnet, workspace=local, config=CONFIG).left == ()
    assert {path: path.read_bytes() for path in (shipped / TARGET).iterdir()} == before
    assert read_header(local.dataset(TARGET)).labels == ("run",)
    looked_up = read_predictors(local.predictors(TARGET)).measured
    assert {name: looked_up[name] for name in shipped_times} == shipped_times
    assert set(looked_up) - set(shipped_times) == set(run_ms(local))
    assert predict(newnet, workspace=local).time_share["measured"] == pytest.approx(1.0)


def test_what_is_refused(workspace: Workspace, newnet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("inference/predict_model_latency.py", workspace, "--model", newnet, "--measure-missing")
    for option in (("--strict",), ("--metrics", "load.json")):
        done = command(*asked, *option)
        assert done.returncode == 2
        assert "neither with --strict nor under a load" in done.stderr

    def refused(model: Path | ModelRecord, message: str) -> None:
        with pytest.raises(UserError, match=message):
            measure_missing(model, target=TARGET, workspace=workspace, config=CONFIG)

    record = analyze(newnet, "cpu")
    refused(record.model_copy(update={"flavour": record.flavour.model_copy(update={"instruction_set": "sse"})}),
            r"the record is of a cpu-sse-\S+ graph")
    path = header_path(workspace.dataset(TARGET))
    files.write_json(path, read_header(path.parent).model_copy(update={"labels": ("node_span",)}))
    refused(newnet, r"without label run \(it has node_span\)")
    for module in (missing_kernels, targets):
        monkeypatch.setattr(module, "local_targets", lambda: (local_target("cpu").model_copy(update={"threads": 96}),))
    refused(newnet, f"kernels of target {TARGET} can only be measured on such a machine")
