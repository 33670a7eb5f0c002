"""Composition: the fit finds α and β of constructed data, and uses no evaluated model; also of a handful of models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command import printed
from conftest import Once
from made_up_dataset import QUICK, TARGET, chain, draw_kernels, train, train_workspace, write_workspace

from hase.learned import target_files
from hase.learned.composition.fitted import Candidate, Composition, Kind, latency_ms, read_composition
from hase.learned.composition.host_side import DEFAULT_COSTS
from hase.learned.default_predictors import shipped_costs
from hase.learned.kernels import estimators
from hase.learned.kernels.interface import TrainingSet
from hase.learned.kernels.sidecar import read_sidecar, write_sidecar
from hase.records.dataset_files import model_table_path, write_digests
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.composition.calibration import error_range_of
from hase.training.composition.fitting import (
    Tried,
    choose,
    exceeds_noise,
    fit_target,
    kept_composition,
    try_few_models,
    try_line,
)
from hase.training.composition.formulas import fit_line, latencies_ms, leave_out
from hase.training.composition.held_out import predict_out_of_fold
from hase.training.composition.measured_models import MeasuredModel, left_out_groups, measured_models, model_tracks
from hase.training.kernels import fitting
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

COMMAND = "training/fit_composition.py"


@pytest.fixture(scope="module")
def trained(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A copy of the shared workspace with predictors of one label."""
    shared = once("made_up_predictors", train_workspace)
    workspace = Workspace(shutil.copytree(shared, tmp_path_factory.mktemp("composition") / "workspace"))
    folder = workspace.predictors(TARGET.name)
    about = read_sidecar(folder)
    write_sidecar(folder, about.model_copy(update={"labels": {"run": about.labels["run"]}}))
    files.write_text(workspace.root / "quick.yaml", (
        "folds: 3\nthreads: 1\nxgboost: {trees: 60, learning_rate: 0.2}\nxgboost_class: {trees: 10}\n"))
    return workspace


@pytest.fixture
def copied(trained: Workspace, tmp_path: Path) -> Workspace:
    """A copy that a test may spoil."""
    return Workspace(shutil.copytree(trained.root, tmp_path / "copy"))


def test_the_line_is_found_and_stays_physical() -> None:
    sums = np.array([1.0, 2.0, 5.0, 20.0])
    assert fit_line(sums, 1.3 * sums + 0.4) == pytest.approx((1.3, 0.4, 0.0))
    alpha, beta, _ = fit_line(np.array([1.0, 1.0, 1000.0]), np.array([2.0, 2.0, 1000.0]))  # short models count as much
    assert (alpha + beta, alpha * 1000 + beta) == pytest.approx((2.0, 1000.0), rel=0.01)
    alpha, beta, _ = fit_line(sums, 2 * sums - 0.5)  # would want a negative β
    assert (alpha > 0, beta) == (True, 0.0)
    assert fit_line(np.array([3.0, 3.0]), np.array([4.5, 4.5])) == pytest.approx((1.5, 0.0, 0.0))  # equal sums: no β
    sums, nodes = np.array([1.0, 2.0, 5.0, 10.0, 20.0, 40.0]), np.array([100.0, 20.0, 60.0, 100.0, 30.0, 80.0])
    line = fit_line(sums, 1.1 * sums - 0.004 * nodes + 0.2, nodes)
    assert line == pytest.approx((1.1, 0.2, -0.004))
    assert latency_ms(line, 1.0, 100) == pytest.approx(0.9)
    assert latency_ms(line, 1.0, 100_000) == pytest.approx(0.11)  # never below a tenth of α·Σ


def tried(label: str, kind: Kind, *errors: float, known: tuple[float, ...] = ()) -> Tried:
    """A candidate that predicts models of 1 ms with these errors, and with others where kernels are `known`."""
    mean_error, largest, predicted_ms = float(np.mean(errors)), max(errors), 1.0 + np.array(errors)
    return Tried(Candidate(label=label, kind=kind, alpha=1.0, beta_ms=0.0, cv_mape=mean_error, cv_max=largest,
                           fit_mape=mean_error, plain_mape=mean_error), predicted_ms,
                 1.0 + np.array(known) if known else predicted_ms)


PLAIN = tried("run", "sum", 0.17, 0.18, 0.16, 0.18)
SLIGHTLY = tried("run", "critical_path", 0.10, 0.22, 0.22, 0.13)  # better by 0.005 on average, and that by ± 0.035
SURELY = tried("run", "sum_nodes", 0.15, 0.16, 0.15, 0.16)  # better by 0.0175 ± 0.0025
LONGEST = [PLAIN, tried("run", "critical_path", 0.1, 0.1, 0.1, 0.1)]
GOOD = tried("kernel_time", "sum", 0.1, 0.1, 0.1, 0.1)


