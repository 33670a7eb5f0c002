"""`hase gate`: snapshots, verdicts by the interval of a difference, and the files that bring it into CI."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml
from command import run_script
from conftest import small_model
from onnx import helper

from hase.inference import Predictor
from hase.inference.compare.regressions import verdict_of
from hase.inference.compare.snapshots import costs_of
from hase.learned.composition.differences import END, REACH, KernelCost, RunCosts, ratio_interval, sources_of_difference
from hase.recipes.gate.verdicts import JudgedChange, verdict_rows
from hase.utils.cli import EXIT_SLO_MISSED
from hase.utils.files import content_digest
from hase.utils.paths import ROOT

SCRIPT = "inference/gate.py"
H200 = "--target", "nvidia-h200"


def with_more(model: onnx.ModelProto, operators: int) -> onnx.ModelProto:
    """The model with so many elementwise operators after its first node."""
    first = model.graph.node[0].output[0]
    names = [first, *(f"more{number}" for number in range(operators))]
    for node in model.graph.node:
        node.input[:] = [names[-1] if name == first else name for name in node.input]
    more = [helper.make_node("Softplus", [before], [after]) for before, after in itertools.pairwise(names)]
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([nodes[0], *more, *nodes[1:]])
    return model


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """A folder with a small model of any batch, and its snapshot at two batches for the H200 in `main.json`."""
    onnx.save(small_model(32, 32, "batch"), tmp_path / "net.onnx")
    made = run_script(SCRIPT, "--model", tmp_path / "net.onnx", "--dim", "batch=1,64", *H200, "--write", tmp_path / "main.json")
    assert made.returncode == 0, made.stderr
    return tmp_path


def gate(zoo: Path, *options: str | Path) -> tuple[int, dict[str, Any]]:
    """The exit status and the result of a comparison with `main.json`."""
    done = run_script(SCRIPT, "--baseline", zoo / "main.json", "--json", *options)
    return done.returncode, json.loads(done.stdout)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a snapshot, with a digest that fits."""
    document = json.loads(path.read_text(encoding="utf-8"))
    document.pop("digest")
    change(document)
    path.write_text(json.dumps(document | {"digest": content_digest(document)}), encoding="utf-8")


@pytest.mark.slow
def test_an_unchanged_model_is_the_same(zoo: Path) -> None:
    status, result = gate(zoo)
    assert (status, result["passed"], len(result["changes"])) == (0, True, 2)
    for change in result["changes"]:
        assert (change["change"], change["verdict"], change["mostly"], change["memory_growth"]) == (0.0, "same", "", 0.0)
        assert change["interval"] == pytest.approx([math.expm1(-END * REACH["always"]), math.expm1(END * REACH["always"])])
    text = (zoo / "main.json").read_text(encoding="utf-8")
    assert len(text) < 6000
    assert len(re.findall(r'^    "Conv_.*: \["Conv", .*\],?$', text, re.MULTILINE)) == 4  # a line for each kernel


@pytest.mark.slow
def test_a_slower_model_fails_by_the_limit_alone(zoo: Path) -> None:
    onnx.save(with_more(small_model(32, 32, "batch"), 8), zoo / "net.onnx")
    status, result = gate(zoo)
    assert (status, result["passed"]) == (EXIT_SLO_MISSED, False)
    worst = result["changes"][0]
    assert worst["verdict"] == "surely slower"
    assert worst["change"] == pytest.approx(worst["after_ms"] / worst["before_ms"] - 1)
    assert 0.05 < worst["interval"][0] < worst["change"] < worst["interval"][1]
    assert worst["mostly"].startswith("Softplus +")
    allowed = run_script(SCRIPT, "--baseline", zoo / "main.json", "--max-regression", "900%")
    assert allowed.returncode == 0
    assert allowed.stdout.startswith("0 of 2 predictions are surely slower by more than 900 %\n")
    assert "slower, within the limit" in allowed.stdout


