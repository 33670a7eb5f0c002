"""Temporary folders that go with the process that made them, at the latest when the next process needs one.

A process that is killed with SIGKILL can't remove its folder. Each folder is therefore locked (flock) for as long as its
process lives, and whoever makes one first removes those of this user that no living process holds. Where there is no flock
(Windows), nothing is removed but one's own.
"""

from __future__ import annotations

import os
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


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder among the system's temporary files; it is removed with all that is in it when the block ends."""
    remove_left_over()
    made = Path(tempfile.mkdtemp(prefix=UNLOCKED_PREFIX))
    folder = made.with_name(PREFIX + made.name.removeprefix(UNLOCKED_PREFIX))
    lock = try_lock(made)
    try:
        made.rename(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


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
