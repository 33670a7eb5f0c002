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
FOLDER = "cubins"  # in the folder of a flavour's kernels
INSTALL = "pip install -r requirements-tvm.txt"
UNFUSED, FUSED, TUNED = "unfused", "fused", "tuned"  # levels of a flavour: operators, kernels, kernels with searched schedules
LEVELS = (UNFUSED, FUSED, TUNED)
OLDEST_ARCH = "sm_80"
# What every GPU of these architectures has at least (CUDA C++ Programming Guide, "Compute Capabilities", 8.0 and later).
ANY_GPU = {"kind": "cuda", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "thread_warp_size": 32}
IS_SCHEDULED = "tirx.is_scheduled"  # an attribute of functions that TVM's rules leave as they are
SPECIAL_RULES = ("Matmul", "GEMV", "Reduction", "GeneralReduction")  # each for some functions; the order is TVM's
SUFFIX = ".tvm"
MAIN = "main"
REMAKE = "remove it, and make it anew with: python runtimes/tvm/relax_parser.py"


def _pathfinder() -> Any:
    """The package that finds pip's parts of CUDA; None if not installed."""
    return import_module("cuda.pathfinder") if find_spec("cuda") and find_spec("cuda.pathfinder") else None


def load_cuda_runtime() -> None:
    """Loads pip's CUDA runtime, so that TVM finds it in the process. Must be called before TVM is imported."""
    if pathfinder := _pathfinder():
        with suppress(pathfinder.DynamicLibNotFoundError):  # the system may have it
            pathfinder.load_nvidia_dynamic_lib("cudart")


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
        raise UserError(f"the package cuda-bindings is not installed, and TVM needs it to compile for a GPU; "
                        f"{INSTALL_BINDINGS}")


@functools.lru_cache(maxsize=64)  # a search compiles its best trial again
def compiled_cubin(source: str, arch: str) -> bytes:
    """CUDA code compiled to machine code for a GPU architecture, e.g. `sm_90`."""
    _find_headers()
    return bytes(import_module("tvm.support.nvcc").compile_cuda(source, target_format="cubin", arch=arch, compiler="nvrtc"))


def kept_cubin(source: str, arch: str, folder: Path) -> bytes:
    """Like `compiled_cubin`, but cached in `folder`."""
    _, *version = import_module("cuda.bindings.nvrtc").nvrtcVersion()
    name = hashlib.sha256(f"{arch} {version} {source}".encode()).hexdigest()[:32]
    path = folder / f"{name}.cubin"
    if not path.is_file():
        files.write_bytes(path, compiled_cubin(source, arch))
    return path.read_bytes()


def compile_for(arch: str, folder: Path | None = None) -> None:
    """Makes TVM compile for a GPU architecture and keep machine code in `folder`. If this machine has a GPU, it must be that
    GPU's architecture."""
    check_compiler()
    import_module("tvm.support.nvcc")  # registers TVM's own function first
    compiler = functools.partial(compiled_cubin, arch=arch) if folder is None else functools.partial(kept_cubin, arch=arch,
                                                                                                    folder=folder)
    tvm_ffi.register_global_func(CALLBACK, compiler, override=True)


def check_tvm() -> None:
    """Checks that TVM is installed, and loads those of its parts that it does not load itself."""
    if find_spec("tvm") is None:
        raise UserError(f"the package apache-tvm is not installed, and this needs it; {INSTALL}")
    load_cuda_runtime()
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
    """TVM's target for an NVIDIA GPU architecture. Graphs are lowered for the oldest one, so that all GPUs, and machines
    without one, get the same graph."""
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


def target_to_lower_for(device: str) -> Any:
    """TVM's target for graphs of `cpu` or `cuda`."""
    return llvm_target() if device == "cpu" else gpu_target()


def target_to_run_on(device: str, threads: int = 1) -> Any:
    """TVM's target for functions on this machine's `cpu` or `cuda`."""
    return llvm_target(threads) if device == "cpu" else gpu_target(arch_here())


log = get_logger("tvm")


class _Rule:
    """A TVM scheduling rule that is skipped if it fails; otherwise TVM's list of rules would end there."""

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
    """A module with schedules from TVM's fixed rules (DLight) for all functions without one."""
    dlight = import_module("tvm.s_tir.dlight")
    with target:
        return dlight.ApplyDefaultSchedule(*map(_Rule, SPECIAL_RULES), dlight.gpu.Fallback())(module)


def scheduled(function: Any) -> Any:
    """A function with a searched schedule, marked so that rules do not change it."""
    return function.with_attr(IS_SCHEDULED, True)


def pipeline_after_schedules(target: Any) -> Any:
    """TVM's passes for a model on a GPU after fusion, which was already done."""
    passes = import_module("tvm.relax.backend.cuda.pipeline")
    return tvm.transform.Sequential([*passes.dataflow_lower_passes(target), *passes.finalize_passes(target)])


def on_gpu(target: Any) -> bool:
    """Whether a TVM target is a GPU."""
    return "gpu" in target.keys


def _compiled(module: Any, target: Any, **options: Any) -> Any:
    """A module compiled for a TVM target; on a GPU, functions without schedules get those of rules. `options` are those of
    TVM's `compile`."""
    try:
        return tvm.compile(with_gpu_schedules(module, target) if on_gpu(target) else module, target, **options)
    except Exception as error:  # TVM raises all sorts
        raise UserError(f"TVM can't compile it: {type(error).__name__}: {error}") from error


def built_function(function: Any, target: Any) -> Any:
    """A TVM function, compiled for a TVM target."""
    built = _compiled(tvm.IRModule({MAIN: function.with_attr("global_symbol", MAIN)}), target)
    return built.mod if hasattr(built, "mod") else built


def compiled_model(module: Any, target: Any) -> Any:
    """A lowered module, compiled for a TVM target."""
    return _compiled(module, target, **({"relax_pipeline": pipeline_after_schedules(target)} if on_gpu(target) else {}))


def with_searched_schedules(module: Any, callees: Mapping[str, str], folder: Path) -> Any:
    """A model's module in which kernels with a searched schedule use their function in `folder`."""
    functions = dict(module.functions.items())
    for gv in list(functions):
        if gv.name_hint in callees and (path := folder / f"{callees[gv.name_hint]}{SUFFIX}").is_file():
            functions[gv] = read_function(path)
    return tvm.IRModule(functions)


def cuda_sources(built: Any) -> list[str]:
    """The CUDA code of something compiled for a GPU on a machine without one."""
    modules = [built]
    for module in modules:
        modules.extend(module.imports)
    return [str(module.inspect_source("cuda")) for module in modules if module.kind == "cuda"]


def hash_of(function: Any) -> str:
    """A hash of 16 digits, equal for functions with the same computation, whatever their names."""
    return f"{tvm_ffi.structural_hash(function.without_attr('global_symbol')) & (2**64 - 1):016x}"


def function_path(workspace: Workspace, flavour: Flavour, kernel: str) -> Path:
    """The file of a kernel's function: a JSON line that describes the kernel, then TVM's text of the function."""
    return workspace.kernel_onnx / flavour.name / f"{kernel}{SUFFIX}"


def write_functions(workspace: Workspace, flavour: Flavour, kernels: Mapping[str, Kernel],
                    functions: Mapping[str, Any]) -> None:
    """Writes the functions of kernels, by id; existing files stay."""
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
