"""Users' estimators: from a file, a package or the repository, they are checked, admitted and used; or refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trained_workspace
from command import run_script
from conftest import Once

from hase.inference.library.predictor import Predictor
from hase.learned import target_files
from hase.learned.kernels import admitted
from hase.learned.kernels.admitted import VARIABLE, find_estimator, find_estimators
from hase.learned.kernels.interface import EnvironmentPattern, TrainingConfig
from hase.learned.kernels.saved_form import CLASS, Saved, open_estimator, save_estimator
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import Kernel
from hase.records.kernel_record_files import record_path
from hase.runtimes import local_target
from hase.training.kernels.checking import task_for
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace

CHECK = "training/check_estimator.py"
NAME = "softmax_by_bytes"
PAGE = (ROOT / "docs" / "estimators.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
WITH_ARRAY = EXAMPLE.replace('"ms_per_byte": self.ms_per_byte', '"ms_per_byte": np.array([self.ms_per_byte])')
COMMANDS = [line for line in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0].splitlines() if line]


def make_softmax_workspace(root: Path) -> None:
    """Three families of eight small nets with a Softmax, a made-up dataset of their kernels, and predictors trained on it."""
    workspace = Workspace(root)
    records = []
    for family, batch in (("anet", 1), ("bnet", 2), ("cnet", 4)):
        for channels in (8, 16, 24, 32, 40, 48, 56, 64):
            path = trained_workspace.conv_net(workspace.models / f"{family}_c{channels}.onnx", channels=channels, batch=batch,
                                              extra="Softmax")
            record = analyze(path, "cpu")
            files.write_json(record_path(workspace, record.flavour, record.model), record)
            records.append(record)
    trained_workspace.make_dataset(workspace, records)
    files.write_text(root / "training.yaml", trained_workspace.TRAINING)
    for script, *options in (["training/train_kernel_model.py", "--config", str(root / "training.yaml")],
                             ["training/fit_composition.py"]):
        done = run_script(script, "--workspace", root, "--quiet", *options)
        assert done.returncode == 0, done.stderr
    trained_workspace.conv_net(workspace.models / "mine.onnx", channels=20, batch=2, extra="Softmax")


@pytest.fixture(scope="module")
def made(once: Once) -> Path:
    return once("softmax", make_softmax_workspace)


@pytest.fixture
def mine(made: Path, tmp_path: Path) -> Workspace:
    """A copy that a test may change, with the page's example in a separate folder."""
    workspace = Workspace(Path(shutil.copytree(made, tmp_path / "mine")))
    files.write_text(workspace.root / "estimators" / f"{NAME}.py", EXAMPLE)
    return workspace


def named(workspace: Workspace) -> Path:
    return workspace.root / "estimators" / f"{NAME}.py"


