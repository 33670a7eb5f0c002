"""The sharing probe's readings, served by an exporter, through a real Prometheus, to a prediction. They are an H200's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import printed
from prometheus_stand import READINGS, Exporter, MadeUpExporter, Page, device_labels, prometheus, recorded, value, wait_for

from hase.benchmark.metrics import names
from hase.benchmark.metrics.names import (
    InvalidProbeSamples,
    ProbeSample,
    TimedProbeSummary,
    probe_from_samples,
    probe_to_samples,
)
from hase.benchmark.metrics_exporter import ProbeSampler
from hase.inference.library.predictor import predict
from hase.inference.live.load import InferenceConfig, LoadReading, current_load, fields_asked
from hase.inference.live.prometheus import PrometheusConfig, PrometheusError
from hase.inference.prediction.answers import Prediction
from hase.inference.prediction.targets import fitted_for
from hase.inference.prediction.under_load import co_runner_from_probe as probed_work
from hase.inference.prediction.under_load import co_runner_from_summary
from hase.records.measurement import Block
from hase.records.probe_reading import ProbeReading, summarise_probe
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace

MAX_AGE_S = 3600.0  # of readings: longer than all tests of this file take
TARGET = "nvidia-h200-cuda-ort1.31-all"
ENGINE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
METRICS = {ENGINE: 0.4, "DCGM_FI_DEV_GPU_UTIL": 50.0}
LOADS = ((0.0, ""), (0.25, "resnet50_16"), (0.5, "compute"), (1.0, "memory_2ms"))


@pytest.fixture(scope="module")
def readings() -> dict[float, ProbeReading]:
    """By level: of an H200 that is idle, and beside three kinds of load."""
    found: dict[float, ProbeReading] = {}
    with tarfile.open(ROOT / "recipes" / "h200" / "under-load-nvidia-h200.tar.xz") as opened:
        journal = opened.extractfile(f"benchmark/dataset/{TARGET}/measurements.jsonl")
        assert journal is not None
        while len(found) < len(LOADS):
            block = Block.model_validate_json(journal.readline())
            if block.load in LOADS and block.probe:
                found.setdefault(block.level, block.probe)
    return found


@pytest.mark.slow
def test_a_summary_is_what_its_samples_say(readings: dict[float, ProbeReading]) -> None:
    for level, reading in readings.items():
        written = TimedProbeSummary(summarise_probe(reading), 1.75e9)
        samples = list(probe_to_samples(written))
        assert bool(written.summary.waited_ms) == (0.0 < level < 1.0)  # beside work that never pauses all wait alike
        assert len(samples) == len(names.QUANTILE_VALUES) + len(written.summary.waited_ms) + 2 + 1
        back = probe_from_samples(samples)
        assert (back.taken_s, back.summary.sharing) == (1.75e9, "time_slices")
        for name in ("latencies_ms", "waited_ms", "busy_ms", "quiet_ms"):
            assert getattr(back.summary, name) == pytest.approx(getattr(written.summary, name))
    # a server still has series of an earlier reading
    earlier = TimedProbeSummary(summarise_probe(readings[0.5]).model_copy(update={"sharing": "mps"}), 1000.0)
    now = list(probe_to_samples(TimedProbeSummary(summarise_probe(readings[0.0]), 1015.0)))
    series = {(sample.name, *sample.labels.values()) for sample in now}
    stale = [sample for sample in probe_to_samples(earlier) if (sample.name, *sample.labels.values()) not in series]
    assert len(stale) == len(names.QUANTILE_VALUES) + 1
    assert probe_from_samples([*stale, *now]) == probe_from_samples(now)


Change = Callable[[list[ProbeSample]], list[ProbeSample]]


def with_value(value: float, name: str, *labels: str) -> Change:
    """Changes the value of one of the samples."""
    return lambda samples: [s._replace(value=value) if (s.name, *s.labels.values()) == (name, *labels) else s for s in samples]


@pytest.mark.parametrize(("change", "message"), [
    (with_value(math.nan, names.LATENCY, names.ALL, "0.5"), "latencies_ms.10: Input should be a finite number"),
    (with_value(math.nan, names.PROBE_TIME, "time_slices"), "hase_probe_timestamp_seconds is not a time"),
    (with_value(9.0, names.LATENCY, names.ALL, "0.9"), "positive and ascend"),
    (with_value(-1.0, names.PHASE, names.BUSY), "phases can't be negative"),
    (lambda samples: samples[1:], 'are missing, hase_probe_latency_seconds{runs="all",quantile="0"} first'),
    (lambda samples: samples[:-1], "hase_probe_timestamp_seconds is missing"),
    (lambda samples: [*samples[:-1], ProbeSample(names.PROBE_TIME, {names.MODE: "exclusive"}, 1.0)],
     "sharing: Input should be"),
])
def test_samples_that_are_no_reading(readings: dict[float, ProbeReading], change: Change, message: str) -> None:
    with pytest.raises(InvalidProbeSamples) as raised:
        probe_from_samples(change(list(probe_to_samples(TimedProbeSummary(summarise_probe(readings[0.5]), 1.75e9)))))
    assert message in raised.value.fact


@pytest.fixture(scope="module")
def port(readings: dict[float, ProbeReading], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Prometheus that scrapes exporters of several pretended devices: their metrics are replayed, the readings an H200's."""
    folder, now = tmp_path_factory.mktemp("probed"), time.time()
    probed = {f"level_{level:g}": TimedProbeSummary(summarise_probe(reading), now) for level, reading in readings.items()}
    half = probed["level_0.5"]
    probed |= {"mps": half._replace(summary=half.summary.model_copy(update={"sharing": "mps"})),
               "old": half._replace(taken_s=now - 2 * MAX_AGE_S)}
    replay = recorded(folder / "metrics.jsonl", [METRICS] * READINGS)
    exporters = {name: Exporter(replay, device_labels(f"GPU-{name}"), probes=None if name == "unprobed" else ProbeSampler(
        "cuda", every_s=MAX_AGE_S, latest=probed[name])) for name in (*probed, "unprobed")}

    labels = device_labels("GPU-part")
    made_up = MadeUpExporter({"part": Page(labels, dict(METRICS), more=[
        (labels | dict(sample.labels), {sample.name: sample.value}) for sample in list(probe_to_samples(half))[5:]])})
    targets = {name: (served.address, "metrics") for name, served in exporters.items()}
    targets |= {name: (made_up.address, name) for name in made_up.pages}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NO_PROXY", "127.0.0.1,localhost")
        with prometheus(folder / "prometheus", targets) as server:
            wait_for(lambda: value(server, "count(up == 1)") == len(targets))
            yield server
    for served in exporters.values():
        served.close()
    made_up.close()


