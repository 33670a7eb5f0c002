"""The archives of a dataset: each collection adds one, and together they hold the workspace; the fastest of several
measurements of a host's kernels; the script that learns from the H200's dataset, in a folder in the repository's place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from command import run_script
from made_up_dataset import TARGET, chain, collect, conv, gemm, relu

from hase.recipes.h200.dataset_archives import archives_in, pack_addition, unpack_archives
from hase.recipes.h200.quiet_host_kernels import LABEL
from hase.records.dataset_files import (
    journal_path,
    kernel_table_path,
    kernels_path,
    read_header,
    read_journal,
    read_kernels,
    write_journal,
)
from hase.records.dataset_tables import read_kernel_table
from hase.records.dataset_writer import merge_dataset
from hase.records.kernel_record_files import index_path, read_index, records_in
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour, Target
from hase.utils.paths import ROOT, Workspace

NAME, FLAVOUR = TARGET.name, TARGET.flavour
SHARED = conv()


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """The folder of archives: one holds the dataset of one machine."""
    (tmp_path / "archives").mkdir()
    return tmp_path / "archives"


@pytest.fixture
def workspace(tmp_path: Path, archives: Path) -> Workspace:
    """A dataset of one machine, packed as the first of the archives; then another machine's is added."""
    first = collect(tmp_path / "first", chain("resnet_a", [SHARED, relu()]))
    assert pack_addition(first, archives, NAME) == archives / f"{NAME}.tar.xz"
    merge_dataset(collect(tmp_path / "second", chain("vit_b", [SHARED, gemm()]), uuid="1"), first, NAME, {}, "")
    return first


def test_a_further_collection_adds_only_itself(workspace: Workspace, archives: Path) -> None:
    """Its blocks, the kernels that are new or have new owners, and its records. The first archive does not change."""
    first = archives / f"{NAME}.tar.xz"
    before = first.read_bytes()
    further = pack_addition(workspace, archives, NAME)
    assert further is not None
    assert further.name.startswith(f"{NAME}-002-20")
    assert archives_in(archives, NAME) == [first, further]
    assert first.read_bytes() == before
    with tarfile.open(further) as packed:
        held = {Path(member.name).name: file.read().decode().splitlines() for member in packed
                if (file := packed.extractfile(member))}
    assert held.keys() == {"dataset.json", "kernels.jsonl", "measurements.jsonl", "vit_b.json"}
    assert [json.loads(line)["machine"] for line in held["measurements.jsonl"]] == ["1"]
    assert {json.loads(line)["kernel"]["id"] for line in held["kernels.jsonl"]} == {SHARED.id, gemm().id}


@pytest.mark.slow
def test_archives_together_are_the_workspace(workspace: Workspace, archives: Path, tmp_path: Path) -> None:
    """To the last row of its tables. Packing again adds nothing; a third archive follows the second. Unpacking into a dataset
    keeps the blocks that no archive holds."""
    pack_addition(workspace, archives, NAME)
    assert pack_addition(workspace, archives, NAME) is None
    merge_dataset(collect(tmp_path / "third", chain("vgg_c", [relu(8), gemm()]), uuid="2"), workspace, NAME, {}, "")
    packed = workspace.dataset(NAME)
    before = read_journal(packed), read_kernels(packed)
    unpack_archives(archives_in(archives, NAME), workspace, NAME)
    assert (read_journal(packed), read_kernels(packed)) == before
    third = pack_addition(workspace, archives, NAME)
    assert third is not None
    assert third.name.startswith(f"{NAME}-003-")
    copy = Workspace(tmp_path / "again")
    unpack_archives(archives_in(archives, NAME), copy, NAME)
    unpacked = copy.dataset(NAME)
    assert read_header(unpacked) == read_header(packed)
    for path in (journal_path, kernels_path, kernel_table_path):
        assert path(unpacked).read_bytes() == path(packed).read_bytes()
    assert records_in(copy, FLAVOUR) == records_in(workspace, FLAVOUR)
    assert read_index(index_path(copy, FLAVOUR)).groups == {"resnet_a": "resnet", "vgg_c": "vgg", "vit_b": "vit"}


