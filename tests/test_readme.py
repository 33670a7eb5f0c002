"""Every command of the README and of docs/ runs as it stands, in a copy of the repository whose configs ask for very little.
The demo runs first; the phases, their examples and the pages go on with its files.

A block of `bash` is run; one of `sh` or an indented one is not: it takes too long, or needs what is not there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from decoder_models import genai_folder
from forked_python import forked_python
from recipe_commands import commands_of

from hase.model_zoo.torchvision_exporter import asked_config, command_line
from hase.recipes.write_pages import read_command
from hase.utils.fingerprint import has_cuda
from hase.utils.paths import ROOT

QUICK_COLLECTOR = """
window_s: 0.2
block_kernels: 200
block_models: 20
attempts: 1
attempts_under_load: 1
patience_s: 0
kernel: {warmup: 1, warmup_s: 0.0, budget_s: 0.005, least_runs: 3, most_runs: 5}
model: {warmup: 1, warmup_s: 0.0, budget_s: 0.1, least_runs: 4, most_runs: 10}
"""
TINY = {  # instead of what a config says; all else stays as it says
    "model_zoo/config.yaml": {"image_sizes": [32], "batch_sizes": [16]},
    "benchmark/config.yaml": {"levels": [0.0, 0.5], "stress": {"settle_s": 0.2}, "held_out": ["mnasnet"],  # as the demo's
                              **yaml.safe_load(QUICK_COLLECTOR)},
    "recipes/demo/model_zoo.yaml": {"models": ["resnet18", "mnasnet1_0"], "image_sizes": [32]},
    "recipes/demo/collector.yaml": {"levels": [0.0], **yaml.safe_load(QUICK_COLLECTOR)},
    "training/config.yaml": {"folds": 2, "xgboost": {"trees": 40}, "forest": {"trees": 3}},
}
SMALLER = (("224x224", "32x32"), ("--image-size 224", "--image-size 32"), ("--count 1000", "--count 20"),
           ("--duration 10", "--duration 2"), ("--budget-s 5", "--budget-s 0.5"), ("--minutes 15", "--minutes 1"),
           ("--prompt 1024 --generate 256", "--prompt 16 --generate 4"),
           ("--sweep --ttft", "--sweep --batch 1,2 --prompt 16 --generate 4 --ttft"),
           ("sharing_advice.py --workspace", "sharing_advice.py --batch 1 --workspace"),
           ("evaluator.py --patience-s 60 ", "evaluator.py "),
           ("evaluator.py ", "evaluator.py --rounds 1 --budget-s 0.2 --patience-s 0 "))
NEEDS_GPU = ("python benchmark/run_anatomy.py", "python benchmark/host_pace.py")
NEEDS = "  # needs "  # begins what an example's file or device has to be, where the steps before do not make it
PLAN = {  # the scripts of the user's plan
    "model_zoo/torchvision_exporter.py", "ort_analysis/ort_graph_parser.py", "ort_analysis/fusion_detector.py",
    "kernel_model/kernel_builder.py", "benchmark/ort_kernel_runner.py", "benchmark/stressor.py", "benchmark/collector.py",
    "training/train_kernel_model.py", "graph_model/dag_critical_path.py", "overlap_simulator.py",
    "inference/predict_model_latency.py", "evaluator.py"}
IMPORTED = ("onnx", "pandas", "sklearn.ensemble", "xgboost", "networkx", "rich.table", "scipy.stats",
            *(f"hase.{script.removesuffix('.py').replace('/', '.')}" for script in sorted(PLAN)))  # what they import, too
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PHASE = re.compile(r"^\|[^|]*\| `(python [^`]+)` \|", re.MULTILINE)


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


PAGES = sorted(str(page.relative_to(ROOT)) for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("[!.]*/README.md")))


def documents() -> str:
    """The README and the pages, one after another."""
    return "\n".join([readme(), *((ROOT / page).read_text(encoding="utf-8") for page in PAGES)])


def fenced(language: str, text: str) -> list[str]:
    """A text's code blocks of a language."""
    return [code for block_language, code in FENCE.findall(text) if block_language == language]


