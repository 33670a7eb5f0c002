"""The exporter as Prometheus meets it: asked over HTTP, playing readings from a file."""

from __future__ import annotations

import logging
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import requests
from command import run_script
from prometheus_client.parser import text_string_to_metric_families
from prometheus_stand import INTERVAL_S, Exporter, free_port, recorded, start_exporter, wait_for

from hase.benchmark import metrics_exporter
from hase.benchmark.metrics.names import (
    LATENCY,
    MODE,
    PHASE,
    PROBE_TIME,
    ProbeSample,
    TimedProbeSummary,
    probe_from_samples,
)
from hase.benchmark.metrics.sources import CpuSource
from hase.benchmark.metrics_exporter import LAST_SAMPLE, PROCESSES, ProbeSampler, ProcessSampler, Sampler, device_labels
from hase.utils.errors import UserError
from hase.utils.paths import ROOT
from hase.utils.web_server import STALE_INTERVALS

SM, UTIL, CLOCK = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_SM_CLOCK"
POWER = "DCGM_FI_DEV_POWER_USAGE"
READING = {SM: 0.25, UTIL: 60.0, CLOCK: 1980.0, POWER: 312.5}
PATIENCE_S = 30.0


def families(text: str) -> dict[str, Any]:
    """Metric families by name; without those that prometheus_client adds about the exporter's own process."""
    by_name = {family.name: family for family in text_string_to_metric_families(text)}
    assert by_name["process_cpu_seconds"].samples[0].value > 0
    return {name: family for name, family in by_name.items() if not name.startswith("process_")}


def answer(url: str, status: int) -> requests.Response:
    """The first answer of that status."""
    got: list[requests.Response] = []
    wait_for(lambda: got.append(requests.get(url, timeout=5)) or got[-1].status_code == status)  # type: ignore[func-returns-value]
    return got[-1]


@pytest.mark.slow
def test_the_command_serves_until_a_signal(tmp_path: Path) -> None:
    """Names, values, labels and units, at a port that nobody else gets meanwhile."""
    began = time.time()
    process, url = start_exporter(recorded(tmp_path / "gpu_of_yesterday.jsonl", [READING] * 600))
    try:
        served = families(answer(url, 200).text)
        assert set(served) == {SM, UTIL, CLOCK, POWER, LAST_SAMPLE}
        assert {name: served[name].samples[0].value for name in READING} == pytest.approx(READING)
        labels = {"gpu": "0", "UUID": "replay-gpu_of_yesterday", "device": "replay", "modelName": "gpu_of_yesterday",
                  "Hostname": platform.node()}
        assert all(served[name].samples[0].labels == labels and served[name].type == "gauge" for name in READING)
        units = {name: served[name].documentation.rpartition("(")[2].rstrip(")") for name in READING}
        assert units == {SM: "ratio", UTIL: "per cent", CLOCK: "MHz", POWER: "W"}
        assert began - INTERVAL_S < served[LAST_SAMPLE].samples[0].value <= time.time()
        port = url.rpartition(":")[2].partition("/")[0]
        done = run_script("benchmark/metrics_exporter.py", "--host", "127.0.0.1", "--port", port, "--source", "psutil",
                          "--workspace", tmp_path)
        assert (done.returncode, done.stderr.startswith(f"error: port {port}: ")) == (1, True)
        assert "choose another port" in done.stderr.lower()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert re.fullmatch(r"served for \d+ s, which took \d+\.\d\d % of a core\n", log)
    finally:
        process.kill()
        process.communicate()


Export = Callable[..., str]


@pytest.fixture
def export(tmp_path: Path) -> Iterator[Export]:
    """Starts an exporter in this process that plays readings; gives its address."""
    started: list[Exporter] = []

    def serve(readings: Sequence[Mapping[str, Any]], **options: Any) -> str:
        started.append(Exporter(recorded(tmp_path / "gpu.jsonl", readings), device_labels("cpu", None), **options))
        return f"http://{started[-1].address}/metrics"

    yield serve
    for exporter in started:
        exporter.close()


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the exporter logs, each line once however often its parents pass it on."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(handler.format(record)))
    monkeypatch.setattr(metrics_exporter.log, "handlers", [handler])
    return lines


@pytest.mark.slow
def test_no_values_are_served_after_the_last_reading(export: Export, log_lines: list[str]) -> None:
    url = export([READING] * 8)
    answer(url, 200)
    gone = answer(url, 503)
    assert gone.headers["Content-Type"].startswith("text/plain")
    assert [text in gone.text for text in ("the last sound sample is", "the replay is over", SM)] == [True, True, False]
    assert ["the replay is over" in line for line in log_lines] == [True]  # logged once, not every interval