def test_packing_never_removes_from_the_archives(workspace: Workspace, archives: Path) -> None:
    """A workspace without a block of the archives is refused: archives are never written again."""
    folder = workspace.dataset(NAME)
    write_journal(folder, read_journal(folder)[1:])
    with pytest.raises(UserError, match=r"measurements\.jsonl: 1 blocks of the archives are not in it"):
        pack_addition(workspace, archives, NAME)
    assert len(archives_in(archives, NAME)) == 1


def test_no_archives_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no archive of target {NAME}"):
        unpack_archives(archives_in(tmp_path, NAME), Workspace(tmp_path / "w"), NAME)
    (tmp_path / f"{NAME}.tar.xz").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"\.tar\.xz: not an archive, or damaged"):
        unpack_archives(archives_in(tmp_path, NAME), Workspace(tmp_path / "w"), NAME)


def test_of_several_measurements_of_a_hosts_kernels_the_fastest_is_kept(tmp_path: Path) -> None:
    """The second machine is one millisecond slower, and has a further kernel."""
    slow = collect(tmp_path / "slow", chain("resnet_a", [conv(), relu()]), uuid="1", labels=(LABEL,))
    fast = collect(tmp_path / "fast", chain("vit_b", [conv(), gemm()]), labels=(LABEL,))
    for folder in (slow.dataset(NAME), fast.dataset(NAME)):
        write_journal(folder, [of_run.model_copy(update={"measurements": tuple(
            m.model_copy(update={"label": LABEL}) for m in of_run.measurements)}) for of_run in read_journal(folder)])
    done = run_script("recipes/h200/quiet_host_kernels.py", "--from", slow.root, "--from", fast.root,
                      "--workspace", tmp_path / "kept")
    assert done.returncode == 0, done.stderr
    table = read_kernel_table(Workspace(tmp_path / "kept"), NAME).set_index("Kernel_ID")
    assert table[f"{LABEL}_ms"].to_dict() == pytest.approx({conv().id: 0.375, relu().id: 1.375})


H200 = "nvidia-h200-cuda-ort1.31-all"
DATASET = f"benchmark/dataset/{H200}"


def learn(repository: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [repository / "recipes" / "h200" / "learn.sh", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def written(folder: Path, names: list[str]) -> None:
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
                        f"training/predictors/{H200}/x.pkl", "host/benchmark/dataset/cpu/kernels.jsonl"])
    (workspace / "node_profiles.json").rename(tmp_path / "profiles")
    (workspace / "node_profiles.json").symlink_to(tmp_path / "profiles")  # the target of a link is packed
    packed = []
    for _ in range(2):
        done = learn(repository, workspace, "pack")
        assert done.returncode == 0, done.stderr
        packed.append({path.name: path.read_bytes() for path in (repository / "recipes" / "h200").glob("*.tar.xz")})
        os.utime(workspace / names[0], (0, 1e9))
    assert packed[0].keys() == {f"{H200}.tar.xz", "host-nvidia-h200.tar.xz"}
    assert packed[0] == packed[1]
    done = learn(repository, copy, "unpack")
    assert done.returncode == 0, done.stderr
    unpacked = {name: text for name, text in held(copy).items() if not name.startswith("logs/")}
    assert unpacked == of_dataset | {name: name for name in names}


@pytest.mark.slow
def test_shipping_what_was_learned(repository: Path, tmp_path: Path) -> None:
    """It replaces what was shipped before, with the table of operators if there is one. A part alone is refused."""
    shipped, learned = (repository / "learned" / "shipped" / H200, tmp_path / "training" / "predictors" / H200)
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
    written(tmp_path / "figures", ["operators.md"])
    assert learn(repository, tmp_path, "ship").returncode == 0
    assert held(shipped) == {name: name for name in names}
    assert held(repository / "docs" / "tables") == {"operators.md": "operators.md"}


def test_an_unknown_part_is_refused_before_anything_is_done(repository: Path, tmp_path: Path) -> None:
    done = learn(repository, tmp_path / "workspace", "unpack", "figures")
    assert (done.returncode, "figures: no such part" in done.stderr, (tmp_path / "workspace").exists()) == (2, True, False)
