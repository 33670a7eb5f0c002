"""Files of kernels and models on their way to another machine, where they lie at other paths.

A file travels by the hash of its content, in pieces, through Ray's object store. A machine has a folder for all actors that it
runs; what is there does not travel again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hase.benchmark.collecting.work import Item, KernelItem, ModelItem
from hase.records.backgrounds import Background
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.model_files import external_files, may_name_files

PIECE_BYTES = 32 << 20  # several fit into a small object store
T = TypeVar("T")


class SentFile(NamedTuple):
    """A file that a machine is to have.

    Attributes:
        path: where it lies for the driver.
        sha256: of its content.
        folder: the name of the folder that it has in common with the files that belong to it.
        name: its path in that folder.
        pieces: references to its content; none where the machine has it.
    """

    path: str
    sha256: str
    folder: str
    name: str
    pieces: tuple[Any, ...] = ()


def files_of(item: Item | Background | None) -> list[list[Path]]:
    """The files of a kernel, a model or a load, in groups that must lie in one folder. What can't be read is left out: whoever
    opens it will say so."""
    if isinstance(item, KernelItem):
        groups = [_with_weights(item.path)]
    elif isinstance(item, ModelItem):
        groups = [_with_weights(item.path), [item.record_path], [item.inputs] if item.inputs else []]
    else:
        groups = [_with_weights(item.model)] if item is not None and item.model else []
    return [found for group in groups if (found := [path for path in group if path.is_file()])]


def _with_weights(model: Path) -> list[Path]:
    """A model's file and those of its weights."""
    try:
        if not may_name_files(model):
            return [model]
        return [model, *external_files(model, onnx.load(model, load_external_data=False), missing_ok=True)]
    except UserError:
        return [model]


def at_paths(item: T, path_of: Callable[[Path], Path]) -> T:
    """A kernel, a model or a load whose files lie at other paths."""
    if isinstance(item, KernelItem):
        return replace(item, path=path_of(item.path))
    if isinstance(item, ModelItem):
        return replace(item, path=path_of(item.path), record_path=path_of(item.record_path),
                       inputs=path_of(item.inputs) if item.inputs else None)
    if isinstance(item, Background) and item.model:
        return item.model_copy(update={"model": path_of(item.model)})
    return item


class Sender:
    """Prepares files for machines, by a function that puts a piece into the object store and returns a reference."""

    def __init__(self, put: Callable[[bytes], Any]) -> None:
        self._put = put
        self._there: dict[str, set[str]] = {}  # by machine, the hashes of the files that it has
        self._pieces: dict[str, tuple[Any, ...]] = {}  # by hash, while a machine may still fetch them

    def files_for(self, machine: str, items: Iterable[Item | Background | None]) -> tuple[SentFile, ...]:
        """The files of some items, with the pieces of those that a machine does not have yet."""
        sent: list[SentFile] = []
        for group in (group for item in items for group in files_of(item)):
            hashes = [files.kept_sha256(path) for path in group]
            folder = hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
            for path, sha256 in zip(group, hashes, strict=True):
                there = sha256 in self._there.get(machine, ())
                if not there and sha256 not in self._pieces:
                    self._pieces[sha256] = tuple(self._put(piece) for piece in pieces(path))
                sent.append(SentFile(str(path), sha256, folder, str(path.relative_to(group[0].parent)),
                                     () if there else self._pieces[sha256]))
        return tuple(sent)

    def arrived(self, machine: str, sent: Sequence[SentFile], still_sent: Iterable[SentFile]) -> None:
        """Notes that a machine has some files. The store may forget the pieces of all but those that are `still_sent`."""
        self._there.setdefault(machine, set()).update(file.sha256 for file in sent)
        wanted = {file.sha256 for file in still_sent}
        self._pieces = {sha256: kept for sha256, kept in self._pieces.items() if sha256 in wanted}


def pieces(path: Path) -> Iterable[bytes]:
    """The content of a file, piece by piece; an empty file has one that is empty."""
    with path.open("rb") as file:
        piece = file.read(PIECE_BYTES)
        yield piece
        while piece := file.read(PIECE_BYTES):
            yield piece


def receive(folder: Path, sent: Sequence[SentFile], get: Callable[[Any], bytes]) -> Mapping[str, Path]:
    """Fetches files that this machine lacks into a folder; returns where each lies, by its path at the driver.

    Raises:
        UserError: the content of one has changed meanwhile, or it is neither here nor sent.
    """
    places: dict[str, Path] = {}
    for file in sent:
        content, place = folder / file.sha256, folder / file.folder / file.name
        if not content.exists():
            _fetch(content, file, get)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            beside = place.with_name(f".{os.getpid()}")
            os.link(content, beside)
            beside.rename(place)  # two actors may do so at once
            beside.unlink(missing_ok=True)  # where both are one file, a rename does nothing
        places[file.path] = place
    return places


def _fetch(content: Path, file: SentFile, get: Callable[[Any], bytes]) -> None:
    if not file.pieces:
        raise UserError(f"{file.path}: it was removed from {content.parent} while it was needed there; run again")
    digest = hashlib.sha256()
    with files.replacing(content) as made, made.open("wb") as out:
        for piece in file.pieces:
            data = get(piece)
            digest.update(data)
            out.write(data)
        if digest.hexdigest() != file.sha256:
            raise UserError(f"{file.path}: it was changed while it was sent; run again")
