"""Joining what several machines measured of one target: nothing is lost or doubled, and what does not agree is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import printed
from made_up_dataset import MACHINE, TARGET, chain, collect, conv, gemm, relu

from hase.records.dataset_files import kernel_table_path, read_header, read_journal, read_kernels
from hase.records.dataset_tables import read_kernel_table
from hase.records.dataset_writer import merge_dataset
from hase.records.kernel_record_files import index_path, read_index, read_model_record, record_path
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

OTHER = MACHINE.model_copy(update={"uuid": "1"})
SHARED = conv()


def test_two_machines_become_one_dataset(tmp_path: Path) -> None:
    """Blocks, kernels with all their owners, origins of models, records and their index; a second merge changes nothing."""
    old = collect(tmp_path / "old", chain("resnet_a", [SHARED, relu()]))
    new = collect(tmp_path / "new", chain("vit_b", [SHARED, gemm()]).model_copy(update={"collection": "timm"}), uuid="1")
    reports = [json.loads(printed("benchmark/merge_datasets.py", "--from", old.root, "--from", new.root, "--collection",
                                  "torchvision", "--workspace", tmp_path / "all", "--json")) for _ in range(2)]
    assert [row["blocks_added"] for row in reports[0]] == [1, 1]
    assert [(row["blocks_added"], row["blocks_there"], row["records_added"]) for row in reports[1]] == [(0, 1, 0)] * 2
    merged = Workspace(tmp_path / "all")
    header = read_header(merged.dataset(TARGET.name))
    assert header.machines.keys() == {"0", "1"}
    assert header.groups == {"resnet_a": "resnet", "vit_b": "vit"}
    assert header.collections == {"resnet_a": "torchvision", "vit_b": "timm"}
    owners = {entry.kernel.id: (entry.models, entry.groups) for entry in read_kernels(merged.dataset(TARGET.name))}
    assert owners == {SHARED.id: (("resnet_a", "vit_b"), ("resnet", "vit")), relu().id: (("resnet_a",), ("resnet",)),
                      gemm().id: (("vit_b",), ("vit",))}
    table = read_kernel_table(merged, TARGET.name)
    times = {(row["Kernel_ID"], str(row["Machine"])): row["Latency_ms"] for _, row in table.iterrows()}
    assert times == {(name, uuid): 0.375 + float(uuid) for uuid, names in (("0", (SHARED.id, relu().id)),
                                                                          ("1", (SHARED.id, gemm().id))) for name in names}
    record = read_model_record(record_path(merged, TARGET.flavour, "resnet_a"))
    assert record.collection == "torchvision"
    index = read_index(index_path(merged, TARGET.flavour))
    assert (index.groups, index.collections) == (header.groups, header.collections)
    assert index.kernels["Conv"][SHARED.id].models == ("resnet_a", "vit_b")


def test_right_origins_replace_wrong_ones(tmp_path: Path) -> None:
    """In the header, the records and the groups of the kernels."""
    name = "dinov2@batch=1"
    source = collect(tmp_path / "old", chain(name, [SHARED]).model_copy(update={"file_stem": "dinov2"}))
    files.write_json(tmp_path / "origins.json", {"dinov2": {"group": "vit", "collection": "transformers"}})
    printed("benchmark/merge_datasets.py", "--from", source.root, "--origins", tmp_path / "origins.json", "--workspace",
            tmp_path / "all")
    merged = Workspace(tmp_path / "all")
    folder = merged.dataset(TARGET.name)
    record, header = read_model_record(record_path(merged, TARGET.flavour, name)), read_header(folder)
    assert (record.group, record.collection) == ("vit", "transformers")
    assert (header.groups, header.collections) == ({name: "vit"}, {name: "transformers"})
    assert [entry.groups for entry in read_kernels(folder)] == [("vit",)]
    assert ",vit" in kernel_table_path(folder).read_text()


def test_what_does_not_agree_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    into = collect(tmp_path / "into", chain("resnet_a", [SHARED]))
    before = {path: path.read_bytes() for path in sorted(into.root.rglob("*.*")) if path.is_file()}
    for name, record, labels, message in (
            ("labels", chain("vit_b", [SHARED]), ("gpu",), "collected with labels"),
            ("group", chain("resnet_a", [SHARED]).model_copy(update={"group": "vit"}), ("run",), "the group of resnet_a"),
            ("graph", chain("resnet_a", [SHARED, relu()]), ("run",), "its graph differs")):
        source = collect(tmp_path / name, record, labels=labels, uuid="1")
        with pytest.raises(UserError, match=message):
            merge_dataset(source, into, TARGET.name, {}, "")
        assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(UserError, match="into itself"):
        merge_dataset(into, into, TARGET.name, {}, "")
    assert len(read_journal(into.dataset(TARGET.name))) == 1
