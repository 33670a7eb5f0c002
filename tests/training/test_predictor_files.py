"""Saved predictors: predictions from them, and errors for damaged, hostile and foreign files."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import shutil
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost
from made_up_dataset import METRIC, TARGET, conv, draw_kernels, gemm, relu, tensor, true_ms, write_workspace

from hase.kernel_model.sampling.free_shapes.layers import recurrent_layer
from hase.learned import target_files
from hase.learned.kernels import estimators, sidecar
from hase.learned.kernels import predictors as predictors_module
from hase.learned.kernels.interface import ForestSettings, TrainingConfig, XgboostSettings
from hase.learned.kernels.measured import MeasuredTimes
from hase.learned.kernels.predictors import as_label_has_it, read_predictors, whole_launches
from hase.learned.kernels.saved_form import LEAF_STEP, SavedBoosters, as_arrays, from_arrays
from hase.records.kernel_record import Kernel, Tensor
from hase.records.kernel_types import describe_kernel
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.kernels import fitting
from hase.training.kernels.label_training import train_label
from hase.training.kernels.training_set import read_training_set
from hase.training.train_kernel_model import save
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, SHIPPED, Workspace

QUICK = TrainingConfig(
    folds=2, threads=1, own_min_kernels=40, xgboost=XgboostSettings(trees=150, learning_rate=0.1, bins=64),
    forest=ForestSettings(trees=3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("predictors"))
    write_workspace(workspace, held_out=("cnet",))
    rows = read_training_set(workspace, TARGET.name)
    save(workspace, rows, [train_label(rows, label, QUICK) for label in rows.times_ms], QUICK)
    return workspace


@pytest.fixture
def folder(trained: Workspace, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(trained.predictors(TARGET.name), tmp_path / "copy"))


def measured_kernels(workspace: Workspace) -> list[Kernel]:
    from hase.records.dataset_files import read_kernels

    return [described.kernel for described in read_kernels(workspace.dataset(TARGET.name))
            if not all(name.startswith("cnet") for name in described.models)]


NEW = [conv(channels=40, side=20, out=56), conv(channels=20, side=24, out=40, window=5), relu(channels=40, side=20),
       gemm(rows=3, depth=300, columns=200)]


def test_predicts_new_kernels(trained: Workspace) -> None:
    times = read_predictors(trained.predictors(TARGET.name)).predict(NEW, {})
    assert times.provenance == ["predicted"] * len(NEW)
    assert times.latency_ms == pytest.approx([true_ms(kernel) for kernel in NEW], rel=0.3)


def test_looks_measured_times_up_unless_strict_or_under_load(trained: Workspace) -> None:
    predictors = read_predictors(trained.predictors(TARGET.name))
    measured = measured_kernels(trained)[:5]
    looked_up = predictors.predict(measured, {}, "run")
    assert looked_up.provenance == ["measured"] * 5
    assert looked_up.latency_ms == [predictors.measured[kernel.id]["run"] for kernel in measured]
    assert predictors.predict(measured, {}, "run", strict=True).provenance == ["predicted"] * 5
    loaded = predictors.predict(measured, {METRIC: 50.0}, "run")
    assert loaded.provenance == ["predicted"] * 5
    assert loaded.latency_ms == pytest.approx([1.5 * true_ms(kernel) for kernel in measured], rel=0.3)


def test_labels_differ(trained: Workspace) -> None:
    predictors = read_predictors(trained.predictors(TARGET.name))
    assert predictors.labels == ("run", "kernel_time")
    run, inside = (sum(predictors.predict(NEW, {}, label).latency_ms) for label in predictors.labels)
    assert inside / run == pytest.approx(0.9, rel=0.05)
    with pytest.raises(UserError, match="label gpu: not measured"):
        predictors.predict(NEW, {}, "gpu")


def test_order_and_repeats(trained: Workspace) -> None:
    predictors = read_predictors(trained.predictors(TARGET.name))
    measured = measured_kernels(trained)[0]
    mixed = [NEW[1], measured, NEW[0], NEW[1]]
    times = predictors.predict(mixed, {})
    assert times.provenance == ["predicted", "measured", "predicted", "predicted"]
    assert times.latency_ms[0] == times.latency_ms[3]
    apart = read_predictors(trained.predictors(TARGET.name))
    assert times.latency_ms == [apart.predict([kernel], {}).latency_ms[0] for kernel in mixed]
    assert predictors.predict(mixed, {}) == times  # from the cache


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
    assert read_predictors(folder).predict(NEW[1:], {}).latency_ms == times.latency_ms[1:]
    assert asked == [len(NEW), len(NEW), len(NEW) - 1]
    about = second.sidecar.labels["run"].model_copy(update={"sha256": "another file's"})
    other = read_predictors(folder)
    other.sidecar = other.sidecar.model_copy(update={"labels": {**other.sidecar.labels, "run": about}})
    with pytest.raises(UserError, match=r"damaged|changed"):
        other.predict(NEW, {}, "run")


def test_a_type_without_predictor_falls_back_and_is_not_dropped(trained: Workspace) -> None:
    x = tensor(1, 64, 32, 32)
    unknown = describe_kernel("NobodyKnows", "org.example", 1, {}, [x], [Tensor(dtype="float32", shape=x.shape)])
    times = read_predictors(trained.predictors(TARGET.name)).predict([unknown, NEW[0]], {})
    assert times.provenance == ["estimated", "predicted"]
    assert times.latency_ms[0] == pytest.approx(true_ms(unknown), rel=1.0)


def test_load_must_be_complete(trained: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    predictors = read_predictors(trained.predictors(TARGET.name))
    with pytest.raises(UserError, match=f"lacks {METRIC}"):
        predictors.predict(NEW, {"SOMETHING": 1.0})
    with pytest.raises(UserError, match=f"lacks {METRIC}"):
        predictors.predict(NEW, {METRIC: float("nan")})
    predictors.predict(NEW, {METRIC: 400.0})
    assert "beyond what was measured" in caplog.text


def test_predictors_of_an_idle_device_refuse_a_load(workspace: Workspace) -> None:
    write_workspace(workspace, levels={0.0: 0.0}, sampled=20)
    rows = read_training_set(workspace, TARGET.name)
    save(workspace, rows, [train_label(rows, "run", QUICK)], QUICK)
    with pytest.raises(UserError, match="idle device only"):
        read_predictors(workspace.predictors(TARGET.name)).predict(NEW, {METRIC: 30.0})


def test_the_sidecar_describes_the_predictors(trained: Workspace) -> None:
    sidecar = read_predictors(trained.predictors(TARGET.name)).sidecar
    assert sidecar.target == TARGET
    assert sidecar.dataset_sha256 == files.sha256(trained.dataset(TARGET.name) / "kernel_latency.csv")
    assert sidecar.dtypes == ("float32",)
    assert sidecar.held_out == ("cnet",)
    assert sidecar.metrics == (METRIC,)
    assert sidecar.idle_load[METRIC] == pytest.approx(0, abs=0.5)
    assert sidecar.packages["xgboost"]
    assert sidecar.labels["run"].errors[0].mape < 0.06


@pytest.mark.parametrize("pattern", ["run-*.npz", "kernel_time-*.npz", "measured-*.json.gz"])
def test_one_changed_byte_is_noticed(folder: Path, pattern: str) -> None:
    path = next(folder.glob(pattern))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"{path.name}: damaged .*train_kernel_model"):
        read_predictors(folder).kernel_model(pattern.partition("-")[0])  # boosters are read on demand
    if pattern.startswith("kernel_time"):
        assert read_predictors(folder).predict(NEW, {}, "run").provenance == ["predicted"] * len(NEW)


def test_a_truncated_or_missing_file_is_noticed(folder: Path) -> None:
    path = next(folder.glob("run-*.npz"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        read_predictors(folder).predict(NEW, {}, "run")
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        read_predictors(folder)


def plant(folder: Path, data: bytes) -> None:
    """Puts `data` in the place of a predictor, with a sidecar that vouches for it."""
    sidecar = json.loads(target_files.PREDICTORS.path(folder).read_text())
    (folder / sidecar["labels"]["run"]["file"]).write_bytes(data)
    sidecar["labels"]["run"]["sha256"] = hashlib.sha256(data).hexdigest()
    files.write_json(target_files.PREDICTORS.path(folder), files.with_digest(sidecar))


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (f"touch {self.path}",)


def test_a_pickle_in_an_array_is_refused(folder: Path) -> None:
    trace, data = folder / "was_here", io.BytesIO()
    (name, *_) = np.load(next(folder.glob("run-*.npz"))).files
    np.savez(data, allow_pickle=True, **{name: np.array([_Attack(trace)])})
    plant(folder, data.getvalue())
    with pytest.raises(UserError, match=r"booster .* is damaged.*train again"):
        read_predictors(folder).predict(NEW, {}, "run")
    assert not trace.exists()


@pytest.mark.parametrize("data", [b"not an archive", pickle.dumps({"shared": [1, 2]})])
def test_a_file_of_something_else_is_refused(folder: Path, data: bytes) -> None:
    plant(folder, data)
    with pytest.raises(UserError, match=r"can't read what it saved.*train again"):
        read_predictors(folder).predict(NEW, {}, "run")


def test_an_archive_without_the_boosters_is_refused(folder: Path) -> None:
    data = io.BytesIO()
    np.savez(data, nothing=np.zeros(1))
    plant(folder, data.getvalue())
    with pytest.raises(UserError, match=r"booster shared is damaged.*train again"):
        read_predictors(folder).predict(NEW, {}, "run")


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 99}, "version 99"),
    ({"packages": {"xgboost": "0.9.0"}}, "made with xgboost 0.9.0"), ({"target": "mine"}, "damaged at target"),
    ({"packages": {}}, r"made with xgboost \(not known\)"), ({"labels": {}}, "damaged at labels"),
    ({"feature_range": [[0.0, 1.0]]}, "damaged at feature_range: it has 1 features"),
    ({"idle_load": {METRIC: float("nan")}}, rf"damaged at idle_load\.{METRIC}: .*finite"),
    ({"load_range": {}}, "idle_load and load_range are not of the metrics"),
    *(({"metrics": [name], "idle_load": {name: 0.0}, "load_range": {name: [0.0, 1.0]}}, r"damaged at metrics\.0: .*the name")
      for name in ("", "a/b", "a\1b")),
])
def test_foreign_sidecars_are_refused(folder: Path, change: dict[str, object], message: str) -> None:
    path = target_files.PREDICTORS.path(folder)
    files.write_json(path, files.with_digest(files.read_json(path) | change))
    with pytest.raises(UserError, match=rf"{message}.*train_kernel_model"):
        read_predictors(folder)


@pytest.mark.parametrize("value", ["NaN", "1e400", "null", "[0.5]", "-1", '"fast"', "1e13"])
def test_a_measured_time_that_is_none_is_refused(folder: Path, trained: Workspace, value: str) -> None:
    """Its file says so itself: the sidecar vouches for it."""
    kernel = measured_kernels(trained)[0]
    about = sidecar.read_sidecar(folder)
    times = sidecar.read_measured(folder, about)[kernel.id]
    text = gzip.decompress((folder / about.measured).read_bytes())
    old, new = (MeasuredTimes.text({kernel.id: times | {"run": run}}).split(b"\n")[1] for run in (times["run"], -0.125))
    assert old in text
    data = gzip.compress(text.replace(old, new.replace(b"-0.125", value.encode())))
    (folder / about.measured).write_bytes(data)
    sidecar.write_sidecar(folder, about.model_copy(update={"measured_sha256": hashlib.sha256(data).hexdigest()}))
    predictors = read_predictors(folder)
    with pytest.raises(UserError, match=rf"{about.measured}: damaged at {kernel.id}\.run: .*train again"):
        predictors.predict([kernel], {}, "run")
    with pytest.raises(UserError, match=rf"{about.measured}: damaged at {kernel.id}\.run: .*train again"):
        sidecar.renew_measured(folder, {})


def test_trees_in_a_circle_are_refused(trained: Workspace) -> None:
    """XGBoost would crash or never end."""
    model = read_predictors(trained.predictors(TARGET.name)).kernel_model("run")
    assert isinstance(model, estimators.KernelModel)
    numbers, arrays = as_arrays(model.boosters["shared"])
    odd_leaves = arrays["is_leaf"].copy()
    odd_leaves[0] ^= 0b10000001
    for changed in ({"is_leaf": odd_leaves}, {"features": arrays["features"] + np.uint8(200)}):
        with pytest.raises(ValueError, match=r"its own parent|feature that is not there|broadcast|cannot"):
            from_arrays(numbers, arrays | changed)


def test_no_predictors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no predictors.*train_kernel_model"):
        read_predictors(tmp_path)


def test_training_again_replaces_the_files_and_a_full_disk_keeps_the_old(
        trained: Workspace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictors = read_predictors(folder)
    about = {name: getattr(predictors.sidecar, name) for name in (
        "target", "created", "dataset_sha256", "metrics", "idle_load", "load_range", "loaded_rows", "dtypes", "held_out",
        "config", "machines", "feature_range")}
    models = {"run": predictors.kernel_model("kernel_time")}
    before = predictors.predict(NEW, {}, "run").latency_ms

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(sidecar.files, "write_json", full)  # a test can't really fill the disk
        with pytest.raises(OSError, match="No space"):
            sidecar.save_predictors(folder, models, {"run": ()}, {}, about)
    assert read_predictors(folder).predict(NEW, {}, "run").latency_ms == before
    sidecar.save_predictors(folder, models, {"run": ()}, {}, about)
    assert sorted(path.name for path in folder.glob("*.json")) == [
        target_files.PREDICTORS.name, target_files.UNCERTAINTY.name]
    sidecar.write_sidecar(folder, read_predictors(folder).sidecar)  # which names the same files: those of the old one go
    assert sorted(path.suffix for path in folder.iterdir() if path.suffix != ".json") == [".gz", ".npz"]
    assert read_predictors(folder).predict(NEW, {}, "run").latency_ms == predictors.predict(NEW, {}, "kernel_time").latency_ms


def test_predictors_that_were_read_predict_while_new_ones_are_saved(folder: Path, tmp_path: Path) -> None:
    """Their boosters are read only at the first prediction, when the sidecar is already another one."""
    known, reading = read_predictors(folder), read_predictors(folder)
    before = known.predict(NEW, {}, "run").latency_ms
    about = {name: getattr(known.sidecar, name) for name in sidecar.Sidecar.model_fields
             if name not in ("version", "packages", "measured", "measured_sha256", "labels", "doubt")}
    sidecar.save_predictors(folder, {"kernel_time": known.kernel_model("kernel_time")}, {"kernel_time": ()}, {}, about)
    assert reading.predict(NEW, {}, "run").latency_ms == before
    new = read_predictors(folder).sidecar
    sidecar.copy_predictors(folder, tmp_path / "another")
    sidecar.write_sidecar(folder, new)
    for kept in (tmp_path / "another", folder):
        assert {path.name for path in (*kept.glob("*.npz"), *kept.glob("*.gz"))} == {
            new.measured, new.labels["kernel_time"].file}


def test_only_the_look_up_is_renewed(folder: Path) -> None:
    before = read_predictors(folder)
    measured_id = next(name for name, times in before.measured.items() if "run" in times)
    renewed = sidecar.renew_measured(folder, {NEW[0].id: {"run": 7.0}, measured_id: {"run": 8.0}})
    after = read_predictors(folder)
    assert after.sidecar == renewed == before.sidecar.model_copy(
        update={"measured": renewed.measured, "measured_sha256": renewed.measured_sha256})
    changed = {NEW[0].id: {"run": 7.0}, measured_id: before.measured[measured_id] | {"run": 8.0}}
    assert after.measured == dict(before.measured) | changed
    assert {path.name for path in folder.glob("measured-*")} == {before.sidecar.measured, renewed.measured}
    times = after.predict(NEW[:2], {}, "run")
    assert (times.latency_ms[0], times.provenance) == (7.0, ["measured", "predicted"])


def test_loading_imports_neither_pandas_nor_sklearn_nor_xgboost(trained: Workspace) -> None:
    code = ("import sys; from pathlib import Path; from hase.learned.kernels.predictors import read_predictors; "
            f"read_predictors(Path({str(trained.predictors(TARGET.name))!r})); "
            "print([name for name in ('pandas', 'sklearn', 'xgboost', 'onnx', 'torch') if name in sys.modules])")
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("command", [True, False])
def test_sklearn_is_hidden_only_while_a_command_imports_xgboost(command: bool) -> None:
    """A program that imports Hase has xgboost's API of scikit-learn."""
    code = ("import sys; from hase.learned.kernels.saved_form import import_xgboost; from hase.utils import cli\n"
            "def main():\n"
            "    xgboost = import_xgboost()\n"
            "    print('sklearn' in sys.modules, xgboost.compat.SKLEARN_INSTALLED)\n"
            "    import sklearn\n"
            "    assert import_xgboost() is xgboost\n") + ("cli.run(main)" if command else "main()")
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.split() == (["False", "False"] if command else ["True", "True"])


