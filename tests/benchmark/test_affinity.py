"""The thread that is timed keeps off the cores that other threads are pinned to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import small_model

from hase.benchmark.measuring.quiet_host import free_cores, off_the_workers_cores
from hase.utils.paths import ROOT

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


BESIDE_A_WORKER = """
import os, threading
from hase.benchmark.measuring.quiet_host import free_cores, off_the_workers_cores

cores = os.sched_getaffinity(0)
ready, done = threading.Event(), threading.Event()

def pinned():  # as ONNX Runtime pins its workers
    os.sched_setaffinity(0, {max(cores)})
    ready.set()
    done.wait(30)

threading.Thread(target=pinned).start()
ready.wait(10)
try:
    assert free_cores() == cores - {max(cores)}
    with off_the_workers_cores("cuda"):
        assert os.sched_getaffinity(0) == cores  # the only free core would be the same for processes on several GPUs
    with off_the_workers_cores("cpu"):
        assert os.sched_getaffinity(0) == free_cores() == cores - {max(cores)}
    assert os.sched_getaffinity(0) == cores
    try:
        with off_the_workers_cores("cpu"):
            raise KeyError
    except KeyError:
        print(os.sched_getaffinity(0) == cores)
finally:
    done.set()
"""


@pytest.mark.slow
def test_off_the_core_of_a_pinned_thread_and_back_again_also_after_an_error() -> None:
    """In a process of its own: this one may hold sessions whose workers are pinned, too."""
    done = subprocess.run([sys.executable, "-c", BESIDE_A_WORKER], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_nowhere_to_go_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert free_cores() == set()
    with off_the_workers_cores("cpu"):
        pass


PINNED = """
import os, sys
from pathlib import Path
from hase.runtimes import local_target
from hase.utils.ort_sessions import open_session
session = open_session(Path(sys.argv[1]), "cpu")
print(local_target("cpu").threads, {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")})
"""


@pytest.mark.slow
def test_a_process_that_may_use_one_core_measures_with_one_thread_there(tmp_path: Path) -> None:
    """ONNX Runtime, left to itself, would start a thread on another core."""
    (tmp_path / "net.onnx").write_bytes(small_model().SerializeToString())
    core = min(CORES)
    done = subprocess.run([sys.executable, "-c", PINNED, tmp_path / "net.onnx"], cwd=ROOT, capture_output=True, text=True,
                          preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    assert done.stdout == f"1 {{frozenset({{{core}}})}}\n", done.stderr
