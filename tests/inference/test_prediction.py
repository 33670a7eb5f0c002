"""Predictions: their sums, what they report, what is cached, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from command import printed, run_script
from onnx import TensorProto, helper
from trained_workspace import METRIC, conv_net, copies_ms, made_up_ms, model_ms

from hase.inference import Predictor, predict, prediction_speed
from hase.inference.live.load import InferenceConfig, LoadReading, current_load
from hase.inference.prediction import targets
from hase.inference.prediction.conditions import RunMode
from hase.inference.prediction.targets import choose_target, fitted_for
from hase.inference.prediction_speed import copies
from hase.learned.composition.fitted import read_composition
from hase.ort_analysis.graph import analysis
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import record_path
from hase.records.traces import GpuRun, GpuWork, Launch, measured_trace
from hase.runtimes import local_target
from hase.utils import files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.model_files import DEFAULT_DIMS_KEY
from hase.utils.paths import ROOT, Workspace

pytestmark = pytest.mark.slow

TARGET = local_target("cpu").name


@pytest.fixture(scope="module")
def workspace(trained_workspace: Workspace) -> Workspace:
    return trained_workspace


@pytest.fixture(scope="module")
def record(workspace: Workspace) -> ModelRecord:
    return analyze(workspace.models / "anet_c16.onnx", "cpu")


def shell(workspace: Workspace, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("inference/predict_model_latency.py", "--workspace", workspace.root, *arguments)


def test_a_measured_model_is_alpha_times_its_kernels_plus_beta(workspace: Workspace, record: ModelRecord) -> None:
    prediction = predict(record, target=TARGET, workspace=workspace)
    summed = sum(round(made_up_ms(record.kernel_of(node)), 6) for node in record.nodes)  # tables keep nanoseconds
    assert prediction.kernel_sum_ms == pytest.approx(summed, rel=1e-5)
    fitted = prediction.composition
    assert prediction.latency_ms == pytest.approx(fitted.alpha * prediction.kernel_sum_ms + fitted.beta_ms)
    assert prediction.latency_ms == pytest.approx(model_ms(record), rel=0.02)  # the fit finds α and β of the made-up models
    assert (prediction.sum_latency_ms, prediction.load, prediction.target) == (prediction.latency_ms, "idle", TARGET)
    assert prediction.time_share == pytest.approx({"measured": 1.0, "predicted": 0.0, "estimated": 0.0})
    assert prediction.kernel_count == {"measured": len(record.nodes), "predicted": 0, "estimated": 0}
    assert sum(kernel.total_ms for kernel in prediction.kernels) == pytest.approx(prediction.kernel_sum_ms)
    assert sum(kernel.share for kernel in prediction.kernels) == pytest.approx(1)
    shares = [kernel.share for kernel in prediction.kernels]
    assert shares == sorted(shares, reverse=True)
    assert (prediction.batch, prediction.items_per_second) == (1, pytest.approx(1000 / prediction.latency_ms))


def test_the_graph_that_phase_6_wrote(workspace: Workspace, record: ModelRecord, tmp_path: Path) -> None:
    here = Workspace(tmp_path)
    shutil.copytree(workspace.predictors(""), here.predictors(""))
    stored = record_path(here, record.flavour, record.model)
    files.write_json(stored, record)
    assert run_script("graph_model/dag_critical_path.py", "--workspace", here.root).returncode == 0
    dag = here.model_dag(record.flavour.name) / f"{record.model}.json"
    done = shell(here, "--dag", dag, "--target", TARGET, "--json")
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)
    assert answer["latency_ms"] == pytest.approx(predict(record, target=TARGET, workspace=workspace).latency_ms)
    stored.unlink()
    done = shell(here, "--dag", dag, "--target", TARGET)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{stored}, which describes its kernels, is missing" in done.stderr


def test_strict_looks_nothing_up(workspace: Workspace, record: ModelRecord) -> None:
    prediction = predict(record, target=TARGET, workspace=workspace, strict=True)
    assert prediction.time_share["measured"] == 0 == prediction.kernel_count["measured"]
    assert prediction.latency_ms == pytest.approx(model_ms(record), rel=0.3)


def test_under_load_nothing_is_looked_up_and_runs_take_longer(workspace: Workspace, record: ModelRecord) -> None:
    idle = predict(record, target=TARGET, workspace=workspace)
    loaded = predict(record, target=TARGET, workspace=workspace, load={METRIC: 0.5, "unheard_of": 1.0})
    assert (loaded.kernel_count["measured"], loaded.load) == (0, {METRIC: 0.5, "unheard_of": 1.0})
    assert loaded.kernel_sum_ms == pytest.approx(1.5 * idle.kernel_sum_ms, rel=0.3)
    assert any("unheard_of" in warning for warning in loaded.warnings)
    with pytest.raises(UserError, match=METRIC):
        predict(record, target=TARGET, workspace=workspace, load={"unheard_of": 1.0})


def test_numpy_in_and_out_adds_the_copies(workspace: Workspace, record: ModelRecord) -> None:
    usual = predict(record, target=TARGET, workspace=workspace)
    copied = predict(record, target=TARGET, workspace=workspace, run_mode=RunMode(io="host"))
    assert copied.latency_ms - usual.latency_ms == pytest.approx(copies_ms(record), rel=0.02)
    assert copied.way.label == "host_io"
    with pytest.raises(UserError, match="no model was measured with cuda_graph"):
        predict(record, target=TARGET, workspace=workspace, run_mode=RunMode(cuda_graph=True))


def test_the_longest_path_where_the_composition_says_so_and_the_plain_sum_beside_it(workspace: Workspace) -> None:
    fitted = read_composition(workspace.predictors(TARGET))
    path = fitted.model_copy(update={"kind": "critical_path", "alpha": 2.0, "beta_ms": 1.0})
    answer = predict("anet_c16.onnx", target=TARGET, workspace=workspace, composition=path)
    plain = next(c for c in fitted.candidates if (c.label, c.kind) == (fitted.label, "sum"))
    assert answer.critical_path_ms == pytest.approx(answer.kernel_sum_ms)  # a chain
    assert answer.latency_ms == pytest.approx(2.0 * answer.kernel_sum_ms + 1.0)
    assert answer.sum_latency_ms == pytest.approx(plain.alpha * answer.kernel_sum_ms + plain.beta_ms)


def test_path_model_and_record_give_the_same(workspace: Workspace, record: ModelRecord) -> None:
    path = workspace.models / "anet_c16.onnx"
    from_record = predict(record, target=TARGET, workspace=workspace)
    for model in (path, str(path), "anet_c16.onnx"):  # also looked for in model_zoo
        assert predict(model, target=TARGET, workspace=workspace) == from_record
    for model in (onnx.load(path), next(workspace.kernel_records.glob("*/anet_c16.json"))):
        assert predict(model, target=TARGET, workspace=workspace).latency_ms == from_record.latency_ms


def test_many_records_at_once(workspace: Workspace, record: ModelRecord) -> None:
    """Copies that share no kernels, and another model."""
    records, other = copies(record, 3), analyze(workspace.models / "bnet_c32.onnx", "cpu")
    alone, of_other = (predict(model, target=TARGET, workspace=workspace) for model in (record, other))
    assert Predictor(workspace, TARGET).predict_many([*records, other]) == [
        *(alone.model_copy(update={"model": f"{record.model}_{number}"}) for number in range(3)), of_other]


def test_speeds_are_timed(workspace: Workspace, tmp_path: Path) -> None:
    """Also under a load; and the command without a cache, with an empty one, and again, which takes less of the processors."""
    speed = ("inference/prediction_speed.py", "--workspace", workspace.root, "--target", TARGET, "--repeats", "1", "--json",
             "--model", "anet_c16.onnx")
    files.write_json(tmp_path / "busy.json", {METRIC: 0.4})
    median_ms = {row["case"]: row["median_ms"] for row in json.loads(printed(*speed, "--metrics", tmp_path / "busy.json"))}
    for case in ("reading the load", "the same file under load, which is read each time", "from the shell",
                 "from the shell, again"):
        assert median_ms[case] > 0
    [row] = json.loads(printed(*speed, "--shell"))
    assert 0 < row["again_processor_s"] < row["without_cache_processor_s"]
    assert row["first_s"] > 0
    assert run_script(*speed, "anet_c8.onnx").returncode == 2  # several models need --shell


@pytest.mark.nightly
def test_a_version_is_timed_against_another(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Against itself, under another name."""
    for name, value in (("MANY", 20), ("ROUNDS", 1)):
        monkeypatch.setattr(prediction_speed, name, value)
    (other := tmp_path / "other").symlink_to(ROOT)
    monkeypatch.setattr(sys, "argv", ["prediction_speed.py", "--model", str(conv_net(tmp_path / "net.onnx")), "--target",
                                      "nvidia-h200", "--against", str(other), "--json"])
    assert prediction_speed.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in rows] == ["one answer, in a fresh process", "the same answer again",
                                             "20 records in one call, each read by itself"]
    for row in rows:
        assert 0.2 < row["ratio"] == row["processor_s"] / row["other_processor_s"] < 5


