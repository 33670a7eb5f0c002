"""The memory of a target's device, which shows the models that cannot run there."""

from __future__ import annotations

from collections.abc import Sequence

from utils.fingerprint import Machine, Target

GPU_MEMORY_MIB = {"NVIDIA H200": 143771.0}  # by device name, as nvidia-smi shows it


def device_memory_mib(target: Target, machines: Sequence[Machine]) -> float | None:
    """The memory of a target's device in MiB; None where it is not known.

    Args:
        target: the target.
        machines: those that were measured; for a CPU the smallest of their memories is taken.
    """
    if target.flavour.device == "cpu":
        return min((1024 * machine.memory_gib for machine in machines), default=None)
    return GPU_MEMORY_MIB.get(target.device_name)


def memory_warnings(needed_mib: float, there_mib: float | None) -> tuple[str, ...]:
    """A warning where a model needs more memory than its device has."""
    if there_mib is None or needed_mib <= there_mib:
        return ()
    return (f"it can't run there: it needs at least {needed_mib / 1024:.4g} GiB of memory, and the device has "
            f"{there_mib / 1024:.4g} GiB; the latency is one that no run has",)
