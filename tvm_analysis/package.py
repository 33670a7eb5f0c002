"""Whether TVM is there, and what it compiles for."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from utils.errors import UserError
from utils.fingerprint import Flavour, flavour_of
from utils.lazy import tvm

INSTALL = "pip install -r requirements-tvm.txt"
UNFUSED, FUSED, TUNED = "unfused", "fused", "tuned"  # levels of a flavour: operators, kernels, kernels with searched schedules
LEVELS = (UNFUSED, FUSED, TUNED)
# What every GPU since 2020 has at least (CUDA C++ Programming Guide, "Compute Capabilities", 8.0).
ANY_GPU = {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152,
           "thread_warp_size": 32}


def check_tvm() -> None:
    """Checks that TVM is installed, and loads its parts that are not loaded with it.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("tvm") is None:
        raise UserError(f"the package apache-tvm is not installed, and this needs it; {INSTALL}")
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
def any_gpu() -> Any:
    """TVM's target for an NVIDIA GPU of no particular model. Graphs are lowered for it, so that all GPUs get one graph, also on
    a machine without a GPU."""
    return tvm.target.Target(ANY_GPU, host=llvm_target())


def target_to_lower_for(device: str) -> Any:
    """TVM's target for the graphs of `cpu` or `cuda`."""
    return llvm_target() if device == "cpu" else any_gpu()


def target_to_run_on(device: str, threads: int = 1) -> Any:
    """TVM's target for functions that run on this machine's `cpu` or `cuda`.

    Raises:
        UserError: TVM finds no GPU.
    """
    if device == "cpu":
        return llvm_target(threads)
    gpu = tvm.cuda(0)
    if not gpu.exist:
        raise UserError("device cuda: TVM finds no NVIDIA GPU; nvidia-smi should list one")
    return tvm.target.Target(tvm.target.Target.from_device(gpu), host=llvm_target())
