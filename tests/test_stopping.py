"""Ctrl-C and SIGTERM, sent to real scripts at work: they end within a second, say so in a line, and leave no temporary file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from conftest import build_workspace, small_model
from onnx import TensorProto, helper, numpy_helper

from utils.paths import ROOT, Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow]

SIDE = 1536
PRODUCTS = 60  # of constants, which ORT works out while it optimises: seconds in C++
COLLECTOR = """
levels: [0.0, 0.5]
stress: {settle_s: 5}
window_s: 0.2
patience_s: 0
attempts: 1
block_kernels: 2
kernel: {warmup: 1, budget_s: 0.01, least_runs: 3, most_runs: 10}
model: {warmup: 1, budget_s: 0.05, least_runs: 4, most_runs: 50}
"""
MADE_BY_RUNTIME = {".ses"}  # ONNX Runtime's own, some bytes
WITHIN_S = 15.0  # a second where nothing else runs
KEPT = "stopped; what was measured is kept: run again to go on"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes ONNX Runtime seconds to optimise."""
    weight = np.eye(SIDE, dtype=np.float32)
    nodes = [helper.make_node("MatMul", [f"p{n}" if n else "w", "w"], [f"p{n + 1}"]) for n in range(PRODUCTS)]
    nodes.append(helper.make_node("MatMul", ["x", f"p{PRODUCTS}"], ["y"]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, SIDE]) for name in "xy"]
    graph = helper.make_graph(nodes, "slow", values[:1], values[1:], [numpy_helper.from_array(weight, "w")])
    path = tmp_path_factory.mktemp("slow") / "slow.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def stop(command: list[str | Path], temporary: Path, when: Callable[[subprocess.Popen[str]], bool], number: signal.Signals,
         group: bool = False) -> str:
    """What a command said that was stopped by the signal `number` once `when` was true; it ended in time and left nothing.

    Args:
        temporary: the folder of its temporary files.
        group: the signal goes to all of its process group, as Ctrl-C in a terminal does.
    """
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=os.environ | {"TMPDIR": str(temporary)},
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not when(process):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        family = psutil.Process(process.pid).children(recursive=True)
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        process.wait(WITHIN_S)
        _, left = psutil.wait_procs(family, 2)
        said = process.communicate(timeout=5)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + number, said
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]  # which only their new parent can remove
    assert {path.name for path in temporary.rglob("*")} <= MADE_BY_RUNTIME
    return said


def works(temporary: Path, for_s: float = 0.3) -> Callable[[subprocess.Popen[str]], bool]:
    """Whether a file has been in a temporary folder of the process for some time."""
    seen: list[float] = []

    def there(process: subprocess.Popen[str]) -> bool:
        if not seen and any(temporary.glob("hase-temp-*")):
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] > for_s

    return there


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_a_large_model_is_optimised(slow: Path, tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "t"
    assert stop(["ort_analysis/ort_graph_parser.py", "--workspace", tmp_path, "--model", slow], folder, works(folder),
                number) == "stopped\n"


def test_processes_side_by_side(slow: Path, tmp_path: Path) -> None:
    folder = tmp_path / "t"

    def both_work(process: subprocess.Popen[str]) -> bool:
        return len(list(folder.glob("hase-temp-*/hase-temp-*"))) == 2

    said = stop(["ort_analysis/fusion_detector.py", "--workspace", tmp_path, "--jobs", "2", "--model", slow, "--model", slow],
                folder, both_work, signal.SIGINT, group=True)
    assert said.splitlines()[0] == "stopped"
    assert "Traceback" not in said


def test_a_collection_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Stopped while it measures idle, and then while its stressor runs."""
    workspace = Workspace(tmp_path)
    build_workspace(workspace, {"small": small_model()})
    (tmp_path / "collector.yaml").write_text(COLLECTOR)
    folder = tmp_path / "t"

    def lines() -> list[str]:
        return [text for path in workspace.dataset("").glob("*/measurements.jsonl") for text in path.read_text().splitlines()]

    def stressed(process: subprocess.Popen[str]) -> bool:
        with suppress(psutil.Error):  # a child has ended
            return any("stressor.py" in " ".join(child.cmdline()) for child in psutil.Process(process.pid).children())
        return False

    command: list[str | Path] = ["benchmark/collector.py", "--workspace", tmp_path, "--config", tmp_path / "collector.yaml",
                                 "--quiet"]
    said = stop(command, folder, lambda _: len(lines()) >= 1, signal.SIGTERM)
    assert said.splitlines()[-1] == KEPT
    before = lines()
    said = stop(command, folder, stressed, signal.SIGINT, group=True)
    assert said.splitlines()[-1] == KEPT
    assert "Traceback" not in said
    assert lines()[:len(before)] == before


def test_an_export(tmp_path: Path) -> None:
    folder = tmp_path / "t"

    def exports(process: subprocess.Popen[str]) -> bool:
        return any(child.memory_info().rss > 3e8 for child in psutil.Process(process.pid).children())  # torch is loaded

    said = stop(["model_zoo/torchvision_exporter.py", "--workspace", tmp_path / "new", "--model", "resnet18", "--image-size",
                 "64", "--device", "cpu"], folder, exports, signal.SIGTERM)
    assert said.splitlines()[-1] == "stopped; what was exported is kept: run again to go on"
    assert not list((tmp_path / "new").rglob("*.tmp*"))
