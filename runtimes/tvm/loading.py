"""Reads a model into TVM's Relax: an ONNX file, or a program of PyTorch (torch.export)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from runtimes.ort.graph.source import Source, read_source
from runtimes.tvm.package import check_tvm
from utils import files
from utils.errors import UserError
from utils.lazy import onnx, torch, tvm
from utils.model_files import read_whole_model

TORCH_SUFFIX = ".pt2"  # of a program that torch.export.save wrote


def _input_shapes(source: Source) -> dict[str, list[int]]:
    """The shapes of a model's inputs, with the sizes that its dynamic dimensions were given."""
    proto = source.graph_only
    constants = {tensor.name for tensor in proto.graph.initializer}
    return {value.name: [source.dims[dim.dim_param] if dim.dim_param else dim.dim_value
                         for dim in value.type.tensor_type.shape.dim]
            for value in proto.graph.input if value.name not in constants and value.type.HasField("tensor_type")}


def source_of(model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, name: str | None = None) -> Source:
    """The model as the user gave it. The sizes of a program of PyTorch are those that it was exported with.

    Raises:
        UserError: the model can't be read, a dynamic dimension is unknown or has no size, or sizes are given for a program of
            PyTorch.
    """
    if not isinstance(model, Path) or model.suffix != TORCH_SUFFIX:
        return read_source(model, dims, name)
    if not is_zipfile(model):
        raise UserError(f"{model}: no program of PyTorch; write it with torch.export.save")
    if dims:
        raise UserError(f"{model}: the sizes of a program of PyTorch are fixed, so {', '.join(sorted(dims))} can't be set")
    return Source(model.stem, "", "", onnx.ModelProto(), model, files.sha256(model), {})


def read_relax(source: Source) -> Any:
    """The model as an `IRModule` of Relax, its weights as constants and its inputs of fixed sizes.

    Raises:
        UserError: TVM is not installed, or can't read this model.
    """
    check_tvm()
    path = source.loadable
    if isinstance(path, Path) and path.suffix == TORCH_SUFFIX:
        return _relax_of_program(lambda: torch.export.load(path), source.name)
    proto = (read_whole_model(source.loadable) if isinstance(source.loadable, Path)
             else onnx.load_model_from_string(source.loadable))
    try:
        return tvm.relax.frontend.onnx.from_onnx(proto, shape_dict=_input_shapes(source))
    except Exception as error:  # TVM raises all sorts where an operator is missing or a shape depends on data
        raise unreadable(source.name, error) from error


def relax_of_torch(module: Any, inputs: Sequence[Any], name: str) -> Any:
    """A PyTorch module as an `IRModule` of Relax, without ONNX in between.

    Args:
        module: in evaluation mode.
        inputs: tensors of the sizes it is to have.
        name: for messages.

    Raises:
        UserError: TVM is not installed, or can't read this module.
    """
    check_tvm()
    return _relax_of_program(lambda: torch.export.export(module, tuple(inputs)), name)


def _relax_of_program(program: Callable[[], Any], name: str) -> Any:
    frontend = import_module("tvm.relax.frontend.torch")
    try:
        with torch.no_grad():
            return frontend.from_exported_program(program())
    except Exception as error:  # torch.export and TVM raise all sorts
        raise unreadable(name, error) from error


def unreadable(name: str, error: Exception) -> UserError:
    """The error for a model that TVM can't read or lower, with the last line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(f"{name}: TVM can't take this model apart: {type(error).__name__}: {lines[-1] if lines else ''}")
