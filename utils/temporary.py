"""Temporary files and folders that are removed with the process that made them, at the latest when another process makes one.

A process that must end at once (hase.utils.cli.running) removes its own first. One that is killed with SIGKILL can't. Each folder is
therefore locked (flock) while its process lives, and whoever makes a folder first removes those of this user that no living
process holds. Without flock (Windows) a process removes only its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hase.utils.errors import UserError
from hase.utils.locks import try_lock

PREFIX = "hase-temp-"
UNLOCKED_PREFIX = "hase-new-"  # of a folder that is made but not locked yet: empty, and renamed at once
UNLOCKED_S = 3600.0  # an older one of these was left by a killed process
LONGEST_STEM = 200  # bytes of a file name that its temporary file repeats, so that this does not get too long
LEAST_FREE_BYTES = 16 << 20  # what failed for want of space may have freed a few MiB of its own since
_TRIES = 50  # a thread or process may still write into a folder that is being removed
_PAUSE_S = 0.005
_present: set[Path] = set()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder for temporary files; it is removed with its contents when the block ends."""
    remove_left_over()
    name = secrets.token_hex(8)
    made, folder = (Path(tempfile.gettempdir()) / f"{prefix}{name}" for prefix in (UNLOCKED_PREFIX, PREFIX))
    lock = None
    _present.update((made, folder))  # before they exist: a signal may come at any moment
    try:
        made.mkdir(mode=0o700)
        lock = try_lock(made)
        made.rename(folder)
        yield folder
    finally:
        _remove(made)
        _remove(folder)
        if lock is not None:
            os.close(lock)


@contextmanager
def shared_folder(name: str) -> Iterator[Path]:
    """A folder for temporary files that every process of this machine has which names it; it is removed when the last block
    ends."""
    remove_left_over()
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{name}"
    lock = _shared(folder)
    try:
        yield folder
    finally:
        os.close(lock)
        if (last := try_lock(folder)) is not None:
            _remove(folder)
            os.close(last)


def _shared(folder: Path) -> int:
    """Makes a folder, if it is not there, and locks it for this process among others; returns the lock's descriptor."""
    for _ in range(_TRIES):
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # a process that was the last one has just removed it
            lock = try_lock(folder, shared=True)
            if lock is not None:
                if folder.is_dir() and folder.stat().st_ino == os.fstat(lock).st_ino:
                    return lock
                os.close(lock)
        time.sleep(_PAUSE_S)
    raise UserError(f"{folder}: can't be locked; another process holds it")


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """A path for a new file in the folder of `path`, with its suffix; the file is removed when the block ends."""
    begins = path.stem.encode("utf-8", "replace")[:LONGEST_STEM].decode("utf-8", "ignore")
    temporary = path.with_name(f".{begins}.{secrets.token_hex(4)}.tmp{path.suffix}")
    _present.add(temporary)
    try:
        yield temporary
    finally:
        _remove(temporary)


def remove_temporaries() -> None:
    """Removes this process's temporary files and folders. Only for a process that is about to end: the blocks that use them may
    still run."""
    for path in list(_present):
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
    _present.discard(path)


def remove_left_over() -> list[Path]:
    """Removes this user's temporary folders that no living process holds; returns them."""
    removed = []
    temporary = Path(tempfile.gettempdir())
    for folder in [*temporary.glob(f"{PREFIX}*"), *temporary.glob(f"{UNLOCKED_PREFIX}*")]:
        with suppress(OSError):  # another process has removed it
            about = folder.lstat()
            young = time.time() - about.st_mtime < UNLOCKED_S
            if about.st_uid != _user() or (folder.name.startswith(UNLOCKED_PREFIX) and young):
                continue
            lock = try_lock(folder)
            if lock is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            removed.append(folder)
    return removed


def no_room() -> bool:
    """Whether the disk of temporary files is as good as full."""
    return shutil.disk_usage(tempfile.gettempdir()).free < LEAST_FREE_BYTES


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0
