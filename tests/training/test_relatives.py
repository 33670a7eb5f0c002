"""The predictor of a kernel type learns a little from related types, where these have more rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_up_dataset import TARGET, gemm, tensor, write_dataset

from hase.learned.kernels.estimators import predict_kernels
from hase.learned.kernels.interface import TrainingConfig, TrainingSet, XgboostSettings
from hase.records.kernel_record import Kernel, Tensor
from hase.records.kernel_types import describe_kernel
from hase.records.measurement import GPU_LABEL
from hase.training.kernels.fitting import RELATED_WEIGHT, fit_kernel_model, related_types, row_weights
from hase.training.kernels.training_set import read_training_set
from hase.utils.paths import Workspace

QUICK = XgboostSettings(trees=20, learning_rate=0.3, depth=5, objective="squarederror", own_predictors="all")
CONFIG = TrainingConfig(threads=1, xgboost=QUICK, xgboost_gpu=QUICK)
SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def matmul(rows: int, depth: int, columns: int) -> Kernel:
    """The product of a Gemm of the same size."""
    return describe_kernel("MatMul", "", 13, {}, [tensor(1, rows, depth), tensor(depth, columns, constant=True)],
                           [Tensor(dtype="float32", shape=(1, rows, columns))])


def true_ms(kernel: Kernel, metric: float = 0.0) -> float:
    """A floor, and arithmetic that is faster for larger products."""
    return 0.003 + kernel.flops / (1e6 * kernel.flops ** 0.5)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    """Gemms of all sizes, and MatMuls of small ones; the made-up times stand in for those of a GPU."""
    workspace = Workspace(tmp_path_factory.mktemp("relatives"))
    draw = np.random.default_rng(0)
    made = [gemm(*(int(draw.choice(SIZES)) for _ in range(3))) for _ in range(300)]
    made += [matmul(*(int(draw.choice(SIZES[:4])) for _ in range(3))) for _ in range(50)]
    write_dataset(workspace, {kernel.id: kernel for kernel in made}, {}, {}, {0.0: 0.0}, noise=0.0, time_ms_of=true_ms)
    training = read_training_set(workspace, TARGET.name)
    return replace(training, times_ms={**training.times_ms, GPU_LABEL: training.times_ms["run"]})


def test_the_type_with_the_most_rows_learns_alone() -> None:
    types = np.array(["Gemm"] * 5 + ["MatMul"] * 3 + ["Einsum"] + ["Split"] * 2 + ["Relu"] * 9)
    assert related_types("MatMul", types) == {"Gemm", "Einsum"}
    assert related_types("Einsum", types) == {"Gemm", "MatMul"}
    for alone in ("Gemm", "Split", "Relu"):  # there is no Concat
        assert related_types(alone, types) == frozenset()
    assert row_weights("MatMul", types).tolist() == [RELATED_WEIGHT] * 5 + [1.0] * 3 + [RELATED_WEIGHT] + [0.0] * 11
    assert row_weights("Relu", types).tolist() == [0.0] * 11 + [1.0] * 9
    assert related_types("MatMul_Add", np.array(["Gemm_Relu", "Gemm_Relu", "MatMul_Add"])) == {"Gemm_Relu"}  # fused types


def test_a_large_product_is_predicted_from_products_of_another_type(rows: TrainingSet) -> None:
    large = [matmul(1024, 1536, columns) for columns in (768, 1024, 2048)]
    truth = np.array([true_ms(kernel) for kernel in large])

    def error(label: str) -> float:
        model = fit_kernel_model(rows, label, {"Gemm": "Gemm", "MatMul": "MatMul"}, CONFIG)
        assert model.predictor_of["MatMul"] == "MatMul"
        times_ms = predict_kernels(model, large, rows.schema.matrix(large), list(rows.idle_load.values()))
        return float(np.abs(times_ms / truth - 1).max())

    assert error(GPU_LABEL) < 0.25
    assert error("run") > 2 * error(GPU_LABEL)  # here each type learns alone