@pytest.mark.slow
def test_invalid_readings_are_never_served(export: Export) -> None:
    url = export([READING | {SM: 0.0, "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.9}] * 600)

    def refused_with_reason() -> bool:
        refused = requests.get(url, timeout=5)
        assert (refused.status_code, "no sound sample so far" in refused.text) == (503, True)
        return "stuck at 0" in refused.text

    wait_for(refused_with_reason)


@pytest.mark.slow
def test_sampling_goes_on_after_a_lack_of_file_descriptors(log_lines: list[str]) -> None:
    sampler, over = Sampler(CpuSource(), interval_s=0.25), threading.Event()
    thread = threading.Thread(target=sampler.run, args=(over,), daemon=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    thread.start()
    wait_for(lambda: bool(sampler.means))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        wait_for(lambda: "Too many open files" in sampler.error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for(lambda: not sampler.trouble() and time.time() - sampler.sampled_s < 0.25)
    over.set()
    thread.join(PATIENCE_S)
    assert ["Too many open files" in line for line in log_lines] == [True]  # logged once


def probe_samples(by_name: Mapping[str, Any]) -> list[ProbeSample]:
    """The probe's samples among these families."""
    return [ProbeSample(sample.name, sample.labels, sample.value) for name in (LATENCY, PHASE, PROBE_TIME) if name in by_name
            for sample in by_name[name].samples]


@pytest.mark.slow
def test_the_probe_beside_the_metrics_of_a_cpu(tmp_path: Path) -> None:
    """The real command, with a reading every second."""
    port, began, labels = free_port(), time.time(), device_labels("cpu", None)
    process = subprocess.Popen(
        [sys.executable, "benchmark/metrics_exporter.py", "--host", "127.0.0.1", "--port", str(port), "--source", "psutil",
         "--interval", "0.5", "--probe-every", "1", "--workspace", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        process.stdout.readline()

        def probed() -> dict[str, Any]:
            return families(answer(f"http://127.0.0.1:{port}/metrics", 200).text)

        wait_for(lambda: PROBE_TIME in probed())
        served = probed()
        assert served["DCGM_FI_DEV_CPU_UTIL_TOTAL"].samples[0].labels == labels
        assert all(labels.items() <= sample.labels.items() for sample in probe_samples(served))
        assert all(served[name].type == "gauge" and served[name].documentation for name in (LATENCY, PHASE, PROBE_TIME))
        summary, taken_s = probe_from_samples(probe_samples(served))
        assert (summary.sharing, served[PROBE_TIME].samples[0].labels[MODE]) == (None, "cpu")
        assert began < taken_s <= time.time()
        wait_for(lambda: probe_from_samples(probe_samples(probed())).taken_s > taken_s)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_reading_that_is_old_is_not_served(export: Export) -> None:
    """An exporter of a replay, with a probe of this CPU that is read when asked to."""
    probes = ProbeSampler("cpu", every_s=5.0)
    url = export([READING] * 600, probes=probes)
    assert not probe_samples(families(answer(url, 200).text))  # none so far
    probes.update()
    assert probes.latest
    for age_s, served in ((5.0 * STALE_INTERVALS - 2.0, True), (5.0 * STALE_INTERVALS + 1.0, False)):
        probes.latest = probes.latest._replace(taken_s=time.time() - age_s)
        served_now = families(answer(url, 200).text)
        assert (bool(probe_samples(served_now)), served_now[SM].samples[0].value) == (served, READING[SM])


@pytest.mark.slow
def test_a_failing_probe_leaves_the_metrics_alone(export: Export, log_lines: list[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretended: at first a device without memory for the probe's sessions, then a fault of the program, which alone is shown
    with its traceback."""
    probes = ProbeSampler("cpu", every_s=5.0)
    url = export([READING] * 600, probes=probes)
    for place, fault, shown, served in (("__init__", MemoryError(), "MemoryError", ()),
                                        ("read", ZeroDivisionError("division"), "division", (LATENCY, PHASE, PROBE_TIME))):
        latest = probes.latest  # which is fresh
        with monkeypatch.context() as patched:
            patched.setattr(f"hase.benchmark.ort.probes.SharingProbe.{place}", Mock(side_effect=fault))
            for _ in range(3):
                probes.update()
        assert (probes.latest, probes.error) == (latest, shown)
        assert set(families(answer(url, 200).text)) == {*READING, LAST_SAMPLE, *served}
        probes.update()
        assert probes.error == ""
    assert log_lines[0] == "the sharing probe: MemoryError"
    assert log_lines[1].startswith("the sharing probe: division\nTraceback")


@pytest.mark.slow
def test_the_count_of_processes(export: Export, log_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pretended GPU. A count that fails is logged once and leaves the metrics alone."""
    probes = ProbeSampler("cuda", every_s=5.0)
    counts = ProcessSampler("cuda", every_s=5.0, own_probes=[probes])
    url = export([READING] * 600, counts=counts)

    def served() -> list[ProbeSample]:
        return [ProbeSample(*sample[:3]) for family in [families(answer(url, 200).text).get(PROCESSES)] if family
                for sample in family.samples]

    count = Mock(return_value=3)
    monkeypatch.setattr(metrics_exporter, "other_processes", count)
    assert served() == []
    counts.update()
    count.assert_called_with(own=False)
    assert served() == [ProbeSample(PROCESSES, device_labels("cpu", None), 3.0)]
    probes.latest = TimedProbeSummary(Mock(), time.time())
    count.side_effect = UserError("the driver does not list this process")
    for _ in range(3):
        counts.update()
    count.assert_called_with(own=True)
    assert log_lines == ["the count of processes: the driver does not list this process"]
    assert len(served()) == 1


@pytest.mark.parametrize(("options", "message"), [
    (["--probe-every", "0.5"], "--probe-every 0.5: 1 s at least, since each run of the probe keeps the device busy"),
    (["--probe-every", "5", "--source", "replay", "--replay", "gpu.jsonl"], "--source replay has no device to probe"),
])
def test_impossible_probe_options(options: list[str], message: str) -> None:
    done = run_script("benchmark/metrics_exporter.py", *options)
    assert (done.returncode, message in done.stderr) == (2, True)
