"""Metrics: means over windows, their limits, and the sources behind the one interface."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hase.benchmark.metrics import gpu_sources
from hase.benchmark.metrics.names import FIELDS
from hase.benchmark.metrics.source import MANY, History, MetricMean, check_together, checked, values
from hase.benchmark.metrics.sources import CpuSource, open_source
from hase.utils.errors import UserError

pytestmark = pytest.mark.measuring

TOTAL, USER = "DCGM_FI_DEV_CPU_UTIL_TOTAL", "DCGM_FI_DEV_CPU_UTIL_USER"
ENGINE, SM, POWER = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_POWER_USAGE"
UTIL, CLOCK, BYTES = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_PROF_PCIE_TX_BYTES"


def test_a_busy_cpu_is_measured() -> None:
    source = open_source("cpu")
    one_core = 1 / (psutil.cpu_count() or 1)
    for _ in range(5):  # the system's counters lag at times on a busy machine, and then show nothing of a window
        window = source.start()
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            pass
        means = values(source.stop(window))
        if means[USER] > 0.3 * one_core:  # which other work may share
            break
    assert set(means) == set(source.fields) <= set(FIELDS)
    assert 0.3 * one_core < means[USER] <= means[TOTAL] + 1e-6 <= 1.0 + 1e-6
    assert means[TOTAL] == pytest.approx(sum(value for field, value in means.items() if field != TOTAL), abs=0.15)


def test_only_what_was_asked_for_and_what_there_is() -> None:
    source = open_source("cpu", [TOTAL])
    assert set(source.window(0.25)) == {TOTAL}
    with pytest.raises(UserError, match="too short to be valid: psutil needs 200 ms"):
        source.stop(source.start())
    with pytest.raises(UserError, match=f"metric {ENGINE}: psutil can't read it here; it has {TOTAL}"):
        open_source("cpu", [TOTAL, ENGINE])


def test_windows_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window is the mean of its own time (of counters that the test sets)."""
    times = SimpleNamespace(_fields=("user", "system", "idle", "guest"), user=0.0, system=0.0, idle=0.0, guest=0.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(**vars(times)))
    monkeypatch.setattr(CpuSource, "minimum_window_s", 0.0)
    source = CpuSource()
    outer = source.start()
    times.idle += 3.0
    inner = source.start()
    times.user, times.system, times.guest = 0.75, 0.25, 0.5  # guest time is part of user's
    assert source.stop(inner)[TOTAL] == (pytest.approx(1.0), 1)  # a counter's difference is one reading
    means = values(source.stop(outer))
    assert (means[TOTAL], means[USER]) == (pytest.approx(0.25), pytest.approx(0.1875))


@pytest.mark.parametrize(("field", "value", "wrong"), [
    *((SM, value, "the device reports") for value in (math.nan, math.inf, -0.1, 1.1, 4294967295.0)),
    *((BYTES, value, r".*stands for no value \(blank\)") for value in (
        4294967295, 0x7FFFFFF2, 0x7FFFFFFFFFFFFFF0, 2**64 - 1, 140737488355329.0))])
def test_an_impossible_value_is_no_feature(field: str, value: float, wrong: str) -> None:
    with pytest.raises(UserError, match=f"metric {field}: {wrong}"):
        checked(field, value)


def test_values_next_to_impossible_ones() -> None:
    assert checked(SM, 1.001) == 1.0  # a hair above the limit
    assert checked(BYTES, 4294967294.0) == 4294967294.0


