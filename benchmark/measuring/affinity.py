"""Keeps the thread that runs a session off the cores of ONNX Runtime's own threads.

ONNX Runtime pins each of its worker threads to a core and leaves the caller's thread to float. Now and then the system
puts the caller on a worker's core; the two then take turns, and a whole session takes twice as long as the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

THREADS = Path("/proc/self/task")


def free_cores() -> set[int]:
    """The cores this thread may use and no other thread of this process is pinned to; empty where that can't be told."""
    if not hasattr(os, "sched_getaffinity") or not THREADS.is_dir():
        return set()
    allowed = os.sched_getaffinity(0)
    pinned: set[int] = set()
    for thread in os.listdir(THREADS):
        try:
            cores = os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # it has just ended
            continue
        if cores < allowed:
            pinned |= cores
    return allowed - pinned


@contextmanager
def off_the_workers_cores() -> Iterator[None]:
    """While it lasts, the calling thread keeps to the cores that `free_cores` finds, where it finds any."""
    cores = free_cores()
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
