"""Every script: shows its help with an example, without delay, and is a file that runs from the repository's root."""

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
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise RuntimeError("heavy import before it is needed: " + name)
sys.meta_path.insert(0, Forbid)
"""
HELP_OF_EACH = """
import json, sys
from command import run_script
print(json.dumps([vars(run_script(script, "--help")) for script in sys.argv[1:]]))
"""
SCRIPTS = sorted(command.path for commands in all_commands().values() for command in commands)


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """`--help` of every script, in a process that refuses heavy imports."""
    folder = tmp_path_factory.mktemp("forbid")
    (folder / "sitecustomize.py").write_text(FORBID)
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "tests")))
    done = subprocess.run([sys.executable, "-c", HELP_OF_EACH, *SCRIPTS], cwd=ROOT, env=os.environ | {"PYTHONPATH": path},
                          stdout=subprocess.PIPE, check=True)
    return {ended["args"][0]: subprocess.CompletedProcess(**ended) for ended in json.loads(done.stdout)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script(script: str, helped: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """Its help has examples, whose options it describes. It puts the root first on the path before its imports, and ends as all
    scripts do."""
    done = helped[script]
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workspace" in done.stdout
    described, _, examples = done.stdout.partition("options:")[2].partition("examples:")
    lines = [line for line in examples.splitlines() if f"python {script}" in line]
    assert lines
    assert not {word for line in lines for word in line.split() if word.startswith("--") and word not in described}
    text = (ROOT / script).read_text(encoding="utf-8")
    assert re.search(r'\nif __name__ == "__main__":\n    cli\.run\(main(, kept="[^"]+")?\)\n$', text)
    if depth := len(Path(script).parts) - 1:
        before_imports = text.partition("\nfrom hase.")[0]
        assert re.search(r"\nif not __package__:.*\n    sys\.path\[0\] = ", before_imports)
        assert f"str(Path(__file__).resolve().parents[{depth}])" in before_imports