class FakeNvml(SimpleNamespace):
    """A pretended pynvml with one GPU: this machine may have none. GPM counters are sums that the test moves on."""

    class NVMLError(Exception):
        pass

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_GPM_METRICS_GET_VERSION = 0, 1, 2, 1
    UNSUPPORTED = 13  # an fp16 metric that this GPU does not answer

    class c_nvmlGpmMetricsGet_t(ctypes.Structure):
        class _Metric(ctypes.Structure):
            _fields_ = [("metricId", ctypes.c_uint), ("nvmlReturn", ctypes.c_int), ("value", ctypes.c_double)]

        _fields_ = [("version", ctypes.c_uint), ("numMetrics", ctypes.c_uint), ("sample1", ctypes.c_uint),
                    ("sample2", ctypes.c_uint), ("metrics", _Metric * 32)]

    def __init__(self, gpm: bool) -> None:
        super().__init__(
            percent={}, mj=1000, samples=0, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlGpmQueryDeviceSupport=lambda device: SimpleNamespace(isSupportedDevice=gpm),
            nvmlGpmSampleGet=lambda device, sample: sample,
            nvmlDeviceGetTotalEnergyConsumption=lambda device: self.mj,
            nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=40, memory=20),
            nvmlDeviceGetClockInfo=lambda device, kind: 1980 if kind == self.NVML_CLOCK_SM else 3201)

    def nvmlGpmSampleAlloc(self) -> int:
        self.samples += 1
        return self.samples

    def nvmlGpmSampleFree(self, sample: int) -> None:
        self.samples -= 1

    def nvmlGpmMetricsGet(self, request: Any) -> None:
        for metric in request.metrics[:request.numMetrics]:
            metric.nvmlReturn = 3 if metric.metricId == self.UNSUPPORTED else 0
            metric.value = self.percent.get(metric.metricId, 0.0)

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        raise self.NVMLError


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeNvml:
    made = FakeNvml(gpm=getattr(request, "param", True))
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(gpu_sources, "pynvml", made)
    monkeypatch.setattr(gpu_sources, "gpu_facts", lambda: {"uuid": "GPU-0"})
    return made


def test_gpm_gives_ratios_and_bytes(fake: FakeNvml) -> None:
    preferred = gpu_sources.NvmlSource().fields
    assert {ENGINE, SM, POWER, CLOCK} < set(preferred)
    assert not {"DCGM_FI_PROF_PIPE_FP16_ACTIVE", UTIL} & set(preferred)
    source = gpu_sources.NvmlSource([*preferred, UTIL])
    fake.percent = {1: 62.5, 2: 50.0, 3: 25.0, 20: 3.0}
    began_s = time.monotonic()
    window = source.start()
    time.sleep(0.2)
    fake.mj += 100_000
    means = values(source.stop(window))
    window_s = time.monotonic() - began_s  # at most
    assert [means[field] for field in (ENGINE, SM, BYTES, UTIL, CLOCK)] == [0.625, 0.5, 3 * 2**20, 40.0, 1980.0]
    assert 100 / window_s <= means[POWER] <= 100 / 0.2  # joules a second
    assert fake.samples == 0  # every sample was given back
    fake.percent = {2: 4294967295.0}
    with pytest.raises(UserError, match="the device reports"):
        source.window(0.11)


