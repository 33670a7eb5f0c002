"""Ends processes cleanly at a signal, and starts pools and workers that never outlive their parent.

Ctrl-C and SIGTERM raise `Stopped` in the main thread, so that `with` blocks clean up. Python can do this only between its own
instructions, not while C++ code runs (ONNX Runtime optimising a large model) or while it waits for another process. So a second
thread waits for the same signals. If the process still runs a moment later, that thread removes the temporary files and ends
it. Nothing is lost: files are written atomically, and child processes end with their parent.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures  # which loads its pool of processes at the first use
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from types import FrameType, TracebackType
from typing import Generic, Literal, NoReturn, Self, TypeVar

import psutil
from pydantic import BaseModel

from hase.utils.files import remove_temporaries, temporary_folder
from hase.utils.lazy import multiprocessing
from hase.utils.logger import progress
from hase.utils.paths import IMPORTED_FROM

T = TypeVar("T")
R = TypeVar("R")
Request = TypeVar("Request", bound=BaseModel)
Reply = TypeVar("Reply", bound=BaseModel)
Failure = Literal["failed", "crashed", "timeout", "interrupted"]  # of work in another process
CRASHED = "takes ONNX Runtime down (the process that read it has ended): a damaged file, or a fault of ONNX Runtime's"
GARBAGE_EVERY = 100_000  # new objects between two garbage collections; Python's 700 cost a short script a fifth of its time
SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 0.7  # between a signal and the forced end of a script; together less than a second
CHILD_GRACE_S = 0.15  # the same for a child process, whose parent waits for it
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_lock = threading.Lock()
_end_is_reported = False
_stop_signal = 0
_is_command = False
MEMORY_POLL_S = 0.02  # interval of memory checks; in that time a process can allocate 0.1 GiB more
REPLY_POLL_S = 0.5  # interval of checks while waiting for a reply; a process stopped for so long is given up
# Signals by which people, or the system for lack of memory, end a process; faults of its code give other signals.
OUTSIDE_SIGNALS = tuple(getattr(signal, name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
MIB = 1 << 20
# mallopt(3): numbers from malloc.h. glibc takes at most 32 MiB as the threshold for blocks that are mapped apart.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_MAPPED_BYTES, NEVER_TRIM_BYTES = 32 * MIB, 2**31 - 1


class Stopped(KeyboardInterrupt):
    """The process was asked to end; the argument is the signal number."""


def stop_at_signals(message: str, grace_s: float = GRACE_S, error: type[BaseException] | None = Stopped) -> None:
    """Makes Ctrl-C and SIGTERM raise an error in the main thread, and end the process `grace_s` later if it still runs.

    Must be called in the main thread. An ignored signal stays ignored. If a signal gets another handler later, only that
    handler runs.

    Args:
        message: printed on stderr if the process is ended before `report_end` was called; "" for nothing.
        error: raised with the signal number; None to end the process at once.
    """
    def end(number: int) -> NoReturn:
        report_end(message)
        remove_temporaries()
        os._exit(128 + number)

    def stop(number: int, frame: FrameType | None) -> None:
        global _stop_signal
        if not _stop_signal:  # a second signal must not interrupt the clean-up
            _stop_signal = number
            if error is None:
                end(number)
            raise error(number)

    def handler_of(number: int) -> object:
        handler = signal.getsignal(number)
        return getattr(handler, "__wrapped__", handler)  # while a package is imported (hase.utils.lazy), `stop` is called later

    def end_after_grace() -> None:
        ours: list[int] = []
        while not ours:
            ours = [number for number in os.read(reading, 64) if number in SIGNALS and handler_of(number) is stop]
        time.sleep(grace_s)
        end(ours[0])

    reading, writing = os.pipe()
    if hasattr(os, "set_blocking"):  # not on Windows before Python 3.12, and not needed there
        os.set_blocking(writing, False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=end_after_grace, daemon=True, name="stopping").start()


def stop_signal() -> int:
    """The number of the signal that stops this process; 0 if none came. Needed because a library may turn `Stopped` into
    another error, as the import of ONNX Runtime does (ImportError)."""
    return _stop_signal


def report_end(message: str) -> None:
    """Prints why the process ends, at most once."""
    global _end_is_reported
    with _lock:
        if _end_is_reported or not message:
            return
        _end_is_reported = True
    if sys.stderr.isatty():
        message = SHOW_CURSOR + message
    os.write(2, f"{message}\n".encode())  # a print may wait for a lock that the main thread holds


def stop_event() -> Event:
    """An event that Ctrl-C and SIGTERM set from now on, instead of ending the process."""
    stopped = Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: stopped.set())
    return stopped


def is_command() -> bool:
    """Whether this process is one of Hase's scripts, not another program that imports Hase."""
    return _is_command


