"""Schedules for GPUs: which threads compute what. On a CPU, a function without a schedule runs as loops; a GPU can't run it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from utils.lazy import tvm


def with_gpu_schedules(module: Any, target: Any) -> Any:
    """A module whose functions have schedules by the rules that come with TVM (DLight), which search nothing; those that have
    one stay as they are.

    Args:
        module: an `IRModule`.
        target: of TVM, a GPU.
    """
    rules = import_module("tvm.s_tir.dlight")
    gpu = rules.gpu
    with target:
        return rules.ApplyDefaultSchedule(gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(),
                                          gpu.Fallback())(module)


def pipeline_after_schedules(target: Any) -> Any:
    """The rest of TVM's passes for a model on a GPU. The default ones begin with fusion, which was done."""
    passes = import_module("tvm.relax.backend.cuda.pipeline")
    return tvm.transform.Sequential([*passes.dataflow_lower_passes(target), *passes.finalize_passes(target)])
