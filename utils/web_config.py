"""TLS and users of the servers that Prometheus scrapes (`--web-config FILE`), by the convention of Prometheus's own exporters.

The keys are those of exporter-toolkit (docs/web-configuration.md of prometheus/exporter-toolkit, read in November 2026), as far
as Hase has them; any other key is an error, never ignored. As there, relative paths begin in the file's folder, passwords are
given as bcrypt hashes, and all files are read again for every client: renewed certificates and new users count at once.
"""

from __future__ import annotations

import base64
import functools
import os
import re
import ssl
import threading
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from hase.utils.config import Config, read_config
from hase.utils.errors import UserError
from hase.utils.lazy import bcrypt

INSTALL = "pip install -r requirements-operating.txt"
PAGE = "docs/operating.md"
BCRYPT = re.compile(r"\$2[abxy]\$(?:0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
KEPT = 100  # results of password checks, since one takes as long as a fifth of a second
_checking = threading.Lock()  # many wrong passwords at a time may take one core, not all of them


class TlsServer(Config):
    """`tls_server_config`: the server's certificate, and whether it wants one of its clients."""

    cert_file: Path
    key_file: Path
    client_auth_type: Literal["NoClientCert", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: Path | None = None
    min_version: Literal["TLS12", "TLS13"] = "TLS12"


class WebConfig(Config):
    """The file. Without `tls_server_config` the server speaks plain HTTP; without users it answers everyone."""

    tls_server_config: TlsServer | None = None
    basic_auth_users: dict[str, str] = Field(default={}, repr=False)

    @field_validator("basic_auth_users", mode="before")
    @classmethod
    def _users(cls, value: object) -> object:
        """Raises no ValueError, which would print what may be passwords."""
        users = value or {}
        if not isinstance(users, dict) or not all(isinstance(part, str) for pair in users.items() for part in pair):
            raise UserError("basic_auth_users: a bcrypt hash by the name of each user is expected, as text")
        return users


class WebAccess:
    """Who may scrape a server, by a file that is read again each time.

    Attributes:
        has_tls: whether it asked for TLS at the start. It can't ask for less later.
    """

    def __init__(self, path: Path) -> None:
        """Checks all that the file says.

        Raises:
            UserError: the file, a certificate or key in it, or the hash of a password can't be used, or bcrypt is missing.
        """
        self._path = path
        self.has_tls = self._has_users = False  # as the file said at the start
        config = self._read()
        self.tls()
        self.has_tls, self._has_users = config.tls_server_config is not None, bool(config.basic_auth_users)

    def tls(self) -> ssl.SSLContext | None:
        """How to speak TLS with the next client; None: it gets plain HTTP.

        Raises:
            UserError: as at the start.
        """
        config = self._read().tls_server_config
        return None if config is None else self._context(config)

    def admits(self, authorization: str) -> bool:
        """Whether a request with this Authorization header ("" without one) is answered.

        Raises:
            UserError: as at the start.
        """
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
        known = users.get(user.decode(errors="replace"))
        # an unknown user takes as long as a wrong password
        return _is_password(password, (known or next(iter(users.values()))).encode()) and known is not None

    def _read(self) -> WebConfig:
        try:
            config = read_config(self._path, WebConfig)
        except UserError as error:
            text = str(error)  # a validator's does not name the file
            raise UserError(text if text.startswith(str(self._path)) else f"{self._path}: {text}") from None
        except OSError as error:
            raise UserError(f"{self._path}: {error.strerror}") from None
        for key, asked in (("tls_server_config", self.has_tls), ("basic_auth_users", self._has_users)):
            if asked and not getattr(config, key):  # a file that is just being written is empty, too
                raise UserError(f"{self._path}: {key} is no longer there; put it back, or start again to serve without it")
        for user, hashed in config.basic_auth_users.items():
            if not BCRYPT.fullmatch(hashed):
                raise UserError(f"{self._path}: basic_auth_users.{user}: no bcrypt hash of a password; {PAGE} says how to make "
                                "one")
        if config.basic_auth_users:
            try:
                bcrypt.checkpw  # noqa: B018 - loads it
            except ModuleNotFoundError:
                raise UserError(f"{self._path}: basic_auth_users needs the package bcrypt; {INSTALL}") from None
        return config

    def _context(self, config: TlsServer) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if config.min_version == "TLS13" else ssl.TLSVersion.TLSv1_2
        cert, key = self._file(config.cert_file, "cert_file"), self._file(config.key_file, "key_file")

        def encrypted() -> str:
            raise UserError(f"{self._path}: tls_server_config.key_file {key}: it is encrypted; give one that needs no "
                            "passphrase")

        try:
            context.load_cert_chain(cert, key, encrypted)
        except ssl.SSLError as error:
            why = ("the key is not the certificate's" if error.reason == "KEY_VALUES_MISMATCH" else
                   f"no certificate and key in PEM ({error.reason or 'not readable'})")
            raise UserError(f"{self._path}: tls_server_config: cert_file {cert} and key_file {key}: {why}") from None
        if config.client_auth_type == "NoClientCert":
            if config.client_ca_file:
                raise UserError(f"{self._path}: tls_server_config.client_ca_file goes with client_auth_type: "
                                "RequireAndVerifyClientCert")
            return context
        if config.client_ca_file is None:
            raise UserError(f"{self._path}: tls_server_config.client_auth_type: RequireAndVerifyClientCert goes with "
                            "client_ca_file: who signs the clients' certificates")
        authority = self._file(config.client_ca_file, "client_ca_file")
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError:
            raise UserError(f"{self._path}: tls_server_config.client_ca_file {authority}: no certificates in PEM") from None
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _file(self, path: Path, key: str) -> Path:
        path = self._path.parent / path
        if not path.is_file() or not os.access(path, os.R_OK):
            raise UserError(f"{self._path}: tls_server_config.{key} {path}: no such file, or it can't be read")
        return path


@functools.lru_cache(maxsize=KEPT)
def _is_password(password: bytes, hashed: bytes) -> bool:
    """Whether a password is the one of a bcrypt hash."""
    with _checking:
        try:
            return bool(bcrypt.checkpw(password, hashed))
        except ValueError:  # longer than the 72 bytes that bcrypt takes, or with a zero byte
            return False
