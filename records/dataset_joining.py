"""Joins the datasets of one target that several workspaces hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from records.dataset_files import (
    DatasetHeader,
    DatasetKernel,
    header_path,
    journal_path,
    read_header,
    read_journal,
    read_kernels,
)
from records.dataset_writer import add_descriptions, joined_header, write_tables
from records.kernel_record import ModelOrigin
from records.kernel_record_joining import joined_by_name, merge_records
from utils import files
from utils.errors import UserError
from utils.locks import sole_writer
from utils.paths import Workspace


class Merged(NamedTuple):
    """How many blocks, kernels, models, machines and kernel records a merge added, and how many blocks were there already."""

    blocks: int
    blocks_there: int
    kernels: int
    models: int
    machines: int
    records: int


def with_origins(header: DatasetHeader, described: Iterable[DatasetKernel], origins: Mapping[str, ModelOrigin],
                 collection: str) -> tuple[DatasetHeader, list[DatasetKernel]]:
    """A dataset's header and kernels with the right groups and collections.

    Args:
        origins: of models, by record name: they win over what the header says.
        collection: of the models of the header and of the kernels that have none.
    """
    described = list(described)
    names = {model for entry in described for model in entry.models} | header.groups.keys()
    groups = header.groups | {model: origin.group for model, origin in origins.items()}
    found = header.collections | {model: origin.collection for model, origin in origins.items() if origin.collection}
    collections = {model: kept for model in sorted(names | origins.keys()) if (kept := found.get(model, collection))}

    def regrouped(entry: DatasetKernel) -> DatasetKernel:
        if not entry.models or any(model not in groups for model in entry.models):
            return entry
        of_models = {groups[model] for model in entry.models}
        return entry.model_copy(update={"groups": tuple(sorted(of_models | set(entry.groups if entry.sampled else ())))})

    return (header.model_copy(update={"groups": groups, "collections": collections}), [regrouped(one) for one in described])


def check_agreement(there: DatasetHeader, new: DatasetHeader) -> None:
    """Checks that two headers say the same of the machines and models that both name.

    Raises:
        UserError: they do not.
    """
    joined_by_name(there.groups, new.groups, "group")
    joined_by_name(there.collections, new.collections, "collection")
    before, after = ({uuid: machine.device_name for uuid, machine in one.machines.items()} for one in (there, new))
    joined_by_name(before, after, "device")


def merge_dataset(source: Workspace, into: Workspace, target: str, origins: Mapping[str, ModelOrigin],
                  collection: str) -> Merged:
    """Adds the dataset of a target, and the kernel records of its flavour, to those of another workspace.

    A block that is there already is not added again. The journal is replaced at once, after everything that it refers to; an
    interrupted merge can be repeated.

    Args:
        source, into: the two workspaces; `into` may be empty.
        origins: the right group and collection of models of `source`, by the stem of their file.
        collection: of the models of `source` that have none.

    Raises:
        UserError: the datasets do not agree (see `joined_header`, `check_agreement` and `merge_records`), one is damaged, or
            another process writes there.
    """
    old, folder = source.dataset(target), into.dataset(target)
    header = read_header(old)
    if old.resolve() == folder.resolve():
        raise UserError(f"{folder}: a dataset can't be merged into itself")
    with sole_writer(into.kernel_records), sole_writer(folder):
        before = read_header(folder) if header_path(folder).exists() else None
        joined_header(folder, header)  # refuses another target before anything is written
        of_models, records = merge_records(source, into, header.target.flavour, origins, collection)
        header, described = with_origins(header, read_kernels(old), of_models, collection)
        if before is not None:
            check_agreement(before, header)
        whole, there = joined_header(folder, header), {entry.kernel.id: entry for entry in read_kernels(folder)}
        blocks = {block.model_dump_json(): block for block in read_journal(folder)}
        kept = len(blocks)
        from_source = {block.model_dump_json(): block for block in read_journal(old)}
        blocks |= from_source
        add_descriptions(folder, [entry.with_owners_of(there.get(entry.kernel.id)) for entry in described])
        files.write_json(header_path(folder), whole)
        files.write_text(journal_path(folder), "".join(f"{line}\n" for line in blocks))
        write_tables(folder, whole, list(blocks.values()))
    added = len(blocks) - kept
    return Merged(added, len(from_source) - added, len({entry.kernel.id for entry in described} - there.keys()),
                  len(whole.groups.keys() - (before.groups.keys() if before else set())),
                  len(whole.machines.keys() - (before.machines.keys() if before else set())), records)
