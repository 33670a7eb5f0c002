"""Analyses models, several at a time, and writes their records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from records.kernel_record import ModelRecord
from records.kernel_record_files import record_path
from runtimes.ort.graph.analysis import analyze
from utils import files
from utils.errors import UserError
from utils.paths import Workspace
from utils.processes import CRASHED, each_in_a_process


def write_record(workspace: Workspace, path: Path, device: str, dims: dict[str, int], static: bool,
                 group: str = "", collection: str = "") -> ModelRecord | UserError:
    """Analyses one model and writes its record. An error in the model is returned, not raised."""
    try:
        record = analyze(path, device, dims, static=static, group=group, collection=collection)
    except UserError as error:
        return error
    files.write_json(record_path(workspace, record.flavour, record.model), record)
    return record


def write_records(workspace: Workspace, work: Sequence[tuple[Path, dict[str, int]]], device: str,
                  jobs: int, static: bool = False, group: str = "", collection: str = "") -> list[ModelRecord | UserError]:
    """`write_record` for pairs of a model and its sizes, `jobs` at a time; the results are in the order of `work`. If one of
    several models crashes ONNX Runtime, only that one fails."""
    if len(work) == 1:
        return [_write_one(workspace, device, static, group, collection, one) for one in work]
    write = partial(_write_one, workspace, device, static, group, collection)
    return each_in_a_process(write, work, jobs, crashed, "analysing")


def _write_one(workspace: Workspace, device: str, static: bool, group: str, collection: str,
               one: tuple[Path, dict[str, int]]) -> ModelRecord | UserError:
    return write_record(workspace, one[0], device, one[1], static, group, collection)


def crashed(one: tuple[Path, dict[str, int]]) -> UserError:
    """The error of a model that took its process down."""
    return UserError(f"{one[0]}: {CRASHED}")