@pytest.mark.slow
def test_errors_of_common_kernels_cancel(zoo: Path) -> None:
    """The difference of two networks that share most kernels is surer than both answers."""
    predictor = Predictor(target="nvidia-h200", strict=True)
    a, b = (predictor.run(model, dims={"batch": 64}, host_pace=1.0) for model in (
        small_model(32, 32, "batch"), with_more(small_model(32, 32, "batch"), 1)))
    low, high = ratio_interval(costs_of(a), costs_of(b))
    ratio = b.alone_ms / a.alone_ms
    apart = [math.log(end) for run in (a, b) for end in (run.prediction.interval_ms[1] / run.alone_ms,)]
    assert low < ratio < high
    assert math.log(high / ratio) < 0.6 * math.hypot(*apart)


def test_the_interval_of_a_ratio() -> None:
    """By hand: one kernel more, which was predicted, beside a measured one."""
    before = RunCosts(1.0, {"a": KernelCost("Conv", 1, 1.0, 0.0, "measured", 0.0)})
    after = RunCosts(1.25, {**before.kernels, "b": KernelCost("Relu", 1, 0.25, 0.0, "predicted", 0.1)})
    found = sources_of_difference(before, after)
    assert (found.measured, found.predicted, found.alike, found.host) == pytest.approx((0.2, 0.02, 0.02, 0.0))
    scale = math.sqrt(REACH["always"] ** 2 + (0.2 * REACH["measured"]) ** 2 + 0.02 ** 2 * (
        REACH["predicted"] ** 2 + REACH["alike"] ** 2))
    assert ratio_interval(before, after) == pytest.approx((1.25 * math.exp(-END * scale), 1.25 * math.exp(END * scale)))
    slow = RunCosts(1.25, after.kernels, (1.0, 1.5))  # with a slow host, half as much again: the ratio too
    assert ratio_interval(before, slow)[1] == pytest.approx(1.25 * math.exp(math.hypot(END * scale, math.log(1.5))))
    assert ratio_interval(before, slow)[0] == ratio_interval(before, after)[0]


@pytest.mark.parametrize(("change", "low", "high", "verdict"), [
    (0.08, 0.06, 0.10, "surely slower"), (0.08, 0.04, 0.12, "maybe slower"), (0.04, 0.01, 0.07, "maybe slower"),
    (0.03, 0.02, 0.04, "slower, within the limit"), (0.01, -0.01, 0.03, "same"), (0.0, -0.1, 0.1, "same"),
    (-0.04, -0.05, -0.03, "faster")])
def test_verdicts(change: float, low: float, high: float, verdict: str) -> None:
    assert verdict_of(change, (low, high), 0.05) == verdict


def test_how_often_verdicts_were_right() -> None:
    changes = [JudgedChange(0.08, *predicted) for predicted in ((0.08, 0.06, 0.1), (0.06, 0.04, 0.08), (0.0, -0.01, 0.01))]
    assert verdict_rows([*changes, JudgedChange(0.0, 0.08, 0.06, 0.1)])[1] == {
        "limit": "5 %", "slower": 3, "found": 1, "maybe": 1, "missed": 1, "not slower": 1, "false alarms": 1}


@pytest.mark.slow
def test_new_and_gone_models_are_reported(zoo: Path) -> None:
    onnx.save(small_model(32, 32), zoo / "other.onnx")
    (zoo / "net.onnx").unlink()
    assert [change["verdict"] for change in gate(zoo)[1]["changes"]] == ["gone", "gone"]  # the baseline's models
    status, result = gate(zoo, "--model", zoo, *H200)
    assert (status, [change["verdict"] for change in result["changes"]]) == (0, ["new", "gone", "gone"])
    (zoo / "net.onnx").write_bytes(b"no model")  # an error, and not gone
    status, result = gate(zoo)
    assert (status, result["changes"]) == (1, [])


@pytest.mark.slow
def test_more_memory_fails_where_it_is_limited(zoo: Path) -> None:
    edit(zoo / "main.json", lambda document: [model.update(peak_memory_mib=model["peak_memory_mib"] / 2)
                                              for model in document["models"].values()])
    assert gate(zoo)[0] == 0
    done = run_script(SCRIPT, "--baseline", zoo / "main.json", "--max-memory-growth", "50")
    assert done.returncode == EXIT_SLO_MISSED
    assert "2 of 2 need over 50 % more memory: net batch 1, net batch 64" in done.stdout
    assert done.stdout.count("+100.0 % (too much)") == 2


