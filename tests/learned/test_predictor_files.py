"""Saved predictors: predictions from them, and errors for damaged, hostile and foreign files."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost
from conftest import Once
from made_up_dataset import METRIC, TARGET, conv, gemm, relu, tensor, train_workspace, true_ms

from hase.kernel_model.sampling.free_shapes.layers import recurrent_layer
from hase.learned import target_files
from hase.learned.kernels import estimators, sidecar
from hase.learned.kernels import predictors as predictors_module
from hase.learned.kernels.interface import XgboostSettings
from hase.learned.kernels.measured import MeasuredTimes
from hase.learned.kernels.predictors import Predictors, read_predictors, round_launches
from hase.learned.kernels.saved_form import LEAF_STEP, booster_from_arrays, booster_to_arrays
from hase.records.dataset_files import read_kernels
from hase.records.kernel_record import Kernel, Tensor
from hase.records.kernel_types import describe_kernel
from hase.records.measurement import LAUNCHES
from hase.training.kernels import fitting
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, SHIPPED, Workspace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(once: Once) -> Workspace:
    return Workspace(once("made_up_predictors", train_workspace))


@pytest.fixture(scope="module")
def predictors(trained: Workspace) -> Predictors:
    return read_predictors(trained.predictors(TARGET.name))


@pytest.fixture
def folder(trained: Workspace, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(trained.predictors(TARGET.name), tmp_path / "copy"))


@pytest.fixture(scope="module")
def measured(trained: Workspace) -> list[Kernel]:
    """Five kernels that training saw."""
    return [entry.kernel for entry in read_kernels(trained.dataset(TARGET.name)) if "secretnet" not in entry.groups][:5]


NEW = [conv(channels=40, side=20, out=56), conv(channels=20, side=24, out=40, window=5), relu(channels=40, side=20),
       gemm(rows=3, depth=300, columns=200)]


def test_new_kernels_and_unknown_types_are_predicted(predictors: Predictors) -> None:
    x = tensor(1, 64, 32, 32)
    unknown = describe_kernel("NobodyKnows", "org.example", 1, {}, [x], [Tensor(dtype="float32", shape=x.shape)])
    times = predictors.predict([unknown, *NEW], {})
    assert times.provenance == ["estimated", *["predicted"] * len(NEW)]
    assert times.latency_ms[1:] == pytest.approx([true_ms(kernel) for kernel in NEW], rel=0.3)
    assert times.latency_ms[0] == pytest.approx(true_ms(unknown), rel=1.0)


def test_measured_times_are_looked_up_unless_strict_or_under_load(predictors: Predictors, measured: list[Kernel]) -> None:
    looked_up = predictors.predict(measured, {}, "run")
    assert looked_up.provenance == ["measured"] * 5
    assert looked_up.latency_ms == [predictors.measured[kernel.id]["run"] for kernel in measured]
    loaded = predictors.predict(measured, {METRIC: 50.0}, "run")
    assert loaded.provenance == ["predicted"] * 5
    assert loaded.latency_ms == pytest.approx([1.5 * true_ms(kernel) for kernel in measured], rel=0.3)
    with pytest.raises(UserError, match="label gpu: not measured"):
        predictors.predict(NEW, {}, "gpu")


def test_predicted_times_are_kept_in_the_users_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process reads no booster, except for other kernels, labels or loads; nor does it take those of other files."""
    monkeypatch.setenv("HASE_CACHE", str(tmp_path / "cache"))
    first = read_predictors(folder)
    times, alone, loaded = first.predict(NEW, {}), first.predict(NEW[:1], {}, strict=True), first.predict(NEW, {METRIC: 50.0})
    asked: list[int] = []
    predict = predictors_module.predict_kernels

    def counted(*arguments: Any) -> Any:
        asked.append(len(arguments[1]))
        return predict(*arguments)

    monkeypatch.setattr(predictors_module, "predict_kernels", counted)
    second = read_predictors(folder)
    assert (second.predict(NEW, {}), second.predict(NEW[:1], {}, strict=True)) == (times, alone)
    assert not asked
    assert second.predict(NEW, {METRIC: 50.0}) == loaded
    assert second.predict(NEW, {}, "kernel_time").latency_ms != times.latency_ms
    assert asked == [len(NEW), len(NEW)]
    about = second.sidecar.labels["run"].model_copy(update={"sha256": "another file's"})
    other = read_predictors(folder)
    other.sidecar = other.sidecar.model_copy(update={"labels": {**other.sidecar.labels, "run": about}})
    with pytest.raises(UserError, match=r"damaged|changed"):
        other.predict(NEW, {}, "run")


