"""Reads a model into TVM's Relax, from an ONNX file or a program of PyTorch (torch.export), and lowers it to calls of
functions, unfused and fused.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from hase.ort_analysis.graph.source import Source, read_source
from hase.runtimes.tvm.operators import Operator, attributes_of, onnx_name, operator_of_function
from hase.runtimes.tvm.package import FUSED, UNFUSED, check_tvm, target_to_lower_for
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.lazy import onnx, torch, tvm
from hase.utils.model_files import read_whole_model

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


KNOWN = b"Fast mode segfaults when there are out-of-bounds indices"


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """What TVM writes to standard error meanwhile comes afterwards, without the lines that hold KNOWN."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            for line in kept:
                if KNOWN not in line:
                    os.write(2, line)


@dataclass(frozen=True)
class Lowered:
    """A module of calls of functions.

    Attributes:
        module: an `IRModule`. Its function `main` calls the others; TVM builds it as it stands.
        operators: of each function by its name, in the order in which it computes them.
    """

    module: Any
    operators: Mapping[str, tuple[Operator, ...]]


def bindings(function: Any) -> Iterator[Any]:
    """The bindings of a Relax function, in order."""
    for block in function.body.blocks:
        yield from block.bindings


def called(value: Any) -> str:
    """The name of the function that a bound value calls; "" where it calls none."""
    if not isinstance(value, tvm.relax.Call):
        return ""
    if isinstance(value.op, tvm.ir.GlobalVar):
        return str(value.op.name_hint)
    if relax_name(value).startswith("relax.call_tir"):
        return str(value.args[0].name_hint)
    return ""


def relax_name(value: Any) -> str:
    """The name of a bound value's operator, or what kind of value it is where it is no call of one."""
    if not isinstance(value, tvm.relax.Call):
        return type(value).__name__
    if isinstance(value.op, tvm.ir.Op):
        return str(value.op.name)
    return str(getattr(value.op, "global_symbol", getattr(value.op, "name_hint", value.op)))


def lower(name: str, module: Any, device: str = "cpu") -> dict[str, Lowered]:
    """The operators of a model (UNFUSED) and its kernels (FUSED).

    Args:
        name: of the model, for messages.
        module: as `read_relax` gives it; it stays as it is.
        device: `cpu` or `cuda`.

    Raises:
        UserError: TVM can't lower it.
    """
    passes = tvm.relax.transform
    try:
        with target_to_lower_for(device), without_known_warnings():
            first = _sequential(passes.DecomposeOpsForInference(), passes.FoldConstant(), passes.CanonicalizeBindings(),
                                passes.DeadCodeElimination(), tvm.relax.backend.DispatchSampling(),
                                tvm.relax.backend.DispatchSortScan())(module)
            legal = passes.LegalizeOps()(first)
            operators = operators_of(first, legal)
            plain = _sequential(passes.AnnotateTIROpPattern(), passes.FoldConstant(), passes.DeadCodeElimination())(legal)
            grouped = passes.FuseOps()(plain)
            fused = _sequential(passes.FuseTIR(), passes.DeadCodeElimination(), passes.RewriteDataflowReshape())(grouped)
            unfused = passes.RewriteDataflowReshape()(plain)
    except Exception as error:  # TVM raises all sorts
        raise unreadable(name, error) from error
    within = {gv.name_hint: tuple(operator for binding in bindings(function)
                                  for operator in operators.get(called(binding.value), ()))
              for gv, function in grouped.functions.items()
              if isinstance(function, tvm.relax.Function) and gv.name_hint != "main"}
    return {UNFUSED: Lowered(unfused, operators), FUSED: Lowered(fused, {**operators, **within})}


def _sequential(*passes: Any) -> Any:
    return tvm.transform.Sequential(list(passes))


def operators_of(before: Any, after: Any) -> dict[str, tuple[Operator, ...]]:
    """The operator that each function of a legalised module computes. Mostly, legalising makes one call of each; else it keeps
    the names of variables. A function that neither leads to is named by itself.

    Args:
        before, after: the module before and after it was legalised.
    """
    old, new = list(bindings(before["main"])), list(bindings(after["main"]))
    count = Counter(binding.var.name for binding in old)
    by_name = {binding.var.name: binding.value for binding in old if count[binding.var.name] == 1}
    calls: list[Any] = [by_name.get(binding.var.name) for binding in new]
    if len(old) == len(new):
        calls = [binding.value for binding in old]
    of_function: dict[str, tuple[Operator, ...]] = {}
    for binding, call in zip(new, calls, strict=True):
        function = called(binding.value)
        if not function or function in of_function:
            continue
        operator = relax_name(call) if isinstance(call, tvm.relax.Call) and isinstance(call.op, tvm.ir.Op) else ""
        if not operator or operator.startswith("relax.call_"):
            name = operator_of_function(function)
            of_function[function] = (Operator(onnx_name(name), {}, name),)
        else:
            of_function[function] = (Operator(onnx_name(operator), attributes_of(operator, call.attrs), operator),)
    return of_function
