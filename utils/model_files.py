"""The files of an ONNX model: weights in other files, protobuf encoding, and the exporter's metadata.

A model names the files of its weights, so the names are checked. Opening a device or a pipe could block for ever, and a path
outside the model's folder could read secret files.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import model_errors

if TYPE_CHECKING:
    import numpy as np


_EXTERNAL_KEY = b"location"  # the key of the file in which a weight is stored
SEARCHED_BYTES = 1 << 26  # largest file that is searched; beyond it, asking the process that reads the file is faster
_ZIP = b"PK"  # first bytes of a torch program, which TVM reads too
SHOWN = 200  # characters of a file name in errors
_PACKED_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}  # bits per element
DEEPEST = 16  # nested graphs; each level doubles the time of the analysis
DEFAULT_DIMS_KEY = "hase.default_dims"  # metadata of a dynamic model: default sizes, used where the user gives none
GROUP_KEY = "hase.group"  # metadata of every model: common name of its variants, which are held out together
COLLECTION_KEY = "hase.collection"  # metadata of every model: source of its architecture, e.g. `timm`
METADATA_FIELD = 14  # of ModelProto in onnx.proto
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5  # wire types
FIXED_BYTES = {FIXED_64: 8, FIXED_32: 4}
LONGEST_VARINT = 10  # bytes


def check_plain_file(path: Path, whose: str = "") -> None:
    """Checks that `path` is a plain file, or a link to one, that ONNX Runtime can open; errors begin with `whose`."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{whose}{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UserError(f"{whose}{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{whose}{path}: its name is not UTF-8, and ONNX Runtime opens no such file; rename it") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
        raise UserError(f"{whose}{path}: this is {kind}, a plain file is expected")


def may_name_files(model: Path) -> bool:
    """Whether the ONNX file `model` may name other files. It is not parsed."""
    check_plain_file(model)
    with model.open("rb") as file:
        if not (size := os.fstat(file.fileno()).st_size) or file.read(len(_ZIP)) == _ZIP:
            return False
        if size > SEARCHED_BYTES:
            return True
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(_EXTERNAL_KEY) >= 0


def external_files(model: Path, proto: onnx.ModelProto, missing_ok: bool = False) -> list[Path]:
    """The checked files with weights of `proto`, besides its own file `model`. For a model in memory, `model` is a name without
    a folder, and its weights are in the current folder. With `missing_ok` the result may contain missing files."""
    paths = []
    for location in sorted({location for tensor in every_tensor(proto) for location in locations(tensor)} - {model.name}):
        path = model.parent / location
        try:
            folders = (model.parent.resolve(), model.resolve().parent)  # a link's folder, and its target's
            inside = any(path.resolve().is_relative_to(folder) for folder in folders) and not Path(location).is_absolute()
            exists = path.exists()
        except (OSError, RuntimeError, ValueError):  # a name that no file can have, or links in a circle
            inside, exists = True, False
        if not inside:
            raise UserError(f"{model}: refused: it says that its weights lie in {location[:SHOWN]!r}, outside its own folder; "
                            "use models from sources that you trust, with their weights in the same folder")
        if not exists and not missing_ok:
            raise UserError(f"{model}: its weights lie in {location[:SHOWN]}, which is missing from {model.parent}; "
                            "predictions can do without them (--no-weights)")
        if exists:
            check_plain_file(path, f"{model}: its weights lie in ")
        paths.append(path)
    return paths


def read_whole_model(model: Path | bytes) -> onnx.ModelProto:
    """Reads a model, from a file or bytes, with all its weights in memory, after checking their files. onnx's own loader
    refuses files with several names (hard links), which the caches of model hubs and of Hase contain."""
    if isinstance(model, bytes):
        return onnx.load_from_string(model)
    with model_errors(str(model)):
        proto = onnx.load(str(model), load_external_data=False)
    external_files(model, proto)
    for tensor in every_tensor(proto):
        if locations(tensor):
            tensor.CopyFrom(with_values(tensor, model.parent))
    return proto


def with_values(tensor: onnx.TensorProto, folder: Path) -> onnx.TensorProto:
    """A tensor with its values in memory, read if needed from a file that `external_files` has checked."""
    if not locations(tensor):
        return tensor
    path = folder / locations(tensor)[0]
    offset, length = place_in_file(tensor, path)
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(length)
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=content)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """The bytes that a tensor's values take."""
    try:
        packed = _PACKED_BITS.get(onnx.TensorProto.DataType.Name(tensor.data_type))
        bits = packed or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (ValueError, KeyError):
        raise UserError(f"weight {tensor.name[:SHOWN]} is of an unknown type ({tensor.data_type})") from None
    if min(tensor.dims, default=0) < 0:
        raise UserError(f"weight {tensor.name[:SHOWN]} has a negative size")
    return -(-math.prod(tensor.dims) * bits // 8)


def place_in_file(tensor: onnx.TensorProto, path: Path) -> tuple[int, int]:
    """The offset of a tensor's values in the file to which it refers, and their length in bytes."""
    written = next((entry.value for entry in tensor.external_data if entry.key == "offset"), "") or "0"
    try:
        offset, length, file_bytes = int(written), tensor_bytes(tensor), path.stat().st_size
    except ValueError:
        raise UserError(f"{path}: weight {tensor.name[:SHOWN]} has the offset {written[:SHOWN]!r}, which is not a number of "
                        "bytes") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if offset < 0 or offset + length > file_bytes:
        raise UserError(f"{path}: too short for weight {tensor.name[:SHOWN]}, which takes {length} bytes from {offset} on")
    return offset, length


def tensor_array(tensor: onnx.TensorProto) -> np.ndarray:
    """The values of a tensor that are in memory."""
    try:
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, LookupError, OverflowError) as error:  # any damage that onnx and numpy find
        raise UserError(f"the model is damaged: its constant {tensor.name[:SHOWN]} of shape {list(tensor.dims)} can't be read "
                        f"({error})") from None


