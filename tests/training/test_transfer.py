"""Predictors that start from those of another device, here of a made-up one whose times follow a formula."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from command import printed, run_script
from conftest import Once
from made_up_dataset import QUICK, TARGET, conv, draw_kernels, relu, train_workspace, write_dataset

from hase.learned.kernels.estimators import CORRECTION_FEATURES, KernelModel, OtherPredictors, Transferred, predict_kernels
from hase.learned.kernels.features import KERNEL_FEATURES
from hase.learned.kernels.interface import TrainingSet
from hase.learned.kernels.predictors import read_predictors
from hase.learned.kernels.sidecar import read_sidecar
from hase.training.composition.held_out import predict_as_learned
from hase.training.composition.measured_models import measured_models
from hase.training.kernels.fitting import as_ratios, fit_kernel_model, fit_transferred
from hase.training.kernels.label_training import train_label
from hase.training.kernels.training_set import read_training_set
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

FEW_TREES = QUICK.model_copy(update={"folds": 3})
NEW = [conv(channels=40, side=20, out=56), conv(channels=20, side=24, out=40, window=5), relu(channels=40, side=20)]
SLOWER = 2.5


@pytest.fixture(scope="module")
def other_rows(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    """The rows of the other device: 400 kernels, idle."""
    workspace = Workspace(tmp_path_factory.mktemp("elsewhere"))
    write_dataset(workspace, {kernel.id: kernel for kernel in draw_kernels(400)}, {}, {}, {0.0: 0.0})
    return read_training_set(workspace, TARGET.name)


@pytest.fixture(scope="module")
def start(other_rows: TrainingSet) -> OtherPredictors:
    return OtherPredictors("elsewhere", fit_kernel_model(other_rows, "run", {}, FEW_TREES))


def few(rows: TrainingSet, count: int = 40) -> TrainingSet:
    """Some kernels of a device that is slower than the other one by a factor."""
    chosen = np.isin(np.arange(len(rows)), np.random.default_rng(0).permutation(len(rows))[:count])
    return replace(rows.rows(chosen), times_ms={"run": SLOWER * rows.times_ms["run"][chosen]})


def times_of(model: KernelModel | Transferred) -> npt.NDArray[np.float64]:
    return predict_kernels(model, NEW, KERNEL_FEATURES.matrix(NEW), [0.0])


def test_a_correction_learns_the_ratio_to_the_other_device(other_rows: TrainingSet, start: OtherPredictors) -> None:
    rows = few(other_rows)
    ratios, other_ms = as_ratios(rows, "run", start.model)
    assert ratios.times_ms["run"] * other_ms == pytest.approx(rows.times_ms["run"])
    assert np.median(ratios.times_ms["run"]) == pytest.approx(SLOWER, rel=0.05)
    assert ratios.features.shape[1] == len(CORRECTION_FEATURES.names) == len(KERNEL_FEATURES.names) + 1


def test_a_type_measured_only_on_the_other_device_is_slower_alike(other_rows: TrainingSet, start: OtherPredictors) -> None:
    model = fit_transferred(few(other_rows.rows(other_rows.types != "Relu")), "run", {}, FEW_TREES, start)
    assert "Relu" not in model.predictor_of
    assert times_of(model)[2] == pytest.approx(SLOWER * times_of(start.model)[2], rel=0.05)
    assert model.roofline.floor_ms == pytest.approx(SLOWER * start.model.roofline.floor_ms, rel=0.05)


@pytest.mark.slow
def test_cross_validation_decides(other_rows: TrainingSet, start: OtherPredictors) -> None:
    rows = few(other_rows, 90)
    trained, alone = train_label(rows, "run", FEW_TREES, start), train_label(rows, "run", FEW_TREES)
    assert isinstance(trained.model, Transferred)
    assert trained.errors[0].mape < 0.7 * alone.errors[0].mape
    shuffled = replace(other_rows, times_ms={"run": np.random.default_rng(1).permutation(other_rows.times_ms["run"])})
    nonsense = OtherPredictors("nonsense", fit_kernel_model(shuffled, "run", {}, FEW_TREES))
    assert isinstance(train_label(rows, "run", FEW_TREES, nonsense).model, KernelModel)


@pytest.fixture(scope="module")
def workspace(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A dataset, predictors of another target, and predictors that the command corrected from these."""
    shared = Workspace(once("made_up_predictors", train_workspace))
    workspace = Workspace(shutil.copytree(shared.root, tmp_path_factory.mktemp("transfer") / "workspace"))
    workspace.predictors(TARGET.name).rename(workspace.predictors("elsewhere"))
    settings = "folds: 2\nthreads: 1\nxgboost: {trees: 40, column_share: 1.0}\nxgboost_class: {trees: 10}\nforest: {trees: 3}\n"
    (workspace.root / "training.yaml").write_text(settings, encoding="utf-8")
    printed(*command(workspace, "elsewhere"))
    return workspace


def command(workspace: Workspace, start: str) -> tuple[str, ...]:
    return ("training/train_kernel_model.py", "--workspace", str(workspace.root), "--target", TARGET.name, "--config",
            str(workspace.root / "training.yaml"), "--start-from", start)


@pytest.mark.slow
def test_held_out_times_are_learned_like_the_predictors(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a family, and again from the other device: only the fold's rows of this device are used for the correction."""
    predictors, rows = read_predictors(workspace.predictors(TARGET.name)), read_training_set(workspace, TARGET.name)
    models = measured_models(workspace, TARGET.name, predictors.sidecar)
    row_counts: list[int] = []

    def fit(of_fold: TrainingSet, *options: Any) -> Transferred:
        row_counts.append(len(of_fold))
        return fit_transferred(of_fold, *options)

    monkeypatch.setattr("hase.training.kernels.fitting.fit_transferred", fit)
    groups = [model.group for model in models]
    times_by_label = predict_as_learned(predictors, ("run",), rows, models, groups, "family", FEW_TREES, "leaving out")
    assert len(row_counts) == len(set(groups)) == 3
    assert max(row_counts) < len(rows)
    assert times_by_label["run"].keys() == {model.record.model for model in models}


@pytest.mark.slow
def test_the_command_keeps_a_copy_of_the_other_predictors(workspace: Workspace) -> None:
    folder = workspace.predictors(TARGET.name)
    about = read_sidecar(folder).labels["run"]
    assert about.start == "elsewhere"
    predictors = read_predictors(folder)
    assert isinstance(predictors.kernel_model("run"), Transferred)
    elsewhere = read_predictors(workspace.predictors("elsewhere")).predict(NEW, {}, "run", strict=True).latency_ms
    times_ms = predictors.predict(NEW, {}, "run", strict=True).latency_ms
    assert times_ms == pytest.approx(elsewhere, rel=0.15), "the same device, so the correction is small"
    for path in workspace.predictors("elsewhere").iterdir():
        path.unlink()
    assert read_predictors(folder).predict(NEW, {}, "run", strict=True).latency_ms == times_ms
    (folder / str(about.file)).unlink()
    with pytest.raises(UserError, match=r"run-.* missing"):
        read_predictors(folder)


def test_a_missing_target_to_start_from(tmp_path: Path) -> None:
    (tmp_path / "training.yaml").write_text("folds: 2\n", encoding="utf-8")
    refused = run_script(*command(Workspace(tmp_path), "nowhere"))
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: --start-from nowhere: no predictors of that target")