def begin_command(stopped: str) -> None:
    """Makes a script end cleanly at Ctrl-C and SIGTERM, with the message `stopped`. Must be called first."""
    global _is_command
    _is_command = True
    stop_at_signals(stopped)
    gc.set_threshold(GARBAGE_EVERY)


def die_with_parent(by: signal.Signals | None = None) -> None:
    """Makes Linux send this process the signal `by` (default: SIGKILL) when its parent ends. No effect on other systems, where
    the process must compare `os.getppid()`."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by or signal.SIGKILL)


def begin_child(temporary: Path | None = None) -> None:
    """Makes a child process end cleanly at SIGTERM and with its parent. Must be called first.

    Ctrl-C is left to the parent. Nothing is raised in the child: an error in a callback of onnx's C++ code would crash it. The
    parent removes `temporary`, the child's folder for temporary files.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(GARBAGE_EVERY)  # as in the scripts that start it
    stop_at_signals("", CHILD_GRACE_S, None)
    die_with_parent(signal.SIGTERM)
    if temporary is not None:
        tempfile.tempdir = str(temporary)


def exit_cause(code: int) -> str:
    """Why a child process ended, from its exit code: the signal's name, or the code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def serve_lines(answer: Callable[[bytes], str]) -> None:
    """Answers each line of standard input with a line on standard output, until the input ends. The process also ends with its
    parent, since a worker that hangs would never read the end of its input."""
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library's output is no reply
    for line in sys.stdin.buffer:  # UTF-8, whatever Windows' code page is
        try:
            print(answer(line), file=replies, flush=True)
        except BrokenPipeError:  # nobody waits for the reply: the parent ended before `die_with_parent` was called
            os._exit(0)  # or Python would try to write the reply again


@contextmanager
def process_pool(jobs: int) -> Iterator[futures.ProcessPoolExecutor]:
    """A pool of `jobs` processes that may use ONNX Runtime. They end with the block, and at once if it is interrupted. They are
    spawned, since ONNX Runtime would hang in a forked process."""
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


def map_in_processes(task: Callable[[T], R], items: Sequence[T], jobs: int, crashed: Callable[[T], R],
                     description: str) -> list[R]:
    """The result of `task` for each item, in order, computed in `jobs` processes. For an item that crashes its process, as a
    damaged model may, it is that of `crashed`. `task` is a top-level function; items and results are pickled."""
    results: dict[int, R] = {}
    left = list(range(len(items)))
    while left:
        with process_pool(jobs) as pool:
            pending = {number: pool.submit(task, items[number]) for number in left}
            for number, done in progress(list(pending.items()), description):
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


def stream_in_processes(task: Callable[[T], list[R]], batches: Iterable[T], jobs: int) -> Iterator[R]:
    """Yields the results of `task` for each batch, in order, computed in `jobs` processes.

    A batch is read only when a process will soon be free for it, so that all together may exceed memory. `task` is a top-level
    function or a partial of one; batches and results are pickled.
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


class WorkerFailed(Exception):
    """A request to a worker process failed.

    Attributes:
        status: `crashed` if the process died or took too much memory, `timeout` if it was too slow, `interrupted` if somebody
            ended or stopped it, `failed` if the worker itself reports a failure.
        signal: the number of the signal that ended the process, or None.
    """

    def __init__(self, status: Failure, message: str, signal_number: int | None = None) -> None:
        super().__init__(message)
        self.status, self.signal = status, signal_number


class TooMuchMemory(WorkerFailed):
    """A worker process exceeded its memory limit (status `crashed`)."""

    def __init__(self, limit_mib: float) -> None:
        super().__init__("crashed", f"it took more than {limit_mib / 1024:.1f} GiB of memory")


