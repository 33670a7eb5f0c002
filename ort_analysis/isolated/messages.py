"""What the process that asks about models and the child that takes them apart (`hase.ort_analysis.isolated.worker`) send each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote_from_bytes, unquote_to_bytes

from pydantic import PlainSerializer, PlainValidator

from hase.records.interface import Interface
from hase.records.kernel_record import ModelOrigin, ModelRecord
from hase.utils.errors import OpenSizes, UserError
from hase.utils.fingerprint import Flavour
from hase.utils.frozen import Frozen

AS_THE_FILE_SAYS = ModelOrigin()

# JSON is UTF-8, and the name of a file need not be.
AnyPath = Annotated[Path, PlainSerializer(lambda path: quote_from_bytes(os.fsencode(path))), PlainValidator(
    lambda text: Path(os.fsdecode(unquote_to_bytes(text))) if isinstance(text, str) else text)]


class Task(Frozen):
    """What the child is asked to do with a model.

    Attributes:
        do: `record` takes it apart, `write` also writes its records, `sizes` says which `names` are dynamic dimensions of it,
            `weights` names the files of its weights, `interface` reads its inputs and outputs, `graph` describes the graph that
            ONNX Runtime runs, `opens` checks that ONNX Runtime loads it; `prepare` only loads what the others need.
        folder: the current folder, from which paths and the weights of a model in memory are found.
        model: its file.
        in_memory: the file only holds a model in memory.
        runtime: its name.
        flavour: of the record.
        device: `cpu`, `cuda` or, for a graph, `auto`.
        workspace, origin: for `write`, where to and what `Runtime.write_records` takes.
        dims, static: sizes of its dynamic dimensions, and whether they are fixed before it is optimised.
        names: for `sizes`.
        kept: the folder of optimised graphs that are used again (see `optimized_once`); None: none are kept.
        no_weights: whether files of its weights may be missing.
        half: whether it is read in half precision (`hase.ort_analysis.graph.half_precision`).
    """

    do: Literal["record", "write", "sizes", "weights", "interface", "graph", "opens", "prepare"]
    folder: AnyPath = Path()
    model: AnyPath = Path()
    in_memory: bool = False
    runtime: str = ""
    flavour: Flavour | None = None
    workspace: AnyPath = Path()
    device: str = ""
    origin: ModelOrigin = AS_THE_FILE_SAYS
    dims: dict[str, int] = {}
    static: bool = False
    names: tuple[str, ...] = ()
    kept: AnyPath | None = None
    no_weights: bool = False
    half: bool = False


class Note(Frozen):
    """A line of the child's log: the logger's name, the level, and the text."""

    logger: str
    level: int
    text: str


class Failure(Frozen):
    """Why the child has no answer.

    Attributes:
        kind: `user` is a `UserError`, `open` an `OpenSizes`, `system` an `OSError`, `bug` anything else.
        text: the message; of a bug its traceback.
        options: of an `OpenSizes`.
        number, path: of an `OSError`.
    """

    kind: Literal["user", "open", "system", "bug"]
    text: str
    options: str = ""
    number: int = 0
    path: AnyPath | None = None

    def exception(self) -> Exception:
        """The exception that is raised in place of the child's."""
        if self.kind == "user":
            return UserError(self.text)
        if self.kind == "open":
            return OpenSizes(self.text, self.options)
        if self.kind == "system":
            return OSError(self.number, self.text, str(self.path) if self.path else None)
        return RuntimeError(f"the process that analyses models met a bug:\n{self.text}")


class Reply(Frozen):
    """What the child found: records, an interface, a graph, names or files, as asked; what it logged; and why it failed, if it
    did."""

    records: tuple[ModelRecord, ...] = ()
    interface: Interface | None = None
    graph: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    files: tuple[AnyPath, ...] = ()
    notes: tuple[Note, ...] = ()
    failure: Failure | None = None
