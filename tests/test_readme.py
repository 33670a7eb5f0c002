"""Every command of the README and of docs/ runs as it stands, in a copy of the repository whose configs ask for very little.

A block of `bash` is run; one of `sh` or an indented one is not: it takes too long, or needs what is not there.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from recipe_commands import commands_of

from model_zoo.torchvision_exporter import asked_config, command_line
from utils.fingerprint import has_cuda
from utils.paths import ROOT

QUICK_COLLECTOR = """
window_s: 0.2
attempts: 1
patience_s: 0
kernel: {warmup: 1, budget_s: 0.005, least_runs: 3, most_runs: 5}
model: {warmup: 1, budget_s: 0.1, least_runs: 4, most_runs: 10}
"""
TINY = {  # instead of what a config says; all else stays as it says
    "model_zoo/config.yaml": {"image_sizes": [32], "batch_sizes": [1]},
    "benchmark/config.yaml": {"levels": [0.0, 0.5], "stress": {"settle_s": 0.2}, **yaml.safe_load(QUICK_COLLECTOR)},
    "graph_stages/test_cases.json": {
        "feature_dim": 16, "hidden_dim": 8,
        "test_cases": [{"nodes": 50 * size, "edges": 200 * size} for size in (1, 2, 4)]},
    "recipes/demo/model_zoo.yaml": {"models": ["resnet18", "mnasnet1_0"], "image_sizes": [32]},
    "recipes/demo/collector.yaml": {"levels": [0.0], **yaml.safe_load(QUICK_COLLECTOR)},
    "training/config.yaml": {"folds": 2, "xgboost": {"trees": 40}, "forest": {"trees": 3}},
}
SMALLER = (("224x224", "32x32"), ("--count 1000", "--count 20"), ("--duration 10", "--duration 2"))
NEEDS_GPU = ("python benchmark/run_anatomy.py", "python benchmark/host_pace.py")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n.*?^```", re.MULTILINE | re.DOTALL)
PHASE = re.compile(r"^\|[^|]*\| `(python [^`]+)` \|", re.MULTILINE)
NUMBERED = re.compile(r"^\| (\d+\.\d+) [^|]*\| `(?:python )?([\w/]+\.py)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)\)")
FILE = re.compile(r"(?<![\w/<>.…-])((?:\w+/)+[\w.]+\.(?:py|sh|yaml))\b")


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


PAGES = sorted(str(page.relative_to(ROOT)) for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("[!.]*/README.md")))


def documents() -> str:
    """The README and the pages, one after another."""
    return "\n".join([readme(), *((ROOT / page).read_text(encoding="utf-8") for page in PAGES)])


def fenced(language: str, text: str) -> list[str]:
    """A text's code blocks of a language."""
    return [code for found, code in FENCE.findall(text) if found == language]


def smaller(text: str) -> str:
    for old, new in SMALLER:
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files as git would hand them on, with tiny configs."""
    folder = tmp_path_factory.mktemp("copy") / "hase"
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name, changes in TINY.items():
        (folder / name).write_text(yaml.safe_dump(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")) | changes))
    script = folder / "recipes" / "demo" / "run.sh"
    script.write_text(smaller(script.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a line of the README with this environment's python first on the path."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=900,
                          check=False)


def run(command: str, folder: Path) -> str:
    done = shell(command, folder)
    assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def run_or_refuse(command: str, folder: Path) -> str:
    """What a command prints. One that needs a GPU says so in one line where there is none."""
    if not command.startswith(NEEDS_GPU) or has_cuda():
        return run(command, folder)
    done = shell(command, folder)
    said = done.stdout + done.stderr
    assert (done.returncode, len(said.splitlines())) == (1, 1), said
    assert "needs a GPU" in said
    return said


@pytest.mark.slow
def test_the_demo_then_the_first_prediction(copy: Path) -> None:
    """What `make demo` runs after its install ends in the table; then the commands that ask for its models."""
    table = run("bash recipes/demo/run.sh out/demo", copy)
    assert "MAPE" in table
    assert "mnasnet1_0_fp32_b8_32x32" in table
    again = run("bash recipes/demo/run.sh out/demo", copy)
    assert "MAPE" in again
    for block in fenced("bash", documents()):
        for line in block.splitlines():
            if line.startswith("python "):
                run_or_refuse(smaller(line), copy)


def test_the_demo_exports_what_the_first_prediction_asks_for(tmp_path: Path) -> None:
    """The other tests run a smaller demo; here are the files' names as `make demo` writes them."""
    demo = (ROOT / "recipes" / "demo" / "run.sh").read_text(encoding="utf-8")
    asked_of_exporter = [command_line().parse_args(options) for script, *options in commands_of("recipes/demo/run.sh", tmp_path)
                         if script == "model_zoo/torchvision_exporter.py"]
    written = {f"{export.stem}.onnx" for args in asked_of_exporter for export in asked_config(args).exports()}
    asked = re.findall(r"model (\S+\.onnx)", "\n".join([demo, *fenced("bash", documents())]))
    assert len(asked) >= 6
    assert set(asked) <= written


