"""Writes a dataset (header, journal, tables), and merges datasets of one target from several workspaces.

New rows are added to the tables if old rows do not change: 0.1 s for 60,000 kernels, instead of 10 s for all tables.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hase.records.dataset_files import (
    DatasetHeader,
    DatasetKernel,
    digests_match,
    header_path,
    journal_path,
    kernel_lines,
    kernel_table_path,
    kernels_path,
    model_table_path,
    read_digests,
    read_header,
    read_journal,
    read_kernels,
    write_digests,
    write_journal,
    write_kernels,
)
from hase.records.dataset_tables import kernel_columns, measured_kernel_ids, model_columns, model_sessions, write_dataset_tables
from hase.records.kernel_record import ModelOrigin
from hase.records.kernel_record_files import join_by_name, merge_records
from hase.records.measurement import Block, Journal, append_block
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.paths import Workspace

TABLES_EVERY_S = 30.0  # at least; writing them never takes more than a tenth of the time


class DatasetWriter(Journal):
    """A dataset that grows block by block, with tables that are updated now and then."""

    def __init__(self, folder: Path, header: DatasetHeader, described: Sequence[DatasetKernel]) -> None:
        """Writes the header and the kernels, merged with the existing ones; `described` replaces existing descriptions. Raises
        UserError if the existing dataset is damaged, for another target, or collected with other labels, held-out groups or
        metrics, or with another background of the same name."""
        self.folder, self.header = folder, joined_header(folder, header)
        super().__init__(read_journal(folder))
        tables_are_current = _tables_are_current(folder, self.header)
        files.write_json(header_path(folder), self.header)
        changed = add_descriptions(folder, described)
        unchanged = tables_are_current and changed.isdisjoint(measured_kernel_ids(self.blocks))
        self._blocks_in_tables = len(self.blocks) if unchanged else 0
        if self._blocks_in_tables and changed:
            write_digests(folder)
        self._digests = read_digests(folder)
        self._tables_due_s = time.monotonic() + TABLES_EVERY_S

    def append(self, block: Block) -> None:
        """Adds a block to the journal, and updates the tables if it is time."""
        append_block(journal_path(self.folder), block)
        super().append(block)
        if time.monotonic() > self._tables_due_s:
            began_s = time.monotonic()
            self.write_tables()
            self._tables_due_s = time.monotonic() + max(TABLES_EVERY_S, 9 * (time.monotonic() - began_s))

    def write_tables(self) -> None:
        """Updates the tables: adds rows if all kernels of the new blocks are new, otherwise writes everything."""
        if read_digests(self.folder) != self._digests:  # another process has written them
            self._blocks_in_tables = 0
        old, new = self.blocks[:self._blocks_in_tables], self.blocks[self._blocks_in_tables:]
        if old and not new:
            return
        if old and measured_kernel_ids(old).isdisjoint(measured_kernel_ids(new)):
            write_dataset_tables(self.folder, self.header, new, add=True)
        else:
            write_dataset_tables(self.folder, self.header, self.blocks)
        self._blocks_in_tables, self._digests = len(self.blocks), read_digests(self.folder)

    def count_rows(self) -> tuple[int, int]:
        """The numbers of rows of the kernel table and of the model table."""
        kernels = {(m.id, block.load, block.machine) for block in self.blocks for m in block.measurements
                   if m.subject == "kernel"}
        return len(kernels), sum("latency" in session.labels for session in model_sessions(self.blocks))


def joined_header(folder: Path, header: DatasetHeader) -> DatasetHeader:
    """The header, extended by the machines, backgrounds, groups, collections and metrics of the existing one. A new metric's
    column is empty in older rows. Headers that contradict each other are a `UserError`."""
    if not header_path(folder).exists():
        return header
    existing = read_header(folder)
    if existing.target != header.target:
        raise UserError(f"{folder}: this dataset is of {existing.target.name}, not of {header.target.name}; move it away, or "
                        "use another --workspace")
    for what, old, new in (("held_out", existing.held_out, header.held_out), ("labels", existing.labels, header.labels)):
        if old != new:
            raise UserError(f"{folder}: this dataset was collected with {what} [{', '.join(old)}], not [{', '.join(new)}]; "
                            "move it away, or use another --workspace")
    if existing.sharing != header.sharing:
        raise UserError(f"{folder}: this dataset was collected with sharing {existing.sharing}, not {header.sharing}; move it "
                        "away, or use another --workspace")
    if absent := [name for name in existing.metrics if name not in header.metrics]:
        raise UserError(f"{folder}: this dataset was collected with metrics {', '.join(existing.metrics)}; add "
                        f"{', '.join(absent)} to those of the config (it may have further ones), or use another --workspace")
    for name in existing.backgrounds.keys() & header.backgrounds.keys():
        if existing.backgrounds[name] != header.backgrounds[name]:
            raise UserError(f"{folder}: background {name} has changed since this dataset was collected "
                            f"(was {existing.backgrounds[name]}, is {header.backgrounds[name]}); give the new one another name")
        if (name in existing.held_out_backgrounds) != (name in header.held_out_backgrounds):
            was = "held out" if name in existing.held_out_backgrounds else "not held out"
            raise UserError(f"{folder}: background {name} was {was} when this dataset was collected; keep held_out_backgrounds "
                            "as it was, or use another --workspace")
    return header.model_copy(update={
        "metrics": tuple(dict.fromkeys((*existing.metrics, *header.metrics))),
        "machines": existing.machines | header.machines, "groups": existing.groups | header.groups,
        "collections": existing.collections | header.collections,
        "energy": existing.energy or header.energy, "backgrounds": existing.backgrounds | header.backgrounds,
        "held_out_backgrounds": tuple(dict.fromkeys((*existing.held_out_backgrounds, *header.held_out_backgrounds)))})


def add_descriptions(folder: Path, described: Iterable[DatasetKernel]) -> set[str]:
    """Merges kernels into the existing ones; returns the ids of new or changed ones."""
    existing = kernel_lines(folder)
    lines = {entry.kernel.id: entry.model_dump_json() for entry in described}
    changed = {name for name, line in lines.items() if existing.get(name) != line}
    if changed:
        write_kernels(folder, (line for _, line in sorted((existing | lines).items())))
    return changed


def _tables_are_current(folder: Path, header: DatasetHeader) -> bool:
    """Whether both tables have the current columns and match journal and kernels; a killed collector may leave stale ones."""
    columns = {kernel_table_path(folder): kernel_columns(header.metrics, header.labels),
               model_table_path(folder): model_columns(header.metrics, header.labels, header.energy)}
    return (digests_match(folder, *columns, journal_path(folder), kernels_path(folder))
            and all(_first_line(path) == ",".join(names) for path, names in columns.items()))


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return lines.readline().rstrip("\n")


class MergeCounts(NamedTuple):
    """How many blocks, kernels, models, machines and kernel records a merge added, and how many blocks already existed."""

    blocks: int
    blocks_there: int
    kernels: int
    models: int
    machines: int
    records: int


def with_origins(header: DatasetHeader, described: Iterable[DatasetKernel], origins: Mapping[str, ModelOrigin],
                 collection: str) -> tuple[DatasetHeader, list[DatasetKernel]]:
    """A dataset's header and kernels with corrected groups and collections. `origins` are by record name and win over the
    header; `collection` is for models and kernels without one."""
    described = list(described)
    names = {model for entry in described for model in entry.models} | header.groups.keys()
    groups = header.groups | {model: origin.group for model, origin in origins.items()}
    known = header.collections | {model: origin.collection for model, origin in origins.items() if origin.collection}
    collections = {model: kept for model in sorted(names | origins.keys()) if (kept := known.get(model, collection))}

    def regrouped(entry: DatasetKernel) -> DatasetKernel:
        if not entry.models or any(model not in groups for model in entry.models):
            return entry
        model_groups = {groups[model] for model in entry.models}
        return entry.model_copy(update={"groups": tuple(sorted(model_groups | set(entry.groups if entry.sampled else ())))})

    return (header.model_copy(update={"groups": groups, "collections": collections}), [regrouped(entry) for entry in described])


def check_agreement(old: DatasetHeader, new: DatasetHeader) -> None:
    """Raises `UserError` if two headers disagree about machines or models that both name."""
    join_by_name(old.groups, new.groups, "group")
    join_by_name(old.collections, new.collections, "collection")
    before, after = ({uuid: machine.device_name for uuid, machine in checked.machines.items()} for checked in (old, new))
    join_by_name(before, after, "device")


def merge_dataset(source: Workspace, into: Workspace, target: str, origins: Mapping[str, ModelOrigin],
                  collection: str) -> MergeCounts:
    """Adds a target's dataset and its flavour's kernel records to another workspace; `origins` and `collection` as for
    `merge_records`. Existing blocks are not added again. The journal is replaced last and atomically, so that an interrupted
    merge can be repeated."""
    source_folder, folder = source.dataset(target), into.dataset(target)
    header = read_header(source_folder)
    if source_folder.resolve() == folder.resolve():
        raise UserError(f"{folder}: a dataset can't be merged into itself")
    with sole_writer(into.kernel_records), sole_writer(folder):
        header_before = read_header(folder) if header_path(folder).exists() else None
        joined_header(folder, header)  # refuses another target before anything is written
        model_origins, records = merge_records(source, into, header.target.flavour, origins, collection)
        header, described = with_origins(header, read_kernels(source_folder), model_origins, collection)
        if header_before is not None:
            check_agreement(header_before, header)
        whole, existing = joined_header(folder, header), {entry.kernel.id: entry for entry in read_kernels(folder)}
        blocks = {block.model_dump_json(): block for block in read_journal(folder)}
        blocks_before = len(blocks)
        from_source = {block.model_dump_json(): block for block in read_journal(source_folder)}
        blocks |= from_source
        add_descriptions(folder, [entry.with_owners_of(existing.get(entry.kernel.id)) for entry in described])
        files.write_json(header_path(folder), whole)
        write_journal(folder, blocks.values())
        write_dataset_tables(folder, whole, list(blocks.values()))
    added = len(blocks) - blocks_before
    return MergeCounts(added, len(from_source) - added, len({entry.kernel.id for entry in described} - existing.keys()),
                  len(whole.groups.keys() - (header_before.groups.keys() if header_before else set())),
                  len(whole.machines.keys() - (header_before.machines.keys() if header_before else set())), records)
