"""What NVML tells of an NVIDIA GPU: its power and energy, and metrics, with the performance counters (GPM) or without.

A GPM sample is a snapshot of counters, and two samples give the mean between them. It shows the counters as they were 0.09 to
0.17 s before (measured on an H200, driver 580), so both samples are taken a little late. Clocks and utilisation are polled
while a window is open. NVML's utilisation describes up to a second before, so with GPM it is read only if it is named. Power is
the difference of the energy counter, or polled on a GPU without one.

Sources: NVML API reference, "GPM", nvmlDeviceGetFieldValues, nvmlDeviceGetPowerUsage (since Ampere, except GA100, a mean over
1 s; the field POWER_INSTANT is not) and nvmlDeviceGetTotalEnergyConsumption; DCGM field identifiers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hase.benchmark.metrics.source import LOOKS_BACK, Mean, MetricSource, Window
from hase.utils.errors import UserError
from hase.utils.fingerprint import driver_fails, gpu_facts
from hase.utils.lazy import pynvml

POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT in nvml.h; older versions of pynvml lack the name
POWER = "DCGM_FI_DEV_POWER_USAGE"  # the metric's name, in W
MIB = 2**20
GPM = {  # field -> (GPM metric, our unit over GPM's: per cent to ratio, MiB/s to bytes/s)
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": (1, 0.01),
    "DCGM_FI_PROF_SM_ACTIVE": (2, 0.01),
    "DCGM_FI_PROF_SM_OCCUPANCY": (3, 0.01),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": (5, 0.01),
    "DCGM_FI_PROF_DRAM_ACTIVE": (10, 0.01),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": (11, 0.01),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": (12, 0.01),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": (13, 0.01),
    "DCGM_FI_PROF_PCIE_TX_BYTES": (20, MIB),
    "DCGM_FI_PROF_PCIE_RX_BYTES": (21, MIB),
}
POLLED = (*LOOKS_BACK, "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_MEM_CLOCK")
POLL_SECONDS = 0.1
PROBE_SECONDS = 0.12  # a little over the shortest valid GPM window
GPM_LAG_SECONDS = 0.2  # a sample taken this much later shows the wanted moment, or up to 0.1 s later


def first_gpu() -> Any:
    """NVML's handle of the GPU that `hase.utils.fingerprint` names.

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


def used_memory_mib() -> float:
    """The memory of the first GPU that all processes hold, in MiB.

    Raises:
        NVMLError: the driver does not answer.
    """
    return float(pynvml.nvmlDeviceGetMemoryInfo(first_gpu()).used) / 2**20


class CountersMissing(UserError):
    """This GPU or its driver has no GPM."""


@dataclass
class _Counters:
    """Counters at one moment; None if not asked for."""

    gpm: _Late | None = None
    energy_j: float | None = None
    polls: _Polls | None = None


