"""The work with which the stressor keeps a device busy for a share of the time.

Work is cut into bursts so that it ends on time, on a GPU at most one burst late.
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

from hase.benchmark.ort.runner import device_binding, open_runner, queue_run, random_feed
from hase.ort_analysis.graph.source import default_dims, open_dims
from hase.records.measurement import Background
from hase.utils.errors import UserError
from hase.utils.lazy import onnx, torch
from hase.utils.ort_sessions import model_errors
from hase.utils.processes import die_with_parent
from hase.utils.timing import pause, time_runs_ms

AHEAD_S = 8e-3  # how much work a deep queue holds
BurstStep = Callable[[], object]


class BurstWork:
    """Work in bursts; `burst` returns when one is finished."""

    def __init__(self, burst: BurstStep) -> None:
        self.burst = burst

    def queued_s(self) -> float:
        """How long the queued work will still take."""
        return 0.0

    def drain(self) -> None:
        """Waits until the queued work is done."""


class GpuEvent(Protocol):
    """A mark in a GPU's queue, like torch's CUDA event."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class QueuedBursts(BurstWork):
    """Bursts in a queue that holds AHEAD_S of work. `launch` queues a burst, which takes `burst_s`; `mark` queues an event."""

    def __init__(self, launch: BurstStep, mark: Callable[[], GpuEvent], burst_s: float) -> None:
        super().__init__(self._queue_one)
        self._launch, self._mark, self._burst_s = launch, mark, burst_s
        self._depth = max(2, round(AHEAD_S / burst_s))  # at least one that runs, and one that waits
        self._ends: deque[GpuEvent] = deque()  # of the bursts in the queue

    def _queue_one(self) -> None:
        if len(self._ends) == self._depth:
            self._ends.popleft().synchronize()
        self._launch()
        self._ends.append(self._mark())

    def queued_s(self) -> float:
        while self._ends and self._ends[0].query():
            self._ends.popleft()
        return len(self._ends) * self._burst_s

    def drain(self) -> None:
        if self._ends:
            self._ends[-1].synchronize()
            self._ends.clear()


def alternate(compute: BurstStep, memory: BurstStep, kind: str) -> BurstStep:
    """A step that does the work of a background's kind: `mixed` takes compute and memory in turn."""
    turns = itertools.cycle({"compute": (compute,), "memory": (memory,), "mixed": (compute, memory)}[kind])
    return lambda: next(turns)()


def cpu_step(background: Background) -> BurstStep:
    """A step on a CPU core: a run of the model; or, for tens of microseconds, a product in the cache or a copy beyond it."""
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


def cuda_work(background: Background) -> BurstWork:
    """Work on the GPU in bursts: products, copies within its memory, or runs of a model."""
    stream = torch.cuda.Stream()
    launch = model_run(background, stream.cuda_stream) if background.model else cuda_burst(background, stream)

    def mark() -> GpuEvent:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    return queued_work(background, launch, mark, torch.cuda.synchronize)


def queued_work(background: Background, launch: BurstStep, mark: Callable[[], GpuEvent], wait: BurstStep) -> BurstWork:
    """Bursts as work with the background's kind of queue: deep, or awaited one by one. `wait` waits for all that is queued."""
    def awaited() -> None:
        launch()
        wait()

    awaited()  # the first one allocates memory and chooses algorithms
    return QueuedBursts(launch, mark, fastest_s(awaited)) if background.queue == "deep" else BurstWork(awaited)


def cuda_burst(background: Background, stream: torch.cuda.Stream) -> BurstStep:
    """A step that queues products or copies on the stream for about `burst_ms`."""
    product = torch.ones(2048, 2048, device="cuda")
    source, sink = (torch.ones(16 << 20, device="cuda") for _ in range(2))  # 64 MiB each: beyond any cache
    stream.wait_stream(torch.cuda.current_stream())  # which fills the tensors

    def repeated(work: BurstStep) -> BurstStep:
        def repeat(count: int) -> None:
            with torch.cuda.stream(stream):
                for _ in range(count):
                    work()

        def awaited() -> None:
            repeat(1)
            stream.synchronize()

        count = max(1, round(background.burst_ms / 1e3 / fastest_s(awaited)))
        return lambda: repeat(count)

    return alternate(repeated(lambda: torch.mm(product, product)), repeated(lambda: sink.copy_(source)), background.kind)


def model_run(background: Background, stream: int) -> BurstStep:
    """A step that queues a run of the background's model on a CUDA stream, with its tensors on the GPU."""
    if background.model is None:
        raise RuntimeError(f"background {background.name} has no model")
    runner = open_runner(background.model, "cuda", dims=model_dims(background), static=True,
                         provider_options={"user_compute_stream": str(stream)})
    runner.warm_up(1)
    return queue_run(runner.session, device_binding(runner.session, random_feed(runner.session), "cuda"))


def model_dims(background: Background) -> dict[str, int]:
    """Sizes of the dynamic dimensions of the background's model: as given, else as the file suggests, else 1."""
    with model_errors(str(background.model)):
        proto = onnx.load(str(background.model), load_external_data=False)
    suggested = default_dims(proto, str(background.model))  # may name dimensions that the model does not have
    return {name: suggested.get(name, 1) for name in open_dims(proto)} | background.dims


def fastest_s(work: BurstStep) -> float:
    """The shortest of five timings, in seconds."""
    return 1e-3 * min(time_runs_ms(work, 5))


def bursts(work: BurstWork, intensity: float, period_s: float, offset_s: float = 0.0) -> Iterator[float]:
    """Runs bursts for the share `intensity` of every period and sleeps for the rest; yields the busy seconds of each period.

    At 1 the queue is never empty; below, only work that ends within the share is queued. Periods start at multiples of
    `period_s` on the monotonic clock, plus `offset_s`, so a late wake-up does not delay later ones.
    """
    def next_period_s(after_s: float) -> float:
        return math.ceil((after_s - offset_s) / period_s) * period_s + offset_s

    steady = intensity >= 1.0
    start_s = next_period_s(time.monotonic())
    while True:
        pause(start_s - time.monotonic())
        began_s = now_s = time.monotonic()
        end_s = start_s + intensity * period_s
        while now_s + (0.0 if steady else work.queued_s()) < end_s:
            work.burst()
            now_s = time.monotonic()
        if not steady:
            work.drain()
            now_s = time.monotonic()
        yield now_s - began_s
        start_s += period_s
        if now_s > start_s + period_s:  # after a suspend or an overload: do not catch up
            start_s = next_period_s(now_s)


def burn_core(background: Background, intensity: float, offset_s: float, ready: Connection) -> None:
    """Keeps one core busy, as a process of the CPU stressor, until its parent ends. Sends one message through `ready`: "", or
    why it can't work."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole process group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # the parent ended before this process asked to end with it
        return
    try:
        step = cpu_step(background)
        step()
    except UserError as error:
        ready.send(str(error))
        return
    ready.send("")
    for _ in bursts(BurstWork(step), intensity, background.period_ms / 1e3, offset_s):
        if os.getppid() != parent.pid:
            return
