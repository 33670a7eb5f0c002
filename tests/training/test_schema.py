"""The feature schema as a value: another one than the kernels' own is learned from, saved and read; one that is not there is
refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from made_up_dataset import METRIC, TARGET, conv, gemm, relu, tensor, write_workspace

from records.dataset_files import read_kernels
from records.kernel_record import Kernel, Tensor
from records.kernel_types import describe_kernel
from training.kernels import features
from training.kernels.estimators import SHARED, fit_kernel_model, predict_kernels, table_counts
from training.kernels.features import FIRST_FEATURES, KERNEL_FEATURES, SCHEMAS
from training.kernels.label_training import train_label
from training.kernels.predictors import read_predictors
from training.kernels.saving import save_predictors
from training.kernels.schema import FeatureSchema
from training.kernels.settings import ForestSettings, TrainingConfig, XgboostSettings
from training.kernels.sidecar import Sidecar, read_sidecar, sidecar_path
from training.kernels.training_set import TrainingSet, read_training_set
from training.train_kernel_model import head, kept_sidecar, save
from utils import files
from utils.errors import UserError
from utils.paths import SHIPPED, Workspace

QUICK = TrainingConfig(folds=2, threads=1, own_min_kernels=1000, xgboost=XgboostSettings(trees=150, learning_rate=0.1, bins=64),
                       forest=ForestSettings(trees=3))


def two_numbers(kernel: Kernel) -> list[float]:
    """Rank of the first input, and its elements (log2)."""
    shape = kernel.inputs[0].shape
    return [len(shape), math.log2(math.prod(shape))]


TWO = FeatureSchema("two", 1, {"operands": ("rank",), "costs": ("log_elements",)}, two_numbers)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("schema"))
    write_workspace(workspace, sampled=100)
    return workspace


@pytest.fixture(scope="module")
def rows(made: Workspace) -> TrainingSet:
    return read_training_set(made, TARGET.name, TWO)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """TWO is one of the schemas that saved predictors may read."""
    monkeypatch.setitem(features.SCHEMAS, ("two", 1), TWO)


def save_quickly(folder: Path, rows: TrainingSet) -> Sidecar:
    """Saves predictors of label `run` without cross-validation."""
    return save_predictors(folder, {"run": fit_kernel_model(rows, "run", (), QUICK)}, {"run": ()}, {}, {
        "target": TARGET, "created": "", "dataset_sha256": "", "metrics": rows.metrics, "idle_load": rows.idle_load,
        "load_range": {}, "loaded_rows": 0, "dtypes": (), "held_out": (), "config": {}, "machines": (),
        "feature_range": ((0.0, 99.0),) * len(rows.schema.names)})


def test_a_schema_of_two_features() -> None:
    assert TWO.names == ("rank", "log_elements")
    assert TWO.index("log_elements") == 1
    assert TWO.logarithmic.tolist() == [False, True]
    assert TWO.matrix([gemm(rows=2, depth=64), relu(channels=16, side=32)]).tolist() == [[2.0, 7.0], [4.0, 14.0]]
    assert TWO.matrix([]).shape == (0, 2)
    assert str(TWO) == "two 1"
    with pytest.raises(KeyError, match="feature schema two 1 has no feature depth"):
        TWO.index("depth")


def test_the_kernels_own_schema() -> None:
    """Its names and their order are what the shipped boosters were trained on."""
    assert KERNEL_FEATURES.names == read_sidecar(next(SHIPPED.glob("*/predictors.json")).parent).features
    one = conv(batch=2, channels=16, side=32, out=64)
    (values,) = KERNEL_FEATURES.matrix([one])
    assert values[KERNEL_FEATURES.index("log_flops")] == math.log2(1 + one.flops)
    assert values[[KERNEL_FEATURES.index(name) for name in ("batch", "k", "tables")]].tolist() == [2, 16 * 9, 0]


def test_predictors_of_the_first_version_read_its_features() -> None:
    """Another value for reductions alone: what lies behind the reduced axis."""
    assert SCHEMAS["kernel", 1] is FIRST_FEATURES
    assert FIRST_FEATURES.names == KERNEL_FEATURES.names

    def behind(shape: tuple[int, ...], out: tuple[int, ...]) -> tuple[float, float]:
        one = describe_kernel("ReduceSum", "", 13, {}, [tensor(*shape)], [Tensor(dtype="float32", shape=out)])
        first, second = (schema.matrix([one])[0] for schema in (FIRST_FEATURES, KERNEL_FEATURES))
        place = KERNEL_FEATURES.index("axis_inner")
        assert (first == second).tolist() == [where != place or first[place] == second[place] for where in range(len(first))]
        return float(first[place]), float(second[place])

    assert behind((16, 2, 64, 56, 56), (16, 64, 56, 56)) == (0, 64 * 56 * 56)
    assert behind((2, 8, 6, 5), (2, 8, 1, 1)) == (1, 1)
    assert behind((2, 6, 5, 8), (2, 1, 1, 8)) == (8, 8)
    assert behind((2, 8, 6, 5), (2, 1, 6, 5)) == (5, 30)
    assert behind((4, 7), (4,)) == (0, 1)
    assert behind((4, 7), ()) == (0, 1)
    one = conv(batch=2)
    assert FIRST_FEATURES.matrix([one]).tolist() == KERNEL_FEATURES.matrix([one]).tolist()


def test_estimators_learn_from_two_features(made: Workspace, rows: TrainingSet) -> None:
    kernels = {entry.kernel.id: entry.kernel for entry in read_kernels(made.dataset(TARGET.name))}
    assert rows.features.tolist() == [two_numbers(kernels[name]) for name in rows.ids]
    assert table_counts(rows.schema, rows.features).tolist() == [0.0] * len(rows)  # TWO does not count them
    model = fit_kernel_model(rows, "run", (), QUICK)
    assert model.schema is TWO
    assert model.boosters[SHARED].num_features() == 2 + 1 + 1  # and the type, and the metric
    activations = [relu(channels=40, side=20), relu(channels=16, side=50)]  # their time is that of their bytes
    times = predict_kernels(model, activations, TWO.matrix(activations), list(rows.idle_load.values()))
    assert times == pytest.approx([0.004 + kernel.bytes_read * 2 / 1e7 for kernel in activations], rel=0.25)
    row = head(rows, "run", 1)[0]
    assert set(row) == {"type_code", METRIC, "run_ms"}  # the table of first rows shows what the schema has


def test_saved_predictors_keep_their_schema(made: Workspace, rows: TrainingSet, known: None) -> None:
    trained = train_label(rows, "run", QUICK)
    sidecar = save(made, rows, [trained], QUICK)
    assert (sidecar.feature_schema, sidecar.feature_version, sidecar.features) == ("two", 1, ("rank", "log_elements"))
    predictors = read_predictors(made.predictors(TARGET.name))
    assert predictors.schema is TWO
    new = [conv(channels=40, side=20, out=56), relu(channels=40, side=20)]
    assert predictors.features_of(new).tolist() == TWO.matrix(new).tolist()
    expected = predict_kernels(trained.model, new, TWO.matrix(new), list(rows.idle_load.values()))
    assert predictors.predict(new, {}).latency_ms == expected.tolist()
    most = 2.0 ** sidecar.feature_range[1][1]
    huge = relu(channels=1024, side=1024)  # how far beyond the range: of a logarithm, by its power
    assert predictors.beyond_range([huge]) == {huge.id: pytest.approx(2 ** 30 / most)}
    assert kept_sidecar(made, rows, QUICK) == sidecar
    assert kept_sidecar(made, read_training_set(made, TARGET.name), QUICK) is None  # other features: trained anew


def test_a_schema_that_is_not_there_is_refused(rows: TrainingSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quickly(tmp_path, rows)
    with pytest.raises(UserError, match=r"predictors\.json: these predictors read feature schema two 1, which this Hase does "
                                        r"not have \(it has: kernel 1, kernel 2\); use the Hase that trained them"):
        read_predictors(tmp_path)
    other = FeatureSchema[Kernel]("two", 1, {"operands": ("rank", "inputs")}, lambda kernel: [0.0, 0.0])
    monkeypatch.setitem(features.SCHEMAS, ("two", 1), other)
    with pytest.raises(UserError, match=r"other features in feature schema two 1 \(inputs, log_elements\); train again"):
        read_predictors(tmp_path)
    monkeypatch.setitem(features.SCHEMAS, ("two", 1), TWO)
    assert read_predictors(tmp_path).schema is TWO


def test_a_sidecar_of_another_feature_schema_is_refused(made: Workspace, tmp_path: Path) -> None:
    rows = read_training_set(made, TARGET.name)
    path = sidecar_path(tmp_path)
    sidecar = save_quickly(tmp_path, rows)
    assert read_predictors(tmp_path).schema is KERNEL_FEATURES
    assert read_sidecar(tmp_path) == sidecar
    files.write_json(path, files.with_digest(files.read_json(path) | {"feature_version": 3}))
    with pytest.raises(UserError, match="read feature schema kernel 3, which this Hase does not have"):
        read_predictors(tmp_path)
