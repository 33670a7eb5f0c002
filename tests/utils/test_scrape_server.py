"""The server that Prometheus scrapes: who may connect, and clients that disconnect."""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
import pytest
import requests
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_stand import drips_until_disconnected, serving

from hase.utils import web_server as module
from hase.utils.web_server import ScrapeServer, scrape_server

SERIES = 20_000  # more than a socket's buffer holds


class Many(Collector):
    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("one", "", labels=["number"])
        for number in range(SERIES):
            family.add_metric([str(number)], number)
        yield family


@contextmanager
def served() -> Iterator[ScrapeServer]:
    with serving(scrape_server(Many(), lambda: "", "", 0)) as server:
        yield server


def test_a_client_that_disconnects_costs_no_traceback_and_no_other_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with served() as server:
        for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.0\r\n\r\n"):
            client = socket.create_connection(("127.0.0.1", server.server_port))
            client.sendall(sent)
            time.sleep(0.05)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not an orderly end
            client.close()
        time.sleep(0.3)
        assert requests.get(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10).text.count("\none{") == SERIES
    assert "Traceback" not in capfd.readouterr().err


def test_only_this_machine_is_answered_unless_an_address_is_given() -> None:
    for host, listening in (("", "127.0.0.1"), ("0.0.0.0", "0.0.0.0")):
        server = scrape_server(Many(), lambda: "", host, 0)
        assert [connection.laddr.ip for connection in psutil.Process().net_connections() if connection.status == "LISTEN"
                and connection.laddr.port == server.server_port] == [listening]
        server.server_close()


def test_a_client_that_drips_its_request_is_disconnected(monkeypatch: pytest.MonkeyPatch,
                                                        capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module._Quiet, "timeout", 0.3)
    with served() as server, socket.create_connection(("127.0.0.1", server.server_port)) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n")
        assert drips_until_disconnected(client, ConnectionError)
    assert "Traceback" not in capfd.readouterr().err


def test_it_answers_again_after_a_lack_of_file_descriptors(capfd: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with served() as server, socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            client.connect(("127.0.0.1", server.server_port))
            used_s = time.process_time()
            time.sleep(0.5)
            used_s = time.process_time() - used_s
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        client.settimeout(10.0)
        assert client.recv(15) == b"HTTP/1.0 200 OK"
    assert used_s < 0.25  # it does not try again and again without a pause
    assert "Traceback" not in capfd.readouterr().err
