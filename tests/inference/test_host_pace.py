"""The host's pace: measured, kept in a file, and taken into account by predictions for the shipped H200.

Where a test says FAKE, the GPU is pretended: its probe runs on the CPU provider, or gives made-up readings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import printed, run_script
from conftest import small_model
from prometheus_stand import READINGS, Exporter, device_labels, prometheus, recorded, value, wait_for

from hase.benchmark.host_pace import learned_pace
from hase.benchmark.metrics_exporter import PaceSampler
from hase.benchmark.ort.probes import host_probe, measure_pace
from hase.inference import predict
from hase.inference.evaluation.comparison import compare_model, comparison_table
from hase.inference.evaluation.evaluate import at_measured_pace, time_session
from hase.inference.evaluation.models import EvaluatedModel, Failures, predict_model
from hase.inference.live.load import InferenceConfig, current_load
from hase.inference.live.prometheus import PrometheusConfig, PrometheusError
from hase.inference.prediction.answers import Prediction
from hase.inference.prediction.conditions import AS_USUAL, HostPace, PaceAsked, RunMode, measured_pace
from hase.inference.prediction.targets import fitted_for
from hase.inference.prediction.uncertainty import HOSTS, PACE_POWER
from hase.learned.composition.fitted import read_composition
from hase.ort_analysis.graph.analysis import analyze
from hase.records.host_pace import HostProbeReading, MachinePace, read_pace
from hase.runtimes.protocol import Worker
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.paths import SHIPPED, Workspace

TARGET, DEVICE = "nvidia-h200-cuda-ort1.31-all", "NVIDIA H200"
SHORT = small_model()  # so small that the host sets the latency
LONG = small_model(channels=256, side=224, batch=32)  # so large that the GPU does
USUAL_US = read_composition(SHIPPED / TARGET).probe_us or 0.0  # as in an H200's predictors
ENGINE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
METRICS = {ENGINE: 0.4, "DCGM_FI_DEV_GPU_UTIL": 50.0}
MAX_AGE_S = 3600.0  # of paces by way of a Prometheus: longer than all tests of this file take
NOT_KNOWN = "the host's pace is not known"
Made = Callable[..., MachinePace]


@pytest.fixture(scope="module")
def made() -> Made:
    """Makes records that were measured here with the CPU provider; FAKE: beside an H200."""
    measured = measure_pace("cpu", 0.05)
    machine = measured.machine.model_copy(update={"device_name": DEVICE, "uuid": "GPU-here"})

    def make(ratio: float = 1.15, **more: object) -> MachinePace:
        changes = {"device": "cuda", "machine": machine, "probe_us": ratio * USUAL_US, "taken": datetime.now(UTC)}
        return measured.model_copy(update=changes | more)

    return make


def predicted(model: onnx.ModelProto, pace: float | HostPace | None = None, run_mode: RunMode = AS_USUAL,
              workspace: Workspace | None = None) -> Prediction:
    return predict(model, target=TARGET, host_pace=pace, run_mode=run_mode, workspace=workspace)


def ask(folder: Path, *options: str | Path) -> tuple[Any, ...]:
    """The command for `short.onnx` in a folder."""
    return ("inference/predict_model_latency.py", "--workspace", folder, "--target", "h200", "--model", folder / "short.onnx",
            *options)


@pytest.mark.slow
def test_the_pace_is_the_probes_median_and_is_kept(tmp_path: Path) -> None:
    pace, file = measure_pace("cpu", 0.3), tmp_path / "machine.json"
    assert 0.2 * host_probe("cpu").good_s < pace.probe_us / 1e6 < 50 * host_probe("cpu").good_s
    assert (pace.readings >= 3, pace.of_this_boot, pace.device, 0 <= pace.age_s < 60) == (True, True, "cpu", True)
    files.write_json(file, pace)
    assert read_pace(file) == pace
    file.write_text(file.read_text().replace('"probe_us": ', '"probe_us": 1'))
    with pytest.raises(UserError, match=r"changed by hand.*make it anew: python benchmark/host_pace.py --out"):
        read_pace(file)


@pytest.mark.skipif(has_cuda(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", [["benchmark/host_pace.py"], ["benchmark/metrics_exporter.py", "--source", "psutil",
                                                                  "--host-pace-every", "5"]])
def test_without_a_gpu_the_scripts_refuse(command: list[str]) -> None:
    done = run_script(*command)
    assert (done.returncode, done.stdout, "needs a GPU" in done.stderr, len(done.stderr.splitlines())) == (1, "", True, 1)


def test_the_script_writes_the_file_that_predictions_read_and_prints_the_ratio(
        made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAKE: the GPU, and what its host takes."""
    monkeypatch.setattr("hase.benchmark.ort.probes.has_cuda", lambda: True)
    monkeypatch.setattr("hase.benchmark.host_pace.local_target", lambda _: fitted_for(Workspace(), TARGET).target)
    monkeypatch.setattr("hase.benchmark.host_pace.measure_pace", lambda seconds: made(1.2))
    report = json.loads(printed("benchmark/host_pace.py", "--workspace", tmp_path, "--json"))
    assert (report["ratio"], report["target"], report["version"]) == (pytest.approx(1.2), TARGET, 2)
    assert report["probe_us"] == read_pace(Workspace(tmp_path).host_pace).probe_us == pytest.approx(1.2 * USUAL_US)
    assert learned_pace(Workspace(tmp_path), "another-gpu") is None


