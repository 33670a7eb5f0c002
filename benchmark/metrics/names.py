"""Metrics by DCGM's field names (old and new) with their units, and the reading of Hase's sharing probe as metrics.

The unit follows from the name, never from the size of a value. The PCIe rates and the CPU's utilisation keep their old names.
Sources, looked up in November 2026:

- old names and units: dcgm-exporter, docs/metrics.md and etc/default-counters.csv (to 4.8); identifiers: dcgm_fields.h;
- new names with the same unit: `_DEPRECATED_ALIASES` in DCGM's own dcgm_fields.py;
- new names with another unit (clocks from MHz to hertz, utilisation from per cent to a ratio): release notes of dcgm-exporter
  4.9.0; for the clocks go-dcgm's table of base-unit fields; for both utilisations NVIDIA's Field Identifiers for DCGM 4.7, as
  quoted by others;
- blanks: dcgmvalue.py in DCGM's bindings; labels: dcgm-exporter's template of a metric.

DCGM itself is asked by identifier, because one name changed its meaning: DCGM_FI_DEV_GPU_UTIL_RATIO was field 203, in per cent,
in DCGM 4.6 only; since 4.7 it is a separate field, a ratio. No dcgm-exporter before 4.9 serves it by default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from hase.records.probe_reading import QUANTILES, ProbeSummary
from hase.utils.errors import UserError


@dataclass(frozen=True)
class MetricField:
    """A metric's unit and largest possible value (the smallest is 0); for DCGM also its identifier and new name. The new names
    are since DCGM 4.7 and dcgm-exporter 4.9. Values by identifier keep the old unit."""

    unit: str
    maximum: float
    meaning: str
    dcgm_id: int | None = None
    new_name: str = ""
    new_unit: str = ""  # of values under the new name, if another
    new_scale: float = 1.0  # factor from the new unit to the old one


FIELDS = {
    # NVIDIA GPU, by its performance counters (NVML GPM: Hopper and later)
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": MetricField(
        "ratio", 1.0, "time that any graphics or compute engine was active", 1001, "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO"),
    "DCGM_FI_PROF_SM_ACTIVE": MetricField(
        "ratio", 1.0, "time that an SM had a warp, averaged over the SMs", 1002, "DCGM_FI_PROF_SM_UTIL_RATIO"),
    "DCGM_FI_PROF_SM_OCCUPANCY": MetricField(
        "ratio", 1.0, "resident warps out of those that fit", 1003, "DCGM_FI_PROF_SM_OCCUPANCY_RATIO"),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": MetricField(
        "ratio", 1.0, "time that the tensor cores were active", 1004, "DCGM_FI_PROF_TENSOR_UTIL_RATIO"),
    "DCGM_FI_PROF_DRAM_ACTIVE": MetricField(
        "ratio", 1.0, "time that the memory moved data", 1005, "DCGM_FI_PROF_DRAM_UTIL_RATIO"),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": MetricField(
        "ratio", 1.0, "time that the fp64 pipe was active", 1006, "DCGM_FI_PROF_FP64_UTIL_RATIO"),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": MetricField(
        "ratio", 1.0, "time that the fp32 pipe was active", 1007, "DCGM_FI_PROF_FP32_UTIL_RATIO"),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": MetricField(
        "ratio", 1.0, "time that the fp16 pipe was active", 1008, "DCGM_FI_PROF_FP16_UTIL_RATIO"),
    "DCGM_FI_PROF_PCIE_TX_BYTES": MetricField("bytes/s", 1e12, "sent over PCIe", 1009),
    "DCGM_FI_PROF_PCIE_RX_BYTES": MetricField("bytes/s", 1e12, "received over PCIe", 1010),
    # NVIDIA GPU, by plain NVML
    "DCGM_FI_DEV_GPU_UTIL": MetricField(
        "per cent", 100.0, "time that any kernel ran", 203, "DCGM_FI_DEV_GPU_UTIL_RATIO", "ratio", 100.0),
    "DCGM_FI_DEV_MEM_COPY_UTIL": MetricField(
        "per cent", 100.0, "time that the memory was read or written", 204, "DCGM_FI_DEV_MEMORY_UTIL_RATIO", "ratio", 100.0),
    "DCGM_FI_DEV_SM_CLOCK": MetricField("MHz", 1e4, "clock of the SMs", 100, "DCGM_FI_DEV_SM_CLOCK_HERTZ", "Hz", 1e-6),
    "DCGM_FI_DEV_MEM_CLOCK": MetricField("MHz", 1e5, "clock of the memory", 101, "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", "Hz", 1e-6),
    "DCGM_FI_DEV_POWER_USAGE": MetricField("W", 1e4, "power drawn", 155, "DCGM_FI_DEV_BOARD_POWER_WATTS"),
    # CPU, all logical processors together
    "DCGM_FI_DEV_CPU_UTIL_TOTAL": MetricField("ratio", 1.0, "time not idle"),
    "DCGM_FI_DEV_CPU_UTIL_USER": MetricField("ratio", 1.0, "time in user code"),
    "DCGM_FI_DEV_CPU_UTIL_NICE": MetricField("ratio", 1.0, "time in user code of low priority"),
    "DCGM_FI_DEV_CPU_UTIL_SYS": MetricField("ratio", 1.0, "time in the kernel"),
    "DCGM_FI_DEV_CPU_UTIL_IRQ": MetricField("ratio", 1.0, "time in interrupts"),
}


@dataclass(frozen=True)
class MetricName:
    """A name of a metric."""

    field: str  # the metric's name in FIELDS, which is DCGM's old one
    unit: str  # of values under this name
    scale: float = 1.0  # factor from this unit to the unit of FIELDS


NEW_NAMES = {about.new_name: MetricName(field, about.new_unit or about.unit, about.new_scale)
             for field, about in FIELDS.items() if about.new_name}
NAMES = {field: MetricName(field, about.unit) for field, about in FIELDS.items()} | NEW_NAMES  # all, old and new
IDS = {field: about.dcgm_id for field, about in FIELDS.items() if about.dcgm_id is not None}
# Numbers that mean "no value": a base, plus up to 15 for the reason. Drivers report -1 as an unsigned number.
INT32_BLANK, INT64_BLANK, FP64_BLANK = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 2.0**47
UNSIGNED_MINUS_ONE = (2**32 - 1, 2**64 - 1)
# dcgm-exporter's labels of a device, and the additional ones of a part of a GPU (a MIG instance)
INDEX_LABEL, UUID_LABEL, DEVICE_LABEL, MODEL_LABEL, HOST_LABEL = "gpu", "UUID", "device", "modelName", "Hostname"
PART_LABEL, PROFILE_LABEL = "GPU_I_ID", "GPU_I_PROFILE"


def metric_names(field: str) -> list[str]:
    """All names of a metric in FIELDS, the old one first."""
    return [name for name, about in NAMES.items() if about.field == field]


def is_blank(value: float) -> bool:
    """Whether `value` is one of the numbers that mean "no value"."""
    return (value in UNSIGNED_MINUS_ONE or INT32_BLANK <= value <= INT32_BLANK + 15
            or FP64_BLANK <= value <= FP64_BLANK + 15 or value >= INT64_BLANK)


def in_field_unit(name: str, value: float) -> float:
    """Converts the value of a metric, under one of its names, to its unit in FIELDS; blanks stay."""
    return value if is_blank(value) else value * NAMES[name].scale


def new_metric_name(field: str) -> str:
    """The new name of a metric in FIELDS, or the old one if there is no new one."""
    return metric_names(field)[-1]


# the sharing probe's reading as metrics ----------------------------------------------------------------------------------

LATENCY, PHASE, PROBE_TIME = "hase_probe_latency_seconds", "hase_probe_phase_seconds", "hase_probe_timestamp_seconds"
MEANINGS = {
    LATENCY: "latency of the sharing probe's runs; runs: all, or those that waited for other work (s)",
    PHASE: "mean length of phases in which other work kept the device busy or left it idle (s)",
    PROBE_TIME: "time of the sharing probe's measurement; mode: how processes share the device (s since 1970)",
}
RUNS, QUANTILE, KIND, MODE = "runs", "quantile", "phase", "mode"  # labels
OWN_LABELS = {LATENCY: (RUNS, QUANTILE), PHASE: (KIND,), PROBE_TIME: (MODE,)}
ALL, WAITED, BUSY, QUIET = "all", "waited", "busy", "quiet"
NO_GPU = "cpu"  # the mode on a CPU: an empty label would be the same as no label
QUANTILE_VALUES = tuple(f"{rank / (QUANTILES - 1):g}" for rank in range(QUANTILES))


class InvalidProbeSamples(UserError):
    """Samples from which no valid summary can be made; `fact` says what is wrong."""

    def __init__(self, fact: str) -> None:
        super().__init__(f"the sharing probe's reading: {fact}")
        self.fact = fact


class ProbeSample(NamedTuple):
    """A value of a metric with its labels, except the device's."""

    name: str
    labels: Mapping[str, str]
    value: float


