"""Measures power and energy of a device while something runs on it, and the memory that a session holds.

    with PowerMonitor(open_power_sensor(device)) as monitor:
        idle = monitor.rest(1.0)
        measured = energy_of_runs(monitor, run)   # runs for 3 s
    measured.energy_j, measured.used.mean_w, idle.mean_w, measured.used.agreement

A thread reads the sensor every 20 ms. Energy is the integral of power by trapezoids, checked against the device's own counter.
`Energy.warnings` says what is wrong with a reading; users must see it.

The sensor is NVML for an NVIDIA GPU and RAPL for a CPU (Linux kernel documentation, "Power Capping Framework"): an energy
counter per package, and one for its memory if the CPU has it. Its power is the counter's difference. Virtual machines rarely
have it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import psutil

from hase.benchmark.metrics import gpu_sources
from hase.benchmark.metrics.gpu_sources import POWER
from hase.benchmark.metrics.source import checked
from hase.utils.errors import UserError
from hase.utils.fingerprint import driver_fails, resolve_device
from hase.utils.lazy import pynvml
from hase.utils.timing import pause, time_runs_ms

SAMPLE_EVERY_S = 0.02
WINDOW_S = 3.0  # shortest window whose energy is sound; a GPU's sensor and its counter move in steps of up to 0.1 s
LARGEST_DIFFERENCE = 0.10  # between the integral and the counter, as a ratio; more is reported
LONGEST_GAP_S = 0.25  # between two samples; a longer one is reported
SETTLE_S = 0.5  # how long something runs before its window, beyond the time that the sensor averages over


@dataclass(frozen=True)
class Energy:
    """The energy of a device in a window."""

    seconds: float  # the window's length
    energy_j: float  # the integral of power; from a sensor without power, the counter's difference
    counter_j: float | None  # the counter's difference, to check the integral; None unless there are both
    samples: int  # of the sensor in the window
    sensor: str
    warnings: tuple[str, ...] = ()  # what is wrong with this reading, each as a sentence; empty if it is sound

    @property
    def mean_w(self) -> float:
        """Mean power."""
        return self.energy_j / self.seconds

    @property
    def agreement(self) -> float | None:
        """Integral divided by counter, 1.0 if they agree; None without both."""
        return self.energy_j / self.counter_j if self.counter_j else None


@dataclass(frozen=True)
class RunsEnergy:
    """Consecutive runs, and the device's energy during them."""

    samples_ms: tuple[float, ...]  # the time of each run
    used: Energy  # the energy of the whole window, including what the idle device would have taken

    @property
    def energy_j(self) -> float:
        """Energy per run."""
        return self.used.energy_j / len(self.samples_ms)


def integral_j(times_s: Sequence[float], powers_w: Sequence[float], began_s: float, ended_s: float) -> float:
    """Integral of power between two moments, in J, by trapezoids; beyond the samples, power is that of the nearest one."""
    times = np.asarray(times_s, dtype=float)
    inside = times[(times > began_s) & (times < ended_s)]
    grid = np.concatenate(([began_s], inside, [ended_s]))
    powers = np.interp(grid, times, powers_w)
    return float(np.sum(np.diff(grid) * (powers[1:] + powers[:-1]) / 2))


def energy_between(samples: Sequence[PowerSample], sensor: str, began_s: float, ended_s: float) -> Energy:
    """Energy between two moments of the monotonic clock. Raises UserError if the window has fewer than two samples."""
    seconds = ended_s - began_s
    times = [sample.time_s for sample in samples]
    # also the last sample before the window and the first one after it
    first, last = max(int(np.searchsorted(times, began_s)) - 1, 0), int(np.searchsorted(times, ended_s)) + 1
    near, times = list(samples[first:last]), times[first:last]
    if len(near) < 2 or seconds <= 0:
        raise UserError(f"power: {sensor} gave {len(near)} samples for a window of {seconds:.3f} s; it needs two")
    counters = [sample.counter_j for sample in near if sample.counter_j is not None]
    powers = [sample.power_w for sample in near if sample.power_w is not None]
    counter_j = None
    if len(counters) == len(near):
        counter_j = float(np.interp(ended_s, times, counters) - np.interp(began_s, times, counters))
    energy_j = integral_j(times, powers, began_s, ended_s) if len(powers) == len(near) else counter_j
    if energy_j is None:
        raise UserError(f"power: {sensor} gave neither power nor energy")
    energy = Energy(seconds, energy_j, counter_j if powers else None, sum(began_s <= at <= ended_s for at in times), sensor)
    return replace(energy, warnings=_warnings(energy, float(np.max(np.diff(times)))))


