"""CPU metrics from the kernel's time counters (psutil), under DCGM's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil

from measuring.metrics.source import MetricSource, Window

COUNTERS = {  # field -> the counters that it sums
    "DCGM_FI_DEV_CPU_UTIL_USER": ("user",),
    "DCGM_FI_DEV_CPU_UTIL_NICE": ("nice",),
    "DCGM_FI_DEV_CPU_UTIL_SYS": ("system",),
    "DCGM_FI_DEV_CPU_UTIL_IRQ": ("irq", "softirq"),
}
NOT_BUSY = ("idle", "iowait")
WITHIN_OTHERS = ("guest", "guest_nice")  # Linux counts these in user and nice already


class CpuSource(MetricSource):
    """Utilisation of all logical processors, from differences of counters. `psutil.cpu_percent` keeps one global last reading,
    so two windows at the same time would disturb each other."""

    name = "psutil"
    minimum_window_s = 0.2  # the counters tick every 10 ms

    def __init__(self, fields: Sequence[str] | None = None) -> None:
        there = psutil.cpu_times()._fields
        super().__init__(["DCGM_FI_DEV_CPU_UTIL_TOTAL"] + [
            field for field, counters in COUNTERS.items() if any(counter in there for counter in counters)], fields)

    def _read(self) -> Any:
        return psutil.cpu_times()

    def _readings(self, before: Window, after: Window) -> dict[str, list[float]]:
        # a counter can step back by a tick (iowait does); that counts as no time
        spent = {name: max(0.0, getattr(after.reading, name) - getattr(before.reading, name))
                 for name in after.reading._fields if name not in WITHIN_OTHERS}
        total = sum(spent.values()) or float("nan")
        means = {field: sum(spent.get(counter, 0.0) for counter in counters) / total
                 for field, counters in COUNTERS.items()}
        means["DCGM_FI_DEV_CPU_UTIL_TOTAL"] = 1.0 - sum(spent.get(name, 0.0) for name in NOT_BUSY) / total
        return {field: [mean] for field, mean in means.items()}
