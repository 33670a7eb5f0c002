"""Lowers a model of Relax to calls of functions, unfused and fused."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from runtimes.tvm.loading import unreadable
from runtimes.tvm.operators import Operator, attributes_of, onnx_name, operator_of_function
from runtimes.tvm.package import FUSED, UNFUSED, target_to_lower_for
from utils.lazy import tvm

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
