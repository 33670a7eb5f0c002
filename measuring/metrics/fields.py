"""The metrics: their DCGM field names, units and limits."""

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
