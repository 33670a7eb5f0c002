"""Reads and writes files: atomically, with digests, and in archives."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from hase.utils.errors import UserError
from hase.utils.temporary import temporary_file

M = TypeVar("M", bound=BaseModel)
_CHUNK = 1 << 20
Signature: TypeAlias = "tuple[str, int, int, int, int]"
_digests: dict[Signature | None, str] = {}
_evicting = threading.Lock()
DIGEST = "digest"  # the key of the SHA-256 that a versioned record, or a line, holds of itself
LINE_DIGITS = 16  # of its SHA-256 that a line holds


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`. If the block succeeds, the file there replaces `path` at once; else it
    is removed.

    The temporary name keeps the suffix, for writers that look at it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(path) as temporary:
        temporary.touch(mode=0o600, exist_ok=False)
        yield temporary
        with temporary.open("rb+") as written:  # Windows flushes only what can be written
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, completely or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Writes `text` (UTF-8) to `path`, completely or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes a pydantic model or plain data as indented JSON, completely or not at all.

    A versioned record gets its digest (see `with_digest`).
    """
    if isinstance(value, BaseModel):
        text = value.model_dump_json(indent=1)
        if "version" in type(value).model_fields:
            text = f'{text.removesuffix("}").rstrip()},\n "{DIGEST}": "{digest_of(json.loads(text))}"\n}}'
        write_text(path, text + "\n")
    else:
        write_text(path, json.dumps(value, indent=1, default=str) + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows under a header, completely or not at all; a missing value or None is an empty cell."""
    write_text(path, _csv_lines(columns, chain([dict(zip(columns, columns, strict=True))], rows)))


def add_to_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Adds rows to a table that `write_csv` wrote with the same columns, all or none of them."""
    with replacing(path) as temporary:
        shutil.copyfile(path, temporary)
        with temporary.open("a", encoding="utf-8", newline="") as table:
            table.write(_csv_lines(columns, rows))


def _csv_lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, list(columns), extrasaction="raise", lineterminator="\n").writerows(rows)
    return text.getvalue()


def append_line(path: Path, line: str) -> None:
    """Appends one line and forces it to disk. A line that a kill cut short is removed first; `read_lines` ignores it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as log:
        end = log.seek(0, os.SEEK_END)
        if end:
            log.seek(end - 1)
            if log.read(1) != b"\n":
                log.seek(0)
                keep = log.read().rfind(b"\n") + 1
                log.truncate(keep)
                end = keep
        try:
            log.write(line.encode() + b"\n")
            log.flush()
            os.fsync(log.fileno())
        except OSError:
            log.truncate(end)  # a full disk must not leave half a line
            raise


def read_lines(path: Path, appended: bool = True) -> list[str]:
    """The complete lines of `path`. No file: no lines.

    Args:
        path: the file.
        appended: whether `append_line` writes the file: a kill may then have cut the last line short, which is left out.

    Raises:
        UserError: a complete line is not UTF-8 text, or the last one was cut short in a file that is written as a whole.
    """
    if not path.exists():
        return []
    whole, _, cut_short = path.read_bytes().rpartition(b"\n")  # cut first: a line may end within a character
    if cut_short and not appended:
        raise UserError(f"{path}: damaged (its last line is cut short); remove the line")
    try:
        return [line for line in whole.decode().split("\n") if line]
    except UnicodeDecodeError as error:
        number = whole.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {number}: damaged (not UTF-8 text); remove the line") from None


def line_with_digest(line: str) -> str:
    """A line that holds a JSON object with at least one key, with its digest as a last key.

    `line_without_digest` checks it, since a damaged number could look like a good one.
    """
    return f'{line[:-1]},"{DIGEST}":"{_line_digest(line)}"}}'


def line_without_digest(line: str) -> str:
    """The line as it was before `line_with_digest`; a line without a digest (of an earlier Hase) as it is.

    Raises:
        ValueError: the digest is not that of the line.
    """
    begins, ends = f',"{DIGEST}":"', '"}'
    tail = line[-len(begins) - LINE_DIGITS - len(ends):]
    if not (tail.startswith(begins) and tail.endswith(ends)):
        return line
    whole = line.removesuffix(tail) + "}"
    if tail != f"{begins}{_line_digest(whole)}{ends}":
        raise ValueError(f"damaged or changed by hand: its {DIGEST} does not match its contents")
    return whole


def _line_digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:LINE_DIGITS]


def complete_bytes(path: Path) -> int:
    """The size of a file in bytes, without a last line that a kill cut short."""
    with path.open("rb") as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(max(size - 1, 0))
        if lines.read(1) in (b"", b"\n"):
            return size
        lines.seek(0)
        return lines.read().rfind(b"\n") + 1


def append_records(path: Path, records: Iterable[BaseModel]) -> None:
    """Appends records that belong together as one line, so that an interruption keeps all of them or none."""
    append_line(path, f"[{','.join([record.model_dump_json() for record in records])}]")


def read_records(path: Path, schema: type[M], remedy: str) -> list[M]:
    """All records that `append_records` wrote; none if there is no file.

    Args:
        path: the file.
        schema: their class.
        remedy: what to do about a damaged file; the error names it.

    Raises:
        UserError: a line is damaged.
    """
    line_of: TypeAdapter[list[M]] = TypeAdapter(list[schema])  # type: ignore[valid-type]
    try:
        return [record for line in read_lines(path) for record in line_of.validate_json(line)]
    except ValidationError as error:
        raise UserError(f"{path}: damaged ({error.errors()[0]['msg']}); {remedy}") from None


def sha256(path: Path) -> str:
    """The SHA-256 of the file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def signature(path: Path) -> Signature | None:
    """Size, inode and times of change of a file: they change with its content, and one of the times can't be set back. None if
    there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return str(path.absolute()), stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def kept_sha256(path: Path) -> str:
    """Like `sha256`, but computed once per process while the file's signature stays: a model is often read at several sizes."""
    before = signature(path)
    if (kept := _digests.get(before)) is not None:
        return kept
    digest = sha256(path)
    if before is not None and before == signature(path):  # else it changed while it was read
        cached(_digests, before, lambda: digest)
    return digest