@pytest.mark.parametrize(("candidates", "options", "expected"), [
    pytest.param([SLIGHTLY, PLAIN], {}, ("run", "sum"), id="the simplest, unless another is better by more than noise"),
    pytest.param([PLAIN, SLIGHTLY, SURELY], {}, ("run", "sum_nodes"), id="one that is better by more than noise"),
    pytest.param([SURELY, PLAIN], {"groups": None}, ("run", "sum"), id="nothing was held out, so nothing is certain"),
    pytest.param(LONGEST, {"overlap": False}, ("run", "sum"), id="the longest path needs kernels that overlap"),
    pytest.param(LONGEST, {"overlap": True}, ("run", "critical_path"), id="they overlap"),
    pytest.param(LONGEST, {"overlap": False, "forced": "critical_path"}, ("run", "critical_path"), id="forced"),
    pytest.param([tried("run", "sum", 0.0, 0.5, 0.0, 0.0), GOOD], {}, ("kernel_time", "sum"), id="the best label of a kind"),
    pytest.param([tried("run", "sum", *[0.2] * 4), tried("kernel_time", "sum", *[0.3] * 4, known=(0.0,) * 4)], {},
                 ("kernel_time", "sum"), id="both errors count: with kernels predicted and as measured")])
def test_which_candidate_is_used(candidates: list[Tried], options: dict[str, Any], expected: tuple[str, str]) -> None:
    asked: dict[str, Any] = {"groups": ["a", "b", "c", "d"], "overlap": True}
    used = choose(candidates, np.ones(4), **(asked | options)).candidate
    assert (used.label, used.kind) == expected
    with pytest.raises(UserError, match=r"pipeline can't be fitted here; possible are: "):
        choose(candidates, np.ones(4), None, True, "pipeline")


def test_a_family_counts_once_in_the_noise() -> None:
    """Eight models of one family for which a candidate is better are one observation, like one model for which it is worse."""
    for other, exceeds in ((-0.1, False), (0.08, True)):
        assert exceeds_noise(np.array([*[0.1] * 8, other]), [*["a"] * 8, "b"]) is exceeds


def test_noise_of_predicted_kernels_does_not_hide_a_better_kind() -> None:
    """With kernels as measured it is surely better. With kernels predicted, the families differ by more than that."""
    plain = tried("run", "sum", 0.4, 0.1, 0.0, 0.3, known=(0.09, 0.1, 0.08, 0.1))
    known = (0.05, 0.06, 0.04, 0.06)
    for errors, kind in (((0.1, 0.3, 0.3, 0.1), "sum_nodes"), ((0.4, 0.2, 0.1, 0.4), "sum")):  # by more than it gains
        richer = tried("run", "sum_nodes", *errors, known=known)
        assert choose([plain, richer], np.ones(4), ["a", "b", "c", "d"], True).candidate.kind == kind


def test_a_line_that_few_models_mislead_is_not_taken() -> None:
    """Their sums, a tenth too long or too short, are closer to each model than lines fitted to the three others."""
    sums, measured, groups = np.array([1.1, 1.8, 4.4, 7.2]), np.array([1.0, 2.0, 4.0, 8.0]), ["a", "b", "c", "d"]
    taken, predicted, _ = try_line("run", "sum", sums, sums, measured, np.ones(4), groups)
    assert np.abs(leave_out(sums, sums, measured, groups) / measured - 1).mean() > 0.15
    assert (taken.alpha, taken.beta_ms, predicted.tolist()) == (1.0, 0.0, sums.tolist())
    assert (taken.cv_mape, taken.fit_mape, taken.plain_mape) == pytest.approx((0.1, 0.1, 0.1))
    fitted = try_line("run", "sum", sums, sums, measured, np.ones(4), None).candidate  # nothing shows how good the sum is
    assert fitted.alpha != 1.0


def test_badly_predicted_kernels_do_not_move_the_line() -> None:
    """A family whose kernels nobody measured in the others is off by half, and the constants stay those of measured kernels."""
    known, nodes = np.array([1.0, 2.0, 5.0, 10.0, 20.0, 40.0]), np.array([100.0, 20.0, 60.0, 100.0, 30.0, 80.0])
    predicted, measured = known * [1, 1, 0.5, 1, 1, 0.5], 1.1 * known - 0.004 * nodes
    line = try_line("run", "sum_nodes", predicted, known, measured, nodes, list("abcdef"))
    assert (line.candidate.alpha, line.candidate.node_ms) == pytest.approx((1.1, -0.004))
    assert line.candidate.measured_cv_mape == pytest.approx(0.0, abs=1e-9)
    assert line.candidate.cv_mape == pytest.approx(0.18, abs=0.02)