def test_a_models_kernels_are_predicted_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A booster predicts all of its kernels in one call, and is read once."""
    predictors, rows_asked, ask = read_predictors(folder), list[int](), xgboost.Booster.inplace_predict

    def noted(booster: xgboost.Booster, matrix: np.ndarray, *options: object) -> np.ndarray:
        rows_asked.append(len(matrix))
        return ask(booster, matrix, *options)

    monkeypatch.setattr(xgboost.Booster, "inplace_predict", noted)
    calls = {}
    for count in (40, 400):
        rows_asked.clear()
        predictors.predict(draw_kernels(count, seed=9), {METRIC: 40.0}, "run", strict=True)
        assert sum(rows_asked) > count / 2  # a type with few kernels has no booster
        calls[count] = len(rows_asked)
        shutil.rmtree(folder, ignore_errors=True)
    assert calls[40] == calls[400]


def test_a_saved_booster_predicts_the_same_as_the_trained_one(trained: Workspace) -> None:
    """Every row reaches the same leaf, also where a feature is missing; the leaves are rounded."""
    rows = read_training_set(trained, TARGET.name)
    problem = fitting.learning_problem(rows, "run")
    matrix = problem.matrix.copy()
    matrix[::7, ::5] = np.nan
    booster = fitting.train_booster(matrix, problem.log_ratios, QUICK.booster("run"), seed=3)
    numbers, arrays = as_arrays(booster)
    assert "missing_left" in arrays
    saved = from_arrays(numbers, arrays)
    everything = xgboost.DMatrix(np.concatenate([matrix, problem.matrix]))
    assert (saved.predict(everything, pred_leaf=True) == booster.predict(everything, pred_leaf=True)).all()
    rounding = LEAF_STEP * booster.num_boosted_rounds() ** 0.5
    assert np.abs(saved.predict(everything) - booster.predict(everything)).max() < rounding
    numbers_again, arrays_again = as_arrays(saved)
    assert numbers_again == numbers
    assert all((arrays_again[name] == array).all() for name, array in arrays.items())  # rounding twice changes nothing
    assert sum(len(zlib.compress(array.tobytes())) for array in arrays.values()) < 0.08 * len(booster.save_raw("ubj"))


@pytest.mark.parametrize("parameters", [{"grow_policy": "lossguide", "max_leaves": 16}, {"objective": "reg:gamma"}])
def test_a_booster_that_can_not_be_saved_is_an_error(parameters: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(500, 4)).astype(np.float32)
    booster = xgboost.train({"max_depth": 0} | parameters, xgboost.DMatrix(matrix, np.exp(matrix.sum(axis=1))), 3)
    with pytest.raises(UserError, match="it must be a sum of trees that were grown level by level"):
        as_arrays(booster)


def test_only_the_boosters_that_a_prediction_needs_are_read() -> None:
    predictors = read_predictors(SHIPPED / "nvidia-h200-cuda-ort1.31-all")
    model = predictors.kernel_model("gpu")
    assert isinstance(model, estimators.KernelModel)
    boosters = model.boosters
    assert isinstance(boosters, SavedBoosters)
    times = predictors.predict([relu(channels=40, side=20)], {}, "gpu", strict=True)
    assert times.provenance == ["predicted"]
    assert boosters.opened == {"Relu"} < set(boosters)


def test_measured_times_are_looked_up_one_by_one() -> None:
    times = {"b": {"run": 1.5}, "ab": {"run": 2.0, "gpu": 0.25}, "a": {"run": 3.0}, 'quote"': {}, "ü": {"run": 4.0}}
    read = MeasuredTimes(MeasuredTimes.text(times))
    assert (read, len(read), set(read), read.whole()) == (times, 5, set(times), times)
    assert [read.get(name) for name in ("a", "ab", "abc", "", "z")] == [times["a"], times["ab"], None, None, None]
    assert MeasuredTimes(MeasuredTimes.text({})) == {}


def test_a_command_ends_without_messages_of_its_boosters(tmp_path: Path) -> None:
    """Boosters were once destroyed after XGBoost's library, with a traceback for each on stderr."""
    with tarfile.open(ROOT / "recipes/same_predictions/records.tar.xz") as archive:
        archive.extract("records/cuda/bert_mask_static.json", tmp_path, filter="data")
    path = tmp_path / "records" / "cuda" / "bert_mask_static.json"
    done = subprocess.run([sys.executable, "inference/predict_model_latency.py", "--model", path, "--target", "nvidia-h200",
                           "--host-pace", "1.1", "--workspace", tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Booster" not in done.stderr
    assert "Traceback" not in done.stderr


def test_long_recurrent_layers_launch_as_many_kernels_in_each_step() -> None:
    """A GRU of the size of a model, whose neighbours launch two or three kernels a step; forward, and in both directions."""
    forward, both, short = (recurrent_layer("GRU", "float32", steps, 16, 384, 192, directions)
                            for steps, directions in ((50, 1), (50, 2), (8, 1)))
    assert whole_launches(forward, 122.2) == 2 * 50 + 3
    assert whole_launches(forward, 130.0) == 3 * 50 + 3
    assert whole_launches(forward, 1.5) == 50 + 3
    assert whole_launches(both, 199.6) == 2 * 100 + 3
    assert whole_launches(short, 20.4) == 20.4
    assert as_label_has_it(forward, GPU_LABEL, 0.34) == 0.34
    predictors = read_predictors(SHIPPED / "nvidia-h200-cuda-ort1.31-all")
    assert predictors.predict([forward], {}, LAUNCHES, strict=True).latency_ms[0] in (103.0, 153.0)
