"""The thread that is timed keeps off the cores that other threads are pinned to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import small_model

from measuring.quiet_host import free_cores, off_the_workers_cores
from utils.paths import ROOT

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


PINNED = """
import os, sys
from pathlib import Path
from runtimes import local_target
from utils.ort_sessions import open_session
session = open_session(Path(sys.argv[1]), "cpu")
print(local_target("cpu").threads, {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")})
"""


def test_a_process_that_may_use_one_core_measures_with_one_thread_there(tmp_path: Path) -> None:
    """ONNX Runtime, left to itself, would start a thread on another core."""
    (tmp_path / "net.onnx").write_bytes(small_model().SerializeToString())
    core = min(CORES)
    done = subprocess.run([sys.executable, "-c", PINNED, tmp_path / "net.onnx"], cwd=ROOT, capture_output=True, text=True,
                          preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    assert done.stdout == f"1 {{frozenset({{{core}}})}}\n", done.stderr
