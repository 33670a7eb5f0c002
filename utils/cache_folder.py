"""A cache in the user's cache folder that later commands reuse.

The folder may be emptied at any time. Entries are written atomically with a digest, so processes may share the folder, and a
damaged entry counts as missing. Above MOST_BYTES the least recently used entries are removed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hase.utils.files import temporary_file
from hase.utils.logger import get_logger
from hase.utils.paths import ROOT

VARIABLE = "HASE_CACHE"  # environment: the folder, or `off`
OFF = "off"
MOST_BYTES = 256 << 20
LEFT_SHARE = 0.8  # share of MOST_BYTES that is kept when entries are removed; less than 1, so that removals are rare
BLOCK_BYTES = 4096  # least size of an entry on disk
DIGEST_BYTES = 32
log = get_logger("cache")
_keeps_json = ContextVar("keeps_json", default=True)


def cache_folder() -> Path | None:
    """The folder, which may not exist yet: HASE_CACHE, else `hase` in XDG_CACHE_HOME or ~/.cache; None if caching is off."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return None if named == OFF else Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):  # the XDG specification says to ignore a relative path
        return Path(home) / "hase"
    try:
        return Path.home() / ".cache" / "hase"
    except RuntimeError:  # a user without a home
        return None


def entry_key(*parts: object) -> str:
    """The name of an entry that depends on these parts, as their `repr` shows them."""
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()


def read_entry(key: str) -> bytes | None:
    """The entry under a key; None if it is missing or damaged."""
    if (folder := cache_folder()) is None:
        return None
    try:
        content = (folder / key).read_bytes()
    except OSError:
        return None
    digest, data = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        log.debug("%s: damaged, so it is made again", folder / key)
        return None
    with suppress(OSError):  # removed by another process, or a folder that can only be read
        os.utime(folder / key)
    return data


def write_entry(key: str, data: bytes) -> None:
    """Stores an entry under a key; failures (no space, no permission) are ignored."""
    if (folder := cache_folder()) is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with temporary_file(folder / key) as temporary:  # without fsync: a file that a crash cuts short fails its digest
            temporary.write_bytes(hashlib.sha256(data).digest() + data)
            temporary.replace(folder / key)
        _remove_oldest(folder)
    except OSError as error:
        log.debug("%s: nothing is kept: %s", folder, error)


@contextmanager
def keeping_no_json() -> Iterator[None]:
    """Switches `kept_json`'s cache off while the block runs, for results that nobody will need again, as in a search."""
    token = _keeps_json.set(False)
    try:
        yield
    finally:
        _keeps_json.reset(token)


def kept_json(key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The JSON object under a key, computed by `make` and stored if missing."""
    if not _keeps_json.get():
        return make()
    if (data := read_entry(key)) is not None:
        stored: dict[str, Any] = json.loads(data)
        return stored
    computed = make()
    write_entry(key, json.dumps(computed).encode())
    return computed


@functools.cache
def code_version(*folders: str) -> tuple[tuple[str, int, int], ...]:
    """Size and modification time of each code and table file in some folders, for the keys of results of that code."""
    return tuple(sorted((str(path.relative_to(ROOT)), stat.st_size, stat.st_mtime_ns) for folder in folders
                        for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".json", ".yaml")
                        for stat in [path.stat()]))


def _remove_oldest(folder: Path) -> None:
    """Removes the least recently used entries if all together exceed MOST_BYTES."""
    entries = []
    with os.scandir(folder) as listing:
        for entry in listing:
            with suppress(OSError):  # another process removed it
                stat = entry.stat(follow_symlinks=False)
                entries.append((stat.st_mtime_ns, max(stat.st_size, BLOCK_BYTES), entry.path))
    total = sum(size for _, size, _ in entries)
    if total <= MOST_BYTES:
        return
    for _, size, path in sorted(entries):
        if total <= LEFT_SHARE * MOST_BYTES:
            break
        with suppress(OSError):
            os.unlink(path)
        total -= size