def check(workspace: Workspace, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script(CHECK, "--workspace", workspace.root, "--config", workspace.root / "training.yaml", *options)


def folder_of(workspace: Workspace) -> Path:
    return workspace.predictors(local_target("cpu").name)


def softmax_of(workspace: Workspace) -> Kernel:
    record = analyze(workspace.models / "mine.onnx", "cpu")
    return next(kernel for kernel in record.kernels.values() if kernel.type == "Softmax")


def worse(workspace: Workspace) -> Path:
    """An estimator whose times are eight times too long."""
    path = workspace.root / "worse.py"
    eightfold = EXAMPLE.replace("return self.floor_ms +", "return 8 * self.floor_ms + 8 *")
    files.write_text(path, eightfold.replace(NAME, "worse"))
    return path


@pytest.mark.slow
def test_the_example_of_the_page(mine: Workspace) -> None:
    """The example and the commands of the page."""
    outputs: list[tuple[Any, str]] = []
    for line in COMMANDS:
        done = run_script(*line.replace("out/mine", str(mine.root)).split()[1:], "--json")
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        outputs.append((json.loads(done.stdout) if done.stdout else None, done.stderr))
    (table, check_log), (answers, predict_log), (listed, _), _ = outputs
    errors = {row["estimator"]: row["MAPE_%"] for row in table}
    assert errors[NAME] < 0.01  # the made-up times are exactly of this form
    assert errors[NAME] < errors["what is in use"]
    assert f"{NAME}: admitted for Softmax" in check_log
    (answer,) = answers
    (used,) = answer["estimators"]
    assert (used["name"], used["types"], used["forced"]) == (NAME, ["Softmax"], False)
    assert f"Softmax: predicted by the estimator {NAME}" in predict_log
    (softmax,) = [kernel for kernel in answer["kernels"] if kernel["type"] == "Softmax"]
    assert softmax["latency_ms"] == pytest.approx(trained_workspace.made_up_ms(softmax_of(mine)), rel=1e-3)
    assert softmax["provenance"] == "predicted"
    (row,) = [row for row in listed if row["estimator"] == NAME]
    assert (row["from"], row["admitted for"]) == (f"file {NAME}.py", "Softmax")
    assert not admitted.read_entries(folder_of(mine))  # the last command removed it
    assert not list(folder_of(mine).glob("estimator_*"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on the path that declares the page's example as an entry point."""
    site = tmp_path / "site"
    files.write_text(site / "bytes_of_softmax" / "__init__.py", EXAMPLE.replace(f'"{NAME}"', '"from_a_package"'))
    about = site / "bytes_of_softmax-1.5.dist-info"
    files.write_text(about / "METADATA", "Metadata-Version: 2.1\nName: bytes-of-softmax\nVersion: 1.5\n")
    files.write_text(about / "entry_points.txt", f"[{admitted.GROUP}]\nfrom_a_package = bytes_of_softmax:SoftmaxByBytes\n")
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("bytes_of_softmax", None)


def test_an_estimator_from_an_entry_point(mine: Workspace, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = check(mine, "from_a_package")
    assert done.returncode == 0, done.stderr
    answer = Predictor(mine).predict("mine.onnx")
    assert [(used.name, used.source) for used in answer.estimators] == [("from_a_package", "package bytes-of-softmax 1.5")]
    sys.path.remove(str(package))
    with pytest.raises(UserError, match=r"from_a_package: not found.*--remove from_a_package"):
        Predictor(mine, estimators=[mine.root / "estimators"]).predict("mine.onnx")


def test_an_estimator_in_the_repositorys_folder(mine: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file put next to those of Hase is found; here the folder is a copy."""
    import hase.training.estimators

    copy = Path(shutil.copytree(ROOT / "training" / "estimators", tmp_path / "estimators"))
    files.write_text(copy / "added.py", EXAMPLE.replace(NAME, "added"))
    monkeypatch.setattr(admitted, "ESTIMATORS", copy)
    monkeypatch.setattr(hase.training.estimators, "__path__", [*hase.training.estimators.__path__, str(copy)])
    assert find_estimator("added").source == "Hase"
    assert check(mine, "added").returncode == 0


def test_an_estimator_that_is_not_better_is_admitted_only_if_forced(mine: Workspace) -> None:
    before = Predictor(mine, strict=True).predict("mine.onnx")
    done = check(mine, "worse", "--estimators", worse(mine))
    assert done.returncode == 1
    assert "not admitted for Softmax: its error on held-out kernels is 700.0%" in done.stderr
    assert not (target_files.ESTIMATORS.path(folder_of(mine))).exists()
    assert check(mine, "worse", "--estimators", worse(mine), "--force").returncode == 0
    forced = Predictor(mine, strict=True, estimators=[worse(mine)]).predict("mine.onnx")
    assert [used.forced for used in forced.estimators] == [True]
    assert any("forced: it is not better" in warning for warning in forced.warnings)
    (softmax,) = [kernel for kernel in forced.kernels if kernel.type == "Softmax"]
    assert softmax.latency_ms == pytest.approx(8 * trained_workspace.made_up_ms(softmax_of(mine)), rel=1e-3)
    assert forced.interval_ms[0] / forced.latency_ms < 0.9 * before.interval_ms[0] / before.latency_ms  # the true time is lower
    assert (before.rough_estimate, forced.rough_estimate) == (False, True)


def test_an_estimator_is_admitted_for_the_types_where_it_is_better(mine: Workspace) -> None:
    path = mine.root / "both.py"
    for_two = EXAMPLE.replace('{"Softmax"}', '{"Softmax", "Gemm"}').replace(
        "* kernels.features[:, 0]", '* kernels.features[:, 0] * np.where(kernels.types == "Gemm", 8.0, 1.0)')
    files.write_text(path, for_two.replace(NAME, "both"))
    done = check(mine, "both", "--estimators", path)
    assert (done.returncode, "not admitted for Gemm: its error" in done.stderr) == (0, True)
    (entry,) = admitted.read_entries(folder_of(mine))
    assert (entry.types, entry.forced, entry.errors.count) == (("Softmax",), False, 24)
    assert entry.errors.mape < 0.97 * entry.errors_before.mape
    answer = Predictor(mine, strict=True, estimators=[path]).predict("mine.onnx")
    assert [used.types for used in answer.estimators] == [("Softmax",)]


def test_another_check_compares_with_the_admitted_estimator(mine: Workspace) -> None:
    """An estimator may replace another one. It takes over the types, and is not compared with itself."""
    assert check(mine, NAME, "--estimators", named(mine)).returncode == 0
    assert check(mine, NAME, "--estimators", named(mine)).returncode == 0
    second = mine.root / "second.py"
    files.write_text(second, WITH_ARRAY.replace(NAME, "second"))
    done = check(mine, "second", "--estimators", second, "--estimators", named(mine))
    assert (done.returncode, "not admitted" in done.stderr) == (1, True)  # just as good as the first is not better
    assert check(mine, "second", "--estimators", second, "--estimators", named(mine), "--force").returncode == 0
    (entry,) = admitted.read_entries(folder_of(mine))
    assert (entry.name, entry.types, entry.forced) == ("second", ("Softmax",), True)
    assert len(list(folder_of(mine).glob("estimator_*"))) == 1


def test_a_workspaces_files_do_not_run_by_themselves(mine: Workspace) -> None:
    mark = mine.root / "it_ran"
    files.write_text(mine.root / "estimators" / "hostile.py", f"open({str(mark)!r}, 'w')\n{EXAMPLE}")
    assert check(mine, "--list").returncode == 0
    assert check(mine, "xgboost", "--types", "Softmax", "--dry-run").returncode in (0, 1)
    Predictor(mine).predict("mine.onnx")
    assert not mark.exists()
    find_estimators([mine.root / "estimators" / "hostile.py"])
    assert mark.exists()


def test_code_that_differs_from_the_checked_one_is_refused(mine: Workspace) -> None:
    named(mine).write_text(WITH_ARRAY)
    assert check(mine, NAME, "--estimators", named(mine)).returncode == 0
    with pytest.raises(UserError, match=f"{NAME}: not found"):
        Predictor(mine).predict("mine.onnx")
    assert Predictor(mine, estimators=[named(mine)]).predict("mine.onnx").estimators
    named(mine).write_text(WITH_ARRAY + "\n# changed\n")
    with pytest.raises(UserError, match="has changed since; check it again"):
        Predictor(mine, estimators=[named(mine).parent]).predict("mine.onnx")
    (path,) = folder_of(mine).glob("estimator_*")
    named(mine).write_text(WITH_ARRAY)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match="damaged or changed"):
        Predictor(mine, estimators=[named(mine)]).predict("mine.onnx")


def test_the_environment_names_files_too(mine: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NAME not in find_estimators()
    monkeypatch.setenv(VARIABLE, str(named(mine).parent))
    assert find_estimator(NAME).source == f"file {NAME}.py"


def test_under_a_load_estimators_use_the_predictors_slowdown(mine: Workspace) -> None:
    kernel, load = softmax_of(mine), {trained_workspace.METRIC: 0.5}
    plain = Predictor(mine).fitted.predictors
    slowdown = plain.predict([kernel], load).latency_ms[0] / plain.predict([kernel], {}, strict=True).latency_ms[0]
    assert slowdown > 1.2
    assert check(mine, NAME, "--estimators", named(mine), "--label", plain.labels[0]).returncode == 0
    with_estimator = Predictor(mine, estimators=[named(mine)]).fitted.predictors
    idle, loaded = (with_estimator.predict([kernel], metrics, strict=True).latency_ms[0] for metrics in ({}, load))
    assert idle == pytest.approx(trained_workspace.made_up_ms(kernel), rel=1e-3)
    assert loaded / idle == pytest.approx(slowdown)


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


def softmax_task(workspace: Workspace) -> Any:
    config = TrainingConfig(folds=2, threads=1)
    rows = read_training_set(workspace, local_target("cpu").name)
    return task_for(workspace, rows, "run", lambda name: name == "Softmax", None, config)


def test_families_are_held_out(made: Path) -> None:
    task = softmax_task(Workspace(made))
    assert task.hold_out == "family"
    assert (task.types, int(task.tested.sum())) == (("Softmax",), 24)
    for learn, test in task.folds:
        out = set().union(*(task.rows.groups[row] for row in np.flatnonzero(test)))
        assert not any(task.rows.groups[row] & out for row in np.flatnonzero(learn))
    with pytest.raises(UserError, match="0 such kernels were measured, a check needs 20"):
        task_for(Workspace(made), task.rows, "run", lambda name: name == "Tanh", None, task.config)


@pytest.mark.parametrize("name", ["roofline", "random_forest", "xgboost", "neural_network", "in_use"])
def test_hases_estimators_predict_the_same_after_saving(name: str, made: Path, tmp_path: Path) -> None:
    task = softmax_task(Workspace(made))
    estimator = find_estimator(name).estimator
    fitted = task.fitted_to_all(estimator)
    kernels, times_ms = task.kernel_rows(estimator.features, task.chosen), task.rows.times_ms["run"][task.chosen]
    reopened = open_estimator(save_estimator(tmp_path, name, fitted), estimator, tmp_path, "")
    predicted = fitted.predict_ms(kernels)
    has_trees = name in ("random_forest", "xgboost", "in_use")
    assert reopened.predict_ms(kernels) == pytest.approx(predicted, rel=1e-4 if has_trees else 0)
    assert np.abs(predicted / times_ms - 1).mean() < 0.25  # on its training rows


def test_all_estimators_in_one_table(mine: Workspace) -> None:
    done = check(mine, "--types", "Softmax,Gemm", "--estimators", named(mine), "--json")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    by_type = {part: [row["estimator"] for row in table if row["type"] == part] for part in ("all", "Gemm", "Softmax")}
    for_all = ["what is in use", "roofline", "neural_network", "random_forest", "xgboost"]
    assert sorted(by_type["all"]) == sorted(by_type["Gemm"]) == sorted(for_all)
    assert sorted(by_type["Softmax"]) == sorted([*for_all, NAME])
    assert not (target_files.ESTIMATORS.path(folder_of(mine))).exists()


@pytest.fixture
def fitted_roofline(made: Path) -> Any:
    return softmax_task(Workspace(made)).fitted_to_all(find_estimator("roofline").estimator)


def test_a_class_that_is_not_listed_is_refused(fitted_roofline: Any, tmp_path: Path) -> None:
    saved = save_estimator(tmp_path, "roofline", fitted_roofline)
    assert (saved.file, saved.learned["roofline"][CLASS]) == (None, "Roofline")  # it has no arrays
    saved.learned["roofline"][CLASS] = "Popen"
    with pytest.raises(UserError, match="refused: it holds a Popen"):
        open_estimator(saved, type(fitted_roofline), tmp_path, "")

    class Forgetful(type(fitted_roofline)):  # type: ignore[misc]
        saved_classes = ()

    forgetful = Forgetful()
    forgetful.restore(fitted_roofline.saved())
    with pytest.raises(UserError, match="saves a Roofline, which its saved_classes do not list"):
        save_estimator(tmp_path, "roofline", forgetful)
    with pytest.raises(UserError, match="refused: it holds a Roofline"):
        open_estimator(save_estimator(tmp_path, "roofline", fitted_roofline), Forgetful, tmp_path, "")


@pytest.mark.parametrize(("damage", "message"), [
    ({"version": 7}, "saved with version 7"), ({"name": "another"}, "saved with name another"),
    ({"features": ("work 9",)}, "saved with features work 9"), ({"learned": {}}, "can't read what it saved"),
    ({"learned": {"roofline": {CLASS: "Roofline", "fields": {"floor_ms": "x"}}}}, "damaged: Roofline")])
def test_damaged_forms_are_refused(damage: dict[str, Any], message: str, fitted_roofline: Any, tmp_path: Path) -> None:
    saved = save_estimator(tmp_path, "roofline", fitted_roofline)
    with pytest.raises(UserError, match=f"{message}.*make it anew"):
        open_estimator(Saved.model_validate(saved.model_dump() | damage), type(fitted_roofline), tmp_path, "make it anew")


@pytest.mark.parametrize(("text", "message"), [
    ("x = 1\n", "defines no Estimator"), ("import nowhere_to_be_found\n", "can't be run"),
    (EXAMPLE.replace('    name = "softmax_by_bytes"\n', ""), "does not state its name"),
    (EXAMPLE.replace(NAME, "../x"), "letters, digits"),
    (EXAMPLE.replace(f'"{NAME}"', '"roofline"'), "two estimators have this name"),
    (EXAMPLE.replace('EnvironmentPattern(device="cpu"), ', ""), "must be a tuple of EnvironmentPattern")])
def test_files_that_are_no_estimators(text: str, message: str, tmp_path: Path) -> None:
    files.write_text(tmp_path / "one.py", text)
    with pytest.raises(UserError, match=message):
        find_estimators([tmp_path])


def test_predictions_that_are_not_positive_are_refused(mine: Workspace) -> None:
    path = mine.root / "negative.py"
    files.write_text(path, EXAMPLE.replace(NAME, "negative").replace("return self", "return -self"))
    done = check(mine, "negative", "--estimators", path, "--force")
    assert (done.returncode, "must predict a positive number of ms" in done.stderr) == (1, True)


@pytest.mark.parametrize(("types", "message"), [("Softmaks", "no kernel of this type"), ("Softmax,Gemm", "is not for it")])
def test_types_that_can_not_be_checked(types: str, message: str, mine: Workspace) -> None:
    done = check(mine, NAME, "--estimators", named(mine), "--types", types)
    assert (done.returncode, message in done.stderr) == (1, True)


def test_an_estimator_holds_for_its_environments(mine: Workspace) -> None:
    target = local_target("cpu")
    assert EnvironmentPattern().holds_for(target)
    assert EnvironmentPattern(device="cpu", runtime="ort", target=f"{target.name[:5]}*").holds_for(target)
    assert not EnvironmentPattern(runtime="tvm").holds_for(target)
    path = mine.root / "elsewhere.py"
    of_tvm = EXAMPLE.replace('EnvironmentPattern(device="cpu")', 'EnvironmentPattern(runtime="tvm")')
    files.write_text(path, of_tvm.replace(NAME, "elsewhere"))
    done = check(mine, "elsewhere", "--estimators", path)
    assert (done.returncode, "does not hold for" in done.stderr) == (1, True)
