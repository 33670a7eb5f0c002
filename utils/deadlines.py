"""One deadline for all that comes through a socket. The socket's own timeout begins anew with every byte, so it never ends the
reading where a byte comes now and then."""

from __future__ import annotations

import io
import time
from socket import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class TooLate(Exception):
    """The deadline passed before the whole message was there."""


class DeadlineReader(io.RawIOBase):
    """Reads from a connection until a deadline, whatever comes."""

    def __init__(self, raw: io.RawIOBase, connection: socket, timeout_s: float | None) -> None:
        """Reads from `raw`, a file of `connection`, for `timeout_s` seconds from now; None: without an end."""
        self._raw, self._connection = raw, connection
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        """Fills a part of `buffer`, and returns how many bytes came.

        Raises:
            TooLate: the deadline has passed.
        """
        if self._until_s is not None:
            left_s = self._until_s - time.monotonic()
            if left_s <= 0:
                raise TooLate
            self._connection.settimeout(left_s)
        try:
            return self._raw.readinto(buffer)
        except TimeoutError:
            raise TooLate from None

    def close(self) -> None:
        self._raw.close()
        super().close()
