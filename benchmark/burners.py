"""The work that the stressor burns a device with, and the clock that cuts it to a share of the time.

A burst is a run of short steps, so that it ends close to its time: a fraction of a millisecond late at most.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from utils.processes import die_with_parent

KINDS = ("compute", "copy", "mixed")
STEP_SECONDS = 5e-4  # of a GPU step between two synchronisations
Step = Callable[[], object]


def alternate(compute: Step, copy: Step, kind: str) -> Step:
    """One step of `kind`; mixed takes turns."""
    turns = itertools.cycle({"compute": (compute,), "copy": (copy,), "mixed": (compute, copy)}[kind])
    return lambda: next(turns)()


def cpu_step(kind: str) -> Step:
    """A step of tens of microseconds on one core: a product that fits the cache, or a copy that does not."""
    import numpy as np

    side, block = 128, 1 << 20
    left, right, product = (np.full((side, side), 1e-3, dtype=np.float32) for _ in range(3))
    source, sink = np.ones((16, block), dtype=np.uint8), np.zeros((16, block), dtype=np.uint8)  # 2 × 16 MiB, in turn
    rows = itertools.cycle(range(len(source)))

    def copy() -> None:
        row = next(rows)
        np.copyto(sink[row], source[row])

    return alternate(lambda: np.matmul(left, right, out=product), copy, kind)


def cuda_step(kind: str) -> Step:
    """A step of about STEP_SECONDS on the GPU, ended by a synchronisation: products, or copies within its memory."""
    import torch

    product = torch.ones(2048, 2048, device="cuda")
    source, sink = (torch.ones(16 << 20, device="cuda") for _ in range(2))  # 64 MiB each: beyond any cache

    def repeated(work: Step) -> Step:
        """`work` as often as fills a step, by the fastest of five timings."""
        times_s = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times_s.append(time.perf_counter() - began)
        count = max(1, round(STEP_SECONDS / min(times_s)))

        def step() -> None:
            for _ in range(count):
                work()
            torch.cuda.synchronize()

        return step

    return alternate(repeated(lambda: torch.mm(product, product)), repeated(lambda: sink.copy_(source)), kind)


def bursts(step: Step, intensity: float, period_s: float, offset_s: float = 0.0) -> Iterator[float]:
    """Runs steps for `intensity` of every period and sleeps through the rest, for ever; yields the seconds burnt.

    Periods are anchored to the monotonic clock, `offset_s` late: a late wake-up shifts no later burst.
    """
    beginning = math.ceil((time.monotonic() - offset_s) / period_s) * period_s + offset_s
    while True:
        time.sleep(max(0.0, beginning - time.monotonic()))
        began = now = time.monotonic()
        while now < beginning + intensity * period_s:
            step()
            now = time.monotonic()
        yield now - began
        beginning += period_s
        if now > beginning + period_s:  # the machine slept or was overloaded: do not catch up
            beginning = math.ceil((now - offset_s) / period_s) * period_s + offset_s


def burn_core(kind: str, intensity: float, period_s: float, offset_s: float, ready: Connection) -> None:
    """What a worker process of the CPU stressor does until its parent ends it or ends itself."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    parent = multiprocessing.parent_process()
    step = cpu_step(kind)
    step()
    ready.send(True)
    for _ in bursts(step, intensity, period_s, offset_s):
        if parent is None or os.getppid() != parent.pid:
            return
