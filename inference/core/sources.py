"""The record of a model, from a file, a model in memory, or a record. Each file is analysed once.

Records are kept in the process. Every call checks whether the file, or a file with its weights, changed: by size, times of
change and inode.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hase.ort_analysis.isolated import analysis
from hase.ort_analysis.isolated.analysis import weight_files
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import read_model_record
from hase.utils.errors import UserError
from hase.utils.files import cached, signature
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import onnx

Source: TypeAlias = "str | Path | onnx.ModelProto | ModelRecord"
Precision = Literal["fp16"]  # in which a model may be predicted instead of its own
Signature = tuple[tuple[str, int, int, int, int], ...]
KEPT_FILES = 256  # records held in a process: a few hundred KiB each
_files: dict[Any, tuple[tuple[Path, ...], Signature, ModelRecord]] = {}
# Of each model file, by its signature and whether they may be missing: a model is read at several sizes.
_weights: dict[tuple[Signature, bool], list[Path]] = {}


def record_of(source: Source, wanted: Flavour,
              dims: Mapping[str, int] | None = None, static: bool = False, no_weights: bool = False,
              dtype: Precision | None = None) -> ModelRecord:
    """The record of `source`, of the graph that this machine makes of it.

    Args:
        source: an ONNX file, the JSON file of a record, a model in memory, or a record, which is returned as it is.
        wanted: the graph's device, runtime and level. Its version and instruction set are those of this machine.
        dims: sizes of dynamic dimensions by name.
        static: whether they are fixed before the runtime optimises the model. Some always fix them.
        no_weights: whether files of its weights may be missing.
        dtype: `fp16`: take a model in single precision in half precision.

    Raises:
        UserError: the model can't be read or analysed, a size of 0 leaves nothing to run, or `dims` or `dtype` are given for a
            record, whose shapes and types are fixed.
    """
    if dtype not in (None, "fp16"):
        raise UserError(f"dtype={dtype!r}: a model can be predicted as it is (None), or in half precision (\"fp16\")")
    if dtype and not needs_analysis(source):
        raise UserError("a record's types are fixed, so it can't be predicted in half precision; give the model's file")
    if isinstance(source, (str, Path)):
        record = _record_of_file(Path(source), wanted, dict(dims or {}), static, no_weights, dtype is not None)
    elif isinstance(source, ModelRecord):
        record = source
        _refuse_other_dims(record, dims)
    elif isinstance(source, onnx.ModelProto):
        record = analysis.record_of(source, wanted, dims or {}, static, no_weights=no_weights, half=dtype is not None)
    else:
        raise UserError(f"{type(source).__name__} is not a model: give the path of an ONNX file or of a kernel record, an "
                        "onnx.ModelProto, or a ModelRecord")
    _refuse_empty(record)
    return record


def _refuse_empty(record: ModelRecord) -> None:
    """Refuses sizes of 0 that leave nothing to run. A cache may be empty: its model still has work, and outputs.

    Raises:
        UserError: all outputs are empty, or what most nodes make.
    """
    zero = ", ".join(f"{name}=0" for name, size in record.dims.items() if size == 0)
    if not zero:
        return
    if all(0 in tensor.shape for tensor in record.outputs.values()):
        raise UserError(f"{record.model}: with {zero} every output is empty, so there is nothing to run; give a size of 1 or "
                        "more")
    idle = sum(all(0 in tensor.shape for tensor in record.kernel_of(node).outputs) for node in record.nodes)
    if 2 * idle > len(record.nodes):
        raise UserError(f"{record.model}: with {zero} most of its nodes ({idle} of {len(record.nodes)}) have nothing to do; "
                        "give a size of 1 or more")


def needs_analysis(source: Source) -> bool:
    """Whether `source` is a model, and not a record or the file of one."""
    return Path(source).suffix != ".json" if isinstance(source, (str, Path)) else not isinstance(source, ModelRecord)


def record_otherwise(source: Source, record: ModelRecord, static: bool = False, no_weights: bool = False,
                     dtype: Precision | None = None) -> ModelRecord | None:
    """The record of a model whose Ifs take the branches that its `record` does not assume; None where that assumes none, or
    where there is no model that could be analysed again."""
    dims = record.dims_otherwise
    if not dims or not needs_analysis(source):
        return None
    return record_of(source, record.flavour, dims, static, no_weights, dtype)


def missing_weights(source: Source) -> tuple[Path, ...]:
    """The files of a model's weights that are missing.

    Raises:
        UserError: the model can't be read.
    """
    if not isinstance(source, (str, Path)) or not needs_analysis(source):
        return ()
    return tuple(path for path in _files_of(Path(source), True)[1:] if not path.exists())


def _files_of(path: Path, no_weights: bool) -> tuple[Path, ...]:
    """A model's file and the files of its weights."""
    return (path, *cached(_weights, (_signature((path,)), no_weights), lambda: weight_files(path, no_weights), KEPT_FILES))


def _record_of_file(path: Path, wanted: Flavour, dims: dict[str, int], static: bool, no_weights: bool,
                    half: bool) -> ModelRecord:
    key = (str(path.absolute()), wanted.device, wanted.runtime, wanted.optimization, tuple(sorted(dims.items())), static,
           no_weights, half)
    if kept := _files.get(key):
        watched, before, record = kept
        if _signature(watched) == before:
            return record
        _files.pop(key, None)
    before = _signature((path,))
    if path.suffix == ".json":
        record, watched = read_model_record(path), (path,)
        _refuse_other_dims(record, dims)
    else:
        watched = _files_of(path, no_weights)
        record = analysis.record_of(path, wanted, dims, static, watched[1:], no_weights, half)
    if before == _signature((path,)):  # else the file changed meanwhile: what was read is not kept
        cached(_files, key, lambda: (watched, _signature(watched), record), KEPT_FILES)
    return record


def _refuse_other_dims(record: ModelRecord, dims: Mapping[str, int] | None) -> None:
    differing = {name: size for name, size in (dims or {}).items() if record.dims.get(name) != size}
    if differing:
        raise UserError(f"{record.model}: a record's shapes are fixed, so {', '.join(sorted(differing))} can't be set; "
                        "give the model file instead")


def _signature(paths: tuple[Path, ...]) -> Signature:
    """Of each file, as `hase.utils.files.signature`; one that is missing has none."""
    return tuple(file_signature for path in paths if (file_signature := signature(path)) is not None)
