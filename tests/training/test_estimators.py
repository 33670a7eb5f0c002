"""Users' estimators: from a file, a package or the repository, they are checked, admitted and used; or refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import printed, run_script
from conftest import Once
from trained_workspace import TRAINING, conv_net, made_up_ms, make_dataset

import hase.training.estimators
from hase.inference.library.predictor import Predictor
from hase.learned.kernels import admitted
from hase.learned.kernels.admitted import VARIABLE, find_estimator, find_estimators
from hase.learned.kernels.interface import TrainingConfig
from hase.learned.kernels.saved_form import CLASS, Saved, open_estimator, save_estimator
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import Kernel
from hase.records.kernel_record_files import record_path
from hase.runtimes import local_target
from hase.training.kernels.checking import Task, task_for
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace

NAME = "softmax_by_bytes"
PAGE = (ROOT / "docs" / "estimators.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
WITH_ARRAY = EXAMPLE.replace('"ms_per_byte": self.ms_per_byte', '"ms_per_byte": np.array([self.ms_per_byte])')
COMMANDS = [line for line in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0].splitlines() if line]


def make_softmax_workspace(root: Path) -> None:
    """Three families of eight small nets with a Softmax, a made-up dataset of their kernels, and predictors trained on it."""
    workspace = Workspace(root)
    records = [analyze(conv_net(workspace.models / f"{family}_c{channels}.onnx", batch, channels, extra="Softmax"), "cpu")
               for family, batch in (("anet", 1), ("bnet", 2), ("cnet", 4)) for channels in range(8, 72, 8)]
    for record in records:
        files.write_json(record_path(workspace, record.flavour, record.model), record)
    make_dataset(workspace, records)
    files.write_text(root / "training.yaml", TRAINING)
    for script in ("training/train_kernel_model.py", "training/fit_composition.py"):
        printed(script, "--workspace", root, "--quiet", "--config", root / "training.yaml")
    conv_net(workspace.models / "mine.onnx", 2, 20, extra="Softmax")


@pytest.fixture(scope="module")
def made(once: Once) -> Path:
    return once("softmax", make_softmax_workspace)


@pytest.fixture
def mine(made: Path, tmp_path: Path) -> Workspace:
    """A copy that a test may change, with the page's example in a separate folder."""
    workspace = Workspace(Path(shutil.copytree(made, tmp_path / "mine")))
    files.write_text(workspace.root / "estimators" / f"{NAME}.py", EXAMPLE)
    return workspace


