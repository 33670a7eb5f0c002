"""The processes that measure: one worker, and those that trace the GPU.

The tracers are separate from the worker, which times whole runs: once CUPTI has traced a process, it launches kernels more
slowly. All start before there is anything to measure: a GPU's process takes seconds to load CUDA, torch and CUPTI, and
meanwhile the caller can look for work.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import NamedTuple, TypeVar

from benchmark.collecting.config import CollectorConfig
from measuring.bench import Effort
from records.measurement import GPU_LABEL
from runtimes.protocol import Request, Setting, Worker
from utils.locks import measuring
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


class Workers(NamedTuple):
    """The processes that measure: the worker takes every label but `gpu`, which is for the tracers."""

    worker: Worker
    tracers: Tracers

    def wait(self) -> None:
        """Waits until all processes are ready, because one that still loads would disturb what another measures."""
        self.worker.wait()
        self.tracers.wait()


@contextmanager
def start_workers(config: CollectorConfig, device: str, labels: Sequence[str],
                  setting: Setting | None = None) -> Iterator[Workers]:
    """Starts the processes for some labels on `cpu` or `cuda`; they end with the block. `setting` is that of the worker, for a
    runtime that has such.

    Raises:
        UserError: another process measures on this device.
    """
    request = Request(do="prepare", device=device, effort=Effort())
    with (measuring(device), Worker(config.timeout_s, config.runtime, setting) as worker,
          Tracers(config.tracers, config.timeout_s) as tracers):
        worker.prepare(request)
        if GPU_LABEL in labels:
            tracers.prepare(request.model_copy(update={"labels": (GPU_LABEL,)}))
        yield Workers(worker, tracers)
