"""The environment in which kernels were measured, as features for estimators that are to hold in several."""

from __future__ import annotations

from pathlib import Path

import psutil

from hase.utils.fingerprint import Target, machine
from hase.utils.frozen import Frozen

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" where there is none
UNITS_KIB = {"K": 1, "M": 1024, "G": 1024**2}


class Environment(Frozen):
    """The processor and what may be used of it.

    Attributes:
        cpu: the model's name.
        threads: of the runtime.
        cores: that the threads may use: those to which they are pinned, else all.
        mhz: the highest frequency; where the system does not say, the current one; 0 if it says none.
        memory_limit_mib: the smallest of the config's limit, the container's and the machine's memory.
        l1_kib, l2_kib, l3_kib: of a core's caches of data; 0 where the system does not say.
    """

    cpu: str
    threads: int
    cores: int
    mhz: float
    memory_limit_mib: float
    l1_kib: int = 0
    l2_kib: int = 0
    l3_kib: int = 0


def cache_kib(folder: Path = CACHES) -> dict[int, int]:
    """The sizes of the caches of data by level, in KiB; empty where the system does not say."""
    sizes_kib = {}
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text(encoding="utf-8").strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size[:-1].isdigit() and size[-1] in UNITS_KIB:
            sizes_kib[int(level)] = int(size[:-1]) * UNITS_KIB[size[-1]]
    return sizes_kib


def container_limit_mib(path: Path = MEMORY_LIMIT) -> float | None:
    """The memory that this container may use; None where there is no limit."""
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else "max"
    return int(text) / 2**20 if text.isdigit() else None


def environment_of(target: Target, limit_mib: float = 0.0) -> Environment:
    """This machine's environment, that of the host for a GPU; `limit_mib` is the config's memory limit, 0 for none."""
    frequency, caches = psutil.cpu_freq(), cache_kib()
    limits = [psutil.virtual_memory().total / 2**20, container_limit_mib(), limit_mib or None]
    return Environment(
        cpu=machine("cpu").cpu, threads=target.threads, cores=target.cores or psutil.cpu_count() or 1,
        mhz=round(frequency.max or frequency.current, 1) if frequency else 0.0,
        memory_limit_mib=round(min(limit for limit in limits if limit is not None), 1),
        l1_kib=caches.get(1, 0), l2_kib=caches.get(2, 0), l3_kib=caches.get(3, 0))
