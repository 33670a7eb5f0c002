"""Campaign `servers`: servers that answer a query for the load as no Prometheus does; and clients of the exporter that ask as
no Prometheus does, beside which a sound client must be answered all the same."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

from fuzz.damaged_workspace import damaged_document
from fuzz.reading import HANG_S, MOST_MIB, Outcome, Parts, Reader
from hase.inference.live.load import InferenceConfig, current_load
from hase.inference.live.prometheus import MAX_ANSWER_MIB, PrometheusConfig
from hase.utils.lazy import requests
from hase.utils.paths import ROOT

CASES = 200  # damaged answers; each of the others comes once
UTIL = "DCGM_FI_DEV_GPU_UTIL"
MOST_UTIL = 100.0  # per cent
TIMEOUT_S = 0.2
PATIENCE_S = 3.0  # of a server with a client that reads nothing; a busy machine needs far more than TIMEOUT_S for 8 MiB
DRIP_S = 0.02
MANY = b"x" * (1 << 16)
OK, CHUNKED, PACKED = b"HTTP/1.1 200 OK\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Encoding: gzip\r\n"
RECORD = b"\x16\x03\x03\x40\x00"  # the beginning of a record of TLS's handshake, 16 KiB long
ODD_VALUES = ("NaN", "+Inf", "-Inf", "1e400", "-1", "101", "4294967295", "", "x", "0x10", "1_0", " 1", "9" * 5000)

Pieces = Callable[[bytes], Iterator[bytes]]  # of the answer to a request


class Reset(Exception):
    """The server resets the connection in the middle of an answer."""


@contextmanager
def serving(pieces: Pieces) -> Iterator[str]:
    """The address of a server that answers every request with `pieces`, and then closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_all() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return  # the block has ended
            with connection:
                connection.settimeout(PATIENCE_S)
                try:
                    for piece in pieces(connection.recv(1 << 16)):
                        connection.sendall(piece)
                except Reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
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
    def pieces(request: bytes) -> Iterator[bytes]:
        yield before
        while True:
            for number in range(len(slowly)):
                time.sleep(DRIP_S)
                yield slowly[number:number + 1]
    return pieces


def endless(before: bytes, again: bytes) -> Pieces:
    return lambda request: chain([before], repeat(again))


def silent(request: bytes) -> Iterator[bytes]:
    time.sleep(2 * TIMEOUT_S)
    yield b""


def reset(request: bytes) -> Iterator[bytes]:
    yield OK + b"Content-Length: 100\r\n\r\n{"
    raise Reset


def once(answer: bytes) -> Pieces:
    return lambda request: iter([answer])


def body(text: bytes, headers: bytes = b"", status: bytes = OK) -> Pieces:
    return once(status + headers + b"Content-Length: %d\r\n\r\n" % len(text) + text)


def document(result_type: str, series: Any, **more: Any) -> dict[str, Any]:
    """An answer of Prometheus's API."""
    return {"status": "success", "data": {"resultType": result_type, "result": series}} | more


def series_body(series: Any, **more: Any) -> Pieces:
    return body(json.dumps(document("matrix", series, **more)).encode())


def sound(query: str, values: Sequence[str] = ("40", "50", "60")) -> dict[str, Any]:
    """What a sound Prometheus answers to a query, as long as `values` are sound samples of the device's utilisation."""
    exporter, now_s = {"job": "dcgm", "instance": "node7:9400"}, time.time()
    if "[" in query:
        samples = [(now_s - len(values) + number, text) for number, text in enumerate(values)]
        return document("matrix", [{"metric": {"__name__": UTIL, "UUID": "GPU-1", **exporter}, "values": samples}])
    up = [{"metric": exporter, "value": [now_s, "1"]}] if "up{" in query else []
    return document("vector", [*up, *([{"metric": {}, "value": [now_s, str(now_s)]}] if "time()" in query else [])])


def answering(answer: Callable[[str], Any]) -> Pieces:
    """What `answer` says to each query."""
    def pieces(request: bytes) -> Iterator[bytes]:
        address = request.split(b" ")[1].decode("ascii", "replace") if request.count(b" ") else ""
        query = "".join(parse_qs(urlsplit(address).query).get("query", []))
        yield from body(json.dumps(answer(query)).encode(), b"Connection: close\r\n")(request)
    return pieces


