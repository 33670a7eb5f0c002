"""Files of kernel records: paths, reading, indexes, and merging two workspaces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from hase.records.kernel_costs import with_current_costs
from hase.records.kernel_record import (
    INDEX_VERSION,
    RECORD_VERSION,
    REMAKE,
    IndexEntry,
    Kernel,
    KernelIndex,
    ModelOrigin,
    ModelRecord,
)
from hase.utils import files
from hase.utils.errors import UserError, first_problem
from hase.utils.fingerprint import Flavour
from hase.utils.paths import Workspace

V = TypeVar("V")


def record_path(workspace: Workspace, flavour: Flavour, model: str) -> Path:
    """The path of a record; `model` is the model's name with sizes."""
    return workspace.kernel_records / flavour.name / f"{model}.json"


def index_path(workspace: Workspace, flavour: Flavour) -> Path:
    """The path of a flavour's index."""
    return workspace.kernel_records / flavour.name / "index.json"


def read_model_record(path: Path) -> ModelRecord:
    """Reads a model's record, with recomputed costs."""
    record = files.read_record(path, ModelRecord, RECORD_VERSION, REMAKE)
    return record.model_copy(update={"kernels": {name: with_current_costs(kernel) for name, kernel in record.kernels.items()}})


def write_record(workspace: Workspace, record: ModelRecord, origin: ModelOrigin) -> ModelRecord:
    """Writes a model's record, with a group and collection of `origin` in place of its own where given; returns it."""
    record = record.model_copy(update={name: text for name, text in origin._asdict().items() if text})
    files.write_json(record_path(workspace, record.flavour, record.model), record)
    return record


def read_index(path: Path) -> KernelIndex:
    """Reads a flavour's index."""
    return files.read_record(path, KernelIndex, INDEX_VERSION, REMAKE)


def records_in(workspace: Workspace, flavour: Flavour) -> list[ModelRecord]:
    """All records of a flavour, sorted by name; possibly none."""
    folder = workspace.kernel_records / flavour.name
    return [read_model_record(path) for path in sorted(folder.glob("*.json")) if path.name != "index.json"]


def read_model_records(workspace: Workspace, flavour: Flavour) -> list[ModelRecord]:
    """All records of a flavour, sorted by name; a `UserError` if there are none."""
    records = records_in(workspace, flavour)
    if not records:
        raise UserError(f"{workspace.kernel_records / flavour.name}: no kernel records of flavour {flavour.name}; make them "
                        f"with: {REMAKE}")
    return records


def build_index(flavour: Flavour, records: Iterable[ModelRecord], indexes: Iterable[KernelIndex] = ()) -> KernelIndex:
    """An index of all kernels of records and other indexes. Records take precedence over indexes."""
    groups: dict[str, str] = {}
    collections: dict[str, str] = {}
    kernels: dict[str, Kernel] = {}
    models: dict[str, dict[str, None]] = defaultdict(dict)  # as an ordered set
    for index in indexes:
        groups |= index.groups
        collections |= index.collections
        for entry in index.entries():
            kernels[entry.kernel.id] = entry.kernel
            models[entry.kernel.id] |= dict.fromkeys(entry.models)
    for record in records:
        groups[record.model] = record.group
        if record.collection:
            collections[record.model] = record.collection
        for kernel in record.kernels.values():
            kernels[kernel.id] = kernel
            models[kernel.id][record.model] = None
    by_type: dict[str, dict[str, IndexEntry]] = {}
    for kernel in sorted(kernels.values(), key=lambda kernel: (kernel.type, kernel.id)):
        by_type.setdefault(kernel.type, {})[kernel.id] = IndexEntry(kernel=kernel, models=tuple(models[kernel.id]))
    return KernelIndex(flavour=flavour, groups=groups, collections=collections, kernels=by_type)


def update_index(workspace: Workspace, flavour: Flavour) -> KernelIndex:
    """Writes a flavour's index from all its records."""
    index = build_index(flavour, records_in(workspace, flavour))
    files.write_json(index_path(workspace, flavour), index)
    return index


def kernels_in_file(path: Path) -> tuple[Flavour | None, list[Kernel]]:
    """The kernels in a model's record, an index, or a single kernel's JSON, with their flavour (None for the last)."""
    data = files.read_json(path)
    if isinstance(data, dict) and "nodes" in data:
        record: ModelRecord = read_model_record(path)
        return record.flavour, list(record.kernels.values())
    if isinstance(data, dict) and "op_type" in data:
        try:
            return None, [Kernel.model_validate(data)]
        except ValidationError as error:
            raise UserError(f"{path}: not a kernel: {first_problem(error)}") from None
    index: KernelIndex = read_index(path)
    return index.flavour, index.all_kernels()


def index_paths(workspace: Workspace) -> list[Path]:
    """The index file of every analysed flavour; a `UserError` if there are none."""
    paths = sorted(workspace.kernel_records.glob("*/index.json"))
    if not paths:
        raise UserError(f"{workspace.kernel_records}: no kernel records; make them with: {REMAKE}")
    return paths


def join_by_name(old: Mapping[str, V], new: Mapping[str, V], what: str) -> dict[str, V]:
    """Joins two mappings; a `UserError` if they disagree about a name."""
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise UserError(f"the {what} of {name} is {old[name]} in one workspace and {new[name]} in the other; give the "
                            "right one with --origins")
    return {**old, **new}


def with_origin(record: ModelRecord, origins: Mapping[str, ModelOrigin], collection: str) -> ModelRecord:
    """The record with its group and collection from `origins` (by file stem); `collection` is for a record without one."""
    origin = origins.get(record.file_stem, ModelOrigin())
    return record.model_copy(update={"group": origin.group or record.group,
                                     "collection": origin.collection or record.collection or collection})


def merge_records(source: Workspace, into: Workspace, flavour: Flavour, origins: Mapping[str, ModelOrigin],
                  collection: str) -> tuple[dict[str, ModelOrigin], int]:
    """Adds the records of `source` to those of `into`, and writes their index; records of one name must agree in graph, group
    and collection. `origins` are the right group and collection of models of `source`, by file stem; `collection` is for those
    that have none. Returns the origin of each model of `source`, by record name, and the number of new records."""
    existing = {record.model: record for record in records_in(into, flavour)}
    source_records = [with_origin(record, origins, collection) for record in records_in(source, flavour)]
    new = []
    for record in source_records:
        old = existing.get(record.model)
        if old is None or (not old.collection and record.collection):
            new.append(record)
        if old is None:
            continue
        if not record.same_kernels(old):
            raise UserError(f"{record_path(source, flavour, record.model)}: its graph differs from that of the same name "
                            f"in {into.root}; rename one of the two models")
        join_by_name({record.model: old.group}, {record.model: record.group}, "group")
        if old.collection and record.collection:
            join_by_name({record.model: old.collection}, {record.model: record.collection}, "collection")
    indexes = [read_index(path) for workspace in (source, into) if (path := index_path(workspace, flavour)).is_file()]
    if source_records or indexes:
        merged = build_index(flavour, [*existing.values(), *source_records], indexes)
        for record in new:
            files.write_json(record_path(into, flavour, record.model), record)
        files.write_json(index_path(into, flavour), merged)
    return {record.model: ModelOrigin(record.group, record.collection) for record in source_records}, len(new)
