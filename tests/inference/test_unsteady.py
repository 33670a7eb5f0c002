"""Doubtful measurements: what was measured while the machine was unsteady is marked, named in answers, learned from less, and
replaced; operators whose time depends on values are measured with realistic inputs or the user's, and marked where not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pandas as pd
import pytest
from conftest import build_workspace, small_model
from made_up_dataset import TARGET as MADE_UP
from made_up_dataset import draw_kernels, write_dataset
from trained_workspace import conv_net

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.inference import measure_missing, predict
from hase.inference.evaluation.evaluate import MeasuringPlan, evaluate
from hase.inference.prediction.targets import fitted_for
from hase.inference.prediction.uncertainty import BY_VALUES, kernel_uncertainties
from hase.inference.reporting.printed import summary
from hase.learned.kernels.interface import Estimator, Measured, TrainingConfig, TrainingSet
from hase.learned.kernels.measured import measured_times
from hase.learned.kernels.sidecar import renew_measured
from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import DatasetKernel, journal_path, kernel_table_path, read_header, read_journal, write_digests
from hase.records.dataset_tables import (
    kernel_table_rows,
    model_sessions,
    model_table_rows,
    read_kernel_table,
    write_dataset_tables,
)
from hase.records.host_pace import idle_models
from hase.records.kernel_record import Kernel
from hase.records.measurement import BUSY_ADMITTED, Block, Label, Measurement, Placement, read_blocks, unit_rows
from hase.training.estimators.in_use import InUseEstimator
from hase.training.estimators.neural_network import NeuralNetwork
from hase.training.estimators.roofline import RooflineEstimator
from hase.training.estimators.trees import BoostedTrees, RandomForest
from hase.training.kernels.fitting import fit_class_boosters, fit_kernel_model, learning_problem
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import SHIPPED, Workspace
from tests.benchmark.test_inputs import COLUMNS, save, tree_model
from tests.inference.test_missing_kernels import CONFIG, TARGET

SETTINGS = TrainingConfig.model_validate({"threads": 1, "xgboost": {"trees": 100, "learning_rate": 0.2},
                                          "xgboost_class": {"trees": 30}, "forest": {"trees": 20}})
BAD = 3.45  # the drift of a block during which the canary took 4.45 times as long
[KERNEL] = draw_kernels(1)
DESCRIBED = {KERNEL.id: DatasetKernel(kernel=KERNEL, models=("net",), groups=("net",))}


def timed(time_ms: float, label: Label = "node_span", place: Placement = "in_model", subject: str = "kernel",
          name: str = KERNEL.id) -> Measurement:
    return Measurement(subject=subject, id=name, label=label, context=place, place=place, samples_ms=(time_ms,))


def block(*measurements: Measurement, drift: float = 0.0, level: float = 0.0) -> Block:
    return Block(level=level, key="k", background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0 + drift, attempts=2,
                 machine="here", measurements=measurements)


# the dataset -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("busy", "level", "drift"), [(0.8, 0.0, 0.8), (0.15, 0.0, 0.0), (0.8, 0.6, 0.0)])
def test_other_work_on_an_idle_cpu_makes_a_block_unsteady(busy: float, level: float, drift: float,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it runs all the time, so that no canary differs from the others."""
    monkeypatch.setattr("hase.records.measurement.BUSY_ADMITTED", BUSY_ADMITTED)  # conftest.py admits more
    beside = block(timed(1.0), level=level).model_copy(update={"background": {"DCGM_FI_DEV_CPU_UTIL_TOTAL": busy}})
    assert (beside.drift, beside.unsteady) == (drift, bool(drift))


