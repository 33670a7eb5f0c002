"""Compiles functions and models with TVM for CPUs and GPUs, and stores kernels' functions and machine code in files."""

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

from pydantic import ValidationError

from hase.records.kernel_record import Kernel
from hase.runtimes import local_flavour
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import tvm, tvm_ffi
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

INSTALL_BINDINGS = "pip install cuda-bindings"  # comes with torch for CUDA
TOOLKIT, OPTIONS = "CUDA_PATH", "TVM_CUDA_NVRTC_EXTRA_OPTS"  # environment variables that TVM reads
CALLBACK = "tvm_callback_cuda_compile"  # the function that TVM calls to get machine code
HEADERS = ("include", f"targets/{platform.machine()}-linux/include", "targets/sbsa-linux/include")  # in a toolkit
CUBINS = "cubins"  # the folder of machine code, in that of a flavour's kernels
INSTALL = "pip install '.[tvm]'"
UNFUSED, FUSED, TUNED = "unfused", "fused", "tuned"  # levels of a flavour: operators, kernels, kernels with searched schedules
LEVELS = (UNFUSED, FUSED, TUNED)
OLDEST_ARCH = "sm_80"
# What every GPU of these architectures has at least (CUDA C++ Programming Guide, "Compute Capabilities", 8.0 and later).
ANY_GPU = {"kind": "cuda", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "thread_warp_size": 32}
IS_SCHEDULED = "tirx.is_scheduled"  # an attribute of functions that TVM's rules do not change
SPECIAL_RULES = ("Matmul", "GEMV", "Reduction", "GeneralReduction")  # each fits some functions; in TVM's order
SUFFIX = ".tvm"
MAIN = "main"
REMAKE = "remove it, and make it anew with: python runtimes/tvm/relax_parser.py"

log = get_logger("tvm")


def _pathfinder() -> Any:
    """The package that finds pip's parts of CUDA; None if not installed."""
    return import_module("cuda.pathfinder") if find_spec("cuda") and find_spec("cuda.pathfinder") else None


@functools.cache
def _find_headers() -> None:
    """Tells TVM where pip put CUDA's headers, if TVM finds no toolkit with them."""
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
    """Checks that NVIDIA's compiler is usable from Python."""
    if not find_spec("cuda") or not find_spec("cuda.bindings"):
        raise UserError(f"the package cuda-bindings is not installed; TVM needs it to compile for a GPU: {INSTALL_BINDINGS}")


@functools.lru_cache(maxsize=64)  # a search compiles its best trial again
def compile_cubin(source: str, arch: str) -> bytes:
    """Compiles CUDA code to machine code for a GPU architecture, e.g. `sm_90`."""
    _find_headers()
    return bytes(import_module("tvm.support.nvcc").compile_cuda(source, target_format="cubin", arch=arch, compiler="nvrtc"))


def cached_cubin(source: str, arch: str, folder: Path) -> bytes:
    """Like `compile_cubin`, but cached in `folder`."""
    _, *version = import_module("cuda.bindings.nvrtc").nvrtcVersion()
    name = hashlib.sha256(f"{arch} {version} {source}".encode()).hexdigest()[:32]
    path = folder / f"{name}.cubin"
    if not path.is_file():
        files.write_bytes(path, compile_cubin(source, arch))
    return path.read_bytes()


def compile_for(arch: str, folder: Path | None = None) -> None:
    """Makes TVM compile for a GPU architecture and keep machine code in `folder`. If this machine has a GPU, it must be that
    GPU's architecture."""
    check_compiler()
    import_module("tvm.support.nvcc")  # registers TVM's own function first
    compiler = functools.partial(compile_cubin, arch=arch) if folder is None else functools.partial(
        cached_cubin, arch=arch, folder=folder)
    tvm_ffi.register_global_func(CALLBACK, compiler, override=True)


def check_tvm() -> None:
    """Checks that TVM is installed, and loads parts of it that it does not load by itself."""
    if find_spec("tvm") is None:
        raise UserError(f"the package apache-tvm is not installed, and this needs it; {INSTALL}")
    if pathfinder := _pathfinder():  # before TVM is imported, so that it finds pip's CUDA runtime in this process
        with suppress(pathfinder.DynamicLibNotFoundError):  # the system may have it
            pathfinder.load_nvidia_dynamic_lib("cudart")
    import_module("tvm.relax.frontend.onnx")


def tvm_flavour(device: str = "cpu", level: str = FUSED) -> Flavour:
    """The flavour of TVM's graphs on this machine."""
    check_tvm()
    return local_flavour(device, "tvm", level)


@functools.cache
def llvm_target(threads: int = 1) -> Any:
    """TVM's target for this CPU; `threads` matter only for tuning."""
    return tvm.target.Target({"kind": "llvm", "mcpu": tvm.get_global_func("target.llvm_get_system_cpu")(),
                              "num-cores": threads})


@functools.cache
def gpu_target(arch: str = OLDEST_ARCH) -> Any:
    """TVM's target for an NVIDIA GPU architecture. Graphs are lowered for the oldest one, so that they are the same for all
    GPUs, and on machines without one."""
    return tvm.target.Target({**ANY_GPU, "arch": arch}, host=llvm_target())


def runs_on_gpus() -> bool:
    """Whether TVM's part for NVIDIA GPUs is loaded; TVM then compiles to machine code."""
    return tvm.get_global_func("device_api.cuda", allow_missing=True) is not None


