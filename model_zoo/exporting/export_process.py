"""Runs the exporter in its own process, where a crash costs one model, and reports what was written."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from hase.model_zoo.exporting.onnx_export import Exporter, short
from hase.model_zoo.exporting.zoo_config import Export
from hase.utils import cli, logger
from hase.utils.errors import UserError
from hase.utils.paths import Workspace
from hase.utils.processes import begin_child, exit_cause

STOP_SECONDS = 10.0

log = logger.get_logger("exporter")
SHOWN = ("model", "file", "status", "mb", "difference")


class ExportProcess:
    """An Exporter in another process, which starts at the first request, and again after a crash. Use as a context manager."""

    def __init__(self, workspace: Workspace, device: str, force: bool) -> None:
        self._workspace, self._made_with = workspace, (workspace, device, force)
        self._process: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> ExportProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop(STOP_SECONDS if kind is None else 0.0)

    def stop(self, patience_s: float = 0.0) -> None:
        """Ends the process, which first removes its unfinished files. The next request starts another one.

        Args:
            patience_s: for a process that is idle to end by itself, so that it leaves no semaphores behind.
        """
        if self._connection is not None:
            self._connection.close()
            self._process.join(patience_s)
            self._process.terminate()
            self._process.join(STOP_SECONDS)
            self._process.kill()
            self._process.join()
        self._process, self._connection = None, None

    def check_names(self, names: Iterable[str]) -> None:
        """Checks that torchvision has these models.

        Raises:
            UserError: it lacks one.
        """
        self._ask("check_names", tuple(names))

    def write(self, export: Export) -> list[dict[str, Any]]:
        """Writes the files of one export, or keeps existing ones. Returns one row per file, for the report.

        Raises:
            UserError: the export failed, or its process crashed.
        """
        try:
            rows: list[dict[str, Any]] = self._ask("write", export)
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.stop()
            for left in self._workspace.models.glob(f".{export.stem}.*.tmp.onnx"):
                left.unlink(missing_ok=True)
            if code == -signal.SIGKILL:
                raise UserError("the exporting process was killed, most likely for lack of memory: "
                                "try a smaller batch or image size") from None
            raise UserError(f"torch or ONNX Runtime crashed while exporting it ({exit_cause(code)})") from None
        return rows

    def _ask(self, request: str, argument: Any) -> Any:
        """The answer to a request. An error in the process is raised here.

        Raises:
            EOFError: the process crashed.
        """
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            handlers = logging.getLogger("hase").handlers
            quiet = all(handler.level > logging.INFO for handler in handlers if not isinstance(handler, logging.FileHandler))
            self._process = context.Process(target=_serve, args=(theirs, self._made_with, quiet), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._connection.send((request, argument))
            answer = self._connection.recv()
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(connection: Connection, made_with: tuple[Workspace, str, bool], quiet: bool) -> None:
    """Answers requests until the other end is closed, which also happens when that process ends."""
    begin_child()
    logger.configure(made_with[0].log_file, quiet=quiet)
    exporter = Exporter(*made_with)
    while True:
        try:
            request, argument = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(exporter, request)(argument)
        except UserError as error:
            answer = error
        except OSError as error:
            log.debug("%s", argument, exc_info=True)
            answer = error if cli.user_can_mend(error) else UserError(short(error))
        except Exception as error:  # whatever fails for one model, the others go on
            log.debug("%s", argument, exc_info=True)
            answer = UserError(short(error))
        connection.send(answer)


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