@pytest.mark.slow
def test_the_command_recovers_alpha_and_beta(trained: Workspace) -> None:
    command = (COMMAND, "--workspace", trained.root, "--config", trained.root / "quick.yaml")
    composition = Composition.model_validate(json.loads(printed(*command, "--json"))[TARGET.name])
    assert read_composition(trained.predictors(TARGET.name)) == composition
    assert (composition.left_out, composition.label, composition.probe_us) == ("family", "run", None)
    assert {model.group for model in composition.models} == {"anet", "bnet", "cnet"}  # one is held out
    assert composition.alpha == pytest.approx(1.2, rel=0.15)
    used = composition.candidates[0]
    assert used.cv_mape is not None
    assert used.cv_mape < min(0.15, used.plain_mape)
    assert {(c.label, c.kind) for c in composition.candidates} == {
        ("run", "sum"), ("run", "sum_nodes"), ("run", "critical_path")}
    assert printed(*command).startswith("label\tcomposition\tCV_MAPE_%\t")  # nothing changed, so it is kept


@pytest.mark.slow
def test_a_forced_composition_is_kept_until_another_is_asked_for(copied: Workspace) -> None:
    command = (COMMAND, "--workspace", copied.root, "--config", copied.root / "quick.yaml")
    shown = printed(*command, "--composition", "critical_path")
    assert [line.split("\t")[-1] for line in shown.splitlines()[1:]] == ["", "", "forced"]
    forced = kept_composition(copied, TARGET.name, "critical_path")
    assert forced is not None
    assert (forced.kind, forced.forced, forced.overlap) == ("critical_path", True, False)
    assert kept_composition(copied, TARGET.name, "sum") is kept_composition(copied, TARGET.name) is None
    printed(*command)
    chosen_again = kept_composition(copied, TARGET.name)
    assert chosen_again is not None
    assert (chosen_again.kind != "critical_path", chosen_again.forced) == (True, False)
    folder = copied.predictors(TARGET.name)
    files.write_json(target_files.HOST.path(folder), DEFAULT_COSTS)  # something else is known of the host, so it is fitted anew
    assert kept_composition(copied, TARGET.name) is None
    write_sidecar(folder, read_sidecar(folder).model_copy(update={"dataset_sha256": "other"}))
    with pytest.raises(UserError, match="fit it anew"):
        read_composition(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), [
    ({"held_out": ("anet", "bnet", "cnet", "secretnet")}, "no model with an idle latency"),
    ({"dataset_sha256": "other"}, "changed since the predictors were trained")])
def test_what_can_not_be_fitted_is_refused(change: dict[str, object], message: str, copied: Workspace) -> None:
    folder = copied.predictors(TARGET.name)
    write_sidecar(folder, read_sidecar(folder).model_copy(update=change))
    with pytest.raises(UserError, match=message):
        fit_target(copied, TARGET.name, QUICK)
    target_files.COMPOSITION.path(folder).unlink(missing_ok=True)
    with pytest.raises(UserError, match="no composition"):
        read_composition(folder)


