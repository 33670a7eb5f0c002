"""The process that analyses models, so that a damaged one crashes nothing else (`hase.ort_analysis.isolated.analysis`).

Reads tasks from standard input and writes replies to standard output, one per line, and ends at end of input. By hand:
echo '{"do": "weights", "model": "resnet18.onnx"}' | python -m hase.ort_analysis.isolated.worker
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until everything is imported: none of it is garbage, and looking for some takes a tenth of the time

import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import hase.ort_analysis.graph.analysis  # noqa: F401 - loaded before the first model comes
from hase.ort_analysis.graph.parsing import graph_document, kept_in, parse_graph
from hase.ort_analysis.graph.source import dynamic_names, interface_of, kernel_in, read_source, reading
from hase.ort_analysis.isolated.messages import AnalysisFailure, AnalysisReply, AnalysisTask, AnyPath, LoggedLine
from hase.runtimes import runtime_named
from hase.utils.errors import OpenSizes, UserError
from hase.utils.lazy import onnx, onnxruntime
from hase.utils.model_graphs import weight_files
from hase.utils.ort_sessions import model_errors, open_session
from hase.utils.paths import Workspace
from hase.utils.processes import serve_lines

MOST_BYTES = 64 << 20  # of a reply; the process that asked reads all of it


def record(task: AnalysisTask) -> AnalysisReply:
    if task.flavour is None:
        raise RuntimeError("a record needs a flavour")
    model: Path | onnx.ModelProto = task.model
    if task.in_memory:
        with model_errors("the model in memory"):
            model = onnx.load_from_string(task.model.read_bytes())
    return AnalysisReply(records=(runtime_named(task.runtime).analyze(model, task.flavour, task.dims, task.static),))


def write(task: AnalysisTask) -> AnalysisReply:
    return AnalysisReply(records=tuple(runtime_named(task.runtime).write_records(
        Workspace(task.workspace), task.model, task.device, task.dims, task.static, task.origin)))


def opens(task: AnalysisTask) -> AnalysisReply:
    source = read_source(task.model, task.dims)
    kernel = kernel_in(source.graph_only, str(task.model))
    open_session(source.loadable, task.device, optimize="none" if kernel else "all", dims=source.dims if task.static else {},
                 name=str(task.model))
    return AnalysisReply()


def prepare(task: AnalysisTask) -> AnalysisReply:
    _ = onnx.ModelProto, onnxruntime.InferenceSession  # loads both
    return AnalysisReply()


WORK: dict[str, Callable[[AnalysisTask], AnalysisReply]] = {
    "record": record, "write": write, "opens": opens, "prepare": prepare,
    "sizes": lambda task: AnalysisReply(names=tuple(sorted(dynamic_names(task.model, task.names)))),
    "weights": lambda task: AnalysisReply(files=tuple(weight_files(task.model, task.no_weights))),
    "interface": lambda task: AnalysisReply(interface=interface_of(task.model)),
    "graph": lambda task: AnalysisReply(graph=graph_document(parse_graph(task.model, task.device, task.dims,
                                                                         static=task.static)))}


@contextmanager
def logged() -> Iterator[list[LoggedLine]]:
    """Collects what is logged while the block runs."""
    notes: list[LoggedLine] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(LoggedLine(logger=record.name, level=record.levelno, text=printable(record.getMessage())))

    logger, handler = logging.getLogger("hase"), Collector()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield notes
    finally:
        logger.removeHandler(handler)


def printable(text: str) -> str:
    """A text that UTF-8 can encode: file names may contain other bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def failure_of(error: Exception, task: AnalysisTask) -> AnalysisFailure:
    """An error as a message to the asking process."""
    if isinstance(error, OpenSizes):
        return AnalysisFailure(kind="open", text=printable(error.problem), options=printable(error.options))
    if isinstance(error, UserError):
        return AnalysisFailure(kind="user", text=printable(str(error)))
    if isinstance(error, OSError):
        path: AnyPath | None = Path(os.fsdecode(error.filename)) if error.filename else None
        return AnalysisFailure(kind="system", text=error.strerror or str(error), number=error.errno or 0, path=path)
    if isinstance(error, RecursionError):
        return AnalysisFailure(kind="user", text=f"{task.model}: its graphs are nested too deeply")
    if isinstance(error, MemoryError):
        return AnalysisFailure(kind="user", text=f"{task.model}: does not fit in the memory")
    return AnalysisFailure(kind="bug", text=printable("".join(traceback.format_exception(error))))


def answer(line: bytes) -> str:
    """The reply to a task, both as JSON."""
    task = AnalysisTask.model_validate_json(line)
    kept = kept_in(task.kept) if task.kept else nullcontext()
    with logged() as notes, kept, reading(task.no_weights, task.half):
        try:
            os.chdir(task.folder)
            reply = WORK[task.do](task)
        except Exception as error:  # noqa: BLE001 - the process that asked raises it
            reply = AnalysisReply(failure=failure_of(error, task))
    text = reply.model_copy(update={"notes": tuple(notes)}).model_dump_json()
    if len(text) <= MOST_BYTES + (task.model.stat().st_size if task.model.is_file() else 0):
        return text
    return AnalysisReply(failure=AnalysisFailure(kind="user", text=f"{task.model}: too many nodes")).model_dump_json()


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    serve_lines(answer)
