"""Joins the kernel records of two workspaces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from records.kernel_record import IndexEntry, KernelIndex, ModelOrigin, ModelRecord
from records.kernel_record_files import index_path, read_index, record_path, records_in
from utils import files
from utils.errors import UserError
from utils.fingerprint import Flavour
from utils.paths import Workspace

V = TypeVar("V")


def joined_by_name(there: Mapping[str, V], new: Mapping[str, V], what: str) -> dict[str, V]:
    """Both mappings as one.

    Raises:
        UserError: they disagree about a name.
    """
    for name in there.keys() & new.keys():
        if there[name] != new[name]:
            raise UserError(f"the {what} of {name} is {there[name]} in one workspace and {new[name]} in the other; give the "
                            "right one with --origins")
    return {**there, **new}


def index_in(workspace: Workspace, flavour: Flavour) -> KernelIndex | None:
    """The index of a flavour; None where there is none."""
    path = index_path(workspace, flavour)
    return read_index(path) if path.is_file() else None


def with_origin(record: ModelRecord, origins: Mapping[str, ModelOrigin], collection: str) -> ModelRecord:
    """The record with the group and the collection that `origins` gives for its file's stem; `collection` where it has none."""
    given = origins.get(record.file_stem, ModelOrigin())
    return record.model_copy(update={"group": given.group or record.group,
                                     "collection": given.collection or record.collection or collection})


def same_kernels(one: ModelRecord, other: ModelRecord) -> bool:
    """Whether two records describe one graph: the same kernels in the same order."""
    return [node.kernel_id for node in one.nodes] == [node.kernel_id for node in other.nodes]


def joined_index(flavour: Flavour, indexes: Iterable[KernelIndex], records: Iterable[ModelRecord]) -> KernelIndex:
    """The kernels of indexes and of records. What a record says of its model wins."""
    groups: dict[str, str] = {}
    collections: dict[str, str] = {}
    entries: dict[tuple[str, str], IndexEntry] = {}

    def add(entry: IndexEntry) -> None:
        key = entry.kernel.type, entry.kernel.id
        models = entries[key].models if key in entries else ()
        entries[key] = IndexEntry(kernel=entry.kernel, models=tuple(dict.fromkeys((*models, *entry.models))))

    for index in indexes:
        groups |= index.groups
        collections |= index.collections
        for entry in index.entries():
            add(entry)
    for record in records:
        groups[record.model] = record.group
        collections |= {record.model: record.collection} if record.collection else {}
        for kernel in record.kernels.values():
            add(IndexEntry(kernel=kernel, models=(record.model,)))
    by_type: dict[str, dict[str, IndexEntry]] = {}
    for (kind, name), entry in sorted(entries.items()):
        by_type.setdefault(kind, {})[name] = entry
    return KernelIndex(flavour=flavour, groups=groups, collections=collections, kernels=by_type)


def merge_records(source: Workspace, into: Workspace, flavour: Flavour, origins: Mapping[str, ModelOrigin],
                  collection: str) -> tuple[dict[str, ModelOrigin], int]:
    """Adds the records of `source` to those of `into`, and writes their index.

    Args:
        origins: the right group and collection of models of `source`, by the stem of their file.
        collection: of the models of `source` that have none.

    Returns:
        The origin of each model of `source` that has a record, by record name; and how many records are new.

    Raises:
        UserError: both have a record of one name, of different graphs or with another group or collection.
    """
    there = {record.model: record for record in records_in(into, flavour)}
    own = [with_origin(record, origins, collection) for record in records_in(source, flavour)]
    new = []
    for record in own:
        other = there.get(record.model)
        if other is None or (not other.collection and record.collection):
            new.append(record)
        if other is None:
            continue
        if not same_kernels(record, other):
            raise UserError(f"{record_path(source, flavour, record.model)}: another graph than that of the same name in "
                            f"{into.root}; rename one of the two models")
        joined_by_name({record.model: other.group}, {record.model: record.group}, "group")
        if other.collection and record.collection:
            joined_by_name({record.model: other.collection}, {record.model: record.collection}, "collection")
    indexes = [index for workspace in (source, into) if (index := index_in(workspace, flavour)) is not None]
    if own or indexes:
        whole = joined_index(flavour, indexes, [*there.values(), *own])
        for record in new:
            files.write_json(record_path(into, flavour, record.model), record)
        files.write_json(index_path(into, flavour), whole)
    return {record.model: ModelOrigin(record.group, record.collection) for record in own}, len(new)
