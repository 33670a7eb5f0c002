"""Several processes prepare work for one GPU side by side, and then one at a time has it to itself to be measured.

Most of the time of a carrier goes into its session and into cuDNN's choices, on the host. Files in a common folder are the
locks: whoever waits to be alone holds the turnstile, so that nobody begins to prepare before it had its turn.
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
    """Work on the GPU that need not be measured, beside that of others; "" stands for a process that shares with nobody."""
    if not folder:
        yield
        return
    with contextlib.ExitStack() as held:
        with _locked(Path(folder) / "turnstile", fcntl.LOCK_EX):
            held.enter_context(_locked(Path(folder) / "room", fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """The GPU to oneself: nobody prepares, nobody else measures."""
    if not folder:
        yield
        return
    with _locked(Path(folder) / "turnstile", fcntl.LOCK_EX), _locked(Path(folder) / "room", fcntl.LOCK_EX):
        yield
