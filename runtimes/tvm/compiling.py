"""Compiles functions and models under TVM, for a CPU or a GPU."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtimes.tvm.kernels import MAIN, SUFFIX, read_function
from utils import files
from utils.errors import UserError
from utils.lazy import tvm, tvm_ffi
from utils.logger import get_logger

INSTALL = "pip install cuda-bindings"  # comes with torch for CUDA
TOOLKIT, OPTIONS = "CUDA_PATH", "TVM_CUDA_NVRTC_EXTRA_OPTS"  # environment variables that TVM reads
CALLBACK = "tvm_callback_cuda_compile"  # the function that TVM calls to get machine code
HEADERS = ("include", f"targets/{platform.machine()}-linux/include", "targets/sbsa-linux/include")  # in a toolkit
FOLDER = "cubins"  # in the folder of a flavour's kernels


def _pathfinder() -> Any:
    """The package that finds what pip installed of CUDA; None if it is not installed."""
    return import_module("cuda.pathfinder") if find_spec("cuda") and find_spec("cuda.pathfinder") else None


def load_cuda_runtime() -> None:
    """Loads the CUDA runtime where pip put it, as with torch. TVM, which looks for it as the system does, then finds it. To be
    called before TVM is imported."""
    if pathfinder := _pathfinder():
        with suppress(pathfinder.DynamicLibNotFoundError):  # the system may have it
            pathfinder.load_nvidia_dynamic_lib("cudart")


@functools.cache
def _find_headers() -> None:
    """Tells TVM where pip put the headers of CUDA, if TVM finds no toolkit with them."""
    with suppress(RuntimeError):  # TVM finds no toolkit
        toolkit = Path(import_module("tvm.support.nvcc").find_cuda_path())
        if any((toolkit / folder / "cuda_runtime.h").is_file() for folder in HEADERS):
            return
    if pathfinder := _pathfinder():
        runtime, cccl = (pathfinder.find_nvidia_header_directory(name) for name in ("cudart", "cccl"))
        if runtime and cccl:
            os.environ[TOOLKIT] = str(Path(runtime).parent)
            os.environ[OPTIONS] = f"{os.environ.get(OPTIONS, '')} {shlex.quote(f'-I{cccl}')}".strip()


def check_compiler() -> None:
    """Checks that NVIDIA's compiler can be called from Python.

    Raises:
        UserError: it can't.
    """
    if not find_spec("cuda") or not find_spec("cuda.bindings"):
        raise UserError(f"the package cuda-bindings is not installed, and TVM needs it to compile for a GPU; {INSTALL}")


@functools.lru_cache(maxsize=64)  # a search compiles its best trial again
def compiled_cubin(source: str, arch: str) -> bytes:
    """Machine code from CUDA code for GPUs of an architecture, e.g. `sm_90`.

    Raises:
        RuntimeError: the compiler refuses the code.
    """
    _find_headers()
    return bytes(import_module("tvm.support.nvcc").compile_cuda(source, target_format="cubin", arch=arch, compiler="nvrtc"))


def kept_cubin(source: str, arch: str, folder: Path) -> bytes:
    """As `compiled_cubin`, but taken from `folder` if it is there, else written there."""
    _, *version = import_module("cuda.bindings.nvrtc").nvrtcVersion()
    name = hashlib.sha256(f"{arch} {version} {source}".encode()).hexdigest()[:32]
    path = folder / f"{name}.cubin"
    if not path.is_file():
        files.write_bytes(path, compiled_cubin(source, arch))
    return path.read_bytes()


def compile_for(arch: str, folder: Path | None = None) -> None:
    """From now on, TVM compiles for GPUs of an architecture, which must be that of this machine's GPU if it has one; with
    `folder`, it keeps there what it compiled. Errors as of `check_compiler`."""
    check_compiler()
    import_module("tvm.support.nvcc")  # registers TVM's own function first
    compiler = functools.partial(compiled_cubin, arch=arch) if folder is None else functools.partial(kept_cubin, arch=arch,
                                                                                                    folder=folder)
    tvm_ffi.register_global_func(CALLBACK, compiler, override=True)


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