def config(port: int, name: str, **more: object) -> InferenceConfig:
    return InferenceConfig(prometheus=PrometheusConfig.model_validate(
        {"url": f"http://127.0.0.1:{port}", "gpu": f"GPU-{name}", "job": name, "max_age_s": 5, "timeout_s": 10,
         "probe_max_age_s": MAX_AGE_S, **more}))


@pytest.fixture(scope="module")
def model(torch_models: dict[str, Path]) -> Path:
    return torch_models["resnet18"]


def load_of(settings: InferenceConfig, workspace: Workspace) -> LoadReading:
    return current_load(settings, fields=fields_asked(fitted_for(workspace, TARGET)), probe=True)


def predicted(load: LoadReading, model: Path, workspace: Workspace) -> Prediction:
    co_runner = co_runner_from_summary(fitted_for(workspace, TARGET), load.probe)
    return predict(model, target=TARGET, workspace=workspace, load=load.metrics, notices=load.notices, co_runner=co_runner)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_the_server_gives_the_same_prediction_as_the_file(port: int, readings: dict[float, ProbeReading], level: float,
                                                          model: Path, workspace: Workspace) -> None:
    """To within a few per cent, by the predictors and the sharing that ship for an H200; the metrics give another latency."""
    load = load_of(config(port, f"level_{level:g}"), workspace)
    from_server = predicted(load, model, workspace).under_load
    from_file = predict(model, target=TARGET, workspace=workspace,
                        co_runner=probed_work(fitted_for(workspace, TARGET), readings[level])).under_load
    from_metrics = predict(model, target=TARGET, workspace=workspace, load=METRICS).under_load
    assert from_server
    assert from_file
    assert from_metrics
    assert (from_server.told_by, from_metrics.told_by) == ("probe", "metrics")
    assert from_server.mean_ms == pytest.approx(from_file.mean_ms, rel=0.03)
    assert from_server.percentile_ms(95) == pytest.approx(from_file.percentile_ms(95), rel=0.03)
    assert from_metrics.mean_ms != pytest.approx(from_file.mean_ms, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more", "notices"), [
    ("old", {}, ["the sharing probe was last read 7"]), ("unprobed", {}, []), ("level_0.5", {"probe_max_age_s": None}, [])])
