"""A base for tests of the exporter and of the live load: a real Prometheus, exporters that it scrapes, certificates.

Exporters are benchmark/metrics_exporter.py, playing readings from a file. Wrong ones, and those that serve what it never does,
are made up: a small HTTP server with a page for each GPU, in dcgm-exporter's text, that answers as a test wants.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import requests
import yaml

from hase.benchmark.metrics.names import DEVICE_LABEL, HOST_LABEL, INDEX_LABEL, MODEL_LABEL, UUID_LABEL
from hase.benchmark.metrics.sources import TIME, ReplaySource
from hase.benchmark.metrics_exporter import DeviceMetrics, PaceSampler, ProbeSampler, ProcessSampler, Sampler
from hase.utils.paths import ROOT
from hase.utils.web_server import ScrapeServer, scrape_server

NEEDED = "HASE_NEEDS_PROMETHEUS"  # set where a missing Prometheus is a failure
SCRAPE_S = 1.0  # and the longest that a scrape may take, which is enough on a busy machine
STEP_S, INTERVAL_S = 0.1, 0.4  # of replays: from one reading to the next, and of the exporter's means
USER, PASSWORD = "hase", "s3cret pass"
PASSWORD_BCRYPT = "$2b$04$abcdefghijklmnopqrstuuoBpIrM0OnplXjsOI8DWYJTHUhJDuUv."
READINGS = int(1200 / STEP_S)  # in a file to replay: twenty minutes, longer than the tests of any file take
EVER_S = 60.0  # longer than any test's Prometheus lives


def prometheus_or_skip() -> str:
    """The path of `prometheus`; without it and openssl the test is skipped, or fails where HASE_NEEDS_PROMETHEUS is set."""
    absent = [name for name in ("prometheus", "openssl") if shutil.which(name) is None]
    if absent:
        message = f"needs {' and '.join(absent)} on the PATH: apt-get install {' '.join(absent)}"
        pytest.fail(message) if os.environ.get(NEEDED) else pytest.skip(message)
    return shutil.which("prometheus") or ""


def device_labels(uuid: str, index: str = "0", host: str = "node7") -> dict[str, str]:
    return {INDEX_LABEL: index, UUID_LABEL: uuid, DEVICE_LABEL: f"nvidia{index}", MODEL_LABEL: "NVIDIA H200", HOST_LABEL: host}


def recorded(path: Path, readings: Sequence[Mapping[str, Any]]) -> Path:
    """A file to replay: readings, STEP_S apart when they are played."""
    path.write_text("".join(json.dumps({TIME: i} | dict(reading)) + "\n" for i, reading in enumerate(readings)))
    return path


def start_exporter(replay: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """The exporter's process, playing a file at a free port, and its address once it listens."""
    process = subprocess.Popen(
        [sys.executable, "benchmark/metrics_exporter.py", "--json", "--port", "0", "--host", "127.0.0.1", "--source", "replay",
         "--replay", str(replay), "--replay-step", str(STEP_S), "--interval", str(INTERVAL_S),
         "--workspace", str(replay.parent), *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    report = "".join([*takewhile(lambda line: line != "}\n", process.stdout), "}"])
    return process, json.loads(report)["url"]


class Exporter:
    """The exporter within this process, on threads, under the labels of any device; from now until `close`."""

    def __init__(self, replay: Path, labels: dict[str, str], new_names: bool = False, probes: ProbeSampler | None = None,
                 paces: PaceSampler | None = None, counts: ProcessSampler | None = None) -> None:
        self._over = Event()
        sampler = Sampler(ReplaySource(replay, step_s=STEP_S), INTERVAL_S)
        metrics = DeviceMetrics(sampler, labels, new_names, probes, paces, counts)
        self._server = scrape_server(metrics, sampler.trouble, "127.0.0.1", 0)
        Thread(target=sampler.run, args=(self._over,), daemon=True).start()
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.address = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Page:
    """A made-up exporter's report of one GPU: values by metric, under dcgm-exporter's labels."""

    labels: dict[str, str]
    values: dict[str, float | str]
    more: Sequence[tuple[dict[str, str], dict[str, float]]] = ()  # further labels and values
    locked: bool = False  # it refuses to answer
    age_s: float | None = None  # of the samples' timestamps; None: no timestamps, as dcgm-exporter serves them
    value_of: Mapping[str, Callable[[int], float]] = field(default_factory=dict)  # a metric's value by the number of the scrape
    scrapes: int = 0  # complete answers

    def text(self) -> str:
        values = self.values | {name: value(self.scrapes) for name, value in self.value_of.items()}
        stamp = "" if self.age_s is None else f" {(time.time() - self.age_s) * 1e3:.0f}"
        series: list[tuple[dict[str, str], Mapping[str, float | str]]] = [(self.labels, values), *self.more]
        texts = [(",".join(f'{key}="{label}"' for key, label in labels.items()), of) for labels, of in series]
        return "".join(f"{name}{{{labels}}} {value}{stamp}\n" for labels, of in texts for name, value in of.items())


class Served:
    """A server of this machine on a free port, at work in a thread until `close`."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class MadeUpExporter(Served):
    """Serves pages, `/NAME` each."""

    def __init__(self, pages: dict[str, Page]) -> None:
        self.pages = pages

        class Handler(Quiet):
            def do_GET(self) -> None:
                page = pages[self.path.strip("/")]
                status, text = (401, "Unauthorized\n") if page.locked else (200, page.text())
                reply(self, status, text, "text/plain; version=0.0.4")
                page.scrapes += not page.locked

        super().__init__(Handler)


class Quiet(BaseHTTPRequestHandler):
    """A handler without a line for every request."""

    def log_message(self, *_: Any) -> None:
        pass


def reply(to: BaseHTTPRequestHandler, status: int, text: str, content_type: str) -> None:
    body = text.encode()
    to.send_response(status)
    to.send_header("Content-Type", content_type)
    to.send_header("Content-Length", str(len(body)))
    to.end_headers()
    to.wfile.write(body)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, tuple[str, str]], web: Mapping[str, Any] | None = None,
               jobs: Mapping[str, Mapping[str, Any]] | None = None, rules: Sequence[Path] = ()) -> Iterator[int]:
    """A Prometheus that scrapes `targets`, {job: (address, path)}; yields its port, once it listens. `web`: its web
    configuration; `jobs`: how it scrapes some of the targets (TLS, users); `rules`: files, evaluated as often as it scrapes."""
    folder.mkdir(parents=True, exist_ok=True)
    scraped = [{"job_name": job, "metrics_path": f"/{path}", "static_configs": [{"targets": [address]}],
                **(jobs or {}).get(job, {})}
               for job, (address, path) in targets.items()]
    times = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_S * 1e3:.0f}ms")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(
        {"global": times, "scrape_configs": scraped, "rule_files": [str(path) for path in rules]}))
    (folder / "web.yml").write_text(yaml.safe_dump(dict(web or {})))
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [prometheus_or_skip(), f"--config.file={folder / 'prometheus.yml'}", f"--web.config.file={folder / 'web.yml'}",
             f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            wait_for(lambda: "ready to receive" in (folder / "log").read_text(), folder / "log")
            yield port
        finally:
            process.kill()
            process.wait()


def wait_for(holds: Callable[[], bool], log: Path | None = None, seconds: float = 30.0) -> None:
    """Waits until `holds` returns true; fails with the end of the log after `seconds`."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            pytest.fail(f"not within {seconds:g} s" + (f": {log.read_text()[-2000:]}" if log else ""))
        time.sleep(0.02)


def value(port: int, promql: str) -> float | None:
    """Prometheus's own answer; None if it is empty."""
    answer = requests.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": promql}, timeout=10).json()
    series = answer["data"]["result"]
    return float(series[0]["value"][1]) if series else None


def certificates(folder: Path) -> None:
    """`ca`, and signed by it `server` (127.0.0.1), `client`; `stranger` signs itself: each a .pem and its .key."""
    for name in ("ca", "server", "client", "stranger"):
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key"] if name in ("server", "client") else []
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}.key", "-out", f"{name}.pem",
             *signed], cwd=folder, check=True, capture_output=True)