def check(workspace: Workspace, name: str, *options: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Checks an estimator of the folder, which is made of `text` first."""
    if text:
        files.write_text(workspace.root / "estimators" / f"{name}.py", text.replace(NAME, name))
    return run_script(*command(workspace), "--estimators", workspace.root / "estimators", name, *options)


def command(workspace: Workspace) -> tuple[str, ...]:
    return "training/check_estimator.py", "--workspace", str(workspace.root), "--config", str(workspace.root / "training.yaml")


def folder_of(workspace: Workspace) -> Path:
    return workspace.predictors(local_target("cpu").name)


def predictor(workspace: Workspace, **options: Any) -> Predictor:
    return Predictor(workspace, estimators=[workspace.root / "estimators"], **options)


def softmax_of(workspace: Workspace) -> Kernel:
    record = analyze(workspace.models / "mine.onnx", "cpu")
    return next(kernel for kernel in record.kernels.values() if kernel.type == "Softmax")


@pytest.mark.slow
def test_the_example_of_the_page(mine: Workspace) -> None:
    outputs: list[tuple[Any, str]] = []
    for line in COMMANDS:
        done = run_script(*line.replace("out/mine", str(mine.root)).split()[1:], "--json")
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        outputs.append((json.loads(done.stdout) if done.stdout else None, done.stderr))
    (table, check_log), (answers, predict_log), (listed, _), _ = outputs
    errors = {row["estimator"]: row["MAPE_%"] for row in table}
    assert errors[NAME] < min(0.01, errors["what is in use"])  # the made-up times are exactly of this form
    assert f"{NAME}: admitted for Softmax" in check_log
    (answer,) = answers
    assert [(used["name"], used["types"], used["forced"]) for used in answer["estimators"]] == [(NAME, ["Softmax"], False)]
    assert f"Softmax: predicted by the estimator {NAME}" in predict_log
    assert [(kernel["latency_ms"], kernel["provenance"]) for kernel in answer["kernels"] if kernel["type"] == "Softmax"] == [
        (pytest.approx(made_up_ms(softmax_of(mine)), rel=1e-3), "predicted")]
    assert [(row["from"], row["admitted for"]) for row in listed if row["estimator"] == NAME] == [
        (f"file {NAME}.py", "Softmax")]
    assert not admitted.read_entries(folder_of(mine))  # the last command removed it
    assert not list(folder_of(mine).glob("estimator_*"))


@pytest.mark.slow
def test_an_estimator_from_an_entry_point(mine: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the path declares the page's example."""
    site = tmp_path / "site"
    about = site / "bytes_of_softmax-1.5.dist-info"
    files.write_text(site / "bytes_of_softmax" / "__init__.py", EXAMPLE.replace(f'"{NAME}"', '"from_a_package"'))
    files.write_text(about / "METADATA", "Metadata-Version: 2.1\nName: bytes-of-softmax\nVersion: 1.5\n")
    files.write_text(about / "entry_points.txt", f"[{admitted.GROUP}]\nfrom_a_package = bytes_of_softmax:SoftmaxByBytes\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(site))
        done = check(mine, "from_a_package")
        assert done.returncode == 0, done.stderr
        answer = Predictor(mine).predict("mine.onnx")
        assert [(used.name, used.source) for used in answer.estimators] == [("from_a_package", "package bytes-of-softmax 1.5")]
    monkeypatch.delitem(sys.modules, "bytes_of_softmax")
    with pytest.raises(UserError, match=r"from_a_package: not found.*--remove from_a_package"):
        predictor(mine).predict("mine.onnx")


def test_estimators_are_found_in_the_repository_and_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file put next to those of Hase is found; here the folder is a copy."""
    copy = Path(shutil.copytree(ROOT / "training" / "estimators", tmp_path / "estimators"))
    files.write_text(copy / "added.py", EXAMPLE.replace(NAME, "added"))
    monkeypatch.setattr(admitted, "ESTIMATORS", copy)
    monkeypatch.setattr(hase.training.estimators, "__path__", [*hase.training.estimators.__path__, str(copy)])
    assert find_estimator("added").source == "Hase"
    assert NAME not in find_estimators()
    files.write_text(tmp_path / "more" / f"{NAME}.py", EXAMPLE)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "more"))
    assert find_estimator(NAME).source == f"file {NAME}.py"


@pytest.mark.slow
def test_an_estimator_that_is_not_better_is_admitted_only_if_forced(mine: Workspace) -> None:
    """Its times are eight times too long."""
    worse = EXAMPLE.replace("return self.floor_ms +", "return 8 * self.floor_ms + 8 *")
    done = check(mine, "worse", text=worse)
    assert done.returncode == 1
    assert "not admitted for Softmax: its error on held-out kernels is 700.0%" in done.stderr
    assert check(mine, "worse", "--force").returncode == 0
    forced = predictor(mine, strict=True).predict("mine.onnx")
    assert [used.forced for used in forced.estimators] == [True]
    assert any("forced: it is not better" in warning for warning in forced.warnings)
    (softmax,) = [kernel for kernel in forced.kernels if kernel.type == "Softmax"]
    assert softmax.latency_ms == pytest.approx(8 * made_up_ms(softmax_of(mine)), rel=1e-3)
    assert forced.rough_estimate


@pytest.mark.slow
def test_estimators_replace_each_other_where_they_are_better(mine: Workspace) -> None:
    for_two = EXAMPLE.replace('{"Softmax"}', '{"Softmax", "Gemm"}').replace(
        "* kernels.features[:, 0]", '* kernels.features[:, 0] * np.where(kernels.types == "Gemm", 8.0, 1.0)')
    done = check(mine, "both", text=for_two)
    assert (done.returncode, "not admitted for Gemm: its error" in done.stderr) == (0, True)
    (entry,) = admitted.read_entries(folder_of(mine))
    assert (entry.types, entry.forced, entry.errors.count) == (("Softmax",), False, 24)
    assert check(mine, "both").returncode == 0  # it is not compared with itself
    done = check(mine, "second", text=WITH_ARRAY)
    assert (done.returncode, "not admitted" in done.stderr) == (1, True)  # just as good as the first is not better
    assert check(mine, "second", "--force").returncode == 0
    (entry,) = admitted.read_entries(folder_of(mine))
    assert (entry.name, entry.types, entry.forced) == ("second", ("Softmax",), True)


@pytest.mark.slow
def test_a_workspaces_files_do_not_run_by_themselves(mine: Workspace) -> None:
    mark, hostile = mine.root / "it_ran", mine.root / "estimators" / "hostile.py"
    files.write_text(hostile, f"open({str(mark)!r}, 'w')\n{EXAMPLE}")
    for options in (["--list"], ["xgboost", "--types", "Softmax", "--dry-run"]):
        assert run_script(*command(mine), *options).returncode in (0, 1)
    Predictor(mine).predict("mine.onnx")
    assert not mark.exists()
    find_estimators([hostile])
    assert mark.exists()


@pytest.mark.slow
def test_nothing_is_loaded_where_none_is_admitted(mine: Workspace) -> None:
    """Not even the modules for it are loaded."""
    program = f"""
import sys
from pathlib import Path
from hase.inference.library.predictor import Predictor
from hase.utils.paths import Workspace
predictor = Predictor(Workspace(Path({str(mine.root)!r})))
answer = predictor.predict("mine.onnx")
assert predictor.fitted.predictors.admitted is None
assert "estimators" not in answer.model_dump(mode="json")
print([name for name in sys.modules if name.startswith(("hase.learned.kernels.admitted", "hase.training.estimators"))])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.slow
def test_code_that_differs_from_the_checked_one_is_refused(mine: Workspace) -> None:
    code = mine.root / "estimators" / f"{NAME}.py"
    assert check(mine, NAME, text=WITH_ARRAY).returncode == 0
    with pytest.raises(UserError, match=f"{NAME}: not found"):
        Predictor(mine).predict("mine.onnx")
    assert Predictor(mine, estimators=[code]).predict("mine.onnx").estimators
    code.write_text(WITH_ARRAY + "\n# changed\n")
    with pytest.raises(UserError, match="has changed since; check it again"):
        predictor(mine).predict("mine.onnx")
    (path,) = folder_of(mine).glob("estimator_*")
    code.write_text(WITH_ARRAY)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match="damaged or changed"):
        Predictor(mine, estimators=[code]).predict("mine.onnx")


@pytest.fixture(scope="module")
def task(made: Path) -> Task:
    rows = read_training_set(Workspace(made), local_target("cpu").name)
    return task_for(Workspace(made), rows, "run", lambda name: name == "Softmax", None, TrainingConfig(folds=2, threads=1))


@pytest.mark.slow
def test_families_are_held_out(made: Path, task: Task) -> None:
    assert (task.hold_out, task.types, int(task.tested.sum())) == ("family", ("Softmax",), 24)
    for learn, test in task.folds:
        out = set().union(*(task.rows.groups[row] for row in np.flatnonzero(test)))
        assert not any(task.rows.groups[row] & out for row in np.flatnonzero(learn))
    with pytest.raises(UserError, match="0 such kernels were measured, a check needs 20"):
        task_for(Workspace(made), task.rows, "run", lambda name: name == "Tanh", None, task.config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roofline", "random_forest", "xgboost", "neural_network", "in_use"])
def test_hases_estimators_predict_the_same_after_saving(name: str, task: Task, tmp_path: Path) -> None:
    estimator = find_estimator(name).estimator
    fitted = task.fitted_to_all(estimator)
    kernels, times_ms = task.kernel_rows(estimator.features, task.chosen), task.rows.times_ms["run"][task.chosen]
    predicted = fitted.predict_ms(kernels)
    reopened = open_estimator(save_estimator(tmp_path, name, fitted), estimator, tmp_path, "")
    has_trees = name in ("random_forest", "xgboost", "in_use")
    assert reopened.predict_ms(kernels) == pytest.approx(predicted, rel=1e-4 if has_trees else 0)
    assert np.abs(predicted / times_ms - 1).mean() < 0.25  # on its training rows


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "message"), [
    ({"version": 7}, "saved with version 7.*make it anew"), ({"name": "another"}, "saved with name another"),
    ({"features": ("work 9",)}, "saved with features work 9"), ({"learned": {}}, "can't read what it saved"),
    ({"learned": {"roofline": {CLASS: "Popen", "fields": {}}}}, "refused: it holds a Popen"),
    ({"learned": {"roofline": {CLASS: "Roofline", "fields": {"floor_ms": "x"}}}}, "damaged: Roofline")])
