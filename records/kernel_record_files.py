"""Where kernel records lie, and how they are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from records.kernel_costs import recosted
from records.kernel_record import INDEX_VERSION, RECORD_VERSION, REMAKE, IndexEntry, Kernel, KernelIndex, ModelRecord
from utils import files
from utils.errors import UserError
from utils.fingerprint import Flavour
from utils.paths import Workspace


def record_path(workspace: Workspace, flavour: Flavour, model: str) -> Path:
    """The path of a model's record; `model` is its name with sizes."""
    return workspace.kernel_records / flavour.name / f"{model}.json"


def index_path(workspace: Workspace, flavour: Flavour) -> Path:
    """The path of a flavour's index."""
    return workspace.kernel_records / flavour.name / "index.json"


def read_model_record(path: Path) -> ModelRecord:
    """A model's record, with its costs computed anew; `UserError` where it is missing, damaged or of another version."""
    record = files.read_record(path, ModelRecord, RECORD_VERSION, REMAKE)
    return record.model_copy(update={"kernels": {name: recosted(kernel) for name, kernel in record.kernels.items()}})


def read_index(path: Path) -> KernelIndex:
    """A flavour's index; `UserError` where it is missing, damaged or of another version."""
    return files.read_record(path, KernelIndex, INDEX_VERSION, REMAKE)


def records_in(workspace: Workspace, flavour: Flavour) -> list[ModelRecord]:
    """All records of a flavour, sorted by name; empty where there is none.

    Raises:
        UserError: one can't be read.
    """
    folder = workspace.kernel_records / flavour.name
    return [read_model_record(path) for path in sorted(folder.glob("*.json")) if path.name != "index.json"]


def read_model_records(workspace: Workspace, flavour: Flavour) -> list[ModelRecord]:
    """All records of a flavour, sorted by name.

    Raises:
        UserError: there is none, or one can't be read.
    """
    found = records_in(workspace, flavour)
    if not found:
        raise UserError(f"{workspace.kernel_records / flavour.name}: no kernel records of flavour {flavour.name}; make them "
                        f"with: {REMAKE}")
    return found


def build_index(flavour: Flavour, records: Sequence[ModelRecord]) -> KernelIndex:
    """All kernels of `records` by type, with the models that contain each."""
    models: dict[str, list[str]] = defaultdict(list)
    kernels: dict[str, Kernel] = {}
    for record in records:
        for kernel in record.kernels.values():
            kernels[kernel.id] = kernel
            models[kernel.id].append(record.model)
    index: dict[str, dict[str, IndexEntry]] = {}
    for kernel in sorted(kernels.values(), key=lambda k: (k.type, k.id)):
        index.setdefault(kernel.type, {})[kernel.id] = IndexEntry(kernel=kernel, models=tuple(models[kernel.id]))
    return KernelIndex(flavour=flavour, groups={record.model: record.group for record in records}, kernels=index,
                       collections={record.model: record.collection for record in records if record.collection})


def update_index(workspace: Workspace, flavour: Flavour) -> KernelIndex:
    """Writes the index of a flavour, made of all its records."""
    index = build_index(flavour, records_in(workspace, flavour))
    files.write_json(index_path(workspace, flavour), index)
    return index


def kernels_in_file(path: Path) -> tuple[Flavour | None, list[Kernel]]:
    """The kernels in a model's record, an index, or a single kernel's JSON, with their flavour (None for the last).

    Raises:
        UserError: no such file, or none of the three.
    """
    data = files.read_json(path)
    if isinstance(data, dict) and "nodes" in data:
        record: ModelRecord = read_model_record(path)
        return record.flavour, list(record.kernels.values())
    if isinstance(data, dict) and "op_type" in data:
        try:
            return None, [Kernel.model_validate(data)]
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"{path}: not a kernel: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    index: KernelIndex = read_index(path)
    return index.flavour, index.all_kernels()


def index_paths(workspace: Workspace) -> list[Path]:
    """The index of every flavour that was analysed.

    Raises:
        UserError: there is none.
    """
    paths = sorted(workspace.kernel_records.glob("*/index.json"))
    if not paths:
        raise UserError(f"{workspace.kernel_records}: no kernel records; make them with: {REMAKE}")
    return paths
