"""Reads an ONNX model's graph without its large tensors, which stay in their file until needed.

In ONNX a tensor may refer to a part of a file. So a large tensor inside the model's own file becomes a reference to that part,
and the rest is small for any model. ONNX Runtime maps such tensors into memory and reads those that an optimiser needs.

A tensor whose values are missing or do not matter is *hollow*: it refers to a sparse file of zeros.
"""

from __future__ import annotations

import functools
import math
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.model_files import (
    BYTES,
    DEEPEST,
    SHOWN,
    WireField,
    check_plain_file,
    every_tensor,
    external_files,
    fields,
    locations,
    place_in_file,
    tensor_bytes,
    with_contents,
    with_values,
)
from hase.utils.ort_sessions import model_errors

LARGE_BYTES = 1024  # a tensor of more bytes is left in its file
MOST_BYTES = 2**31 - 1  # of a file that ONNX Runtime loads
MOST_TENSOR_BYTES = 1 << 40
MOST_LOADED_BYTES = 1 << 30  # of weights to load into a GPU only for its graph: a session loads all before it saves the graph
ZEROS = "hase.zeros"  # the name of the file to which hollow tensors refer
# The messages that may hold tensors: by the number of a field, the message in it (onnx.proto).
HOLDS = {
    "model": {7: "graph", 25: "function"}, "graph": {1: "node", 5: "tensor"}, "function": {7: "node"},
    "node": {5: "attribute"}, "attribute": {6: "graph", 11: "graph"}, "Constant": {5: "constant"}, "constant": {5: "tensor"},
}
OP_TYPE = 4  # of a node
# The fields of a tensor that hold numbers as they are in memory, and the type for which each does; "": for all types.
PLAIN_DATA = {9: "", 4: "FLOAT", 10: "DOUBLE"}


@functools.cache
def root() -> Path:
    """The folder to which tensor locations are relative: the root folder of the drive of temporary files."""
    return Path(Path(tempfile.gettempdir()).absolute().anchor)


def at_root() -> dict[str, str]:
    """The session entry that makes a model in memory find its tensors relative to `root()`."""
    return {"session.model_external_initializers_file_folder_path": str(root())}


def read_graph(model: Path, missing_ok: bool = False) -> onnx.ModelProto:
    """Reads an ONNX file; large tensors refer to parts of files relative to `root()`, small ones are in memory. With
    `missing_ok`, tensors in missing files of weights become hollow; it is an error if shapes may depend on them."""
    proto = read_as_written(model)
    find_tensors(proto, model, missing_ok)
    return proto


def read_saved(path: Path) -> onnx.ModelProto:
    """Like `read_graph`, for a graph that a session saved: its tensors are in their old files, in the new one, or beside it."""
    proto = read_as_written(path)
    for tensor in every_tensor(proto):
        for file in (path, weights_beside(path)):
            if locations(tensor) == [file.name]:
                refer(tensor, location_of(file), *place_in_file(tensor, file))
    return proto


def weights_beside(path: Path) -> Path:
    """The file beside a graph in which a session may save weights."""
    return path.with_name(f"{path.name}.weights")


def weight_files(model: Path, missing_ok: bool = False) -> list[Path]:
    """The checked files with weights of an ONNX file, besides its own; with `missing_ok` including missing ones."""
    return external_files(model, read_as_written(model), missing_ok)


def find_tensors(proto: onnx.ModelProto, model: Path, missing_ok: bool = False) -> None:
    """Changes `proto` so that large tensors in files refer to parts of files relative to `root()`; small ones are read. For a
    model in memory, `model` is a name without a folder."""
    external_files(model, proto, missing_ok)
    for tensor in every_tensor(proto):
        for location in locations(tensor):
            path = model.parent / location
            if missing_ok and not path.exists():
                _check_not_needed(tensor, path)
                hollow(tensor)
                continue
            offset, length = place_in_file(tensor, path)
            if length > LARGE_BYTES and can_be_named(path.absolute()):
                refer(tensor, location_of(path), offset, length)
            else:
                tensor.CopyFrom(with_values(tensor, model.parent))


def _check_not_needed(tensor: onnx.TensorProto, path: Path) -> None:
    """Checks that shapes and fusions don't need a missing tensor's values: it is large, or not a scalar, indices or conditions.
    """
    types = onnx.TensorProto
    may_matter = math.prod(tensor.dims) <= 1 or tensor.data_type in (types.INT32, types.INT64, types.BOOL)
    if may_matter and tensor_bytes(tensor) <= LARGE_BYTES:
        raise UserError(f"{path}: no such file; what the model computes depends on its {tensor.name[:SHOWN]}, so that nothing "
                        "can be said without it")


