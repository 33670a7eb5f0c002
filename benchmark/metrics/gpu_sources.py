"""Metrics of an NVIDIA GPU, from NVML with or without performance counters (GPM), and from NVIDIA's DCGM.

NVML: a GPM sample is a snapshot of counters; two samples give the mean between them. It shows the counters of 0.09 to 0.17 s
before (H200, driver 580), so both samples are taken a little late. Clocks and utilisation are polled while a window is open.
NVML's utilisation covers up to a second before, so with GPM it is read only on request. Power is the difference of the energy
counter, or polled on a GPU without one.

DCGM (Python bindings `pydcgm`, not on PyPI) runs in this process or at a network address. It reads the GPU every 0.1 s. A value
describes the time before it, so a window gets the values whose middle lies in it. A blank value is an error. (DCGM's own
`DcgmReader` is unusable: it always connects to localhost, and hides blanks.)

Sources: NVML API reference, "GPM", nvmlDeviceGetFieldValues, nvmlDeviceGetPowerUsage (since Ampere, except GA100, a mean over 1
s; the field POWER_INSTANT is not) and nvmlDeviceGetTotalEnergyConsumption; DCGM field identifiers.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hase.benchmark.metrics.names import IDS
from hase.benchmark.metrics.source import LOOKS_BACK, PROFILED, UTILISATION, MetricMean, MetricSource, OpenWindow
from hase.utils.errors import UserError
from hase.utils.fingerprint import driver_fails, gpu_facts
from hase.utils.lazy import pynvml
from hase.utils.processes import MIB

POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT in nvml.h; older versions of pynvml lack the name
POWER = "DCGM_FI_DEV_POWER_USAGE"  # the metric's name, in W
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
PROBE_SECONDS = 0.12  # window that shows which fields GPM answers, a little over its shortest valid one
GPM_LAG_SECONDS = 0.2  # a sample taken this much later shows the wanted moment, or up to 0.1 s later


def first_gpu() -> Any:
    """NVML's handle of the GPU that `hase.utils.fingerprint` names. Raises NVMLError if the driver does not answer."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(gpu_facts()["uuid"])


def instant_power_w(gpu: Any) -> float:
    """Current power in W. Raises NVMLError if the GPU or driver lacks the field."""
    [field] = pynvml.nvmlDeviceGetFieldValues(gpu, [POWER_INSTANT])
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(field.nvmlReturn)
    return field.value.uiVal / 1e3


def mean_power_w(gpu: Any) -> float:
    """Mean power of the last second in W (on older GPUs, current power). Raises NVMLError if the GPU or driver lacks it."""
    return pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3


def energy_counter_j(gpu: Any) -> float:
    """Energy since the driver was loaded, in J. Raises NVMLError if the GPU has no counter (before Volta)."""
    return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3


def used_memory_mib() -> float:
    """Memory of the first GPU in use by all processes, in MiB. Raises NVMLError if the driver does not answer."""
    return float(pynvml.nvmlDeviceGetMemoryInfo(first_gpu()).used) / 2**20


class CountersMissing(UserError):
    """The GPU or its driver has no GPM."""


@dataclass
class _Counters:
    """Counters at one moment; None if not requested."""

    gpm: _DelayedRead | None = None
    energy_j: float | None = None
    polls: _Polls | None = None


