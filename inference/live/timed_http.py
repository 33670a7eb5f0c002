"""HTTP requests of which `timeout` is a deadline for the whole answer. In requests it is one for each byte of it."""

from __future__ import annotations

import io
import logging
from http.client import HTTPResponse
from socket import socket
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from hase.utils.deadlines import DeadlineReader

# it shows a traceback where a server sends headers that it can't read; the answer is judged by what it says
logging.getLogger("urllib3.connection").setLevel(logging.ERROR)


class _TimedResponse(HTTPResponse):
    """Status, headers and body together must come within the connection's timeout, else reading them raises TooLate."""

    def __init__(self, sock: socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp = io.BufferedReader(DeadlineReader(self.fp.detach(), sock, sock.gettimeout()))


class _TimedAdapter(HTTPAdapter):
    def get_connection_with_tls_context(self, *args: Any, **more: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **more)
        pool.ConnectionCls = type("TimedConnection", (pool.ConnectionCls,), {"response_class": _TimedResponse})
        return pool


class TimedSession(requests.Session):
    """Follows no redirect: requests would first read all that came with it."""

    def __init__(self) -> None:
        super().__init__()
        for scheme in ("http://", "https://"):
            self.mount(scheme, _TimedAdapter())

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None