def values_body(*values: str) -> Pieces:
    return answering(lambda query: sound(query, values))


def bomb() -> bytes:
    """8 KiB that become 8 GiB: zeros, packed, packed again."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()


LATE, LARGE = f"no complete answer within timeout_s {TIMEOUT_S}", f"over {MAX_ANSWER_MIB} MiB"
UNREADABLE = "what came back can't be read"
HOSTILE: dict[str, tuple[Pieces, str]] = {  # what each does, and what the error says of it
    "silent": (silent, LATE),
    "drips its status": (dripped(b"HTTP/1.1 ", b"2"), LATE),
    "drips headers": (dripped(OK, b"A: b\r\n"), LATE),
    "drips a text": (dripped(OK + b"Content-Length: 100000\r\n\r\n", b" "), LATE),
    "drips chunks": (dripped(OK + CHUNKED, b"1\r\n \r\n"), LATE),
    "drips a packed text": (dripped(OK + PACKED + b"\r\n" + gzip.compress(b"{")[:12], b"\0"), LATE),
    "says continue for ever": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), LATE),
    "trailers for ever": (endless(OK + CHUNKED + b"2\r\n{}\r\n0\r\n", b"A: b\r\n" * 10000), LATE),
    "a header for ever": (endless(OK + b"A: ", MANY), UNREADABLE),
    "a text for ever": (endless(OK + b"\r\n", MANY), LARGE),
    "a text of 100 GB": (endless(OK + b"Content-Length: 100000000000\r\n\r\n", MANY), LARGE),
    "chunks for ever": (endless(OK + CHUNKED, b"10000\r\n" + MANY + b"\r\n"), LARGE),
    "a chunk's size for ever": (endless(OK + CHUNKED, b"1" * 60000), UNREADABLE),
    "a bomb": (body(bomb(), PACKED), LARGE),
    "a bomb in a bomb": (body(gzip.compress(bomb()), b"Content-Encoding: gzip, gzip\r\n"), LARGE),
    "no HTTP": (once(b"\x15\x03\x01\0\x02\x02P" * 100), UNREADABLE),
    "no header's form": (once(OK + b"no colon\r\n: no name\r\n\r\n{}"), "no Prometheus answer"),
    "a text cut short": (once(OK + b"Content-Length: 100\r\n\r\n{"), UNREADABLE),
    "nothing": (once(b""), "can't be reached"),
    "a reset within a text": (reset, "can't be reached"),
    "a redirection in a circle": (body(b"", b"Location: /api/v1/query\r\n", b"HTTP/1.1 302 Found\r\n"), "it sends elsewhere"),
    "a redirection to a file": (body(b"", b"Location: file:///etc/passwd\r\n", b"HTTP/1.1 307 x\r\n"), "it sends elsewhere"),
    "a failure of its own": (body(b"<html>", status=b"HTTP/1.1 500 Internal Server Error\r\n"), "HTTP 500: no JSON"),
    "deep lists": (body(b"[" * 1_000_000), "no JSON"),
    "a long number": (body(b"1" * 1_000_000), "no JSON"),
    "names that are no text": (series_body([{"metric": {"__name__": {}}, "values": [[1, "1"]]}]),
                               "a series that no Prometheus"),
    "times that are none": (series_body([{"metric": {"__name__": UTIL}, "values": [[float("nan"), "1"]]}]), "a series that no"),
    "values that are NaN": (values_body("NaN", "NaN"), "reports nan"),
    "values of 1e400": (values_body("1e400"), "reports inf"),
    "a utilisation of 400 %": (values_body("50", "400"), "reports 400"),
    "warnings that are none": (series_body([], warnings=5), "no Prometheus answer"),
    "control characters": (body(json.dumps({"status": "error", "errorType": "x", "error": "\x1b[2J\nok " * 9999}).encode()),
                           "it can't answer: ?[2J?ok"),
}
HOSTILE_TLS: dict[str, tuple[Pieces, str]] = {  # the same where the address begins with https
    "silent": (silent, LATE),
    "drips a handshake": (dripped(RECORD, b"\x02"), LATE),
    "a handshake for ever": (endless(b"", RECORD + MANY[:1 << 14]), "TLS fails"),
    "HTTP": (body(b"{}"), "TLS fails"),
    "a reset": (reset, "TLS fails"),
}


def damaged_answers(seed: int, number: int) -> Pieces:
    """The answers of a sound Prometheus, of which one is damaged, or has an odd value."""
    odd_value, of_matrix = random.Random(f"{seed} {number}").random() < 0.3, number % 3 > 0

    def answer(query: str) -> Any:
        rng = random.Random(f"{seed} {number} {query[:10]}")
        if ("[" in query) != of_matrix:
            return sound(query)
        if odd_value:
            return sound(query, rng.sample(["40", "50", rng.choice(ODD_VALUES)], 3))
        return damaged_document(sound(query), rng)[1]
    return answering(answer)


def loads(url: str) -> list[float]:
    """The metrics of a device's load, as a Prometheus at `url` tells them."""
    config = InferenceConfig(prometheus=PrometheusConfig(url=url, timeout_s=TIMEOUT_S))
    return list(current_load(config, None, [UTIL], probe=True, pace=True).metrics.values())


