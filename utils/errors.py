"""Errors whose message is meant for the user, and the system errors that the user can fix.

Any other exception that reaches the user is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

if TYPE_CHECKING:
    from pydantic import ValidationError

SHORTAGES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of disk space, open files, memory
OS_ERROR_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again: what was finished is kept",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n) and run the same command again: what was finished is kept",
    errno.ENFILE: "this machine has too many open files; end some programs and run the same command again",
    errno.ENOMEM: "no memory is left; end some programs and run the same command again: what was finished is kept",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EACCES: "no permission; choose another --workspace or change the permissions",
    errno.EPERM: "not permitted; choose another --workspace or change the permissions",
    errno.EROFS: "the file system is read-only; choose another --workspace",
    errno.EEXIST: "a file stands where a folder is needed",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.ENOENT: "no such file or folder",
    errno.EISDIR: "this is a folder, a file was expected",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "links lead in a circle",
}


class UserError(Exception):
    """An error that the user can fix: the message says what is wrong, where, and what to do."""


class OpenSizes(UserError):
    """Dimensions of a model have no sizes yet. `options` are command-line options that set fitting sizes."""

    def __init__(self, problem: str, options: str) -> None:
        super().__init__(f"{problem}, for example {options}")
        self.problem, self.options = problem, options


class DeviceUnavailable(UserError):
    """This process can't use a device; another process on the same machine may be able to."""


def lacks_resources(error: BaseException | None) -> bool:
    """Whether an error or its cause means that the machine lacked disk space, memory or open files. Libraries wrap such errors
    in messages of their own, so these are searched for the system's message."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in SHORTAGES) or any(
                os.strerror(number) in str(error) for number in SHORTAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_problem(error: ValidationError, *parents: str) -> str:
    """The first problem that a validation found: the field (below its `parents`), and what is wrong with it."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, (*parents, *first['loc'])))}: {first['msg']}"


def os_error_text(error: OSError) -> str:
    """The message to users for an error of the operating system: the file, what is wrong, what to do."""
    where = f"{error.filename}: " if error.filename else ""
    return where + OS_ERROR_ADVICE.get(error.errno or 0, error.strerror or str(error))


def user_can_fix(error: BaseException) -> bool:
    """Whether an error is one of the operating system that `os_error_text` explains: it has advice, or names a file."""
    return isinstance(error, OSError) and (error.errno in OS_ERROR_ADVICE or error.filename is not None)
