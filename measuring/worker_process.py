"""A process that does work on request, and is replaced when it crashes or hangs: one JSON object per line, both ways."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import IO, Generic, Self, TypeVar

import psutil
from pydantic import BaseModel

from records.measurement import Status
from utils.paths import ROOT
from utils.processes import exit_cause
from utils.temporary import temporary_folder

Q = TypeVar("Q", bound=BaseModel)
R = TypeVar("R", bound=BaseModel)
LOOK_EVERY_S = 0.5  # at the process while its reply is awaited
# Signals by which people and systems end a process, the latter for memory; a fault of what it runs gives others.
FROM_OUTSIDE = tuple(getattr(signal, name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class WorkerFailed(Exception):
    """A request to a worker process failed.

    Attributes:
        status: `crashed` or `timeout` where the process died or was too slow over it, `interrupted` where somebody ended or
            stopped it, `failed` where it says so itself.
        signal: the number of the signal that ended the process, if one did.
    """

    def __init__(self, status: Status, message: str, signal_number: int | None = None) -> None:
        super().__init__(message)
        self.status, self.signal = status, signal_number


class WorkerProcess(Generic[Q, R]):
    """A worker process. It starts at the first request, or when it is asked to prepare. Use as a context manager: it ends with
    the block.

    Args:
        module: what it runs, as `python -m` does. It reads one request per line and writes one reply per line.
        reply: the class of a reply.
        timeout_s: for one request.
    """

    def __init__(self, module: str, reply: type[R], timeout_s: float) -> None:
        self.timeout_s, self._module, self._reply = timeout_s, module, reply
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
            WorkerFailed: it died or was too slow; it is gone then.
        """
        self.wait()
        self._send(request)
        return self._receive()

    def _start(self) -> subprocess.Popen[bytes]:
        folder = self._temporary.enter_context(temporary_folder())
        process = subprocess.Popen(
            [sys.executable, "-m", self._module], cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            process_group=0 if os.name == "posix" else None)  # Ctrl-C is for the process that started it
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_pass_on, args=(process.stdout, self._lines), daemon=True).start()
        return process

    def _send(self, request: Q) -> None:
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
            WorkerFailed: none came in time, or somebody stopped the process (SIGSTOP); it is gone then.
        """
        until_s, looks_stopped = time.monotonic() + self.timeout_s, 0
        while True:
            left_s = until_s - time.monotonic()
            ended = process.poll() is not None
            try:
                return self._lines.get(timeout=max(min(left_s, LOOK_EVERY_S), 0.0))
            except queue.Empty:
                if ended:
                    return b""
            looks_stopped = looks_stopped + 1 if is_stopped(process.pid) else 0
            if looks_stopped > 1 or left_s <= 0:
                self.stop()
                raise (WorkerFailed("timeout", f"no answer within {self.timeout_s:.0f} s") if looks_stopped < 2 else
                       WorkerFailed("interrupted", "the process that ran it was stopped (SIGSTOP)"))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _pass_on(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Puts every line of a process into a queue, and b"" at its end. A thread, since Windows can't wait for a pipe."""
    with stream:
        for line in stream:
            lines.put(line)
        lines.put(b"")