class NvmlSource(MetricSource):
    """Metrics of the first GPU (the one that `hase.utils.fingerprint` names)."""

    minimum_window_s = 0.1  # GPM's own minimum

    def __init__(self, fields: Sequence[str] | None = None, counters: bool = True) -> None:
        """Reads `fields`, or the useful ones, with GPM's `counters` or without.

        Raises:
            CountersMissing: `counters` is set, and this GPU has no GPM.
            UserError: a field can't be read here.
        """
        self.name = "NVML with GPM" if counters else "NVML"
        self._nvml = pynvml
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByUUID(gpu_facts()["uuid"])
        self._has_energy = self._works(lambda: energy_counter_j(self._device))
        polled = [field for field in (*POLLED, POWER) if self._works(lambda field=field: self._poll_one(field))]
        profiled = self._gpm_fields() if counters else []
        if counters and not profiled:
            raise CountersMissing("source nvml-gpm: this GPU or its driver has no GPM (since Hopper); use nvml or dcgm")
        available = [*profiled, *polled]
        available += [POWER] if self._has_energy and POWER not in available else []
        preferred = [field for field in available if field not in LOOKS_BACK] if profiled else available
        super().__init__(available, fields or preferred)
        self._polled = [field for field in self.fields
                        if field in POLLED or (field == POWER and not self._has_energy)]
        self._gpm = [field for field in self.fields if field in GPM]

    def _works(self, call: Any) -> bool:
        try:
            call()
        except self._nvml.NVMLError:
            return False
        return True

    def _gpm_fields(self) -> list[str]:
        """The fields that this GPU's GPM really answers."""
        try:
            if not self._nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
                return []
            before = self._gpm_sample()
        except (self._nvml.NVMLError, AttributeError):  # an older GPU, driver or binding
            return []
        time.sleep(PROBE_SECONDS)
        return list(self._gpm_values(before, self._gpm_sample(), list(GPM)))

    def _gpm_sample(self) -> Any:
        return self._nvml.nvmlGpmSampleGet(self._device, self._nvml.nvmlGpmSampleAlloc())

    def _gpm_values(self, before: Any, after: Any, fields: Sequence[str]) -> dict[str, float]:
        """The means between two samples, without fields that GPM can't read; frees the samples."""
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(fields)
        request.sample1, request.sample2 = before, after
        for slot, field in enumerate(fields):
            request.metrics[slot].metricId = GPM[field][0]
        try:
            self._nvml.nvmlGpmMetricsGet(request)
        finally:
            for sample in (before, after):
                self._nvml.nvmlGpmSampleFree(sample)
        return {field: request.metrics[slot].value * GPM[field][1] for slot, field in enumerate(fields)
                if request.metrics[slot].nvmlReturn == self._nvml.NVML_SUCCESS}

    def _poll_one(self, field: str) -> float:
        nvml, device = self._nvml, self._device
        if field == "DCGM_FI_DEV_GPU_UTIL":
            return float(nvml.nvmlDeviceGetUtilizationRates(device).gpu)
        if field == "DCGM_FI_DEV_MEM_COPY_UTIL":
            return float(nvml.nvmlDeviceGetUtilizationRates(device).memory)
        if field == POWER:
            return mean_power_w(device)
        return float(nvml.nvmlDeviceGetClockInfo(
            device, nvml.NVML_CLOCK_SM if field == "DCGM_FI_DEV_SM_CLOCK" else nvml.NVML_CLOCK_MEM))

    def _read(self) -> _Counters:
        energy = self._has_energy and POWER in self.fields
        return _Counters(
            gpm=_Late(self._gpm_sample, self._nvml.NVMLError) if self._gpm else None,
            energy_j=energy_counter_j(self._device) if energy else None,
        )

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turns a failure of the driver, for example a lost GPU, into a `UserError`."""
        try:
            yield
        except self._nvml.NVMLError as error:
            raise driver_fails(self.name, error) from None

    def start(self) -> Window:
        with self._answering():
            window = super().start()
        if self._polled:
            window.reading.polls = _Polls(lambda: {field: self._poll_one(field) for field in self._polled})
        return window

    def stop(self, window: Window) -> dict[str, Mean]:
        if window.reading.polls is not None:
            window.reading.polls.end()
        with self._answering():
            return super().stop(window)

    def _readings(self, before: Window, after: Window) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {}
        if self._gpm:
            means = self._gpm_values(before.reading.gpm.value(), after.reading.gpm.value(), self._gpm)
            samples |= {field: [mean] for field, mean in means.items()}
        if after.reading.energy_j is not None:
            spent_j = after.reading.energy_j - before.reading.energy_j
            samples[POWER] = [spent_j / (after.began_s - before.began_s)]
        return samples | (before.reading.polls.readings() if before.reading.polls else {})


class _Late:
    """The result of `read` in GPM_LAG_SECONDS from now, or the `failure` that it raises then."""

    def __init__(self, read: Callable[[], Any], failure: type[Exception]) -> None:
        self._read, self._failure, self._value = read, failure, Future[Any]()
        timer = threading.Timer(GPM_LAG_SECONDS, self._run)
        timer.daemon = True
        timer.start()

    def _run(self) -> None:
        try:
            self._value.set_result(self._read())
        except self._failure as error:
            self._value.set_exception(error)

    def value(self) -> Any:
        """Waits for the result."""
        return self._value.result()


class _Polls:
    """Polls a device in a thread until `end` is called."""

    def __init__(self, poll: Any) -> None:
        self._poll = poll
        self._seen: list[dict[str, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._seen.append(self._poll())
            if self._over.wait(POLL_SECONDS):
                return

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def readings(self) -> dict[str, list[float]]:
        """The values, by field; nothing for a field that the device never answered."""
        fields = self._seen[0] if self._seen else {}
        return {field: [seen[field] for seen in self._seen] for field in fields}
