"""Servers that answer a query for the load as no Prometheus does: each ends in one line, soon, and with little memory."""

from __future__ import annotations

import gzip
import json
import socket
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from threading import Thread
from typing import Any

import pytest

from inference.live.prometheus import MAX_ANSWER_MIB, PrometheusConfig, PrometheusError, Server
from inference.live.prometheus_readings import PrometheusSource

UTIL = "DCGM_FI_DEV_GPU_UTIL"
TIMEOUT_S = 0.2
SOON_S = 3.0  # a busy machine needs far more than TIMEOUT_S for 8 MiB
DRIP_S = 0.02
MANY = b"x" * (1 << 16)
OK, CHUNKED, PACKED = b"HTTP/1.1 200 OK\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Encoding: gzip\r\n"

Pieces = Callable[[], Iterator[bytes]]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@contextmanager
def serving(pieces: Pieces) -> Iterator[str]:
    """The address of a server that answers every request with `pieces`, and then closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_all() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return  # the test is over
            with connection:
                connection.settimeout(SOON_S)
                try:
                    connection.recv(1 << 16)
                    for piece in pieces():
                        connection.sendall(piece)
                except OSError:
                    pass  # the client has closed the connection, as it should

    Thread(target=answer_all, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def dripped(before: bytes, slowly: bytes) -> Pieces:
    """`before` at once, then `slowly` byte by byte, for ever."""
    def pieces() -> Iterator[bytes]:
        yield before
        while True:
            for number in range(len(slowly)):
                time.sleep(DRIP_S)
                yield slowly[number:number + 1]
    return pieces


def endless(before: bytes, again: bytes) -> Pieces:
    def pieces() -> Iterator[bytes]:
        yield before
        yield from repeat(again)
    return pieces


def silent() -> Iterator[bytes]:
    time.sleep(2 * TIMEOUT_S)
    yield b""


def once(answer: bytes) -> Pieces:
    return lambda: iter([answer])


def body(text: bytes, headers: bytes = b"", status: bytes = OK) -> Pieces:
    return once(status + headers + b"Content-Length: %d\r\n\r\n" % len(text) + text)


def of_series(series: Any, **more: Any) -> Pieces:
    return body(json.dumps({"data": {"resultType": "matrix", "result": series}} | more).encode())


def bomb() -> bytes:
    """8 KiB that become 8 GiB: zeros, packed, packed again."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()


