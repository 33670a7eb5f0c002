"""Starts the worker process, asks it, and replaces it when it crashes or hangs."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from types import TracebackType

from benchmark.records.measurement import Status
from benchmark.runtimes import worker_module
from benchmark.runtimes.protocol import Reply, Request
from utils.fingerprint import DEFAULT_RUNTIME
from utils.logger import get_logger
from utils.paths import ROOT
from utils.temporary import temporary_folder

log = get_logger("collector")


class WorkerFailed(Exception):
    """The worker died or ran out of time over a request: `status` is `crashed` or `timeout`, `signal` is what ended it, if one
    did."""

    def __init__(self, status: Status, message: str, signal_number: int | None = None) -> None:
        super().__init__(message)
        self.status, self.signal = status, signal_number


class Worker:
    """A worker process, started when first asked or told to prepare. Use as a context manager: it never outlives the block.

    Args:
        timeout_s: for one request.
        runtime: whose work it does, one of RUNTIMES.
    """

    def __init__(self, timeout_s: float, runtime: str = DEFAULT_RUNTIME) -> None:
        self.timeout_s, self._module = timeout_s, worker_module(runtime)
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary = ExitStack()  # the folder of its temporary files: it is killed, and can't remove them
        self._unread = b""
        self._preparing = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe:
                    pipe.close()
            self._temporary.close()
        self._process, self._unread, self._preparing = None, b"", False

    def prepare(self, request: Request) -> None:
        """Starts the process on something whose reply is not needed; what it loads, later requests find there."""
        self._send(request)
        self._preparing = True

    def wait(self) -> None:
        """Waits until it is prepared. Where it can't be, the next request will tell."""
        if self._preparing:
            self._preparing = False
            with suppress(WorkerFailed):
                self._receive()

    def ask(self, request: Request) -> Reply:
        """The worker's reply.

        Raises:
            WorkerFailed: it died or was too slow; it is gone then.
        """
        self.wait()
        self._send(request)
        return self._receive()

    def _send(self, request: Request) -> None:
        if self._process is None:
            folder = self._temporary.enter_context(temporary_folder())
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module], cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                process_group=0 if os.name == "posix" else None)  # Ctrl-C is for the process that started it
        if self._process.stdin is None:
            raise RuntimeError("the worker was started without pipes")
        with suppress(BrokenPipeError):  # then there is no reply to read either
            self._process.stdin.write(request.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self) -> Reply:
        process = self._process
        if process is None:
            raise RuntimeError("a reply is awaited of a worker that was sent nothing")
        try:
            line = self._read_line(process)
        except TimeoutError:
            self.stop()
            raise WorkerFailed("timeout", f"no answer within {self.timeout_s:.0f} s") from None
        if line is None:
            code = process.wait()
            self.stop()
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise WorkerFailed("crashed", f"the process that ran it ended with {cause}", -code if code < 0 else None)
        return Reply.model_validate_json(line)

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes | None:
        """The next line, or None at the end of the stream; TimeoutError after `timeout_s`."""
        if process.stdout is None:
            return None
        deadline = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(process.stdout.fileno(), 1 << 20)
                if not chunk:
                    return None
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line
