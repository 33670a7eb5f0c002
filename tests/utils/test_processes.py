"""Work in separate processes, one of which may crash."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crashing import crashes_at

from hase.inference.evaluation.models import Failures, models_in_files
from hase.ort_analysis.isolated.analysis import analyze_all
from hase.ort_analysis.isolated.messages import AnalysisReply, AnalysisTask
from hase.runtimes import local_flavour
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace
from hase.utils.processes import WorkerFailed, WorkerProcess, map_in_processes
from tests.conftest import small_model


@pytest.mark.slow
def test_a_crash_costs_only_one_item() -> None:
    assert map_in_processes(crashes_at, range(4), 2, operator.neg, "working") == [0, -1, 20, 30]


CHILD = """
import time
from hase.utils.processes import begin_child
from hase.utils.files import temporary_folder
begin_child()
try:
    with temporary_folder() as folder:
        print(folder, flush=True)
        while True:
            time.sleep(0.01)
except BaseException as error:
    print("raised", error, flush=True)
"""


def test_a_child_that_is_asked_to_end_raises_nothing(tmp_path: Path) -> None:
    """C++ code that calls Python, like that of onnx, ends the process with a message if an error comes out of Python."""
    with subprocess.Popen([sys.executable, "-c", CHILD], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp_path
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="pipes that break")
def test_a_worker_whose_parent_has_gone_ends_without_a_traceback() -> None:
    """Its parent ended before it could ask to end with it; a request waits in its pipe."""
    program = ("from hase.utils import processes; processes.die_with_parent = lambda: None; "
               "processes.serve_lines(lambda line: 'reply')")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, input=b"request\n", stdout=writing,
                              stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def asked_or_dead(worker: WorkerProcess[AnalysisTask, AnalysisReply], task: AnalysisTask) -> AnalysisReply:
    """Asks the child that analyses models, which dies at a model named `dies`."""
    if task.model.stem == "dies":
        worker.stop()
        raise WorkerFailed("crashed", "the process that ran it ended with SIGSEGV", signal.SIGSEGV)
    worker._send(task)
    return worker._receive()


@pytest.mark.slow
def test_folder_runs_survive_a_crash(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [workspace.root / f"{name}.onnx" for name in ("a", "b", "dies", "z")]
    for path in paths:
        path.write_bytes(small_model().SerializeToString())
    monkeypatch.setattr(WorkerProcess, "ask", asked_or_dead)
    done = analyze_all(workspace, "ort", [(path, {}) for path in paths], "cpu", 3)
    assert [isinstance(of_model, UserError) for of_model in done] == [False, False, True, False]
    assert "takes ONNX Runtime down" in str(done[2])
    failures = Failures()
    assert [model.record.model for model in models_in_files(paths, {}, local_flavour("cpu"), failures)] == ["a", "b", "z"]
    assert list(failures) == ["dies.onnx"]
