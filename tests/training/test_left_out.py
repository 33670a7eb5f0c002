"""What is left out of training, operators, forms and kernels: how far off it is then, and what answers make of that."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up_dataset import TARGET, conv, draw_kernels, relu, write_dataset

from hase.kernel_model.sampling.draws import footprint_mib
from hase.kernel_model.sampling.free_shapes.elementwise import unary
from hase.kernel_model.sampling.free_shapes.layers import reduction
from hase.kernel_model.sampling.free_shapes.sizes import Generator
from hase.kernel_model.sampling.usefulness import KernelError, KernelErrors, write_errors
from hase.learned.composition.intervals import KNOWN, Novelty, sources
from hase.learned.kernels.estimators import predict_kernels
from hase.learned.kernels.interface import ForestSettings, TrainingConfig, TrainingSet, XgboostSettings
from hase.learned.kernels.saved_form import booster_from_arrays, booster_to_arrays
from hase.learned.kernels.uncertainty import OTHER_FORM_OF, Uncertainty
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import kernel_form, operator_in_type
from hase.records.measurement import GPU_LABEL
from hase.training.kernels.fitting import fit_kernel_model
from hase.training.kernels.left_out import (
    LAUNCH_MS,
    LeftOutForm,
    LeftOutOperator,
    learn_doubt,
    leave_forms_out,
    ranges_of,
    steady_classes,
)
from hase.training.kernels.left_out_tables import form_report, operator_report
from hase.training.kernels.training_set import read_training_set
from hase.utils.errors import UserError
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


@pytest.mark.slow
def test_an_unknown_operator_takes_as_long_as_its_class(rows: TrainingSet, made: tuple[Workspace, dict[str, Kernel]]) -> None:
    """The roofline of all kernels can't tell a reduction from an activation; the classes can."""
    measured_rows = rows.rows(np.array([operator_in_type(str(name)) not in ("Exp", "ReduceMax") for name in rows.types]))
    model = fit_kernel_model(measured_rows, "run", {}, CONFIG)
    for op_type in ("Exp", "ReduceMax"):
        kernels = [kernel for kernel in made[1].values() if kernel.op_type == op_type and true_ms(kernel) > 0.01]
        truth = np.array([true_ms(kernel) for kernel in kernels])
        matrix, load = rows.schema.matrix(kernels), list(rows.idle_load.values())
        with_classes, bare = (np.median(np.abs(predict_kernels(of, kernels, matrix, load) / truth - 1))
                              for of in (model, replace(model, boosters={})))
        assert with_classes < min(0.03, 0.2 * bare)


@pytest.mark.slow
def test_a_class_whose_sizes_mislead_takes_its_median(rows: TrainingSet) -> None:
    """If every left-out operator is closer to the median of its class, the median is saved, as a booster without a tree."""
    def left_out(operator: str, by_sizes: float, steady: float) -> LeftOutOperator:
        ratios = np.ones(9)
        return LeftOutOperator(operator, "elementwise", np.array(["id"] * 9), by_sizes * ratios, steady * ratios, ratios)

    assert steady_classes([left_out("Relu", 2.0, 1.0), left_out("Exp", 1.5, 1.1)]) == {"class elementwise"}
    assert steady_classes([left_out("Relu", 1.2, 1.0), left_out("Exp", 1.1, 1.3)]) == frozenset()
    model = fit_kernel_model(rows, "run", {}, CONFIG, steady=frozenset({"class elementwise"}))
    of_exp, bound = rows.types == "Exp", model.roofline.bound_ms(rows.flops, rows.bytes_moved)
    ratios = model.predict_ms(replace(rows.rows(of_exp).kernels, types=np.array(["Abs"] * int(of_exp.sum())))) / bound[of_exp]
    median = np.median((rows.times_ms["run"] / bound)[np.isin(rows.types, ELEMENTWISE)])
    assert ratios == pytest.approx(np.full(len(ratios), median), rel=0.02)
    assert ratios.std() < 1e-5 * ratios.mean()
    booster = booster_from_arrays(*booster_to_arrays(model.boosters["class elementwise"]))
    assert booster.inplace_predict(np.zeros((1, booster.num_features()), np.float32))[0] == pytest.approx(
        np.log(ratios[0]), rel=1e-4)


