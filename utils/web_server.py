"""A metrics server for Prometheus, with TLS and users (`--web-config FILE`) and a deadline per request.

The config has the keys of exporter-toolkit (docs/web-configuration.md of prometheus/exporter-toolkit, November 2026) that Hase
supports; other keys are errors. As there, relative paths start in the file's folder, passwords are bcrypt hashes, and all files
are read again for every client, so that new certificates and users count at once.

The deadline is needed because a socket's own timeout starts again with every byte: a slow client could hold a thread for ever.
"""

from __future__ import annotations

import base64
import functools
import io
import os
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from socket import socket
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from pydantic import Field, field_validator

from hase.utils.config import Config, read_config
from hase.utils.errors import UserError
from hase.utils.lazy import bcrypt, prometheus_client
from hase.utils.logger import get_logger

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

INSTALL = "pip install '.[operating]'"
PAGE = "docs/operating.md"
BCRYPT = re.compile(r"\$2[abxy]\$(?:0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
CACHED_CHECKS = 100  # of passwords, since one takes up to 0.2 s
_one_check = threading.Lock()  # so that many wrong passwords at a time occupy one core, not all of them
T = TypeVar("T")
log = get_logger("scrape_server")
LOCALHOST = "127.0.0.1"  # the default: other addresses show the metrics to the whole network
REQUEST_S = 30.0  # a client whose request is not complete after this time is disconnected
TEXT_TYPE = "text/plain; charset=utf-8"
ACCEPT_PAUSE_S = 0.1  # after a connection that this machine could not accept
STALE_INTERVALS = 3  # without anything new, after which nothing is served


class DeadlineExceeded(Exception):
    """The deadline passed before the whole message arrived."""


class DeadlineReader(io.RawIOBase):
    """Reads from a connection until a deadline."""

    def __init__(self, raw: io.RawIOBase, connection: socket, timeout_s: float | None) -> None:
        """Reads from `raw`, a file of `connection`, for `timeout_s` seconds from now; None for no limit."""
        self._raw, self._connection = raw, connection
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        """Fills a part of `buffer` and returns the number of bytes; raises `DeadlineExceeded` after the deadline."""
        if self._deadline_s is not None:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded
            self._connection.settimeout(left_s)
        try:
            return self._raw.readinto(buffer)
        except TimeoutError:
            raise DeadlineExceeded from None

    def close(self) -> None:
        self._raw.close()
        super().close()


class TlsServer(Config):
    """`tls_server_config`: the server's certificate, and whether clients need one."""

    cert_file: Path
    key_file: Path
    client_auth_type: Literal["NoClientCert", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: Path | None = None
    min_version: Literal["TLS12", "TLS13"] = "TLS12"


class WebConfig(Config):
    """The config file. Without `tls_server_config`, the server uses plain HTTP; without users, it answers everyone."""

    tls_server_config: TlsServer | None = None
    basic_auth_users: dict[str, str] = Field(default={}, repr=False)

    @field_validator("basic_auth_users", mode="before")
    @classmethod
    def _users(cls, value: object) -> object:
        """Checks the users. Raises no ValueError, whose message could print passwords."""
        users = value or {}
        if not isinstance(users, dict) or not all(isinstance(part, str) for pair in users.items() for part in pair):
            raise UserError("basic_auth_users: a bcrypt hash by the name of each user is expected, as text")
        return users


class WebAccess:
    """Who may scrape a server, from a config file that is read again for each client. TLS (`has_tls`) and users that the file
    had at the start can't be removed later."""

    def __init__(self, path: Path) -> None:
        """Checks the file, its certificates and keys, and the hashes of passwords."""
        self._path = path
        self.has_tls = self._has_users = False
        config = self._read()
        self.tls()
        self.has_tls, self._has_users = config.tls_server_config is not None, bool(config.basic_auth_users)

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for the next client; None for plain HTTP."""
        config = self._read().tls_server_config
        return None if config is None else self._context(config)

    def admits(self, authorization: str) -> bool:
        """Whether the users allow a request with this Authorization header ("" without one)."""
        users = self._read().basic_auth_users
        if not users:
            return True
        scheme, _, encoded = authorization.partition(" ")
        try:
            user, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
        except ValueError:
            return False
        if scheme.lower() != "basic" or not colon:
            return False
        hashed = users.get(user.decode(errors="replace"))
        # an unknown user takes as long as a wrong password
        return _is_password(password, (hashed or next(iter(users.values()))).encode()) and hashed is not None

    def _error(self, what: str) -> UserError:
        return UserError(f"{self._path}: {what}")

    def _read(self) -> WebConfig:
        try:
            config = read_config(self._path, WebConfig)
        except UserError as error:
            # a validator's error does not name the file
            raise (error if str(error).startswith(str(self._path)) else self._error(str(error))) from None
        except OSError as error:
            raise self._error(str(error.strerror)) from None
        for key, required in (("tls_server_config", self.has_tls), ("basic_auth_users", self._has_users)):
            if required and not getattr(config, key):  # also a file that is just being written: it is empty for a moment
                raise self._error(f"{key} is no longer there; put it back, or start the server again to serve without it")
        for user, hashed in config.basic_auth_users.items():
            if not BCRYPT.fullmatch(hashed):
                raise self._error(f"basic_auth_users.{user}: no bcrypt hash of a password; {PAGE} says how to make one")
        if config.basic_auth_users:
            try:
                bcrypt.checkpw  # noqa: B018 - loads it
            except ModuleNotFoundError:
                raise self._error(f"basic_auth_users needs the package bcrypt; {INSTALL}") from None
        return config

    def _context(self, config: TlsServer) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if config.min_version == "TLS13" else ssl.TLSVersion.TLSv1_2
        cert, key = self._file(config.cert_file, "cert_file"), self._file(config.key_file, "key_file")

        def ask_passphrase() -> str:
            raise self._error(f"tls_server_config.key_file {key}: it is encrypted; give one that needs no passphrase")

        try:
            context.load_cert_chain(cert, key, ask_passphrase)
        except ssl.SSLError as error:
            why = ("the key is not the certificate's" if error.reason == "KEY_VALUES_MISMATCH" else
                   f"no certificate and key in PEM ({error.reason or 'not readable'})")
            raise self._error(f"tls_server_config: cert_file {cert} and key_file {key}: {why}") from None
        if config.client_auth_type == "NoClientCert":
            if config.client_ca_file:
                raise self._error("tls_server_config.client_ca_file goes with client_auth_type: RequireAndVerifyClientCert; "
                                  "add that, or remove client_ca_file")
            return context
        if config.client_ca_file is None:
            raise self._error("tls_server_config.client_auth_type: RequireAndVerifyClientCert needs client_ca_file: the "
                              "certificates of those who sign the clients' certificates")
        authority = self._file(config.client_ca_file, "client_ca_file")
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError:
            raise self._error(f"tls_server_config.client_ca_file {authority}: no certificates in PEM") from None
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _file(self, path: Path, key: str) -> Path:
        path = self._path.parent / path
        if not path.is_file() or not os.access(path, os.R_OK):
            raise self._error(f"tls_server_config.{key} {path}: no such file, or it can't be read")
        return path


@functools.lru_cache(maxsize=CACHED_CHECKS)
def _is_password(password: bytes, hashed: bytes) -> bool:
    """Whether a password matches a bcrypt hash."""
    with _one_check:
        try:
            return bool(bcrypt.checkpw(password, hashed))
        except ValueError:  # longer than the 72 bytes that bcrypt takes, or with a zero byte
            return False


def gauge(name: str, meaning: str, value: float, labels: Mapping[str, str]) -> GaugeMetricFamily:
    """A metric with one value; `labels` are values by name."""
    family = prometheus_client.core.GaugeMetricFamily(name, meaning, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def stale_reason(what: str, last_s: float, interval_s: float, error: str) -> str:
    """Why there is nothing to serve; "" if the latest reading is recent enough. `last_s` is its time (seconds since 1970; 0 for
    never), `interval_s` the expected time between readings."""
    age_s = time.time() - last_s
    if age_s <= STALE_INTERVALS * interval_s:
        return ""
    since = f"the last {what} is {age_s:.0f} s old" if last_s else f"no {what} so far"
    return since + (f": {error}" if error else "")


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """A threaded WSGI server; `access` says who may scrape it, None for everyone who reaches it."""

    daemon_threads = True
    access: WebAccess | None = None
    _trouble = ""  # why the files of `access` could not be used for the last client; "" if they could

    @property
    def url(self) -> str:
        """The URL for Prometheus."""
        scheme = "https" if self.access and self.access.has_tls else "http"
        return f"{scheme}://{self.socket.getsockname()[0]}:{self.server_port}/metrics"

    def get_request(self) -> Any:
        """Accepts a client. Waits a little if the machine lacks resources, since an immediate retry would fail again."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers a client in its thread, after the TLS handshake if there is one."""
        context = self._usable(self.access.tls) if self.access else None
        if context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(REQUEST_S)
        with context.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def admits(self, authorization: str) -> bool:
        """Whether a request with this Authorization header is answered."""
        access = self.access
        return access is None or self._usable(lambda: access.admits(authorization))

    def _usable(self, read: Callable[[], T]) -> T:
        """The result of `read`, which reads the files of `access`. If they can't be used, this is logged once, and
        ConnectionAbortedError makes sure that nobody is answered."""
        try:
            result = read()
        except UserError as error:
            if (trouble := str(error)) != self._trouble:
                log.warning("nobody is answered: %s", trouble)
            self._trouble = trouble
            raise ConnectionAbortedError(trouble) from None
        self._trouble = ""
        return result

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints a traceback for bugs only, not for a client that disconnected or never sent a whole request."""
        if not isinstance(sys.exc_info()[1], (OSError, DeadlineExceeded)):
            super().handle_error(request, client_address)


class _RequestHandler(WSGIRequestHandler):
    """Limits the time of a whole request, and logs no line for each scrape."""

    timeout = REQUEST_S

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(DeadlineReader(self.rfile.detach(), self.connection, self.timeout))

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


def scrape_server(collector: Collector, trouble: Callable[[], str], host: str, port: int,
                  web_config: Path | None = None) -> ScrapeServer:
    """A server of the collector's metrics, which answers scrapes once `serve_forever` runs.

    Args:
        trouble: why there is nothing to serve (the answer is then HTTP 503); "" if all is well.
        host, port: "" is this machine only, 0.0.0.0 all its addresses; port 0 is a free port.
    """
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(collector)
    prometheus_client.ProcessCollector(registry=registry)  # the server's own cost: process_cpu_seconds_total
    metrics = prometheus_client.make_wsgi_app(registry)
    access = WebAccess(web_config) if web_config else None

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not server.admits(environ.get("HTTP_AUTHORIZATION", "")):
            start_response("401 Unauthorized", [("Content-Type", TEXT_TYPE), ("WWW-Authenticate", 'Basic realm="Hase"')])
            return [b"give a user and a password\n"]
        why = trouble()
        if not why:
            return metrics(environ, start_response)
        start_response("503 Service Unavailable", [("Content-Type", TEXT_TYPE)])
        return [f"{why}\n".encode()]

    try:
        server = make_server(host or LOCALHOST, port, app, server_class=ScrapeServer, handler_class=_RequestHandler)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror}; is another exporter running? Choose another port") from None
    server.access = access
    return server
