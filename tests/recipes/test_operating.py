"""The alert rules and the Grafana dashboard: by promtool, by the types of Grafana's SDK, and by a real Prometheus that scrapes
Hase. No Grafana runs here."""

from __future__ import annotations

import json
import re
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
from command import run_script
from conftest import small_model
from optional_packages import needs
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

from hase.benchmark.metrics.names import FIELDS
from hase.benchmark.metrics_exporter import PaceSampler, ProbeSampler, ProcessCount, ProcessSampler
from hase.inference import Predictor
from hase.inference.live.watch import export
from hase.records.host_pace import HostProbeReading
from hase.utils.paths import ROOT, Workspace

pytestmark = pytest.mark.slow

FOLDER = ROOT / "recipes" / "operating"
RULES, DASHBOARD = FOLDER / "hase_rules.yml", FOLDER / "hase_dashboard.json"
NAME = re.compile(r'\b(?:hase[_:]|DCGM_|ALERTS\b|up\b)[\w:]*(?!\w*=)')  # of a metric in PromQL
GPU_READING = {name: field.maximum / 4 for name, field in FIELDS.items() if "CPU" not in name}
FOREVER_S = 3600.0


def rules() -> list[dict[str, Any]]:
    """All rules of the file, in order."""
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def name_of(rule: dict[str, Any]) -> str:
    return str(rule.get("alert") or rule["record"])


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    prometheus_or_skip()
    return subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False)


def test_promtools_tests_of_the_rules() -> None:
    done = promtool("test", "rules", FOLDER / "hase_rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_a_prometheus_yml_and_explains_each_rule(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"^```yaml\n(global:.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(RULES, tmp_path)
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout
    assert not [name for name in map(name_of, rules()) if f"| `{name}` |" not in page]  # the page explains each


def queries() -> list[str]:
    """All queries, those of the variables at the top too, for every host and model."""
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    for variable in document["templating"]["list"]:
        if match := re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]):
            asked.append(f"count by ({match[2]}) ({match[1]})")
    return [query.replace("$host", ".*").replace("$model", ".*") for query in asked]


@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2")  # which older Grafanas do not import
def test_the_dashboard_is_up_to_date_and_of_grafanas_types(tmp_path: Path) -> None:
    """Read by the types of the SDK, which are made of Grafana's schemas, and written again, nothing is lost."""
    needs("grafana_foundation_sdk", "operating")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    text = DASHBOARD.read_text(encoding="utf-8")
    done = run_script("recipes/operating/grafana_dashboard.py", "--out", tmp_path / "made.json")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/made.json\n")
    assert (tmp_path / "made.json").read_text(encoding="utf-8") == text, (
        "make it anew: python recipes/operating/grafana_dashboard.py")
    register_default_plugins()
    read = Dashboard.from_json(json.loads(text))
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == json.loads(text)


@dataclass
class Stand:
    """A Prometheus with the rules, by its port, and the process of the exporter that replays a GPU's readings."""

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
    replay, now, cpu_port = recorded(folder / "gpu.jsonl", [GPU_READING] * READINGS), time.time(), free_port()
    probes = ProbeSampler("cpu", every_s=FOREVER_S)
    probes.update()
    pretended = Exporter(replay, device_labels("GPU-a"), probes=probes,
                         paces=PaceSampler("cuda", FOREVER_S, latest=HostProbeReading(120.0, now)),
                         counts=ProcessSampler("cuda", FOREVER_S, latest=ProcessCount(3, now)))
    watch = Predictor(Workspace(folder), "nvidia-h200").watch(folder / "small.onnx", lambda: {
        "load": {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.5}, "host_pace": 1.1}, FOREVER_S, limit_ms=0.001)
    assert not watch.read().trouble
    predictions = export(watch, "127.0.0.1", 0)
    with ExitStack() as stack:
        stack.callback(pretended.close)
        stack.callback(predictions.server_close)
        stack.callback(predictions.shutdown)
        old, old_url = start_exporter(replay)
        new, new_url = start_exporter(replay, "--names", "new")
        cpu = subprocess.Popen(
            [sys.executable, "benchmark/metrics_exporter.py", "--port", str(cpu_port), "--source", "psutil",
             "--interval", "0.5", "--probe-every", "1", "--workspace", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, text=True)
        for process in (old, new, cpu):
            stack.callback(process.wait)
            stack.callback(process.kill)
        addresses = {"hase": old_url.split("/")[2], "hase_new": new_url.split("/")[2], "hase_cpu": f"127.0.0.1:{cpu_port}",
                     "hase_pretended": pretended.address, "hase_predictions": predictions.url.split("/")[2]}
        port = stack.enter_context(prometheus(folder / "prometheus", {
            job: (address, "metrics") for job, address in addresses.items()}, rules=[RULES]))
        wait_for(lambda: value(port, "count(up == 1)") == len(addresses), folder / "prometheus" / "log")
        wait_for(lambda: value(port, 'hase_probe_timestamp_seconds{job="hase_cpu"}') is not None)
        yield Stand(port, old)


def test_the_rules_are_evaluated_on_real_exporters(stand: Stand) -> None:
    """Each without trouble; each recording has a series, and the values are those that were exported."""
    wait_for(lambda: all(rule["health"] == "ok" for rule in stand.rules()))
    assert {rule["name"] for rule in stand.rules()} == set(map(name_of, rules()))
    for name in (rule["record"] for rule in rules() if "record" in rule):
        wait_for(lambda name=name: value(stand.port, f"count({name})") is not None)
    assert 0.0 <= (value(stand.port, 'hase:busy_share:ratio{UUID="GPU-a"}') or 0.0) <= 1.0
    assert (value(stand.port, "hase:objective_headroom:ratio") or 0.0) < 0.0
    assert (value(stand.port, 'max(hase:exporter_sample_age:seconds{job=~"hase|hase_new|hase_cpu"})') or FOREVER_S) < 30.0


def test_the_dashboards_queries(stand: Stand) -> None:
    """Prometheus can read each, has every metric in it, and answers with series."""
    for query in queries():
        parsed = requests.get(f"http://127.0.0.1:{stand.port}/api/v1/format_query", params={"query": query}, timeout=10).json()
        assert parsed["status"] == "success", parsed
        names = NAME.findall(re.sub(r'"[^"]*"', '""', query))
        assert names or "__name__" in query
        for asked in (*(f"count({name})" for name in names), query):
            wait_for(lambda asked=asked: value(stand.port, asked) is not None)


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
