"""Metrics: means over windows, their limits, and their sources: the machine's own counters, a replay, DCGM."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import psutil
import pytest

from hase.benchmark.metrics import gpu_sources, sources
from hase.benchmark.metrics.names import FIELDS, IDS, NAMES, NEW_NAMES, MetricName, in_field_unit, metric_names, new_metric_name
from hase.benchmark.metrics.source import MANY, History, MetricMean, check_together, checked, values
from hase.benchmark.metrics.sources import CpuSource, ReplaySource, open_source
from hase.utils.errors import UserError

pytestmark = pytest.mark.measuring

TOTAL, USER = "DCGM_FI_DEV_CPU_UTIL_TOTAL", "DCGM_FI_DEV_CPU_UTIL_USER"
ENGINE, SM, POWER = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_POWER_USAGE"
UTIL, CLOCK, BYTES = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_PROF_PCIE_TX_BYTES"
NEW_SM = "DCGM_FI_PROF_SM_UTIL_RATIO"


def test_a_busy_cpu_is_measured() -> None:
    with pytest.raises(UserError, match=f"metric {ENGINE}: psutil can't read it here; it has {TOTAL}"):
        open_source("cpu", [TOTAL, ENGINE])
    source = open_source("cpu")
    with pytest.raises(UserError, match="too short to be valid: psutil needs 200 ms"):
        source.stop(source.start())
    one_core = 1 / (psutil.cpu_count() or 1)
    for _ in range(15):  # the system's counters lag at times on a busy machine, and then show nothing of a window
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


def test_an_impossible_value_is_no_feature() -> None:
    blanks = (4294967295, 0x7FFFFFF2, 0x7FFFFFFFFFFFFFF0, 2**64 - 1, 140737488355329.0)
    for field, values_of, wrong in ((SM, (math.nan, math.inf, -0.1, 1.1, 4294967295.0), "the device reports"),
                                    (BYTES, blanks, r".*stands for no value \(blank\)")):
        for value in values_of:
            with pytest.raises(UserError, match=f"metric {field}: {wrong}"):
                checked(field, value)
    assert (checked(SM, 1.001), checked(BYTES, 4294967294.0)) == (1.0, 4294967294.0)  # a hair above the limit; next to a blank


def test_a_name_says_its_unit() -> None:
    for name, meant in ((UTIL, MetricName(UTIL, "per cent")), (f"{UTIL}_RATIO", MetricName(UTIL, "ratio", 100.0)),
                        (f"{CLOCK}_HERTZ", MetricName(CLOCK, "Hz", 1e-6)), (NEW_SM, MetricName(SM, "ratio"))):
        assert NAMES[name] == meant
    assert in_field_unit(f"{CLOCK}_HERTZ", 1.98e9) == pytest.approx(1980.0)
    assert in_field_unit(f"{CLOCK}_HERTZ", 0x7FFFFFF0) == 0x7FFFFFF0  # a blank, not 2147 MHz
    assert (metric_names(SM), new_metric_name(SM)) == ([SM, NEW_SM], NEW_SM)
    assert new_metric_name(BYTES) == BYTES  # not renamed
    for known in NEW_NAMES.values():  # the units differ where the scale does
        assert (known.scale == 1.0) == (known.unit == FIELDS[known.field].unit)


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


@pytest.mark.slow
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


@pytest.mark.parametrize("call", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_a_driver_that_fails_is_reported(call: str, fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is lost while a window is open, whether its sample or the means of two are asked for."""
    monkeypatch.setattr(gpu_sources, "GPM_LAG_SECONDS", 0.11)
    source = gpu_sources.NvmlSource([SM])
    opened = source.start()
    opened.reading.gpm.value()
    monkeypatch.setattr(fake, call, Mock(side_effect=fake.NVMLError("GPU is lost")))
    with pytest.raises(UserError, match=r"NVML with GPM: the driver does not answer \(GPU is lost\)"):
        source.stop(opened)


