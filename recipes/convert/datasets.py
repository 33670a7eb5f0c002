"""Converts the lines and tables of an older dataset."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from model_zoo.exporting.torch_models import group_of
from recipes.convert.documents import Document, header, reading
from records.dataset_files import header_path, journal_path, kernel_table_path, kernels_path, model_table_path
from utils import files

SAMPLED = "sampled:"  # in `Models`, where no model contains the kernel; a group follows, if there is one


def measurement(old: Document) -> Document:
    """A measurement; the new one has its place."""
    context = old["context"]
    place = "alone" if old["subject"] == "model" or context == "alone" else "carrier" if context == "carrier" else "in_model"
    return {"subject": old["subject"], "id": old["id"], "label": old["label"], "context": context, "place": place} | old


def block(old: Document) -> Document:
    """A line of the journal."""
    probe = old.get("probe")
    return old | {"version": 2, "measurements": [measurement(one) for one in old["measurements"]]} | (
        {"probe": reading(probe)} if probe else {})


def groups_of(names: Iterable[str]) -> list[str]:
    """The groups of a kernel, from the names in column `Models`."""
    return sorted({group_of(group) for name in names if (group := name.removeprefix(SAMPLED))})


def kernel(old: Document) -> Document:
    """A line of `kernels.jsonl`; the new one has models, groups, and whether the kernel was sampled in separate fields."""
    models = [name for name in old["models"] if not name.startswith(SAMPLED)]
    return {"kernel": old["kernel"], "models": models, "groups": groups_of(old["models"]),
            "sampled": len(models) < len(old["models"])}


def table(text: str) -> str:
    """A table with a new last column `Groups`. The text of all other cells stays the same."""
    rows = csv.reader(io.StringIO(text))
    names = next(rows)
    column = names.index("Models" if "Models" in names else "Model")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "Groups"])
    writer.writerows([*row, "|".join(groups_of(row[column].split("|")))] for row in rows)
    return out.getvalue()


def converted_tables(folder: Path) -> dict[Path, str]:
    """The new text of those tables of a dataset that have no column `Groups`, by path."""
    texts = {path: path.read_text(encoding="utf-8") for path in (kernel_table_path(folder), model_table_path(folder))
             if path.is_file()}
    return {path: table(text) for path, text in texts.items() if "Groups" not in text.partition("\n")[0].split(",")}


def convert_dataset(folder: Path, tables: dict[Path, str]) -> None:
    """Converts a dataset of version 1. An interrupted conversion can be repeated: the header with the version comes last.

    Args:
        folder: of the dataset.
        tables: the result of `converted_tables`.
    """
    models: set[str] = set()

    def converted(line: str) -> Document:
        one = json.loads(line)
        models.update(found["id"] for found in one["measurements"] if found["subject"] == "model")
        return block(one) if one["version"] == 1 else one

    _rewrite_lines(journal_path(folder), converted)
    _rewrite_lines(kernels_path(folder), lambda line: one if "groups" in (one := json.loads(line)) else kernel(one))
    for path, text in tables.items():  # after the lines: the collector would rewrite a table that is older than those
        files.write_text(path, text)
    old = files.read_json(header_path(folder))
    old.pop(files.DIGEST, None)
    new = header(old) | {"groups": {model: group_of(model) for model in sorted(models)}}
    files.write_json(header_path(folder), new | {files.DIGEST: files.digest_of(new)})


def _rewrite_lines(path: Path, converted: Callable[[str], Document]) -> None:
    lines = files.read_lines(path)
    if lines:
        files.write_text(path, "".join(
            json.dumps(converted(line), separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines))
