"""The metrics that Hase knows, by DCGM's field names, old and new, with their units.

The unit follows from the name, never from the size of a value. The PCIe rates and the CPU's utilisation keep their old names.
Sources, looked up in November 2026:

- old names and their units: dcgm-exporter, docs/metrics.md and etc/default-counters.csv (to 4.8); identifiers: dcgm_fields.h;
- new names with the same unit: `_DEPRECATED_ALIASES` in DCGM's own dcgm_fields.py;
- new names with another unit (clocks from MHz to hertz, utilisation from per cent to a ratio): release notes of dcgm-exporter
  4.9.0; for the clocks go-dcgm's table of base-unit fields; for both utilisations NVIDIA's Field Identifiers for DCGM 4.7, as
  quoted by others;
- blanks: dcgmvalue.py in DCGM's bindings; labels: dcgm-exporter's template of a metric.

In DCGM 4.6 only, DCGM_FI_DEV_GPU_UTIL_RATIO was another name of field 203, in per cent; since 4.7 it is a field of its own, a
ratio. Therefore DCGM itself is asked by identifier. No dcgm-exporter before 4.9 serves that name by default.
"""

from __future__ import annotations

from dataclasses import dataclass


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
class Name:
    """A name of a metric.

    Attributes:
        field: the metric's name in FIELDS, which is DCGM's old one.
        unit: of values under this name.
        scale: factor from this unit to the unit of FIELDS.
    """

    field: str
    unit: str
    scale: float = 1.0


NEW_NAMES = {  # since DCGM 4.7 and dcgm-exporter 4.9
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": Name("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "ratio"),
    "DCGM_FI_PROF_SM_UTIL_RATIO": Name("DCGM_FI_PROF_SM_ACTIVE", "ratio"),
    "DCGM_FI_PROF_SM_OCCUPANCY_RATIO": Name("DCGM_FI_PROF_SM_OCCUPANCY", "ratio"),
    "DCGM_FI_PROF_TENSOR_UTIL_RATIO": Name("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "ratio"),
    "DCGM_FI_PROF_DRAM_UTIL_RATIO": Name("DCGM_FI_PROF_DRAM_ACTIVE", "ratio"),
    "DCGM_FI_PROF_FP64_UTIL_RATIO": Name("DCGM_FI_PROF_PIPE_FP64_ACTIVE", "ratio"),
    "DCGM_FI_PROF_FP32_UTIL_RATIO": Name("DCGM_FI_PROF_PIPE_FP32_ACTIVE", "ratio"),
    "DCGM_FI_PROF_FP16_UTIL_RATIO": Name("DCGM_FI_PROF_PIPE_FP16_ACTIVE", "ratio"),
    "DCGM_FI_DEV_GPU_UTIL_RATIO": Name("DCGM_FI_DEV_GPU_UTIL", "ratio", 100.0),
    "DCGM_FI_DEV_MEMORY_UTIL_RATIO": Name("DCGM_FI_DEV_MEM_COPY_UTIL", "ratio", 100.0),
    "DCGM_FI_DEV_SM_CLOCK_HERTZ": Name("DCGM_FI_DEV_SM_CLOCK", "Hz", 1e-6),
    "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ": Name("DCGM_FI_DEV_MEM_CLOCK", "Hz", 1e-6),
    "DCGM_FI_DEV_BOARD_POWER_WATTS": Name("DCGM_FI_DEV_POWER_USAGE", "W"),
}
NAMES = {field: Name(field, about.unit) for field, about in FIELDS.items()} | NEW_NAMES  # all, old and new
IDS = {  # DCGM's identifiers; their values keep the old units
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 1001,
    "DCGM_FI_PROF_SM_ACTIVE": 1002,
    "DCGM_FI_PROF_SM_OCCUPANCY": 1003,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 1004,
    "DCGM_FI_PROF_DRAM_ACTIVE": 1005,
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": 1006,
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": 1007,
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": 1008,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 1009,
    "DCGM_FI_PROF_PCIE_RX_BYTES": 1010,
    "DCGM_FI_DEV_GPU_UTIL": 203,
    "DCGM_FI_DEV_MEM_COPY_UTIL": 204,
    "DCGM_FI_DEV_SM_CLOCK": 100,
    "DCGM_FI_DEV_MEM_CLOCK": 101,
    "DCGM_FI_DEV_POWER_USAGE": 155,
}
# Numbers that mean "no value": a base, plus up to 15 for the reason. Drivers report -1 as an unsigned number.
INT32_BLANK, INT64_BLANK, FP64_BLANK = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 2.0**47
UNSIGNED_MINUS_ONE = (2**32 - 1, 2**64 - 1)
# dcgm-exporter's labels of a device, and the additional ones of a part of a GPU (a MIG instance)
INDEX_LABEL, UUID_LABEL, DEVICE_LABEL, MODEL_LABEL, HOST_LABEL = "gpu", "UUID", "device", "modelName", "Hostname"
PART_LABEL, PROFILE_LABEL = "GPU_I_ID", "GPU_I_PROFILE"


def names_of(field: str) -> list[str]:
    """All names of a metric of FIELDS, the old one first."""
    return [name for name, about in NAMES.items() if about.field == field]


def is_blank(value: float) -> bool:
    """Whether `value` is one of the numbers that mean "no value"."""
    return (value in UNSIGNED_MINUS_ONE or INT32_BLANK <= value <= INT32_BLANK + 15
            or FP64_BLANK <= value <= FP64_BLANK + 15 or value >= INT64_BLANK)


def in_unit(name: str, value: float) -> float:
    """A value under a name, converted to the unit of FIELDS; a blank is not converted."""
    return value if is_blank(value) else value * NAMES[name].scale


def new_name(field: str) -> str:
    """The new name of a metric of FIELDS; the old one if it has no new one."""
    return names_of(field)[-1]