def test_a_metric_that_the_driver_gives_no_more_is_reported(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sources, "GPM_LAG_SECONDS", 0.11)
    source = gpu_sources.NvmlSource([SM, ENGINE])
    monkeypatch.setattr(FakeNvml, "UNSUPPORTED", gpu_sources.GPM[SM][0])
    with pytest.raises(UserError, match=rf"metric {SM}: NVML with GPM has no reading of it in a window of 0\.\d s"):
        source.window(0.11)


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
    with pytest.raises(UserError, match=f"metric {SM}: NVML can't read it here; it has {UTIL}"):
        gpu_sources.NvmlSource([SM], counters=False)
    source = gpu_sources.NvmlSource(counters=False)
    assert source.name == "NVML"
    assert source.window(0.25)[UTIL] == MetricMean(40.0, 3)  # polled every 0.1 s
    if not fake.nvmlGpmQueryDeviceSupport("").isSupportedDevice:
        with pytest.raises(UserError, match="source nvml-gpm: this GPU or its driver has no GPM"):
            gpu_sources.NvmlSource()


MOVING = [0.3 + 0.01 * i for i in range(MANY)]


@pytest.mark.parametrize("readings", [
    pytest.param({SM: [0.4] * (MANY - 1), ENGINE: MOVING[1:]}, id="too few to tell"),
    pytest.param({SM: [0.4] * MANY, ENGINE: [0.5] * MANY}, id="nothing moves"),
    pytest.param({SM: [0.005] * MANY, ENGINE: MOVING}, id="hardly anything"),
    pytest.param({"DCGM_FI_PROF_PIPE_FP64_ACTIVE": [0.0] * MANY, ENGINE: MOVING}, id="nobody computes in fp64"),
    pytest.param({CLOCK: [1980.0] * MANY, ENGINE: MOVING}, id="a clock may well stand still")])
def test_readings_that_may_well_stand_still(readings: dict[str, list[float]]) -> None:
    check_together(readings)


def test_a_profiled_field_that_is_frozen_or_at_zero_while_the_gpu_is_busy() -> None:
    with pytest.raises(UserError, match=f"metric {SM}: frozen: {MANY} readings of exactly 0.4 ratio while {ENGINE} moved"):
        check_together({SM: [0.4] * MANY, ENGINE: MOVING})
    with pytest.raises(UserError, match=f"metric {SM}: stuck at 0 while {ENGINE} says that the GPU is busy"):
        check_together({SM: [0.0], ENGINE: [0.5]})
    with pytest.raises(UserError, match=f"metric {ENGINE}: stuck at 0 while {UTIL} says that the GPU is busy"):
        check_together({ENGINE: [0.0] * 3, UTIL: [97.0] * 3}, lasted_s=2.0)
    check_together({ENGINE: [0.0] * 3, UTIL: [97.0] * 3}, lasted_s=1.5)  # utilisation looks back: load that is over
    check_together({ENGINE: [0.0] * 3, UTIL: [97.0, 97.0, 0.0]}, lasted_s=2.0)