@pytest.mark.slow
def test_the_hosts_costs_are_taken_at_the_pace() -> None:
    usual, slow, graph = predicted(SHORT, 1.0), predicted(SHORT, 1.5), predicted(SHORT, 1.6, run_mode=RunMode(cuda_graph=True))
    costs = fitted_for(Workspace(), TARGET).composition.costs
    assert costs
    assert slow.composition.costs == costs.at_pace(1.5)
    assert slow.latency_ms == pytest.approx(1.5 * usual.latency_ms, rel=0.02)  # the host's time and the GPU's pauses
    assert (slow.host_pace, slow.host_pace_source, usual.host_pace) == (1.5, "given", 1.0)
    assert predicted(LONG, 1.5).latency_ms == pytest.approx(predicted(LONG, 1.0).latency_ms, rel=0.02)
    assert graph.latency_ms == predicted(SHORT, run_mode=RunMode(cuda_graph=True)).latency_ms  # a replay does not wait for it
    assert graph.host_pace is None


@pytest.mark.slow
def test_an_unknown_pace_widens_the_interval_where_it_matters() -> None:
    for model, matters in ((SHORT, True), (LONG, False)):
        unknown, usual = predicted(model), predicted(model, 1.0)
        assert (unknown.host_pace, unknown.host_pace_source, unknown.latency_ms) == (None, "unknown", usual.latency_ms)
        assert sum(NOT_KNOWN in warning for warning in unknown.warnings) == matters
        (low, high), (sure_low, sure_high) = unknown.interval_ms, usual.interval_ms
        assert (low <= sure_low, high >= sure_high, high - low > 1.1 * (sure_high - sure_low)) == (True, True, matters)
    low, high = predicted(SHORT).interval_ms
    assert low <= predicted(SHORT, HOSTS.low).latency_ms < predicted(SHORT, HOSTS.high).latency_ms <= high
    slow = predicted(SHORT, 1.5)  # a pace far from the usual one is less sure, too
    assert slow.interval_ms[1] / slow.latency_ms > 1.5 ** (1 + PACE_POWER) / 1.5 * 0.99


@pytest.mark.slow
def test_the_command_takes_a_ratio_or_a_machines_file(made: Made, tmp_path: Path) -> None:
    onnx.save(SHORT, tmp_path / "short.onnx")
    files.write_json(tmp_path / "machine.json", made(1.25, taken=datetime(2026, 1, 1, tzinfo=UTC), boot_id="another"))
    files.write_json(tmp_path / "a100.json", made(1.25, machine=made().machine.model_copy(
        update={"device_name": "NVIDIA A100"})))
    files.write_json(tmp_path / "odd.json", made(30.0))
    (answer,) = json.loads(printed(*ask(tmp_path, "--machine", tmp_path / "machine.json", "--json")))
    assert (answer["host_pace"], answer["host_pace_source"]) == (pytest.approx(1.25), "file")
    assert answer["latency_ms"] == pytest.approx(predicted(SHORT, 1.25).latency_ms)
    for options, status, message in ((["a100.json"], 1, "measured with a NVIDIA A100"), (["odd.json"], 1, "is 30 times that; "),
                                     (["machine.json", "--host-pace", "1.1"], 2, "")):
        done = run_script(*ask(tmp_path, "--machine", tmp_path / options[0], *options[1:]))
        assert (done.returncode, message in done.stderr) == (status, True), done.stderr


