"""Every script: runs from the repository's root and shows its help with an example, without delay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipes.commands_page import all_commands
from utils.paths import ROOT

pytestmark = pytest.mark.slow

HEAVY = ("torch", "torchvision", "onnx", "onnxruntime", "sklearn", "xgboost", "pandas", "matplotlib", "scipy", "networkx")
FORBID = f"""
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise RuntimeError("heavy import before it is needed: " + name)

sys.meta_path.insert(0, Forbid())
"""
SCRIPTS = sorted(command.path for commands in all_commands().values() for command in commands)


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """`--help` of every script, in an interpreter that refuses heavy imports."""
    folder = tmp_path_factory.mktemp("forbid")
    (folder / "sitecustomize.py").write_text(FORBID)
    environment = os.environ | {"PYTHONPATH": str(folder)}

    def ask(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, script, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SCRIPTS, pool.map(ask, SCRIPTS), strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str, helped: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = helped[script]
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workspace" in done.stdout
    examples = done.stdout.partition("examples:")[2]
    assert f"python {script}" in examples


def test_the_plans_scripts_are_all_there() -> None:
    assert set(SCRIPTS) >= {
        "model_zoo/torchvision_exporter.py", "ort_analysis/ort_graph_parser.py", "ort_analysis/fusion_detector.py",
        "kernel_model/kernel_builder.py", "benchmark/ort_kernel_runner.py", "benchmark/stressor.py",
        "benchmark/collector.py", "training/train_kernel_model.py", "graph_model/dag_critical_path.py",
        "overlap_simulator.py", "inference/predict_model_latency.py", "evaluator.py"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_examples_use_options_that_exist(script: str, helped: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """The help names every option that the examples use."""
    done = helped[script]
    options = {word for line in done.stdout.partition("examples:")[2].splitlines() if f"python {script}" in line
               for word in line.split() if word.startswith("--")}
    described = done.stdout.partition("options:")[2].partition("examples:")[0]
    assert not {option for option in options if option not in described}


def test_scripts_end_alike() -> None:
    for script in SCRIPTS:
        text = (ROOT / script).read_text(encoding="utf-8")
        assert re.search(r'\nif __name__ == "__main__":\n    cli\.run\(main(, kept="[^"]+")?\)\n$', text), script
        assert Path(script).parent == Path() or "if not __package__:" in text, script