class Recorder(Served):
    """A proxy for a Prometheus that wants `token` and counts connections and requests."""

    def __init__(self, port: int, token: str) -> None:
        self.connections = self.requests = 0
        self.answer: tuple[int, str] | None = None  # status and text instead of Prometheus's; `{seen}`: the request's header
        recorder = self

        class Handler(Quiet):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                recorder.connections += 1
                super().setup()

            def do_GET(self) -> None:
                recorder.requests += 1
                header = self.headers.get("Authorization", "")
                if recorder.answer is not None:
                    status, text = recorder.answer
                    return reply(self, status, text.replace("{seen}", header), "text/html")
                if header != f"Bearer {token}":
                    return reply(self, 403, f"Forbidden: {header}\n", "text/plain")
                passed = requests.get(f"http://127.0.0.1:{port}{self.path}", timeout=10)
                return reply(self, passed.status_code, json.dumps(passed.json()), "application/json")

        super().__init__(Handler)
        self.url = f"http://{self.address}"


@contextmanager
def serving(server: ScrapeServer) -> Iterator[ScrapeServer]:
    """A server that answers, on a thread, until the block ends."""
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def drips_until_disconnected(client: socket.socket, noticed: type[OSError], patience_s: float = 10.0) -> bool:
    """Whether a client that sends a byte now and then is disconnected in time; `noticed` is what it then gets."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < patience_s:
        time.sleep(0.02)
        try:
            client.sendall(b"A")
        except noticed:
            return True
    return False
