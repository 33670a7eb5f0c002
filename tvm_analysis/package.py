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
def llvm_target(threads: int) -> Any:
    """TVM's target for this CPU; `threads` matter to tuning alone."""
    return tvm.target.Target({"kind": "llvm", "mcpu": tvm.get_global_func("target.llvm_get_system_cpu")(),
                              "num-cores": threads})
