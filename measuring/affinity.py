"""Keeps the thread that runs a session off the cores of ONNX Runtime's own threads.

ONNX Runtime pins each of its worker threads to a core and leaves the caller's thread free. Now and then the system puts the
caller on a worker's core. The two then share it, and the whole session takes twice as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

THREADS = Path("/proc/self/task")


def free_cores() -> set[int]:
    """The cores that this thread may use and to which no other thread of this process is pinned; empty if the system does not
    say."""
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
    """Keeps the calling thread on the cores that `free_cores` finds, if there are any."""
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
