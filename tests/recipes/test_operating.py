"""The alert rules: what promtool says of them, and a real Prometheus that scrapes Hase."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import requests
import yaml
from conftest import small_model
from prometheus_stand import (
    READINGS,
    Exporter,
    device_labels,
    free_port,
    prometheus,
    prometheus_or_skip,
    recorded,
    start_exporter,
    value,
    wait_for,
)

from benchmark.metrics_exporter import Counted, PaceSampler, ProbeSampler, ProcessSampler
from inference import Predictor
from inference.core.chances import UP_TO
from inference.live.watch import export
from measuring.metrics.names import FIELDS
from records.host_pace import HostProbed
from utils.paths import ROOT, Workspace

pytestmark = pytest.mark.slow

FOLDER = ROOT / "recipes" / "operating"
RULES = FOLDER / "hase_rules.yml"
GPU_READING = {name: field.maximum / 4 for name, field in FIELDS.items() if "CPU" not in name}
FOREVER_S = 3600.0


def rules() -> list[dict[str, Any]]:
    """All rules of the file, in order."""
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    prometheus_or_skip()
    return subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False)


# by promtool ---------------------------------------------------------------------------------------------------------------


def test_promtools_tests_of_the_rules() -> None:
    done = promtool("test", "rules", FOLDER / "hase_rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [rule.get("alert") or rule["record"] for rule in rules()])
def test_each_rule_is_tested(name: str, tmp_path: Path) -> None:
    """Without it, promtool's tests fail; an alert that lasts no time before it fires fails them, too."""
    shutil.copy(FOLDER / "hase_rules_test.yml", tmp_path)
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    at_once = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for group in document["groups"]:
        group["rules"] = [rule for rule in group["rules"] if name not in (rule.get("alert"), rule.get("record"))]
    for rule in (rule for group in at_once["groups"] for rule in group["rules"] if rule.get("alert") == name):
        del rule["for"]
    for changed in (document, at_once) if ":" not in name else (document,):
        (tmp_path / RULES.name).write_text(yaml.safe_dump(changed))
        assert promtool("test", "rules", tmp_path / "hase_rules_test.yml").returncode == 1


def test_the_page_explains_each_rule() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert not [rule for rule in rules() if f"| `{rule.get('alert') or rule['record']}` |" not in page]


def test_at_risk_is_what_hase_calls_about_even_or_less() -> None:
    (expr,) = (rule["expr"] for rule in rules() if rule.get("alert") == "HaseObjectiveAtRisk")
    (chance,) = (most for most, words in UP_TO if words == "about even")
    assert f"hase_objective_chance_ratio <= {chance:g}\n" in expr.replace(" and", "\n")


# by a real Prometheus ------------------------------------------------------------------------------------------------------


@dataclass
class Stand:
    """A Prometheus with the rules, and what it scrapes.

    Attributes:
        port: of the Prometheus.
        replay: the process of the exporter that replays a GPU's readings.
    """

    port: int
    replay: subprocess.Popen[str]

    def rules(self) -> list[dict[str, Any]]:
        """As the Prometheus evaluates them."""
        groups = requests.get(f"http://127.0.0.1:{self.port}/api/v1/rules", timeout=10).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """It scrapes processes of the exporter (a GPU's readings by old and new names, and this CPU with its probe), an exporter of
    a pretended GPU with all probes, and real predictions for an H200, whose load is made up."""
    folder = tmp_path_factory.mktemp("operating")
    onnx.save(small_model(), folder / "small.onnx")
    replay = recorded(folder / "gpu.jsonl", [GPU_READING] * READINGS)
    now = time.time()
    probes = ProbeSampler("cpu", every_s=FOREVER_S)
    probes.read()
    pretended = Exporter(replay, device_labels("GPU-a"), probes=probes,
                         paces=PaceSampler("cuda", FOREVER_S, latest=HostProbed(120.0, now)),
                         counts=ProcessSampler("cuda", FOREVER_S, latest=Counted(3, now)))
    watch = Predictor(Workspace(folder), "nvidia-h200").watch(folder / "small.onnx", lambda: {
        "load": {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.5}, "host_pace": 1.1}, FOREVER_S, limit_ms=0.001)
    reading = watch.read()
    assert not reading.trouble
    predictions = export(watch, "127.0.0.1", 0)
    with ExitStack() as stack:
        stack.callback(pretended.close)
        stack.callback(predictions.server_close)
        stack.callback(predictions.shutdown)
        targets = {"hase_pretended": (pretended.address, "metrics"),
                   "hase_predictions": (predictions.url.split("/")[2], "metrics")}
        processes = {}
        for job, options in (("hase", ()), ("hase_new", ("--names", "new"))):
            processes[job], url = start_exporter(replay, *options)
            targets[job] = (url.split("/")[2], "metrics")
        cpu_port = free_port()
        processes["hase_cpu"] = subprocess.Popen(
            [sys.executable, "benchmark/metrics_exporter.py", "--port", str(cpu_port), "--source", "psutil",
             "--interval", "0.5", "--probe-every", "1", "--workspace", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, text=True)
        targets["hase_cpu"] = (f"127.0.0.1:{cpu_port}", "metrics")
        for process in processes.values():
            stack.callback(process.wait)
            stack.callback(process.kill)
        port = stack.enter_context(prometheus(folder / "prometheus", targets, rules=[RULES]))
        wait_for(lambda: value(port, "count(up == 1)") == len(targets), folder / "prometheus" / "log")
        wait_for(lambda: value(port, 'hase_probe_timestamp_seconds{job="hase_cpu"}') is not None)
        yield Stand(port, processes["hase"])


def test_the_rules_are_evaluated_without_trouble(stand: Stand) -> None:
    wait_for(lambda: all(rule["health"] == "ok" for rule in stand.rules()))
    assert {rule["name"] for rule in stand.rules()} == {rule.get("alert") or rule["record"] for rule in rules()}


def test_what_is_recorded_of_real_exporters(stand: Stand) -> None:
    """Each recording has a series, and the values are those that were exported."""
    for rule in rules():
        if "record" in rule:
            wait_for(lambda name=rule["record"]: value(stand.port, f"count({name})") is not None)
    assert 0.0 <= (value(stand.port, 'hase:busy_share:ratio{UUID="GPU-a"}') or 0.0) <= 1.0
    assert (value(stand.port, "hase:objective_headroom:ratio") or 0.0) < 0.0
    assert (value(stand.port, 'max(hase:exporter_sample_age:seconds{job=~"hase|hase_new|hase_cpu"})') or FOREVER_S) < 30.0


def test_alerts_of_real_exporters(stand: Stand) -> None:
    """Pending at once, since they last for a while before they fire, which promtool tests: a missed objective, three processes
    on a GPU, and an exporter that ends."""
    def pending() -> dict[str, list[dict[str, str]]]:
        return {rule["name"]: [alert["labels"] for alert in rule["alerts"]] for rule in stand.rules() if rule.get("alerts")}

    wait_for(lambda: set(pending()) == {"HaseObjectiveMissed", "HaseGpuShared"})
    found = pending()
    assert [(labels["model"], labels["quantile"], labels["severity"]) for labels in found["HaseObjectiveMissed"]] == [
        ("small", "0.95", "critical")]
    assert [(labels["UUID"], labels["Hostname"]) for labels in found["HaseGpuShared"]] == [("GPU-a", "node7")]
    stand.replay.kill()
    wait_for(lambda: "HaseExporterDown" in pending())
    assert [labels["job"] for labels in pending()["HaseExporterDown"]] == ["hase"]
