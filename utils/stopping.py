"""Ctrl-C and SIGTERM: a process ends cleanly, and within a second even while C++ code blocks its main thread.

A signal raises `Stopped` in the main thread, so that blocks end normally and remove what they made. Python can do that only
between two of its own instructions: not while ONNX Runtime optimises a large model, nor while it waits for another process.
Therefore a thread waits for the same signals. If the process still runs a moment later, the thread removes the temporary files
and ends it. Nothing is lost: files are written completely or not at all, and child processes end with their parent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from utils.temporary import remove_temporaries

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 0.7  # between a signal and the forced end of a script; together less than a second
CHILD_GRACE_S = 0.15  # the same for a child process, whose parent waits for it
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_lock = threading.Lock()
_said = False
_asked = 0


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

    def end_at_last() -> None:
        while True:
            ours = [number for number in os.read(reading, 64) if number in SIGNALS and signal.getsignal(number) is stop]
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
