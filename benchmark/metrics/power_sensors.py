"""Sensors of a device's power: NVML for an NVIDIA GPU, RAPL for a CPU.

RAPL is Linux's powercap tree (kernel documentation, "Power Capping Framework"): one energy counter per package, and one for its
memory where the CPU has it. It has no power, so its power is the counter's difference. Virtual machines rarely have it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hase.benchmark.metrics import nvml
from hase.benchmark.metrics.nvml import POWER
from hase.benchmark.metrics.source import checked
from hase.utils.errors import UserError
from hase.utils.fingerprint import driver_fails, resolve_device
from hase.utils.lazy import pynvml

POWERCAP = Path("/sys/class/powercap")


class NoPowerSensor(UserError):
    """The device's power can't be measured here; the message gives the reason."""


class PowerSample(NamedTuple):
    """What a sensor said at one moment.

    Attributes:
        time_s: of the monotonic clock.
        power_w: at that moment; None from a sensor that only counts.
        counter_j: energy since any fixed moment; None from a sensor without a counter.
    """

    time_s: float
    power_w: float | None
    counter_j: float | None


class PowerSensor(ABC):
    """Reads a device's power.

    Attributes:
        name: for messages.
        averages_s: one value describes about so much time before it was read, in seconds.
    """

    name: str
    averages_s: float

    @abstractmethod
    def read(self) -> PowerSample:
        """The values at this moment.

        Raises:
            UserError: the device does not answer any more.
            Unsound: it answers with an impossible value.
        """


class NvmlPower(PowerSensor):
    """The first GPU's power by NVML, with its energy counter where it has one."""

    def __init__(self) -> None:
        try:
            self._gpu = nvml.first_gpu()
        except pynvml.NVMLError as error:
            raise NoPowerSensor(f"power: {driver_fails('NVML', error)}") from None
        self._power_w, self.name, self.averages_s = self._best_reader()
        self._counter_j: Callable[[Any], float] | None = None
        with suppress(pynvml.NVMLError):
            nvml.energy_counter_j(self._gpu)
            self._counter_j = nvml.energy_counter_j

    def _best_reader(self) -> tuple[Callable[[Any], float], str, float]:
        """What reads the power, its name, and the seconds that it averages over."""
        failures = []
        for reader, name, averages_s in ((nvml.instant_power_w, "NVML's instant power", 0.1),
                                         (nvml.mean_power_w, "NVML's power, a mean over 1 s", 1.0)):
            try:
                reader(self._gpu)
            except pynvml.NVMLError as error:
                failures.append(f"{name}: {error}")
            else:
                return reader, name, averages_s
        raise NoPowerSensor(f"power: this GPU or its driver does not give it ({'; '.join(failures)})")

    def read(self) -> PowerSample:
        began_s = time.monotonic()
        try:
            power_w = self._power_w(self._gpu)
            at_s = (began_s + time.monotonic()) / 2
            counter_j = self._counter_j(self._gpu) if self._counter_j else None
        except pynvml.NVMLError as error:
            raise driver_fails(self.name, error) from None
        return PowerSample(at_s, checked(POWER, power_w), counter_j)


class RaplPower(PowerSensor):
    """The energy of all packages of the CPU and of their memory, by RAPL.

    Args:
        powercap: Linux's folder of RAPL's domains.
    """

    name = "RAPL's counters"
    averages_s = 0.01  # the counters move every millisecond

    def __init__(self, powercap: Path = POWERCAP) -> None:
        folders = [folder for folder in sorted(powercap.glob("intel-rapl:*"))  # AMD's CPUs have the same names
                   if _text(folder / "name").startswith(("package", "dram"))]
        if not folders:
            raise NoPowerSensor(f"power: this CPU's energy can't be read: {powercap} has no RAPL domain (virtual machines "
                                "rarely have one; on a physical one load the module intel_rapl_common)")
        try:
            self._domains = [_Domain(folder) for folder in folders]
        except PermissionError:
            raise NoPowerSensor("power: this CPU's energy can't be read: only root may read "
                                f"{powercap}/intel-rapl:*/energy_uj; allow it with: "
                                f"sudo chmod a+r {powercap}/intel-rapl:*/energy_uj") from None
        except (OSError, ValueError) as error:
            raise NoPowerSensor(f"power: this CPU's energy can't be read: {error}") from None

    def read(self) -> PowerSample:
        began_s = time.monotonic()
        try:
            counter_j = sum(domain.counted_j() for domain in self._domains)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.name}: can't be read any more ({error})") from None
        return PowerSample((began_s + time.monotonic()) / 2, None, counter_j)


class _Domain:
    """One energy counter. It begins again at 0 after its greatest value; `counted_j` goes on. Read it more often than that
    happens (at 200 W after about 20 minutes).

    Raises:
        OSError, ValueError: it can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._counter = folder / "energy_uj"
        self._range_uj = int(_text(folder / "max_energy_range_uj"))
        self._last_uj, self._counted_uj = self._value_uj(), 0

    def _value_uj(self) -> int:
        return int(self._counter.read_text(encoding="ascii"))

    def counted_j(self) -> float:
        """The energy since this object was made, in J."""
        now_uj = self._value_uj()
        spent_uj = now_uj - self._last_uj
        self._counted_uj += spent_uj if spent_uj >= 0 else spent_uj + self._range_uj + 1
        self._last_uj = now_uj
        return self._counted_uj / 1e6


def _text(path: Path) -> str:
    """A small file's text; "" where there is none."""
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def open_power_sensor(device: str = "auto") -> PowerSensor:
    """The power sensor of `auto`, `cpu` or `cuda`.

    Raises:
        NoPowerSensor: there is none, or it may not be read; the message says why.
        UserError: `cuda`, and there is no GPU.
    """
    return NvmlPower() if resolve_device(device) == "cuda" else RaplPower()
