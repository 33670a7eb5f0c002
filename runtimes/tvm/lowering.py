"""Reads a model into TVM's Relax, from ONNX or PyTorch (torch.export), and lowers it to function calls.

Operators are described in ONNX's terms, so that costs and features are computed as for ONNX Runtime.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

from hase.ort_analysis.graph.source import Source, read_source
from hase.records.operators import operator_row
from hase.runtimes.tvm.compiling import FUSED, UNFUSED, check_tvm, gpu_target, llvm_target
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.lazy import onnx, torch, tvm
from hase.utils.model_files import read_whole_model

ONNX_NAMES = {  # ONNX's names of TVM's operators; other names differ only in capitals
    "conv1d": "Conv", "conv2d": "Conv", "conv3d": "Conv", "conv1d_transpose": "ConvTranspose", "conv2d_transpose":
    "ConvTranspose", "conv3d_transpose": "ConvTranspose", "matmul": "MatMul", "subtract": "Sub", "multiply": "Mul", "divide":
    "Div", "power": "Pow", "maximum": "Max", "minimum": "Min", "negative": "Neg", "leakyrelu": "LeakyRelu", "prelu": "PRelu",
    "max_pool1d": "MaxPool", "max_pool2d": "MaxPool", "max_pool3d": "MaxPool", "avg_pool1d": "AveragePool", "avg_pool2d":
    "AveragePool", "avg_pool3d": "AveragePool", "adaptive_avg_pool1d": "GlobalAveragePool", "adaptive_avg_pool2d":
    "GlobalAveragePool", "adaptive_avg_pool3d": "GlobalAveragePool", "mean": "ReduceMean", "sum": "ReduceSum", "max":
    "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd", "permute_dims": "Transpose", "expand_dims": "Unsqueeze",
    "broadcast_to": "Expand", "take": "Gather", "gather_nd": "GatherND", "scatter_nd": "ScatterND", "strided_slice": "Slice",
    "dynamic_strided_slice": "Slice", "astype": "Cast", "layer_norm": "LayerNormalization", "group_norm":
    "GroupNormalization", "instance_norm": "InstanceNormalization", "batch_norm": "BatchNormalization", "rms_norm":
    "RMSNormalization", "resize2d": "Resize", "resize3d": "Resize", "gelu_tanh": "Gelu", "logical_and": "And", "logical_or":
    "Or", "logical_not": "Not", "less_equal": "LessOrEqual", "greater_equal": "GreaterOrEqual", "argmax": "ArgMax", "argmin":
    "ArgMin", "cumsum": "CumSum", "topk": "TopK", "full": "ConstantOfShape", "arange": "Range"}
SUMS = ("Add", "Sub", "Neg", "Sum")  # linear operators that compute; the others do little more than move data
TORCH_SUFFIX = ".pt2"  # suffix of programs written by torch.export.save
KNOWN_WARNING = b"Fast mode segfaults when there are out-of-bounds indices"


class RelaxOperator(NamedTuple):
    """An operator of a graph in ONNX's terms."""

    name: str  # ONNX's, or TVM's in ONNX's style where ONNX has none
    attributes: dict[str, Any]  # those that decide its costs and features
    relax: str  # TVM's own name


def onnx_name(relax: str) -> str:
    """ONNX's name of a TVM operator: `Conv` for `relax.nn.conv2d`."""
    tvm_name = relax.rpartition(".")[2].removeprefix("tir_")
    return ONNX_NAMES.get(tvm_name) or "".join(part[:1].upper() + part[1:] for part in tvm_name.split("_"))


def _operator_in_function(function: str) -> str:
    """The operator that a TVM function computes: `add` for `add12`, as TVM numbers functions of one name."""
    name = function.removeprefix("tir_")
    base = name if name in ONNX_NAMES else re.sub(r"\d+$", "", name)
    return {"transpose": "permute_dims"}.get(base, base)


def _integers(values: Iterable[Any]) -> list[int]:
    return [int(value) for value in values]