def smaller(text: str) -> str:
    for old, new in SMALLER:
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Shell:
    """Runs lines of the pages in a folder."""

    folder: Path
    environment: dict[str, str]

    def ended(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True,
                              timeout=900, check=False)

    def run(self, command: str) -> str:
        done = self.ended(command)
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def run_or_refuse(self, command: str) -> None:
        """One that needs a GPU says so in one line where there is none."""
        if not command.startswith(NEEDS_GPU) or has_cuda():
            self.run(command)
            return
        done = self.ended(command)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done
        assert "needs a GPU" in done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """The repository's files as git would hand them on, with tiny configs, and the language model that docs/llm.md asks for.
    out/demo, where the demo and the pages have their files, is the copy itself, where the phases have theirs."""
    folder = tmp_path_factory.mktemp("copy") / "hase"
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name, changes in TINY.items():
        (folder / name).write_text(yaml.safe_dump(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")) | changes))
    genai_folder(folder / "llama-int4", precision="int4")
    script = folder / "recipes" / "demo" / "run.sh"
    script.write_text(smaller(script.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "out").mkdir()
    (folder / "out" / "demo").symlink_to(folder)
    environment = os.environ | {"HASE_CACHE": str(folder.parent / "cache")}  # as users have one
    with forked_python(tmp_path_factory.mktemp("python"), folder, IMPORTED, environment) as environment:
        yield Shell(folder, environment)


@pytest.fixture(scope="module")
def demo(copy: Shell) -> str:
    """What `make demo` prints after its install."""
    return copy.run("bash recipes/demo/run.sh out/demo")


@pytest.mark.slow
def test_the_demo_ends_in_the_table(demo: str, copy: Shell) -> None:
    assert "MAPE" in demo
    assert "mnasnet1_0_fp32_b8_32x32" in demo
    assert "<html" in (copy.folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.usefixtures("demo")
def test_a_second_demo_reuses_what_is_done(copy: Shell) -> None:
    measured = {path: path.read_bytes() for path in copy.folder.glob("benchmark/dataset/*/measurements.jsonl")}
    assert measured
    assert "MAPE" in copy.run("bash recipes/demo/run.sh out/demo")
    assert measured == {path: path.read_bytes() for path in measured}


def test_the_demo_exports_what_the_first_prediction_asks_for(tmp_path: Path) -> None:
    """The other tests run a smaller demo; here are the files' names as `make demo` writes them."""
    demo = (ROOT / "recipes" / "demo" / "run.sh").read_text(encoding="utf-8")
    asked_of_exporter = [command_line().parse_args(options) for script, *options in commands_of("recipes/demo/run.sh", tmp_path)
                         if script == "model_zoo/torchvision_exporter.py"]
    written = {f"{export.stem}.onnx" for args in asked_of_exporter for export in asked_config(args).exports()}
    asked = re.findall(r"model ([^\s/]+\.onnx)", "\n".join([demo, *fenced("bash", documents())]))
    assert len(asked) >= 6
    assert set(asked) <= written


@pytest.mark.slow
@pytest.mark.usefixtures("demo")
def test_every_phase_of_the_table_and_its_examples_in_their_order(copy: Shell) -> None:
    """Each command of the table, then the examples of its --help, which run as they stand: on what the steps before made."""
    phases = PHASE.findall(readme())
    assert {command.split()[1] for command in phases} >= PLAN
    for phase in phases:
        assert copy.run(f"{smaller(phase)} 2>&1").strip(), phase  # one with nothing to print says so on stderr
        for example in read_command(ROOT / phase.split()[1]).examples.splitlines():
            if example != phase and NEEDS not in example:
                copy.run(smaller(example))


@pytest.mark.slow
@pytest.mark.usefixtures("demo")
def test_every_command_of_the_pages(copy: Shell) -> None:
    """One that names no workspace is for a reader who has trained nothing."""
    (copy.folder / "out" / "new").mkdir()
    for block in fenced("bash", documents()):
        for line in block.splitlines():
            if line.startswith("python "):
                script, options = re.split(r"(?<=\.py) ", smaller(line), maxsplit=1)
                copy.run_or_refuse(f"{script} {'' if '--workspace' in line else '--workspace out/new '}{options}")


@pytest.mark.slow
@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("page", ["README.md", "docs/predicting.md"])
def test_the_python_examples(page: str, copy: Shell) -> None:
    """docs/extending.md and docs/estimators.md have tests of their own."""
    for code in fenced("python", (ROOT / page).read_text(encoding="utf-8")):
        program = code.replace('"model.onnx"', '"mnasnet1_0.onnx"')
        numbers = re.findall(r"\d+\.\d+", copy.run(f"python - <<'END'\n{program}\nEND"))
        assert float(numbers[0]) > 0
