"""Processes: such as never outlive the one that started them, and such as end at a signal."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from threading import Event


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send the signal `by` to this process when its parent ends (elsewhere, compare `os.getppid()`)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """`jobs` processes for work that ONNX Runtime takes part in: started anew, since a forked runtime would hang."""
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=die_with_parent)


def set_by_signal() -> Event:
    """An event that Ctrl-C and SIGTERM set from now on; they then no longer end the process by themselves."""
    over = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    return over