def locations(tensor: onnx.TensorProto) -> list[str]:
    """The files that a tensor names for its values, usually one; none if the values are in the model."""
    if tensor.data_location != tensor.EXTERNAL:
        return []
    names = [entry.value for entry in tensor.external_data if entry.key == "location"]
    if undecoded := [name for name in names if not isinstance(name, str)]:  # protobuf returns text that is not UTF-8 as bytes
        raise UserError(f"the model is damaged: its weights lie in {undecoded[0][:SHOWN]!r}, which is not UTF-8")
    return names


def every_tensor(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every constant of a model, including those in attributes, in inner graphs and in functions."""
    yield from graph_tensors(proto.graph)
    for function in proto.functions:
        yield from _tensors_of_nodes(function.node, 0)


def graph_tensors(graph: onnx.GraphProto, depth: int = 0) -> Iterator[onnx.TensorProto]:
    """Every constant of a graph; `depth` is its nesting level."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _tensors_of_nodes(graph.node, depth)


def _tensors_of_nodes(nodes: Any, depth: int) -> Iterator[onnx.TensorProto]:
    if depth > DEEPEST:
        raise UserError(f"the model holds graphs within graphs more than {DEEPEST} deep")
    for node in nodes:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            if attribute.HasField("g"):
                yield from graph_tensors(attribute.g, depth + 1)
            for graph in attribute.graphs:
                yield from graph_tensors(graph, depth + 1)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in an ONNX file by key; empty if there is none or the file is cut short. Takes 1 ms at any file size."""
    if not path.stat().st_size:
        return {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        try:
            parts = [bytes(view[part.contents:part.end]) for part in fields(view, 0, len(view))
                     if part.number == METADATA_FIELD and part.wire == BYTES]
        except ValueError:
            return {}
    with model_errors(str(path)):
        entries = [onnx.StringStringEntryProto.FromString(part) for part in parts]
        return {entry.key: entry.value for entry in entries}


class WireField(NamedTuple):
    """A field of a protobuf message: its number, wire type, start, and the start and end of its contents."""

    number: int
    wire: int
    begin: int
    contents: int
    end: int


def fields(content: memoryview, begin: int, end: int) -> Iterator[WireField]:
    """The fields of the message between two offsets. Raises ValueError if there is none."""
    index = begin
    while index < end:
        tag, contents = _varint(content, index, end)
        wire = tag & 7
        if wire == VARINT:
            stop = _varint(content, contents, end)[1]
        elif wire == BYTES:
            size, contents = _varint(content, contents, end)
            stop = contents + size
        elif wire in FIXED_BYTES:
            stop = contents + FIXED_BYTES[wire]
        else:
            raise ValueError(f"wire type {wire}")
        if stop > end:
            raise ValueError("cut short")
        yield WireField(tag >> 3, wire, index, contents, stop)
        index = stop


def _varint(content: memoryview, index: int, end: int) -> tuple[int, int]:
    """Reads a protobuf varint (seven bits per byte, lowest first); returns the number and the index after it."""
    value = 0
    for count in range(min(LONGEST_VARINT, end - index)):
        byte = content[index + count]
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, index + count + 1
    raise ValueError("cut short")


def varint(number: int) -> bytes:
    """A non-negative number as a protobuf varint."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def with_contents(number: int, contents: bytes) -> bytes:
    """A protobuf field that holds these bytes."""
    return varint(number << 3 | BYTES) + varint(len(contents)) + contents