def test_a_reading_that_is_old_or_missing_or_not_wanted(port: int, name: str, more: dict[str, object], notices: list[str],
                                                        model: Path, workspace: Workspace) -> None:
    load = load_of(config(port, name, **more), workspace)
    prediction = predicted(load, model, workspace)
    assert (load.probe, prediction.under_load and prediction.under_load.told_by) == (None, "metrics")
    assert any("metrics do not show" in warning and "--probe-every" in warning for warning in prediction.warnings)
    assert all(any(warning.startswith(notice) for warning in prediction.warnings) for notice in notices)


@pytest.mark.slow
def test_what_is_no_reading_is_an_error(port: int, workspace: Workspace) -> None:
    with pytest.raises(PrometheusError, match=r"reading of GPU-part \(.*\) can't be used: 5 of its samples are missing"):
        load_of(config(port, "part"), workspace)
    load = load_of(config(port, "part", on_failure="idle"), workspace)
    assert (load.metrics, load.probe) == ({}, None)
    assert "predicted for an idle device" in load.notices[0]


@pytest.mark.slow
def test_a_gpu_that_is_shared_otherwise(port: int, model: Path, workspace: Workspace) -> None:
    """And no probe is read for a target without a sharing model."""
    with pytest.raises(UserError, match=r"sharing mode mps: .* measured in time slices only"):
        predicted(load_of(config(port, "mps"), workspace), model, workspace)
    assert current_load(config(port, "level_0.5"), fields=[ENGINE]).probe is None


@pytest.mark.slow
def test_the_commands(port: int, readings: dict[float, ProbeReading], model: Path, workspace: Workspace,
                      tmp_path: Path) -> None:
    """All use the probe of the Prometheus, once and with --watch; a file named with --probe comes first."""
    settings = config(port, "level_0.25")
    (tmp_path / "config.yaml").write_text(settings.model_dump_json())
    files.write_json(tmp_path / "reading.json", readings[1.0])
    command = ["inference/predict_model_latency.py", "--model", str(model), "--target", TARGET, "--config",
               str(tmp_path / "config.yaml"), "--workspace", str(workspace.root), "--json"]
    expected = predicted(load_of(settings, workspace), model, workspace).under_load
    assert expected
    assert json.loads(printed(*command))[0]["under_load"] == expected.model_dump(mode="json")
    of_file = json.loads(printed(*command, "--probe", tmp_path / "reading.json"))[0]["under_load"]
    assert of_file["busy_share"] == 1.0
    watched = subprocess.Popen([sys.executable, *command, "--watch", "0.3"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert watched.stdout
        line = json.loads(watched.stdout.readline())
        assert (line["mean_ms"], line["busy_share"]) == (expected.mean_ms, expected.busy_share)
    finally:
        watched.kill()
        watched.communicate()