def test_a_load_must_be_complete_and_not_for_predictors_of_an_idle_device(
        predictors: Predictors, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for load in ({"SOMETHING": 1.0}, {METRIC: float("nan")}):
        with pytest.raises(UserError, match=f"lacks {METRIC}"):
            predictors.predict(NEW, load)
    predictors.predict(NEW, {METRIC: 400.0})
    assert "beyond what was measured" in caplog.text
    sidecar.write_sidecar(folder, predictors.sidecar.model_copy(update={"loaded_rows": 0}))
    with pytest.raises(UserError, match="idle device only"):
        read_predictors(folder).predict(NEW, {METRIC: 30.0})


@pytest.mark.parametrize("label", ["run", "measured"])
def test_a_changed_cut_or_missing_file_is_noticed(folder: Path, label: str) -> None:
    path = next(folder.glob(f"{label}-*"))
    data = path.read_bytes()
    for damaged in (data[:99] + bytes([data[99] ^ 1]) + data[100:], data[:-100]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{path.name}: damaged .*train_kernel_model"):
            read_predictors(folder).kernel_model(label)  # boosters are read on demand
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        read_predictors(folder)
    target_files.PREDICTORS.path(folder).unlink()
    with pytest.raises(UserError, match=r"no predictors.*train_kernel_model"):
        read_predictors(folder)


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_a_foreign_file_in_the_place_of_boosters_is_refused(folder: Path) -> None:
    """The sidecar vouches for it. Not even a pickle in an array runs."""
    trace, with_pickle, without = folder / "was_here", io.BytesIO(), io.BytesIO()
    (name, *_) = np.load(next(folder.glob("run-*.npz"))).files
    np.savez(with_pickle, allow_pickle=True, **{name: np.array([_Attack(trace)])})
    np.savez(without, nothing=np.zeros(1))
    about = sidecar.read_sidecar(folder)
    for data, message in ((b"not an archive", "can't read what it saved"),
                          (pickle.dumps(_Attack(trace)), "can't read what it saved"),
                          (without.getvalue(), "booster .* is damaged"), (with_pickle.getvalue(), "booster .* is damaged")):
        (folder / str(about.labels["run"].file)).write_bytes(data)
        of_run = about.labels["run"].model_copy(update={"sha256": hashlib.sha256(data).hexdigest()})
        sidecar.write_sidecar(folder, about.model_copy(update={"labels": {**about.labels, "run": of_run}}))
        with pytest.raises(UserError, match=rf"{message}.*train again"):
            read_predictors(folder).predict(NEW, {}, "run")
        assert not trace.exists()


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 99}, "version 99"),
    ({"packages": {"xgboost": "0.9.0"}}, "made with xgboost 0.9.0"),
    ({"feature_range": [[0.0, 1.0]]}, "damaged at feature_range: it has 1 features"),
    ({"idle_load": {METRIC: float("nan")}}, rf"damaged at idle_load\.{METRIC}: .*finite"),
    ({"load_range": {}}, "idle_load and load_range are not of the metrics"),
    ({"metrics": ["a/b"], "idle_load": {"a/b": 0.0}, "load_range": {"a/b": [0.0, 1.0]}}, r"damaged at metrics\.0: .*the name"),
])
def test_foreign_sidecars_are_refused(folder: Path, change: dict[str, object], message: str) -> None:
    path = target_files.PREDICTORS.path(folder)
    files.write_json(path, files.with_digest(files.read_json(path) | change))
    with pytest.raises(UserError, match=rf"{message}.*train_kernel_model"):
        read_predictors(folder)


