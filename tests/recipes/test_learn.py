"""The recipe that learns from the H200's dataset: its parts, and what it leaves in the repository.

Fixture `part` of test_gpu_dataset.py learns with it. Here its script runs in a separate folder instead of the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_dataset import chain, collect, conv, relu

from hase.utils.fingerprint import Flavour, Target
from hase.utils.paths import ROOT

TARGET = "nvidia-h200-cuda-ort1.31-all"
DATASET = f"benchmark/dataset/{TARGET}"


def learn(repository: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [repository / "recipes" / "h200" / "learn.sh", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def written(folder: Path, names: list[str]) -> None:
    """Files whose text is their own name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def held(folder: Path) -> dict[str, str]:
    """The text of each file in a folder, by name."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the recipe alone, and the script that it packs with. What the recipe imports comes from here (`learn`)."""
    made = tmp_path / "repository"
    (made / "recipes" / "h200").mkdir(parents=True)
    (made / "docs" / "tables").mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "h200" / "learn.sh", made / "recipes" / "h200")
    (made / "recipes" / "h200" / "dataset_archives.py").symlink_to(ROOT / "recipes" / "h200" / "dataset_archives.py")
    return made


@pytest.mark.slow
def test_packing_and_unpacking(repository: Path, tmp_path: Path) -> None:
    """The dataset, its records and the host's side; neither predictors nor logs. A second call packs nothing."""
    flavour = Flavour(device="cuda", runtime_version="1.31")
    record = chain("resnet_a", [conv(), relu()]).model_copy(update={"flavour": flavour})
    target = Target(device_name="NVIDIA H200", flavour=flavour, threads=0)
    workspace = collect(tmp_path / "workspace", record, target=target).root
    copy = tmp_path / "again"
    of_dataset = held(workspace)
    names = [f"{DATASET}/copies.json", "node_profiles.json", "host/ort_analysis/ort_kernel_record/cpu/index.json"]
    written(workspace, [*names, f"{DATASET}/.writer.lock", "host/training/predictors/cpu/x.pkl", "host/logs/hase.log",
                        f"training/predictors/{TARGET}/x.pkl", "host/benchmark/dataset/cpu/kernels.jsonl"])
    (workspace / "node_profiles.json").rename(tmp_path / "profiles")
    (workspace / "node_profiles.json").symlink_to(tmp_path / "profiles")  # the target of a link is packed
    packed = []
    for _ in range(2):
        done = learn(repository, workspace, "pack")
        assert done.returncode == 0, done.stderr
        packed.append({path.name: path.read_bytes() for path in (repository / "recipes" / "h200").glob("*.tar.xz")})
        os.utime(workspace / names[0], (0, 1e9))
    assert packed[0].keys() == {f"{TARGET}.tar.xz", "host-nvidia-h200.tar.xz"}
    assert packed[0] == packed[1]
    done = learn(repository, copy, "unpack")
    assert done.returncode == 0, done.stderr
    unpacked = {name: text for name, text in held(copy).items() if not name.startswith("logs/")}
    assert unpacked == of_dataset | {name: name for name in names}


@pytest.mark.slow
def test_shipping_what_was_learned(repository: Path, tmp_path: Path) -> None:
    """It replaces what was shipped before, with the table of operators if there is one. A part alone is refused."""
    shipped, learned = (repository / "learned" / "shipped" / TARGET, tmp_path / "training" / "predictors" / TARGET)
    names = ["predictors.json", "host/predictors.json", "host.json", "composition.json", "energy.json",
             "generation.json", "generation_energy.json", "mps.json", "serving.json", "sharing.json"]
    written(shipped, ["old.pkl"])
    written(learned, names[:-1])
    done = learn(repository, tmp_path, "ship")
    assert done.returncode == 1
    assert "sharing.json is missing; run: recipes/h200/learn.sh" in done.stderr
    assert done.stderr.endswith("learn sharing energy generation\n")
    assert held(shipped) == {"old.pkl": "old.pkl"}
    written(learned, names[-1:])
    assert learn(repository, tmp_path, "ship").returncode == 0
    assert held(shipped) == {name: name for name in names}
    assert held(repository / "docs" / "tables") == {}
    written(tmp_path / "figures", ["operators.md"])
    assert learn(repository, tmp_path, "ship").returncode == 0
    assert held(repository / "docs" / "tables") == {"operators.md": "operators.md"}


def test_an_unknown_part_is_refused_before_anything_is_done(repository: Path, tmp_path: Path) -> None:
    done = learn(repository, tmp_path / "workspace", "unpack", "figures")
    assert done.returncode == 2
    assert "figures: no such part" in done.stderr
    assert not (tmp_path / "workspace").exists()


@pytest.mark.slow
def test_a_figure_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """In an empty workspace each one fails with one line, and all failures are named at the end."""
    done = learn(ROOT, tmp_path, "families")
    assert done.returncode == 1
    *_, last = lines = done.stderr.splitlines()
    assert (last, len(lines), "Traceback" in done.stderr) == ("failed: families operators", 3, False)
    assert not list((tmp_path / "figures").glob("*.txt"))
