"""Runs the `main` of a script: exit codes, and messages for errors."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from utils.errors import UserError
from utils.stopping import asked_by, say, stop_at_signals

EXIT_ROUGH = 3  # an answer is a rough estimate (with --fail-on-rough)
EXIT_SLO_MISSED = 4  # a latency objective is not met
GARBAGE_EVERY = 100_000  # new objects between two garbage collections; Python's 700 cost a short script a fifth of its time
LEFT_OUT = ("torch", "torchvision", "onnxscript", "pandas", "sklearn", "matplotlib")  # not in a light install
_is_command = False

OS_ERROR_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again: what was finished is kept",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EACCES: "no permission; choose another --workspace or change the permissions",
    errno.EPERM: "not permitted; choose another --workspace or change the permissions",
    errno.EROFS: "the file system is read-only; choose another --workspace",
    errno.EEXIST: "a file stands where a folder is needed",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.ENOENT: "no such file or folder",
    errno.EISDIR: "this is a folder, a file was expected",
}


def explain(error: OSError) -> str:
    """A readable message for an operating-system error: the file, what is wrong, what to do."""
    where = f"{error.filename}: " if error.filename else ""
    return where + OS_ERROR_ADVICE.get(error.errno or 0, error.strerror or str(error))


def is_command() -> bool:
    """Whether this process is one of Hase's scripts, not another program that imports Hase."""
    return _is_command


def run(main: Callable[[], int | None], kept: str = "") -> NoReturn:
    """Runs the `main` of a script and exits. Codes: 0 done, 1 an error that the user can fix (one line on stderr), 2 usage, or
    another EXIT_… that `main` returns. Ctrl-C gives 130 and SIGTERM 143, both within a second and after cleaning up.

    Only `UserError` and file-system errors that the user can fix become one line; a bug keeps its traceback.

    Args:
        kept: what is kept when the script is stopped, so that the next run continues there; "" for nothing.
    """
    global _is_command
    _is_command = True
    stopped = f"stopped; {kept} is kept: run again to go on" if kept else "stopped"
    stop_at_signals(stopped)
    gc.set_threshold(GARBAGE_EVERY)
    try:
        code = main() or 0
        sys.stdout.flush()
    except BaseException as error:
        reported = _report(error, stopped)
        if reported is None:
            raise
        code = reported
    sys.exit(code)


def _report(error: BaseException, stopped: str) -> int | None:
    """Tells the user of an error, or that the script was stopped, and returns the exit code; None for a bug."""
    if asked_by() or isinstance(error, KeyboardInterrupt):
        say(stopped)
        return 128 + (asked_by() or signal.SIGINT)
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, OSError) and error.errno in OS_ERROR_ADVICE:
        print(f"error: {explain(error)}", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in LEFT_OUT:
        print(f"error: needs the package {error.name}, which requirements-predict.txt leaves out; "
              "pip install -r requirements.txt", file=sys.stderr)
    else:
        return None
    return 1
