"""Reads and writes files: atomically, with digests, temporary files, and archives.

A process removes its temporary files and folders when it ends; SIGKILL prevents this. So each temporary folder is locked
(flock) while its process lives, and the next process that makes one removes those that no living process locks. Without flock
(Windows) a process removes only its own.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import os
import secrets
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from hase.utils.errors import UserError, first_problem
from hase.utils.locks import try_lock

M = TypeVar("M", bound=BaseModel)
Signature: TypeAlias = "tuple[str, int, int, int, int]"
_digests: dict[Signature | None, str] = {}
_cache_lock = threading.Lock()
DIGEST = "digest"  # the key of the SHA-256 that a versioned record, or a line, holds of itself
LINE_DIGITS = 16  # digits of the SHA-256 in a line
TEMPORARY_PREFIX = "hase-temp-"
UNLOCKED_PREFIX = "hase-new-"  # of a folder that is not locked yet: empty, and soon renamed
UNLOCKED_S = 3600.0  # an older unlocked folder was left by a killed process
LONGEST_STEM = 200  # bytes of a file name to repeat in its temporary name, which must not get too long
LEAST_FREE_BYTES = 16 << 20  # less counts as full: once a write has failed, a few MiB are free again
_TRIES = 50  # to remove a folder into which a thread or process still writes, or to lock one that is just being removed
_PAUSE_S = 0.005
_temporary_paths: set[Path] = set()  # of this process


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`. If the block succeeds, the file atomically replaces `path`; otherwise it is
    removed. The temporary name keeps the suffix, for writers that look at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(path) as temporary:
        temporary.touch(mode=0o600, exist_ok=False)
        yield temporary
        with temporary.open("rb+") as written:  # "+": Windows flushes only files that are open for writing
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
    """Writes a model or plain data as indented JSON, completely or not at all; a versioned record gets its digest."""
    if isinstance(value, BaseModel):
        text = value.model_dump_json(indent=1)
        if "version" in type(value).model_fields:
            text = f'{text.removesuffix("}").rstrip()},\n "{DIGEST}": "{content_digest(json.loads(text))}"\n}}'
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
    """Appends one line and forces it to disk. A last line that a kill cut short is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as log:
        end = _complete_bytes(log)
        if end < log.seek(0, os.SEEK_END):
            log.truncate(end)
        try:
            log.write(line.encode() + b"\n")
            log.flush()
            os.fsync(log.fileno())
        except OSError:
            log.truncate(end)  # a full disk must not leave half a line
            raise


def read_lines(path: Path, appended: bool = True) -> list[str]:
    """The complete lines of `path`; none without a file. With `appended` (by `append_line`), a last line that a kill cut short
    is left out; in a file that was written as a whole it is an error."""
    if not path.exists():
        return []
    whole, _, cut_short = path.read_bytes().rpartition(b"\n")  # before decoding: the cut may be within a character
    if cut_short and not appended:
        raise UserError(f"{path}: damaged (its last line is cut short); remove the line")
    try:
        return [line for line in whole.decode().split("\n") if line]
    except UnicodeDecodeError as error:
        number = whole.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {number}: damaged (not UTF-8 text); remove the line") from None


def line_with_digest(line: str) -> str:
    """Adds a digest to a line with a non-empty JSON object, as the last key. A damaged number could look like a valid one, so
    `line_without_digest` checks the digest."""
    return f'{line[:-1]},"{DIGEST}":"{_line_digest(line)}"}}'


def line_without_digest(line: str) -> str:
    """Checks and removes the digest of a line; a line without one (from an older Hase) is unchanged. Raises ValueError if the
    digest does not match."""
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
        return _complete_bytes(lines)


def _complete_bytes(lines: BinaryIO) -> int:
    size = lines.seek(0, os.SEEK_END)
    lines.seek(max(size - 1, 0))
    if lines.read(1) in (b"", b"\n"):
        return size
    lines.seek(0)
    return lines.read().rfind(b"\n") + 1


def append_records(path: Path, records: Iterable[BaseModel]) -> None:
    """Appends records as one line, so that an interruption keeps all or none of them."""
    append_line(path, f"[{','.join([record.model_dump_json() for record in records])}]")


def read_records(path: Path, schema: type[M], remedy: str) -> list[M]:
    """All records that `append_records` wrote; none without a file. Errors name the `remedy` for a damaged file."""
    line_schema: TypeAdapter[list[M]] = TypeAdapter(list[schema])  # type: ignore[valid-type]
    try:
        return [record for line in read_lines(path) for record in line_schema.validate_json(line)]
    except ValidationError as error:
        raise UserError(f"{path}: damaged ({error.errors()[0]['msg']}); {remedy}") from None


def sha256(path: Path) -> str:
    """The SHA-256 of the file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def signature(path: Path) -> Signature | None:
    """The path, size, inode and times of change of a file; None without a file. Any change of its contents changes them, since
    programs can't set back the last one (ctime)."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return str(path.absolute()), stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def cached_sha256(path: Path) -> str:
    """Like `sha256`, but computed once per process while the file's signature stays the same."""
    before = signature(path)
    if (known := _digests.get(before)) is not None:
        return known
    digest = sha256(path)
    if before is not None and before == signature(path):  # else it changed while it was read
        cached(_digests, before, lambda: digest)
    return digest


