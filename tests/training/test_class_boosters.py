"""Operators that were never measured are estimated from measured ones of their class."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
from made_up_dataset import TARGET, write_dataset

from hase.kernel_model.kernel_sampler import footprint_mib
from hase.kernel_model.sampling.free_shapes.elementwise import unary
from hase.kernel_model.sampling.free_shapes.layers import reduction
from hase.kernel_model.sampling.free_shapes.sizes import Generator
from hase.kernel_model.sampling.usefulness import KernelError, KernelErrors, write_errors
from hase.learned.kernels.estimators import ANY, KernelModel, class_names, is_class, kind_code, predict_kernels
from hase.learned.kernels.features import KernelRows
from hase.learned.kernels.interface import TrainingConfig, TrainingSet, XgboostSettings
from hase.learned.kernels.saved_form import as_arrays, from_arrays, open_estimator, save_estimator
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import operator_in_type
from hase.records.operators import operator_row
from hase.training.kernels.fitting import fit_kernel_model
from hase.training.kernels.left_out import LeftOutOperator, ranges_of, steady_classes
from hase.training.kernels.left_out_tables import cross_validated, operator_report
from hase.training.kernels.training_set import read_training_set
from hase.utils.paths import Workspace

CONFIG = TrainingConfig(threads=1, xgboost=XgboostSettings(trees=20, learning_rate=0.3), folds=2,
                        xgboost_class=XgboostSettings(trees=150, learning_rate=0.15, column_share=0.8))
EACH = 50
ELEMENTWISE, REDUCTIONS = ("Relu", "Sigmoid", "Neg", "Exp"), ("ReduceMean", "ReduceSum", "ReduceMax")
SLOW = 5.0  # time of a reduction over that of an elementwise operator with as many bytes


def true_ms(kernel: Kernel, metric: float = 0.0) -> float:
    """The time in ms on the made-up device: a floor, and bytes at a rate that depends on the class."""
    slow = SLOW if kernel.op_type.startswith("Reduce") else 1.0
    return 0.003 + slow * (kernel.bytes_read + kernel.bytes_written) / 1e8


def kernels_of(op_type: str, generator: Generator) -> list[Kernel]:
    """EACH kernels of an operator in both floating types, none larger than 64 MiB."""
    kernels: dict[str, Kernel] = {}
    while len(kernels) < EACH:
        dtype = ("float32", "float16")[len(kernels) % 2]
        kernel = reduction(dtype, 2, generator) if op_type in REDUCTIONS else unary(op_type, dtype, 2, generator)
        if kernel.op_type == op_type and footprint_mib(kernel) < 64:
            kernels[kernel.id] = kernel
    return list(kernels.values())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, dict[str, Kernel]]:
    generator = np.random.default_rng(0)
    kernels = {kernel.id: kernel for op_type in (*ELEMENTWISE, *REDUCTIONS) for kernel in kernels_of(op_type, generator)}
    workspace = Workspace(tmp_path_factory.mktemp("classes"))
    write_dataset(workspace, kernels, {}, {}, {0.0: 0.0}, noise=0.0, time_ms_of=true_ms)
    return workspace, kernels


@pytest.fixture(scope="module")
def rows(made: tuple[Workspace, dict[str, Kernel]]) -> TrainingSet:
    return read_training_set(made[0], TARGET.name)


@pytest.fixture(scope="module")
def model(rows: TrainingSet) -> KernelModel:
    return fit_kernel_model(rows, "run", {}, CONFIG)


def estimated(model: KernelModel, kernels: list[Kernel], rows: TrainingSet) -> np.ndarray:
    return predict_kernels(model, kernels, rows.schema.matrix(kernels), list(rows.idle_load.values()))


def test_classes_go_by_the_operator_of_a_type() -> None:
    types = ("Conv_Add_Relu", "LSTM", "IsNaN", "ScatterND", "ReduceL2", "Abracadabra")
    assert [operator_row(operator_in_type(name)).operator_class for name in types] == [
        "convolution", "recurrent", "elementwise", "gather", "reduction", "other"]
    assert class_names("Tile") == ("class part", "class movement", ANY)
    assert class_names("Conv_Relu") == ("class convolution", "class convolution", ANY)
    assert kind_code("Softmax") == kind_code("BiasSoftmax") != kind_code("LayerNormalization")


@pytest.mark.slow
def test_an_unknown_operator_takes_as_long_as_its_class(rows: TrainingSet, made: tuple[Workspace, dict[str, Kernel]]) -> None:
    """The roofline of all kernels can't tell a reduction from an activation; the classes can."""
    measured_rows = rows.rows(np.array([operator_in_type(str(name)) not in ("Exp", "ReduceMax") for name in rows.types]))
    model = fit_kernel_model(measured_rows, "run", {}, CONFIG)
    for op_type in ("Exp", "ReduceMax"):
        kernels = [kernel for kernel in made[1].values() if kernel.op_type == op_type and true_ms(kernel) > 0.01]
        truth = np.array([true_ms(kernel) for kernel in kernels])
        errors = np.abs(estimated(model, kernels, rows) / truth - 1)
        bare = dataclasses.replace(model, boosters={})
        assert np.median(errors) < 0.03
        assert np.median(errors) < 0.2 * np.median(np.abs(estimated(bare, kernels, rows) / truth - 1))


