"""Clients of benchmark/metrics_exporter.py that ask as no Prometheus does. A sound client must be answered all the same."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from fuzz.reporting import HANG_S, MOST_MIB, Outcome
from hase.utils.lazy import requests
from hase.utils.paths import ROOT

GET = b"GET /metrics HTTP/1.1\r\n"
CROWD = 200  # connections at a time
FEW_FILES = 64  # file descriptors of an exporter that lacks some; more than one that is idle has
METRIC = "DCGM_FI_DEV_CPU_UTIL_TOTAL"
GREETING = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a client of TLS begins
CONNECT_S = 2.0
SCRAPE_S = 20.0  # for a sound client

Address = tuple[str, int]
Client = Callable[[Address], list[socket.socket]]  # connects, does harm, and returns the connections that stay open


def sending(data: bytes, times: int = 1, crowd: int = 1) -> Client:
    """Connections that send something, and then neither send nor read any more."""
    def client(address: Address) -> list[socket.socket]:
        opened = []
        for _ in range(crowd):
            try:
                connection = socket.create_connection(address, timeout=CONNECT_S)
            except OSError:  # the exporter accepts no more
                break
            opened.append(connection)
            with suppress(OSError):  # the exporter has closed it, as it may
                for _ in range(times):
                    connection.sendall(data)
        return opened
    return client


def dripping(data: bytes) -> Client:
    """A connection that sends byte by byte, for a second."""
    def client(address: Address) -> list[socket.socket]:
        connection = socket.create_connection(address, timeout=CONNECT_S)
        with suppress(OSError):
            for byte in (data * 50)[:50]:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        return [connection]
    return client


def leaving(data: bytes, crowd: int = 20) -> Client:
    """Connections that are reset after they have sent something."""
    def client(address: Address) -> list[socket.socket]:
        for connection in sending(data, crowd=crowd)(address):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        return []
    return client


CLIENTS: dict[str, Client] = {
    "a silent crowd": sending(b"", crowd=CROWD),
    "a crowd that asks and never reads": sending(GET + b"\r\n", times=50, crowd=CROWD),
    "a crowd that leaves at once": leaving(b""),
    "a crowd that leaves within its request": leaving(GET),
    "a crowd that leaves before the answer": leaving(GET + b"\r\n"),
    "one that drips its request": dripping(GET + b"A: b\r\n"),
    "one that drips headers": dripping(b"A: b\r\n"),
    "a request for ever": sending(b"G" * 65536, times=100),
    "headers for ever": sending(GET + b"A: b\r\n" * 10000, times=20),
    "a header for ever": sending(GET + b"A: " + b"x" * 65536, times=100),
    "garbage": sending(bytes(range(256)) * 100),
    "a greeting of TLS": sending(GREETING + bytes(512)),
    "a text of 100 MB": sending(b"POST /metrics HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 65536, times=100),
    "a text of a negative length": sending(b"POST /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n"),
    "a length that is none": sending(b"POST /metrics HTTP/1.1\r\nContent-Length: x\r\n\r\n"),
    "a method that is none": sending(b"\xff\xfe / HTTP/1.1\r\n\r\n"),
    "an address that is no text": sending(b"GET /\xff%ff%00?name[]=%ff&name[]=\xff HTTP/1.1\r\n\r\n"),
    "a path to elsewhere": sending(b"GET /../../../../etc/passwd HTTP/1.1\r\n\r\n"),
    "a version that is none": sending(b"GET / HTTP/9999999999.1\r\n\r\n"),
    "HTTP 0.9": sending(b"GET /metrics\r\n"),
    "odd headers": sending(GET + b"Accept: \xff;q=x;version=\r\nAccept-Encoding: gzip;q=nan\r\nHost: \xff\r\n\r\n"),
}


class Exporter:
    """The real exporter in a process of its own, under the metrics of this machine's CPU. Use as a context manager."""

    def __init__(self, folder: Path, most_files: int | None = None) -> None:
        self.log = folder / "exporter.log"
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "benchmark/metrics_exporter.py", "--json", "--port", "0", "--source", "psutil", "--interval",
                 "1", "--workspace", str(folder)], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
        if self.process.stdout is None:
            raise RuntimeError("the exporter was started without a pipe")
        report = ""
        while not report.endswith("}\n"):
            if not (line := self.process.stdout.readline()):
                raise RuntimeError(f"the exporter does not start: {self.log.read_text()}")
            report += line
        self.url = str(json.loads(report)["url"])
        parts = urlsplit(self.url)
        self.address = (parts.hostname or "", parts.port or 0)
        if most_files:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (most_files, most_files))

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def scraped(self, case: str) -> Outcome:
        """What a sound client gets; it may have to try again where descriptors are lacking, or no sample is there yet."""
        began_s, why = time.monotonic(), ""
        while (seconds := time.monotonic() - began_s) < HANG_S:
            if self.process.poll() is not None:
                return Outcome("crash", case, f"exit code {self.process.returncode}: {self.log.read_text()}", seconds=seconds)
            try:
                answer = requests.get(self.url, timeout=SCRAPE_S)
                why = f"HTTP {answer.status_code}: {answer.text[:200]}"
                if answer.status_code == requests.codes.ok and f"\n{METRIC}{{" in answer.text:
                    peak_mib = psutil.Process(self.process.pid).memory_info().rss / 2**20
                    what = "memory" if peak_mib > MOST_MIB else "traceback" if "Traceback" in self.log.read_text() else "answer"
                    return Outcome(what, case, self.log.read_text(), seconds=seconds, peak_mib=peak_mib)
            except requests.RequestException as error:
                why = str(error)
            time.sleep(0.2)
        return Outcome("hang", case, why, seconds=HANG_S)

    def stopped(self) -> Outcome:
        """The outcomes of Ctrl-C in the end."""
        began_s = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            return Outcome("hang", "Ctrl-C", seconds=HANG_S)
        text = self.log.read_text()
        what = "traceback" if "Traceback" in text else "crash" if code else "answer"
        return Outcome(what, "Ctrl-C", text, seconds=time.monotonic() - began_s)


def clients(folder: Path, names: Iterable[str] = CLIENTS) -> Iterator[Outcome]:
    """What a sound client gets while each of some CLIENTS is connected, and after all file descriptors were taken."""
    os.environ["NO_PROXY"] = "127.0.0.1"
    with Exporter(folder) as exporter:
        yield exporter.scraped("no other client")
        for case in names:
            with ExitStack() as connections:
                for connection in CLIENTS[case](exporter.address):
                    connections.enter_context(connection)
                yield exporter.scraped(case)
        yield exporter.stopped()
    with Exporter(folder, FEW_FILES) as exporter:
        with ExitStack() as connections:
            for connection in sending(b"", crowd=2 * FEW_FILES)(exporter.address):
                connections.enter_context(connection)
            time.sleep(3.0)  # the sampling, too, lacks descriptors meanwhile
        yield exporter.scraped("a crowd that took all file descriptors, once it has left")
        yield exporter.stopped()