LATE, LARGE = f"no complete answer within timeout_s {TIMEOUT_S}", f"over {MAX_ANSWER_MIB} MiB"
UNREADABLE = "what came back can't be read"
HOSTILE: dict[str, tuple[Pieces, str]] = {
    "silent": (silent, LATE),
    "drips its status": (dripped(b"HTTP/1.1 ", b"2"), LATE),
    "drips headers": (dripped(OK, b"A: b\r\n"), LATE),
    "drips a text": (dripped(OK + b"Content-Length: 100000\r\n\r\n", b" "), LATE),
    "drips a text without a length": (dripped(OK + b"\r\n", b" "), LATE),
    "drips chunks": (dripped(OK + CHUNKED, b"1\r\n \r\n"), LATE),
    "drips a packed text": (dripped(OK + PACKED + b"\r\n" + gzip.compress(b"{")[:12], b"\0"), LATE),
    "drips trailers": (dripped(OK + CHUNKED + b"2\r\n{}\r\n0\r\n", b"A: b\r\n"), LATE),
    "says continue for ever": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), LATE),
    "trailers for ever": (endless(OK + CHUNKED + b"2\r\n{}\r\n0\r\n", b"A: b\r\n" * 10000), LATE),
    "headers for ever": (endless(OK, b"A: b\r\n" * 10000), UNREADABLE),
    "a header for ever": (endless(OK + b"A: ", MANY), UNREADABLE),
    "a text for ever": (endless(OK + b"\r\n", MANY), LARGE),
    "a text of 100 GB": (endless(OK + b"Content-Length: 100000000000\r\n\r\n", MANY), LARGE),
    "chunks for ever": (endless(OK + CHUNKED, b"10000\r\n" + MANY + b"\r\n"), LARGE),
    "a page to log in for ever": (endless(b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", MANY), LARGE),
    "a chunk's size for ever": (endless(OK + CHUNKED, b"1" * 60000), UNREADABLE),
    "a bomb": (body(bomb(), PACKED), LARGE),
    "a bomb in a bomb": (body(gzip.compress(bomb()), b"Content-Encoding: gzip, gzip\r\n"), LARGE),
    "a broken archive": (body(b"\x1f\x8b nothing of the kind", PACKED), UNREADABLE),
    "no HTTP": (once(b"\x15\x03\x01\0\x02\x02P" * 100), UNREADABLE),
    "no header's form": (once(OK + b"no colon\r\n: no name\r\n\r\n{}"), "no Prometheus answer"),
    "a length below 0": (once(OK + b"Content-Length: -5\r\n\r\n{}"), "no Prometheus answer"),
    "a text cut short": (once(OK + b"Content-Length: 100\r\n\r\n{"), UNREADABLE),
    "nothing": (once(b""), "can't be reached"),
    "deep lists": (body(b"[" * 1_000_000), "no JSON"),
    "a long number": (body(b"1" * 1_000_000), "no JSON"),
    "no text": (body(b"\xff\xfe\xfd" * 1000), "no JSON"),
    "names that are no text": (of_series([{"metric": {"__name__": {}}, "values": [[1, "1"]]}]), "a series that no Prometheus"),
    "times that are none": (of_series([{"metric": {"__name__": UTIL}, "values": [[float("nan"), "1"]]}]), "a series that no"),
    "warnings that are none": (of_series([], warnings=5), "no Prometheus answer"),
    "control characters": (body(json.dumps({"status": "error", "errorType": "x", "error": "\x1b[2J\nok " * 9999}).encode()),
                           "it can't answer: ?[2J?ok"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_costs_little(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pieces, message = HOSTILE[name]
    with serving(pieces) as url:
        server = Server(PrometheusConfig(url=url, timeout_s=TIMEOUT_S))
        began_s = time.monotonic()
        with pytest.raises(PrometheusError) as raised:
            PrometheusSource(server, [UTIL]).latest()
        assert time.monotonic() - began_s < SOON_S
    text = str(raised.value)
    assert message in text, text
    assert text.isprintable()
    assert len(text) < 2000
    assert not caplog.records  # urllib3 would show tracebacks


@pytest.mark.parametrize("name", ["a text for ever", "a bomb in a bomb", "deep lists"])
def test_its_answer_takes_little_memory(name: str) -> None:
    with serving(HOSTILE[name][0]) as url:
        server = Server(PrometheusConfig(url=url, timeout_s=SOON_S))
        tracemalloc.start()
        try:
            with pytest.raises(PrometheusError):
                server.check()
            peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
        finally:
            tracemalloc.stop()
    assert peak_mib < 16 * MAX_ANSWER_MIB


def test_a_server_is_asked_again_after_a_late_answer() -> None:
    """What comes too late for one query must not be taken for the answer to the next one."""
    answers = iter([silent, body(b'{"data": {"resultType": "vector", "result": []}}')])
    with serving(lambda: next(answers)()) as url:
        server = Server(PrometheusConfig(url=url, timeout_s=TIMEOUT_S))
        with pytest.raises(PrometheusError, match=LATE):
            server.check()
        time.sleep(2 * TIMEOUT_S)
        server.check()


def test_packed_answers_are_read() -> None:
    answer = gzip.compress(b'{"data": {"resultType": "vector", "result": []}}')
    with serving(body(answer, PACKED)) as url:
        Server(PrometheusConfig(url=url, timeout_s=SOON_S)).check()
