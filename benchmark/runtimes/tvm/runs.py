"""Builds functions and models of TVM, and times them by TVM's time evaluator: no Python, and no allocation, in the times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmark.measuring.effort import Effort
from kernel_model.building.dummy_data import random_floats
from ort_analysis.records.elements import numpy_dtype
from ort_analysis.records.kernel_record import Tensor
from tvm_analysis.functions import MAIN
from tvm_analysis.package import llvm_target
from utils.errors import UserError
from utils.lazy import tvm

SAMPLE_S = 0.0005  # a sample of a function that is shorter is the mean of several runs
FLUSH = "cache_flush_cpu_non_first_arg"  # TVM's own


def tensor_for(described: Tensor) -> Any:
    """A tensor of TVM: random numbers, or zeros if they are integers, since they may be indices."""
    if "float" in described.dtype:
        return tvm.runtime.tensor(np.array(random_floats(described.shape, described.dtype), order="C"))
    return tvm.runtime.tensor(np.zeros(described.shape, numpy_dtype(described.dtype)))


def built_function(function: Any, threads: int) -> Any:
    """A function of TVM, compiled for this CPU.

    Raises:
        UserError: TVM can't compile it.
    """
    try:
        built = tvm.compile(tvm.IRModule({MAIN: function.with_attr("global_symbol", MAIN)}), llvm_target(threads))
    except Exception as error:  # TVM raises all sorts
        raise UserError(f"TVM can't compile it: {type(error).__name__}: {error}") from error
    return built.mod if hasattr(built, "mod") else built


def opened_model(module: Any, threads: int) -> Any:
    """A lowered module, compiled for this CPU and opened in TVM's virtual machine.

    Raises:
        UserError: TVM can't compile it.
    """
    try:
        return tvm.relax.VirtualMachine(tvm.compile(module, llvm_target(threads)), tvm.cpu())
    except Exception as error:  # TVM raises all sorts
        raise UserError(f"TVM can't compile it: {type(error).__name__}: {error}") from error


def samples_ms(timed: Any, arguments: Sequence[Any], effort: Effort, cold: bool = False) -> tuple[float, ...]:
    """Times of runs of `main` in ms, by the time evaluator.

    Args:
        timed: what has a time evaluator: a compiled function, or a virtual machine.
        arguments: of `main`, outputs of a function included.
        effort: how often. If a run is shorter than SAMPLE_S, a sample is the mean of as many runs as fit into that.
        cold: whether all arguments but the first are taken out of the caches before each sample of a single run.

    Raises:
        UserError: TVM can't run it.
    """
    def times_s(number: int, repeat: int) -> list[float]:
        flush = {"f_preproc": FLUSH} if cold and number == 1 else {}
        evaluate = timed.time_evaluator(MAIN, tvm.cpu(), number=number, repeat=repeat, **flush)
        try:
            return [float(seconds) for seconds in evaluate(*arguments).results]
        except Exception as error:  # TVM raises all sorts
            raise UserError(f"TVM can't run it: {type(error).__name__}: {error}") from error

    one_run_s = min(times_s(1, effort.warmup + 1))
    if one_run_s < effort.warmup_s:
        times_s(1, min(math.ceil(effort.warmup_s / max(one_run_s, 1e-6)), 10_000))
    number = max(1, math.ceil(SAMPLE_S / max(one_run_s, 1e-7)))
    return tuple(round(1e3 * seconds, 7) for seconds in times_s(number, effort.runs(number * one_run_s)))