def onnx_attributes(relax: str, attrs: Any) -> dict[str, Any]:
    """The attributes of a Relax operator call, by ONNX's names. Operators that are not listed have none: their kernels differ
    by the TVM function, whose hash is part of the kernel's id."""
    operator, attributes = relax.rpartition(".")[2], dict[str, Any]()
    if operator.startswith(("conv", "max_pool", "avg_pool")):
        for name, relax_attribute in (("strides", "strides"), ("pads", "padding"), ("dilations", "dilation"),
                                      ("kernel_shape", "pool_size")):
            if (values := getattr(attrs, relax_attribute, None)) is not None:
                attributes[name] = _integers(values)
    if operator.startswith("conv"):
        attributes["group"] = int(attrs.groups)
    if "pool" in operator:
        for name in ("ceil_mode", "count_include_pad"):
            if (flag := getattr(attrs, name, None)) is not None:
                attributes[name] = int(flag)
    if operator == "permute_dims" and attrs.axes is not None:
        attributes["perm"] = _integers(attrs.axes)
    if (axis := getattr(attrs, "axis", None)) is not None:
        if isinstance(axis, int):
            attributes["axis"] = axis
        elif not hasattr(axis, "dtype"):
            attributes["axes"] = _integers(axis)
    if operator in ("layer_norm", "rms_norm"):
        attributes["axis"] = min(_integers(attrs.axes))
    return attributes


def _rank(name: str) -> int:
    """The rank of an operator in `deciding_operator`: the lowest decides."""
    row = operator_row(name)
    if row.dispatch in ("convolution", "product"):
        return 0 if row.dispatch == "convolution" else 1
    if row.dispatch == "reducing" or row.cost == "reduction":
        return 2
    if row.cost == "view":
        return 5
    return 4 if row.linearity == "linear" and name not in SUMS else 3


def deciding_operator(operators: Sequence[RelaxOperator]) -> int:
    """The index of the operator that decides a kernel's time: the first convolution, else product, else reduction or
    normalisation, else other computation, else data movement."""
    ranks = [_rank(operator.name) for operator in operators]
    return ranks.index(min(ranks))


def _input_shapes(source: Source) -> dict[str, list[int]]:
    """A model's input shapes at the given sizes."""
    proto = source.graph_only
    constants = {tensor.name for tensor in proto.graph.initializer}
    return {value.name: [source.dims[dim.dim_param] if dim.dim_param else dim.dim_value
                         for dim in value.type.tensor_type.shape.dim]
            for value in proto.graph.input if value.name not in constants and value.type.HasField("tensor_type")}


def tvm_source(model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, name: str | None = None) -> Source:
    """Reads a model's source: ONNX at the sizes `dims`, or a PyTorch program, whose sizes were fixed when it was exported."""
    if not isinstance(model, Path) or model.suffix != TORCH_SUFFIX:
        return read_source(model, dims, name)
    if not is_zipfile(model):
        raise UserError(f"{model}: no program of PyTorch; write it with torch.export.save")
    if dims:
        raise UserError(f"{model}: the sizes of a program of PyTorch are fixed, so {', '.join(sorted(dims))} can't be set")
    return Source(model.stem, "", "", onnx.ModelProto(), model, files.sha256(model), {})


def read_relax(source: Source) -> Any:
    """The model as a Relax `IRModule`, with weights as constants and fixed input sizes."""
    check_tvm()
    model = source.loadable
    program = model if isinstance(model, Path) and model.suffix == TORCH_SUFFIX else None
    proto = None if program else read_whole_model(model)
    try:
        if program:
            with torch.no_grad():
                return import_module("tvm.relax.frontend.torch").from_exported_program(torch.export.load(program))
        return tvm.relax.frontend.onnx.from_onnx(proto, shape_dict=_input_shapes(source))
    except Exception as error:  # TVM and torch.export raise all sorts
        raise unreadable(source.name, error) from error


def unreadable(name: str, error: Exception) -> UserError:
    """The error for a model that TVM can't read or lower, with the last line of TVM's own message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(f"{name}: TVM can't take this model apart: {type(error).__name__}: {lines[-1] if lines else ''}")


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Holds standard error back until the end of the block, and drops lines with KNOWN_WARNING, which TVM writes."""
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
                if KNOWN_WARNING not in line:
                    os.write(2, line)