def read_json(path: Path) -> Any:
    """The JSON document in `path`.

    Raises:
        UserError: no such file, or it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except RecursionError:
        raise UserError(f"{path}: not a JSON document of Hase's: nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise UserError(f"{path}: not valid JSON ({error})") from None


def read_record(path: Path, schema: type[M], version: int, remake: str) -> M:
    """A versioned JSON record.

    Args:
        path: the file.
        schema: its class; the record's `version` field must equal `version`.
        version: the only version this code reads.
        remake: the command that makes a new file; errors name it.

    Raises:
        UserError: the file is missing, damaged, edited, without a digest, of another version, or of another kind.
    """
    try:
        data = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; make it{'' if not path.exists() else ' anew'} with: {remake}") from None
    written = data.get("version") if isinstance(data, dict) else None
    if written is None:
        raise UserError(f"{path}: not a file that Hase wrote, as it has no version; make it anew: {remake}")
    if written != version:
        raise UserError(f"{path}: version {written}, this Hase reads version {version}; make it anew: {remake}")
    digest = data.pop(DIGEST, None)
    try:
        record = schema.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: damaged at {where}: {first['msg']}; make it anew: {remake}") from None
    if digest != digest_of(data):
        raise UserError(f"{path}: damaged or changed by hand: its {DIGEST} does not match its contents; make it anew: {remake}")
    return record


def digest_of(document: Any) -> str:
    """The SHA-256 of a JSON document's contents, in hex. Layout and order of keys do not matter."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_digest(document: Mapping[str, Any]) -> dict[str, Any]:
    """A versioned record's document with the digest of its contents, in place of any that it has.

    `read_record` checks it, since a damaged number could look like a good one.
    """
    contents = {key: value for key, value in document.items() if key != DIGEST}
    return contents | {DIGEST: digest_of(contents)}


def cached(cache: dict[Any, Any], key: Any, make: Callable[[], Any], limit: int = 256) -> Any:
    """`cache[key]`, made by `make` if it is missing. Beyond `limit` entries the oldest is dropped. Threads may share a cache;
    two of them may then make the same entry."""
    try:
        return cache[key]
    except KeyError:
        value = make()
    with _evicting:
        while len(cache) >= limit:
            cache.pop(next(iter(cache)))
        cache[key] = value
    return value


def pack(archive: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Writes files, given by name and contents, to a `.tar.xz`. The same files in the same order give the same bytes."""
    with replacing(archive) as part, tarfile.open(part, "w:xz", preset=9) as packed:
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
