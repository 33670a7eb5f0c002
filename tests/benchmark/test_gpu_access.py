"""Processes that share one GPU: any number prepare at the same time, one measures alone."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from hase.benchmark.collecting.units import Tracers
from hase.benchmark.measuring import gpu_trace
from hase.runtimes.protocol import Worker

pytestmark = pytest.mark.measuring

ROUNDS, WORKERS = 3, 3


def _take_turns(folder: str, out: Any) -> None:
    for _ in range(ROUNDS):
        with gpu_trace.preparing_on_gpu(folder):
            began = time.monotonic()
            time.sleep(0.03)
            out.put(("preparing", began, time.monotonic()))
        with gpu_trace.alone_on_gpu(folder):
            began = time.monotonic()
            time.sleep(0.01)
            out.put(("alone", began, time.monotonic()))


@pytest.mark.slow
def test_one_process_measures_alone_and_none_starves(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    out: Any = context.Queue()
    workers = [context.Process(target=_take_turns, args=(str(tmp_path), out)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    spans = [out.get(timeout=60) for _ in range(2 * ROUNDS * WORKERS)]
    for worker in workers:
        worker.join(10)
        assert worker.exitcode == 0
    alone = [span for span in spans if span[0] == "alone"]
    assert len(alone) == ROUNDS * WORKERS
    for span in alone:
        assert not [overlap for overlap in spans if overlap is not span and overlap[1] < span[2] and span[1] < overlap[2]]


def _work(worker: Worker) -> int:
    time.sleep(0.05)
    return id(worker)


def test_tasks_share_the_workers() -> None:
    with Tracers(2, 10.0) as tracers:
        assert Path(tracers.turns).is_dir()
        used = tracers.each([_work] * 6)
        assert len(used) == 6
        assert len(set(used)) == 2
    assert not Path(tracers.turns).exists()
    with Tracers(1, 10.0) as tracers, gpu_trace.preparing_on_gpu(tracers.turns), gpu_trace.alone_on_gpu(tracers.turns):
        assert tracers.turns == ""  # a single worker needs no locks
