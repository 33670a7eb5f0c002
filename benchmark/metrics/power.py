"""Power and energy of a device while something runs on it.

    with PowerMonitor(open_power_sensor(device)) as monitor:
        idle = monitor.rest(1.0)
        measured = energy_of_runs(monitor, run)   # runs for 3 s
    measured.energy_j, measured.used.mean_w, idle.mean_w, measured.used.agreement

A thread reads the sensor every 20 ms. The energy of a window is the integral of the power by trapezoids. The device's own
counter over the same window checks it. `Energy.warnings` says what is wrong with a reading; a user must see it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from hase.benchmark.metrics.power_sensors import PowerSample, PowerSensor
from hase.utils.errors import UserError
from hase.utils.timing import pause

EVERY_S = 0.02
WINDOW_S = 3.0  # shortest window whose energy is sound; a GPU's sensor and its counter move in steps of up to 0.1 s
AGREES = 0.10  # the integral and the counter should differ by less
GAP_S = 0.25  # between two samples; longer ones are reported
SETTLE_S = 0.5  # how long something runs before its window, beyond the time that the sensor averages over


@dataclass(frozen=True)
class Energy:
    """The energy that a device took in a window.

    Attributes:
        seconds: the window's length.
        energy_j: the integral of power; from a sensor without power, the counter's difference.
        counter_j: the counter's difference, to check the integral; None where there are not both.
        samples: of the sensor in the window.
        sensor: its name.
        warnings: what is wrong with this reading, each as a sentence; empty if it is sound.
    """

    seconds: float
    energy_j: float
    counter_j: float | None
    samples: int
    sensor: str
    warnings: tuple[str, ...] = ()

    @property
    def mean_w(self) -> float:
        """The mean power."""
        return self.energy_j / self.seconds

    @property
    def agreement(self) -> float | None:
        """The integral over the counter, 1.0 if they agree; None without both."""
        return self.energy_j / self.counter_j if self.counter_j else None


@dataclass(frozen=True)
class RunsEnergy:
    """Runs of one thing, one after another, and the energy that the device took meanwhile.

    Attributes:
        samples_ms: the time of each run.
        used: the energy of the whole window, with what the idle device would have taken.
    """

    samples_ms: tuple[float, ...]
    used: Energy

    @property
    def energy_j(self) -> float:
        """The energy of one run."""
        return self.used.energy_j / len(self.samples_ms)


def integral_j(times_s: Sequence[float], powers_w: Sequence[float], began_s: float, ended_s: float) -> float:
    """The integral of power between two moments by trapezoids, in J; at the two moments the power is interpolated, and outside
    the samples it is that of the nearest."""
    times = np.asarray(times_s, dtype=float)
    inside = times[(times > began_s) & (times < ended_s)]
    grid = np.concatenate(([began_s], inside, [ended_s]))
    powers = np.interp(grid, times, powers_w)
    return float(np.sum(np.diff(grid) * (powers[1:] + powers[:-1]) / 2))


def energy_between(samples: Sequence[PowerSample], sensor: str, began_s: float, ended_s: float) -> Energy:
    """The energy between two moments of the monotonic clock, from samples in the order of time.

    Raises:
        UserError: there are fewer than two samples in and around the window.
    """
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
    if longest_gap_s > GAP_S:
        warnings.append(f"no sample for {longest_gap_s:.2f} s")
    if energy.agreement is not None and abs(energy.agreement - 1.0) > AGREES:
        warnings.append(f"the integral of power is {energy.agreement:.2f} times what the device's energy counter says")
    return tuple(warnings)


class PowerMonitor:
    """Samples a power sensor in a thread of its own while it is open; use it in a `with` statement.

    Args:
        sensor: of the device's power or energy (`open_power_sensor`).
        every_s: from one sample to the next.
    """

    def __init__(self, sensor: PowerSensor, every_s: float = EVERY_S) -> None:
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
        """The energy between two moments of the monotonic clock, in which the monitor was open. Waits for the first sample
        after them.

        Raises:
            UserError: the sensor failed meanwhile.
        """
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
        """The energy while this process does nothing for so many seconds: on an idle device, its idle power."""
        began_s = time.monotonic()
        pause(seconds)
        return self.between(began_s, time.monotonic())


def energy_of_runs(monitor: PowerMonitor, run: Callable[[], Any], seconds: float = WINDOW_S,
                   settle_s: float | None = None) -> RunsEnergy:
    """Runs something again and again for `seconds` (at least once), and the energy of that.

    Args:
        monitor: open.
        run: runs once, and returns when the device is done.
        seconds: of the window; the last run may end after them.
        settle_s: how long it runs before, so that the power is steady; None: as long as the sensor needs.
    """
    if settle_s is None:
        settle_s = monitor.sensor.averages_s + SETTLE_S
    _runs_ms(run, settle_s)
    began_s = time.monotonic()
    samples_ms = _runs_ms(run, seconds)
    ended_s = time.monotonic()
    return RunsEnergy(samples_ms, monitor.between(began_s, ended_s))


def _runs_ms(run: Callable[[], Any], seconds: float) -> tuple[float, ...]:
    """The times of runs for so many seconds; at least one."""
    until_s, samples_ms = time.monotonic() + seconds, list[float]()
    while not samples_ms or time.monotonic() < until_s:
        began_s = time.perf_counter()
        run()
        samples_ms.append(1e3 * (time.perf_counter() - began_s))
    return tuple(samples_ms)