def test_a_row_names_the_labels_that_rest_on_an_unsteady_block(tmp_path: Path) -> None:
    """That a block is unsteady follows from its canary, so that one of an older journal is marked too."""
    files.append_line(tmp_path / "old.jsonl", block(timed(4.0), drift=BAD).model_dump_json(exclude={"drift_admitted"}))
    [old] = read_blocks(tmp_path / "old.jsonl")
    assert old.unsteady
    assert not block(drift=0.04).unsteady
    assert not old.model_copy(update={"drift_admitted": 4.0}).unsteady  # so a config may ask
    [row] = kernel_table_rows([old, block(timed(1.0, "run", "alone"))], DESCRIBED)
    assert (row["Unsteady"], row["Drift"]) == ("node_span:3.45", 0.0)
    session = timed(9.0, "run", subject="model", name="net").model_copy(update={"label": "latency"})
    [of_model] = model_table_rows(model_sessions([block(session, drift=BAD)]), {})
    [of_unit] = unit_rows([old])
    assert (of_model["Unsteady"], of_unit["Unsteady"]) == ("latency:3.45", "node_span:3.45")


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_measured_again_replaces_the_unsteady_block(order: int) -> None:
    bad, good = block(timed(4.0), drift=BAD), block(timed(1.0))
    [row] = kernel_table_rows([bad, good][::order], DESCRIBED)
    assert (row["node_span_ms"], row["Unsteady"]) == (1.0, "")
    [of_unit] = unit_rows([bad, good][::order])
    assert (of_unit["node_span_ms"], of_unit["Unsteady"], of_unit["Runs"]) == (1.0, "", 1)
    two_good = kernel_table_rows([good, block(timed(3.0))][::order], DESCRIBED)
    assert two_good[0]["node_span_ms"] == 2.0  # the median over both, as ever


@pytest.mark.parametrize(("drifts", "columns", "median_ms"), [
    ([BAD, 0.01], {"Unsteady": [f"latency:{BAD}", None]}, 151.0),
    ([BAD], {}, 405.0),  # better than nothing
    ([BAD, 0.01], {"Probe_us": 10.0}, 278.0)])  # the host probe decides
def test_a_steady_session_of_a_model_replaces_an_unsteady_one(drifts: list[float], columns: dict[str, Any],
                                                              median_ms: float) -> None:
    rows = pd.DataFrame({"Model": "net", "Status": "ok", "Level": 0.0, "Latency_ms": [405.0, 151.0][:len(drifts)],
                         "Drift": drifts, **columns})
    assert idle_models(rows)["median_ms"].to_dict() == {"net": median_ms}


# training ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_estimators_learn_less_from_unsteady_rows(workspace: Workspace) -> None:
    """Of a made-up dataset in which every second kernel took four times as long."""
    write_dataset(workspace, {kernel.id: kernel for kernel in draw_kernels(60)}, {}, {}, {0.0: 0.0}, noise=0.0)
    truth_ms = read_training_set(workspace, MADE_UP.name).times_ms["run"]
    path = kernel_table_path(workspace.dataset(MADE_UP.name))
    table = pd.read_csv(path).drop(columns=["Unsteady", "Drift"], errors="ignore")
    bad = np.arange(len(table)) % 2 == 1
    table.loc[bad, [name for name in table.columns if name.endswith("_ms") and name != "Canary_ms"]] *= 4.0
    table.assign(Unsteady=np.where(bad, f"kernel_time:{BAD}|run:{BAD}", "")).to_csv(path, index=False)
    write_digests(path.parent)
    rows = read_training_set(workspace, MADE_UP.name)
    assert replace(rows, idle=np.zeros(len(rows), dtype=bool)).weights("run") is None  # under a load a drift says little
    unmarked = replace(rows, drifts={label: np.zeros(len(rows)) for label in rows.drifts})
    assert unmarked.weights("run") is None

    def error(estimator: Estimator, learned: TrainingSet) -> float:
        """The median error on steady rows of an estimator that is fitted to all rows."""
        of_kernels = {name: getattr(learned.kernels, name) for name in ("types", "features", "flops", "bytes_moved")}
        estimator.fit(Measured(**of_kernels, times_ms=learned.times_ms["run"], target=MADE_UP, label="run", config=SETTINGS,
                               all_rows=learned, weights=learned.weights("run")))
        return float(np.median(np.abs(estimator.predict_ms(replace(learned.kernels, load=None)) / truth_ms - 1.0)))

    makes: tuple[type[Any], ...] = (BoostedTrees, RandomForest, NeuralNetwork, RooflineEstimator, InUseEstimator)
    for make in makes:
        assert error(make(), rows) < 0.7 * error(make(), unmarked), make.__name__
    is_conv = rows.types == "Conv"
    for types in ({"Conv": "Conv"}, {}):  # a booster of its own, and the shared one
        off = [np.median(np.abs(np.log(fit_kernel_model(learned, "run", types, SETTINGS).predict_ms(rows.kernels)
                                       / truth_ms))[is_conv]) for learned in (rows, unmarked)]
        assert off[0] < 0.7 * off[1]
    weights = fit_class_boosters(rows, learning_problem(rows, "run"), SETTINGS).rows.weights("class other")
    assert weights is not None
    assert set((weights / weights.max() < 0.01).tolist()) == {True, False}


# answers -----------------------------------------------------------------------------------------------------------------

