"""Machine code for NVIDIA GPUs. NVIDIA's compiler takes most of the time that a kernel costs, so what it made is kept."""

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

from utils import files
from utils.errors import UserError
from utils.lazy import tvm_ffi

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