def asked(reader: Reader, case: str, pieces: Pieces, scheme: str = "http") -> Outcome:
    """The outcomes of asking such a server for the load."""
    with serving(pieces) as url:
        outcome = reader.read(("loads", url.replace("http", scheme, 1)), case)
    if any(value > MOST_UTIL for value in outcome.answers):
        outcome.what = "another answer"
    return outcome


def servers(reader: Reader) -> Iterator[Outcome]:
    """The outcomes of each server that is hostile; none has an answer to use."""
    for scheme, table in (("http", HOSTILE), ("https", HOSTILE_TLS)):
        for case, (pieces, _) in table.items():
            outcome = asked(reader, f"{scheme}: {case}", pieces, scheme)
            if outcome.what == "answer":
                outcome.what = "another answer"
            yield outcome


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
        opened: list[socket.socket] = []
        for _ in range(crowd):
            try:
                opened.append(socket.create_connection(address, timeout=CONNECT_S))
            except OSError:  # the exporter accepts no more
                break
            with suppress(OSError):  # the exporter has closed it, as it may
                for _ in range(times):
                    opened[-1].sendall(data)
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
    "a crowd that leaves within its request": leaving(GET),
    "a crowd that leaves before the answer": leaving(GET + b"\r\n"),
    "one that drips its request": dripping(GET + b"A: b\r\n"),
    "a request for ever": sending(b"G" * 65536, times=100),
    "headers for ever": sending(GET + b"A: b\r\n" * 10000, times=20),
    "garbage": sending(bytes(range(256)) * 100),
    "a greeting of TLS": sending(GREETING + bytes(512)),
    "a text of 100 MB": sending(b"POST /metrics HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 65536, times=100),
    "a text of a negative length": sending(b"POST /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n"),
    "a method that is none": sending(b"\xff\xfe / HTTP/1.1\r\n\r\n"),
    "an address that is no text": sending(b"GET /\xff%ff%00?name[]=%ff&name[]=\xff HTTP/1.1\r\n\r\n"),
    "a path to elsewhere": sending(b"GET /../../../../etc/passwd HTTP/1.1\r\n\r\n"),
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
        assert self.process.stdout is not None
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
    with Exporter(folder, FEW_FILES) as exporter:
        with ExitStack() as connections:
            for connection in sending(b"", crowd=2 * FEW_FILES)(exporter.address):
                connections.enter_context(connection)
            time.sleep(3.0)  # the sampling, too, lacks descriptors meanwhile
        yield exporter.scraped("a crowd that took all file descriptors, once it has left")


def parts(count: int, seed: int, folder: Path) -> Parts:
    """Hostile servers, `count` damaged answers, and hostile clients."""
    os.environ["NO_PROXY"] = "127.0.0.1"
    with Reader("fuzz.hostile_servers") as reader:
        yield "hostile servers", servers(reader)
        yield "damaged answers of a server", (
            asked(reader, f"answer {number}", damaged_answers(seed, number)) for number in range(count))
    yield "hostile clients of the exporter", clients(folder)