class WorkerProcess(Generic[Request, Reply]):
    """A worker process that starts at the first request or `prepare`, and ends with its `with` block.

    Args:
        module: run as by `python -m`. It reads one request per line and writes one reply per line (see `serve_lines`).
        memory_mib: limit of `memory_use_mib`, or None.
    """

    def __init__(self, module: str, reply: type[Reply], timeout_s: float, memory_mib: float | None = None,
                 environment: Mapping[str, str] | None = None) -> None:
        self.timeout_s, self.memory_mib, self._module, self._reply = timeout_s, memory_mib, module, reply
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._temporary = ExitStack()  # the folder of its temporary files, which it can't remove: it is killed
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
                with suppress(BrokenPipeError):  # it has not read all
                    self._process.stdin.close()
            self._temporary.close()
        self._process, self._preparing = None, False

    @property
    def alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def memory_use_mib(self) -> float:
        """The process's memory in MiB; 0 if it has ended. On Linux, mapped files such as libraries do not count."""
        with suppress(psutil.Error):
            if self._process:
                memory = psutil.Process(self._process.pid).memory_info()
                return float(memory.rss - getattr(memory, "shared", 0)) / MIB
        return 0.0

    def prepare(self, request: Request) -> None:
        """Starts the process and sends a request whose reply nobody needs, so that later requests find everything loaded."""
        self._send(request)
        self._preparing = True

    def wait(self) -> None:
        """Waits until the request of `prepare` is answered. If it failed, the next request fails."""
        if self._preparing:
            self._preparing = False
            with suppress(WorkerFailed):
                self._receive()

    def ask(self, request: Request) -> Reply:
        """The worker's reply. Raises WorkerFailed, and stops the worker, if it died, was too slow, or took too much memory."""
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

    def _send(self, request: Request) -> None:
        if self._process is not None and not self.alive:
            self.stop()  # it ended between two requests
        self._process = self._process or self._start()
        if self._process.stdin is None:
            raise RuntimeError("the worker was started without pipes")
        with suppress(BrokenPipeError):  # then there is no reply to read either
            self._process.stdin.write(request.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self) -> Reply:
        if self._process is None:
            raise RuntimeError("a reply is awaited of a worker that was sent nothing")
        line = self._next_line(self._process)
        if not line.endswith(b"\n"):  # it ended, perhaps in the middle of a line
            code = self._process.wait()
            self.stop()
            raise WorkerFailed("interrupted" if -code in OUTSIDE_SIGNALS else "crashed",
                               f"the process that ran it ended with {exit_cause(code)}", -code if code < 0 else None)
        return self._reply.model_validate_json(line)

    def _next_line(self, process: subprocess.Popen[bytes]) -> bytes:
        """The next line of the process; b"" if it has ended, even if its own child keeps the pipe open. Raises WorkerFailed as
        `ask`, and if somebody stopped the process (SIGSTOP)."""
        until_s, stopped_s = time.monotonic() + self.timeout_s, math.inf
        poll_s = REPLY_POLL_S if self.memory_mib is None else MEMORY_POLL_S
        while True:
            left_s, ended = until_s - time.monotonic(), process.poll() is not None
            try:
                return self._lines.get(timeout=max(min(left_s, poll_s), 0.0))
            except queue.Empty:
                if ended:
                    return b""
            if self.memory_mib is not None and self.memory_use_mib() > self.memory_mib:
                self.stop()
                raise TooMuchMemory(self.memory_mib)
            now_s = time.monotonic()
            stopped_s = min(stopped_s, now_s) if is_stopped(process.pid) else math.inf
            if now_s - stopped_s >= REPLY_POLL_S:
                self.stop()
                raise WorkerFailed("interrupted", "the process that ran it was stopped (SIGSTOP)")
            if left_s <= 0:
                self.stop()
                raise WorkerFailed("timeout", f"no answer within {self.timeout_s:.0f} s")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, e.g. by SIGSTOP."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _run(module: str, environment: Mapping[str, str], started: Future[subprocess.Popen[bytes]],
         lines: queue.SimpleQueue[bytes]) -> None:
    """Starts a process and puts each line that it writes into a queue, and b"" at its end.

    Runs in a thread, since Windows can't wait for a pipe with a timeout. The process must start in this thread, too: for a
    process that ends with its parent, Linux takes the end of the thread that started it for the end of the parent.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=IMPORTED_FROM, env=os.environ | dict(environment),
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


def keep_freed_memory() -> bool:
    """Makes this process keep memory that it frees, as a long-running server does; returns whether that worked.

    glibc may return large freed blocks to the system, depending on earlier frees. Then a run sometimes pays for zeroed pages
    (about 0.4 us each on an H200's host: five times the time of a small stage), and repeats differ. No effect without Linux and
    glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_THRESHOLD, MOST_MAPPED_BYTES) and libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES))
