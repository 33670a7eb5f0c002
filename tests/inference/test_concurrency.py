"""Predictions of many threads, of many processes, and of one process for a long time."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import small_model

from hase.inference import Predictor, predict
from hase.inference.prediction import sources
from hase.learned.kernels import predictors
from hase.records.kernel_record_files import read_model_records
from hase.runtimes import flavour_of, local_target
from hase.utils.paths import ROOT, Workspace

pytestmark = pytest.mark.slow

TARGET = local_target("cpu").name
THREADS, EACH = 8, 20
ONE_PROCESS = """
import sys
from pathlib import Path
from hase.inference import predict
from hase.utils.paths import Workspace
workspace = Workspace(Path(sys.argv[1]))
for name in sys.argv[3:]:
    print(predict(Path(name), target=sys.argv[2], workspace=workspace).latency_ms)
"""


@pytest.fixture(scope="module")
def workspace(trained_workspace: Workspace) -> Workspace:
    return trained_workspace


def record_files(workspace: Workspace) -> list[Path]:
    return sorted(path for path in (workspace.kernel_records / flavour_of("cpu").name).glob("*.json") if path.stem != "index")


@pytest.mark.parametrize("strict", [False, True])
def test_threads_predict_the_same_as_one(strict: bool, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    models = record_files(workspace)
    alone = [predict(model, target=TARGET, workspace=workspace, strict=strict).latency_ms for model in models]
    monkeypatch.setattr(sources, "KEPT_FILES", 3)  # the caches are emptied all the time
    monkeypatch.setattr(predictors, "REMEMBERED_KERNELS", 4)
    monkeypatch.setattr(predictors, "REMEMBERED_LOADS", 1)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            latencies_ms = list(threads.map(lambda turn: predict(models[turn % len(models)], target=TARGET, workspace=workspace,
                                                                 strict=strict).latency_ms, range(THREADS * EACH)))
    finally:
        sys.setswitchinterval(interval_s)
    assert latencies_ms == [alone[turn % len(models)] for turn in range(THREADS * EACH)]


def test_processes_predict_the_same_as_one(workspace: Workspace) -> None:
    models = record_files(workspace)[:3]
    alone = [predict(model, target=TARGET, workspace=workspace).latency_ms for model in models]
    running = [subprocess.Popen([sys.executable, "-c", ONE_PROCESS, str(workspace.root), TARGET, *map(str, models)], cwd=ROOT,
                                stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in running:
        assert [float(line) for line in process.communicate()[0].split()] == alone


def test_many_models_take_one_child(tmp_path: Path) -> None:
    process, predictor = psutil.Process(), Predictor(target="nvidia-h200")

    def predicted(numbers: range) -> tuple[int, int]:
        """Descriptors of this process, and bytes of its child."""
        for number in numbers:
            model = small_model()
            model.graph.name = f"m{number}"
            predictor.predict(model)
        (child,) = [child for child in process.children() if "hase.ort_analysis.isolated.worker" in child.cmdline()]
        return process.num_fds(), child.memory_info().rss

    descriptors, child_bytes = predicted(range(20))
    assert predicted(range(20, 80)) == (descriptors, pytest.approx(child_bytes, rel=0.1))


def test_many_predictions_take_no_more_memory(workspace: Workspace) -> None:
    records = read_model_records(workspace, flavour_of("cpu"))

    def predicted(count: int) -> None:
        for turn in range(count):
            predict(records[turn % len(records)], target=TARGET, workspace=workspace, strict=turn % 2 == 0)

    predicted(200)
    before_bytes = psutil.Process().memory_info().rss
    predicted(2000)
    assert psutil.Process().memory_info().rss - before_bytes < 10 << 20
