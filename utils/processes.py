"""Child processes that never outlive their parent, and processes that end at a signal."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures  # which loads its pool of processes at the first use
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TypeVar

from hase.utils import cli
from hase.utils.cli.running import CHILD_GRACE_S, GARBAGE_EVERY, SIGNALS, stop_at_signals
from hase.utils.lazy import multiprocessing
from hase.utils.temporary import temporary_folder

T = TypeVar("T")
R = TypeVar("R")
CRASHED = "takes ONNX Runtime down (the process that read it has ended): a damaged file, or a fault of ONNX Runtime's"


def die_with_parent(by: signal.Signals | None = None) -> None:
    """Asks Linux to send the signal `by` to this process when its parent ends (elsewhere, compare `os.getppid()`); by default
    SIGKILL, which Windows does not know."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by or signal.SIGKILL)


def serve_lines(answer: Callable[[bytes], str]) -> None:
    """Writes one line on standard output for each line on standard input, until that ends. Ends with its parent: a worker that
    hangs would never read the end of its input."""
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no reply
    for line in sys.stdin.buffer:  # UTF-8, whatever Windows' code page is
        try:
            print(answer(line), file=replies, flush=True)
        except BrokenPipeError:  # nobody waits for the reply: the parent ended before `die_with_parent` was called
            os._exit(0)  # or Python would try to write the reply again


def exit_cause(code: int) -> str:
    """Why a child process ended, from its exit code: the name of the signal that killed it, or the code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def begin_child(temporary: Path | None = None) -> None:
    """To be called first in a child process: it then ends cleanly at SIGTERM and with its parent. Ctrl-C reaches both; the
    parent handles it. Nothing is raised in the child: an error that comes out of a callback of onnx' C++ code would take it
    down with a message.

    Args:
        temporary: folder for its temporary files; the parent removes it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(GARBAGE_EVERY)  # as in the scripts that start it
    stop_at_signals("", CHILD_GRACE_S, None)
    die_with_parent(signal.SIGTERM)
    if temporary is not None:
        tempfile.tempdir = str(temporary)


@contextmanager
def process_pool(jobs: int) -> Iterator[futures.ProcessPoolExecutor]:
    """`jobs` processes for work with ONNX Runtime: spawned, since a forked runtime would hang. They end with the block, and at
    once if it is interrupted."""
    others = multiprocessing.active_children()
    with temporary_folder() as folder:
        pool = futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=begin_child,
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
    """The result of `task` for each item, in order, computed in `jobs` processes. An item that crashes its process, as a
    damaged model may do to ONNX Runtime, loses only its own result.

    Args:
        task: a function at the top of a module.
        items: its arguments; they and the results are pickled.
        crashed: gives the result for an item that crashed its process.
        description: text of the progress bar.
    """
    results: dict[int, R] = {}
    left = list(range(len(items)))
    while left:
        with process_pool(jobs) as pool:
            pending = {number: pool.submit(task, items[number]) for number in left}
            for number, done in cli.progress(list(pending.items()), description):
                with suppress(futures.BrokenExecutor):
                    results[number] = done.result()
        left = [number for number in left if number not in results]
        for number in left[:jobs + 1]:  # items start in order, so the one that crashed is among these
            with process_pool(1) as pool:
                try:
                    results[number] = pool.submit(task, items[number]).result()
                except futures.BrokenExecutor:
                    results[number] = crashed(items[number])
        left = left[jobs + 1:]
    return [results[number] for number in range(len(items))]


def in_processes(task: Callable[[T], list[R]], batches: Iterable[T], jobs: int) -> Iterator[R]:
    """The results of `task` for batch after batch, in order, computed in `jobs` processes. A batch is taken when a process will
    soon be free for it, so a stream may be longer than memory.

    Args:
        task: a function at the top of a module, or a partial one; it gives the results of a batch.
        batches: its arguments; they and the results are pickled.
        jobs: number of processes.
    """
    with process_pool(jobs) as pool:
        pending: deque[futures.Future[list[R]]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(task, batch))
                if len(pending) > jobs + 1:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            for future in pending:  # nobody wants them any more
                future.cancel()


def set_by_signal() -> Event:
    """An event that Ctrl-C and SIGTERM set; from now on they no longer end the process themselves."""
    over = Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: over.set())
    return over
