"""Runs the `main` of a script, with exit codes and messages for errors, and ends a process at a signal.

Ctrl-C and SIGTERM end a process cleanly, and within a second even while C++ code blocks its main thread. A signal raises
`Stopped` in the main thread, so that blocks end normally and remove what they made. Python can do that only between two of its
own instructions: not while ONNX Runtime optimises a large model, nor while it waits for another process. Therefore a thread
waits for the same signals. If the process still runs a moment later, the thread removes the temporary files and ends it.
Nothing is lost: files are written completely or not at all, and child processes end with their parent.
"""

from __future__ import annotations

import errno
import gc
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from hase.utils.errors import OpenSizes, UserError
from hase.utils.temporary import remove_temporaries

EXIT_ROUGH = 3  # an answer is a rough estimate (with --fail-on-rough)
EXIT_SLO_MISSED = 4  # a latency objective is not met
GARBAGE_EVERY = 100_000  # new objects between two garbage collections; Python's 700 cost a short script a fifth of its time
LEFT_OUT = ("torch", "torchvision", "onnxscript", "matplotlib")  # not in a light install
_is_command = False

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
SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 0.7  # between a signal and the forced end of a script; together less than a second
CHILD_GRACE_S = 0.15  # the same for a child process, whose parent waits for it
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_lock = threading.Lock()
_said = False
_asked = 0


def explain(error: OSError) -> str:
    """A readable message for an operating-system error: the file, what is wrong, what to do."""
    where = f"{error.filename}: " if error.filename else ""
    return where + OS_ERROR_ADVICE.get(error.errno or 0, error.strerror or str(error))


def user_can_mend(error: BaseException) -> bool:
    """Whether an error is one of the operating system's that `explain` makes one line of: it has advice, or names a file."""
    return isinstance(error, OSError) and (error.errno in OS_ERROR_ADVICE or error.filename is not None)


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
    if isinstance(error, OpenSizes):
        print(f"error: {error.said}: python {shlex.join(sys.argv)} {error.options}", file=sys.stderr)
    elif isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, OSError) and user_can_mend(error):
        print(f"error: {explain(error)}", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in LEFT_OUT:
        print(f"error: needs the package {error.name}, which requirements-predict.txt leaves out; "
              "pip install -r requirements.txt", file=sys.stderr)
    else:
        return None
    return 1


class Stopped(KeyboardInterrupt):
    """The process was asked to end; the argument is the signal's number."""


def stop_at_signals(message: str, grace_s: float = GRACE_S, error: type[BaseException] | None = Stopped) -> None:
    """From now on Ctrl-C and SIGTERM raise an error in the main thread, and end the process `grace_s` later.

    To be called in the main thread. A signal that is ignored stays ignored; one that gets another handler later belongs to that
    handler alone.

    Args:
        message: printed on stderr if the thread ends the process before `say` was called; "" for nothing.
        error: what is raised, with the signal's number; None: nothing, and the process ends at once.
    """
    def end(number: int) -> NoReturn:
        say(message)
        remove_temporaries()
        os._exit(128 + number)

    def stop(number: int, frame: FrameType | None) -> None:
        global _asked
        if not _asked:  # a second signal must not interrupt the clean-up
            _asked = number
            if error is None:
                end(number)
            raise error(number)

    def handler_of(number: int) -> object:
        handler = signal.getsignal(number)
        return getattr(handler, "__wrapped__", handler)  # while a package is imported (hase.utils.lazy), `stop` is called later

    def end_at_last() -> None:
        while True:
            ours = [number for number in os.read(reading, 64) if number in SIGNALS and handler_of(number) is stop]
            if ours:
                break
        time.sleep(grace_s)
        end(ours[0])

    reading, writing = os.pipe()
    if hasattr(os, "set_blocking"):  # not on Windows before Python 3.12, and not needed there
        os.set_blocking(writing, False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=end_at_last, daemon=True, name="stopping").start()


def asked_by() -> int:
    """The number of the signal that asked this process to end; 0 if none did. A library may turn `Stopped` into another error:
    the import of ONNX Runtime makes it an ImportError."""
    return _asked


def say(message: str) -> None:
    """Prints why the process ends, once."""
    global _said
    with _lock:
        if _said or not message:
            return
        _said = True
    if sys.stderr.isatty():
        message = SHOW_CURSOR + message
    os.write(2, f"{message}\n".encode())  # a print may wait for a lock that the main thread holds
