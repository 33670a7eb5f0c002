"""Training: errors on a made-up device with known noise, folds without leaks, rows that are excluded, and related types."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from command import run_script
from made_up_dataset import (
    METRIC,
    NOISE,
    TARGET,
    conv,
    draw_kernels,
    gemm,
    relu,
    tensor,
    true_ms,
    write_dataset,
    write_workspace,
)
from made_up_dataset import QUICK as SMALL

from hase.learned.kernels.estimators import FOREST, SHARED, predict_kernels
from hase.learned.kernels.interface import ForestSettings, TrainingConfig, TrainingSet, XgboostSettings
from hase.learned.kernels.measured import measured_times
from hase.learned.kernels.saved_form import booster_from_forest
from hase.records.dataset_files import header_path, kernel_table_path, read_header, write_digests
from hase.records.kernel_record import Kernel, Tensor
from hase.records.kernel_types import describe_kernel
from hase.records.measurement import GPU_LABEL
from hase.training.kernels.fitting import (
    RELATED_WEIGHT,
    assign_folds,
    fit_kernel_model,
    fit_roofline,
    related_types,
    row_weights,
)
from hase.training.kernels.label_training import HeldOutTimes, choose_predictors, cross_validate, train_label, type_errors
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

QUICK = SMALL.model_copy(update={"folds": 3, "forest": ForestSettings(trees=10)})
BOTH = QUICK.model_copy(update={"estimators": ("xgboost", "random_forest")})
LEVELS = {0.0: 0.0, 0.5: 50.0}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    workspace = Workspace(tmp_path_factory.mktemp("training"))
    write_dataset(workspace, {kernel.id: kernel for kernel in draw_kernels(400)}, {}, {}, LEVELS)
    return read_training_set(workspace, TARGET.name)


@pytest.mark.slow
def test_recovers_the_formula_up_to_its_noise(rows: TrainingSet) -> None:
    trained = train_label(rows, "run", QUICK)
    assert (len(rows), rows.idle.sum(), set(rows.times_ms)) == (800, 400, {"run", "kernel_time"})  # node_span was not measured
    assert rows.times_ms["kernel_time"] == pytest.approx(0.9 * rows.times_ms["run"])  # median idle, mean under load
    assert set(rows.load[rows.idle][:, 0]) == {rows.idle_load[METRIC]}  # no noise to learn on the idle device
    errors = {(e.rows_of, e.type): e for e in trained.errors}
    everything = errors["idle", "all"]
    assert everything.kernels == 400
    assert NOISE * 0.5 < everything.mape < min(0.10, everything.roofline_mape / 2)
    assert errors["under load", "all"].mape < 0.12
    idle = rows.rows(rows.idle)
    loaded = trained.model.predict_ms(replace(idle.kernels, load=np.full((len(idle), 1), 50.0)))
    assert np.median(loaded / trained.model.predict_ms(idle.kernels)) == pytest.approx(1.5, rel=0.05)


@pytest.mark.slow
def test_cross_validation_does_not_see_the_answer(rows: TrainingSet) -> None:
    shuffled = np.random.default_rng(0).permutation(200)
    noise = {name: float(np.exp(value)) for name, value in zip(sorted(set(rows.ids)), shuffled / 40, strict=False)}
    times = np.array([noise.get(name, 1.0) for name in rows.ids])  # nothing about a kernel predicts its time
    blind = rows.rows(np.isin(rows.ids, list(noise)))
    blind.times_ms["run"] = times[np.isin(rows.ids, list(noise))]
    left_out = cross_validate(blind, "run", [], QUICK)
    correlation = np.corrcoef(np.log(left_out.shared_ms), np.log(blind.times_ms["run"]))[0, 1]
    assert abs(correlation) < 0.3


@pytest.mark.parametrize(("config", "candidates", "dedicated", "forest", "expected"), [
    # the shared predictors are off by 1.2; the others by these factors for Conv, Relu and Gemm
    (QUICK, ["Conv", "Relu"], (1.1, 1.3, 1.3), (1.0, 1.0, 1.0), {"Conv": "Conv"}),
    (BOTH, ["Conv", "Relu", "Gemm"], (1.1, 1.1, 1.1), (1.05, 1.0999, 1.0999), {"Conv": FOREST, "Relu": "Relu", "Gemm": "Gemm"}),
    (BOTH, ["Conv"], (np.nan,) * 3, (1.3, 1.25, 1.05), {"Gemm": FOREST, "Relu": FOREST}),  # types with few kernels: all of them
    (BOTH, ["Conv"], (np.nan,) * 3, (1.3, 1.9, 1.05), {})])  # or none
def test_a_type_gets_another_predictor_only_where_that_is_clearly_better(
        rows: TrainingSet, config: TrainingConfig, candidates: list[str], dedicated: tuple[float, ...],
        forest: tuple[float, ...], expected: dict[str, str]) -> None:
    truth = rows.times_ms["run"]
    left_out = HeldOutTimes(shared_ms=truth * 1.2, roofline_ms=truth, **{f"{name}_ms": truth * np.select(
        [rows.types == kind for kind in ("Conv", "Relu", "Gemm")], factors) for name, factors in (
            ("dedicated", dedicated), ("forest", forest))})
    assert choose_predictors(rows, "run", left_out, candidates, config) == expected


def test_errors_are_those_of_the_chosen_predictors(rows: TrainingSet) -> None:
    truth = rows.times_ms["run"]
    left_out = HeldOutTimes(shared_ms=truth * 1.2, dedicated_ms=truth * 1.1, roofline_ms=truth, forest_ms=truth * 1.05)
    errors = type_errors(rows, "run", left_out, {"Conv": FOREST, "Relu": "Relu"}, 0.02)
    assert {e.type: (e.predictor, round(e.mape, 3)) for e in errors if e.rows_of == "idle" and e.type != "all"} == {
        "Conv": (FOREST, 0.05), "Relu": ("Relu", 0.1), "Gemm": (SHARED, 0.2)}
    assert {e.rows_of for e in errors} == {"idle", "idle, 20 µs and more", "all levels", "under load"}


def test_a_forest_as_a_booster_predicts_what_scikit_learn_does() -> None:
    from sklearn.ensemble import RandomForestRegressor

    draw = np.random.default_rng(1)
    matrix = draw.normal(size=(500, 6)).round(1).astype(np.float32)  # values that stand on both sides of many cuts
    matrix[draw.random((500, 6)) < 0.1] = np.nan
    forest = RandomForestRegressor(20, max_features=0.5, random_state=0).fit(matrix, np.nansum(matrix, axis=1))
    unseen = draw.normal(size=(300, 6)).round(1).astype(np.float32)
    unseen[::7, 2] = np.nan
    for read in (matrix, unseen):
        assert booster_from_forest(forest).inplace_predict(read) == pytest.approx(forest.predict(read), abs=1e-3)


def test_the_roofline_finds_the_rates_of_the_device() -> None:
    flops, moved = np.array([0.0, 1e6, 1e9, 0.0] * 50), np.array([1e3, 1e3, 1e3, 1e8] * 50)
    roofline = fit_roofline(flops, moved, np.maximum(flops / 2e7, moved / 1e6) + 0.01)
    assert (roofline.flops_per_ms, roofline.bytes_per_ms) == pytest.approx((2e7, 1e6), rel=0.01)
    assert roofline.scale == pytest.approx(1.0, abs=0.1)


def test_held_out_families_and_failed_rows_are_left_out(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    kernels = [conv(side=8 + place) for place in range(5)]
    owners = {kernels[0].id: ["secretnet18"], kernels[1].id: ["secretnet18", "opennet1"], kernels[2].id: ["opennet1"],
              kernels[3].id: ["sampled:secretnet"]}
    write_dataset(workspace, {kernel.id: kernel for kernel in kernels}, owners, {}, LEVELS, held_out=("secretnet",),
                  failed=[kernels[4].id])
    rows = read_training_set(workspace, TARGET.name)
    assert (len(rows), set(rows.ids)) == (4, {kernels[1].id, kernels[2].id})
    assert ("2 crashed" in caplog.text, kernels[4].id in caplog.text) == (True, True)


@pytest.mark.parametrize(("column", "value"), [("Latency_ms", "-1.5"), ("Latency_ms", "nan"), ("kernel_time_ms", "inf")])
def test_impossible_times_are_refused(workspace: Workspace, column: str, value: str) -> None:
    write_dataset(workspace, {kernel.id: kernel for kernel in draw_kernels(10)}, {}, {}, LEVELS)
    path = kernel_table_path(workspace.dataset(TARGET.name))
    table = pd.read_csv(path, dtype=str)
    table.loc[3, column] = value
    table.to_csv(path, index=False)
    write_digests(path.parent)
    with pytest.raises(UserError, match=rf"line 5: {column} is .*positive"):
        read_training_set(workspace, TARGET.name)


def test_a_metric_that_came_late_is_learned_from_once_idle_and_loaded_rows_have_it(workspace: Workspace,
                                                                                    caplog: pytest.LogCaptureFixture) -> None:
    late, folder = "DCGM_FI_DEV_CPU_UTIL_SYS", workspace.dataset(TARGET.name)
    write_dataset(workspace, {kernel.id: kernel for kernel in draw_kernels(120)}, {}, {}, LEVELS)
    files.write_json(header_path(folder), read_header(folder).model_copy(update={"metrics": (METRIC, late)}))
    table = pd.read_csv(kernel_table_path(folder))
    for has_it, metrics in ((table.index % 2 == 0, (METRIC, late)), ((table["Level"] == 0) & (table.index > 60), (METRIC,))):
        table.assign(**{late: np.where(has_it, table[METRIC] / 2, np.nan)}).to_csv(kernel_table_path(folder), index=False)
        write_digests(folder)
        caplog.clear()
        assert read_training_set(workspace, TARGET.name).metrics == metrics
        assert any(f"under load, has {late}" in entry.getMessage() for entry in caplog.records) == (len(metrics) == 1)


def test_no_dataset_no_idle_rows_too_few_kernels(workspace: Workspace) -> None:
    with pytest.raises(UserError, match="collector"):
        read_training_set(workspace, "nowhere")
    kernels = {kernel.id: kernel for kernel in (relu(), conv())}
    write_dataset(workspace, kernels, {}, {}, {0.5: 50.0})
    with pytest.raises(UserError, match="no idle rows"):
        read_training_set(workspace, TARGET.name)
    write_dataset(workspace, kernels, {}, {}, LEVELS)
    with pytest.raises(UserError, match="2 kernels measured"):
        train_label(read_training_set(workspace, TARGET.name), "run", QUICK)


def test_a_kernel_of_several_machines(workspace: Workspace) -> None:
    """Three machines with known ratios: each has a row, all in one fold. The look-up takes the median, the first one's time."""
    kernels = {kernel.id: kernel for kernel in draw_kernels(12)}
    write_dataset(workspace, kernels, {}, {}, LEVELS, noise=0.0)
    alone = measured_times(workspace, TARGET.name)
    assert alone == {name: {"run": pytest.approx(true_ms(kernel)), "kernel_time": pytest.approx(0.9 * true_ms(kernel))}
                     for name, kernel in kernels.items()}  # the idle ones
    path = kernel_table_path(workspace.dataset(TARGET.name))
    table, times = pd.read_csv(path), ["Latency_ms", "run_median_ms", "kernel_time_ms"]
    further = [table.assign(Machine=name, **{column: table[column] * ratio for column in times})
               for name, ratio in (("slow", 1.5), ("fast", 0.9))]
    pd.concat([table, *further]).to_csv(path, index=False)
    write_digests(path.parent)
    rows = read_training_set(workspace, TARGET.name)
    assert len(rows) == 3 * len(table)
    folds = assign_folds(rows.ids, rows.types, 3, seed=7)
    assert all(len(set(folds[rows.ids == name])) == 1 for name in kernels)
    assert {name: times["run"] for name, times in measured_times(workspace, TARGET.name).items()} == pytest.approx(
        {name: times["run"] for name, times in alone.items()})


