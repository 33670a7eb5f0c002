"""The flavours and the targets that this machine is, under any runtime."""

from __future__ import annotations

from runtimes import runtime_named
from utils.fingerprint import DEFAULT_RUNTIME, Flavour, Target, cpu_name, gpu_facts, instruction_set, physical_cores


def flavour_of(device: str, runtime: str = DEFAULT_RUNTIME, level: str = "") -> Flavour:
    """The flavour that this machine's `runtime` gives graphs for `cpu` or `cuda`.

    Args:
        device: `cpu` or `cuda`.
        runtime: its name.
        level: of optimisation; "" for the usual one.

    Raises:
        UserError: there is no such runtime.
    """
    described = runtime_named(runtime)
    return Flavour(
        device=device, runtime=runtime, runtime_version=".".join(described.version().split(".")[:2]),
        optimization=level or described.levels[0], instruction_set=instruction_set() if device == "cpu" else "",
    )


def local_target(device: str, runtime: str = DEFAULT_RUNTIME, level: str = "", threads: int = 0, cores: int = 0) -> Target:
    """The target that this machine is, with the runtime's default options.

    Args:
        device, runtime, level: of the flavour.
        threads: on a CPU; 0: one for each physical core.
        cores: that the threads are pinned to; 0: they are not pinned.

    Raises:
        UserError: there is no such runtime.
    """
    flavour = flavour_of(device, runtime, level)
    if device == "cuda":
        return Target(device_name=gpu_facts()["name"], flavour=flavour)
    return Target(device_name=cpu_name(), flavour=flavour, threads=threads or physical_cores(), cores=cores)
