"""The metric sources of this machine, and the choice between them.

A source returns the mean of each field over a *metrics window* and the number of samples. `start` opens a window, `stop` closes
it; windows may overlap. benchmark/metrics/names.py lists fields, units and limits; benchmark/metrics/source.py rejects samples
that cannot be right.

`SOURCES` are DCGM, NVML with and without performance counters, psutil for a CPU, and the replay of a recording. (Predictions
can also read a Prometheus: inference/live/prometheus_readings.py.) A recording has one JSON object per line: `time_s` (seconds,
ascending, from any start) and values by DCGM field name, old or new, in the unit of the name; null is a blank:

    {"time_s": 0.0, "DCGM_FI_PROF_SM_ACTIVE": 0.41, "DCGM_FI_DEV_GPU_UTIL_RATIO": 0.97}
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from hase.benchmark.metrics.gpu_sources import CountersMissing, DcgmMissing, DcgmSource, NvmlSource
from hase.benchmark.metrics.names import NAMES, in_field_unit
from hase.benchmark.metrics.source import MetricSource, OpenWindow
from hase.records.measurement import CPU_BUSY
from hase.utils.errors import UserError
from hase.utils.fingerprint import resolve_device
from hase.utils.logger import get_logger

COUNTERS = {  # field -> the counters that it sums
    "DCGM_FI_DEV_CPU_UTIL_USER": ("user",),
    "DCGM_FI_DEV_CPU_UTIL_NICE": ("nice",),
    "DCGM_FI_DEV_CPU_UTIL_SYS": ("system",),
    "DCGM_FI_DEV_CPU_UTIL_IRQ": ("irq", "softirq"),
}
NOT_BUSY = ("idle", "iowait")
WITHIN_OTHERS = ("guest", "guest_nice")  # already counted in user and nice by Linux


class CpuSource(MetricSource):
    """Utilisation of all logical processors, by differences of counters, so that windows may overlap (unlike psutil's)."""

    name = "psutil"
    minimum_window_s = 0.2  # the counters tick every 10 ms

    def __init__(self, fields: Sequence[str] | None = None) -> None:
        counted = psutil.cpu_times()._fields
        super().__init__([CPU_BUSY] + [
            field for field, counters in COUNTERS.items() if any(counter in counted for counter in counters)], fields)

    def _read(self) -> Any:
        return psutil.cpu_times()

    def _readings(self, before: OpenWindow, after: OpenWindow) -> dict[str, list[float]]:
        # a counter can step back by a tick (iowait does); that counts as no time
        spent = {name: max(0.0, getattr(after.reading, name) - getattr(before.reading, name))
                 for name in after.reading._fields if name not in WITHIN_OTHERS}
        total = sum(spent.values()) or float("nan")
        means = {field: sum(spent.get(counter, 0.0) for counter in counters) / total
                 for field, counters in COUNTERS.items()}
        means[CPU_BUSY] = 1.0 - sum(spent.get(name, 0.0) for name in NOT_BUSY) / total
        return {field: [mean] for field, mean in means.items()}


# replay of a recording ---------------------------------------------------------------------------------------------------

TIME = "time_s"
LONE_GAP_S = 1.0  # when the only sample of a file is replayed


class ReplaySource(MetricSource):
    """Replays a file's samples in real time; `times_s` are seconds after its creation."""

    minimum_window_s = 0.0

    def __init__(self, path: Path, fields: Sequence[str] | None = None, step_s: float | None = None) -> None:
        """Replays `path` by its timestamps, or with `step_s` seconds between samples."""
        self.name = f"the replay of {path.name}"
        self._path = path
        stamps_s, self._values = _load(path)
        gap_s = stamps_s[1] - stamps_s[0] if len(stamps_s) > 1 else LONE_GAP_S
        self.times_s = [(i + 1) * step_s if step_s else stamp_s - stamps_s[0] + gap_s for i, stamp_s in enumerate(stamps_s)]
        super().__init__(list(dict.fromkeys(field for reading in self._values for field in reading)), fields)
        self._began_s = time.monotonic()

    def _read(self) -> None:
        """Reads nothing: the whole file was read at the start."""

    def _readings(self, before: OpenWindow, after: OpenWindow) -> dict[str, list[float]]:
        begin_s, end_s = before.began_s - self._began_s, after.began_s - self._began_s
        if begin_s >= self.times_s[-1]:
            raise UserError(f"{self._path}: the replay is over: its last reading came after {self.times_s[-1]:g} s")
        samples: dict[str, list[float]] = {}
        for reading in self._values[bisect_right(self.times_s, begin_s):bisect_right(self.times_s, end_s)]:
            for field, value in reading.items():
                samples.setdefault(field, []).append(value)
        return samples


def _load(path: Path) -> tuple[list[float], list[dict[str, float]]]:
    """Timestamps of the samples, and their values by field, in the units of FIELDS."""
    if not path.exists():
        raise UserError(f"{path}: no such file to replay")
    stamps_s: list[float] = []
    readings: list[dict[str, float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            reading = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON ({error}); a reading is an object on a line of its own") from None
        if not isinstance(reading, dict) or not isinstance(reading.get(TIME), int | float):
            raise UserError(f'{where}: not a reading: an object with "{TIME}" and values by DCGM field name is expected')
        stamps_s.append(reading.pop(TIME))
        if len(stamps_s) > 1 and stamps_s[-1] <= stamps_s[-2]:
            raise UserError(f"{where}: {TIME} {stamps_s[-1]:g} is not later than that of the reading before")
        readings.append({})
        for name, value in reading.items():
            if name not in NAMES:
                raise UserError(f"{where}: {name}: unknown metric; Hase knows {', '.join(NAMES)}")
            if not isinstance(value, int | float | None):
                raise UserError(f"{where}: {name}: {value!r} is not a number")
            readings[-1][NAMES[name].field] = math.nan if value is None else in_field_unit(name, value)
    if not readings:
        raise UserError(f"{path}: no reading to replay")
    return stamps_s, readings


# choice of a source ------------------------------------------------------------------------------------------------------

SourceName = Literal["auto", "dcgm", "nvml-gpm", "nvml", "psutil", "replay"]
SOURCES: tuple[SourceName, ...] = get_args(SourceName)
log = get_logger("metrics")


def open_source(device: str = "auto", fields: Sequence[str] | None = None, source: SourceName = "auto", *,
                dcgm_address: str | None = None, replay: Path | None = None,
                replay_step_s: float | None = None) -> MetricSource:
    """Opens a source of metrics of this machine; `auto` takes the best available one and logs the choice.

    `dcgm_address` is a running nv-hostengine, HOST or HOST:PORT (None: DCGM runs in this process). `replay_step_s` is the time
    between samples of the file `replay` (None: by timestamps).
    """
    if (source == "replay") != (replay is not None):
        raise UserError(f"source {source}" + (" needs a file to replay" if replay is None else f": it does not read {replay}; "
                                              "choose source replay for that"))
    if replay is not None:
        return ReplaySource(replay, fields, replay_step_s)
    if replay_step_s is not None:
        raise UserError(f"source {source}: there is no step of a replay without a file to replay")
    device = resolve_device(device)
    _check_suits(source, device, dcgm_address)
    if device == "cpu":
        opened: MetricSource = CpuSource(fields)
        why = "this is a CPU target"
    elif source == "auto":
        opened, why = _best_for_gpu(fields, dcgm_address)
    else:
        opened, why = _gpu_source(source, fields, dcgm_address), ""
    if source == "auto":
        log.info("metrics: from %s: %s", opened.name, why)
    log.debug("metrics: %s gives %s", opened.name, ", ".join(opened.fields))
    return opened


def _check_suits(source: SourceName, device: str, dcgm_address: str | None) -> None:
    """Raises UserError if a source does not read `device`, or does not need the address."""
    if dcgm_address is not None and (source not in ("auto", "dcgm") or device == "cpu"):
        raise UserError(f"source {source} on {device}: it does not ask the DCGM at {dcgm_address}; "
                        "that reads a GPU, for source dcgm or auto")
    if source not in ("auto", "psutil") and device == "cpu":
        raise UserError(f"source {source} reads a GPU, and the device here is the CPU; use psutil or auto")
    if source == "psutil" and device == "cuda":
        raise UserError(f"source psutil reads the CPU, and the device here is a GPU; use one of {', '.join(SOURCES[:4])}")


def _gpu_source(source: SourceName, fields: Sequence[str] | None, dcgm_address: str | None) -> MetricSource:
    if source == "dcgm":
        return DcgmSource(fields, dcgm_address)
    return NvmlSource(fields, counters=source == "nvml-gpm")


def _best_for_gpu(fields: Sequence[str] | None, dcgm_address: str | None) -> tuple[MetricSource, str]:
    """The best source and the reason: DCGM at a given address, else GPM (exact means), else DCGM, else plain NVML."""
    if dcgm_address is not None:
        return _gpu_source("dcgm", fields, dcgm_address), "its address is given"
    try:
        return _gpu_source("nvml-gpm", fields, None), "this GPU's counters give the exact mean of a window (GPM)"
    except CountersMissing:
        pass
    try:
        return _gpu_source("dcgm", fields, None), "this GPU has no GPM, and DCGM is here"
    except DcgmMissing as error:
        return _gpu_source("nvml", fields, None), f"this GPU has no GPM, and there is no DCGM ({error})"