@pytest.mark.slow
def test_each_operator_is_left_out_once(made: tuple[Workspace, dict[str, Kernel]], rows: TrainingSet, tmp_path: Path) -> None:
    """Each is predicted like the rest of its class, in the table and on the page."""
    path, titles = tmp_path / "operators.md", []
    measured = next(kernel for kernel in made[1].values() if (kernel.op_type, kernel.dtype) == ("Exp", "float32"))
    write_errors(made[0].kernel_errors(TARGET.name), KernelErrors(
        target=TARGET, label="run", held_out=(), dataset_sha256=rows.sha256,
        kernels=(KernelError(kernel=measured, families=(), measured_ms=1.0, predicted_ms=1.25),)))
    report = operator_report(made[0], TARGET.name, CONFIG, path, lambda rows, title: titles.append(title))
    assert [(row["operator"], row["type"], row["kernels"]) for row in report["operators"]] == [
        (operator, dtype, EACH // 2) for operator in sorted(ELEMENTWISE) + sorted(REDUCTIONS)
        for dtype in ("float16", "float32")]
    assert [(row["class"], row["operators"], row["below_30_%"]) for row in report["classes"]] == [
        ("elementwise", 4, 100.0), ("reduction", 3, 100.0), ("all", 7, 100.0)]
    assert len(titles) == 2  # no launches were measured
    assert "| elementwise | Exp | float16, float32 | 25, 25 | –, 25.0 |" in path.read_text()


FORMS_CONFIG = TrainingConfig(folds=2, threads=1, own_min_kernels=60, forest=ForestSettings(trees=5),
                              xgboost=XgboostSettings(trees=15, learning_rate=0.2, bins=64))


def test_each_form_is_left_out_once(tmp_path: Path) -> None:
    kernels = {kernel.id: kernel for kernel in draw_kernels(120)}
    write_dataset(Workspace(tmp_path), kernels, {}, {}, {0.0: 0.0})
    rows = read_training_set(Workspace(tmp_path), TARGET.name)
    forms = leave_forms_out(rows, "run", {"Conv": "Conv"}, FORMS_CONFIG)
    counts = Counter((kernel.type, kernel_form(kernel)) for kernel in kernels.values() if kernel.type == "Conv")
    assert len(forms) == len(counts) > 1
    assert {(form.type, form.form): len(form.ratios) for form in forms} == counts  # the others have one form each
    assert all(np.isfinite(form.ratios).all() for form in forms)
    with pytest.raises(UserError, match="has no label gpu"):
        form_report(Workspace(tmp_path), TARGET.name, FORMS_CONFIG, None, lambda rows, title: None)


def test_the_range_of_a_form_is_learned_from_many() -> None:
    forms = [LeftOutForm("Conv", str(number), "convolution", np.ones(3), np.array([0.5, 1.0, 9.0])) for number in range(12)]
    assert not ranges_of(forms[:3], {}, 12)  # the default stays
    many = ranges_of(forms, {}, 12)
    assert many["convolution"].low == pytest.approx(0.55, abs=0.05)
    assert many["convolution"].high == pytest.approx(8.2, abs=0.8)
    seen = conv()
    learned = Uncertainty(dataset_sha256="", ranges={}, forms={seen.type: (kernel_form(seen),)}, form_ranges={"gpu": many})
    wide = conv(window=31)
    assert learned.other_form_range(seen, "gpu") is None
    assert learned.other_form_range(wide, "gpu") == many["convolution"]
    assert learned.other_form_range(wide, "run") == OTHER_FORM_OF["convolution"]
    assert not learned.knows_form(wide)


@pytest.mark.slow
def test_doubt_is_large_where_kernels_that_were_held_out_were_far_off(tmp_path: Path) -> None:
    """Predictions of wide windows are off by a factor of four, up or down; the others by 5 %. Where the times are right, four
    times as many launches as predicted matter if they take the host longer than the GPU."""
    write_dataset(Workspace(tmp_path), {kernel.id: kernel for kernel in draw_kernels(400)}, {}, {}, {0.0: 0.0})
    rows = read_training_set(Workspace(tmp_path), TARGET.name)
    rows, gpu_ms = replace(rows, times_ms={GPU_LABEL: rows.times_ms["run"]}), rows.times_ms["run"]
    wide = rows.features[:, rows.schema.index("kernel_width")] >= 5
    signs = np.random.default_rng(0).choice([-1.0, 1.0], len(rows))

    def left_out(measured: np.ndarray, predicted: np.ndarray) -> dict[str, tuple[float, float]]:
        return dict(zip(rows.ids.tolist(), zip(measured.tolist(), predicted.tolist(), strict=True), strict=True))

    def doubts(times: np.ndarray, launches: dict[str, tuple[float, float]]) -> list[float]:
        kernels, doubt = [conv(window=3), conv(window=7), relu()], learn_doubt(rows, left_out(gpu_ms, times), launches, seed=1)
        return np.log(predict_kernels(doubt, kernels, rows.schema.matrix(kernels), [*rows.idle_load.values()])).tolist()

    narrow, at_wide, other = doubts(gpu_ms * np.exp(signs * np.where(wide, math.log(4.0), 0.05)), {})
    assert (narrow, at_wide, other) == (
        pytest.approx(0.05, abs=0.1), pytest.approx(math.log(4.0), rel=0.2), pytest.approx(0.05, abs=0.05))
    many, times = 2.0 * gpu_ms / LAUNCH_MS, np.where(wide, 4.0, 1.0)
    assert doubts(gpu_ms, left_out(times * many, many))[:2] == [
        pytest.approx(0.0, abs=0.1), pytest.approx(math.log(4.0), rel=0.2)]
    assert doubts(gpu_ms, left_out(times * 0.1 * many, 0.1 * many))[1] == pytest.approx(0.0, abs=0.01)


def test_the_doubts_of_a_model_are_weighted_by_time() -> None:
    doubted = Novelty("known", doubt=0.5)
    kernels = [("a", 6.0, doubted), ("b", 2.0, KNOWN), ("c", 2.0, None)]
    assert sources(kernels, 10.0, 5.0).doubt == pytest.approx(0.3)
    assert sources(kernels, 20.0, 10.0).doubt == pytest.approx(0.15)  # half of the time the GPU waits
    assert sources(kernels, 10.0, 5.0).predicted == pytest.approx(0.2)  # of the kernel whose doubt is not known
    # different kernels err independently, and the nodes of one alike
    assert sources([(name, 2.5, doubted) for name in "abcd"], 10.0, 5.0).doubt == pytest.approx(0.25)
    assert sources([("a", 2.5, doubted)] * 4, 10.0, 5.0).doubt == pytest.approx(0.5)
