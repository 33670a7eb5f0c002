"""What else runs on the device: one interface to its metrics, whoever reads them, by DCGM field name.

A source gives the *mean over a window* of each field. `start` opens a window, `stop` closes it; windows may overlap,
since each keeps its own first reading. Fields, units and limits stand in one table, `FIELDS`; a value outside its
limits is an error and never becomes a feature.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from utils.errors import UserError
from utils.fingerprint import resolve_provider
from utils.logger import get_logger

OVERSHOOT = 1.02  # counters and clock are read one after the other, so a busy device can seem up to this busy


@dataclass(frozen=True)
class Field:
    """A metric's unit and largest possible value (the smallest is 0)."""

    unit: str
    maximum: float
    meaning: str


FIELDS = {
    # NVIDIA GPU, by its performance counters (NVML GPM: Hopper and later)
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": Field("ratio", 1.0, "time that any graphics or compute engine was active"),
    "DCGM_FI_PROF_SM_ACTIVE": Field("ratio", 1.0, "time that an SM had a warp, averaged over the SMs"),
    "DCGM_FI_PROF_SM_OCCUPANCY": Field("ratio", 1.0, "resident warps out of those that fit"),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": Field("ratio", 1.0, "time that the tensor cores were active"),
    "DCGM_FI_PROF_DRAM_ACTIVE": Field("ratio", 1.0, "time that the memory moved data"),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": Field("ratio", 1.0, "time that the fp64 pipe was active"),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": Field("ratio", 1.0, "time that the fp32 pipe was active"),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": Field("ratio", 1.0, "time that the fp16 pipe was active"),
    "DCGM_FI_PROF_PCIE_TX_BYTES": Field("bytes/s", 1e12, "sent over PCIe"),
    "DCGM_FI_PROF_PCIE_RX_BYTES": Field("bytes/s", 1e12, "received over PCIe"),
    # NVIDIA GPU, by plain NVML
    "DCGM_FI_DEV_GPU_UTIL": Field("per cent", 100.0, "time that any kernel ran"),
    "DCGM_FI_DEV_MEM_COPY_UTIL": Field("per cent", 100.0, "time that the memory was read or written"),
    "DCGM_FI_DEV_SM_CLOCK": Field("MHz", 1e4, "clock of the SMs"),
    "DCGM_FI_DEV_MEM_CLOCK": Field("MHz", 1e5, "clock of the memory"),
    "DCGM_FI_DEV_POWER_USAGE": Field("W", 1e4, "power drawn"),
    # CPU, all logical processors together
    "DCGM_FI_DEV_CPU_UTIL_TOTAL": Field("ratio", 1.0, "time not idle"),
    "DCGM_FI_DEV_CPU_UTIL_USER": Field("ratio", 1.0, "time in user code"),
    "DCGM_FI_DEV_CPU_UTIL_NICE": Field("ratio", 1.0, "time in user code of low priority"),
    "DCGM_FI_DEV_CPU_UTIL_SYS": Field("ratio", 1.0, "time in the kernel"),
    "DCGM_FI_DEV_CPU_UTIL_IRQ": Field("ratio", 1.0, "time in interrupts"),
}


@dataclass(frozen=True)
class Window:
    """An open window: when it began (seconds, monotonic) and what the source read then."""

    began_s: float
    reading: Any


class MetricSource(ABC):
    """Means of metrics over windows. A new source says what it can read (`available`), and how a reading is taken and
    two of them become means (`_read`, `_means`).

    Attributes:
        fields: what it reads, names of FIELDS.
    """

    name: ClassVar[str]
    minimum_window_s: ClassVar[float]

    def __init__(self, available: Sequence[str], fields: Sequence[str] | None) -> None:
        """Reads `fields`, or all that are `available` where none is named; `UserError` for one that is not."""
        unknown = [field for field in fields or () if field not in available]
        if unknown:
            raise UserError(f"metric {', '.join(unknown)}: {self.name} can't read it here; it has {', '.join(available)}")
        self.fields = tuple(dict.fromkeys(fields or available))

    @abstractmethod
    def _read(self) -> Any:
        """What the device shows now."""

    @abstractmethod
    def _means(self, before: Window, after: Window) -> dict[str, float]:
        """The mean of every field between two readings, in the units of FIELDS."""

    def start(self) -> Window:
        """Opens a window."""
        return Window(time.monotonic(), self._read())

    def stop(self, window: Window) -> dict[str, float]:
        """Closes `window`: the mean of each field since it was opened, in the units of FIELDS. May take a moment, until the
        device shows what it did up to now.

        Raises:
            UserError: it is shorter than `minimum_window_s`, or a value is not a number within its limits.
        """
        now = time.monotonic()
        lasted_s = now - window.began_s
        if lasted_s < self.minimum_window_s:
            raise UserError(f"a metric window of {lasted_s * 1e3:.0f} ms is too short to be valid: "
                            f"{self.name} needs {self.minimum_window_s * 1e3:.0f} ms")
        means = self._means(window, Window(now, self._read()))
        return {field: checked(field, means[field]) for field in self.fields}

    def window(self, seconds: float) -> dict[str, float]:
        """The mean of each field over the next `seconds`."""
        opened = self.start()
        time.sleep(seconds)
        return self.stop(opened)


def checked(field: str, value: float) -> float:
    """`value`, if it is one that `field` can have; a hair above the limit is the limit.

    Raises:
        UserError: NaN, infinite, negative or beyond the limit.
    """
    limit = FIELDS[field].maximum
    if not math.isfinite(value) or not 0.0 <= value <= limit * OVERSHOOT:
        raise UserError(f"metric {field}: the device reports {value:g} {FIELDS[field].unit}, possible is 0 to {limit:g}; "
                        "measure again, and leave this metric out of the config if it stays so")
    return min(float(value), limit)


def open_source(execution_provider: str = "auto", fields: Sequence[str] | None = None) -> MetricSource:
    """The best source on this machine for the device of `auto`, `cuda` or `cpu`, reading `fields` (none: all it can).

    Raises:
        UserError: a field that it can't read (those it can are listed), or no GPU where CUDA is asked for.
    """
    source: MetricSource
    if resolve_provider(execution_provider) == "cuda":
        from benchmark.nvml_metrics import NvmlSource

        source = NvmlSource(fields)
    else:
        from benchmark.cpu_metrics import CpuSource

        source = CpuSource(fields)
    get_logger("metrics").debug("metrics: %s gives %s", source.name, ", ".join(source.fields))
    return source
