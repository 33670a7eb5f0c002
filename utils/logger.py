"""Logs and progress: short lines on stderr, full lines in a rotating file."""

from __future__ import annotations

import logging
import logging.handlers
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hase.utils.commands import as_typed
from hase.utils.lazy import rich

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"
MAX_LOG_BYTES = 5_000_000
KEPT_LOGS = 3
_PROGRESS_EVERY_S = 15.0  # between two progress lines if stderr is not a terminal
T = TypeVar("T")


class _ConsoleFormatter(logging.Formatter):
    """Formats console lines: the message, and from WARNING up also the level (in colour on a terminal)."""

    COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}

    def format(self, record: logging.LogRecord) -> str:
        message = as_typed(record.getMessage())  # commands in it as this user calls them, e.g. `hase predict`
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if record.levelno < logging.WARNING:
            return message
        label = record.levelname.lower()
        if sys.stderr.isatty():
            label = f"{self.COLOURS[record.levelno]}{label}\033[0m"
        return f"{label}: {message}"


class _CurrentStderr(logging.StreamHandler):
    """Writes to the current `sys.stderr`, so that a progress display can replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # not StreamHandler's, which would set `stream`

    @property
    def stream(self) -> Any:
        return sys.stderr


def get_logger(name: str) -> logging.Logger:
    """The logger `hase.<name>`; without DEBUG lines until `configure` asks for them."""
    return logging.getLogger(f"hase.{name}")


def is_quiet() -> bool:
    """Whether `configure` was told to show nothing but errors."""
    return any(isinstance(handler, _CurrentStderr) and handler.level >= logging.ERROR
               for handler in logging.getLogger("hase").handlers)


def configure(log_file: Path | None, *, verbose: bool = False, quiet: bool = False) -> None:
    """Sends Hase's log to stderr and, if it can be written, to `log_file` (rotated at 5 MB; three files are kept)."""
    root = logging.getLogger("hase")
    root.setLevel(logging.DEBUG)
    root.propagate = False
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    console = _CurrentStderr()
    console.setLevel(logging.DEBUG if verbose else logging.ERROR if quiet else logging.INFO)
    console.setFormatter(_ConsoleFormatter())
    root.addHandler(console)
    if log_file is None:
        return
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(log_file, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOGS, delay=True)
    except OSError as error:  # a read-only checkout must not stop a prediction
        root.debug("no log file: %s", error)
        return
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root.addHandler(handler)


def progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yields `items` with a progress bar on stderr; without a terminal a line every 15 s, with --quiet nothing."""
    if is_quiet():
        yield from items
        return
    if total is None:
        total = len(items) if hasattr(items, "__len__") else None  # type: ignore[arg-type]
    if sys.stderr.isatty():
        console = rich.console.Console(stderr=True)
        yield from rich.progress.track(items, description, total=total, console=console, transient=True)
        return
    log = get_logger("progress")
    began = logged = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - logged > _PROGRESS_EVERY_S and done:
            logged = now
            eta = f", {(now - began) / done * (total - done):.0f} s left" if total else ""
            log.info("%s: %d%s%s", description, done, f" of {total}" if total else "", eta)
        yield item
