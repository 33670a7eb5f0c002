"""Ctrl-C and SIGTERM, sent to real scripts at work: they end within a second, print one line, and leave no temporary file."""

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

from hase.utils.paths import ROOT, Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow]

SIDE, PRODUCTS = 1536, 60  # of constants
COLLECTOR = """
levels: [0.0, 0.5]
stress: {settle_s: 5}
window_s: 0.2
patience_s: 0
attempts: 1
block_kernels: 2
kernel: {warmup: 1, warmup_s: 0.0, budget_s: 0.01, least_runs: 3, most_runs: 10}
model: {warmup: 1, warmup_s: 0.0, budget_s: 0.05, least_runs: 4, most_runs: 50}
"""
MADE_BY_RUNTIME = {".ses"}  # ONNX Runtime's files, some bytes
WITHIN_S = 15.0  # a second where nothing else runs
KEPT = "stopped; what was measured is kept: run again to go on"


def stop(command: list[str | Path], temporary: Path, when: Callable[[psutil.Process], bool],
         number: signal.Signals) -> list[str]:
    """Stops a command by signal `number` once `when` is true and returns the lines of its stderr. It must end in time and leave
    no files in `temporary`, its folder for them. SIGINT goes to all of its process group, as Ctrl-C in a terminal does."""
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=os.environ | {"TMPDIR": str(temporary)},
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not when(psutil.Process(process.pid)):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        family = psutil.Process(process.pid).children(recursive=True)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        process.wait(WITHIN_S)
        _, alive = psutil.wait_procs(family, 2)
        stderr = process.communicate(timeout=5)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]  # only their new parent can remove zombies
    assert {path.name for path in temporary.rglob("*")} <= MADE_BY_RUNTIME
    return stderr.splitlines()


def test_while_large_models_are_optimised(tmp_path: Path) -> None:
    """By one process, and by several. ONNX Runtime takes seconds to optimise the model, in C++: it computes these products."""
    nodes = [helper.make_node("MatMul", [f"p{n}" if n else "w", "w"], [f"p{n + 1}"]) for n in range(PRODUCTS)]
    nodes.append(helper.make_node("MatMul", ["x", f"p{PRODUCTS}"], ["y"]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, SIDE]) for name in "xy"]
    weight = numpy_helper.from_array(np.eye(SIDE, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "slow", values[:1], values[1:], [weight])
    folder, slow = tmp_path / "t", tmp_path / "slow.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), slow)

    def works(_: psutil.Process) -> bool:
        """A file has been in the temporary folder for some time."""
        return any(time.time() - path.stat().st_mtime > 0.3 for path in folder.glob("hase-temp-*"))

    assert stop(["ort_analysis/ort_graph_parser.py", "--workspace", tmp_path, "--model", slow], folder, works,
                signal.SIGTERM) == ["stopped"]
    lines = stop(["ort_analysis/fusion_detector.py", "--workspace", tmp_path, "--jobs", "2", "--model", slow, "--model", slow],
                 folder, lambda _: len(list(folder.glob("hase-temp-*/hase-temp-*"))) == 2, signal.SIGINT)
    assert lines[0] == "stopped"


def test_a_collection_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Stopped while it measures the idle device, and then while its stressor runs."""
    workspace = Workspace(tmp_path)
    build_workspace(workspace, {"small": small_model()})
    (tmp_path / "collector.yaml").write_text(COLLECTOR)
    folder = tmp_path / "t"

    def lines() -> list[str]:
        return [text for path in workspace.dataset("").glob("*/measurements.jsonl") for text in path.read_text().splitlines()]

    def stressed(process: psutil.Process) -> bool:
        with suppress(psutil.Error):  # a child has ended
            return any("stressor.py" in " ".join(child.cmdline()) for child in process.children())
        return False

    command: list[str | Path] = ["benchmark/collector.py", "--workspace", tmp_path, "--config", tmp_path / "collector.yaml",
                                 "--quiet"]
    assert stop(command, folder, lambda _: len(lines()) >= 1, signal.SIGTERM)[-1] == KEPT
    before = lines()
    assert stop(command, folder, stressed, signal.SIGINT)[-1] == KEPT
    assert lines()[:len(before)] == before


def test_an_export(tmp_path: Path) -> None:
    said = stop(["model_zoo/torchvision_exporter.py", "--workspace", tmp_path / "new", "--model", "resnet18", "--image-size",
                 "64", "--device", "cpu"], tmp_path / "t",
                lambda process: any(child.memory_info().rss > 3e8 for child in process.children()),  # torch is loaded
                signal.SIGTERM)
    assert said[-1] == "stopped; what was exported is kept: run again to go on"
    assert not list((tmp_path / "new").rglob("*.tmp*"))
