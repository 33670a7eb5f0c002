"""Whether TVM is there, and what it compiles for."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from runtimes.targets import flavour_of
from runtimes.tvm.compiling import load_cuda_runtime
from utils.errors import UserError
from utils.fingerprint import Flavour
from utils.lazy import tvm

INSTALL = "pip install -r requirements-tvm.txt"
UNFUSED, FUSED, TUNED = "unfused", "fused", "tuned"  # levels of a flavour: operators, kernels, kernels with searched schedules
LEVELS = (UNFUSED, FUSED, TUNED)
OLDEST_ARCH = "sm_80"
# What every GPU of these architectures has at least (CUDA C++ Programming Guide, "Compute Capabilities", 8.0 and later).
ANY_GPU = {"kind": "cuda", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "thread_warp_size": 32}


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
    """TVM's target for functions that run on this machine's `cpu` or `cuda`; errors as of `arch_here`."""
    return llvm_target(threads) if device == "cpu" else gpu_target(arch_here())
