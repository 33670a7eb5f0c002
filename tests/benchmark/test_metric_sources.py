"""Sources of metrics beside the machine's own counters: DCGM, a replay, and which one is taken."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.metrics import gpu_sources
from hase.benchmark.metrics import sources as metrics
from hase.benchmark.metrics.names import FIELDS, IDS, NAMES, NEW_NAMES, MetricName, in_unit, names_of, new_name
from hase.benchmark.metrics.source import MetricMean
from hase.benchmark.metrics.sources import ReplaySource, open_source
from hase.utils.errors import UserError

SM, ENGINE = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
UTIL, CLOCK, NEW_SM = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_PROF_SM_UTIL_RATIO"


def test_a_name_says_its_unit() -> None:
    for name, meant in ((UTIL, MetricName(UTIL, "per cent")), (f"{UTIL}_RATIO", MetricName(UTIL, "ratio", 100.0)),
                        (f"{CLOCK}_HERTZ", MetricName(CLOCK, "Hz", 1e-6)), (NEW_SM, MetricName(SM, "ratio"))):
        assert NAMES[name] == meant
    assert in_unit(f"{CLOCK}_HERTZ", 1.98e9) == pytest.approx(1980.0)
    assert in_unit(f"{CLOCK}_HERTZ", 0x7FFFFFF0) == 0x7FFFFFF0  # a blank, not 2147 MHz
    assert (names_of(SM), new_name(SM)) == ([SM, NEW_SM], NEW_SM)
    assert new_name("DCGM_FI_PROF_PCIE_TX_BYTES") == "DCGM_FI_PROF_PCIE_TX_BYTES"  # not renamed
    for known in NEW_NAMES.values():  # the units differ where the scale does
        assert (known.scale == 1.0) == (known.unit == FIELDS[known.field].unit)


class Clock:
    """A clock that the test turns."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    turned = Clock()
    monkeypatch.setattr(time, "monotonic", turned.monotonic)
    return turned


def windows(source: ReplaySource, clock: Clock, *lengths_s: float) -> list[dict[str, MetricMean]]:
    """The means of windows one after another."""
    means = []
    for length_s in lengths_s:
        window = source.start()
        clock.now += length_s
        means.append(source.stop(window))
    return means


