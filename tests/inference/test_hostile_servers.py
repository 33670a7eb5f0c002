"""Servers that answer a query for the load as no Prometheus does: each ends in one line, soon, and with little memory."""

from __future__ import annotations

import gzip
import time
import tracemalloc

import pytest
from fuzz.hostile_servers import HOSTILE, HOSTILE_TLS, LATE, PACKED, TIMEOUT_S, UTIL, body, serving, silent

from hase.inference.live.prometheus import MAX_ANSWER_MIB, PrometheusConfig, PrometheusError, PrometheusServer
from hase.inference.live.prometheus_readings import PrometheusSource

SOON_S = 5.0  # a busy machine needs far more than TIMEOUT_S for 8 MiB


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.parametrize(("scheme", "name"), [
    (scheme, name) for scheme, table in (("http", HOSTILE), ("https", HOSTILE_TLS)) for name in table])
def test_a_hostile_server_costs_little(scheme: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    pieces, message = (HOSTILE if scheme == "http" else HOSTILE_TLS)[name]
    with serving(pieces) as url:
        server = PrometheusServer(PrometheusConfig(url=url.replace("http", scheme, 1),
                                                   timeout_s=TIMEOUT_S if message == LATE else SOON_S))
        began_s = time.monotonic()
        with pytest.raises(PrometheusError) as raised:
            PrometheusSource(server, [UTIL]).latest()
        assert time.monotonic() - began_s < SOON_S
    text = str(raised.value)
    assert (message in text, text.isprintable(), len(text) < 2000) == (True, True, True), text
    assert not caplog.records  # urllib3 would show tracebacks


@pytest.mark.parametrize("name", ["a text for ever", "a bomb in a bomb", "deep lists"])
def test_its_answer_takes_little_memory(name: str) -> None:
    with serving(HOSTILE[name][0]) as url:
        server = PrometheusServer(PrometheusConfig(url=url, timeout_s=SOON_S))
        tracemalloc.start()
        try:
            with pytest.raises(PrometheusError):
                server.check()
            peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
        finally:
            tracemalloc.stop()
    assert peak_mib < 16 * MAX_ANSWER_MIB


@pytest.mark.slow
def test_a_server_is_asked_again_after_a_late_answer() -> None:
    """What comes too late for one query must not be taken for the answer to the next one, which is a packed one here."""
    answer = gzip.compress(b'{"data": {"resultType": "vector", "result": []}}')
    answers = iter([silent, body(answer, PACKED)])
    with serving(lambda request: next(answers)(request)) as url:
        server = PrometheusServer(PrometheusConfig(url=url, timeout_s=TIMEOUT_S))
        with pytest.raises(PrometheusError, match=LATE):
            server.check()
        time.sleep(2 * TIMEOUT_S)
        server.check()
