"""Queries the Prometheus server that inference/config.yaml names, and explains its failures to the user."""

from __future__ import annotations

import base64
import functools
import io
import json
import logging
import os
from collections.abc import Mapping
from http.client import HTTPResponse
from pathlib import Path
from socket import socket
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from hase.benchmark.metrics.names import HOST_LABEL, INDEX_LABEL, UUID_LABEL
from hase.utils.config import Config
from hase.utils.errors import UserError
from hase.utils.lazy import requests
from hase.utils.logger import get_logger
from hase.utils.web_server import DeadlineExceeded, DeadlineReader

log = get_logger("prometheus")
FOREIGN_SERIES = "prometheus.url: the answer holds a series that no Prometheus sends; set the address of a Prometheus"
MAX_ANSWER_MIB = 8  # uncompressed; a thousand times the size of a window of samples
PIECE_BYTES = 1 << 16
SHOWN_CHARACTERS = 1000  # of a message, since a server may have sent parts of it
SECRETS = ("password_env", "password_file", "token_env", "token_file")


class PrometheusError(UserError):
    """The server gave no usable metrics; the only failure that `on_failure: idle` accepts."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


def shown(message: str) -> str:
    """Shortens a message, which may contain text of a server, to one line."""
    short = message if len(message) <= SHOWN_CHARACTERS else message[:SHOWN_CHARACTERS] + " …"
    return "".join(character if character.isprintable() else "?" for character in short)


class DeviceChoice(Config):
    """The device to read: a UUID, or an index among a host's GPUs; for a CPU only a host. Empty: the only device."""

    uuid: str | None = None
    index: int | None = Field(default=None, ge=0)
    host: str | None = None

    @property
    def labels(self) -> dict[str, str]:
        """The choice as labels of dcgm-exporter."""
        values = {UUID_LABEL: self.uuid, INDEX_LABEL: None if self.index is None else str(self.index), HOST_LABEL: self.host}
        return {label: value for label, value in values.items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{label} {value}" for label, value in self.labels.items())


class PrometheusConfig(Config):
    """The Prometheus server that has the device's metrics; inference/config.yaml explains each entry."""

    url: str | None = None
    gpu: DeviceChoice = DeviceChoice()
    job: str | None = None
    window_s: float = Field(default=60.0, ge=0.1, le=86400)
    max_age_s: float = Field(default=45.0, gt=0)
    probe_max_age_s: float | None = Field(default=60.0, gt=0)
    host_pace_max_age_s: float | None = Field(default=600.0, gt=0)
    timeout_s: float = Field(default=2.0, gt=0, le=600)
    on_failure: Literal["error", "idle"] = "error"
    user: str | None = None
    password_env: str | None = None
    password_file: Path | None = None
    token_env: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    client_cert_file: Path | None = None
    client_key_file: Path | None = None

    @property
    def memory_s(self) -> float:
        """How long past samples affect answers (s); 0 if no server is named."""
        return max(self.window_s + self.max_age_s, self.probe_max_age_s or 0.0) if self.url else 0.0

    @field_validator("gpu", mode="before")
    @classmethod
    def _uuid_or_mapping(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return {"uuid": value}
        if not isinstance(value, (Mapping, DeviceChoice)):
            raise ValueError("a UUID, or {index: 0, host: node7}, is expected")
        return value

    @field_validator("url")
    @classmethod
    def _plain_address(cls, value: str | None) -> str | None:
        """Strips a trailing slash. Raises no ValueError: its message would print the address, which may hold a secret."""
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            valid = False
        if not valid:
            raise UserError("prometheus.url: no address of a server; http://HOST:PORT or https://HOST:PORT is expected")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise UserError("prometheus.url: an address without user, password, ? and # is expected; give the user with "
                            f"prometheus.user and {', '.join(SECRETS)}")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _fits_together(self) -> PrometheusConfig:
        passwords, tokens = (self.password_env, self.password_file), (self.token_env, self.token_file)
        secrets = [value for value in (*passwords, *tokens) if value is not None]
        problem = None
        if len(secrets) > 1:
            problem = f"only one of {', '.join(SECRETS)} can be used"
        elif (self.user is None) != (passwords == (None, None)):
            problem = "user goes with password_env or password_file"
        elif self.client_key_file and not self.client_cert_file:
            problem = "client_key_file goes with client_cert_file"
        elif self.max_age_s > self.window_s:
            problem = (f"max_age_s {self.max_age_s:g} is longer than window_s {self.window_s:g}, and older samples are never "
                       "looked at")
        if problem:  # a ValueError would print the whole mapping
            raise UserError(f"prometheus: {problem}")
        return self


class PrometheusServer:
    """Queries one server over a persistent connection. Reads secrets for each query, since token files are renewed."""

    def __init__(self, config: PrometheusConfig) -> None:
        self.config = config
        self._session = _timed_session()()

    def check(self) -> None:
        """Checks that the server answers."""
        self.query("vector(1)", "vector")

    def query(self, promql: str, kind: Literal["matrix", "vector"]) -> list[dict[str, Any]]:
        """The series that `promql` gives now, as in the API's JSON."""
        status, text = self._get(promql)
        where = f"prometheus.url {self.config.url}"
        if status in (401, 403):
            refused = ("user and password" if self.config.user else "the token" if self._token_source else
                       "a request without user or token")
            raise PrometheusError(f"{where}: HTTP {status}: it refuses {refused}; set prometheus.user and password_env or "
                                  "password_file, or token_env or token_file, to what it wants")
        if 300 <= status < 400:
            raise PrometheusError(f"{where}: HTTP {status}: it sends elsewhere, perhaps to a page to log in; set the address "
                                  "that answers itself")
        if status == 503:
            raise PrometheusError(f"{where}: HTTP 503: it is not ready, perhaps still starting; try again")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):  # the answer's text is not shown: it may repeat secrets that were sent
            speaks_tls = status == 400 and b"HTTPS server" in text
            raise PrometheusError(f"{where}: HTTP {status}: " + (
                "it speaks TLS; write https://" if speaks_tls else
                "no JSON came back, so it is no Prometheus; set its address, with its path if it has one")) from None
        if isinstance(body, dict) and body.get("status") == "error" and "errorType" in body:
            raise PrometheusError(f"{where}: HTTP {status}: it can't answer: {body.get('error')} (query: {promql})")
        try:
            result_type, series, warnings = body["data"]["resultType"], body["data"]["result"], list(body.get("warnings") or ())
        except (KeyError, TypeError):
            raise PrometheusError(f"{where}: HTTP {status}: JSON came back that is no Prometheus answer; set its address, with "
                                  "its path if it has one") from None
        if status != 200 or result_type != kind or not isinstance(series, list):
            raise PrometheusError(f"{where}: HTTP {status} with a {result_type}: a {kind} is expected, so it is no Prometheus")
        if not all(isinstance(entry, dict) and _are_labels(entry.get("metric")) for entry in series):
            raise PrometheusError(FOREIGN_SERIES)
        if warnings:
            log.warning("%s", shown(f"{where} warns: {'; '.join(map(str, warnings))}"))
        return series

    def _get(self, promql: str) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        config = self.config
        where = f"prometheus.url {config.url}"
        ca = str(_readable(config.ca_file, "ca_file")) if config.ca_file else True
        try:
            with self._session.get(
                    f"{config.url}/api/v1/query", params={"query": promql}, timeout=config.timeout_s,
                    auth=_Header(self._header()), verify=ca, cert=self._client_cert(), stream=True) as response:
                text = bytearray()
                for piece in response.iter_content(PIECE_BYTES):
                    text += piece
                    if len(text) > MAX_ANSWER_MIB << 20:
                        raise PrometheusError(f"{where}: HTTP {response.status_code}: its answer is over {MAX_ANSWER_MIB} MiB, "
                                              "so it is no Prometheus; set its address")
                return response.status_code, bytes(text)
        except requests.exceptions.SSLError as error:
            raise PrometheusError(f"{where}: TLS fails: {_in_words(_cause(error))}; check that it speaks https, ca_file (who "
                                  "signed its certificate, for this name), and client_cert_file and client_key_file if it "
                                  "wants one") from None
        except (requests.exceptions.Timeout, DeadlineExceeded):
            raise PrometheusError(f"{where}: no complete answer within timeout_s {config.timeout_s:g}; is it overloaded, or "
                                  "the port another's?") from None
        except requests.exceptions.RequestException as error:
            if isinstance(cause := _cause(error), OSError):
                raise PrometheusError(f"{where}: can't be reached: {_in_words(cause)}; is it running, and the address "
                                      "right?") from None
            raise PrometheusError(f"{where}: what came back can't be read ({type(cause).__name__}), so it is no Prometheus; "
                                  "set its address") from None
        except OSError as error:  # requests raises a plain OSError for certificates
            raise UserError(f"prometheus: ca_file, client_cert_file or client_key_file: {error}") from None

    @property
    def _token_source(self) -> bool:
        return bool(self.config.token_env or self.config.token_file)

    def _header(self) -> str | None:
        """The Authorization header."""
        config = self.config
        if config.user is not None:
            password = _secret("password", config.password_env, config.password_file)
            return "Basic " + base64.b64encode(f"{config.user}:{password}".encode()).decode()
        if self._token_source:
            token = _secret("token", config.token_env, config.token_file)
            if not token.isascii() or not token.isprintable() or " " in token:
                raise UserError("prometheus: the token holds blanks, line breaks or letters that no token has; check "
                                f"{config.token_env or config.token_file}")
            return f"Bearer {token}"
        return None

    def _client_cert(self) -> str | tuple[str, str] | None:
        config = self.config
        if config.client_cert_file is None:
            return None
        cert = str(_readable(config.client_cert_file, "client_cert_file"))
        key = _readable(config.client_key_file or config.client_cert_file, "client_key_file")
        if b"ENCRYPTED" in key.read_bytes():
            raise UserError(f"prometheus.client_key_file {key}: it is encrypted; give one that needs no passphrase")
        return (cert, str(key))


@functools.lru_cache(maxsize=4)
def server_for(config: PrometheusConfig) -> PrometheusServer:
    """The server of a config, cached in the process with its connection."""
    return PrometheusServer(config)


def _are_labels(labels: Any) -> bool:
    return isinstance(labels, dict) and all(isinstance(value, str) for value in labels.values())


class _Header:
    """Sets the Authorization header, or none; by default requests would take one from ~/.netrc."""

    def __init__(self, value: str | None) -> None:
        self.value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.value is not None:
            request.headers["Authorization"] = self.value
        return request


def _secret(what: str, variable: str | None, file: Path | None) -> str:
    """A password or a token, from an environment variable or a file."""
    if variable is not None:
        value = os.environ.get(variable)
        if not value:
            raise UserError(f"prometheus.{what}_env: no environment variable of that name is set, or it is empty; set it, or "
                            f"use {what}_file")
        return value
    path = _readable(file or Path(), f"{what}_file")
    try:
        value = path.read_text(encoding="utf-8").strip("\r\n")
    except UnicodeDecodeError:
        raise UserError(f"prometheus.{what}_file {path}: not a text file") from None
    if not value:
        raise UserError(f"prometheus.{what}_file {path}: it is empty")
    return value


def _readable(path: Path, key: str) -> Path:
    if not path.is_file() or not os.access(path, os.R_OK):
        raise UserError(f"prometheus.{key} {path}: no such file, or it can't be read")
    return path


def _cause(error: BaseException) -> BaseException:
    """The root cause of an exception of requests."""
    while True:
        inner = getattr(error, "reason", None) or (error.args[-1] if error.args else None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    # without a connection, urllib3 has the details only as text
    return error.__cause__ if isinstance(error.__cause__, OSError) else error


def _in_words(cause: BaseException) -> str:
    """A root cause in the system's words."""
    return str(getattr(cause, "verify_message", None) or getattr(cause, "strerror", None) or cause).strip()


def quoted(text: str) -> str:
    """`text` as a PromQL string."""
    return json.dumps(text, ensure_ascii=False)


@functools.cache
def _timed_session() -> type[requests.Session]:
    """A session class whose timeout covers the whole answer (status, headers and body); later, reading raises DeadlineExceeded.
    It follows no redirect, since requests would first read the whole body of the redirect. Defined in a function, so that
    requests is imported only when a server is asked."""
    # urllib3 logs a traceback for headers that it can't read; here the answer's content decides
    logging.getLogger("urllib3.connection").setLevel(logging.ERROR)

    class TimedResponse(HTTPResponse):
        def __init__(self, sock: socket, *args: Any, **more: Any) -> None:
            super().__init__(sock, *args, **more)
            self.fp = io.BufferedReader(DeadlineReader(self.fp.detach(), sock, sock.gettimeout()))

    class TimedAdapter(requests.adapters.HTTPAdapter):
        def get_connection_with_tls_context(self, *args: Any, **more: Any) -> Any:
            pool: Any = super().get_connection_with_tls_context(*args, **more)
            pool.ConnectionCls = type("TimedConnection", (pool.ConnectionCls,), {"response_class": TimedResponse})
            return pool

    class TimedSession(requests.Session):
        def __init__(self) -> None:
            super().__init__()
            for scheme in ("http://", "https://"):
                self.mount(scheme, TimedAdapter())

        def get_redirect_target(self, resp: requests.Response) -> None:
            return None

    return TimedSession
