"""Schedules for GPUs: which threads compute what. On a CPU, a function without a schedule runs as loops; a GPU can't run it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from utils.lazy import tvm
from utils.logger import get_logger

log = get_logger("tvm")
IS_SCHEDULED = "tirx.is_scheduled"  # an attribute of functions that TVM's rules leave as they are
SPECIAL_RULES = ("Matmul", "GEMV", "Reduction", "GeneralReduction")  # each for some functions; the order is TVM's


class _Rule:
    """A rule of TVM that does not apply where it fails. TVM's own list of rules would end there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rule = getattr(import_module("tvm.s_tir.dlight").gpu, name)()

    def apply(self, function: Any, target: Any, tunable: bool) -> Any:
        """The function's schedule, or None. The arguments are TVM's."""
        try:
            return self._rule.apply(function, target, tunable)
        except Exception as error:  # noqa: BLE001 - failed assertions, too, say that a function is not for a rule
            log.debug("rule %s does not fit a function: %s: %s", self.name, type(error).__name__, error)
            return None


def with_gpu_schedules(module: Any, target: Any) -> Any:
    """A module whose functions have schedules by the rules that come with TVM (DLight), which search nothing; those that have
    one stay as they are.

    Args:
        module: an `IRModule`.
        target: of TVM, a GPU.
    """
    dlight = import_module("tvm.s_tir.dlight")
    with target:
        return dlight.ApplyDefaultSchedule(*map(_Rule, SPECIAL_RULES), dlight.gpu.Fallback())(module)


def scheduled(function: Any) -> Any:
    """A function that a search gave a schedule, marked so that rules leave it as it is."""
    return function.with_attr(IS_SCHEDULED, True)


def pipeline_after_schedules(target: Any) -> Any:
    """The rest of TVM's passes for a model on a GPU. The default ones begin with fusion, which was done."""
    passes = import_module("tvm.relax.backend.cuda.pipeline")
    return tvm.transform.Sequential([*passes.dataflow_lower_passes(target), *passes.finalize_passes(target)])
