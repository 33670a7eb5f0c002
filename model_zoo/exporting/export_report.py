"""The report of an exporter: a row per file, how many were written, and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils import cli
from utils.logger import get_logger

log = get_logger("exporter")
SHOWN = ("model", "file", "status", "mb", "difference")


def report(rows: Sequence[dict[str, Any]], folder: Path, as_json: bool) -> int:
    """Prints the rows and logs the counts.

    Args:
        rows: of the files: SHOWN, and `error`; the status is `written`, `kept` or `failed`.
        folder: of the files.

    Returns:
        The exit code: 1 if a file failed.
    """
    if as_json:
        cli.print_json(rows)
    else:
        cli.print_table([{key: row[key] for key in SHOWN} | {"file": Path(row["file"]).name} for row in rows], "models")
    failed = [Path(row["file"]).stem for row in rows if row["status"] == "failed"]
    counts = {status: sum(row["status"] == status for row in rows) for status in ("written", "kept", "failed")}
    log.info("%s in %s%s", ", ".join(f"{count} {status}" for status, count in counts.items() if count), folder,
             f"; failed: {', '.join(failed)}" if failed else "")
    return 1 if failed else 0
