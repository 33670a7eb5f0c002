"""A process that does work on request, and is replaced when it crashes or hangs: one JSON object per line, both ways."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

import psutil
from pydantic import BaseModel

from hase.records.measurement import Status
from hase.utils.paths import ROOT
from hase.utils.processes import exit_cause
from hase.utils.temporary import temporary_folder

Q = TypeVar("Q", bound=BaseModel)
R = TypeVar("R", bound=BaseModel)
MEMORY_EVERY_S = 0.02  # how often a process with a limit of memory is looked at; in that time it can take 0.1 GiB more
LOOK_EVERY_S = 0.5  # at another process while its reply is awaited; one that is stopped for as long is given up
# Signals by which people and systems end a process, the latter for memory; a fault of what it runs gives others.
FROM_OUTSIDE = tuple(getattr(signal, name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class WorkerFailed(Exception):
    """A request to a worker process failed.

    Attributes:
        status: `crashed` or `timeout` where the process died (or took too much memory) or was too slow over it, `interrupted`
            where somebody ended or stopped it, `failed` where it says so itself.
        signal: the number of the signal that ended the process, if one did.
    """

    def __init__(self, status: Status, message: str, signal_number: int | None = None) -> None:
        super().__init__(message)
        self.status, self.signal = status, signal_number


class TooMuchMemory(WorkerFailed):
    """A worker process took more memory than it may; its status is `crashed`."""

    def __init__(self, limit_mib: float) -> None:
        super().__init__("crashed", f"it took more than {limit_mib / 1024:.1f} GiB of memory")


class WorkerProcess(Generic[Q, R]):
    """A worker process. It starts at the first request, or when it is asked to prepare. Use as a context manager: it ends with
    the block.

    Args:
        module: what it runs, as `python -m` does. It reads one request per line and writes one reply per line.
        reply: the class of a reply.
        timeout_s: for one request.
        memory_mib: that it may hold (see `holds_mib`), in MiB; None: no limit.
        environment: variables of its environment that this process's lacks.
    """

    def __init__(self, module: str, reply: type[R], timeout_s: float, memory_mib: float | None = None,
                 environment: Mapping[str, str] | None = None) -> None:
        self.timeout_s, self.memory_mib, self._module, self._reply = timeout_s, memory_mib, module, reply
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._temporary = ExitStack()  # the folder of its temporary files: it is killed, and can't remove them
        self._preparing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin:
                with suppress(BrokenPipeError):  # what it has not read
                    self._process.stdin.close()
            self._temporary.close()
        self._process, self._preparing = None, False

    @property
    def started(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def holds_mib(self) -> float:
        """The process's memory in MiB; 0 where it has ended. Mapped files, such as libraries, count only where the system can't
        tell them apart (it can on Linux)."""
        try:
            memory = psutil.Process(self._process.pid).memory_info() if self._process else None
        except psutil.Error:
            memory = None
        return (memory.rss - getattr(memory, "shared", 0)) / 2**20 if memory else 0.0

    def prepare(self, request: Q) -> None:
        """Starts the process on something whose reply is not needed; what it loads is there for later requests."""
        self._send(request)
        self._preparing = True

    def wait(self) -> None:
        """Waits until it is prepared. Where it can't be, the next request will fail."""
        if self._preparing:
            self._preparing = False
            with suppress(WorkerFailed):
                self._receive()

    def ask(self, request: Q) -> R:
        """The worker's reply.

        Raises:
            WorkerFailed: it died, was too slow, or took too much memory; it is gone then.
        """
        self.wait()
        self._send(request)
        return self._receive()

    def _start(self) -> subprocess.Popen[bytes]:
        folder = self._temporary.enter_context(temporary_folder())
        started: Future[subprocess.Popen[bytes]] = Future()
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_run, daemon=True, args=(
            self._module, self._environment | {"TMPDIR": str(folder)}, started, self._lines)).start()
        return started.result()

    def _send(self, request: Q) -> None:
        if self._process is not None and not self.started:
            self.stop()  # it ended between two requests
        self._process = self._process or self._start()
        if self._process.stdin is None:
            raise RuntimeError("the worker was started without pipes")
        with suppress(BrokenPipeError):  # then there is no reply to read either
            self._process.stdin.write(request.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self) -> R:
        if self._process is None:
            raise RuntimeError("a reply is awaited of a worker that was sent nothing")
        line = self._next_line(self._process)
        if not line.endswith(b"\n"):  # it ended, perhaps in the middle of a line
            code = self._process.wait()
            self.stop()
            raise WorkerFailed("interrupted" if -code in FROM_OUTSIDE else "crashed",
                               f"the process that ran it ended with {exit_cause(code)}", -code if code < 0 else None)
        return self._reply.model_validate_json(line)

    def _next_line(self, process: subprocess.Popen[bytes]) -> bytes:
        """The next line of the process; b"" once it has ended, also where a child of its own keeps the pipe open.

        Raises:
            WorkerFailed: none came in time, it took too much memory, or somebody stopped it (SIGSTOP); it is gone then.
        """
        until_s, stopped_s = time.monotonic() + self.timeout_s, math.inf
        while True:
            left_s, ended = until_s - time.monotonic(), process.poll() is not None
            every_s = LOOK_EVERY_S if self.memory_mib is None else MEMORY_EVERY_S
            try:
                return self._lines.get(timeout=max(min(left_s, every_s), 0.0))
            except queue.Empty:
                if ended:
                    return b""
            if self.memory_mib is not None and self.holds_mib() > self.memory_mib:
                self.stop()
                raise TooMuchMemory(self.memory_mib)
            now_s = time.monotonic()
            stopped_s = min(stopped_s, now_s) if is_stopped(process.pid) else math.inf
            if now_s - stopped_s >= LOOK_EVERY_S:
                self.stop()
                raise WorkerFailed("interrupted", "the process that ran it was stopped (SIGSTOP)")
            if left_s <= 0:
                self.stop()
                raise WorkerFailed("timeout", f"no answer within {self.timeout_s:.0f} s")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _run(module: str, environment: Mapping[str, str], started: Future[subprocess.Popen[bytes]],
         lines: queue.SimpleQueue[bytes]) -> None:
    """Starts a process, and puts every line of it into a queue, and b"" at its end. In a thread, since Windows can't wait for a
    pipe. The process is started in that thread too: Linux ends a process that dies with its parent when the thread ends that
    started it, and a caller's thread may end long before."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=ROOT, env=os.environ | dict(environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            process_group=0 if os.name == "posix" else None)  # Ctrl-C is for the process that started it
    except BaseException as error:  # noqa: BLE001 - raised where the process is awaited
        started.set_exception(error)
        return
    started.set_result(process)
    if process.stdout is not None:
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
    lines.put(b"")
