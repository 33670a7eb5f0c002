"""Every script: runs from the repository's root and shows its help with an example, without delay."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hase.recipes.write_pages import all_commands
from hase.utils.paths import ROOT

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
# A process with the packages that all scripts need, which take most of the time of a start, is forked for each script.
HELP_OF_EACH = """
import json, os, runpy, sys
import numpy, psutil, pydantic, yaml
folder, *scripts = sys.argv[1:]
codes = []
for number, script in enumerate(scripts):
    if not (child := os.fork()):
        for stream, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
STREAMS = ("out", "err")
SCRIPTS = sorted(command.path for commands in all_commands().values() for command in commands)


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """`--help` of every script, each in a process that refuses heavy imports."""
    folder = tmp_path_factory.mktemp("forbid")
    (folder / "sitecustomize.py").write_text(FORBID)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    codes = json.loads(subprocess.run([sys.executable, "-c", HELP_OF_EACH, str(folder), *SCRIPTS], cwd=ROOT, env=environment,
                                      stdout=subprocess.PIPE, check=True).stdout)
    return {script: subprocess.CompletedProcess(script, code, *((folder / f"{number}.{name}").read_text() for name in STREAMS))
            for number, (script, code) in enumerate(zip(SCRIPTS, codes, strict=True))}


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
