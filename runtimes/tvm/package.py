"""Whether TVM is there, what it compiles for, and the machine code that it makes for GPUs."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hase.runtimes import flavour_of
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import tvm, tvm_ffi

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
        raise UserError(f"the package cuda-bindings is not installed, and TVM needs it to compile for a GPU; "
                        f"{INSTALL_BINDINGS}")


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
    `folder`, it keeps there what it compiled.

    Raises:
        UserError: NVIDIA's compiler can't be called from Python.
    """
    check_compiler()
    import_module("tvm.support.nvcc")  # registers TVM's own function first
    compiler = functools.partial(compiled_cubin, arch=arch) if folder is None else functools.partial(kept_cubin, arch=arch,
                                                                                                    folder=folder)
    tvm_ffi.register_global_func(CALLBACK, compiler, override=True)


def check_tvm() -> None:
    """Checks that TVM is installed, and loads its parts that are not loaded with it.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("tvm") is None:
        raise UserError(f"the package apache-tvm is not installed, and this needs it; {INSTALL}")
    load_cuda_runtime()
    import_module("tvm.relax.frontend.onnx")


def tvm_flavour(device: str = "cpu", level: str = FUSED) -> Flavour:
    """The flavour of TVM's graphs on this machine.

    Raises:
        UserError: TVM is not installed.
    """
    check_tvm()
    return flavour_of(device, "tvm", level)


@functools.cache
def llvm_target(threads: int = 1) -> Any:
    """TVM's target for this CPU; `threads` matter to tuning alone."""
    return tvm.target.Target({"kind": "llvm", "mcpu": tvm.get_global_func("target.llvm_get_system_cpu")(),
                              "num-cores": threads})


@functools.cache
def gpu_target(arch: str = OLDEST_ARCH) -> Any:
    """TVM's target for NVIDIA GPUs of an architecture. Graphs are lowered for the oldest one, so that all GPUs get one graph,
    also on a machine without a GPU."""
    return tvm.target.Target({**ANY_GPU, "arch": arch}, host=llvm_target())


def runs_on_gpus() -> bool:
    """Whether TVM has loaded its part for NVIDIA GPUs; it then makes machine code of what it compiles for one."""
    return tvm.get_global_func("device_api.cuda", allow_missing=True) is not None


def arch_here() -> str:
    """The architecture of this machine's GPU.

    Raises:
        UserError: TVM finds no GPU.
    """
    if not runs_on_gpus():
        raise UserError("device cuda: TVM can't load its part for NVIDIA GPUs; it needs the driver (nvidia-smi should list a "
                        "GPU) and CUDA 13 (pip install nvidia-cuda-runtime)")
    gpu = tvm.cuda(0)
    if not gpu.exist:
        raise UserError("device cuda: TVM finds no NVIDIA GPU; nvidia-smi should list one")
    return f"sm_{gpu.compute_version.replace('.', '')}"


def target_to_lower_for(device: str) -> Any:
    """TVM's target for the graphs of `cpu` or `cuda`."""
    return llvm_target() if device == "cpu" else gpu_target()


def target_to_run_on(device: str, threads: int = 1) -> Any:
    """TVM's target for functions that run on this machine's `cpu` or `cuda`.

    Raises:
        UserError: `cuda`, and TVM finds no GPU.
    """
    return llvm_target(threads) if device == "cpu" else gpu_target(arch_here())
