"""Short names of devices, as the commands and the folders of results use them."""

from __future__ import annotations

from utils.errors import UserError
from utils.fingerprint import gpu_facts, slug

NAMES = {"l40s": "an NVIDIA L40S", "h100": "an NVIDIA H100", "h200": "an NVIDIA H200", "v100": "an NVIDIA V100"}
CPU = "cpu"


def constraint(gpu: str) -> str:
    """Slurm's feature of nodes with this GPU, e.g. `gpul40s`."""
    return f"gpu{gpu}"


def named(device: str) -> str:
    """The short name of this machine's device, `cpu` or `cuda`."""
    if device == "cpu":
        return CPU
    parts = slug(gpu_facts()["name"]).split("-")
    return next((name for name in NAMES if name in parts), "-".join(part for part in parts if part != "nvidia"))


def check(gpu: str, device: str) -> str:
    """`gpu`, if that is the device of this machine.

    Raises:
        UserError: it is another one.
    """
    if gpu not in (*NAMES, CPU, named(device)):
        raise UserError(f"--gpu {gpu}: no such device; known are {', '.join(NAMES)} and {CPU}")
    if gpu != named(device):
        here = gpu_facts()["name"] if device == "cuda" else "a CPU: no NVIDIA GPU that the driver can talk to"
        raise UserError(f"--gpu {gpu}: the device of this machine is {here}; use --gpu {named(device)}, or run on a machine "
                        f"with {NAMES.get(gpu, 'that device')} (sinfo -C {constraint(gpu)} lists Slurm's)")
    return gpu