def rewrite(workspace: Workspace, changed: Callable[[Block], Block]) -> None:
    """Changes the blocks of the dataset, as if they had been measured so."""
    folder = workspace.dataset(TARGET)
    blocks = [changed(block) for block in read_journal(folder)]
    files.write_text(journal_path(folder), "".join(f"{block.model_dump_json()}\n" for block in blocks))
    write_dataset_tables(folder, read_header(folder), blocks)
    renew_measured(workspace.predictors(TARGET), measured_times(workspace, TARGET))


@pytest.mark.slow
@pytest.mark.parametrize(("drift", "rough"), [(BAD, True), (0.1, False)])
def test_an_answer_names_what_is_unsteady(tmp_path: Path, trained_workspace: Workspace, drift: float, rough: bool) -> None:
    copied = Workspace(Path(shutil.copytree(trained_workspace.root, tmp_path / "workspace")))
    path = copied.models / "anet_c16.onnx"
    steady = predict(path, target=TARGET, workspace=copied)
    rewrite(copied, lambda block: block if block.level else block.model_copy(update={"canary_after_ms": 1.0 + drift}))
    answer = predict(path, target=TARGET, workspace=copied)
    assert (answer.latency_ms, answer.time_share) == (steady.latency_ms, steady.time_share)
    assert answer.unsteady_share == pytest.approx(1.0)
    assert (steady.unsteady_share, steady.rough_estimate, answer.rough_estimate) == (0.0, False, rough)
    off = [abs(np.log(end / answer.latency_ms)) for end in answer.interval_ms]
    before = [abs(np.log(end / steady.latency_ms)) for end in steady.interval_ms]
    moved = (answer.composition.alpha * answer.kernel_sum_ms) / answer.latency_ms  # the rest of the latency is a constant
    for wider, usual, end in zip(off, before, (1.0 / (1.0 + drift), 1.0 + drift), strict=True):
        assert wider == pytest.approx(np.hypot(usual, np.log(1.0 + moved * (end - 1.0))), rel=0.02)
    [warning] = [text for text in answer.warnings if "--measure-missing measures them again" in text]
    assert f"{len(answer.kernels)} of its kernels, 100.0% of the kernel time" in warning
    assert f"unsteady (by up to {drift:.0%})" in warning
    assert summary(answer)["measured"] == "100% (100% unsteadily)"


# measured again ----------------------------------------------------------------------------------------------------------


@pytest.mark.measuring
@pytest.mark.slow
def test_measure_missing_replaces_what_was_unsteady(workspace: Workspace, canary: list[float]) -> None:
    path = conv_net(workspace.root / "net.onnx", channels=8)
    canary[:] = [1.0, 1.0 + BAD, 1.0]
    first = measure_missing(path, target=TARGET, workspace=workspace, config=CONFIG)
    assert first.measured == len(first.unsteady) > 0
    assert predict(path, target=TARGET, workspace=workspace).unsteady_share == pytest.approx(1.0)
    journal = journal_path(workspace.dataset(TARGET)).read_bytes()
    second = measure_missing(path, target=TARGET, workspace=workspace, config=CONFIG)
    assert (second.measured, second.left, second.unsteady) == (first.measured, (), ())
    answer = predict(path, target=TARGET, workspace=workspace)
    assert (answer.unsteady_share, answer.time_share["measured"]) == (0.0, pytest.approx(1.0))
    assert journal_path(workspace.dataset(TARGET)).read_bytes().startswith(journal)  # the raw samples stay
    assert measure_missing(path, target=TARGET, workspace=workspace, config=CONFIG).measured == 0


@pytest.mark.measuring
@pytest.mark.slow
def test_the_collector_measures_again_on_request(workspace: Workspace, canary: list[float]) -> None:
    build_workspace(workspace, {"anet_b1": small_model()})
    config = CollectorConfig.model_validate(CONFIG.model_dump() | {
        "levels": (0.0,), "labels": ("run",), "block_kernels": 99,
        "canary_drift": 2.0})  # the model's real latencies may vary by less
    canary[:] = [1.0, 1.0 + BAD, 1.0]  # the first of two blocks is unsteady
    collect(workspace, config)
    first = read_journal(workspace.dataset(TARGET))
    assert [block.unsteady for block in first] == [True, False]
    collect(workspace, config)
    assert read_journal(workspace.dataset(TARGET)) == first  # only on request
    collect(workspace, config, remeasure=True)
    again = read_journal(workspace.dataset(TARGET))
    assert [block.unsteady for block in again] == [True, False, False]
    assert {(m.subject, m.id) for m in again[2].measurements} == {(m.subject, m.id) for m in first[0].measurements}
    assert read_kernel_table(workspace, TARGET)["Unsteady"].isna().all()


