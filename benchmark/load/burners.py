"""The work that the stressor burns a device with, and the clock that cuts it to a share of the time.

Work goes in bursts, so that it ends close to its time: on a GPU a burst late at most.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np

from benchmark.load.backgrounds import Background
from benchmark.runtimes.ort.runner import device_binding, open_runner, queue_run, random_feed
from ort_analysis.graph.source import default_dims, open_dims
from utils.errors import UserError
from utils.lazy import onnx, torch
from utils.ort_sessions import model_errors
from utils.processes import die_with_parent

AHEAD_S = 8e-3  # how far ahead of the GPU a deep queue is filled
Step = Callable[[], object]


class Work:
    """Work in bursts, each over when `burst` returns."""

    def __init__(self, burst: Step) -> None:
        self.burst = burst

    def ahead_s(self) -> float:
        """How long what is queued will still take."""
        return 0.0

    def run_dry(self) -> None:
        """Waits for what is queued."""


class Event(Protocol):
    """A mark in a GPU's queue, as torch's CUDA events are."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class QueuedWork(Work):
    """Bursts that are queued up to AHEAD_S ahead of the GPU; `burst` waits only for room in the queue.

    Args:
        launch: queues a burst.
        mark: puts an event behind what is queued.
        burst_s: what a burst takes an idle GPU.
    """

    def __init__(self, launch: Step, mark: Callable[[], Event], burst_s: float) -> None:
        super().__init__(self._queue_one)
        self._launch, self._mark, self._burst_s = launch, mark, burst_s
        self._depth = max(2, round(AHEAD_S / burst_s))  # one that runs, and one behind it
        self._ends: deque[Event] = deque()  # of the bursts in the queue

    def _queue_one(self) -> None:
        if len(self._ends) == self._depth:
            self._ends.popleft().synchronize()
        self._launch()
        self._ends.append(self._mark())

    def ahead_s(self) -> float:
        while self._ends and self._ends[0].query():
            self._ends.popleft()
        return len(self._ends) * self._burst_s

    def run_dry(self) -> None:
        if self._ends:
            self._ends[-1].synchronize()
            self._ends.clear()


def alternate(compute: Step, memory: Step, kind: str) -> Step:
    """One step of `kind`; mixed takes turns."""
    turns = itertools.cycle({"compute": (compute,), "memory": (memory,), "mixed": (compute, memory)}[kind])
    return lambda: next(turns)()


def cpu_step(background: Background) -> Step:
    """A run of its model, or a step of tens of microseconds on one core: a product that fits the cache, or a copy that does
    not.

    Raises:
        UserError: the model can't be run.
    """
    if background.model:
        runner = open_runner(background.model, "cpu", dims=model_dims(background), static=True)
        runner.warm_up(1)
        return runner.run_once
    side, block = 128, 1 << 20
    left, right, product = (np.full((side, side), 1e-3, dtype=np.float32) for _ in range(3))
    source, sink = np.ones((16, block), dtype=np.uint8), np.zeros((16, block), dtype=np.uint8)  # 2 × 16 MiB, in turn
    rows = itertools.cycle(range(len(source)))

    def copy() -> None:
        row = next(rows)
        np.copyto(sink[row], source[row])

    return alternate(lambda: np.matmul(left, right, out=product), copy, background.kind)


def cuda_work(background: Background) -> Work:
    """Bursts on the GPU: products, copies within its memory, or runs of a model.

    Raises:
        UserError: the model can't be run.
    """
    stream = torch.cuda.Stream()
    launch = model_run(background, stream.cuda_stream) if background.model else cuda_burst(background, stream)

    def mark() -> Event:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    return as_work(background, launch, mark, torch.cuda.synchronize)