@pytest.mark.parametrize("value", ["NaN", "null", "-1"])
def test_a_measured_time_that_is_none_is_refused(folder: Path, measured: list[Kernel], value: str) -> None:
    """Its file says so itself: the sidecar vouches for it."""
    kernel = measured[0]
    about = sidecar.read_sidecar(folder)
    times = sidecar.read_measured(folder, about)[kernel.id]
    text = gzip.decompress((folder / about.measured).read_bytes())
    old, new = (MeasuredTimes.text({kernel.id: times | {"run": run}}).split(b"\n")[1] for run in (times["run"], -0.125))
    data = gzip.compress(text.replace(old, new.replace(b"-0.125", value.encode())))
    (folder / about.measured).write_bytes(data)
    sidecar.write_sidecar(folder, about.model_copy(update={"measured_sha256": hashlib.sha256(data).hexdigest()}))
    with pytest.raises(UserError, match=rf"{about.measured}: damaged at {kernel.id}\.run: .*train again"):
        read_predictors(folder).predict([kernel], {}, "run")


def test_trees_in_a_circle_are_refused(predictors: Predictors) -> None:
    """XGBoost would crash or never end."""
    model = predictors.kernel_model("run")
    assert isinstance(model, estimators.KernelModel)
    numbers, arrays = booster_to_arrays(model.boosters["shared"])
    odd_leaves = arrays["is_leaf"].copy()
    odd_leaves[0] ^= 0b10000001
    for changed in ({"is_leaf": odd_leaves}, {"features": arrays["features"] + np.uint8(200)}):
        with pytest.raises(ValueError, match=r"its own parent|feature that is not there|broadcast|cannot"):
            booster_from_arrays(numbers, arrays | changed)


def save_inside(folder: Path, known: Predictors) -> None:
    """Saves times of kernels inside their runs as those of runs."""
    about = {name: getattr(known.sidecar, name) for name in sidecar.Sidecar.model_fields  # the others it finds out itself
             if name not in ("version", "packages", "measured", "measured_sha256", "labels", "doubt")}
    sidecar.save_predictors(folder, {"run": known.kernel_model("kernel_time")}, {"run": ()}, {}, about)


def test_a_full_disk_keeps_the_old_predictors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = read_predictors(folder)
    before = known.predict(NEW, {}, "run").latency_ms

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(sidecar.files, "write_json", full)  # a test can't really fill the disk
    with pytest.raises(OSError, match="No space"):
        save_inside(folder, known)
    assert read_predictors(folder).predict(NEW, {}, "run").latency_ms == before


def test_predictors_that_were_read_predict_while_new_ones_are_saved(folder: Path, tmp_path: Path) -> None:
    """Boosters are read only at the first prediction, when the sidecar is already another one. Its files go with the next."""
    known, reading = read_predictors(folder), read_predictors(folder)
    before, inside = (known.predict(NEW, {}, label).latency_ms for label in known.labels)
    save_inside(folder, known)
    assert reading.predict(NEW, {}, "run").latency_ms == before
    assert read_predictors(folder).predict(NEW, {}, "run").latency_ms == inside
    new = read_predictors(folder).sidecar
    sidecar.copy_predictors(folder, tmp_path / "another")
    sidecar.write_sidecar(folder, new)
    for kept in (tmp_path / "another", folder):
        assert {path.name for path in (*kept.glob("*.npz"), *kept.glob("*.gz"))} == {new.measured, new.labels["run"].file}