def can_be_named(path: Path) -> bool:
    """Whether a model can refer to an absolute path: UTF-8, and on the drive of temporary files."""
    try:
        return bool(str(path).encode()) and path.anchor == root().anchor
    except UnicodeEncodeError:
        return False


def location_of(path: Path) -> str:
    """The path of a file, relative to `root()`."""
    return str(path.absolute().relative_to(root()))


def refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Makes a tensor refer to values in a file."""
    for name in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data", "external_data"):
        tensor.ClearField(name)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=text)


def hollow(tensor: onnx.TensorProto) -> None:
    """Makes a tensor hollow: zeros of the same type and shape. `put_zeros` creates their file."""
    refer(tensor, ZEROS, 0, tensor_bytes(tensor))


def bytes_in_files(proto: onnx.ModelProto) -> int:
    """The bytes of a model's tensors in files; a part that is referenced twice counts twice."""
    return sum(tensor_bytes(tensor) for tensor in every_tensor(proto) if locations(tensor))


def is_hollow(tensor: onnx.TensorProto) -> bool:
    return any(Path(location).name == ZEROS for location in locations(tensor))


def put_zeros(proto: onnx.ModelProto, folder: Path) -> None:
    """Makes a model's hollow tensors refer to a file of zeros in a folder; creates or extends the file."""
    path = folder / ZEROS
    tensors = list(filter(is_hollow, every_tensor(proto)))
    for tensor in tensors:
        refer(tensor, location_of(path), 0, tensor_bytes(tensor))
    needed = max(map(tensor_bytes, tensors), default=0)
    if needed > MOST_TENSOR_BYTES:
        raise UserError(f"the model has a weight of {needed / 2**40:.3g} TiB")
    if needed > (path.stat().st_size if path.exists() else 0):
        with path.open("ab") as file:
            file.truncate(needed)


def values_of(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """A tensor of a graph that `read_graph` read, with its values in memory."""
    return with_values(tensor, root())


def read_as_written(model: Path) -> onnx.ModelProto:
    """The model in a file. Its large tensors refer to parts of that file; tensors in other files are left unchanged."""
    check_plain_file(model)
    if model.stat().st_size > MOST_BYTES:
        raise UserError(f"{model}: larger than 2 GiB, which no ONNX file may be; save the model with its weights in a separate "
                        "file")
    with model_errors(str(model)):
        return onnx.ModelProto.FromString(_without_large_tensors(model))


def _without_large_tensors(model: Path) -> bytes:
    """The contents of an ONNX file with large tensors replaced by references into the file."""
    if not model.stat().st_size:
        return b""
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        try:
            return b"".join(_shortened(view, 0, len(view), "model", model.name, 0))
        except ValueError:  # damaged: let protobuf say so
            return bytes(view)


def _shortened(content: memoryview, begin: int, end: int, kind: str, location: str, depth: int) -> Iterator[bytes]:
    """The parts of a message without the values of its large tensors; `depth` is its nesting level. Raises ValueError if there
    is no message."""
    copied = begin
    if kind == "node" and any(part.number == OP_TYPE and content[part.contents:part.end] == b"Constant"
                              for part in fields(content, begin, end)):
        kind = "Constant"
    holds = HOLDS[kind]
    for part in fields(content, begin, end):
        inner = holds.get(part.number) if part.wire == BYTES else None
        if inner is None or part.end - part.contents <= LARGE_BYTES or depth > DEEPEST:
            continue
        if inner == "tensor":
            shortened = _reference(content, part.contents, part.end, location)
        else:
            shortened = b"".join(_shortened(content, part.contents, part.end, inner, location, depth + (inner == "graph")))
        yield bytes(content[copied:part.begin])
        yield with_contents(part.number, shortened)
        copied = part.end
    yield bytes(content[copied:end])


def _reference(content: memoryview, begin: int, end: int, location: str) -> bytes:
    """A tensor in a file as a reference to its values there; unchanged if it has few values, or fewer than its shape needs.
    Raises ValueError if there is no message."""
    description: list[WireField] = []
    data: list[WireField] = []
    for part in fields(content, begin, end):
        (data if part.wire == BYTES and part.number in PLAIN_DATA else description).append(part)
    tensor = onnx.TensorProto.FromString(b"".join(bytes(content[part.begin:part.end]) for part in description))
    if len(data) == 1 and not locations(tensor):
        kind, length = PLAIN_DATA[data[0].number], data[0].end - data[0].contents
        try:
            fits = length == tensor_bytes(tensor) and kind in ("", onnx.TensorProto.DataType.Name(tensor.data_type))
        except (UserError, ValueError):  # an unknown type, which is found later
            fits = False
        if fits and length > LARGE_BYTES:
            refer(tensor, location, data[0].contents, length)
            return bytes(tensor.SerializeToString())
    return bytes(content[begin:end])
