"""The table of runtimes, and this machine's flavours and targets under them."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING

from hase.utils.errors import UserError
from hase.utils.fingerprint import DEFAULT_RUNTIME, Flavour, Target, cpu_name, gpu_facts, instruction_set, physical_cores

if TYPE_CHECKING:
    from hase.runtimes.runtime import Runtime

# By name, the module that defines RUNTIME. It is imported at first use.
MODULES = {
    "ort": "hase.benchmark.ort.runtime", "tvm": "hase.runtimes.tvm.runtime", "openvino": "hase.runtimes.openvino.runtime"}


@functools.cache
def runtime_named(name: str) -> Runtime:
    """The runtime with a name; a `UserError` if there is none."""
    if name not in MODULES:
        raise UserError(f"runtime {name}: unknown to this version; it knows {', '.join(MODULES)}")
    runtime: Runtime = import_module(MODULES[name]).RUNTIME
    return runtime


def local_flavour(device: str, runtime: str = DEFAULT_RUNTIME, level: str = "") -> Flavour:
    """The flavour of this machine's graphs for device `cpu` or `cuda` under a runtime; `level` "" is the usual optimisation."""
    description = runtime_named(runtime)
    return Flavour(
        device=device, runtime=runtime, runtime_version=".".join(description.version().split(".")[:2]),
        optimization=level or description.levels[0], instruction_set=instruction_set() if device == "cpu" else "")


def local_target(device: str, runtime: str = DEFAULT_RUNTIME, level: str = "", threads: int = 0, cores: int = 0) -> Target:
    """This machine as a target, with the runtime's default options. On a CPU, `threads` 0 is one per physical core, and `cores`
    0 means that threads are not pinned."""
    flavour = local_flavour(device, runtime, level)
    if device == "cuda":
        return Target(device_name=gpu_facts()["name"], flavour=flavour)
    return Target(device_name=cpu_name(), flavour=flavour, threads=threads or physical_cores(), cores=cores)