def _warnings(energy: Energy, longest_gap_s: float) -> tuple[str, ...]:
    warnings = []
    if energy.seconds < WINDOW_S * 0.99:
        warnings.append(f"a window of {energy.seconds:.2f} s is too short for the sensor, it needs {WINDOW_S:.0f} s")
    if longest_gap_s > LONGEST_GAP_S:
        warnings.append(f"no sample for {longest_gap_s:.2f} s")
    if energy.agreement is not None and abs(energy.agreement - 1.0) > LARGEST_DIFFERENCE:
        warnings.append(f"the integral of power is {energy.agreement:.2f} times what the device's energy counter says")
    return tuple(warnings)


class PowerMonitor:
    """Samples a power sensor every `every_s` seconds in a thread; used in a `with` statement."""

    def __init__(self, sensor: PowerSensor, every_s: float = SAMPLE_EVERY_S) -> None:
        self.sensor = sensor
        self._every_s = every_s
        self._samples: list[PowerSample] = []
        self._failure: UserError | None = None
        self._sampled, self._over = threading.Condition(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="power", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                sample = self.sensor.read()
            except UserError as error:
                with self._sampled:
                    self._failure = error
                    self._sampled.notify_all()
                return
            with self._sampled:
                self._samples.append(sample)
                self._sampled.notify_all()
            self._over.wait(self._every_s)

    def between(self, began_s: float, ended_s: float) -> Energy:
        """Energy between two moments of the monotonic clock; waits for the first sample after them."""
        with self._sampled:
            while self._failure is None and (not self._samples or self._samples[-1].time_s < ended_s):
                if not self._thread.is_alive():
                    raise RuntimeError("the power monitor is not open")
                self._sampled.wait(1.0)
            if self._failure is not None:
                raise self._failure
            samples = list(self._samples)
        return energy_between(samples, self.sensor.name, began_s, ended_s)

    def rest(self, seconds: float) -> Energy:
        """Energy while this process sleeps; on an idle device this gives idle power."""
        began_s = time.monotonic()
        pause(seconds)
        return self.between(began_s, time.monotonic())


def energy_of_runs(monitor: PowerMonitor, run: Callable[[], Any], seconds: float = WINDOW_S,
                   settle_s: float | None = None) -> RunsEnergy:
    """Runs something for `seconds` (at least once) and measures the energy, after `settle_s` for steady power."""
    if settle_s is None:
        settle_s = monitor.sensor.averages_s + SETTLE_S
    time_runs_ms(run, 1, settle_s)
    began_s = time.monotonic()
    samples_ms = tuple(time_runs_ms(run, 1, seconds))
    ended_s = time.monotonic()
    return RunsEnergy(samples_ms, monitor.between(began_s, ended_s))


# sensors of power --------------------------------------------------------------------------------------------------------

POWERCAP = Path("/sys/class/powercap")


class NoPowerSensor(UserError):
    """The device's power cannot be measured here; the message says why."""


class PowerSample(NamedTuple):
    """A sensor's values at one moment."""

    time_s: float  # of the monotonic clock
    power_w: float | None  # at that moment; None from a sensor that only counts
    counter_j: float | None  # energy since any fixed moment; None from a sensor without a counter


class PowerSensor(ABC):
    """Reads a device's power."""

    name: str  # for messages
    averages_s: float  # one value describes about this time before it was read, in seconds

    @abstractmethod
    def read(self) -> PowerSample:
        """Current values. Raises UserError if the device no longer answers, Unsound for impossible values."""


class NvmlPower(PowerSensor):
    """Power of the first GPU by NVML, with its energy counter if it has one."""

    def __init__(self) -> None:
        try:
            self._gpu = gpu_sources.first_gpu()
        except pynvml.NVMLError as error:
            raise NoPowerSensor(f"power: {driver_fails('NVML', error)}") from None
        self._power_w, self.name, self.averages_s = self._best_reader()
        self._counter_j: Callable[[Any], float] | None = None
        with suppress(pynvml.NVMLError):
            gpu_sources.energy_counter_j(self._gpu)
            self._counter_j = gpu_sources.energy_counter_j

    def _best_reader(self) -> tuple[Callable[[Any], float], str, float]:
        """The function that reads power, its name, and the seconds that it averages over."""
        failures = []
        for reader, name, averages_s in ((gpu_sources.instant_power_w, "NVML's instant power", 0.1),
                                         (gpu_sources.mean_power_w, "NVML's power, a mean over 1 s", 1.0)):
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
    """Energy of all CPU packages and their memory, from RAPL's domains in Linux's folder `powercap`."""

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
    """One energy counter. The counter wraps around (after 20 minutes at 200 W), `counted_j` does not if read more often."""

    def __init__(self, folder: Path) -> None:
        self._counter = folder / "energy_uj"
        self._range_uj = int(_text(folder / "max_energy_range_uj"))
        self._last_uj, self._counted_uj = self._value_uj(), 0

    def _value_uj(self) -> int:
        return int(self._counter.read_text(encoding="ascii"))

    def counted_j(self) -> float:
        """Energy since this object was created, in J."""
        now_uj = self._value_uj()
        spent_uj = now_uj - self._last_uj
        self._counted_uj += spent_uj if spent_uj >= 0 else spent_uj + self._range_uj + 1
        self._last_uj = now_uj
        return self._counted_uj / 1e6


def _text(path: Path) -> str:
    """A small file's text; "" if there is none."""
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def open_power_sensor(device: str = "auto") -> PowerSensor:
    """The power sensor of `auto`, `cpu` or `cuda`. Raises NoPowerSensor if there is none or it may not be read."""
    return NvmlPower() if resolve_device(device) == "cuda" else RaplPower()


# memory of a session -----------------------------------------------------------------------------------------------------

STATUS, RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux


class HeldMemory:
    """Peak memory that a session holds during its runs, beyond what was held before it was opened.

    Create it before opening the session, call `opened` afterwards, and read `peak_mib` after the runs. On a CPU that is the
    largest resident memory; free heap is returned first, since its amount varies. On a GPU it is all memory in use after the
    runs, so nothing else may use the device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._before_mib = _in_use_mib(device)

    def opened(self) -> None:
        """Starts counting the peak."""
        _give_back()
        with suppress(OSError):  # where it can't be reset, the peak includes the loading
            RESET_PEAK.write_text("5", encoding="ascii")

    @property
    def peak_mib(self) -> float:
        """Peak memory so far, in MiB."""
        return (_in_use_mib("cuda") if self._device == "cuda" else _largest_resident_mib()) - self._before_mib


def _in_use_mib(device: str) -> float:
    """Memory in use in MiB, by this process on a CPU, or by all processes on a GPU."""
    if device == "cuda":
        return gpu_sources.used_memory_mib()
    _give_back()
    return float(psutil.Process().memory_info().rss) / 2**20


def _give_back() -> None:
    """Returns free heap memory to the system, as far as the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _largest_resident_mib() -> float:
    """Largest resident memory since the peak was reset, in MiB; the current one outside of Linux."""
    with suppress(OSError):
        return next(int(line.split()[1]) / 1024 for line in STATUS.read_text(encoding="ascii").splitlines()
                    if line.startswith("VmHWM:"))
    return float(psutil.Process().memory_info().rss) / 2**20
