"""Checks the arguments of a prediction, and analyses its model (a file, a model in memory, or a record) into a record.

Each file is analysed once per process; every call checks whether the file, or a file with its weights, changed (size, times of
change, inode).
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from hase.ort_analysis.isolated import analysis
from hase.ort_analysis.isolated.analysis import own_names, weight_files
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import read_model_record
from hase.utils.errors import UserError
from hase.utils.files import Signature, cached, signature
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import onnx
from hase.utils.paths import Workspace

Source: TypeAlias = "str | Path | onnx.ModelProto | ModelRecord"
Precision = Literal["fp16"]  # the precisions that a model can be converted to
Signatures: TypeAlias = tuple[Signature, ...]
KEPT_FILES = 256  # cached records; a few hundred KiB each
_files: dict[Any, tuple[tuple[Path, ...], Signatures, ModelRecord]] = {}
# Weight files of each model, by its signature and `no_weights`, since a model is read at several sizes.
_weights: dict[tuple[Signatures, bool], list[Path]] = {}
SHOWN_CHARACTERS = 60  # of a wrong value in an error
LARGEST_SIZE = 2**63 - 1  # ONNX's limit
FREE_CALLS = 300  # nested calls that a prediction may need, mostly for imports


def source_record(source: Source, wanted: Flavour, dims: Mapping[str, int] | None = None, static: bool = False,
                  no_weights: bool = False, dtype: Precision | None = None) -> ModelRecord:
    """The record of the graph that this machine's runtime makes of `source`. A record is returned unchanged.

    Args:
        wanted: the graph's device, runtime and level. Its version and instruction set are those of this machine.
        static: fix the sizes `dims` before the runtime optimises the model. Some runtimes always do.
        no_weights: files of its weights may be missing.
        dtype: `fp16` converts a single-precision model to half precision.

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
    """Raises UserError if sizes of 0 leave nothing to run: all outputs are empty, or the outputs of most nodes. An empty cache
    is allowed, since its model still has work and outputs.
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
    """Whether `source` is a model and not a record."""
    return Path(source).suffix != ".json" if isinstance(source, (str, Path)) else not isinstance(source, ModelRecord)


def other_branches_record(source: Source, record: ModelRecord, static: bool = False, no_weights: bool = False,
                          dtype: Precision | None = None) -> ModelRecord | None:
    """The record for the branches of Ifs that `record` does not assume; None without such Ifs, or if `source` is a record."""
    dims = record.dims_otherwise
    if not dims or not needs_analysis(source):
        return None
    return source_record(source, record.flavour, dims, static, no_weights, dtype)


def missing_weights(source: Source) -> tuple[Path, ...]:
    """The missing files of a model's weights. Raises UserError: the model can't be read."""
    if not isinstance(source, (str, Path)) or not needs_analysis(source):
        return ()
    return tuple(path for path in _files_of(Path(source), True)[1:] if not path.exists())


def _files_of(path: Path, no_weights: bool) -> tuple[Path, ...]:
    """A model's file and the files of its weights."""
    return (path, *cached(_weights, (_signatures((path,)), no_weights), lambda: weight_files(path, no_weights), KEPT_FILES))


def _record_of_file(path: Path, wanted: Flavour, dims: dict[str, int], static: bool, no_weights: bool,
                    half: bool) -> ModelRecord:
    key = (str(path.absolute()), wanted.device, wanted.runtime, wanted.optimization, tuple(sorted(dims.items())), static,
           no_weights, half)
    if kept := _files.get(key):
        watched, before, record = kept
        if _signatures(watched) == before:
            return record
        _files.pop(key, None)
    before = _signatures((path,))
    if path.suffix == ".json":
        record, watched = read_model_record(path), (path,)
        _refuse_other_dims(record, dims)
    else:
        watched = _files_of(path, no_weights)
        record = analysis.record_of(path, wanted, dims, static, watched[1:], no_weights, half)
    if before == _signatures((path,)):  # otherwise the file changed meanwhile, so nothing is cached
        cached(_files, key, lambda: (watched, _signatures(watched), record), KEPT_FILES)
    return record