def as_work(background: Background, launch: Step, mark: Callable[[], Event], wait: Step) -> Work:
    """What `launch` queues, as work that keeps the background's queue.

    Args:
        launch, mark: see QueuedWork.
        wait: waits for what is queued.
    """
    def awaited() -> None:
        launch()
        wait()

    awaited()  # the first allocates, and chooses algorithms
    return QueuedWork(launch, mark, fastest_s(awaited)) if background.queue == "deep" else Work(awaited)


def cuda_burst(background: Background, stream: torch.cuda.Stream) -> Step:
    """Queues a burst of products or copies on the stream: as many as take about `burst_ms`."""
    product = torch.ones(2048, 2048, device="cuda")
    source, sink = (torch.ones(16 << 20, device="cuda") for _ in range(2))  # 64 MiB each: beyond any cache
    stream.wait_stream(torch.cuda.current_stream())  # which fills them

    def repeated(work: Step) -> Step:
        def times(count: int) -> None:
            with torch.cuda.stream(stream):
                for _ in range(count):
                    work()

        def awaited() -> None:
            times(1)
            stream.synchronize()

        count = max(1, round(background.burst_ms / 1e3 / fastest_s(awaited)))
        return lambda: times(count)

    return alternate(repeated(lambda: torch.mm(product, product)), repeated(lambda: sink.copy_(source)), background.kind)


def model_run(background: Background, stream: int) -> Step:
    """Queues a run of the background's model on a CUDA stream, its tensors on the GPU, through ONNX Runtime.

    Raises:
        UserError: the model can't be run.
    """
    if background.model is None:
        raise RuntimeError(f"background {background.name} has no model")
    runner = open_runner(background.model, "cuda", dims=model_dims(background), static=True,
                         provider_options={"user_compute_stream": str(stream)})
    runner.warm_up(1)
    return queue_run(runner.session, device_binding(runner.session, random_feed(runner.session), "cuda"))


def model_dims(background: Background) -> dict[str, int]:
    """The sizes of the dynamic dimensions of its model: as given, else as the file suggests, else 1.

    Raises:
        UserError: no ONNX model.
    """
    with model_errors(str(background.model)):
        proto = onnx.load(str(background.model), load_external_data=False)
    suggested = default_dims(proto)  # it may name dimensions that this model has not
    return {name: suggested.get(name, 1) for name in open_dims(proto)} | background.dims


def fastest_s(work: Step) -> float:
    """The shortest of five timings, in seconds."""
    times_s = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began)
    return min(times_s)


def bursts(work: Work, intensity: float, period_s: float, offset_s: float = 0.0) -> Iterator[float]:
    """Runs bursts for `intensity` of every period and sleeps through the rest, for ever; yields the seconds burnt.

    Below 1 no more is queued than is over at the end of the share, and that is waited for; at 1 a queue never runs dry.
    Periods are anchored to the monotonic clock, `offset_s` late: a late wake-up shifts no later share.
    """
    steady = intensity >= 1.0
    beginning = math.ceil((time.monotonic() - offset_s) / period_s) * period_s + offset_s
    while True:
        time.sleep(max(0.0, beginning - time.monotonic()))
        began = now = time.monotonic()
        end = beginning + intensity * period_s
        while now + (0.0 if steady else work.ahead_s()) < end:
            work.burst()
            now = time.monotonic()
        if not steady:
            work.run_dry()
            now = time.monotonic()
        yield now - began
        beginning += period_s
        if now > beginning + period_s:  # the machine slept or was overloaded: do not catch up
            beginning = math.ceil((now - offset_s) / period_s) * period_s + offset_s


def burn_core(background: Background, intensity: float, offset_s: float, ready: Connection) -> None:
    """What a worker process of the CPU stressor does until its parent ends it or ends itself.

    Tells `ready` once, "" or why it can't.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # killed before this process could ask to die with it
        return
    try:
        step = cpu_step(background)
        step()
    except UserError as error:
        ready.send(str(error))
        return
    ready.send("")
    for _ in bursts(Work(step), intensity, background.period_ms / 1e3, offset_s):
        if os.getppid() != parent.pid:
            return