@pytest.mark.slow
def test_kernels_of_the_left_out_family_are_in_no_training(trained: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, sidecar = read_training_set(trained, TARGET.name), read_sidecar(trained.predictors(TARGET.name))
    models = measured_models(trained, TARGET.name, sidecar)
    trained_ids: list[set[str]] = []
    fit = fitting.fit_kernel_model

    def spy(rows: TrainingSet, *options: object) -> estimators.KernelModel:
        trained_ids.append(set(rows.ids))
        return fit(rows, *options)  # type: ignore[arg-type]

    monkeypatch.setattr("hase.training.composition.held_out.fit_kernel_model", spy)
    left_out, groups = left_out_groups(models)
    times = predict_out_of_fold(rows, models, groups, left_out, "run", {}, QUICK.model_copy(update={"folds": 3}))
    assert len(trained_ids) == 3
    for family in ("anet", "bnet", "cnet"):
        kernels = {name for model in models if model.group == family for name in model.record.kernels}
        assert sum(not (kernels & ids) for ids in trained_ids) == 1
    assert times.keys() == {model.record.model for model in models}


@pytest.mark.slow
def test_one_family_leaves_models_out_and_the_host_s_pace_is_that_beside_each(workspace: Workspace) -> None:
    write_workspace(workspace, families=("anet",), each=3, sampled=60)
    path = model_table_path(workspace.dataset(TARGET.name))
    pd.read_csv(path).assign(Probe_us=[300.0, 300.0, 330.0]).to_csv(path, index=False)
    write_digests(path.parent)
    train(workspace, "run")
    composition = fit_target(workspace, TARGET.name, QUICK)
    assert (composition.left_out, composition.probe_us) == ("model", 300.0)
    assert composition.candidates[0].cv_mape is not None
    models = measured_models(workspace, TARGET.name, read_sidecar(workspace.predictors(TARGET.name)))
    assert [model.pace for model in models] == pytest.approx([1.0, 1.0, 1.1])


@pytest.mark.slow
def test_one_model_with_few_kernels(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    write_workspace(workspace, families=("anet",), each=1, sampled=0)
    train(workspace, "run")
    composition = fit_target(workspace, TARGET.name, QUICK)
    assert (composition.left_out, composition.beta_ms, composition.candidates[0].cv_mape) == ("nothing", 0.0, None)
    assert ("one model measured" in caplog.text, "too few kernels" in caplog.text) == (True, True)


def test_an_interval_covers_nine_of_ten() -> None:
    """Errors from one distribution: the interval leaves out a twentieth on each side and covers the left-out models."""
    draw = np.random.default_rng(2)
    predicted = draw.uniform(1.0, 20.0, 400)
    measured = predicted * draw.normal(1.02, 0.05, 400)
    interval = error_range_of(predicted, measured, [f"family{place % 10}" for place in range(400)])
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((1.02 - 1.645 * 0.05, 1.02 + 1.645 * 0.05), abs=0.015)
    assert 0.85 <= interval.coverage <= 0.95
    assert error_range_of(np.ones(19), np.ones(19), ["a", *["b"] * 18]) is None  # too few models
    unlike = error_range_of(np.ones(40), np.where(np.arange(40) < 10, 2.0, 1.0), ["odd"] * 10 + [
        f"usual{place % 3}" for place in range(30)])  # a family unlike the others is not covered
    assert unlike is not None
    assert unlike.coverage == 0.75


FEW_KERNELS = draw_kernels(30)
RECORDS = [chain(name, FEW_KERNELS[begin:begin + 10]) for begin, name in ((0, "anet_x"), (10, "bnet_x"), (20, "cnet_x"))]
MEASURED = {kernel.id: {"run": 0.1 + 0.01 * place, GPU_LABEL: 0.01 + 0.001 * place, LAUNCHES: 1.0}
            for place, kernel in enumerate(FEW_KERNELS)}
WRONG = 3.0  # predicted over measured time of held-out kernels
SLOW = 4.0  # pace of a host that is the slower track of these models


def out_of_fold(*labels: str) -> dict[str, dict[str, dict[str, float]]]:
    return {label: {record.model: {name: (1.0 if label == LAUNCHES else WRONG) * MEASURED[name][label]
                                   for name in record.kernels} for record in RECORDS} for label in labels}


def sums_ms(label: str) -> np.ndarray:
    return np.array([sum(MEASURED[node.kernel_id][label] for node in record.nodes) for record in RECORDS])


def test_the_line_of_a_few_models_is_fitted_to_measured_kernels() -> None:
    """Held-out models have predicted kernels. Of one model nothing is held out."""
    predicted_ms, latency = 1.2 * WRONG * sums_ms("run") + 0.05, 1.2 * sums_ms("run") + 0.05
    models = [MeasuredModel(record, record.group, float(time_ms)) for record, time_ms in zip(RECORDS, latency, strict=True)]
    [tried] = try_few_models(models, out_of_fold("run"), MEASURED, ["a", "b", "c"])
    found = tried.candidate
    assert (found.label, found.kind, found.alpha, found.beta_ms, found.fit_mape, found.cv_mape) == (
        "run", "sum", *map(pytest.approx, (1.2, 0.05)), pytest.approx(0.0, abs=1e-9),
        pytest.approx(np.abs(predicted_ms / latency - 1).mean()))
    assert tried.predicted_ms == pytest.approx(predicted_ms)
    assert try_few_models(models[:1], out_of_fold("run"), MEASURED, None)[0].candidate.cv_mape is None


def test_a_gpu_has_the_shipped_costs_at_the_pace_of_its_host() -> None:
    times = out_of_fold(GPU_LABEL, LAUNCHES)
    unmeasured = [MeasuredModel(record, record.group, 1.0) for record in RECORDS]
    known_tracks = [model_tracks(model, *({name: MEASURED[name][label] for name in model.record.kernels}
                                    for label in (GPU_LABEL, LAUNCHES))) for model in unmeasured]
    latency = latencies_ms(known_tracks, shipped_costs().at_pace(SLOW))
    measured = [replace(model, latency_ms=float(latency_ms)) for model, latency_ms in zip(unmeasured, latency, strict=True)]
    [tried] = try_few_models(measured, times, MEASURED, ["a", "b", "c"])
    found = tried.candidate
    assert found.costs is not None
    assert found.costs.launch_ms == pytest.approx(SLOW * shipped_costs().launch_ms, rel=0.02)
    assert (found.kind, found.measured_cv_mape) == ("pipeline", pytest.approx(0.0, abs=0.03))
    assert found.cv_mape is not None
    assert found.cv_mape > 0.2, "their kernels are predicted too long"
