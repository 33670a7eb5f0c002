"""The archives of a dataset: each collection adds one, and together they hold the workspace."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from made_up_dataset import TARGET, chain, collect, conv, gemm, relu

from hase.recipes.h200.dataset_archives import archives_in, pack_more, unpack_all
from hase.records.dataset_files import (
    journal_path,
    kernel_table_path,
    kernels_path,
    read_header,
    read_journal,
    read_kernels,
    write_journal,
)
from hase.records.dataset_writer import merge_dataset
from hase.records.kernel_record_files import index_path, read_index, records_in
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

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
    assert pack_more(first, archives, NAME) == archives / f"{NAME}.tar.xz"
    merge_dataset(collect(tmp_path / "second", chain("vit_b", [SHARED, gemm()]), uuid="1"), first, NAME, {}, "")
    return first


def test_a_further_collection_adds_only_itself(workspace: Workspace, archives: Path) -> None:
    """Its blocks, the kernels that are new or have new owners, and its records. The first archive does not change."""
    first = archives / f"{NAME}.tar.xz"
    before = first.read_bytes()
    further = pack_more(workspace, archives, NAME)
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


def test_archives_together_are_the_workspace(workspace: Workspace, archives: Path, tmp_path: Path) -> None:
    """To the last row of its tables. Packing again adds nothing; a third archive follows the second. Unpacking into a dataset
    keeps the blocks that no archive holds."""
    pack_more(workspace, archives, NAME)
    assert pack_more(workspace, archives, NAME) is None
    merge_dataset(collect(tmp_path / "third", chain("vgg_c", [relu(8), gemm()]), uuid="2"), workspace, NAME, {}, "")
    packed = workspace.dataset(NAME)
    before = read_journal(packed), read_kernels(packed)
    unpack_all(archives_in(archives, NAME), workspace, NAME)
    assert (read_journal(packed), read_kernels(packed)) == before
    third = pack_more(workspace, archives, NAME)
    assert third is not None
    assert third.name.startswith(f"{NAME}-003-")
    copy = Workspace(tmp_path / "again")
    unpack_all(archives_in(archives, NAME), copy, NAME)
    unpacked = copy.dataset(NAME)
    assert read_header(unpacked) == read_header(packed)
    for path in (journal_path, kernels_path, kernel_table_path):
        assert path(unpacked).read_bytes() == path(packed).read_bytes()
    assert records_in(copy, FLAVOUR) == records_in(workspace, FLAVOUR)
    assert read_index(index_path(copy, FLAVOUR)).groups == {"resnet_a": "resnet", "vgg_c": "vgg", "vit_b": "vit"}


def test_the_same_files_give_the_same_archive(tmp_path: Path) -> None:
    workspace = collect(tmp_path / "first", chain("resnet_a", [SHARED]))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pack_more(workspace, tmp_path / name, NAME)
    first, again = ((tmp_path / name / f"{NAME}.tar.xz").read_bytes() for name in ("a", "b"))
    assert first == again


def test_packing_never_removes_from_the_archives(workspace: Workspace, archives: Path) -> None:
    """A workspace without a block of the archives is refused: archives are never written again."""
    folder = workspace.dataset(NAME)
    write_journal(folder, read_journal(folder)[1:])
    with pytest.raises(UserError, match=r"measurements\.jsonl: 1 blocks of the archives are not in it"):
        pack_more(workspace, archives, NAME)
    assert len(archives_in(archives, NAME)) == 1


def test_no_archives_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no archive of target {NAME}"):
        unpack_all(archives_in(tmp_path, NAME), Workspace(tmp_path / "w"), NAME)
    (tmp_path / f"{NAME}.tar.xz").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"\.tar\.xz: not an archive, or damaged"):
        unpack_all(archives_in(tmp_path, NAME), Workspace(tmp_path / "w"), NAME)