def test_a_file_is_read_once_and_again_after_a_change(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = conv_net(workspace.root / "changing.onnx", channels=16)
    first = predict(path, target=TARGET, workspace=workspace)
    with monkeypatch.context() as patched:
        patched.setattr(analysis, "analyze", None)  # it is not analysed again
        assert predict(path, target=TARGET, workspace=workspace) == first
    stamp = path.stat()
    conv_net(path, channels=16, size=32)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # size and inode are the same too
    assert predict(path, target=TARGET, workspace=workspace).latency_ms > first.latency_ms


def test_changed_weights_beside_the_file_are_noticed(workspace: Workspace) -> None:
    inline = conv_net(workspace.root / "inline.onnx")
    path = workspace.root / "outside.onnx"
    onnx.save(onnx.load(inline), path, save_as_external_data=True, location="outside.weights", size_threshold=0)
    predict(path, target=TARGET, workspace=workspace)
    (workspace.root / "outside.weights").unlink()
    with pytest.raises(UserError, match=r"outside\.weights"):
        predict(path, target=TARGET, workspace=workspace)


def test_dynamic_dimensions(workspace: Workspace) -> None:
    path = workspace.models / "dynnet.onnx"
    single, batch_of_4 = (predict(path, dims={"batch": size}, target=TARGET, workspace=workspace) for size in (1, 4))
    assert (single.batch, batch_of_4.batch, batch_of_4.dims) == (1, 4, {"batch": 4})
    assert batch_of_4.latency_ms > single.latency_ms
    assert batch_of_4.memory.activations_mib == pytest.approx(4 * single.memory.activations_mib)
    for model, dims, message in (
            (path, {}, "batch"), (path, {"batch": 1, "height": 3}, "height.*batch"),
            (workspace.models / "anet_c16.onnx", {"width": 3}, "fixed"),
            (analyze(path, "cpu", {"batch": 1}), {"batch": 3}, "fixed")):
        with pytest.raises(UserError, match=message):
            predict(model, dims=dims, target=TARGET, workspace=workspace)

    suggesting = onnx.load(path)
    helper.set_model_props(suggesting, {DEFAULT_DIMS_KEY: json.dumps({"batch": 2})})
    onnx.save(suggesting, path := workspace.root / "suggesting.onnx")
    assert "batch=2" in shell(workspace, "--model", path).stderr  # the choice is reported when the model is first read
    assert predict(path, target=TARGET, workspace=workspace).dims == {"batch": 2}


def test_another_element_type_or_version_is_refused_unless_forced(workspace: Workspace, record: ModelRecord) -> None:
    float16_model = conv_net(workspace.root / "half.onnx", element=TensorProto.FLOAT16)
    with pytest.raises(UserError, match=r"float16.*--force"):
        predict(float16_model, target=TARGET, workspace=workspace)
    forced = predict(float16_model, target=TARGET, workspace=workspace, force=True)
    assert any("float16" in warning for warning in forced.warnings)

    older = record.model_copy(update={"flavour": record.flavour.model_copy(update={"runtime_version": "1.2"})})
    with pytest.raises(UserError, match=r"1\.2.*--force"):
        predict(older, target=TARGET, workspace=workspace)
    assert any("1.2" in warning for warning in predict(older, target=TARGET, workspace=workspace, force=True).warnings)


def test_shipped_targets(tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped predictors are used if they are named, also by a part that only one name has, or if there is only one target."""
    shipped, elsewhere = tmp_path / "shipped", Workspace(tmp_path / "elsewhere")
    monkeypatch.setattr(targets, "SHIPPED", shipped)
    other_target = fitted_for(workspace, TARGET).target.model_copy(update={"device_name": "another"})
    monkeypatch.setattr(targets, "local_targets", lambda: (other_target,))  # this machine is neither of them
    for name in ("gpu-a-cuda", "gpu-b-cuda"):
        shutil.copytree(workspace.predictors(TARGET), shipped / name)
    assert choose_target(elsewhere, "u-A-") == ("gpu-a-cuda", ())
    for part, message in (
            ("gpu-c", r"target gpu-c: no predictors for it .*there: gpu-a-cuda, gpu-b-cuda"),
            ("gpu-", r"target gpu-: several targets have this in their names: gpu-a-cuda, gpu-b-cuda"),
            (None, r"collector\.py.*or predict for a target that Hase ships.*gpu-a-cuda, gpu-b-cuda")):
        with pytest.raises(UserError, match=message):
            choose_target(elsewhere, part)
    shutil.rmtree(shipped / "gpu-b-cuda")
    name, (notice,) = choose_target(elsewhere, None)
    assert name == "gpu-a-cuda"
    assert notice.startswith(f"no predictors for this machine ({other_target.name}): predicted for gpu-a-cuda, the only target")


def test_the_target_is_this_machine_or_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path)
    monkeypatch.setattr(targets, "SHIPPED", tmp_path / "nothing")

    def add(name: str) -> None:
        workspace.predictors(name).mkdir(parents=True)
        (workspace.predictors(name) / "predictors.json").write_text("{}")

    with pytest.raises(UserError, match=r"collector\.py.*train_kernel_model\.py.*fit_composition\.py"):
        choose_target(workspace, None)
    add("gpu-a")
    workspace.predictors("half-made").mkdir()
    name, (notice,) = choose_target(workspace, None)
    assert (name, "another device" in notice) == ("gpu-a", True)
    add("gpu-b")
    with pytest.raises(UserError, match="gpu-a, gpu-b"):
        choose_target(workspace, None)
    add(TARGET)
    assert choose_target(workspace, None) == (TARGET, ())


def test_the_load_comes_from_a_file_or_is_idle(tmp_path: Path) -> None:
    config = read_config(ROOT / "inference" / "config.yaml", InferenceConfig)
    assert current_load(config) == LoadReading()
    metrics = tmp_path / "metrics.json"
    metrics.write_text(json.dumps({METRIC: 0.6, "DCGM_FI_DEV_GPU_UTIL_RATIO": 0.6, "unheard_of": 60}))
    assert current_load(config, metrics) == LoadReading({METRIC: 0.6, "DCGM_FI_DEV_GPU_UTIL": 60.0, "unheard_of": 60.0})
    for bad in ("[]", "{}", '{"a": "x"}', '{"a": NaN}', '{"a": true}', "no json", json.dumps({METRIC: 60}),
                '{"DCGM_FI_DEV_GPU_UTIL": 60, "DCGM_FI_DEV_GPU_UTIL_RATIO": 0.6}',  # the same metric twice
                '{"DCGM_FI_DEV_SM_CLOCK_HERTZ": 2147483632}'):  # a blank
        metrics.write_text(bad)
        with pytest.raises(UserError, match=r"metrics\.json"):
            current_load(config, metrics)


def test_the_command_prints_what_predict_returns(workspace: Workspace) -> None:
    options = ("--model", "anet_c16.onnx", "--target", TARGET)
    expected = predict("anet_c16.onnx", target=TARGET, workspace=workspace)
    assert json.loads(shell(workspace, *options, "--json").stdout) == [json.loads(expected.model_dump_json())]
    assert len(shell(workspace, *options, "--top", "2").stdout.split("\n\n")[1].splitlines()) == 1 + 2


def test_the_command_draws_a_prediction_beside_a_real_run(workspace: Workspace, tmp_path: Path) -> None:
    """Two processes in one file, both from 0; the real run is made up, in the form that run_anatomy.py writes."""
    run = GpuRun(90.0, (GpuWork("gemm", 5020.0, 30.0),), 5000.0, (Launch("cudaLaunchKernel", 5010.0, 4.0),))
    files.write_json(tmp_path / "real.json", measured_trace(run))
    options: list[str | Path] = ["--model", "anet_c16.onnx", "--target", TARGET, "--trace", tmp_path / "both.json"]
    done = shell(workspace, *options, "--beside", tmp_path / "real.json")
    assert done.returncode == 0, done.stderr
    events = files.read_json(tmp_path / "both.json")["traceEvents"]
    spans = {pid: [event for event in events if (event["ph"], event["pid"]) == ("X", pid)] for pid in (1, 2)}
    assert [(event["name"], event["tid"], event["ts"], event["dur"]) for event in spans[2]] == [
        ("run", 1, 0, 90), ("cudaLaunchKernel", 1, 10, 4), ("gemm", 2, 20, 30)]
    prediction = predict("anet_c16.onnx", target=TARGET, workspace=workspace)
    assert min(event["ts"] for event in spans[1]) == 0
    assert sum(event["dur"] for event in spans[1]) == pytest.approx(1000 * prediction.kernel_sum_ms, abs=0.01)
    files.write_json(tmp_path / "alone.json", {"traceEvents": [event for event in events if event["pid"] == 1]})
    refused = shell(workspace, *options[:-1], tmp_path / "none.json", "--beside", tmp_path / "alone.json")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)
    assert "without a process named measured" in refused.stderr
    assert not (tmp_path / "none.json").exists()


def test_importing_the_package_is_cheap() -> None:
    code = ("import sys; from hase.inference import Prediction, predict; "
            "print([name for name in ('torch', 'pandas', 'sklearn', 'onnx', 'onnxruntime', 'xgboost') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