@pytest.mark.parametrize("late", [True, False])
def test_a_driver_that_fails_is_reported(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """A GPU that is lost while a window is open, whether its sample or the means of two are asked for."""
    source = gpu_sources.NvmlSource([SM])
    opened = source.start()
    opened.reading.gpm.value()

    def lost(*_: object) -> None:
        raise fake.NVMLError("GPU is lost")

    monkeypatch.setattr(fake, "nvmlGpmSampleGet" if late else "nvmlGpmMetricsGet", lost, raising=False)
    with pytest.raises(UserError, match=r"NVML with GPM: the driver does not answer \(GPU is lost\)"):
        source.stop(opened)


def test_a_gpm_window_is_the_right_time_although_samples_lag(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    source = gpu_sources.NvmlSource([SM])
    monkeypatch.setattr(fake, "nvmlGpmSampleAlloc", lambda: taken.append(time.monotonic()) or 1)  # type: ignore[func-returns-value]
    opened = time.monotonic()
    window = source.start()
    assert not taken  # nobody waits for the first sample
    time.sleep(0.2)
    closed = time.monotonic()
    source.stop(window)
    assert min(taken[0] - opened, taken[1] - closed) >= gpu_sources.GPM_LAG_SECONDS


@pytest.mark.parametrize("fake", [False, True], indirect=True)
def test_plain_nvml_has_no_profiling_metrics(fake: FakeNvml, request: pytest.FixtureRequest) -> None:
    """Also where there are counters that were not asked for."""
    with pytest.raises(UserError, match=f"metric {SM}: NVML can't read it here; it has {UTIL}"):
        gpu_sources.NvmlSource([SM], counters=False)
    source = gpu_sources.NvmlSource(counters=False)
    assert source.name == "NVML"
    assert source.window(0.25)[UTIL] == MetricMean(40.0, 3)  # polled every 0.1 s
    if not fake.nvmlGpmQueryDeviceSupport("").isSupportedDevice:
        with pytest.raises(UserError, match="source nvml-gpm: this GPU or its driver has no GPM"):
            gpu_sources.NvmlSource()


MOVING = [0.3 + 0.01 * i for i in range(MANY)]


def test_a_field_is_frozen_if_another_one_moves() -> None:
    with pytest.raises(UserError, match=f"metric {SM}: frozen: {MANY} readings of exactly 0.4 ratio while {ENGINE} moved"):
        check_together({SM: [0.4] * MANY, ENGINE: MOVING})


@pytest.mark.parametrize("readings", [
    pytest.param({SM: [0.4] * (MANY - 1), ENGINE: MOVING[1:]}, id="too few to tell"),
    pytest.param({SM: [0.4] * MANY, ENGINE: [0.5] * MANY}, id="nothing moves"),
    pytest.param({SM: [0.4] * MANY, ENGINE: [0.5] * 5 + [0.6] * 5}, id="two readings, each asked for five times"),
    pytest.param({SM: [1.0] * MANY, ENGINE: MOVING}, id="saturated"),
    pytest.param({SM: [0.005] * MANY, ENGINE: MOVING}, id="hardly anything"),
    pytest.param({"DCGM_FI_PROF_PIPE_FP64_ACTIVE": [0.0] * MANY, ENGINE: MOVING}, id="nobody computes in fp64"),
    pytest.param({CLOCK: [1980.0] * MANY, ENGINE: MOVING}, id="a clock may well stand still"),
    pytest.param({SM: [0.0], ENGINE: [0.0], UTIL: [0.0]}, id="idle")])
def test_readings_that_may_well_stand_still(readings: dict[str, list[float]]) -> None:
    check_together(readings)


def test_a_profiled_field_at_zero_while_the_gpu_is_busy() -> None:
    with pytest.raises(UserError, match=f"metric {SM}: stuck at 0 while {ENGINE} says that the GPU is busy"):
        check_together({SM: [0.0], ENGINE: [0.5]})
    with pytest.raises(UserError, match=f"metric {ENGINE}: stuck at 0 while {UTIL} says that the GPU is busy"):
        check_together({ENGINE: [0.0] * 3, UTIL: [97.0] * 3}, lasted_s=2.0)
    check_together({ENGINE: [0.0] * 3, UTIL: [97.0] * 3}, lasted_s=1.5)  # utilisation looks back: load that is over
    check_together({ENGINE: [0.0] * 3, UTIL: [97.0]}, lasted_s=2.0)
    check_together({ENGINE: [0.0] * 3, UTIL: [97.0, 97.0, 0.0]}, lasted_s=2.0)


def test_a_counter_that_freezes_is_detected_over_windows() -> None:
    history = History()
    for i in range(MANY - 1):
        history.add({SM: 0.4, ENGINE: 0.5 + 0.01 * i})
    with pytest.raises(UserError, match="frozen"):
        history.add({SM: 0.4, ENGINE: 0.7})
    for i in range(MANY):  # once it moves again, all is well
        with contextlib.suppress(UserError):
            history.add({SM: 0.3 + 0.01 * i, ENGINE: 0.5 + 0.01 * i})
    history.add({SM: 0.35, ENGINE: 0.8})
    after_loads = History()
    for _ in range(MANY):  # each window begins when a load is just over, which utilisation still shows
        after_loads.add({SM: 0.0, ENGINE: 0.0, UTIL: 40.0})
