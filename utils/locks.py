"""Locks between processes: one writer per folder, one measuring process per device.

A lock is `flock` on an open file, so the system releases it when the process ends for any reason. Child processes do not
inherit it. The file remains and names the last holder. Without `flock` (Windows) nothing is locked.

A lock held by another process is an error, unless `wait_for_locks` was called. Commands lock the dataset before the device, to
avoid deadlocks.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from hase.utils.errors import UserError
from hase.utils.fingerprint import gpu_facts
from hase.utils.logger import get_logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FOLDER_VARIABLE = "HASE_LOCK_FOLDER"  # environment: folder of the devices' locks, if not /tmp
WAIT_VARIABLE = "HASE_WAIT"  # environment: wait for locks
WRITER = ".writer.lock"  # in a folder that only one process at a time may write
EVERYBODY = 0o666  # permissions: root and every user share a device's lock
SAFE = (os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC) if fcntl else 0  # all users write to /tmp: no links, no pipes
COMMAND_CHARACTERS = 200  # of a holder's command line in errors
LOOK_EVERY_S = 0.2  # while waiting for a lock
log = get_logger("locks")
_held: Counter[Path] = Counter()  # how many blocks of this process hold each lock
_open: dict[Path, int] = {}
_guard = threading.Lock()


class InUse(UserError):
    """Another process holds a lock. `by` says what is in use and by which process; the message adds what to do."""

    def __init__(self, by: str, advice: str) -> None:
        super().__init__(f"{by}; {advice}")
        self.by = by


def wait_for_locks() -> None:
    """Makes this process and its children wait for locks that others hold, instead of failing."""
    os.environ[WAIT_VARIABLE] = "1"


def try_lock(path: Path, flags: int = os.O_RDONLY, shared: bool = False) -> int | None:
    """Locks an existing file or folder and returns a descriptor; closing it releases the lock.

    Returns None if another process holds the lock, or if the system has no locks. Several processes may hold a `shared` lock.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, flags | SAFE)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of a file; False without a file or without locks on this system."""
    if fcntl is None or not path.is_file():
        return False
    if (descriptor := try_lock(path)) is None:
        return True
    os.close(descriptor)
    return False


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds the lock of the file `path`, creating it if needed, while the block runs. A process may take a lock several times.
    Raises InUse if another process holds it and `wait_for_locks` was not called."""
    path = path.absolute()
    reported = ""
    while True:
        try:
            _take(path, what)
            break
        except InUse as error:
            if not os.environ.get(WAIT_VARIABLE):
                raise
            if reported != (reported := error.by):
                log.warning("waiting: %s", reported)
        time.sleep(LOOK_EVERY_S)
    try:
        yield
    finally:
        with _guard:
            _held[path] -= 1
            if not _held[path] and path in _open:
                os.close(_open.pop(path))


def _take(path: Path, what: str) -> None:
    """Takes the lock, or counts one more holder in this process."""
    with _guard:
        if fcntl is not None and not _held[path]:
            _open[path] = _acquire(path, what)
        _held[path] += 1


def _acquire(path: Path, what: str) -> int:
    """Takes the lock, writes into the file who holds it, and returns the descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        created = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, EVERYBODY)
        try:
            os.chmod(created, EVERYBODY)  # whatever the umask
        finally:
            os.close(created)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EINVAL, "no plain file")
        descriptor = try_lock(path, os.O_RDWR)
    except PermissionError:
        raise _foreign_lock_error(path, what) from None
    except OSError as error:
        raise UserError(f"{path}: can't be locked ({error.strerror}); remove it, unless another process uses it") from None
    if descriptor is None:
        raise InUse(f"{what} is in use by {_holder(path)}", "wait until that has ended (--wait does), or end it")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "command": " ".join(sys.argv)[:COMMAND_CHARACTERS],
                                      "since": datetime.now(UTC).isoformat(timespec="seconds")}).encode(), 0)
    return descriptor


def _foreign_lock_error(path: Path, what: str) -> UserError:
    """The error for a lock file that this user may not write."""
    try:
        owner = path.owner()
    except KeyError:  # a user without a name, as in containers
        owner = str(path.stat().st_uid)
    try:
        descriptor = try_lock(path)
    except PermissionError:
        return UserError(f"{path}: can't be read, so it is not known whether a process of user {owner} is running; ask them, "
                         "and remove it if none is")
    if descriptor is None:
        return InUse(f"{what} is in use by {_holder(path)} of user {owner}",
                     "wait until that has ended (--wait does), or ask them to end it")
    os.close(descriptor)
    return UserError(f"{path}: can't be written, since it is user {owner}'s; no process holds it: remove it, or ask them to")


def _holder(path: Path) -> str:
    """The holder of a lock, as named in its file."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} ({holder['command']}, since {holder['since']})"
    except (OSError, ValueError, LookupError, TypeError):  # the process has the lock and has not written the file yet
        return "another process"


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lets only this process write to `folder` while the block runs; creates the folder if needed. First removes half-written
    files of killed processes in the folder and below."""
    with locked(folder / WRITER, f"{folder}: this folder"):
        for level in ("", "*/") if _held[(folder / WRITER).absolute()] == 1 else ():
            for left_over in folder.glob(f"{level}.*.tmp*"):  # named so by files.replacing
                with suppress(PermissionError):  # another user's, in a folder where only they may remove it
                    left_over.unlink(missing_ok=True)
        yield


def measuring(device: str) -> AbstractContextManager[None]:
    """Lets only this process, of all users, measure on a device (`cpu`, or `cuda` for the first GPU) while the block runs.
    Stressor, exporter and sharing probe do not take this lock, since they run during measurements."""
    name = "cpu"
    if device == "cuda":
        name = gpu_facts().get("uuid", "cuda")
    return locked(_device_lock_folder() / f"hase-{name}.lock", f"device {name}: it")


def _device_lock_folder() -> Path:
    """The folder of the device locks; the same for all users of this machine, whatever their TMPDIR."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    return Path("/tmp") if os.name == "posix" else Path(tempfile.gettempdir())
