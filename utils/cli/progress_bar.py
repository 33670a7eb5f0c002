"""The progress of a loop, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from utils import logger
from utils.lazy import rich

T = TypeVar("T")
_QUIET_SECONDS = 15.0  # between two progress lines if stderr is not a terminal


def progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yields `items` and shows a progress bar with the time left on stderr (a line every 15 s if that is not a terminal)."""
    if total is None:
        total = len(items) if hasattr(items, "__len__") else None  # type: ignore[arg-type]
    if sys.stderr.isatty():
        console = rich.console.Console(stderr=True)
        yield from rich.progress.track(items, description, total=total, console=console, transient=True)
        return
    log = logger.get_logger("progress")
    began = said = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - said > _QUIET_SECONDS and done:
            said = now
            eta = f", {(now - began) / done * (total - done):.0f} s left" if total else ""
            log.info("%s: %d%s%s", description, done, f" of {total}" if total else "", eta)
        yield item