def test_a_counter_that_freezes_is_detected_over_windows() -> None:
    history = History()
    for i in range(MANY - 1):
        history.add({SM: 0.4, ENGINE: 0.5 + 0.01 * i})
    with pytest.raises(UserError, match="frozen"):
        history.add({SM: 0.4, ENGINE: 0.7})
    after_loads = History()
    for _ in range(MANY):  # each window begins when a load is just over, which utilisation still shows
        after_loads.add({SM: 0.0, ENGINE: 0.0, UTIL: 40.0})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test turns."""
    turned = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: turned.now)
    return turned


def recorded(folder: Path, readings: str | Sequence[Mapping[str, Any]]) -> Path:
    text = readings if isinstance(readings, str) else "".join(json.dumps(reading) + "\n" for reading in readings)
    (folder / "readings.jsonl").write_text(text, encoding="utf-8")
    return folder / "readings.jsonl"


def test_a_replay_keeps_the_times_of_its_readings(tmp_path: Path, clock: SimpleNamespace) -> None:
    stamps = (50.0, 51.0, 51.5, 60.0)
    source = ReplaySource(recorded(tmp_path, [{"time_s": stamp, SM: 0.1 * i} for i, stamp in enumerate(stamps, 1)]))
    assert source.times_s == [1.0, 2.0, 2.5, 11.0]
    window = source.start()
    clock.now += 2.25
    later = source.start()
    assert source.stop(window) == {SM: (pytest.approx(0.15), 2)}
    clock.now += 0.5
    assert source.stop(later) == {SM: (pytest.approx(0.3), 1)}
    clock.now += 20.0
    with pytest.raises(UserError, match=r"readings.jsonl: the replay is over: its last reading came after 11 s"):
        source.stop(source.start())


@pytest.mark.parametrize(("readings", "wrong"), [
    ("{", "line 1: not valid JSON"),
    ("[1]", "line 1: not a reading: an object with \"time_s\""),
    ([{SM: "0.5"}], f"line 1: {SM}: '0.5' is not a number"),
    ([{SM: 0.5}, {SM: 0.5, "time_s": 0}], "line 2: time_s 0 is not later"),
    ([{SM: 0.5}, {SM: None}], f"metric {SM}: the device reports nan"),
    ([{f"{UTIL}_RATIO": 0.5}, {f"{UTIL}_RATIO": 57}], f"metric {UTIL}: the device reports 5700 per cent"),
    ([{f"{CLOCK}_HERTZ": 2147483632}], "stands for no value"),
    ([{SM: 0.4, ENGINE: 0.5 + 0.01 * i} for i in range(12)], f"metric {SM}: frozen: 12 readings")])
def test_what_can_not_be_replayed(readings: str | list[dict[str, Any]], wrong: str, tmp_path: Path,
                                  clock: SimpleNamespace) -> None:
    def replay() -> None:
        source = ReplaySource(recorded(tmp_path, readings if isinstance(readings, str) else [
            {"time_s": i} | reading for i, reading in enumerate(readings)]))
        window = source.start()
        clock.now += 12.5
        source.stop(window)

    with pytest.raises(UserError, match=wrong):
        replay()


class FakeDcgm:
    """A pretended DCGM with its Python bindings and one GPU: this machine has neither. The test puts the readings in."""

    class DCGMError(Exception):
        pass

    def __init__(self) -> None:
        self.refused: set[int] = set()  # fields that can't be watched
        self.queue: list[tuple[int, float, float | None]] = []  # field, time, value; None is a blank
        self.down = False
        self.handle = Mock(side_effect=self.answer)
        system = self.handle.return_value.GetSystem.return_value
        gpus = {3: "GPU-other", 7: "GPU-0"}
        system.discovery.GetAllGpuIds.return_value = list(gpus)
        system.discovery.GetGpuAttributes.side_effect = lambda gpu: SimpleNamespace(identifiers=SimpleNamespace(uuid=gpus[gpu]))
        system.GetGroupWithGpuIds.side_effect = lambda name, ids: Mock(
            **{"GetId.return_value": ids, "samples.WatchFields.side_effect": self.watch})
        self.modules = {"pydcgm": Mock(DcgmHandle=self.handle, DcgmFieldGroup=lambda handle, name, ids: Mock(ids=ids)),
                        "dcgm_structs": Mock(DCGMError=self.DCGMError),
                        "dcgm_field_helpers": Mock(DcgmFieldValueCollection=self.collection)}

    def answer(self, **_: object) -> Any:
        if self.down:
            raise self.DCGMError("Connection not valid")
        return DEFAULT

    def watch(self, group: Any, update_us: int, keep_s: float, keep_samples: int) -> None:
        if set(group.ids) & self.refused:
            raise self.DCGMError("Profiling is not supported")
        assert (update_us, keep_samples) == (100_000, 0)
        self.queue += [(number, time.time(), 0.5) for number in group.ids]

    def collection(self, handle: str, group: list[int]) -> Any:
        assert group == [7]  # the GPU of this machine's UUID, not the first
        values: dict[Any, Any] = {}
        found = SimpleNamespace(values=values, EmptyValues=values.clear)

        def get_all(fields: Any) -> None:
            self.answer()
            for number, time_s, value in [entry for entry in self.queue if entry[0] in fields.ids]:
                series = found.values.setdefault(7, {}).setdefault(number, SimpleNamespace(values=[]))
                series.values.append(SimpleNamespace(ts=int(time_s * 1e6), isBlank=value is None, value=value))
            self.queue = [entry for entry in self.queue if entry[0] not in fields.ids]

        found.GetAllSinceLastCall = get_all
        return found

    def read(self, field: str, *values: float | None, since_s: float) -> None:
        """Readings every 0.1 s, the first 0.1 s after a time."""
        self.queue += [(IDS[field], since_s + 0.1 * i, value) for i, value in enumerate(values, 1)]


@pytest.fixture
def dcgm(monkeypatch: pytest.MonkeyPatch) -> FakeDcgm:
    made = FakeDcgm()
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gpu_sources, "gpu_facts", lambda: {"uuid": "GPU-0"})
    return made


@pytest.mark.slow
def test_dcgm_gives_the_mean_of_a_windows_readings(dcgm: FakeDcgm) -> None:
    source = gpu_sources.DcgmSource([SM, UTIL])
    dcgm.handle.assert_called_with(ipAddress=None)  # within this process
    window = source.start()
    dcgm.read(SM, 0.2, 0.3, 0.4, since_s=window.reading)
    dcgm.read(SM, 0.9, since_s=window.reading - 0.15)  # a reading from before the window
    dcgm.read(SM, 0.9, since_s=window.reading + 3.0)  # and one from after it
    dcgm.read(UTIL, 50, 60, since_s=window.reading)
    time.sleep(0.3)
    assert source.stop(window) == {SM: (pytest.approx(0.3), 3), UTIL: MetricMean(55.0, 2)}
    dcgm.refused = {IDS[SM]}
    source = gpu_sources.DcgmSource(address="node7:5555")
    dcgm.handle.assert_called_with(ipAddress="node7:5555")
    assert (source.name, UTIL in source.fields, SM in source.fields) == ("DCGM at node7:5555", True, False)
    with pytest.raises(UserError, match=f"metric {SM}: DCGM can't read it here"):
        gpu_sources.DcgmSource([SM])


@pytest.mark.slow
def test_dcgm_that_is_blank_or_not_here_or_goes_away(dcgm: FakeDcgm, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gpu_sources.DcgmSource([SM])
    window = source.start()
    dcgm.read(SM, 0.2, None, 0.4, since_s=window.reading)
    time.sleep(0.3)
    with pytest.raises(UserError, match="1 of 3 readings of DCGM are blank; does a profiler hold the counters"):
        source.stop(window)
    window = source.start()
    time.sleep(0.3)
    dcgm.down = True
    with pytest.raises(UserError, match="DCGM does not answer any more: Connection not valid"):
        source.stop(window)
    dcgm.down = False
    monkeypatch.setattr(gpu_sources, "gpu_facts", lambda: {"uuid": "GPU-new"})
    with pytest.raises(gpu_sources.DcgmMissing, match="node8 does not know this machine's GPU GPU-new; give the address of"):
        gpu_sources.DcgmSource(address="node8")
    dcgm.down = True
    with pytest.raises(gpu_sources.DcgmMissing, match="DCGM at node8 does not answer: Connection not valid; is nv-hostengine"):
        gpu_sources.DcgmSource(address="node8")
    monkeypatch.setitem(sys.modules, "pydcgm", None)  # as where it is not installed
    with pytest.raises(gpu_sources.DcgmMissing, match="source dcgm: no pydcgm in /usr/share/datacenter-gpu-manager-4"):
        gpu_sources.DcgmSource()


@pytest.mark.parametrize(("has_gpm", "installed", "chosen", "why"), [
    (True, True, "NVML with GPM", "the exact mean of a window"),
    (False, True, "DCGM", "no GPM, and DCGM is here"),
    (False, False, "NVML", "no GPM, and there is no DCGM"),
])
def test_auto_reports_its_choice_and_why(has_gpm: bool, installed: bool, chosen: str, why: str, dcgm: FakeDcgm,
                                         monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nvml(fields: Sequence[str] | None, counters: bool) -> Any:
        if counters and not has_gpm:
            raise gpu_sources.CountersMissing("no GPM")
        return SimpleNamespace(name="NVML with GPM" if counters else "NVML", fields=())

    monkeypatch.setattr(sources, "resolve_device", lambda name: "cuda")
    monkeypatch.setattr(sources, "NvmlSource", nvml)
    if not installed:
        monkeypatch.setitem(sys.modules, "pydcgm", None)
    monkeypatch.setattr(logging.getLogger("hase"), "propagate", True)
    with caplog.at_level(logging.INFO):
        assert open_source().name == chosen
    assert f"metrics: from {chosen}: " in caplog.text
    assert why in caplog.text


@pytest.mark.parametrize(("device", "options", "message"), [
    ("cpu", {"source": "dcgm"}, "source dcgm reads a GPU, and the device here is the CPU; use psutil or auto"),
    ("cpu", {"source": "replay"}, "source replay needs a file to replay"),
    ("cpu", {"dcgm_address": "node7"}, "source auto on cpu: it does not ask the DCGM at node7"),
    ("cuda", {"source": "psutil"}, "source psutil reads the CPU, and the device here is a GPU")])
def test_a_source_for_another_device(device: str, options: dict[str, Any], message: str,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "resolve_device", lambda name: device)
    with pytest.raises(UserError, match=message):
        open_source(**options)