@pytest.mark.slow
def test_the_command_trains_once_for_the_same_rows(workspace: Workspace) -> None:
    write_workspace(workspace, sampled=60)
    settings = workspace.root / "quick.yaml"
    settings.write_text("folds: 2\nthreads: 1\nxgboost: {trees: 20}\nxgboost_class: {trees: 10}\nforest: {trees: 3}\n")

    def ran(*options: str) -> subprocess.CompletedProcess[str]:
        done = run_script("training/train_kernel_model.py", "--workspace", workspace.root, "--config", settings, *options)
        assert done.returncode == 0, done.stderr
        return done

    first = ran()
    assert "saved" in first.stderr
    last = first.stdout.splitlines()[-1]
    assert re.fullmatch(r"kernel_time: MAPE of all 152 kernels, each held out: \d+\.\d %; worst by type: "
                        r"(Conv|Gemm|Relu) \d+\.\d % \(\d+ kernels\)", last), last
    again = ran("--json")
    assert "nothing changed since" in again.stderr
    (report,) = json.loads(again.stdout)
    assert (report["target"], report["errors"]["run"][0]["mape"] > 0) == (TARGET.name, True)
    assert "saved" in ran("--set", "xgboost.trees=25").stderr
    refused = run_script("training/train_kernel_model.py", "--workspace", workspace.root, "--set", "fold=5")
    assert "fold: unknown key; did you mean folds?" in refused.stderr