# times by values ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sorting() -> Kernel:
    """A TopK."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[8, 100] x) => (float[8, 5] y, int64[8, 5] places) '
        "<int64[1] k = {5}> { y, places = TopK(x, k) }")
    [kernel] = analyze(model, "cpu").kernels.values()
    return kernel


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["predicted", "measured", "estimated"])
def test_a_time_that_depends_on_values_is_uncertain(trained_workspace: Workspace, sorting: Kernel, origin: str) -> None:
    """On a CPU; the GPU's kernels are others."""
    [uncertainty] = kernel_uncertainties([sorting], [origin], fitted_for(trained_workspace, TARGET), "run").values()
    assert (uncertainty.makes_rough, uncertainty.reason) == (True, "estimated" if origin == "estimated" else "by values")
    assert uncertainty.time.low <= BY_VALUES[0] + 1e-9
    assert uncertainty.time.high >= BY_VALUES[1] - 1e-9
    if origin == "measured":
        on_gpu = fitted_for(Workspace(SHIPPED.parent.parent), "nvidia-h200-cuda-ort1.31-all")
        assert not kernel_uncertainties([sorting], [origin], on_gpu, "gpu")


@pytest.mark.measuring
@pytest.mark.slow
@pytest.mark.usefixtures("canary")
def test_trees_are_measured_with_realistic_rows_or_with_one_s_own(workspace: Workspace) -> None:
    path = tree_model(workspace.root / "trees.onnx", rows=256, scales=np.ones(COLUMNS), trees=50)
    zeros = save(workspace.root / "zeros.npz", {"x": np.zeros((256, COLUMNS))})
    assert measure_missing(path, target=TARGET, workspace=workspace, config=CONFIG).measured == 1
    by_default = predict(path, target=TARGET, workspace=workspace)
    assert (by_default.rough_estimate, by_default.doubtful_operators) == (False, ())
    assert set(read_kernel_table(workspace, TARGET)["Inputs"]) == {
        "kernel_time:standardised|node_span:standardised|unprofiled:standardised"}

    rewrite(workspace, lambda block: block.model_copy(update={  # as old as if inputs had not been recorded yet
        "measurements": tuple(m.model_copy(update={"inputs": ""}) for m in block.measurements)}))
    old = predict(path, target=TARGET, workspace=workspace)
    assert (old.latency_ms, old.time_share["measured"]) == (by_default.latency_ms, 1.0)
    assert (old.rough_estimate, old.doubtful_operators) == (True, ("TreeEnsembleRegressor",))
    assert old.interval_ms[0] < by_default.interval_ms[0] < by_default.interval_ms[1] < old.interval_ms[1]
    assert any(text.startswith("rough estimate: TreeEnsembleRegressor: the time depends on the inputs' values, and was not")
               for text in old.warnings)

    assert measure_missing(path, target=TARGET, workspace=workspace, config=CONFIG, inputs=zeros).measured == 1
    with_zeros = predict(path, target=TARGET, workspace=workspace)
    assert with_zeros.latency_ms < 0.7 * by_default.latency_ms
    assert not with_zeros.rough_estimate
    assert "unprofiled:given" in read_kernel_table(workspace, TARGET)["Inputs"].iloc[0]
    [of_zeros] = evaluate(workspace, [path], target=TARGET, plan=MeasuringPlan(1, 0.05, 0.0, inputs=zeros)).comparisons
    assert of_zeros.measured_ms < 0.8 * by_default.latency_ms


@pytest.mark.slow
def test_inputs_that_do_not_fit_are_an_error_before_anything_is_measured(workspace: Workspace) -> None:
    path = conv_net(workspace.root / "net.onnx", channels=8)
    misshapen = save(workspace.root / "own.npz", {"x": np.zeros((1, 3))})
    for model, message in ((path, r"own\.npz: x has shape \[1, 3\], and the model takes \[1, 8, 16, 16\]"),
                           (analyze(path, "cpu"), "a record can't be run; give the model file with --inputs")):
        with pytest.raises(UserError, match=message):
            measure_missing(model, target=TARGET, workspace=workspace, config=CONFIG, inputs=misshapen)
    assert not read_journal(workspace.dataset(TARGET))