@pytest.mark.parametrize("change", ["none", "taken 900 s ago", "taken in 900 s", "another boot", "another GPU", "elsewhere"])
def test_only_a_recent_file_of_this_boot_is_read_and_only_here(change: str, made: Made, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """FAKE: this machine is the shipped H200. Times are computed here, since tests are collected long before they run."""
    conditions, workspace, now = "hase.inference.prediction.conditions", Workspace(tmp_path), datetime.now(UTC)
    monkeypatch.setattr(f"{conditions}.is_here", lambda target: target.name == TARGET and change != "elsewhere")
    monkeypatch.setattr(f"{conditions}.gpu_facts", lambda: {"uuid": "GPU-here"})
    changes: dict[str, dict[str, object]] = {
        "another boot": {"boot_id": "another"}, "taken 900 s ago": {"taken": now - timedelta(seconds=900)},
        "taken in 900 s": {"taken": now + timedelta(seconds=900)},
        "another GPU": {"machine": made().machine.model_copy(update={"uuid": "GPU-elsewhere"})}}
    assert predicted(SHORT, workspace=workspace).host_pace_source == "unknown"
    files.write_json(workspace.host_pace, made(1.3, **changes.get(change, {})))
    prediction, is_read = predicted(SHORT, workspace=workspace), change == "none"
    assert prediction.host_pace_source == ("file" if is_read else "unknown")
    assert prediction.latency_ms == pytest.approx(predicted(SHORT, 1.3 if is_read else 1.0).latency_ms)
    assert predicted(SHORT, 1.1, workspace=workspace).host_pace == 1.1


@pytest.mark.skipif(has_cuda(), reason="needs a machine that is not the target")
def test_the_pace_is_measured_on_request_and_only_on_the_target(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAKE: what the host of the GPU takes."""
    fitted = fitted_for(Workspace(), TARGET)
    with pytest.raises(UserError, match=r"has to be measured on the machine in question.*--machine"):
        measured_pace(fitted)
    monkeypatch.setattr("hase.inference.prediction.conditions.is_here", lambda _: True)
    seconds_asked: list[float] = []

    def fake(seconds: float) -> MachinePace:
        seconds_asked.append(seconds)
        return made(1 + len(seconds_asked) / 10)

    monkeypatch.setattr("hase.benchmark.ort.probes.measure_pace", fake)
    watched = PaceAsked(watched=True)
    found = [asked.now(fitted, AS_USUAL) for asked in (PaceAsked("measure"), watched, watched)]
    assert [pace[:2] for pace in found if isinstance(pace, HostPace)] == [
        (pytest.approx(ratio), "measured") for ratio in (1.1, 1.2, 1.3)]
    assert seconds_asked == [2.0, 0.3, 0.3]
    assert [PaceAsked(option, watched=True).is_followed(fitted, AS_USUAL) for option in (None, "measure", 1.1)] == [
        True, True, False]
    assert watched.now(fitted, RunMode(cuda_graph=True)) is PaceAsked().now(fitted, AS_USUAL) is None


# by way of a Prometheus ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Prometheus that scrapes the exporters of several devices; FAKE: their metrics are replayed, their hosts made up."""
    folder, now = tmp_path_factory.mktemp("paces"), time.time()
    exporters = {
        name: Exporter(recorded(folder / f"{name}.jsonl", [METRICS] * READINGS), device_labels(f"GPU-{name}"),
                       paces=PaceSampler("cuda", every_s=MAX_AGE_S, latest=probed))
        for name, probed in {
            "slow": HostProbeReading(1.2 * USUAL_US, now), "old": HostProbeReading(1.2 * USUAL_US, now - 2 * MAX_AGE_S),
            "none": HostProbeReading(float("nan"), now)}.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NO_PROXY", "127.0.0.1,localhost")
        addresses = {name: (exporter.address, "metrics") for name, exporter in exporters.items()}
        with prometheus(folder / "prometheus", addresses) as server:
            wait_for(lambda: value(server, "count(up == 1)") == len(exporters))
            yield server
    for exporter in exporters.values():
        exporter.close()


def config(port: int, name: str) -> InferenceConfig:
    return InferenceConfig(prometheus=PrometheusConfig.model_validate(
        {"url": f"http://127.0.0.1:{port}", "gpu": f"GPU-{name}", "job": name, "max_age_s": 5, "timeout_s": 10,
         "host_pace_max_age_s": MAX_AGE_S}))


@pytest.mark.slow
def test_the_pace_comes_from_prometheus(port: int, tmp_path: Path) -> None:
    onnx.save(SHORT, tmp_path / "short.onnx")
    (tmp_path / "config.yaml").write_text(config(port, "slow").model_dump_json())
    of_config = "--config", tmp_path / "config.yaml", "--json"
    (measured,) = json.loads(printed(*ask(tmp_path, *of_config)))
    assert (measured["host_pace"], measured["host_pace_source"]) == (pytest.approx(1.2), "measured")
    assert measured["latency_ms"] == pytest.approx(predict(SHORT, target=TARGET, host_pace=1.2, load={ENGINE: 0.4}).latency_ms)
    assert current_load(config(port, "slow"), fields=[ENGINE]).host_probe_us is None  # nobody asked for it


@pytest.mark.slow
def test_a_pace_that_is_old_or_invalid(port: int) -> None:
    old = current_load(config(port, "old"), fields=[ENGINE], pace=True)
    assert old.host_probe_us is None
    assert "host_pace_max_age_s is 3600: it is taken as not known" in old.notices[0]
    with pytest.raises(PrometheusError, match=r"are not a valid reading .*--host-pace-every"):
        current_load(config(port, "none"), fields=[ENGINE], pace=True)


def test_the_exporter_measures_the_pace() -> None:
    """On the CPU provider, instead of a GPU; a failure is kept and leaves the last reading as it was."""
    paces = PaceSampler("cpu", every_s=60.0)
    assert paces.recent() is None
    paces.update()
    latest = paces.recent()
    assert latest
    assert (0 < latest.probe_us < 1e5, time.time() - latest.taken_s < 60.0) == (True, True)
    if not has_cuda():
        paces.device = "cuda"
        paces.update()
        assert (paces.latest, "needs a GPU" in paces.error) == (latest, True)


@pytest.mark.slow
def test_the_evaluator_predicts_at_the_pace_beside_each_model(tmp_path: Path) -> None:
    """A session with the probe beside it, on the CPU provider instead of a GPU; then FAKE readings of an H200's host."""
    onnx.save(SHORT, tmp_path / "short.onnx")
    model, fitted = EvaluatedModel(analyze(tmp_path / "short.onnx", "cuda"), tmp_path / "short.onnx"), fitted_for(
        Workspace(), TARGET)
    with Worker(60.0) as worker:
        (measurement,) = time_session(model, worker, "cpu", AS_USUAL, 0.05, watch_host=True).measurements
    assert 1.0 < (measurement.probe_us or 0.0) < 1e5
    assert not at_measured_pace(model, fitted, AS_USUAL)
    model.probes_us, model.samples_ms = [1.1 * USUAL_US, 1.3 * USUAL_US, 1.2 * USUAL_US], [0.1]
    assert at_measured_pace(model, fitted, AS_USUAL)
    assert not at_measured_pace(model, fitted, RunMode(cuda_graph=True))
    predict_model(model, TARGET, AS_USUAL, Workspace(), False, Failures())
    compared = compare_model(model, ())
    assert compared
    assert (compared.host_pace, compared.predicted_ms) == pytest.approx((1.2, predicted(SHORT, 1.2).latency_ms))
    assert comparison_table([compared])[0]["host pace"] == compared.host_pace


@pytest.mark.slow
@pytest.mark.skipif(has_cuda(), reason="this machine's target is its GPU")
def test_a_cpu_target_has_no_host_of_its_own(trained_workspace: Workspace) -> None:
    model = trained_workspace.models / "anet_c8.onnx"
    prediction = predict(model, workspace=trained_workspace)
    assert (prediction.host_pace, prediction.host_pace_source) == (None, None)
    with pytest.raises(UserError, match="a CPU target's host is the target itself"):
        predict(model, workspace=trained_workspace, host_pace=1.1)
