"""Turns on the GPU: several processes trace kernels on it, and only one measures at a time. On Linux only.

Most of a carrier's time goes into its session and into cuDNN's choices, on the host, which the processes do at the same time.
The locks are files in a common folder. A process that waits for exclusive access holds the turnstile, so that no other begins
to prepare before it.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield  # closing the file releases the lock


@contextlib.contextmanager
def preparing(folder: str) -> Iterator[None]:
    """Work on the GPU that is not measured, while others may prepare too; folder "" is for a process that shares with none."""
    if not folder:
        yield
        return
    with contextlib.ExitStack() as held:
        with _locked(Path(folder) / "turnstile", fcntl.LOCK_EX):
            held.enter_context(_locked(Path(folder) / "room", fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Exclusive access to the GPU: no other process prepares or measures."""
    if not folder:
        yield
        return
    with _locked(Path(folder) / "turnstile", fcntl.LOCK_EX), _locked(Path(folder) / "room", fcntl.LOCK_EX):
        yield