class NvmlSource(MetricSource):
    """Metrics of the first GPU (the one that `hase.utils.fingerprint` names)."""

    minimum_window_s = 0.1  # GPM's own minimum

    def __init__(self, fields: Sequence[str] | None = None, counters: bool = True) -> None:
        """Reads `fields`, or all useful ones, with GPM's `counters` or without (CountersMissing if this GPU has no GPM)."""
        self.name = "NVML with GPM" if counters else "NVML"
        self._nvml = pynvml
        self._device = first_gpu()
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
        """Fields that this GPU's GPM really answers."""
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
        """Means between two samples, without fields that GPM cannot read; frees the samples."""
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
            gpm=_DelayedRead(self._gpm_sample, self._nvml.NVMLError) if self._gpm else None,
            energy_j=energy_counter_j(self._device) if energy else None,
        )

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Converts a driver failure, for example a lost GPU, into a `UserError`."""
        try:
            yield
        except self._nvml.NVMLError as error:
            raise driver_fails(self.name, error) from None

    def start(self) -> OpenWindow:
        with self._answering():
            window = super().start()
        if self._polled:
            window.reading.polls = _Polls(lambda: {field: self._poll_one(field) for field in self._polled})
        return window

    def stop(self, window: OpenWindow) -> dict[str, MetricMean]:
        if window.reading.polls is not None:
            window.reading.polls.end()
        with self._answering():
            return super().stop(window)

    def _readings(self, before: OpenWindow, after: OpenWindow) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {}
        if self._gpm:
            means = self._gpm_values(before.reading.gpm.value(), after.reading.gpm.value(), self._gpm)
            samples |= {field: [mean] for field, mean in means.items()}
        if after.reading.energy_j is not None:
            spent_j = after.reading.energy_j - before.reading.energy_j
            samples[POWER] = [spent_j / (after.began_s - before.began_s)]
        return samples | (before.reading.polls.readings() if before.reading.polls else {})


class _DelayedRead:
    """Calls `read` GPM_LAG_SECONDS from now, and holds its result, or the `failure` that it raises."""

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
        """Values by field; a field that the device never answered is missing."""
        fields = self._seen[0] if self._seen else {}
        return {field: [seen[field] for seen in self._seen] for field in fields}


# DCGM --------------------------------------------------------------------------------------------------------------------

BINDINGS = (  # folders in which the packages of DCGM 4 and 3 put them
    Path("/usr/share/datacenter-gpu-manager-4/bindings/python3"),
    Path("/usr/local/dcgm/bindings/python3"),
)
UPDATE_S = 0.1  # between two values; profiled fields are not faster
KEEP_S = 3600.0  # how long values are kept: no window is longer


class DcgmMissing(UserError):
    """DCGM is not installed here, does not answer, or does not know this GPU."""


class MetricSample(NamedTuple):
    """A value of a field, and when DCGM read it (seconds since 1970)."""

    time_s: float
    value: float


class DcgmSource(MetricSource):
    """Metrics of the first GPU (the one that `hase.utils.fingerprint` names)."""

    minimum_window_s = 0.25  # at least two values

    def __init__(self, fields: Sequence[str] | None = None, address: str | None = None) -> None:
        """Reads `fields`, or all useful ones, from the DCGM at `address` (HOST or HOST:PORT) or in this process."""
        self.name = f"DCGM at {address}" if address else "DCGM"
        self._pydcgm = _bindings()
        self._structs, self._helpers = (importlib.import_module(name) for name in ("dcgm_structs", "dcgm_field_helpers"))
        try:
            self._handle = self._pydcgm.DcgmHandle(ipAddress=address)
        except self._structs.DCGMError as error:
            raise DcgmMissing(f"{self.name} does not answer: {error}; is nv-hostengine running there, and may this user "
                              "ask it? See: dcgmi discovery -l") from None
        self._system = self._handle.GetSystem()
        self._gpu = self._find_gpu(gpu_facts()["uuid"])
        self._group = self._system.GetGroupWithGpuIds(f"hase-{os.getpid()}-{id(self)}", [self._gpu])
        self._lock = threading.Lock()
        self._seen: dict[str, deque[MetricSample]] = {}
        not_profiled = [field for field in IDS if field not in PROFILED]
        self._watched = [watch for kind, fields_of_kind in (("prof", PROFILED), ("dev", not_profiled))
                         if (watch := self._watch(kind, fields_of_kind)) is not None]
        time.sleep(2 * UPDATE_S)
        self._drain()
        available = [field for field in IDS if not all(math.isnan(sample.value) for sample in self._seen.get(field, ()))]
        has_profiled = any(field in PROFILED for field in available)
        super().__init__(available, fields or [field for field in available if not (has_profiled and field in LOOKS_BACK)])

    def _find_gpu(self, uuid: str) -> int:
        """DCGM's number for the GPU."""
        for gpu in self._system.discovery.GetAllGpuIds():
            if self._system.discovery.GetGpuAttributes(gpu).identifiers.uuid == uuid:
                return gpu
        raise DcgmMissing(f"{self.name} does not know this machine's GPU {uuid}; give the address of the DCGM that watches it")

    def _watch(self, kind: str, fields: Sequence[str]) -> tuple[Any, Any] | None:
        """Makes DCGM read these fields; None if it refuses, for lack of counters or permission."""
        ids = [IDS[field] for field in fields]
        try:
            group = self._pydcgm.DcgmFieldGroup(self._handle, f"hase-{kind}-{os.getpid()}-{id(self)}", ids)
            self._group.samples.WatchFields(group, int(UPDATE_S * 1e6), KEEP_S, 0)
            self._system.UpdateAllFields(True)
        except self._structs.DCGMError:
            return None
        return group, self._helpers.DcgmFieldValueCollection(self._handle.handle, self._group.GetId())

    def _drain(self) -> None:
        """Fetches what DCGM has read since the last call; blanks become NaN."""
        names = {number: field for field, number in IDS.items()}
        with self._lock:
            for group, collection in self._watched:
                try:
                    collection.GetAllSinceLastCall(group)
                except self._structs.DCGMError as error:
                    raise UserError(f"{self.name} does not answer any more: {error}") from None
                for number, series in collection.values.get(self._gpu, {}).items():
                    seen = self._seen.setdefault(names[number], deque())
                    seen.extend(MetricSample(sample.ts / 1e6,
                                             math.nan if sample.isBlank else float(sample.value)) for sample in series.values)
                    while seen and seen[0].time_s < seen[-1].time_s - KEEP_S:
                        seen.popleft()
                collection.EmptyValues()

    def _read(self) -> float:
        """Current time on DCGM's clock (seconds since 1970)."""
        return time.time()

    def _readings(self, before: OpenWindow, after: OpenWindow) -> dict[str, list[float]]:
        time.sleep(2 * UPDATE_S)  # until DCGM has the value for the window's end
        self._drain()
        samples = {field: self._between(field, before.reading, after.reading) for field in (*self.fields, UTILISATION)}
        for field in self.fields:
            if blank := sum(map(math.isnan, samples[field])):
                raise UserError(f"metric {field}: {blank} of {len(samples[field])} readings of {self.name} are blank; does a "
                                "profiler hold the counters (dcgmi profile --resume gives them back)? Leave this metric out if "
                                "it stays so")
        return samples

    def _between(self, field: str, begin_s: float, end_s: float) -> list[float]:
        """Values that describe a period, given in seconds since 1970."""
        with self._lock:
            return [sample.value for sample in self._seen.get(field, ()) if begin_s < sample.time_s - UPDATE_S / 2 <= end_s]


def _bindings() -> Any:
    """The module pydcgm."""
    for folder in BINDINGS:
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.append(str(folder))  # at the end, since some of its modules have common names
    try:
        return importlib.import_module("pydcgm")
    except ImportError:
        raise DcgmMissing(f"source dcgm: no pydcgm in {' or '.join(map(str, BINDINGS))}; it comes with NVIDIA's DCGM, not from "
                          "PyPI: sudo apt-get install --install-recommends datacenter-gpu-manager-4-cuda13 (docs/packages.md "
                          "says more); put its folder on PYTHONPATH if it lies elsewhere") from None
