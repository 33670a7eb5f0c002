"""The feature schema as a value: predictors can learn from another schema than the kernels', but saved ones are refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from made_up_dataset import METRIC, QUICK, TARGET, conv, gemm, relu, tensor, write_workspace

from hase.learned.kernels.estimators import SHARED, KernelModel, predict_kernels, table_counts
from hase.learned.kernels.features import KERNEL_FEATURES, FeatureSchema, times_beyond
from hase.learned.kernels.interface import TrainingSet
from hase.learned.kernels.predictors import read_predictors
from hase.learned.kernels.sidecar import read_sidecar, save_predictors
from hase.records.dataset_files import read_kernels
from hase.records.kernel_record import Kernel, Tensor
from hase.records.kernel_types import describe_kernel
from hase.training.kernels.fitting import fit_kernel_model
from hase.training.kernels.training_set import read_training_set
from hase.training.train_kernel_model import head
from hase.utils.errors import UserError
from hase.utils.paths import SHIPPED, Workspace

FEW_TREES = QUICK.model_copy(update={"own_min_kernels": 1000})


def two_numbers(kernel: Kernel) -> list[float]:
    """Rank of the first input, and its elements (log2)."""
    shape = kernel.inputs[0].shape
    return [len(shape), math.log2(math.prod(shape))]


TWO = FeatureSchema("two", 1, {"operands": ("rank",), "costs": ("log_elements",)}, two_numbers)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    workspace = Workspace(tmp_path_factory.mktemp("schema"))
    write_workspace(workspace, sampled=100)
    rows = read_training_set(workspace, TARGET.name, TWO)
    kernels = {entry.kernel.id: entry.kernel for entry in read_kernels(workspace.dataset(TARGET.name))}
    assert rows.features.tolist() == [two_numbers(kernels[name]) for name in rows.ids]
    return rows


@pytest.fixture(scope="module")
def model(rows: TrainingSet) -> KernelModel:
    return fit_kernel_model(rows, "run", {}, FEW_TREES)


def test_a_schema_of_two_features() -> None:
    assert TWO.index("log_elements") == 1
    assert TWO.logarithmic.tolist() == [False, True]
    assert TWO.matrix([gemm(rows=2, depth=64), relu(channels=16, side=32)]).tolist() == [[2.0, 7.0], [4.0, 14.0]]
    with pytest.raises(KeyError, match="feature schema two 1 has no feature depth"):
        TWO.index("depth")
    low, high = np.array([2.0, 4.0]), np.array([4.0, 20.0])  # how far kernels are beyond a range: a logarithm by its power
    for channels, side, times in ((1024, 1024, 2.0 ** 10), (16, 32, 1.0)):
        assert times_beyond(TWO, TWO.matrix([relu(channels=channels, side=side)]), low, high).tolist() == [times]


def test_the_kernels_own_schema() -> None:
    """The shipped boosters were trained on these names in this order."""
    for label in read_sidecar(next(SHIPPED.glob("*/predictors.json")).parent).labels.values():
        assert label.features == ("kernel 5", *KERNEL_FEATURES.names)
    kernel = conv(batch=2, channels=16, side=32, out=64)
    (values,) = KERNEL_FEATURES.matrix([kernel])
    assert values[KERNEL_FEATURES.index("log_flops")] == math.log2(1 + kernel.flops)
    assert values[[KERNEL_FEATURES.index(name) for name in ("batch", "k", "tables")]].tolist() == [2, 16 * 9, 0]


@pytest.mark.parametrize(("shape", "out", "behind"), [
    ((16, 2, 64, 56, 56), (16, 64, 56, 56), 64 * 56 * 56), ((2, 8, 6, 5), (2, 8, 1, 1), 1), ((2, 6, 5, 8), (2, 1, 1, 8), 8),
    ((2, 8, 6, 5), (2, 1, 6, 5), 30), ((4, 7), (4,), 1), ((4, 7), (), 1)])
def test_elements_behind_a_reduced_axis(shape: tuple[int, ...], out: tuple[int, ...], behind: int) -> None:
    kernel = describe_kernel("ReduceSum", "", 13, {}, [tensor(*shape)], [Tensor(dtype="float32", shape=out)])
    assert KERNEL_FEATURES.matrix([kernel])[0][KERNEL_FEATURES.index("axis_inner")] == behind


def test_estimators_learn_from_two_features(rows: TrainingSet, model: KernelModel) -> None:
    assert table_counts(rows.schema, rows.features).tolist() == [0.0] * len(rows)  # TWO has no such feature
    assert model.features is TWO
    assert model.boosters[SHARED].num_features() == 2 + 1 + 1  # and the type, and the metric
    activations = [relu(channels=40, side=20), relu(channels=16, side=50)]  # their time depends on their bytes
    times = predict_kernels(model, activations, TWO.matrix(activations), list(rows.idle_load.values()))
    assert times == pytest.approx([0.004 + kernel.bytes_read * 2 / 1e7 for kernel in activations], rel=0.25)
    assert set(head(rows, "run", 1)[0]) == {"type_code", METRIC, "run_ms"}  # the table of first rows shows its features


def test_predictors_of_another_schema_are_refused(rows: TrainingSet, model: KernelModel, tmp_path: Path) -> None:
    save_predictors(tmp_path, {"run": model}, {"run": ()}, {}, {
        "target": TARGET, "created": "", "dataset_sha256": "", "metrics": rows.metrics, "idle_load": rows.idle_load,
        "load_range": dict.fromkeys(rows.metrics, (0.0, 1.0)), "loaded_rows": 0, "dtypes": (), "held_out": (), "config": {},
        "machines": (), "feature_range": ()})
    with pytest.raises(UserError, match=r"the predictors of label run read feature schema two 1, this one kernel 5 \(they "
                                        r"differ in: activation, .*train again: python training/train_kernel_model\.py"):
        read_predictors(tmp_path)
