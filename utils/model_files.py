"""The files of a model: its own, and those that hold its weights; and what an exporter wrote into it.

A model itself names the files of its weights. If it named a device or a pipe, whoever opens it might wait for ever; if it named
a path elsewhere, it could read what its author must not see.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import model_errors
from hase.utils.wire_format import BYTES, fields

if TYPE_CHECKING:
    import numpy as np

_EXTERNAL_KEY = b"location"  # the key of the file in which a weight is stored
SEARCHED_BYTES = 1 << 26  # of a file; to search a larger one takes longer than to ask the process that reads it
_ZIP = b"PK"  # how a program of torch begins, which TVM reads too
SHOWN = 200  # characters of a file name in errors
_PACKED_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}  # bits per element
DEEPEST = 16  # graphs within graphs; each of them doubles the time that the analysis takes
DEFAULT_DIMS_KEY = "hase.default_dims"  # metadata of a dynamic model: default sizes, used where the user gives none
GROUP_KEY = "hase.group"  # metadata of every model: the name of its variants, which are held out together
COLLECTION_KEY = "hase.collection"  # metadata of every model: where its architecture comes from, for example `timm`
METADATA_FIELD = 14  # of ModelProto in onnx.proto


def check_plain_file(path: Path, whose: str = "") -> None:
    """Checks that `path` is a plain file or a link to one, with a name that ONNX Runtime can open.

    Args:
        path: the file.
        whose: put before the path in errors.

    Raises:
        UserError: it is missing, or a folder, a device or a pipe, or its name is not UTF-8.
    """
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
        what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
        raise UserError(f"{whose}{path}: this is {what}, a plain file is expected")


def may_name_files(model: Path) -> bool:
    """Whether the ONNX file `model` may name other files. It is not parsed.

    Raises:
        UserError: it is missing or not a plain file.
    """
    check_plain_file(model)
    with model.open("rb") as file:
        if not (size := os.fstat(file.fileno()).st_size) or file.read(len(_ZIP)) == _ZIP:
            return False
        if size > SEARCHED_BYTES:
            return True
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(_EXTERNAL_KEY) >= 0


def external_files(model: Path, proto: onnx.ModelProto, missing_ok: bool = False) -> list[Path]:
    """The files besides its own that hold weights of `proto`, each checked.

    Args:
        model: the file from which `proto` was read; for a model in memory a name without folder: its weights are then in the
            current folder.
        missing_ok: whether files may be missing; they are among the result.

    Raises:
        UserError: a file is outside the model's folder (or a link to such a file), is missing, or is not a plain file.
    """
    paths = []
    for location in sorted({place for tensor in every_tensor(proto) for place in locations(tensor)} - {model.name}):
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
    """A model, in a file or serialised, with all its weights in memory, each of their files checked.

    onnx's own loader refuses files with several names (hard links), as the caches of model hubs and of Hase have them.

    Raises:
        UserError: not an ONNX model, or a file of its weights is missing, not a plain file, outside the model's folder, or too
            short.
    """
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
    """A tensor with its values in memory: the tensor itself if they are there already.

    Args:
        tensor: its values are in it, or in a file that `external_files` has checked.
        folder: of its model.

    Raises:
        UserError: the file is too short, or the tensor is not valid.
    """
    if not locations(tensor):
        return tensor
    path = folder / locations(tensor)[0]
    offset, length = place_in_file(tensor, path)
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(length)
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=content)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """The bytes that a tensor's values take.

    Raises:
        UserError: its type is unknown, or a size is negative.
    """
    try:
        packed = _PACKED_BITS.get(onnx.TensorProto.DataType.Name(tensor.data_type))
        bits = packed or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (ValueError, KeyError):
        raise UserError(f"weight {tensor.name[:SHOWN]} is of an unknown type ({tensor.data_type})") from None
    if min(tensor.dims, default=0) < 0:
        raise UserError(f"weight {tensor.name[:SHOWN]} has a negative size")
    return -(-math.prod(tensor.dims) * bits // 8)


def place_in_file(tensor: onnx.TensorProto, path: Path) -> tuple[int, int]:
    """Where the values of a tensor begin in the file to which it refers, and how many bytes they take.

    Raises:
        UserError: the file is too short, or the tensor is not valid.
    """
    given = next((entry.value for entry in tensor.external_data if entry.key == "offset"), "") or "0"
    try:
        offset, length, there = int(given), tensor_bytes(tensor), path.stat().st_size
    except ValueError:
        raise UserError(f"{path}: weight {tensor.name[:SHOWN]} has the offset {given[:SHOWN]!r}, which is not a number of "
                        "bytes") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if offset < 0 or offset + length > there:
        raise UserError(f"{path}: too short for weight {tensor.name[:SHOWN]}, which takes {length} bytes from {offset} on")
    return offset, length


def array_of(tensor: onnx.TensorProto) -> np.ndarray:
    """The values of a tensor that are in memory.

    Raises:
        UserError: it is damaged: they are not as many as its shape says, or none of its type.
    """
    try:
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, LookupError, OverflowError) as error:  # whatever onnx and numpy meet in them
        raise UserError(f"the model is damaged: its constant {tensor.name[:SHOWN]} of shape {list(tensor.dims)} can't be read "
                        f"({error})") from None


def locations(tensor: onnx.TensorProto) -> list[str]:
    """The files that a tensor names for its values, usually one; none if the values are in the model."""
    if tensor.data_location != tensor.EXTERNAL:
        return []
    locations = [entry.value for entry in tensor.external_data if entry.key == "location"]
    if wrong := [location for location in locations if not isinstance(location, str)]:  # protobuf returns such text as bytes
        raise UserError(f"the model is damaged: its weights lie in {wrong[0][:SHOWN]!r}, which is not UTF-8")
    return locations


def every_tensor(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every constant of a model, including those in attributes, in inner graphs and in functions."""
    yield from tensors_of(proto.graph)
    for function in proto.functions:
        yield from _of_nodes(function.node, 0)


def tensors_of(graph: onnx.GraphProto, depth: int = 0) -> Iterator[onnx.TensorProto]:
    """Every constant of a graph, which lies in `depth` graphs."""
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
                yield from tensors_of(attribute.g, depth + 1)
            for graph in attribute.graphs:
                yield from tensors_of(graph, depth + 1)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in an ONNX file by key; empty where the file is none, or cut short. Takes a millisecond at any size.

    Raises:
        UserError: an entry of it is damaged.
    """
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