RELATED = XgboostSettings(trees=20, learning_rate=0.3, depth=5, objective="squarederror", own_predictors="all")
SIDES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def test_the_type_with_the_most_rows_learns_alone() -> None:
    types = np.array(["Gemm"] * 5 + ["MatMul"] * 3 + ["Einsum"] + ["Split"] * 2 + ["Relu"] * 9)
    assert related_types("MatMul", types) == {"Gemm", "Einsum"}
    for alone in ("Gemm", "Split", "Relu"):  # there is no Concat
        assert related_types(alone, types) == frozenset()
    assert row_weights("MatMul", types).tolist() == [RELATED_WEIGHT] * 5 + [1.0] * 3 + [RELATED_WEIGHT] + [0.0] * 11
    assert related_types("MatMul_Add", np.array(["Gemm_Relu", "Gemm_Relu", "MatMul_Add"])) == {"Gemm_Relu"}  # fused types


@pytest.mark.slow
def test_a_large_product_is_predicted_from_products_of_another_type(workspace: Workspace) -> None:
    """Gemms of all sizes, and MatMuls of small ones; the made-up times stand in for those of a GPU."""
    def matmul(rows: int, depth: int, columns: int) -> Kernel:
        return describe_kernel("MatMul", "", 13, {}, [tensor(1, rows, depth), tensor(depth, columns, constant=True)],
                               [Tensor(dtype="float32", shape=(1, rows, columns))])

    def time_ms_of(kernel: Kernel, metric: float = 0.0) -> float:  # arithmetic is faster for larger products
        return 0.003 + kernel.flops / (1e6 * kernel.flops ** 0.5)

    def error(label: str) -> float:
        model = fit_kernel_model(rows, label, {"Gemm": "Gemm", "MatMul": "MatMul"}, config)
        times_ms = predict_kernels(model, large, rows.schema.matrix(large), list(rows.idle_load.values()))
        return float(np.abs(times_ms / [time_ms_of(kernel) for kernel in large] - 1).max())

    draw = np.random.default_rng(0)
    made = [gemm(*(int(draw.choice(SIDES)) for _ in range(3))) for _ in range(300)]
    made += [matmul(*(int(draw.choice(SIDES[:4])) for _ in range(3))) for _ in range(50)]
    write_dataset(workspace, {kernel.id: kernel for kernel in made}, {}, {}, {0.0: 0.0}, noise=0.0, time_ms_of=time_ms_of)
    rows = read_training_set(workspace, TARGET.name)
    rows = replace(rows, times_ms={**rows.times_ms, GPU_LABEL: rows.times_ms["run"]})
    large = [matmul(1024, 1536, columns) for columns in (768, 1024, 2048)]
    config = TrainingConfig(threads=1, xgboost=RELATED, xgboost_gpu=RELATED)
    assert error(GPU_LABEL) < 0.25
    assert error("run") > 2 * error(GPU_LABEL)  # here each type learns alone
