"""Ctrl-C and SIGTERM: a process ends in order, and within a second even while C++ code keeps its main thread.

A signal raises `Stopped` in the main thread, so that blocks are left in order and remove what they made. Python does that only
between two of its own instructions: not while ONNX Runtime optimises a large model, nor while another process is waited for.
A thread therefore waits for the same signals. Where the process is still there a moment later, the thread removes the temporary
files and ends it. Nothing is lost by that: files are written whole or not at all, and child processes end with their parent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

from utils.temporary import remove_temporaries

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 0.7  # between a signal and the hard end of a script: with what that takes, less than a second
CHILD_GRACE_S = 0.15  # the same for a child process, whose parent waits for it
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_lock = threading.Lock()
_said = False
_asked = 0


class Stopped(KeyboardInterrupt):
    """The process is asked to end; the argument is the signal's number."""


def stop_at_signals(message: str, grace_s: float = GRACE_S, error: type[BaseException] = Stopped) -> None:
    """From now on Ctrl-C and SIGTERM raise an error here, and `grace_s` later they end the process.

    To be called in the main thread. A signal that is ignored stays so, and one that is given another handler later is that
    handler's alone.

    Args:
        message: what the thread prints on stderr if it ends the process and `say` did not before; "" for nothing.
        error: is raised with the signal's number.
    """
    def stop(number: int, frame: FrameType | None) -> None:
        global _asked
        if not _asked:  # a second signal must not interrupt the tidying up
            _asked = number
            raise error(number)

    def end_at_last() -> None:
        while True:
            ours = [number for number in os.read(reading, 64) if number in SIGNALS and signal.getsignal(number) is stop]
            if ours:
                break
        time.sleep(grace_s)
        say(message)
        remove_temporaries()
        os._exit(128 + ours[0])

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=end_at_last, daemon=True, name="stopping").start()


def asked_by() -> int:
    """The number of the signal that asked this process to end; 0 if none did. A library may have turned `Stopped` into an error
    of its own: importing ONNX Runtime makes it an ImportError."""
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
