"""Composition: the fit finds α and β of constructed data, and uses no evaluated model."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from command import printed
from made_up_dataset import TARGET, chain, draw_kernels, true_ms, write_workspace

from hase.learned import target_files
from hase.learned.composition.fitted import Candidate, Kind, latency_ms, read_composition
from hase.learned.composition.host_side import DEFAULT_COSTS, host_sha256
from hase.learned.kernels import estimators
from hase.learned.kernels.interface import ForestSettings, TrainingConfig, TrainingSet, XgboostSettings
from hase.learned.kernels.sidecar import read_sidecar
from hase.records.dataset_files import model_table_path, note_tables
from hase.training.composition.calibration import error_range_of
from hase.training.composition.fitting import Tried, choose, exceeds_noise, fit_target, kept_composition, try_line
from hase.training.composition.formulas import fit_line, leave_out
from hase.training.composition.held_out import predict_out_of_fold
from hase.training.composition.measured_models import MeasuredModel, kernels_overlap, left_out_groups, measured_models, tracks
from hase.training.kernels import fitting
from hase.training.kernels.label_training import train_label
from hase.training.kernels.training_set import read_training_set
from hase.training.train_kernel_model import save
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow

QUICK = TrainingConfig(
    folds=3, threads=1, own_min_kernels=60, xgboost=XgboostSettings(trees=150, learning_rate=0.1, bins=64),
    forest=ForestSettings(trees=3))
FAMILIES = ["a", "b", "c", "d"]


def train(workspace: Workspace, label: str = "run") -> TrainingSet:
    rows = read_training_set(workspace, TARGET.name)
    save(workspace, rows, [train_label(rows, label, QUICK)], QUICK)
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("composition"))
    write_workspace(workspace, families=("anet", "bnet", "cnet", "secretnet"), held_out=("secretnet",))
    train(workspace)
    return workspace


def test_finds_the_line() -> None:
    sums = np.array([1.0, 2.0, 5.0, 20.0])
    assert fit_line(sums, 1.3 * sums + 0.4) == pytest.approx((1.3, 0.4, 0.0))


def test_short_models_count_as_much_as_long_ones() -> None:
    sums = np.array([1.0, 1.0, 1000.0])
    measured = np.array([2.0, 2.0, 1000.0])
    alpha, beta, _ = fit_line(sums, measured)
    assert alpha * 1.0 + beta == pytest.approx(2.0, rel=0.01)
    assert alpha * 1000 + beta == pytest.approx(1000, rel=0.01)


def test_the_line_stays_physical() -> None:
    sums = np.array([1.0, 2.0, 4.0])
    alpha, beta, _ = fit_line(sums, 2 * sums - 0.5)  # would want a negative β
    assert beta == 0.0
    assert alpha > 0
    assert fit_line(np.array([3.0]), np.array([4.5])) == (1.5, 0.0, 0.0)  # one model: no β
    assert fit_line(np.array([3.0, 3.0]), np.array([4.5, 4.5])) == pytest.approx((1.5, 0.0, 0.0))
    alpha, beta, _ = fit_line(np.array([1.0, 2.0]), np.array([2.0, 1.0]))  # the longer one is faster
    assert alpha > 0
    assert beta >= 0


def test_the_cost_of_a_node_is_recovered_and_bounded() -> None:
    sums, nodes = np.array([1.0, 2.0, 5.0, 10.0, 20.0, 40.0]), np.array([100.0, 20.0, 60.0, 100.0, 30.0, 80.0])
    line = fit_line(sums, 1.1 * sums - 0.004 * nodes + 0.2, nodes)
    assert line == pytest.approx((1.1, 0.2, -0.004))
    assert latency_ms(line, 1.0, 100) == pytest.approx(0.9)
    assert latency_ms(line, 1.0, 100_000) == pytest.approx(0.11)  # never below a tenth of α·Σ
    assert fit_line(sums[:4], 2 * sums[:4], nodes[:4]).node_ms == 0.0  # four models are too few


def test_predictions_without_the_left_out_group() -> None:
    sums = np.array([1.0, 2.0, 3.0, 4.0])
    measured = np.array([1.0, 2.0, 30.0, 40.0])
    groups = ["a", "a", "b", "b"]
    assert leave_out(sums, sums, measured, groups) == pytest.approx([10.0, 20.0, 3.0, 4.0])
    assert leave_out(sums, 2 * sums, measured, groups) == pytest.approx([20.0, 40.0, 6.0, 8.0])


def tried(label: str, kind: Kind, *errors: float) -> Tried:
    """A candidate that predicts models of 1 ms with these errors."""
    mean_error, largest = float(np.mean(errors)), max(errors)
    return Tried(Candidate(label=label, kind=kind, alpha=1.0, beta_ms=0.0, cv_mape=mean_error, cv_max=largest,
                           fit_mape=mean_error, plain_mape=mean_error), 1.0 + np.array(errors), 1.0 + np.array(errors))


def chosen(candidates: list[Tried], overlap: bool = True, groups: list[str] | None = FAMILIES,
           forced: Kind | None = None) -> tuple[str, str]:
    used = choose(candidates, np.ones(len(FAMILIES)), groups, overlap, forced).candidate
    return used.label, used.kind


def test_a_candidate_errs_on_what_was_held_out() -> None:
    sums, measured, groups = np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]), ["a", "b", "c"]
    good = try_line("run", "sum", sums, sums, measured, np.ones(3), groups).candidate
    assert good.plain_mape == pytest.approx(0.5)
    assert good.cv_mape == pytest.approx(0.0, abs=1e-9)


def test_badly_predicted_kernels_do_not_move_the_line() -> None:
    """A family whose kernels nobody measured in the others is off by half, and the constants stay those of measured kernels."""
    known, nodes = np.array([1.0, 2.0, 5.0, 10.0, 20.0, 40.0]), np.array([100.0, 20.0, 60.0, 100.0, 30.0, 80.0])
    measured, groups = 1.1 * known - 0.004 * nodes, list("abcdef")
    line = try_line("run", "sum_nodes", known * [1, 1, 0.5, 1, 1, 0.5], known, measured, nodes, groups)
    assert (line.candidate.alpha, line.candidate.node_ms) == pytest.approx((1.1, -0.004))
    assert line.candidate.measured_cv_mape == pytest.approx(0.0, abs=1e-9)
    assert line.candidate.cv_mape == pytest.approx(0.18, abs=0.02)
    assert line.errors(measured) == pytest.approx(np.abs(line.predicted_ms / measured - 1) / 2)


def test_both_errors_count() -> None:
    """One candidate is better with kernels predicted, and another one more so with kernels as measured."""
    known = tried("kernel_time", "sum", 0.3, 0.3, 0.3, 0.3)._replace(known_ms=np.ones(4))
    assert chosen([tried("run", "sum", 0.2, 0.2, 0.2, 0.2), known]) == ("kernel_time", "sum")


def test_noise_of_predicted_kernels_does_not_hide_a_better_kind() -> None:
    """With kernels as measured it is surely better. With kernels predicted, the families differ by more than that."""
    plain = tried("run", "sum", 0.4, 0.1, 0.0, 0.3)._replace(known_ms=1.0 + np.array([0.09, 0.1, 0.08, 0.1]))
    richer = tried("run", "sum_nodes", 0.1, 0.3, 0.3, 0.1)._replace(known_ms=1.0 + np.array([0.05, 0.06, 0.04, 0.06]))
    assert chosen([plain, richer]) == ("run", "sum_nodes")
    worse = richer._replace(predicted_ms=1.0 + np.array([0.4, 0.2, 0.1, 0.4]))  # by more than it is better otherwise
    assert chosen([plain, worse]) == ("run", "sum")


def test_the_longest_path_needs_kernels_that_overlap() -> None:
    candidates = [tried("run", "sum", 0.2, 0.2, 0.2, 0.2), tried("run", "critical_path", 0.1, 0.1, 0.1, 0.1)]
    assert chosen(candidates, overlap=False) == ("run", "sum")
    assert chosen(candidates, overlap=True) == ("run", "critical_path")
    assert chosen(candidates, overlap=False, forced="critical_path") == ("run", "critical_path")


def test_the_simplest_is_used_unless_another_is_better_by_more_than_noise() -> None:
    plain = tried("run", "sum", 0.17, 0.18, 0.16, 0.18)
    slightly = tried("run", "critical_path", 0.10, 0.22, 0.22, 0.13)  # better by 0.005 on average, and that by ± 0.035
    assert chosen([slightly, plain]) == ("run", "sum")
    surely = tried("run", "sum_nodes", 0.15, 0.16, 0.15, 0.16)  # better by 0.0175 ± 0.0025
    assert chosen([plain, slightly, surely]) == ("run", "sum_nodes")
    assert chosen([surely, plain], groups=None) == ("run", "sum")  # nothing was held out, so nothing is certain


def test_the_label_with_the_smallest_error_competes_for_its_kind() -> None:
    good, bad = tried("kernel_time", "sum", 0.1, 0.1, 0.1, 0.1), tried("run", "sum", 0.0, 0.5, 0.0, 0.0)
    assert chosen([bad, good]) == ("kernel_time", "sum")
    assert chosen([good, tried("run", "sum", 0.1, 0.1, 0.1, 0.1)]) == ("kernel_time", "sum")  # between equals the first


def test_a_family_counts_once_in_the_noise() -> None:
    """Eight models of one family for which a candidate is better are one observation, like one model for which it is worse."""
    differences = np.array([*[0.1] * 8, -0.1])
    assert not exceeds_noise(differences, [*["a"] * 8, "b"])
    assert exceeds_noise(np.array([*[0.1] * 8, 0.08]), [*["a"] * 8, "b"])


def test_a_kind_that_can_not_be_fitted_is_not_forced() -> None:
    with pytest.raises(UserError, match=r"pipeline can't be fitted here; possible are: sum"):
        chosen([tried("run", "sum", 0.1, 0.1, 0.1, 0.1)], forced="pipeline")


def test_a_profile_shows_whether_kernels_overlap() -> None:
    kernels = draw_kernels(4)
    model = MeasuredModel(chain("anet_x", kernels), "anet", 1.0)
    serial = {kernel.id: {"kernel_time": 0.1, "node_span": 0.104} for kernel in kernels}
    assert not kernels_overlap([model], serial)
    parallel = {**serial, **{kernel.id: {"kernel_time": 0.1, "node_span": 0.01} for kernel in kernels[:2]}}
    assert kernels_overlap([MeasuredModel(chain("bnet_x", kernels[2:]), "bnet", 1.0), model], parallel)
    assert not kernels_overlap([model], {kernel.id: {"run": 0.1} for kernel in kernels})  # nothing shows it


def test_a_line_that_few_models_mislead_is_not_taken() -> None:
    """Their sums, a tenth too long or too short, are closer to each model than lines fitted to the three others."""
    sums, measured, groups = np.array([1.1, 1.8, 4.4, 7.2]), np.array([1.0, 2.0, 4.0, 8.0]), ["a", "b", "c", "d"]
    taken, predicted, _ = try_line("run", "sum", sums, sums, measured, np.ones(4), groups)
    assert np.abs(leave_out(sums, sums, measured, groups) / measured - 1).mean() > 0.15
    assert (taken.alpha, taken.beta_ms, predicted.tolist()) == (1.0, 0.0, sums.tolist())
    assert (taken.cv_mape, taken.fit_mape, taken.plain_mape) == pytest.approx((0.1, 0.1, 0.1))
    fitted = try_line("run", "sum", sums, sums, measured, np.ones(4), None).candidate  # nothing shows how good the sum is
    assert fitted.alpha != 1.0


def test_recovers_alpha_and_beta(trained: Workspace) -> None:
    composition = fit_target(trained, TARGET.name, QUICK)
    assert composition.left_out == "family"
    assert len(composition.models) == 9  # the held-out family's three are not among them
    assert not any("secret" in model.model for model in composition.models)
    assert composition.alpha == pytest.approx(1.2, rel=0.15)
    used = composition.candidates[0]
    assert used.cv_mape is not None
    assert used.cv_mape < 0.15
    assert used.plain_mape > used.cv_mape
    assert {(c.label, c.kind) for c in composition.candidates} == {
        ("run", "sum"), ("run", "sum_nodes"), ("run", "critical_path")}


def test_the_host_s_pace_is_that_beside_each_model(workspace: Workspace) -> None:
    records = list(write_workspace(workspace, families=("anet",), each=3).values())
    train(workspace)
    assert fit_target(workspace, TARGET.name, QUICK).probe_us is None
    path = model_table_path(workspace.dataset(TARGET.name))
    pd.read_csv(path).assign(Probe_us=[300.0, 300.0, 330.0]).to_csv(path, index=False)
    note_tables(path.parent)
    assert fit_target(workspace, TARGET.name, QUICK).probe_us == 300.0
    models = measured_models(workspace, TARGET.name, read_sidecar(workspace.predictors(TARGET.name)))
    assert [model.pace for model in models] == pytest.approx([1.0, 1.0, 1.1])
    times = dict.fromkeys(records[2].kernels, 1.0)
    assert tracks(models[2], times, times).pace == models[2].pace


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
    times = predict_out_of_fold(rows, models, groups, left_out, "run", {}, QUICK)
    assert set(times) == {model.record.model for model in models}
    assert len(trained_ids) == 3
    for family in ("anet", "bnet", "cnet"):
        kernels = {name for model in models if model.group == family for name in model.record.kernels}
        assert sum(not (kernels & ids) for ids in trained_ids) == 1


def test_left_out_predictions_are_close(trained: Workspace) -> None:
    rows, sidecar = read_training_set(trained, TARGET.name), read_sidecar(trained.predictors(TARGET.name))
    models = measured_models(trained, TARGET.name, sidecar)
    left_out, groups = left_out_groups(models)
    times = predict_out_of_fold(rows, models, groups, left_out, "run", {}, QUICK)
    for model in models:
        predicted = sum(times[model.record.model][node.kernel_id] for node in model.record.nodes)
        assert predicted == pytest.approx(sum(true_ms(model.record.kernel_of(node)) for node in model.record.nodes), rel=0.25)


def test_one_family_leaves_models_out_and_one_model_nothing(workspace: Workspace) -> None:
    write_workspace(workspace, families=("anet",), each=3)
    train(workspace)
    composition = fit_target(workspace, TARGET.name, QUICK)
    assert composition.left_out == "model"
    assert composition.candidates[0].cv_mape is not None


def test_one_model_alone(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    write_workspace(workspace, families=("anet",), each=1)
    train(workspace)
    composition = fit_target(workspace, TARGET.name, QUICK)
    assert composition.left_out == "nothing"
    assert composition.beta_ms == 0.0
    assert composition.candidates[0].cv_mape is None
    assert "one model measured" in caplog.text
    files.write_json(target_files.COMPOSITION.path(workspace.predictors(TARGET.name)), composition)
    assert read_composition(workspace.predictors(TARGET.name)) == composition


def test_too_few_kernels_to_leave_any_out_is_reported(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    write_workspace(workspace, families=("anet",), each=2, sampled=0)
    train(workspace)
    assert fit_target(workspace, TARGET.name, QUICK).alpha > 0
    assert "too few kernels" in caplog.text


def test_only_held_out_models(workspace: Workspace) -> None:
    write_workspace(workspace, families=("secretnet",), held_out=("secretnet",))
    train(workspace)
    with pytest.raises(UserError, match="no idle latency of a model to fit a composition to"):
        fit_target(workspace, TARGET.name, QUICK)


def test_a_stale_composition_is_refused(trained: Workspace, workspace: Workspace) -> None:
    folder = workspace.predictors(TARGET.name)
    with pytest.raises(UserError, match="no composition"):
        read_composition(folder)
    files.write_json(target_files.COMPOSITION.path(folder), fit_target(trained, TARGET.name, QUICK))
    sidecar = json.loads(target_files.PREDICTORS.path(trained.predictors(TARGET.name)).read_text())
    files.write_json(target_files.PREDICTORS.path(folder), sidecar | {"dataset_sha256": "other"})
    with pytest.raises(UserError, match="fit it anew"):
        read_composition(folder)


def test_a_dataset_that_changed_since_training_is_reported(workspace: Workspace) -> None:
    write_workspace(workspace, sampled=60)
    train(workspace)
    write_workspace(workspace, sampled=70)
    with pytest.raises(UserError, match="changed since the predictors were trained"):
        fit_target(workspace, TARGET.name, QUICK)


def test_groups() -> None:
    def model(name: str, family: str) -> MeasuredModel:
        return MeasuredModel(chain(name, draw_kernels(1)), family, 1.0)

    assert left_out_groups([model("a1", "a"), model("b1", "b")]) == ("family", ["a", "b"])
    assert left_out_groups([model("a1", "a"), model("a2", "a")]) == ("model", ["a1", "a2"])
    assert left_out_groups([model("a1", "a")]) == ("nothing", ["a1"])


def test_the_command(trained: Workspace) -> None:
    command = ("training/fit_composition.py", "--workspace", trained.root)
    shown = printed(*command)
    assert shown.splitlines()[0].split("\t") == [
        "label", "composition", "CV_MAPE_%", "CV_max_%", "alpha", "beta_ms", "node_us", "fit_MAPE_%", "plain_MAPE_%",
        "alone_MAPE_%", "used"]
    shown_json = json.loads(printed(*command, "--json"))
    assert shown_json[TARGET.name]["label"] == "run"
    assert read_composition(trained.predictors(TARGET.name)).alpha == shown_json[TARGET.name]["alpha"]


def test_a_forced_composition_is_kept_until_another_is_asked_for(trained: Workspace) -> None:
    command = ("training/fit_composition.py", "--workspace", trained.root)
    shown = printed(*command, "--composition", "critical_path")
    assert [line.split("\t")[-1] for line in shown.splitlines()[1:]] == ["", "", "forced"]
    forced = kept_composition(trained, TARGET.name, "critical_path")
    assert forced is not None
    assert (forced.kind, forced.forced, forced.overlap) == ("critical_path", True, False)
    assert kept_composition(trained, TARGET.name, "sum") is None
    assert kept_composition(trained, TARGET.name) is None
    printed(*command)
    chosen_again = kept_composition(trained, TARGET.name)
    assert chosen_again is not None
    assert (chosen_again.kind != "critical_path", chosen_again.forced) == (True, False)
    assert kept_composition(trained, TARGET.name, chosen_again.kind) is None  # it was chosen, not forced


def test_a_composition_is_fitted_again_once_something_else_is_known_of_the_host(trained: Workspace) -> None:
    printed("training/fit_composition.py", "--workspace", trained.root)
    folder = trained.predictors(TARGET.name)
    assert kept_composition(trained, TARGET.name) is not None
    files.write_json(target_files.HOST.path(folder), DEFAULT_COSTS)
    try:
        assert kept_composition(trained, TARGET.name) is None
        printed("training/fit_composition.py", "--workspace", trained.root)
        kept = kept_composition(trained, TARGET.name)
        assert kept is not None
        assert kept.host_sha256 == host_sha256(folder) != ""
    finally:
        target_files.HOST.path(folder).unlink()


def test_an_interval_covers_nine_of_ten() -> None:
    """Errors from one distribution: the interval leaves out a twentieth on each side and covers the left-out models."""
    draw = np.random.default_rng(2)
    predicted = draw.uniform(1.0, 20.0, 400)
    measured = predicted * draw.normal(1.02, 0.05, 400)
    interval = error_range_of(predicted, measured, [f"family{place % 10}" for place in range(400)])
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((1.02 - 1.645 * 0.05, 1.02 + 1.645 * 0.05), abs=0.015)
    assert 0.85 <= interval.coverage <= 0.95


def test_too_few_models_give_no_interval() -> None:
    assert error_range_of(np.ones(19), np.ones(19), ["a", *["b"] * 18]) is None


def test_a_family_unlike_the_others_lowers_the_coverage() -> None:
    predicted, measured = np.ones(40), np.where(np.arange(40) < 10, 2.0, 1.0)
    interval = error_range_of(predicted, measured, ["odd"] * 10 + [f"usual{place % 3}" for place in range(30)])
    assert interval is not None
    assert interval.coverage == 0.75
