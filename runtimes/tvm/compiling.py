"""Compiles functions and whole models of TVM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtimes.tvm.functions import MAIN, SUFFIX, read_function
from runtimes.tvm.gpu_schedules import pipeline_after_schedules, with_gpu_schedules
from utils.errors import UserError
from utils.lazy import tvm


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
    """A function of TVM, compiled for a target of TVM; errors as of `_compiled`."""
    built = _compiled(tvm.IRModule({MAIN: function.with_attr("global_symbol", MAIN)}), target)
    return built.mod if hasattr(built, "mod") else built


def compiled_model(module: Any, target: Any) -> Any:
    """A lowered module, compiled for a target of TVM; errors as of `_compiled`."""
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
    found = [built]
    for module in found:
        found.extend(module.imports)
    return [str(module.inspect_source("cuda")) for module in found if module.kind == "cuda"]