def test_loading_imports_neither_pandas_nor_sklearn_nor_xgboost(trained: Workspace) -> None:
    code = ("import sys; from pathlib import Path; from hase.learned.kernels.predictors import read_predictors; "
            f"read_predictors(Path({str(trained.predictors(TARGET.name))!r})); "
            "print([name for name in ('pandas', 'sklearn', 'xgboost', 'onnx', 'torch') if name in sys.modules])")
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_sklearn_is_hidden_only_while_a_command_imports_xgboost() -> None:
    """A command starts faster so. A program that imports Hase has xgboost's API of scikit-learn."""
    code = ("import sys; from hase.learned.kernels.saved_form import import_xgboost; from hase.utils import cli\n"
            "def main():\n    xgboost = import_xgboost()\n"
            "    print('sklearn' in sys.modules, xgboost.compat.SKLEARN_INSTALLED)\n    import sklearn\n")
    for end, expected in (("cli.run(main)", "False False"), ("main()", "True True")):
        shown = subprocess.run([sys.executable, "-c", code + end], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert shown.strip() == expected


def test_a_saved_booster_predicts_the_same_as_the_trained_one(trained: Workspace) -> None:
    """Every row reaches the same leaf, also where a feature is missing; the leaves are rounded."""
    problem = fitting.learning_problem(read_training_set(trained, TARGET.name), "run")
    matrix = problem.matrix.copy()
    matrix[::7, ::5] = np.nan
    booster = fitting.train_booster(matrix, problem.log_ratios, XgboostSettings(trees=150, learning_rate=0.1, bins=64), seed=3)
    numbers, arrays = booster_to_arrays(booster)
    assert "missing_left" in arrays
    saved = booster_from_arrays(numbers, arrays)
    everything = xgboost.DMatrix(np.concatenate([matrix, problem.matrix]))
    assert (saved.predict(everything, pred_leaf=True) == booster.predict(everything, pred_leaf=True)).all()
    rounding = LEAF_STEP * booster.num_boosted_rounds() ** 0.5
    assert np.abs(saved.predict(everything) - booster.predict(everything)).max() < rounding
    numbers_again, arrays_again = booster_to_arrays(saved)
    assert numbers_again == numbers
    assert all((arrays_again[name] == array).all() for name, array in arrays.items())  # rounding twice changes nothing


def test_long_recurrent_layers_launch_as_many_kernels_in_each_step() -> None:
    """A GRU of the size of a model, whose neighbours launch two or three kernels a step; forward, and in both directions."""
    forward, both, short = (recurrent_layer("GRU", "float32", steps, 16, 384, 192, directions)
                            for steps, directions in ((50, 1), (50, 2), (8, 1)))
    assert [round_launches(forward, launches) for launches in (122.2, 130.0, 1.5)] == [2 * 50 + 3, 3 * 50 + 3, 50 + 3]
    assert (round_launches(both, 199.6), round_launches(short, 20.4)) == (2 * 100 + 3, 20.4)
    shipped = read_predictors(SHIPPED / "nvidia-h200-cuda-ort1.31-all")
    assert shipped.predict([forward], {}, LAUNCHES, strict=True).latency_ms[0] in (103.0, 153.0)


def test_measured_times_are_looked_up_one_by_one() -> None:
    times = {"b": {"run": 1.5}, "ab": {"run": 2.0, "gpu": 0.25}, "a": {"run": 3.0}, 'quote"': {}, "ü": {"run": 4.0}}
    read = MeasuredTimes(MeasuredTimes.text(times))
    assert (read, len(read), set(read), read.whole()) == (times, 5, set(times), times)
    assert [read.get(name) for name in ("a", "ab", "abc", "")] == [times["a"], times["ab"], None, None]


def test_a_command_ends_without_messages_of_its_boosters(tmp_path: Path) -> None:
    """Boosters were once destroyed after XGBoost's library, with a traceback for each on stderr."""
    with tarfile.open(ROOT / "recipes/same_predictions/records.tar.xz") as archive:
        archive.extract("records/cuda/bert_mask_static.json", tmp_path, filter="data")
    done = subprocess.run([sys.executable, "inference/predict_model_latency.py", "--model",
                           tmp_path / "records/cuda/bert_mask_static.json", "--target", "nvidia-h200", "--host-pace", "1.1",
                           "--workspace", tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not re.search("Booster|Traceback", done.stderr)
