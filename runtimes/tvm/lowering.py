"""Reads a model into TVM's Relax, from ONNX or PyTorch (torch.export), and lowers it to function calls.

Records describe operators in ONNX's terms, so that costs and features are computed as for ONNX Runtime.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

from hase.ort_analysis.graph.source import Source, read_source
from hase.records.operators import operator_row
from hase.runtimes.tvm.compiling import FUSED, UNFUSED, check_tvm, target_to_lower_for
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
SUMS = ("Add", "Sub", "Neg", "Sum")  # linear operators that compute; the others move data, or nearly
TORCH_SUFFIX = ".pt2"  # suffix of programs written by torch.export.save
KNOWN_WARNING = b"Fast mode segfaults when there are out-of-bounds indices"


class RelaxOperator(NamedTuple):
    """An operator of a graph in ONNX's terms."""

    name: str  # ONNX's, or TVM's in ONNX's style where ONNX has none
    attributes: dict[str, Any]  # those that decide its costs and features
    relax: str  # TVM's own name


def onnx_name(relax: str) -> str:
    """ONNX's name of a TVM operator: `Conv` for `relax.nn.conv2d`."""
    last = relax.rpartition(".")[2].removeprefix("tir_")
    return ONNX_NAMES.get(last) or "".join(part[:1].upper() + part[1:] for part in last.split("_"))


def operator_of_function(function: str) -> str:
    """The operator that a TVM function computes: `add` for `add12`. TVM numbers functions of one name."""
    plain = function.removeprefix("tir_")
    base = plain if plain in ONNX_NAMES else re.sub(r"\d+$", "", plain)
    return {"transpose": "permute_dims"}.get(base, base)


def _numbers(values: Iterable[Any]) -> list[int]:
    return [int(value) for value in values]


def onnx_attributes(relax: str, attrs: Any) -> dict[str, Any]:
    """The attributes of a Relax operator call, by ONNX's names. Operators that are not listed have none; they differ by the
    kernel's function, whose hash is part of the kernel's id."""
    last, attributes = relax.rpartition(".")[2], dict[str, Any]()
    for name, relax_name in (("strides", "strides"), ("pads", "padding"), ("dilations", "dilation"),
                             ("kernel_shape", "pool_size")):
        if (values := getattr(attrs, relax_name, None)) is not None and last.startswith(("conv", "max_pool", "avg_pool")):
            attributes[name] = _numbers(values)
    if last.startswith("conv"):
        attributes["group"] = int(attrs.groups)
    for name in ("ceil_mode", "count_include_pad"):
        if "pool" in last and (flag := getattr(attrs, name, None)) is not None:
            attributes[name] = int(flag)
    if last == "permute_dims" and attrs.axes is not None:
        attributes["perm"] = _numbers(attrs.axes)
    if (axis := getattr(attrs, "axis", None)) is not None:
        if isinstance(axis, int):
            attributes["axis"] = axis
        elif not hasattr(axis, "dtype"):
            attributes["axes"] = _numbers(axis)
    if last in ("layer_norm", "rms_norm"):
        attributes["axis"] = min(_numbers(attrs.axes))
    return attributes


def _rank(name: str) -> int:
    """Rank of an operator in `deciding_operator`; the lowest one decides."""
    row = operator_row(name)
    if row.dispatch in ("convolution", "product"):
        return 0 if row.dispatch == "convolution" else 1
    if row.dispatch == "reducing" or row.cost == "reduction":
        return 2
    if row.cost == "view":
        return 5
    return 4 if row.linearity == "linear" and name not in SUMS else 3


def deciding_operator(operators: Sequence[RelaxOperator]) -> int:
    """The index of the operator that decides a kernel's time. That is the first convolution, else product, else reduction or
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
    """The model as given by the user. A PyTorch program has the sizes with which it was exported."""
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
    """A PyTorch module as a Relax `IRModule`, without ONNX in between."""
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
    """The error for a model that TVM can't read or lower, with the last line of TVM's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(f"{name}: TVM can't take this model apart: {type(error).__name__}: {lines[-1] if lines else ''}")


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Delays TVM's standard error until the end of the block, and drops lines with KNOWN_WARNING."""
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

    module: Any  # an `IRModule`. Its function `main` calls the others; TVM builds it as it stands.
    operators: Mapping[str, tuple[RelaxOperator, ...]]  # of each function by its name, in the order in which it computes them


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
    """The name of a bound value's operator, or its kind of value."""
    if not isinstance(value, tvm.relax.Call):
        return type(value).__name__
    if isinstance(value.op, tvm.ir.Op):
        return str(value.op.name)
    return str(getattr(value.op, "global_symbol", getattr(value.op, "name_hint", value.op)))


def lower(name: str, module: Any, device: str = "cpu") -> dict[str, Lowered]:
    """Lowers a module to operators (UNFUSED) and kernels (FUSED), without changing it."""
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
                                  for operator in operators.get(called_function(binding.value), ()))
              for gv, function in grouped.functions.items()
              if isinstance(function, tvm.relax.Function) and gv.name_hint != "main"}
    return {UNFUSED: Lowered(unfused, operators), FUSED: Lowered(fused, {**operators, **within})}


def _sequential(*passes: Any) -> Any:
    return tvm.transform.Sequential(list(passes))


def operators_of(before: Any, after: Any) -> dict[str, tuple[RelaxOperator, ...]]:
    """The operators in each function of a legalised module. Legalising mostly replaces each operator by one call; otherwise
    variable names lead to the operator. If neither helps, the function's own name is used."""
    old, new = list(bindings(before["main"])), list(bindings(after["main"]))
    count = Counter(binding.var.name for binding in old)
    by_name = {binding.var.name: binding.value for binding in old if count[binding.var.name] == 1}
    calls: list[Any] = [by_name.get(binding.var.name) for binding in new]
    if len(old) == len(new):
        calls = [binding.value for binding in old]
    operators: dict[str, tuple[RelaxOperator, ...]] = {}
    for binding, call in zip(new, calls, strict=True):
        function = called_function(binding.value)
        if not function or function in operators:
            continue
        operator = relax_name(call) if isinstance(call, tvm.relax.Call) and isinstance(call.op, tvm.ir.Op) else ""
        if not operator or operator.startswith("relax.call_"):
            name = operator_of_function(function)
            operators[function] = (RelaxOperator(onnx_name(name), {}, name),)
        else:
            operators[function] = (RelaxOperator(onnx_name(operator), onnx_attributes(operator, call.attrs), operator),)
    return operators