class TimedProbeSummary(NamedTuple):
    """The summary of a sharing probe's measurement, and its time (seconds since 1970)."""

    summary: ProbeSummary
    taken_s: float


def probe_to_samples(probed: TimedProbeSummary) -> Iterator[ProbeSample]:
    """The samples to serve, metric by metric. If no run waited, there are no samples of waiting runs."""
    summary = probed.summary
    for runs, latencies_ms in ((ALL, summary.latencies_ms), (WAITED, summary.waited_ms)):
        for quantile, latency_ms in zip(QUANTILE_VALUES, latencies_ms, strict=False):
            yield ProbeSample(LATENCY, {RUNS: runs, QUANTILE: quantile}, latency_ms / 1e3)
    for kind, length_ms in ((BUSY, summary.busy_ms), (QUIET, summary.quiet_ms)):
        yield ProbeSample(PHASE, {KIND: kind}, length_ms / 1e3)
    yield ProbeSample(PROBE_TIME, {MODE: summary.sharing or NO_GPU}, probed.taken_s)


def probe_from_samples(samples: Iterable[ProbeSample]) -> TimedProbeSummary:
    """The probe's summary from its samples. Raises InvalidProbeSamples if one is missing, is no number, or contradicts others.
    A server may keep old series (for instance with federation), so samples that the summary does not need are ignored."""
    samples_by_key = {(sample.name, *(sample.labels.get(label, "") for label in OWN_LABELS[sample.name])): sample.value
                      for sample in samples}

    def values(*keys: tuple[str, ...]) -> tuple[float, ...]:
        if missing := [key for key in keys if key not in samples_by_key]:
            name, *labels = missing[0]
            shown = ",".join(f'{label}="{value}"' for label, value in zip(OWN_LABELS[name], labels, strict=True))
            raise InvalidProbeSamples(f"{len(missing)} of its samples are missing, {name}{{{shown}}} first")
        return tuple(samples_by_key[key] for key in keys)

    taken_s = {key[1]: value for key, value in samples_by_key.items() if key[0] == PROBE_TIME}  # by sharing mode
    if not taken_s:
        raise InvalidProbeSamples(f"{PROBE_TIME} is missing")
    if not all(map(math.isfinite, taken_s.values())):
        raise InvalidProbeSamples(f"{PROBE_TIME} is not a time")
    mode = max(taken_s, key=taken_s.__getitem__)
    busy_s, quiet_s = values((PHASE, BUSY), (PHASE, QUIET))
    latencies_s = values(*((LATENCY, ALL, quantile) for quantile in QUANTILE_VALUES))
    waited_s = values(*((LATENCY, WAITED, quantile) for quantile in QUANTILE_VALUES)) if busy_s != 0.0 else ()
    try:
        summary = ProbeSummary.model_validate({
            "sharing": None if mode == NO_GPU else mode, "latencies_ms": [1e3 * value for value in latencies_s],
            "waited_ms": [1e3 * value for value in waited_s], "busy_ms": 1e3 * busy_s, "quiet_ms": 1e3 * quiet_s})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidProbeSamples(f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}") from None
    return TimedProbeSummary(summary, taken_s[mode])