def test_scripts_that_take_long_can_be_read_by_the_shell() -> None:
    """They take a quarter of an hour and more, or a GPU: not run here, but bash parses them, and what they call exists."""
    named = sorted(set(re.findall(r"`(\w+(?:/\w+)+\.sh)`", documents())))
    assert named
    for name in named:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert subprocess.run(["bash", "-n", name], cwd=ROOT, check=False).returncode == 0, name
        assert all((ROOT / script).is_file() for script in re.findall(r"(?:python|hase) (\w+(?:/\w+)*\.py)", text)), name


@pytest.mark.slow
def test_every_phase_of_the_table_in_its_order(copy: Path) -> None:
    commands = PHASE.findall(readme())
    assert len(commands) >= 14
    for command in commands:
        assert run_or_refuse(f"{smaller(command)} 2>&1", copy).strip(), command  # one with nothing to print says so on stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/predicting.md"])
def test_the_python_examples(page: str, copy: Path) -> None:
    """After the table's commands: on the exporter's dynamic model. (docs/adding_a_unit.md and
    docs/estimators.md have tests of their own.)"""
    (code,) = fenced("python", (ROOT / page).read_text(encoding="utf-8"))
    program = code.replace('"model.onnx"', '"resnet18.onnx"')
    assert float(run(f"python - <<'END'\n{program}\nEND", copy).split()[0]) > 0


def test_no_other_page_has_python() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md") if fenced("python", page.read_text(encoding="utf-8"))}
    assert pages == {"predicting.md", "adding_a_unit.md", "estimators.md"}


def test_make_names_the_demo_and_the_tests() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in "\n".join(fenced("sh", readme())).splitlines():
        target = line.split()[1]
        assert re.search(rf"^{target}: ", makefile, re.MULTILINE), target


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(readme().splitlines()) <= 150
    linked = set(LINK.findall(readme()))
    assert set(PAGES) <= linked


@pytest.mark.parametrize("page", ["README.md", *(page for page in PAGES if page != "docs/moved.md")])
def test_what_a_page_names_exists(page: str) -> None:
    """In its prose and its commands: an example in Python may name a file that the reader would make."""
    text = PYTHON.sub("", (ROOT / page).read_text(encoding="utf-8"))
    links = [(ROOT / page).parent / link for link in LINK.findall(text)]
    assert not [str(path) for path in (*links, *(ROOT / name for name in FILE.findall(text))) if not path.exists()]


def test_each_script_has_the_phase_number_of_the_table() -> None:
    """And no number stands twice."""
    rows = NUMBERED.findall(readme())
    numbers = [tuple(map(int, number.split("."))) for number, _ in rows]
    assert numbers == sorted(set(numbers))
    tops = {ROOT / script.partition("/")[0] for _, script in rows}
    said = {}
    for path in (path for top in tops for path in ([top] if top.is_file() else top.rglob("*.py"))):
        if found := re.match(r"Phase (\d+\.\d+): ", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""):
            said[path.relative_to(ROOT).as_posix()] = found[1]
    assert said == {script: number for number, script in rows}
