"""The servers that Prometheus scrapes: TLS, users, and clients that disconnect; and a real Prometheus."""

from __future__ import annotations

import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import requests
import yaml
from command import run_script
from optional_packages import needs
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_stand import (
    PASSWORD,
    PASSWORD_BCRYPT,
    READINGS,
    USER,
    certificates,
    drips_until_disconnected,
    prometheus,
    prometheus_or_skip,
    recorded,
    serving,
    start_exporter,
    value,
    wait_for,
)

from hase.utils import web_server
from hase.utils.errors import UserError
from hase.utils.web_server import ScrapeServer, WebAccess, scrape_server

pytestmark = pytest.mark.slow

UTIL = "DCGM_FI_DEV_GPU_UTIL"
TLS = {"cert_file": "server.pem", "key_file": "server.key"}  # beside the config
WANTS_CERTIFICATE = {"client_ca_file": "ca.pem", "client_auth_type": "RequireAndVerifyClientCert"}
USERS = {USER: PASSWORD_BCRYPT}

SERIES = 20_000  # more than a socket's buffer holds


class Numbers(Collector):
    def __init__(self, count: int) -> None:
        self.count = count

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("one", "", labels=["number"])
        for number in range(self.count):
            family.add_metric([str(number)], number)
        yield family


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates."""
    needs("bcrypt", "operating")
    folder = tmp_path_factory.mktemp("certificates")
    certificates(folder)
    subprocess.run(["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", "server.key", "-out", "locked.key"], cwd=folder,
                   check=True, capture_output=True)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The same, of the test alone."""
    return Path(shutil.copytree(made, tmp_path / "web"))


def written(folder: Path, text: str | dict[str, Any]) -> Path:
    path = folder / "web.yml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


@contextmanager
def served(path: Path | None = None, count: int = 1) -> Iterator[ScrapeServer]:
    with serving(scrape_server(Numbers(count), lambda: "", "", 0, path)) as server:
        yield server


def get(server: ScrapeServer, ca: Path | bool = True, **how: Any) -> requests.Response:
    return requests.get(server.url, timeout=5, verify=ca if isinstance(ca, bool) else str(ca), **how)