def test_damaged_forms_are_refused(damage: dict[str, Any], message: str, task: Task, tmp_path: Path) -> None:
    fitted = task.fitted_to_all(find_estimator("roofline").estimator)
    saved = save_estimator(tmp_path, "roofline", fitted)
    with pytest.raises(UserError, match=message):
        open_estimator(Saved.model_validate(saved.model_dump() | damage), type(fitted), tmp_path, "make it anew")


@pytest.mark.slow
def test_an_estimator_that_forgets_a_saved_class_is_refused(task: Task, tmp_path: Path) -> None:
    fitted: Any = task.fitted_to_all(find_estimator("roofline").estimator)
    forgetful = type("Forgetful", (type(fitted),), {"saved_classes": ()})()
    forgetful.restore(fitted.saved())
    with pytest.raises(UserError, match="saves a Roofline, which its saved_classes do not list"):
        save_estimator(tmp_path, "roofline", forgetful)
    with pytest.raises(UserError, match="refused: it holds a Roofline"):
        open_estimator(save_estimator(tmp_path, "roofline", fitted), type(forgetful), tmp_path, "")


@pytest.mark.parametrize(("text", "message"), [
    ("x = 1\n", "defines no Estimator"), ("import nowhere_to_be_found\n", "can't be run"),
    (EXAMPLE.replace('    name = "softmax_by_bytes"\n', ""), "has no `name`"),
    (EXAMPLE.replace(NAME, "../x"), "letters, digits"),
    (EXAMPLE.replace(f'"{NAME}"', '"roofline"'), "two estimators have this name"),
    (EXAMPLE.replace('EnvironmentPattern(device="cpu"), ', ""), "must be a tuple of EnvironmentPattern")])
def test_files_that_are_no_estimators(text: str, message: str, tmp_path: Path) -> None:
    files.write_text(tmp_path / "one.py", text)
    with pytest.raises(UserError, match=message):
        find_estimators([tmp_path])


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "options", "message"), [
    ("return self", "return -self", ["--force"], "must predict a positive number of ms"),
    ("", "", ["--types", "Softmaks"], "no kernel of this type"), ("", "", ["--types", "Softmax,Gemm"], "is not for it"),
    ('EnvironmentPattern(device="cpu")', 'EnvironmentPattern(runtime="tvm")', [], "does not hold for")])
def test_what_can_not_be_checked(old: str, new: str, options: list[str], message: str, mine: Workspace) -> None:
    done = check(mine, "odd", *options, text=EXAMPLE.replace(old, new) if old else EXAMPLE)
    assert (done.returncode, message in done.stderr) == (1, True)