@dataclass(frozen=True)
class Lowered:
    """A module of function calls."""

    module: Any  # an `IRModule` whose function `main` calls the others; TVM builds it unchanged
    operators: Mapping[str, tuple[RelaxOperator, ...]]  # by the name of the function, in the order in which it computes them


def bindings(function: Any) -> Iterator[Any]:
    """The bindings of a Relax function, in order."""
    for block in function.body.blocks:
        yield from block.bindings


def called_function(value: Any) -> str:
    """The name of the function that a bound value calls, or ""."""
    if not isinstance(value, tvm.relax.Call):
        return ""
    if isinstance(value.op, tvm.ir.GlobalVar):
        return str(value.op.name_hint)
    if relax_name(value).startswith("relax.call_tir"):
        return str(value.args[0].name_hint)
    return ""


def relax_name(value: Any) -> str:
    """The name of a bound value's operator; of a value that is no call, its kind."""
    if not isinstance(value, tvm.relax.Call):
        return type(value).__name__
    if isinstance(value.op, tvm.ir.Op):
        return str(value.op.name)
    return str(getattr(value.op, "global_symbol", getattr(value.op, "name_hint", value.op)))


def lower(name: str, module: Any, device: str = "cpu") -> dict[str, Lowered]:
    """Lowers a module to operators (UNFUSED) and kernels (FUSED), without changing it."""
    passes, backend, sequence = tvm.relax.transform, tvm.relax.backend, tvm.transform.Sequential
    try:
        with llvm_target() if device == "cpu" else gpu_target(), without_known_warnings():
            decomposed = sequence([
                passes.DecomposeOpsForInference(), passes.FoldConstant(), passes.CanonicalizeBindings(),
                passes.DeadCodeElimination(), backend.DispatchSampling(), backend.DispatchSortScan()])(module)
            legal = passes.LegalizeOps()(decomposed)
            operators = _function_operators(decomposed, legal)
            plain = sequence([passes.AnnotateTIROpPattern(), passes.FoldConstant(), passes.DeadCodeElimination()])(legal)
            grouped = passes.FuseOps()(plain)
            fused = sequence([passes.FuseTIR(), passes.DeadCodeElimination(), passes.RewriteDataflowReshape()])(grouped)
            unfused = passes.RewriteDataflowReshape()(plain)
    except Exception as error:  # TVM raises all sorts
        raise unreadable(name, error) from error
    fused_operators = {variable.name_hint: tuple(operator for binding in bindings(function)
                                                 for operator in operators.get(called_function(binding.value), ()))
                       for variable, function in grouped.functions.items()
                       if isinstance(function, tvm.relax.Function) and variable.name_hint != "main"}
    return {UNFUSED: Lowered(unfused, operators), FUSED: Lowered(fused, operators | fused_operators)}


def _function_operators(before: Any, after: Any) -> dict[str, tuple[RelaxOperator, ...]]:
    """The operator of each function that a legalised module calls; `before` is the module before legalising.

    Legalising mostly replaces each operator by one call; otherwise variables of the same name lead to the operator. If neither
    helps, the function's own name is used.
    """
    old, new = list(bindings(before["main"])), list(bindings(after["main"]))
    if len(old) == len(new):
        replaced: list[Any] = [binding.value for binding in old]
    else:
        count = Counter(binding.var.name for binding in old)
        by_name = {binding.var.name: binding.value for binding in old if count[binding.var.name] == 1}
        replaced = [by_name.get(binding.var.name) for binding in new]
    operators: dict[str, tuple[RelaxOperator, ...]] = {}
    for binding, call in zip(new, replaced, strict=True):
        function = called_function(binding.value)
        if not function or function in operators:
            continue
        name, attributes = _operator_in_function(function), dict[str, Any]()
        if isinstance(call, tvm.relax.Call) and isinstance(call.op, tvm.ir.Op):
            operator = relax_name(call)
            if operator and not operator.startswith("relax.call_"):
                name, attributes = operator, onnx_attributes(operator, call.attrs)
        operators[function] = (RelaxOperator(onnx_name(name), attributes, name),)
    return operators
