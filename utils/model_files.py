"""Which files a model is made of: its own, and those that hold its weights. None is opened that is no plain file, and none
outside the model's folder.

A model names the files of its weights itself. One that names a device or a pipe would have whoever opens it wait for ever, and
one that names a path elsewhere would read what its author has no right to.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import UserError
from utils.ort_sessions import model_errors

if TYPE_CHECKING:
    import onnx

_EXTERNAL_KEY = b"location"  # what an ONNX file says where a weight lies in another file
SHOWN = 200  # characters of a place in errors
DEEPEST = 100  # graphs within graphs; protobuf reads no deeper either


def check_plain_file(path: Path, whose: str = "") -> None:
    """Whether `path` is a plain file (or a link to one).

    Args:
        path: the file.
        whose: put before the path in errors.

    Raises:
        UserError: it is missing, or a folder, a device or a pipe.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{whose}{path}: no such file") from None
    except (OSError, ValueError) as error:  # the second: a name that no file can have
        raise UserError(f"{whose}{path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
        raise UserError(f"{whose}{path}: this is {what}, a plain file is expected")


def weight_files(model: Path) -> list[Path]:
    """The files beside the ONNX file `model` that hold its weights, each checked; `model` is parsed only if it may name any.

    Raises:
        UserError: as `check_plain_file`, also of `model` itself; no ONNX model; or a file outside the model's folder.
    """
    check_plain_file(model)
    with model.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(_EXTERNAL_KEY) < 0:
                return []
    import onnx

    with model_errors(str(model)):
        return external_files(model, onnx.load(str(model), load_external_data=False))


def external_files(model: Path, proto: onnx.ModelProto) -> list[Path]:
    """The files beside `model` that hold weights of `proto`, each checked.

    Args:
        model: the file that `proto` was read from; a name without folder for a model in memory, whose weights lie in the
            current folder.

    Raises:
        UserError: one lies outside the model's folder (or is a link to such a file), is missing, or is no plain file.
    """
    found = []
    for location in sorted({place for tensor in _tensors(proto) for place in _locations(tensor)}):
        path = model.parent / location
        try:
            beside = (model.parent.resolve(), model.resolve().parent)  # a link's weights may lie beside it or its model
            inside = any(path.resolve().is_relative_to(folder) for folder in beside) and not Path(location).is_absolute()
            there = path.exists()
        except (OSError, RuntimeError, ValueError):  # a name that no file can have, or links in a circle
            inside, there = True, False
        if not inside:
            raise UserError(f"{model}: refused: it says that its weights lie in {location[:SHOWN]!r}, outside its own folder; "
                            "use models from sources that you trust, with their weights beside them")
        if not there:
            raise UserError(f"{model}: its weights lie in {location[:SHOWN]}, which is missing from {model.parent}")
        check_plain_file(path, f"{model}: its weights lie in ")
        found.append(path)
    return found


def _locations(tensor: onnx.TensorProto) -> list[str]:
    """Where the tensor says that its values lie; nothing where they lie in the model. Usually there is one place."""
    if tensor.data_location != tensor.EXTERNAL:
        return []
    return [entry.value for entry in tensor.external_data if entry.key == "location"]


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every constant of a model, also those in attributes, in graphs within it and in its functions."""
    yield from _of_graph(proto.graph, 0)
    for function in proto.functions:
        yield from _of_nodes(function.node, 0)


def _of_graph(graph: onnx.GraphProto, depth: int) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node, depth)


def _of_nodes(nodes: Any, depth: int) -> Iterator[onnx.TensorProto]:
    if depth > DEEPEST:
        raise UserError(f"the model holds graphs within graphs more than {DEEPEST} deep")
    for node in nodes:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            if attribute.HasField("g"):
                yield from _of_graph(attribute.g, depth + 1)
            for graph in attribute.graphs:
                yield from _of_graph(graph, depth + 1)