def test_an_operator_without_a_class_takes_as_long_as_all(rows: TrainingSet, model: KernelModel, tmp_path: Path) -> None:
    assert {name for name in model.boosters if is_class(name)} == {ANY, "class elementwise", "class reduction"}
    unknown, known_class = model.predict_ms(KernelRows(
        types=np.array(["Abracadabra", "LSTM"]), features=np.zeros((2, len(rows.schema.names))), flops=np.zeros(2),
        bytes_moved=np.full(2, 1e6)))
    assert unknown == known_class  # recurrent layers were not measured either
    saved = open_estimator(save_estimator(tmp_path, "run", model), KernelModel, tmp_path, "")
    new = [unary("Abs", "float32", 2, np.random.default_rng(5))]
    assert estimated(saved, new, rows) == pytest.approx(estimated(model, new, rows), rel=1e-4)  # saved leaves are rounded


@pytest.mark.slow
def test_each_operator_is_left_out_once(made: tuple[Workspace, dict[str, Kernel]], rows: TrainingSet, tmp_path: Path,
                                        caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is predicted like the rest of its class, in the table and on the page. That has cross-validated errors if training
    wrote them for this dataset; else there is a warning."""
    monkeypatch.setattr(logging.getLogger("hase"), "propagate", True)
    path, titles = tmp_path / "operators.md", []
    measured = next(kernel for kernel in made[1].values() if (kernel.op_type, kernel.dtype) == ("Exp", "float32"))
    write_errors(made[0].kernel_errors(TARGET.name), KernelErrors(
        target=TARGET, label="run", held_out=(), dataset_sha256=rows.sha256,
        kernels=(KernelError(kernel=measured, families=(), measured_ms=1.0, predicted_ms=1.25),)))
    report = operator_report(made[0], TARGET.name, CONFIG, path, lambda rows, title: titles.append(title))
    assert not caplog.messages
    assert [(row["operator"], row["type"], row["kernels"]) for row in report["operators"]] == [
        (operator, dtype, EACH // 2) for operator in sorted(ELEMENTWISE) + sorted(REDUCTIONS)
        for dtype in ("float16", "float32")]
    assert [(row["class"], row["operators"], row["below_30_%"]) for row in report["classes"]] == [
        ("elementwise", 4, 100.0), ("reduction", 3, 100.0), ("all", 7, 100.0)]
    assert len(titles) == 2  # no launches were measured
    page = path.read_text()
    assert page.startswith("# Measured operators\n")
    assert "| elementwise | Exp | float16, float32 | 25, 25 | –, 25.0 |" in page
    assert "- recurrent: GRU, LSTM, RNN" in page
    assert " Sigmoid," not in page.split("## Not measured")[1]
    made[0].kernel_errors(TARGET.name).unlink()
    assert not cross_validated(made[0], TARGET.name, rows, "run")
    assert "no such file, so the table has no cross-validated errors" in caplog.text


def test_a_class_whose_sizes_mislead_takes_its_median(rows: TrainingSet) -> None:
    """If every left-out operator is closer to the median of its class, the median is saved."""
    def of(operator: str, by_sizes: float, steady: float) -> LeftOutOperator:
        ratios = np.ones(9)
        return LeftOutOperator(operator, "elementwise", np.array(["id"] * 9), by_sizes * ratios, steady * ratios, ratios)

    assert steady_classes([of("Relu", 2.0, 1.0), of("Exp", 1.5, 1.1)]) == {"class elementwise"}
    assert steady_classes([of("Relu", 1.2, 1.0), of("Exp", 1.1, 1.3)]) == frozenset()
    (learned,) = ranges_of([of("Relu", 0.8, 1.0), of("Exp", 1.1, 1.0)], {}, 1).values()
    assert (learned.operators, 0.7 < learned.low <= 1.0 <= learned.high < 1.2) == (2, True)
    model = fit_kernel_model(rows, "run", {}, CONFIG, steady=frozenset({"class elementwise"}))
    of_exp = rows.types == "Exp"
    times = model.predict_ms(dataclasses.replace(rows.rows(of_exp).kernels, types=np.array(["Abs"] * int(of_exp.sum()))))
    ratios = times / model.roofline.bound_ms(rows.flops[of_exp], rows.bytes_moved[of_exp])
    assert ratios == pytest.approx(float(ratios[0]), rel=1e-5)
    of_class = np.isin(rows.types, ELEMENTWISE)
    bound = model.roofline.bound_ms(rows.flops, rows.bytes_moved)
    assert ratios[0] == pytest.approx(float(np.median((rows.times_ms["run"] / bound)[of_class])), rel=0.02)
    booster = from_arrays(*as_arrays(model.boosters["class elementwise"]))  # it has no tree
    anything = np.zeros((1, booster.num_features()), dtype=np.float32)
    assert booster.inplace_predict(anything)[0] == pytest.approx(np.log(ratios[0]), rel=1e-4)
