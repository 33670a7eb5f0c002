"""Processes: such as never outlive the one that started them, and such as end at a signal."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TypeVar

from utils import cli
from utils.stopping import CHILD_GRACE_S, SIGNALS, stop_at_signals
from utils.temporary import temporary_folder

T = TypeVar("T")
R = TypeVar("R")
CRASHED = "takes ONNX Runtime down (the process that read it has ended): a damaged file, or a fault of ONNX Runtime's"


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send the signal `by` to this process when its parent ends (elsewhere, compare `os.getppid()`)."""
    if sys.platform == "linux":
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


def each_in_a_process(task: Callable[[T], R], items: Sequence[T], jobs: int, crashed: Callable[[T], R],
                      description: str) -> list[R]:
    """`task` of each item in processes of their own, `jobs` at a time, in order. One that takes its process down, as ONNX
    Runtime may where a model is damaged, costs only itself.

    Args:
        task: a function that a new process finds by its name.
        items: what it takes; as all that it gives, such as can be pickled.
        crashed: what stands for the result of such an item.
        description: of the progress bar.
    """
    results: dict[int, R] = {}
    left = list(range(len(items)))
    while left:
        with process_pool(jobs) as pool:
            pending = {number: pool.submit(task, items[number]) for number in left}
            for number, done in cli.track(list(pending.items()), description):
                with suppress(BrokenProcessPool):
                    results[number] = done.result()
        left = [number for number in left if number not in results]
        for number in left[:jobs + 1]:  # they begin in order, so the one at fault is among these
            with process_pool(1) as pool:
                try:
                    results[number] = pool.submit(task, items[number]).result()
                except BrokenProcessPool:
                    results[number] = crashed(items[number])
        left = left[jobs + 1:]
    return [results[number] for number in range(len(items))]


def set_by_signal() -> Event:
    """An event that Ctrl-C and SIGTERM set from now on; they then no longer end the process by themselves."""
    over = Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: over.set())
    return over
