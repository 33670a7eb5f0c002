"""What ships for a GPU that is not here: predictors that learn again from a part of its dataset, and the shipped predictors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command import run_script
from conftest import TORCH_MODELS
from pydantic_core import from_json

from hase.inference import predict
from hase.learned import target_files
from hase.learned.kernels.interface import TrainingConfig, TrainingSet
from hase.learned.kernels.sidecar import read_sidecar
from hase.records.dataset_files import (
    header_path,
    journal_path,
    kernels_path,
    model_table_path,
    read_header,
    read_journal,
)
from hase.records.dataset_writer import write_tables
from hase.records.kernel_record_files import read_model_record
from hase.training.composition.formulas import fit_line
from hase.training.fits.time_slices import alone_ms, measured_under_load, shared_runs, summed_ms
from hase.utils import files
from hase.utils.cli import EXIT_SLO_MISSED
from hase.utils.fingerprint import has_cuda
from hase.utils.paths import ROOT, SHIPPED, Workspace

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

TARGET = "nvidia-h200-cuda-ort1.31-all"
FAMILIES = {"squeezenet", "mnasnet", "shufflenet", "resnet", "mobilenet", "vgg", "alexnet"}
COUNTS = "counts.json"  # of the shipped dataset's kernels with label gpu: of models, drawn near a group's, and others
FURTHER = 2000  # kernels of no model, of the types that those families have


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The shipped dataset cut down to seven families and some further kernels, with predictors of few trees."""
    workspace = Workspace(tmp_path_factory.mktemp("h200"))
    learn(workspace, "unpack")
    folder = workspace.dataset(TARGET)
    for path in (header_path(folder), model_table_path(folder)):
        files.write_bytes(workspace.root / "whole" / path.name, path.read_bytes())  # before it is cut down
    header = read_header(folder)
    wanted, kept_models = set[str](), set[str]()
    for path in (workspace.kernel_records / header.target.flavour.name).glob("*.json"):
        if header.groups.get(path.stem) in FAMILIES:  # the index has no group
            wanted |= set(files.read_json(path)["kernels"])
            kept_models.add(path.stem)
        else:
            path.unlink()
    kernels = {}  # by id: the type, who holds it, and the line
    for line in files.read_lines(kernels_path(folder)):
        entry = from_json(line)
        holder = "models" if entry["models"] else "groups" if entry["groups"] else "none"
        kernels[entry["kernel"]["id"]] = entry["kernel"]["type"], holder, line
    types = {kernels[name][0] for name in wanted & kernels.keys()}
    drawn_freely = [name for name, (kernel_type, holder, _) in kernels.items() if holder == "none" and kernel_type in types]
    wanted |= set(islice(drawn_freely, 0, None, max(len(drawn_freely) // FURTHER, 1)))  # of all types: they are sorted by name
    kernels_path(folder).write_text("".join(f"{line}\n" for name, (*_, line) in kernels.items() if name in wanted))
    kept, timed = [], set[str]()
    for block in read_journal(folder):
        timed |= {m.id for m in block.measurements if (m.subject, m.label, m.status) == ("kernel", "gpu", "ok")}
        of_part = tuple(m for m in block.measurements if m.id in (wanted if m.subject == "kernel" else kept_models))
        if of_part:
            kept.append(block.model_copy(update={"measurements": of_part}))
    journal_path(folder).write_text("".join(block.model_dump_json() + "\n" for block in kept))
    (workspace.root / "whole" / COUNTS).write_text(json.dumps(Counter(kernels[name][1] for name in timed)))
    write_tables(folder, header, kept)
    (workspace.root / "few.yaml").write_text(
        "folds: 4\nxgboost_gpu: {trees: 240, depth: 8, learning_rate: 0.1, objective: squarederror, own_predictors: none}\n"
        "xgboost: {trees: 60}\nforest: {trees: 12}\n")
    learn(workspace, "learn")
    return workspace


def learn(workspace: Workspace, part: str) -> None:
    """Runs a part of the recipe that learns from the shipped dataset, with few trees."""
    environment = os.environ | {"TRAINING_CONFIG": str(workspace.root / "few.yaml"),
                                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["recipes/h200/learn.sh", str(workspace.root), part]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run(script: str, workspace: Workspace, *options: str) -> subprocess.CompletedProcess[str]:
    return run_script(script, "--workspace", workspace.root, "--config", workspace.root / "few.yaml", *options)


@pytest.fixture(scope="module")
def left_out(part: Workspace) -> dict[str, Any]:
    """What families left out in turn err by."""
    done = run("training/held_out.py", part, "--by", "family", "--without-forests", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[TARGET]


def test_families_left_out(left_out: dict[str, Any]) -> None:
    """Two tracks err less than a line over the sum, known kernels less than predicted ones, at the host's usual pace and at
    that measured. Seven families and few trees err by 6.4 % where all of the dataset errs by 4.5 % (docs/accuracy.md)."""
    of_all = (row["MAPE_%"] for row in left_out["models"] if row["of"] == "all")
    strict, strict_paced, shared, known, known_paced, line, *_ = of_all
    assert known < strict < line
    assert known <= shared < line
    assert strict < 7.0
    assert known < 2.6
    assert known_paced <= strict_paced < line
    assert left_out["kernels"]["MAPE_%"] < 11
    assert left_out["kernels"]["median_%"] < 5.6
    assert left_out["kernels"]["kernels"] > 500


def unpacked(name: str, folder: Path) -> Workspace:
    with tarfile.open(ROOT / "recipes" / "h200" / name) as archive:
        archive.extractall(folder, filter="data")
    return Workspace(folder)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Models of those families beside other work, with the probe's readings, as shipped."""
    return unpacked("beside-nvidia-h200.tar.xz", tmp_path_factory.mktemp("beside"))


@pytest.fixture(scope="module")
def under_load(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The same with kernels alone beside the same work, from another machine, as shipped."""
    return unpacked("under-load-nvidia-h200.tar.xz", tmp_path_factory.mktemp("under_load"))


@pytest.fixture(scope="module")
def beside_more(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The same beside other kinds of work, from a fourth machine, as shipped."""
    return unpacked("beside-more-nvidia-h200.tar.xz", tmp_path_factory.mktemp("beside_more"))


def test_sharing_is_learned_from_models_beside_other_work(part: Workspace, beside: Workspace, under_load: Workspace,
                                                          beside_more: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe tells more than metrics, and these more than an idle latency or kernels under load; a looped model's prediction
    tells as much, and another machine's measurement more. What was learned is kept beside the predictors. Three lengths of a
    slice and three costs of a switch are tried, since each takes seconds."""
    monkeypatch.setattr("hase.training.fit_sharing.SLICES_MS", (1.8, 2.1, 2.4))
    monkeypatch.setattr("hase.training.fits.time_slices.SWITCHES_MS", (0.1, 0.2, 0.3))
    datasets = [option for workspace in (beside, under_load, beside_more) for option in ("--beside", str(workspace.root))]
    done = run("training/fit_sharing.py", part, *datasets, "--json")
    assert done.returncode == 0, done.stderr
    fitted = json.loads(done.stdout)[TARGET]
    errors = {row["latency by"]: row for row in fitted["latency_by"]}
    assert errors["a probe"]["cases"] > 100
    assert errors["a probe"]["mean_%"] < 7
    assert errors["a probe"]["p95_%"] < 5
    assert errors["a probe"]["mean_%"] < errors["metrics alone"]["mean_%"] < errors["idle latency"]["mean_%"]
    assert errors["metrics alone"]["mean_%"] < errors["kernels under load, summed"]["mean_%"]
    assert errors["a probe"]["mean_%"] < errors["the background's busy share"]["mean_%"] < errors["idle latency"]["mean_%"]
    looped = errors["the looped model's prediction"]
    assert 20 < looped["cases"] < errors["a probe"]["cases"] / 4
    assert looped["mean_%"] < 6.5
    assert errors["measured on another machine"]["mean_%"] < errors["a probe"]["mean_%"]
    assert {row["background"] for row in fitted["backgrounds"]} == {
        name for workspace in (beside, beside_more) for name in read_header(workspace.dataset(TARGET)).backgrounds}
    sharing = target_files.SHARING.read(part.predictors(TARGET))
    assert sharing is not None
    assert sharing.model_dump(mode="json") == fitted["sharing"]
    assert 1.5 < sharing.slice_ms < 2.5
    assert 0.005 < sharing.alone_ms["tiny"] < 0.05 < sharing.alone_ms["long"] < 1
    assert sharing.waits_ms == tuple(sorted(sharing.waits_ms))
    assert 0.05 <= sharing.switch_ms <= 0.4
    assert 2.2 < sharing.longest_wait_ms < 2.6


def test_the_plans_own_path_sees_nothing_of_what_it_predicts(part: Workspace, under_load: Workspace,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """With a training that notes what it is given and takes a millisecond for every kernel, a sum is a number of nodes."""
    models = {"alexnet@batch=16", "resnet18@batch=16", "squeezenet1_1@batch=1"}
    blocks = read_journal(under_load.dataset(TARGET))
    runs = [run for run in shared_runs(blocks, alone_ms(blocks)) if run.model in models]
    rows = measured_under_load(under_load, TARGET)
    assert rows is not None
    paths = list((part.kernel_records / rows.header.target.flavour.name).glob("*.json"))
    records = {path.stem: read_model_record(path) for path in paths if path.stem in models}
    families = {name: records[name].group for name in models}
    given: list[TrainingSet] = []

    def learn(seen: TrainingSet, *_: object) -> SimpleNamespace:
        given.append(seen)
        return SimpleNamespace(predict_ms=lambda types, *_: np.ones(len(types)))

    monkeypatch.setattr("hase.training.fits.time_slices.fit_kernel_model", learn)
    sums_ms = summed_ms(rows, runs, records, families, TrainingConfig(threads=1))
    assert np.isfinite(sums_ms).all()
    left_out = {(background, name) for seen in given for background in set(rows.backgrounds) - set(seen.backgrounds)
                for name in families.values() if not any(name in owners for owners in seen.groups)}
    assert left_out >= {(run.background, families[run.model]) for run in runs}
    place = next(place for place, run in enumerate(runs) if (run.model, run.background) == ("alexnet@batch=16", "compute"))
    learned_from = [run for run in runs if families[run.model] != "alexnet" and run.background != "compute"]
    line = fit_line(np.array([float(len(records[run.model].nodes)) for run in learned_from]),
                    np.array([run.samples_ms.mean() for run in learned_from]))
    assert sums_ms[place] == pytest.approx(line.alpha * len(records["alexnet@batch=16"].nodes) + line.beta_ms)
    only = [run for run in runs if run.background == "compute"]
    assert np.isnan(summed_ms(rows, only, records, families, TrainingConfig(threads=1))).all()
    header = read_header(under_load.dataset(TARGET))
    without = Workspace(part.root / "without")
    write_tables(without.dataset(TARGET), header, [block for block in blocks if not block.level][:0])
    assert measured_under_load(without, TARGET) is None


def test_a_shipped_reading_of_the_probe_tells_a_prediction(beside: Workspace, torch_models: dict[str, Path],
                                                           tmp_path: Path) -> None:
    """A reading beside a queue that never runs dry: each run waits a whole turn of the other process, 2.4 ms."""
    block = next(block for block in read_journal(beside.dataset(TARGET)) if block.load == (1.0, "compute_deep"))
    files.write_json(tmp_path / "reading.json", block.probe)
    done = [run_script("inference/predict_model_latency.py", "--model", torch_models["resnet18"], "--target", "nvidia-h200",
                       "--json", "--slo-ms", "2", *probe) for probe in ([], ["--probe", tmp_path / "reading.json"])]
    assert [process.returncode for process in done] == [0, EXIT_SLO_MISSED]
    (idle,), (waiting,) = (json.loads(process.stdout) for process in done)
    assert waiting["under_load"]["told_by"] == "probe"
    assert waiting["latency_ms"] == pytest.approx(idle["latency_ms"] + 2.4, abs=0.8)
    assert (idle["slo"]["met"], waiting["slo"]["met"]) == (True, False)


def test_a_gpu_without_its_label_is_reported(tmp_path: Path, part: Workspace) -> None:
    done = run("training/held_out.py", part, "--by", "family", "--target", "nvidia-z9")
    assert done.returncode == 1
    assert "nvidia-z9" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_model_was_measured_with_its_host(part: Workspace) -> None:
    models = pd.read_csv(model_table_path(part.dataset(TARGET)))
    assert (models["Status"] == "ok").all()
    assert models["host_ms"].notna().all()


def test_the_dataset_holds_what_its_readme_says(part: Workspace) -> None:
    """Its kernels, models, files, sessions and machines, by number."""
    page = " ".join((ROOT / "recipes" / "h200" / "README.md").read_text(encoding="utf-8").split())
    whole = part.root / "whole"
    count = json.loads((whole / COUNTS).read_text())
    models = pd.read_csv(model_table_path(whole))
    files_of_models = models["Model"].str.partition("@")[0].nunique()
    for stated in (f"label `gpu` of {sum(count.values()):,} kernels", f"{count['models']:,} of models of torchvision",
                   f"{count['groups']:,} near those", f"{count['none']:,} of no model",
                   f"{models['Model'].nunique():,} models and batch sizes ({files_of_models:,} model files) in "
                   f"{len(models):,} sessions"):
        assert stated in page
    assert len(read_header(whole).machines) == 32
    assert "thirty-two H200s" in page


@pytest.mark.parametrize("name", TORCH_MODELS)
def test_shipped_predictors_answer_without_a_gpu(torch_models: dict[str, Path], name: str) -> None:
    """A model at an image size that is in no dataset: most of it is predicted, and the answer says what it holds for."""
    prediction = predict(torch_models[name], target="nvidia-h200")
    assert prediction.target == TARGET
    assert prediction.composition.kind == "pipeline"
    assert 0.1 < prediction.latency_ms < 5
    assert prediction.interval_ms is not None
    assert prediction.interval_ms[0] < prediction.latency_ms < prediction.interval_ms[1]
    if not has_cuda():
        assert any("NVIDIA H200 with ONNX Runtime 1.31" in text for text in prediction.holds_for)
        assert any("derived" in text for text in prediction.holds_for)


def test_shipped_predictors_are_of_the_shipped_dataset() -> None:
    sidecar = read_sidecar(SHIPPED / TARGET)
    assert len(sidecar.machines) >= 2
    assert {machine.device_name for machine in sidecar.machines} == {"NVIDIA H200"}
    assert set(sidecar.labels) == {"gpu", "launches"}
    floats = {name for name in sidecar.dtypes if "int" not in name and name != "bool"}
    assert floats == {"bfloat16", "float16", "float32", "float64"}
    shipped = [path for path in (SHIPPED / TARGET).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in [*shipped, *(ROOT / "recipes" / "h200").glob("*.tar.xz")])
    assert size < 80e6