def recorded(folder: Path, readings: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / "readings.jsonl"
    path.write_text("".join(json.dumps(reading) + "\n" for reading in readings), encoding="utf-8")
    return path


def test_a_replay_keeps_the_times_of_its_readings(tmp_path: Path, clock: Clock) -> None:
    stamps = (50.0, 51.0, 51.5, 60.0)
    source = ReplaySource(recorded(tmp_path, [{"time_s": stamp, SM: 0.1 * i} for i, stamp in enumerate(stamps, 1)]))
    assert source.times_s == [1.0, 2.0, 2.5, 11.0]
    window = source.start()
    clock.now += 2.25
    later = source.start()
    assert source.stop(window) == {SM: (pytest.approx(0.15), 2)}
    clock.now += 0.5
    assert source.stop(later) == {SM: (pytest.approx(0.3), 1)}
    with pytest.raises(UserError, match=rf"metric {SM}: the replay of readings.jsonl has no reading of it in a window"):
        windows(source, clock, 1.0)
    clock.now += 20.0
    with pytest.raises(UserError, match=r"readings.jsonl: the replay is over: its last reading came after 11 s"):
        source.stop(source.start())


def test_a_replay_at_a_step_that_the_collectors_config_chooses(tmp_path: Path, clock: Clock) -> None:
    path = recorded(tmp_path, [{"time_s": stamp, SM: 0.2, ENGINE: 0.4} for stamp in (0, 100, 101)])
    source = CollectorConfig(source="replay", replay=path, replay_step_s=0.5, metrics=(SM,)).open_source("cpu")
    assert (source.name, source.fields) == ("the replay of readings.jsonl", (SM,))
    window = source.start()
    clock.now += 1.6
    assert source.stop(window) == {SM: (pytest.approx(0.2), 3)}
    assert CollectorConfig().open_source("cpu").name == CollectorConfig(source="psutil").open_source("cpu").name == "psutil"


def test_old_and_new_names_replay_alike(tmp_path: Path, clock: Clock) -> None:
    """By the name, not by the size: a ratio of 0.9 is 90 per cent, and 0.9 per cent is 0.9 per cent."""
    path = recorded(tmp_path, [{"time_s": 0, f"{UTIL}_RATIO": 0.9, f"{CLOCK}_HERTZ": 1.98e9, NEW_SM: 0.5},
                               {"time_s": 1, UTIL: 0.9, CLOCK: 1980, SM: 0.7}])
    assert windows(ReplaySource(path), clock, 1.0, 1.0) == [
        {UTIL: (90.0, 1), CLOCK: (pytest.approx(1980.0), 1), SM: (0.5, 1)}, {UTIL: (0.9, 1), CLOCK: (1980.0, 1), SM: (0.7, 1)}]


@pytest.mark.parametrize(("lines", "wrong"), [
    ("", "no reading to replay"),
    ("{", "line 1: not valid JSON"),
    ("[1]", "line 1: not a reading: an object with \"time_s\""),
    (f'{{"{SM}": 1}}', "line 1: not a reading"),
    ('{"time_s": 1, "DCGM_FI_DEV_GPU_TEMP": 50}', "line 1: DCGM_FI_DEV_GPU_TEMP: unknown metric"),
    (f'{{"time_s": 1, "{SM}": "0.5"}}', f"line 1: {SM}: '0.5' is not a number"),
    (f'{{"time_s": 1, "{SM}": 0.5}}\n{{"time_s": 1, "{SM}": 0.5}}', "line 2: time_s 1 is not later"),
])
def test_a_file_that_is_no_recording(lines: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(lines, encoding="utf-8")
    with pytest.raises(UserError, match=wrong):
        ReplaySource(path)


@pytest.mark.parametrize(("readings", "wrong"), [
    ([{SM: 0.5}, {SM: None}], f"metric {SM}: the device reports nan"),
    ([{SM: 0.5}, {SM: 1.5}], f"metric {SM}: the device reports 1.5 ratio, possible is 0 to 1"),
    ([{f"{UTIL}_RATIO": 0.5}, {f"{UTIL}_RATIO": 57}], f"metric {UTIL}: the device reports 5700 per cent"),
    ([{"DCGM_FI_PROF_PCIE_RX_BYTES": 4294967295}], "stands for no value"),
    ([{f"{CLOCK}_HERTZ": 2147483632}], "stands for no value"),
    ([{SM: 0.4, ENGINE: 0.5 + 0.01 * i} for i in range(12)], f"metric {SM}: frozen: 12 readings"),
    ([{SM: 0.0, UTIL: 95}] * 12, f"metric {SM}: stuck at 0 while {UTIL}")])
def test_bad_readings_spoil_their_window(readings: list[dict[str, Any]], wrong: str, tmp_path: Path, clock: Clock) -> None:
    source = ReplaySource(recorded(tmp_path, [{"time_s": i} | reading for i, reading in enumerate(readings)]))
    with pytest.raises(UserError, match=wrong):
        windows(source, clock, 12.5)


class FakeDcgm:
    """A pretended DCGM with its Python bindings and one GPU: this machine has neither. The test puts the readings in."""

    class DCGMError(Exception):
        pass

    def __init__(self) -> None:
        self.refused: set[int] = set()  # fields that can't be watched
        self.blank: set[int] = set()  # fields whose first reading is blank
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
        self.queue += [(number, time.time(), None if number in self.blank else 0.5) for number in group.ids]

    def collection(self, handle: str, group: list[int]) -> Any:
        assert group == [7]  # the GPU of this machine's UUID, not the first
        found = SimpleNamespace(values={}, EmptyValues=lambda: found.values.clear())

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


def test_dcgm_at_an_address_and_without_profiled_fields(dcgm: FakeDcgm) -> None:
    fields = gpu_sources.DcgmSource().fields
    assert ({SM, ENGINE, CLOCK} < set(fields), UTIL in fields) == (True, False)  # there is better than utilisation
    dcgm.refused, dcgm.blank = {IDS[SM]}, {IDS[CLOCK]}
    source = gpu_sources.DcgmSource(address="node7:5555")
    dcgm.handle.assert_called_with(ipAddress="node7:5555")
    assert source.name == "DCGM at node7:5555"
    assert UTIL in source.fields  # the only field that shows the load
    assert not {SM, CLOCK} & set(source.fields)
    with pytest.raises(UserError, match=f"metric {SM}: DCGM can't read it here"):
        gpu_sources.DcgmSource([SM])


@pytest.mark.parametrize(("readings", "wrong"), [
    ({SM: [0.2, None, 0.4]}, f"metric {SM}: 1 of 3 readings of DCGM are blank; does a profiler hold the counters"),
    # by utilisation that was not asked for
    pytest.param({SM: [0.0] * 20, UTIL: [99.0] * 20}, f"metric {SM}: stuck at 0 while {UTIL} says that the GPU is busy",
                 marks=pytest.mark.slow)])
def test_readings_of_dcgm_that_spoil_a_window(readings: dict[str, list[float | None]], wrong: str, dcgm: FakeDcgm) -> None:
    source = gpu_sources.DcgmSource([SM])
    window = source.start()
    for field, values in readings.items():
        dcgm.read(field, *values, since_s=window.reading)
    time.sleep(0.1 * len(readings[SM]))
    with pytest.raises(UserError, match=wrong):
        source.stop(window)


def test_dcgm_that_is_not_here_or_goes_away(dcgm: FakeDcgm, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gpu_sources.DcgmSource([SM])
    window = source.start()
    time.sleep(0.3)
    dcgm.down = True
    with pytest.raises(UserError, match="DCGM does not answer any more: Connection not valid"):
        source.stop(window)
    with pytest.raises(gpu_sources.DcgmMissing, match="DCGM at node8 does not answer: Connection not valid; is nv-hostengine"):
        gpu_sources.DcgmSource(address="node8")
    monkeypatch.setattr(gpu_sources, "gpu_facts", lambda: {"uuid": "GPU-mine"})
    dcgm.down = False
    with pytest.raises(gpu_sources.DcgmMissing, match="DCGM does not know this machine's GPU GPU-mine"):
        gpu_sources.DcgmSource()
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
    """On a pretended GPU."""
    def nvml(fields: Sequence[str] | None, counters: bool) -> Any:
        if counters and not has_gpm:
            raise gpu_sources.CountersMissing("no GPM")
        return SimpleNamespace(name="NVML with GPM" if counters else "NVML", fields=())

    monkeypatch.setattr(metrics, "resolve_device", lambda name: "cuda")
    monkeypatch.setattr(metrics, "NvmlSource", nvml)
    if not installed:
        monkeypatch.setitem(sys.modules, "pydcgm", None)
    monkeypatch.setattr(logging.getLogger("hase"), "propagate", True)
    with caplog.at_level(logging.INFO):
        assert open_source().name == chosen
    assert f"metrics: from {chosen}: " in caplog.text
    assert why in caplog.text
    if installed:
        assert open_source(dcgm_address="node7").name == "DCGM at node7"


@pytest.mark.parametrize(("device", "options", "message"), [
    ("cpu", {"source": "dcgm"}, "source dcgm reads a GPU, and the device here is the CPU; use psutil or auto"),
    ("cpu", {"source": "replay"}, "source replay needs a file to replay"),
    ("cpu", {"source": "psutil", "replay": Path("any")}, "source psutil: it does not read"),
    ("cpu", {"replay_step_s": 1.0}, "source auto: there is no step of a replay without a file"),
    ("cpu", {"dcgm_address": "node7"}, "source auto on cpu: it does not ask the DCGM at node7"),
    ("cuda", {"source": "psutil"}, "source psutil reads the CPU, and the device here is a GPU")])
def test_a_source_for_another_device(device: str, options: dict[str, Any], message: str,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "resolve_device", lambda name: device)
    with pytest.raises(UserError, match=message):
        open_source(**options)