def arch_here() -> str:
    """The architecture of this machine's GPU."""
    if not runs_on_gpus():
        raise UserError("device cuda: TVM can't load its part for NVIDIA GPUs; it needs the driver (nvidia-smi should list a "
                        "GPU) and CUDA 13 (pip install nvidia-cuda-runtime)")
    gpu = tvm.cuda(0)
    if not gpu.exist:
        raise UserError("device cuda: TVM finds no NVIDIA GPU; nvidia-smi should list one")
    return f"sm_{gpu.compute_version.replace('.', '')}"


def local_tvm_target(device: str, threads: int = 1) -> Any:
    """TVM's target for functions that run on this machine's `cpu` or `cuda`."""
    return llvm_target(threads) if device == "cpu" else gpu_target(arch_here())


class _Rule:
    """A TVM scheduling rule that is skipped if it fails. (With TVM's own rule, the list of rules would end there.)"""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rule = getattr(import_module("tvm.s_tir.dlight").gpu, name)()

    def apply(self, function: Any, target: Any, tunable: bool) -> Any:
        """The function's schedule, or None."""
        try:
            return self._rule.apply(function, target, tunable)
        except Exception as error:  # noqa: BLE001 - failed assertions, too, say that a function is not for a rule
            log.debug("rule %s does not fit a function: %s: %s", self.name, type(error).__name__, error)
            return None


def with_gpu_schedules(module: Any, target: Any) -> Any:
    """Schedules all functions of a module that have no schedule, by TVM's fixed rules (DLight)."""
    dlight = import_module("tvm.s_tir.dlight")
    with target:
        return dlight.ApplyDefaultSchedule(*map(_Rule, SPECIAL_RULES), dlight.gpu.Fallback())(module)


def on_gpu(target: Any) -> bool:
    """Whether a TVM target is a GPU."""
    return "gpu" in target.keys


def _compile(module: Any, target: Any, **options: Any) -> Any:
    """Compiles a module for a TVM target; on a GPU, functions without schedules get those of rules. `options` are those of
    TVM's `compile`."""
    try:
        return tvm.compile(with_gpu_schedules(module, target) if on_gpu(target) else module, target, **options)
    except Exception as error:  # TVM raises all sorts
        raise UserError(f"TVM can't compile it: {type(error).__name__}: {error}") from error


def compile_function(function: Any, target: Any) -> Any:
    """Compiles a TVM function for a TVM target."""
    built = _compile(tvm.IRModule({MAIN: function.with_attr("global_symbol", MAIN)}), target)
    return built.mod if hasattr(built, "mod") else built


def compile_lowered(module: Any, target: Any) -> Any:
    """Compiles a lowered module for a TVM target."""
    if not on_gpu(target):
        return _compile(module, target)
    passes = import_module("tvm.relax.backend.cuda.pipeline")  # without fusion, which was already done
    return _compile(module, target, relax_pipeline=tvm.transform.Sequential([
        *passes.dataflow_lower_passes(target), *passes.finalize_passes(target)]))


def with_searched_schedules(module: Any, callees: Mapping[str, str], folder: Path) -> Any:
    """Replaces the functions of a model's module by those with searched schedules, where `folder` has one."""
    functions = dict(module.functions.items())
    for gv in list(functions):
        if gv.name_hint in callees and (path := folder / f"{callees[gv.name_hint]}{SUFFIX}").is_file():
            functions[gv] = read_function(path)
    return tvm.IRModule(functions)


def cuda_sources(built: Any) -> list[str]:
    """The CUDA code in a compiled module. There is some only on a machine without a GPU, where TVM does not compile it."""
    modules = [built]
    for module in modules:
        modules.extend(module.imports)
    return [str(module.inspect_source("cuda")) for module in modules if module.kind == "cuda"]


def function_hash(function: Any) -> str:
    """The hash of a function's computation, 16 digits; the function's name does not matter."""
    return f"{tvm_ffi.structural_hash(function.without_attr('global_symbol')) & (2**64 - 1):016x}"


def function_path(workspace: Workspace, flavour: Flavour, kernel: str) -> Path:
    """The file of a kernel's function: a JSON line that describes the kernel, then TVM's text of the function."""
    return workspace.kernel_onnx / flavour.name / f"{kernel}{SUFFIX}"


def write_functions(workspace: Workspace, flavour: Flavour, kernels: Mapping[str, Kernel],
                    functions: Mapping[str, Any]) -> None:
    """Writes the functions of kernels, given by id; existing files stay."""
    for name, function in functions.items():
        path = function_path(workspace, flavour, name)
        if not path.is_file():
            write_function(path, kernels[name], function)


def write_function(path: Path, kernel: Kernel, function: Any) -> None:
    """Writes one kernel and its function, replacing an older file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    module = tvm.IRModule({MAIN: function.without_attr("global_symbol")})
    files.write_text(path, f"{kernel.model_dump_json()}\n{tvm.ir.save_json(module)}")


def _lines(path: Path) -> tuple[str, str]:
    """The two parts of a function's file: the kernel, and the function."""
    try:
        kernel, _, function = path.read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such function; make it with: python runtimes/tvm/relax_parser.py") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a function of TVM ({error}); {REMAKE}") from None
    return kernel, function


def read_kernel(path: Path) -> Kernel:
    """The kernel of the function in a file."""
    try:
        return Kernel.model_validate_json(_lines(path)[0])
    except ValidationError as error:
        raise UserError(f"{path}: its first line describes no kernel ({error.errors()[0]['msg']}); {REMAKE}") from None


def read_function(path: Path) -> Any:
    """The function in a file."""
    try:
        return tvm.ir.load_json(_lines(path)[1])[MAIN]
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"{path}: not a function of this TVM ({error}); {REMAKE}") from None
