"""Messages between a process that asks about models and the child that analyses them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote_from_bytes, unquote_to_bytes

from pydantic import PlainSerializer, PlainValidator

from hase.records.kernel_record import Interface, ModelOrigin, ModelRecord
from hase.utils.config import Frozen
from hase.utils.errors import OpenSizes, UserError
from hase.utils.fingerprint import Flavour

AS_THE_FILE_SAYS = ModelOrigin()

# JSON is UTF-8, and the name of a file need not be.
AnyPath = Annotated[Path, PlainSerializer(lambda path: quote_from_bytes(os.fsencode(path))), PlainValidator(
    lambda text: Path(os.fsdecode(unquote_to_bytes(text))) if isinstance(text, str) else text)]


class AnalysisTask(Frozen):
    """The task of the child for one model."""

    # `record` analyses it, `write` also writes its records, `sizes` says which `names` are dynamic dimensions of it,
    # `weights` names the files of its weights, `interface` reads its inputs and outputs, `graph` describes the graph that
    # ONNX Runtime runs, `opens` checks that ONNX Runtime loads it; `prepare` only loads what the others need
    do: Literal["record", "write", "sizes", "weights", "interface", "graph", "opens", "prepare"]
    folder: AnyPath = Path()  # the current folder, from which paths and the weights of a model in memory are found
    model: AnyPath = Path()  # its file
    in_memory: bool = False  # the file only holds a model in memory
    runtime: str = ""  # its name
    flavour: Flavour | None = None  # of the record
    workspace: AnyPath = Path()  # workspace, origin: for `write`, where to and what `Runtime.write_records` takes
    device: str = ""  # `cpu`, `cuda` or, for a graph, `auto`
    origin: ModelOrigin = AS_THE_FILE_SAYS
    # dims, static: sizes of its dynamic dimensions, and whether they are fixed before it is optimised
    dims: dict[str, int] = {}
    static: bool = False
    names: tuple[str, ...] = ()  # for `sizes`
    # the folder of cached optimised graphs (see `optimized_once`); None: no cache
    kept: AnyPath | None = None
    no_weights: bool = False  # whether files of its weights may be missing
    half: bool = False  # whether it is read in half precision (`hase.ort_analysis.graph.source`)


class LoggedLine(Frozen):
    """A line of the child's log: the logger's name, the level, and the text."""

    logger: str
    level: int
    text: str


class AnalysisFailure(Frozen):
    """Why the child has no answer."""

    # `user` is a `UserError`, `open` an `OpenSizes`, `system` an `OSError`, `bug` anything else
    kind: Literal["user", "open", "system", "bug"]
    text: str  # the message; of a bug its traceback
    options: str = ""  # of an `OpenSizes`
    number: int = 0  # number, path: of an `OSError`
    path: AnyPath | None = None

    def exception(self) -> Exception:
        """The exception to raise in place of the child's."""
        if self.kind == "user":
            return UserError(self.text)
        if self.kind == "open":
            return OpenSizes(self.text, self.options)
        if self.kind == "system":
            return OSError(self.number, self.text, str(self.path) if self.path else None)
        return RuntimeError(f"the process that analyses models met a bug:\n{self.text}")


class AnalysisReply(Frozen):
    """The child's results (records, interface, graph, names or files, as asked), log lines, and failure."""

    records: tuple[ModelRecord, ...] = ()
    interface: Interface | None = None
    graph: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    files: tuple[AnyPath, ...] = ()
    notes: tuple[LoggedLine, ...] = ()
    failure: AnalysisFailure | None = None
