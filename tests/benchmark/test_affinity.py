"""The thread that is timed keeps off the cores that other threads are pinned to."""

from __future__ import annotations

import os
import threading

import pytest

from measuring.quiet_host import free_cores, off_the_workers_cores

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.fixture
def pinned() -> object:
    """A second thread pinned to the last core, as ONNX Runtime pins its workers."""
    ready, done = threading.Event(), threading.Event()

    def sit() -> None:
        os.sched_setaffinity(0, {max(CORES)})
        ready.set()
        done.wait(30)

    thread = threading.Thread(target=sit)
    thread.start()
    ready.wait(10)
    yield thread
    done.set()
    thread.join()


@pytest.mark.usefixtures("pinned")
def test_off_the_core_of_a_pinned_thread_and_back_again() -> None:
    assert max(CORES) not in free_cores()
    with off_the_workers_cores():
        assert os.sched_getaffinity(0) == free_cores() <= CORES - {max(CORES)}
    assert os.sched_getaffinity(0) == CORES


@pytest.mark.usefixtures("pinned")
def test_back_again_after_an_error() -> None:
    with pytest.raises(KeyError), off_the_workers_cores():
        raise KeyError
    assert os.sched_getaffinity(0) == CORES


def test_nowhere_to_go_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert free_cores() == set()
    with off_the_workers_cores():
        pass
