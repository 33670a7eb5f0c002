"""An HTTP server from which Prometheus scrapes Hase's metrics, or the reason why there are none."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily

from hase.utils.deadlines import DeadlineReader, TooLate
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.web_config import WebAccess

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

T = TypeVar("T")
log = get_logger("scrape_server")
LOCALHOST = "127.0.0.1"  # the default: other addresses show the metrics to the whole network
REQUEST_S = 30.0  # a client whose request is not complete after this time is disconnected
TEXT = "text/plain; charset=utf-8"
LACK_S = 0.1  # pause after a connection that this machine could not take
STALE = 3  # intervals without anything new after which nothing is served


def gauge(name: str, meaning: str, value: float, labels: Mapping[str, str]) -> GaugeMetricFamily:
    """A metric with one value, and its labels by name."""
    family = GaugeMetricFamily(name, meaning, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def stale(what: str, last_s: float, interval_s: float, error: str) -> str:
    """Why there is nothing to serve; "" if the latest reading is recent enough.

    Args:
        what: what is served, for the message.
        last_s: when the latest one was made, seconds since 1970; 0 for never.
        interval_s: how often a new one is expected.
        error: why there was no newer one.
    """
    age_s = time.time() - last_s
    if age_s <= STALE * interval_s:
        return ""
    since = f"the last {what} is {age_s:.0f} s old" if last_s else f"no {what} so far"
    return since + (f": {error}" if error else "")


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """The server.

    Attributes:
        access: who may scrape it; None: everyone who reaches it.
    """

    daemon_threads = True
    access: WebAccess | None = None
    _trouble = ""  # why the access's files could not be used for the last client

    @property
    def url(self) -> str:
        """What to give Prometheus."""
        scheme = "https" if self.access and self.access.has_tls else "http"
        return f"{scheme}://{self.socket.getsockname()[0]}:{self.server_port}/metrics"

    def get_request(self) -> Any:
        """Waits a little where this machine lacks what a connection needs: the client is still there, so the server would try
        again at once."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(LACK_S)
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers a client, in its thread. With TLS its handshake comes first."""
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
        """What `read` reads of the access. If its files can't be used any more, that is logged once, and nobody is admitted.

        Raises:
            ConnectionAbortedError: a file can't be used.
        """
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
        if not isinstance(sys.exc_info()[1], (OSError, TooLate)):
            super().handle_error(request, client_address)


class _Quiet(WSGIRequestHandler):
    timeout = REQUEST_S

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(DeadlineReader(self.rfile.detach(), self.connection, self.timeout))

    def log_message(self, format: str, *args: Any) -> None:
        """No line for every scrape."""


def scrape_server(collector: Collector, trouble: Callable[[], str], host: str, port: int,
                  web_config: Path | None = None) -> ScrapeServer:
    """A server that answers scrapes once `serve_forever` runs.

    Args:
        collector: gives the metrics at every scrape.
        trouble: why there is nothing to serve (the answer is then HTTP 503); "" while all is well.
        host, port: where to listen. Host "" is this machine alone, 0.0.0.0 all of its addresses; port 0 is a free port.
        web_config: a file that asks for TLS or users (`hase.utils.web_config`).

    Raises:
        UserError: the port is not free, or the file, or one that it names, can't be used.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)  # what serving itself costs: process_cpu_seconds_total
    metrics = make_wsgi_app(registry)

    access = WebAccess(web_config) if web_config else None

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not server.admits(environ.get("HTTP_AUTHORIZATION", "")):
            start_response("401 Unauthorized", [("Content-Type", TEXT), ("WWW-Authenticate", 'Basic realm="Hase"')])
            return [b"user and password are wanted\n"]
        why = trouble()
        if not why:
            return metrics(environ, start_response)
        start_response("503 Service Unavailable", [("Content-Type", TEXT)])
        return [f"{why}\n".encode()]

    try:
        server = make_server(host or LOCALHOST, port, app, server_class=ScrapeServer, handler_class=_Quiet)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror}; is another exporter running? Choose another port") from None
    server.access = access
    return server
