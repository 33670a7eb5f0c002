"""The processes that take label `gpu`. They prepare carriers at the same time, and measure on the GPU one at a time.

They are separate from the process that times whole runs: once CUPTI has traced a process, it launches kernels more slowly.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

from runtimes.protocol import Request
from runtimes.worker_client import Worker
from utils.temporary import temporary_folder

R = TypeVar("R")


class Tracers:
    """`count` workers. Use as a context manager: they end with the block.

    Attributes:
        turns: the folder of their locks; "" for a single worker.
    """

    def __init__(self, count: int, timeout_s: float) -> None:
        self.count, self._timeout_s = count, timeout_s
        self._stack = ExitStack()
        self._workers: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.turns = ""

    def __enter__(self) -> Tracers:
        if self.count > 1:
            self.turns = str(self._stack.enter_context(temporary_folder()))
        for _ in range(self.count):
            self._workers.append(self._stack.enter_context(Worker(self._timeout_s)))
            self._idle.put(self._workers[-1])
        # These threads stay alive: a process ends with the thread that started it.
        self._threads = self._stack.enter_context(ThreadPoolExecutor(self.count))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def prepare(self, request: Request) -> None:
        """Starts every process, as a worker's `prepare` does."""
        for worker in self._workers:
            worker.prepare(request)

    def wait(self) -> None:
        """Waits until all are ready."""
        for worker in self._workers:
            worker.wait()

    def each(self, tasks: Sequence[Callable[[Worker], R]]) -> list[R]:
        """The results of the tasks, in order. As many run at a time as there are workers; each has a worker to itself."""
        def with_worker(task: Callable[[Worker], R]) -> R:
            worker = self._idle.get()
            try:
                return task(worker)
            finally:
                self._idle.put(worker)

        return list(self._threads.map(with_worker, tasks))