def _refuse_other_dims(record: ModelRecord, dims: Mapping[str, int] | None) -> None:
    differing = {name: size for name, size in (dims or {}).items() if record.dims.get(name) != size}
    if differing:
        raise UserError(f"{record.model}: a record's shapes are fixed, so {', '.join(sorted(differing))} can't be set; "
                        "give the model file instead")


def _signatures(paths: tuple[Path, ...]) -> Signatures:
    """The signature of each file that exists."""
    return tuple(file_signature for path in paths if (file_signature := signature(path)) is not None)


class Question(NamedTuple):
    """A model, and the sizes of its dynamic dimensions at which it is predicted."""

    model: Path
    sizes: Sequence[dict[str, int]]


def pair_with_sizes(models: Sequence[Path], sizes: Sequence[dict[str, int]]) -> list[Question]:
    """Pairs models with sizes. A single model gets all sizes, and an unknown dimension is an error; of several models, each
    gets the sizes whose dimensions it has. Raises UserError: none of several models has one of the sizes.
    """
    if len(models) == 1:
        return [Question(models[0], sizes)]
    names = dict.fromkeys(name for size in sizes for name in size)
    own = {model: _dimensions_in(model, names) for model in models}
    if unknown := [name for name in names if not any(name in dimensions for dimensions in own.values())]:
        raise UserError(f"none of the {len(models)} models has a size named {', '.join(unknown)}: check --dim and --sizes")
    chosen = {model: [{name: size[name] for name in size if name in own[model]} for size in sizes] for model in models}
    return [Question(model, list({tuple(size.items()): size for size in chosen[model]}.values()))  # without repetitions
            for model in models]


def _dimensions_in(model: Path, names: Iterable[str]) -> frozenset[str]:
    """Which of these dimension names occur in a model file; none in a record or an unreadable file, which is reported later."""
    try:
        return frozenset() if model.suffix == ".json" else own_names(model, names)
    except UserError:
        return frozenset()


def shown(value: object) -> str:
    """A wrong value as errors show it."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} …"


def checked_workspace(workspace: Workspace | str | os.PathLike[str] | None) -> Workspace:
    """Checks a workspace, which may also be given by its path; by default the repository."""
    if workspace is None or isinstance(workspace, Workspace):
        return workspace or Workspace()
    if not isinstance(workspace, (str, os.PathLike)):
        raise UserError(f"workspace={shown(workspace)}: give the path of a folder, or a Workspace")
    if not Path(workspace).is_dir():
        raise UserError(f"workspace={shown(str(workspace))}: no such folder; check its name, or make it first")
    return Workspace(Path(workspace))


def checked_target(target: object) -> str | None:
    """Checks a target's name (or a part of it); None is this machine."""
    if target is None or isinstance(target, str):
        return target
    raise UserError(f"target={shown(target)}: give the name of a target or a part of it, such as \"nvidia-h200\"")


def checked_count(name: str, value: object) -> int:
    """Checks that a value is a whole number of at least one."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UserError(f"{name}={shown(value)}: give a whole number from 1 on")


def checked_dims(dims: object) -> dict[str, int]:
    """Checks sizes by the names of dynamic dimensions."""
    if dims is None:
        return {}
    if not isinstance(dims, Mapping):
        raise UserError(f"dims={shown(dims)}: give sizes by name, such as {{\"batch\": 8}}")
    sizes = {}
    for name, size in dims.items():
        try:
            sizes[name] = operator.index(size)
        except TypeError:
            raise UserError(f"dims: {name}={shown(size)}: a size is one whole number; predict once for each size") from None
        if not isinstance(name, str) or not 0 <= sizes[name] <= LARGEST_SIZE:
            raise UserError(f"dims: {shown(name)}={shown(size)}: a name and a size from 0 to 2^63 - 1 are expected")
    return sizes


def check_stack_depth() -> None:
    """Raises UserError if the caller's stack is too deep for a prediction.

    Otherwise Python's recursion limit could interrupt an import, and leave a package half imported.
    """
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    if depth + FREE_CALLS > sys.getrecursionlimit():
        raise UserError(f"called {depth} calls deep, and Python allows {sys.getrecursionlimit()}: a prediction may need "
                        f"{FREE_CALLS} more; predict outside of the recursion, or raise the limit with sys.setrecursionlimit")
