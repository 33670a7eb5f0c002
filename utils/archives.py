"""Compressed tar archives of files."""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Iterable
from pathlib import Path

from utils import files
from utils.errors import UserError


def pack(archive: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Writes files, given by name and contents, to a `.tar.xz`. The same files in the same order give the same bytes."""
    with files.replacing(archive) as part, tarfile.open(part, "w:xz", preset=9) as packed:
        for name, contents in members:
            header = tarfile.TarInfo(name)
            header.size = len(contents)
            packed.addfile(header, io.BytesIO(contents))


def unpack(archive: Path, folder: Path) -> None:
    """Writes the files of an archive into a folder.

    Raises:
        UserError: it is no archive, it is damaged, or a member would lie outside of the folder.
    """
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{archive}: not an archive, or damaged ({error})") from None
