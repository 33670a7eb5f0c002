"""What NVML says of the power and energy of one GPU. All other modules read them here.

Source: NVML API reference, nvmlDeviceGetFieldValues, nvmlDeviceGetPowerUsage and nvmlDeviceGetTotalEnergyConsumption. Since
Ampere (except GA100), PowerUsage is a mean over 1 s; the field POWER_INSTANT is not.
"""

from __future__ import annotations

from typing import Any

from utils.fingerprint import gpu_facts
from utils.lazy import pynvml

POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT in nvml.h; older versions of pynvml lack the name
POWER = "DCGM_FI_DEV_POWER_USAGE"  # the metric's name, in W


def first_gpu() -> Any:
    """NVML's handle of the GPU that `utils.fingerprint` names.

    Raises:
        NVMLError: the driver does not answer.
    """
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(gpu_facts()["uuid"])


def instant_power_w(gpu: Any) -> float:
    """The power at this moment in W.

    Raises:
        NVMLError: this GPU or its driver does not have the field.
    """
    [field] = pynvml.nvmlDeviceGetFieldValues(gpu, [POWER_INSTANT])
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(field.nvmlReturn)
    return field.value.uiVal / 1e3


def mean_power_w(gpu: Any) -> float:
    """The mean power of the last second in W (on older GPUs that of this moment).

    Raises:
        NVMLError: this GPU or its driver does not say.
    """
    return pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3


def energy_counter_j(gpu: Any) -> float:
    """The energy that the GPU took since the driver was loaded, in J.

    Raises:
        NVMLError: this GPU has no such counter (since Volta).
    """
    return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
