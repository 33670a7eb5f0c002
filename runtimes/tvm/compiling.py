"""Compiles functions and models under TVM, for a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hase.runtimes.tvm.functions import MAIN, SUFFIX, read_function
from hase.utils.errors import UserError
from hase.utils.lazy import tvm
from hase.utils.logger import get_logger

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


def on_gpu(target: Any) -> bool:
    """Whether a target of TVM is a GPU."""
    return "gpu" in target.keys


def _compiled(module: Any, target: Any, **options: Any) -> Any:
    """A module, compiled for a target of TVM; for a GPU, with schedules by rules where functions have none. `options` are those
    of TVM's `compile`.

    Raises:
        UserError: TVM can't compile it.
    """
    try:
        return tvm.compile(with_gpu_schedules(module, target) if on_gpu(target) else module, target, **options)
    except Exception as error:  # TVM raises all sorts
        raise UserError(f"TVM can't compile it: {type(error).__name__}: {error}") from error


def built_function(function: Any, target: Any) -> Any:
    """A function of TVM, compiled for a target of TVM.

    Raises:
        UserError: TVM can't compile it.
    """
    built = _compiled(tvm.IRModule({MAIN: function.with_attr("global_symbol", MAIN)}), target)
    return built.mod if hasattr(built, "mod") else built


def compiled_model(module: Any, target: Any) -> Any:
    """A lowered module, compiled for a target of TVM.

    Raises:
        UserError: TVM can't compile it.
    """
    return _compiled(module, target, **({"relax_pipeline": pipeline_after_schedules(target)} if on_gpu(target) else {}))


def with_searched_schedules(module: Any, callees: Mapping[str, str], folder: Path) -> Any:
    """The module of a model with the functions that lie in `folder`, which are those of the kernels with searched schedules.

    Args:
        module: a lowered model.
        callees: the kernels' ids by the names of functions in the module.
        folder: of a flavour's kernels.
    """
    functions = dict(module.functions.items())
    for gv in list(functions):
        if gv.name_hint in callees and (path := folder / f"{callees[gv.name_hint]}{SUFFIX}").is_file():
            functions[gv] = read_function(path)
    return tvm.IRModule(functions)


def cuda_sources(built: Any) -> list[str]:
    """The CUDA code in what was compiled for a GPU on a machine without one."""
    modules = [built]
    for module in modules:
        modules.extend(module.imports)
    return [str(module.inspect_source("cuda")) for module in modules if module.kind == "cuda"]