def test_tls(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Who does not trust the certificate, or speaks no TLS, gets nothing; others are answered as usual."""
    with served(written(folder, {"tls_server_config": TLS})) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert "\none{" in get(server, folder / "ca.pem").text
        with pytest.raises(requests.exceptions.SSLError, match="unable to get local issuer certificate"):
            get(server)
        with pytest.raises(requests.ConnectionError):
            requests.get(server.url.replace("https", "http"), timeout=5)
        assert get(server, folder / "ca.pem").status_code == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_clients_certificate_and_the_oldest_version_of_tls(folder: Path) -> None:
    known, stranger = ((str(folder / f"{name}.pem"), str(folder / f"{name}.key")) for name in ("client", "stranger"))
    with served(written(folder, {"tls_server_config": TLS | WANTS_CERTIFICATE})) as server:
        assert get(server, folder / "ca.pem", cert=known).status_code == 200
        for refused in (None, stranger):
            with pytest.raises(requests.ConnectionError):
                get(server, folder / "ca.pem", cert=refused)
    with served(written(folder, {"tls_server_config": TLS | {"min_version": "TLS13"}})) as server:
        for version, answered in (("-tls1_2", False), ("-tls1_3", True)):
            done = subprocess.run(["openssl", "s_client", version, "-connect", f"127.0.0.1:{server.server_port}"],
                                  input=b"", capture_output=True, check=False, timeout=20)
            assert (b"BEGIN CERTIFICATE" in done.stdout) == answered


def test_only_this_machine_is_answered_unless_an_address_is_given() -> None:
    for host, listening in (("", "127.0.0.1"), ("0.0.0.0", "0.0.0.0")):
        server = scrape_server(Numbers(1), lambda: "", host, 0)
        assert server.socket.getsockname()[0] == listening
        server.server_close()


def test_users(folder: Path) -> None:
    """Without TLS too; each wrong login is HTTP 401. Different programs begin the same hash differently."""
    for variant in ("$2a$", "$2y$", "$2b$"):
        path = written(folder, {"basic_auth_users": {USER: PASSWORD_BCRYPT.replace("$2b$", variant)}})
        with served(path) as server:
            assert server.url.startswith("http://")
            assert "\none{" in get(server, auth=(USER, PASSWORD)).text
    with served(path) as server:
        nobody = get(server)
        assert (nobody.status_code, nobody.headers["WWW-Authenticate"]) == (401, 'Basic realm="Hase"')
        for login in ((USER, PASSWORD + "."), (USER, ""), ("other", PASSWORD), (USER, 80 * "x"), (USER, "x\0y")):
            refused = get(server, auth=login)
            assert (refused.status_code, "one" in refused.text) == (401, False)
        for header in ("Bearer token", "Basic", "Basic aGFzZQ==", "Basic aGFzZQ==\u00e9"):
            assert get(server, headers={"Authorization": header.encode("latin-1")}).status_code == 401


def test_changes_count_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewed certificate, a new password, and a file that is broken for a while or asks for less, as an editor may have
    emptied it a moment ago: nobody is answered then."""
    said, both = Mock(), {"tls_server_config": TLS, "basic_auth_users": USERS}
    monkeypatch.setattr("hase.utils.web_server.log.warning", said)
    with served(written(folder, both)) as server:
        assert get(server, folder / "ca.pem", auth=(USER, PASSWORD)).status_code == 200
        for end in ("pem", "key"):
            shutil.copy(folder / f"stranger.{end}", folder / f"server.{end}")
        assert get(server, folder / "stranger.pem", auth=(USER, PASSWORD)).status_code == 200
        written(folder, both | {"basic_auth_users": {"other": PASSWORD_BCRYPT}})
        for user, code in ((USER, 401), ("other", 200)):
            assert get(server, folder / "stranger.pem", auth=(user, PASSWORD)).status_code == code
        lesser: list[tuple[Any, str]] = [
            ("tls_server_config: [", "not valid YAML"), ("", "tls_server_config is no longer there"),
            ({"tls_server_config": TLS}, "basic_auth_users is no longer there"),
            ({"basic_auth_users": USERS}, "tls_server_config is no longer there")]
        for left, message in lesser:
            written(folder, left)
            for url in (server.url, server.url.replace("https", "http")):
                with pytest.raises(requests.ConnectionError):
                    requests.get(url, timeout=5, verify=str(folder / "stranger.pem"), auth=(USER, PASSWORD))
            assert message in str(said.call_args.args[1])
            written(folder, both)
            assert get(server, folder / "stranger.pem", auth=(USER, PASSWORD)).status_code == 200
        assert said.call_count == len(lesser)


def test_a_client_that_never_shakes_hands_delays_nobody(folder: Path) -> None:
    with served(written(folder, {"tls_server_config": TLS})) as server, \
            socket.create_connection(("127.0.0.1", server.server_port)):
        began_s = time.monotonic()
        assert get(server, folder / "ca.pem").status_code == 200
        assert time.monotonic() - began_s < 3.0


@pytest.mark.parametrize(("text", "message"), [
    ("tls_server_config: {cert_file: server.pem}", r"tls_server_config\.key_file: missing"),
    ("tls_server_config: {cert_file: none.pem, key_file: server.key}", r"config\.cert_file .*none\.pem: no such file"),
    ("tls_server_config: {cert_file: server.pem, key_file: client.key}", "the key is not the certificate's"),
    ("tls_server_config: {cert_file: web.yml, key_file: server.key}", "no certificate and key in PEM"),
    ("tls_server_config: {cert_file: server.pem, key_file: locked.key}", "it is encrypted; give one that needs no passphrase"),
    ({"client_ca_file": "ca.pem"}, "client_ca_file goes with"),
    (WANTS_CERTIFICATE | {"client_ca_file": "ca.key"}, r"client_ca_file .*ca\.key: no certificates in PEM"),
    ({"min_version": "TLS10"}, r"'TLS12' or 'TLS13'"),
    ("http_server_config: {http2: false}", r"http_server_config: unknown key.*\(allowed: tls_server_config, basic_auth_users"),
    ("basic_auth_users: {hase: s3cret}", r"basic_auth_users\.hase: no bcrypt hash .*docs/operating\.md"),
    ("basic_auth_users: {hase: 12345}", "basic_auth_users: a bcrypt hash by the name of each user"),
])
def test_files_that_do_not_fit(folder: Path, text: str | dict[str, str], message: str) -> None:
    """The message names the file, the key and what to do, and shows no password. A dictionary goes with certificate and key."""
    path = written(folder, text if isinstance(text, str) else {"tls_server_config": TLS | text})
    with pytest.raises(UserError, match=message) as raised:
        WebAccess(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "s3cret" not in str(raised.value)


def test_the_commands_errors(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each; without bcrypt only passwords fail."""
    def exporter(web: Path) -> tuple[int, str]:
        done = run_script("benchmark/metrics_exporter.py", "--port", "0", "--source", "psutil", "--duration", "0.1",
                          "--workspace", tmp_path, "--quiet", "--web-config", web)
        return done.returncode, done.stderr

    path = written(folder, {"basic_auth_users": USERS})
    assert exporter(path) == (0, "")
    assert exporter(tmp_path / "none.yml") == (1, f"error: {tmp_path}/none.yml: no such config file\n")
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    assert exporter(path) == (
        1, f"error: {path}: basic_auth_users needs the package bcrypt; pip install '.[operating]'\n")
    assert exporter(written(folder, {"tls_server_config": TLS})) == (0, "")


def test_a_prometheus_that_may_scrape_and_others_that_may_not(folder: Path, tmp_path: Path) -> None:
    """The real command, scraped over TLS with a certificate and a password as docs/operating.md says."""
    prometheus_or_skip()
    path = written(folder, {"tls_server_config": TLS | WANTS_CERTIFICATE, "basic_auth_users": USERS})
    done = subprocess.run(["promtool", "check", "web-config", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr  # the same file serves Prometheus's own exporters
    process, url = start_exporter(recorded(tmp_path / "gpu.jsonl", [{UTIL: 60.0}] * READINGS), "--web-config", str(path))
    try:
        address = url.removeprefix("https://").removesuffix("/metrics")
        login = {"username": USER, "password": PASSWORD}
        tls = {"ca_file": str(folder / "ca.pem"), "cert_file": str(folder / "client.pem"),
               "key_file": str(folder / "client.key")}
        how = {"right": {"scheme": "https", "basic_auth": login, "tls_config": tls}, "plain": {"basic_auth": login},
               "wrong": {"scheme": "https", "basic_auth": login | {"password": "wrong"}, "tls_config": tls},
               "stranger": {"scheme": "https", "basic_auth": login, "tls_config": {"ca_file": tls["ca_file"]}}}
        with prometheus(tmp_path / "prometheus", dict.fromkeys(how, (address, "metrics")), jobs=how) as port:
            wait_for(lambda: value(port, 'up{job="right"}') == 1.0 and value(port, "count(up == 0)") == 3.0)
            assert value(port, UTIL) == 60.0
            found = requests.get(f"http://127.0.0.1:{port}/api/v1/targets", timeout=10).json()["data"]["activeTargets"]
            errors = {target["labels"]["job"]: target["lastError"] for target in found}
            assert [job for job, error in errors.items() if not error] == ["right"]
            assert "401 Unauthorized" in errors["wrong"]
    finally:
        process.kill()
        process.communicate()


def test_a_client_that_disconnects_costs_no_traceback_and_no_other_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with served(count=SERIES) as server:
        for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.0\r\n\r\n"):
            client = socket.create_connection(("127.0.0.1", server.server_port))
            client.sendall(sent)
            time.sleep(0.05)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not an orderly end
            client.close()
        time.sleep(0.3)
        assert requests.get(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10).text.count("\none{") == SERIES
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_drips_its_request_is_disconnected(monkeypatch: pytest.MonkeyPatch,
                                                        capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(web_server._RequestHandler, "timeout", 0.3)
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
