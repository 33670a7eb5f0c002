"""Temporary files and folders that go with the process that made them, at the latest when the next process needs one.

What ends a process in a hurry (utils.stopping) removes those that are there then.

A process that is killed with SIGKILL can't remove its folder. Each folder is therefore locked (flock) for as long as its
process lives, and whoever makes one first removes those of this user that no living process holds. Where there is no flock
(Windows), nothing is removed but one's own.
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

from utils.locks import try_lock

PREFIX = "hase-temp-"
UNLOCKED_PREFIX = "hase-new-"  # of a folder between its making and its locking: empty, and renamed at once
UNLOCKED_S = 3600.0  # older than this, such a folder is left over from a kill
_TRIES = 50  # a thread or process that is still writing into a folder may add to it while it is removed
_PAUSE_S = 0.005
_present: set[Path] = set()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder among the system's temporary files; it is removed with all that is in it when the block ends."""
    remove_left_over()
    name = secrets.token_hex(8)
    made, folder = (Path(tempfile.gettempdir()) / f"{prefix}{name}" for prefix in (UNLOCKED_PREFIX, PREFIX))
    lock = None
    _present.update((made, folder))  # before they are there: a signal may come at any moment
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
def temporary_file(path: Path) -> Iterator[Path]:
    """A name for a new file beside `path`, with its suffix; what lies there when the block ends is removed."""
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp{path.suffix}")
    _present.add(temporary)
    try:
        yield temporary
    finally:
        _remove(temporary)


def remove_temporaries() -> None:
    """Removes this process's temporary files and folders that are still there. For one that is about to end: the blocks that
    made them may still run."""
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
        with suppress(OSError):  # gone meanwhile: another process removed it
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


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0