def read_json(path: Path) -> Any:
    """The JSON document in `path`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except RecursionError:
        raise UserError(f"{path}: not a JSON document of Hase's: nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise UserError(f"{path}: not valid JSON ({error})") from None


def read_record(path: Path, schema: type[M], version: int, remake: str) -> M:
    """Reads a JSON record of exactly this version; errors name `remake`, the command that creates the file again."""
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
        raise UserError(f"{path}: damaged at {first_problem(error)}; make it anew: {remake}") from None
    if digest != content_digest(data):
        raise UserError(f"{path}: damaged or changed by hand: its {DIGEST} does not match its contents; make it anew: {remake}")
    return record


def content_digest(document: Any) -> str:
    """The SHA-256 of a JSON document's contents, in hex, independent of layout and key order."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_digest(document: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the digest of its contents to a versioned record's document; `read_record` checks it."""
    contents = {key: value for key, value in document.items() if key != DIGEST}
    return contents | {DIGEST: content_digest(contents)}


def cached(cache: dict[Any, Any], key: Any, make: Callable[[], Any], limit: int = 256) -> Any:
    """Returns `cache[key]`, computed by `make` if missing. Beyond `limit` entries the oldest is dropped. Threads may share a
    cache; two of them may then compute the same entry."""
    try:
        return cache[key]
    except KeyError:
        value = make()
    with _cache_lock:
        while len(cache) >= limit:
            cache.pop(next(iter(cache)))
        cache[key] = value
    return value


def pack(archive: Path, members: Iterable[tuple[str, bytes]], dictionary_bytes: int = 64 << 20) -> None:
    """Writes files to a `.tar.xz`. The same files in the same order give the same bytes. Contents that recur within
    `dictionary_bytes` are stored once; unpacking takes that much memory, packing eleven times as much."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary_bytes}]
    with (replacing(archive) as part, lzma.open(part, "wb", filters=filters) as compressed,
          tarfile.open(fileobj=compressed, mode="w") as packed):
        for name, contents in members:
            header = tarfile.TarInfo(name)
            header.size = len(contents)
            packed.addfile(header, io.BytesIO(contents))


def unpack(archive: Path, folder: Path) -> None:
    """Writes the files of an archive into a folder."""
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{archive}: not an archive, or damaged ({error})") from None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A temporary folder that is removed with its contents when the block ends."""
    remove_left_over()
    name = secrets.token_hex(8)
    unlocked, folder = (Path(tempfile.gettempdir()) / f"{prefix}{name}" for prefix in (UNLOCKED_PREFIX, TEMPORARY_PREFIX))
    lock = None
    _temporary_paths.update((unlocked, folder))  # before they exist: a signal may come at any moment
    try:
        unlocked.mkdir(mode=0o700)
        lock = try_lock(unlocked)
        unlocked.rename(folder)
        yield folder
    finally:
        _remove(unlocked)
        _remove(folder)
        if lock is not None:
            os.close(lock)


@contextmanager
def shared_folder(name: str) -> Iterator[Path]:
    """A temporary folder shared by all processes of this machine that name it, removed when the last block ends."""
    remove_left_over()
    folder = Path(tempfile.gettempdir()) / f"{TEMPORARY_PREFIX}{name}"
    lock = _shared_lock(folder)
    try:
        yield folder
    finally:
        os.close(lock)
        if (exclusive := try_lock(folder)) is not None:  # no other process holds it
            _remove(folder)
            os.close(exclusive)


def _shared_lock(folder: Path) -> int:
    """Creates a folder if needed and takes a shared lock on it; returns the lock's descriptor."""
    for _ in range(_TRIES):
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # a process that was the last one has just removed it
            lock = try_lock(folder, shared=True)
            if lock is not None:
                if folder.is_dir() and folder.stat().st_ino == os.fstat(lock).st_ino:
                    return lock
                os.close(lock)
        time.sleep(_PAUSE_S)
    raise UserError(f"{folder}: can't be locked, since another process holds it; wait for that process to end, or end it")


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """A path for a new file in the folder of `path`, with its suffix; the file is removed when the block ends."""
    stem = path.stem.encode("utf-8", "replace")[:LONGEST_STEM].decode("utf-8", "ignore")
    temporary = path.with_name(f".{stem}.{secrets.token_hex(4)}.tmp{path.suffix}")
    _temporary_paths.add(temporary)
    try:
        yield temporary
    finally:
        _remove(temporary)


def remove_temporaries() -> None:
    """Removes this process's temporary files and folders. Only for a process that is about to end."""
    for path in list(_temporary_paths):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        for _ in range(_TRIES):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                break
            time.sleep(_PAUSE_S)
    else:
        path.unlink(missing_ok=True)
    _temporary_paths.discard(path)


def remove_left_over() -> list[Path]:
    """Removes this user's temporary folders that no living process holds; returns them."""
    removed = []
    temporary = Path(tempfile.gettempdir())
    user_id = os.geteuid() if hasattr(os, "geteuid") else 0  # on Windows, all files are of user 0
    for folder in [*temporary.glob(f"{TEMPORARY_PREFIX}*"), *temporary.glob(f"{UNLOCKED_PREFIX}*")]:
        with suppress(OSError):  # another process has removed it
            stat = folder.lstat()
            young = time.time() - stat.st_mtime < UNLOCKED_S
            if stat.st_uid != user_id or (folder.name.startswith(UNLOCKED_PREFIX) and young):
                continue
            lock = try_lock(folder)
            if lock is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            removed.append(folder)
    return removed


def disk_is_full() -> bool:
    """Whether the disk of temporary files is almost full."""
    return shutil.disk_usage(tempfile.gettempdir()).free < LEAST_FREE_BYTES
