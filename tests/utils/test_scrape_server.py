"""The server that Prometheus scrapes: who may connect, and clients that disconnect."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterable

import psutil
import pytest
import requests
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from utils.scrape_server import scrape_server

SERIES = 20_000  # more than a socket's buffer holds


class Many(Collector):
    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("one", "", labels=["number"])
        for number in range(SERIES):
            family.add_metric([str(number)], number)
        yield family


def test_a_client_that_disconnects_costs_no_traceback_and_no_other_answer(capfd: pytest.CaptureFixture[str]) -> None:
    server = scrape_server(Many(), lambda: "", "", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.0\r\n\r\n"):
        client = socket.create_connection(("127.0.0.1", server.server_port))
        client.sendall(sent)
        time.sleep(0.05)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not an orderly end
        client.close()
    time.sleep(0.3)
    assert requests.get(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10).text.count("\none{") == SERIES
    server.shutdown()
    thread.join()
    server.server_close()
    assert "Traceback" not in capfd.readouterr().err


def test_only_this_machine_is_answered_unless_an_address_is_given() -> None:
    for host, listening in (("", "127.0.0.1"), ("0.0.0.0", "0.0.0.0")):
        server = scrape_server(Many(), lambda: "", host, 0)
        assert [connection.laddr.ip for connection in psutil.Process().net_connections() if connection.status == "LISTEN"
                and connection.laddr.port == server.server_port] == [listening]
        server.server_close()
