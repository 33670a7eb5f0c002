"""Power and energy: integrals, the check against the counter, a pretended GPU, and a CPU by real files."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from hase.benchmark.metrics import gpu_sources, power
from hase.benchmark.metrics.power import (
    Energy,
    NoPowerSensor,
    NvmlPower,
    PowerMonitor,
    PowerSample,
    PowerSensor,
    RaplPower,
    energy_between,
    integral_j,
    open_power_sensor,
)
from hase.utils.errors import UserError


class Ramp(PowerSensor):
    """A pretended sensor: this machine has none. The power rises by 10 W each second."""

    name, averages_s = "a ramp", 0.0

    def __init__(self) -> None:
        self.began_s = time.monotonic()

    def read(self) -> PowerSample:
        ran_s = time.monotonic() - self.began_s
        return PowerSample(self.began_s + ran_s, 100.0 + 10.0 * ran_s, 100.0 * ran_s + 5.0 * ran_s**2)


def four_of_six_seconds(counted_w: float) -> Energy:
    """The middle ones at 300 W; the counter counts another power."""
    return energy_between([PowerSample(0.1 * i, 300.0, 0.1 * i * counted_w) for i in range(61)], "a GPU", 1.0, 5.0)


def test_trapezoids_between_uneven_samples() -> None:
    """The power at both edges of a window is interpolated: 150 W at 0.5 s and at 2 s; a window may hold no sample."""
    at_s, watts = [0.0, 1.0, 3.0], [100.0, 200.0, 100.0]
    assert integral_j(at_s, watts, 0.0, 3.0) == pytest.approx(150.0 + 300.0)
    assert integral_j(at_s, watts, 0.5, 2.0) == pytest.approx(87.5 + 175.0)
    assert integral_j([0.0, 1.0], [100.0, 100.0], 0.25, 0.5) == pytest.approx(25.0)


def test_a_window_is_checked_against_its_counter() -> None:
    energy = four_of_six_seconds(counted_w=300.0)
    assert (energy.energy_j, energy.counter_j, energy.mean_w, energy.agreement) == pytest.approx((1200.0, 1200.0, 300.0, 1.0))
    assert (energy.seconds, energy.samples, energy.warnings) == (4.0, 41, ())
    assert four_of_six_seconds(counted_w=200.0).warnings == (
        "the integral of power is 1.50 times what the device's energy counter says",)


def test_short_windows_and_gaps_give_warnings() -> None:
    energy = energy_between([PowerSample(at_s, 300.0, None) for at_s in (0.0, 0.1, 0.2, 0.9, 1.0)], "a GPU", 0.1, 1.0)
    assert (energy.counter_j, energy.agreement) == (None, None)
    assert energy.warnings == ("a window of 0.90 s is too short for the sensor, it needs 3 s", "no sample for 0.70 s")
    with pytest.raises(UserError, match=r"power: a GPU gave 1 samples for a window of 1.000 s; it needs two"):
        energy_between([PowerSample(0.5, 100.0, None)], "a GPU", 0.0, 1.0)


def test_the_monitor_integrates_what_happened_in_its_window() -> None:
    with PowerMonitor(ramp := Ramp(), every_s=0.005) as monitor:
        time.sleep(0.02)
        began_s = time.monotonic()
        time.sleep(0.1)
        energy = monitor.between(began_s, began_s + 0.1)
    assert energy.energy_j == pytest.approx((100.0 + 10.0 * (began_s - ramp.began_s + 0.05)) * 0.1, rel=1e-3)
    assert energy.agreement == pytest.approx(1.0, abs=1e-3)


class PowerNvml(SimpleNamespace):
    """A pretended pynvml with one GPU of 300 W: this machine may have none."""

    class NVMLError(Exception):
        pass

    NVML_SUCCESS = 0

    def __init__(self) -> None:
        super().__init__(instant=0, has_mean=True, has_counter=True, mw=300_000, lost=False)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetFieldValues(self, device: str, fields: list[int]) -> list[Any]:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        assert fields == [pynvml.NVML_FI_DEV_POWER_INSTANT] == [gpu_sources.POWER_INSTANT]
        return [SimpleNamespace(nvmlReturn=self.instant, value=SimpleNamespace(uiVal=self.mw))]

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        if not self.has_mean:
            raise self.NVMLError("Not Supported")
        return self.mw + 1000

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:
        if not self.has_counter:
            raise self.NVMLError("Not Supported")
        return int(time.monotonic() * self.mw)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> PowerNvml:
    made = PowerNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(gpu_sources, "gpu_facts", lambda: {"uuid": "GPU-0"})
    monkeypatch.setattr(power, "resolve_device", lambda device: "cuda")
    return made


def test_a_gpus_instant_power_and_counter(fake: PowerNvml) -> None:
    sensor = open_power_sensor()
    assert (sensor.name, sensor.averages_s, sensor.read().power_w) == ("NVML's instant power", 0.1, 300.0)
    assert sensor.read().counter_j == pytest.approx(300.0 * time.monotonic(), rel=0.01)


def test_a_gpu_without_the_field_or_the_counter(fake: PowerNvml) -> None:
    fake.instant, fake.has_counter = 3, False
    sensor = NvmlPower()
    assert (sensor.name, sensor.averages_s) == ("NVML's power, a mean over 1 s", 1.0)
    assert sensor.read()[1:] == (301.0, None)
    fake.has_mean = False
    with pytest.raises(NoPowerSensor, match=r"does not give it \(NVML's instant power: 3; .* mean over 1 s: Not Supported\)"):
        NvmlPower()


@pytest.mark.parametrize(("change", "message"), [
    ({"mw": 0xFFFFFFFF}, "the device reports"), ({"lost": True}, "NVML's instant power: the driver does not answer")])
def test_a_gpu_that_is_lost_or_reports_nonsense(fake: PowerNvml, change: dict[str, object], message: str) -> None:
    sensor = NvmlPower()
    vars(fake).update(change)
    with pytest.raises(UserError, match=message):
        sensor.read()


def domain(powercap: Path, number: str, name: str, uj: int, range_uj: int = 262_143_328_850) -> Path:
    """A RAPL domain as Linux shows it."""
    folder = powercap / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", str(uj)), ("max_energy_range_uj", str(range_uj))):
        (folder / file).write_text(text + "\n", encoding="ascii")
    return folder / "energy_uj"


def test_a_cpus_packages_and_memory_count_once(tmp_path: Path) -> None:
    domains = [("0", "package-0", 5), ("1", "package-1", 7), ("0:0", "core", 1), ("0:1", "dram", 0), ("2", "psys", 0)]
    counters = [domain(tmp_path, number, name, joules * 1_000_000) for number, name, joules in domains]
    sensor = RaplPower(tmp_path)
    assert sensor.read()[1:] == (None, 0.0)
    for counter, uj in zip(counters, (6_000_000, 9_000_000, 2_000_000, 500_000, 9_000_000), strict=True):
        counter.write_text(f"{uj}\n", encoding="ascii")
    assert sensor.read().counter_j == pytest.approx(1.0 + 2.0 + 0.5)


def test_a_counter_that_wraps_around(tmp_path: Path) -> None:
    counter = domain(tmp_path, "0", "package-0", 999_000_000, range_uj=999_999_999)
    sensor = RaplPower(tmp_path)
    for uj in (500_000, 2_500_000, 1_500_000):  # after 1.5 J it has wrapped around; then 2 J; then it wraps again
        counter.write_text(f"{uj}\n", encoding="ascii")
        sample = sensor.read()
    assert sample.counter_j == pytest.approx(1.5 + 2.0 + 999.0)


def test_a_cpus_energy_is_the_counters_difference() -> None:
    samples = [PowerSample(0.1 * i, None, 4.0 * i) for i in range(61)]
    energy = energy_between(samples, "RAPL's counters", 1.05, 5.05)
    assert (energy.energy_j, energy.mean_w) == pytest.approx((160.0, 40.0))
    assert (energy.counter_j, energy.agreement, energy.warnings) == (None, None, ())  # nothing to check it against


def test_why_a_cpus_energy_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPowerSensor, match="has no RAPL domain"):
        RaplPower(tmp_path)
    domain(tmp_path, "0", "package-0", 1)

    def forbidden(self: Path, *_: object, **__: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(self))
        return "1"

    monkeypatch.setattr(power, "_text", lambda path: "package-0" if path.name == "name" else "1")
    monkeypatch.setattr(Path, "read_text", forbidden)  # root, as in a container, may read everything
    with pytest.raises(NoPowerSensor, match=r"only root may read .* allow it with: sudo chmod a\+r"):
        RaplPower(tmp_path)
