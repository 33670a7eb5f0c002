"""The memory that a session holds at the peak of its runs, beyond what was held before it was opened; inference/core/memory.py
predicts it.

On a CPU it is the process's largest resident memory during the runs. What loading left free in the heap is given back first,
since how much that is differs from run to run. On a GPU it is the device's memory in use after the runs; nothing else may use
the device meanwhile.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

from hase.benchmark.metrics import nvml

STATUS, RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux


class HeldMemory:
    """Make it before the session is opened, call `opened` after that, and read `peak_mib` after the runs."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before_mib = _in_use_mib(device)

    def opened(self) -> None:
        """From here on the peak counts."""
        _give_back()
        with suppress(OSError):  # without it, the peak is that of loading or of the runs
            RESET_PEAK.write_text("5", encoding="ascii")

    @property
    def peak_mib(self) -> float:
        """The memory held at the peak so far, in MiB."""
        return (_in_use_mib("cuda") if self._device == "cuda" else _largest_resident_mib()) - self._before_mib


def _in_use_mib(device: str) -> float:
    """Memory that this process holds on a CPU, or that all processes hold on a GPU, in MiB."""
    if device == "cuda":
        return nvml.used_memory_mib()
    _give_back()
    return float(psutil.Process().memory_info().rss) / 2**20


def _give_back() -> None:
    """Gives the system back what is free in the heap, as far as the C library can do that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _largest_resident_mib() -> float:
    """The process's largest resident memory since the peak was last reset, in MiB; outside of Linux, that of now."""
    with suppress(OSError):
        return next(int(line.split()[1]) / 1024 for line in STATUS.read_text(encoding="ascii").splitlines()
                    if line.startswith("VmHWM:"))
    return float(psutil.Process().memory_info().rss) / 2**20
