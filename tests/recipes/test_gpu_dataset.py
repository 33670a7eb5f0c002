"""What ships for a GPU that is not here: predictors that learn again from a part of its dataset, and the shipped predictors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from command import run_script
from conftest import Once, unpacked
from pydantic_core import from_json

from hase.learned import target_files
from hase.learned.kernels.sidecar import read_sidecar
from hase.records.dataset_files import (
    header_path,
    journal_path,
    kernels_path,
    model_table_path,
    read_header,
    read_journal,
)
from hase.records.dataset_tables import write_dataset_tables
from hase.utils import files
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
    write_dataset_tables(folder, header, kept)
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


def test_families_left_out(part: Workspace) -> None:
    """Two tracks err less than a line over the sum, known kernels less than predicted ones, at the host's usual pace and at
    that measured."""
    done = run_script("training/held_out.py", "--workspace", part.root, "--config", part.root / "few.yaml", "--by", "family",
                      "--without-forests", "--json")
    assert done.returncode == 0, done.stderr
    left_out = json.loads(done.stdout)[TARGET]
    strict, strict_paced, shared, known, known_paced, line, *_ = (
        row["MAPE_%"] for row in left_out["models"] if row["of"] == "all")
    assert known < strict < line
    assert known <= shared < line
    assert known_paced <= strict_paced < line
    assert left_out["kernels"]["kernels"] > 500


@pytest.fixture(scope="module")
def others(once: Once) -> dict[str, Workspace]:
    """As shipped: models of those families beside other work, with the probe's readings (`beside`; on a further machine
    beside other kinds of work, `beside-more`), and with kernels alone beside the same work (`under-load`)."""
    return {name: unpacked(once, name, f"{name}-nvidia-h200.tar.xz") for name in ("beside", "under-load", "beside-more")}


def test_sharing_is_learned_from_models_beside_other_work(part: Workspace, others: dict[str, Workspace],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe tells more than metrics, and these more than an idle latency or kernels under load; another machine's
    measurement tells more. What was learned is kept beside the predictors. Three lengths of a slice and three costs of a
    switch are tried, since each takes seconds."""
    monkeypatch.setattr("hase.training.fit_sharing.SLICES_MS", (1.8, 2.1, 2.4))
    monkeypatch.setattr("hase.training.fits.time_slices.SWITCHES_MS", (0.1, 0.2, 0.3))
    done = run_script("training/fit_sharing.py", "--workspace", part.root, "--config", part.root / "few.yaml", "--json",
                      *(f"--beside={workspace.root}" for workspace in others.values()))
    assert done.returncode == 0, done.stderr
    fitted = json.loads(done.stdout)[TARGET]
    errors = {row["latency by"]: row["mean_%"] for row in fitted["latency_by"]}
    assert errors["measured on another machine"] < errors["a probe"] < errors["metrics alone"] < errors["idle latency"]
    assert errors["metrics alone"] < errors["kernels under load, summed"]
    assert errors["a probe"] < errors["the background's busy share"] < errors["idle latency"]
    sharing = target_files.SHARING.read(part.predictors(TARGET))
    assert sharing is not None
    assert sharing.model_dump(mode="json") == fitted["sharing"]
    assert 1.5 < sharing.slice_ms < sharing.longest_wait_ms < 2.6


def test_the_dataset_holds_what_its_readme_says(part: Workspace) -> None:
    """Its kernels, models, files, sessions and machines, by number. Every model was measured with its host."""
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
    assert (models["Status"] == "ok").all()
    assert models["host_ms"].notna().all()


def test_shipped_predictors_are_of_the_shipped_dataset() -> None:
    sidecar = read_sidecar(SHIPPED / TARGET)
    assert len(sidecar.machines) >= 2
    assert {machine.device_name for machine in sidecar.machines} == {"NVIDIA H200"}
    assert set(sidecar.labels) == {"gpu", "launches"}
    floats = {name for name in sidecar.dtypes if "int" not in name and name != "bool"}
    assert floats == {"bfloat16", "float16", "float32", "float64"}
    shipped = [*(SHIPPED / TARGET).rglob("*.*"), *(ROOT / "recipes" / "h200").glob("*.tar.xz")]
    assert sum(path.stat().st_size for path in shipped) < 80e6