@pytest.mark.slow
def test_a_baseline_that_does_not_fit_is_refused(zoo: Path) -> None:
    def error(*options: str) -> str:
        done = run_script(SCRIPT, "--baseline", zoo / "main.json", *options)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr

    assert "made with other options (way); give the same ones" in error("--cuda-graph")
    assert re.search(r"main.json: made for nvidia-h200\S+, and this is for \S*l4\S*; give that target", error("--gpu", "l4"))
    text = (zoo / "main.json").read_text(encoding="utf-8")
    edit(zoo / "main.json", lambda document: document["conditions"].update(hase="0.0.1"))
    assert "made by another Hase or with other predictors (0.0.1, now " in error()
    edit(zoo / "main.json", lambda document: document.update(version=2))
    assert "main.json: version 2, this Hase reads version 1; make it anew: " in error()
    (zoo / "main.json").write_text(text.replace("Conv_32", "Conv_33", 1), encoding="utf-8")
    assert "damaged or changed by hand" in error()


@pytest.fixture
def step(zoo: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in the folder of the models, as a step of GitHub's runs it after Hase was installed by the one before."""
    (zoo / "hase" / "bin").mkdir(parents=True)
    (zoo / "hase" / "bin" / "hase").symlink_to(Path(sys.executable).with_name("hase"))
    made = {"RUNNER_TEMP": str(zoo), "GITHUB_STEP_SUMMARY": str(zoo / "summary.md"), "PYTHONPATH": str(ROOT),
            "PATH": f"{zoo / 'hase' / 'bin'}:{os.environ['PATH']}"}

    def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=zoo, env=os.environ | made | environment, capture_output=True, text=True,
                              check=False)

    done = run("hase", "gate", "--model", "net.onnx", "--dim", "batch=1,64", *H200, "--write", "hase.json")
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.slow
def test_the_action_adds_the_table_to_the_summary(zoo: Path, step: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The commands of its last step, with an unchanged and with a slower model."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    last = action["runs"]["steps"][-1]
    given = {name: one.get("default", "") for name, one in action["inputs"].items()} | {"baseline": "hase.json"}
    filled = {name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: given[found[1]], text)
              for name, text in last["env"].items()}
    assert last["shell"] == "bash"
    (zoo / "summary.md").write_text("of another step\n", encoding="utf-8")
    (zoo / "step.sh").write_text(last["run"], encoding="utf-8")
    bash = "bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"
    done = step(*bash, **filled)
    assert done.returncode == 0, done.stderr
    onnx.save(with_more(small_model(32, 32, "batch"), 8), zoo / "net.onnx")
    options = "--dim batch=1,64 --target nvidia-h200"
    done = step(*bash, **filled | {"MODELS": "net.onnx", "OPTIONS": options})
    assert done.returncode == EXIT_SLO_MISSED, done.stderr
    first, *tables = (zoo / "summary.md").read_text(encoding="utf-8").split("\n**")
    assert first == "of another step"
    for table, (count, verdict) in zip(tables, ((0, "same"), (2, "surely slower")), strict=True):
        assert table.startswith(f"{count} of 2 predictions are surely slower by more than 5 %")
        rows = re.findall(r"^\| net.onnx \| (batch \d+) \|.*\| ([\w ]+) \|$", table, re.MULTILINE)
        assert sorted(rows) == [("batch 1", verdict), ("batch 64", verdict)]


@pytest.mark.slow
def test_the_hook_of_pre_commit(zoo: Path, step: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Its command passes, and fails once the model is slower."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert re.search(hook["files"], "models/net.onnx")
    command = *hook["entry"].split(), *hook["args"]
    assert step(*command).returncode == 0
    onnx.save(with_more(small_model(32, 32, "batch"), 8), zoo / "net.onnx")
    failed = step(*command)
    assert failed.returncode == EXIT_SLO_MISSED
    assert failed.stdout.startswith("2 of 2 predictions are surely slower by more than 5 %: net batch 64, net batch 1\n")
