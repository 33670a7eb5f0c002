"""Processes: such as never outlive the one that started them, and such as end at a signal."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from utils.stopping import CHILD_GRACE_S, SIGNALS, stop_at_signals
from utils.temporary import temporary_folder


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send the signal `by` to this process when its parent ends (elsewhere, compare `os.getppid()`)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)


def begin_child(temporary: Path | None = None) -> None:
    """For a process that works for another one: it ends in order at SIGTERM and with its parent. Ctrl-C, which reaches both,
    is the parent's to handle.

    Args:
        temporary: folder for its temporary files, which the parent removes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop_at_signals("", CHILD_GRACE_S, SystemExit)
    die_with_parent(signal.SIGTERM)
    if temporary is not None:
        tempfile.tempdir = str(temporary)


@contextmanager
def process_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """`jobs` processes for work that ONNX Runtime takes part in: started anew, since a forked runtime would hang. They end with
    the block, at once where that is interrupted."""
    others = multiprocessing.active_children()
    with temporary_folder() as folder:
        pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=begin_child,
                                   initargs=(folder,))
        try:
            yield pool
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            pool.shutdown()


def set_by_signal() -> Event:
    """An event that Ctrl-C and SIGTERM set from now on; they then no longer end the process by themselves."""
    over = Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: over.set())
    return over
