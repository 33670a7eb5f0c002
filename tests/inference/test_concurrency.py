"""Predictions of many threads, of many processes, and of one process for a long time."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from conftest import small_model

from hase.inference import Predictor, predict
from hase.inference.prediction import sources
from hase.learned.kernels import predictors
from hase.records.kernel_record_files import read_model_records, record_path
from hase.runtimes import flavour_of, local_target
from hase.utils.paths import ROOT, Workspace

pytestmark = pytest.mark.slow

TARGET = local_target("cpu").name
TURNS = 160
ONE_PROCESS = """
import sys
from hase.inference import predict
for name in sys.argv[3:]:
    print(predict(name, target=sys.argv[2], workspace=sys.argv[1]).latency_ms)
"""


@pytest.fixture(scope="module")
def files(trained_workspace: Workspace) -> list[str]:
    """The records of its models."""
    return [str(record_path(trained_workspace, record.flavour, record.model))
            for record in read_model_records(trained_workspace, flavour_of("cpu"))]


@pytest.mark.parametrize("strict", [False, True])
def test_threads_predict_the_same_as_one(strict: bool, trained_workspace: Workspace, files: list[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted_ms(turn: int) -> float:
        return predict(files[turn % len(files)], target=TARGET, workspace=trained_workspace, strict=strict).latency_ms

    alone = [predicted_ms(turn) for turn in range(len(files))]
    monkeypatch.setattr(sources, "KEPT_FILES", 3)  # the caches are emptied all the time
    monkeypatch.setattr(predictors, "REMEMBERED_KERNELS", 4)
    monkeypatch.setattr(predictors, "REMEMBERED_LOADS", 1)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            latencies_ms = list(threads.map(predicted_ms, range(TURNS)))
    finally:
        sys.setswitchinterval(interval_s)
    assert latencies_ms == [alone[turn % len(files)] for turn in range(TURNS)]


def test_processes_predict_the_same_as_one(trained_workspace: Workspace, files: list[str]) -> None:
    alone = [predict(file, target=TARGET, workspace=trained_workspace).latency_ms for file in files[:3]]
    words = [sys.executable, "-c", ONE_PROCESS, str(trained_workspace.root), TARGET, *files[:3]]
    running = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [[float(line) for line in process.communicate()[0].split()] for process in running] == [alone] * 2


def test_many_models_take_one_child() -> None:
    process, predictor, model = psutil.Process(), Predictor(target="nvidia-h200"), small_model()

    def predicted(numbers: range) -> tuple[int, int]:
        """Descriptors of this process, and bytes of its child."""
        for number in numbers:
            model.graph.name = f"m{number}"
            predictor.predict(model)
        (child,) = [child for child in process.children() if "hase.ort_analysis.isolated.worker" in child.cmdline()]
        return process.num_fds(), child.memory_info().rss

    descriptors, child_bytes = predicted(range(20))
    assert predicted(range(20, 60)) == (descriptors, pytest.approx(child_bytes, rel=0.1))
