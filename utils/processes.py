"""Processes that never outlive the one that started them."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send the signal `by` to this process when its parent ends (elsewhere, compare `os.getppid()`)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """`jobs` processes for work that ONNX Runtime takes part in: started anew, since a forked runtime would hang."""
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=die_with_parent)
