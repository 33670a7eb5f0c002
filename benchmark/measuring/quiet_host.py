"""Keeps runs undisturbed: away from the cores of worker threads, and in quiet moments of the host.

Cores: ONNX Runtime pins each worker thread to a core and leaves the caller's thread free. Sometimes the system puts the caller
on a worker's core; the two share it, and the session takes twice as long. So on the CPU the caller is kept off these cores. On
a GPU it stays free: workers rest, and the only core without a worker is the same for every process. Processes timed in parallel
on several GPUs would share it, and wait 4 ms for each other's turns.

Moments: a virtual machine shares its cores with others. For tenths of a second its host dispatches 1.4 to 1.7 times more
slowly, on all cores. This slows a short model although the GPU's own times stay the same. So a model is timed in slots of some
hundredths of a second, with a probe read before and after each: a fixed graph that is all dispatch. A slot counts if the probe
was about as fast as in the fastest tenth of its readings: of all so far, or of those up to an earlier moment if they were
faster, so that a long disturbance is not taken for normal. (The very fastest reading is no measure: sometimes the probe takes a
sixth less even on an undisturbed host.)
"""

from __future__ import annotations

import bisect
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from hase.records.host_pace import STALL_S
from hase.records.measurement import DISTURBANCE_ADMITTED, Effort
from hase.utils.timing import turns

THREADS = Path("/proc/self/task")
DISPATCHES = 3  # of a reading; the shortest one counts
FASTEST = 10  # a tenth of the readings is fastest; its slowest reading is that of an undisturbed host
SLOT_S = 0.02
LEAST_READINGS = 3  # of the probe, however short the time
PATIENCE = 4.0  # longest wait for undisturbed slots, as a multiple of the budget


def free_cores() -> set[int]:
    """Cores that this thread may use and no other thread of the process is pinned to; empty if unknown."""
    if not hasattr(os, "sched_getaffinity") or not THREADS.is_dir():
        return set()
    allowed = os.sched_getaffinity(0)
    pinned: set[int] = set()
    for thread in os.listdir(THREADS):
        try:
            cores = os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # it has just ended
            continue
        if cores < allowed:
            pinned |= cores
    return allowed - pinned


@contextmanager
def off_the_workers_cores(device: str) -> Iterator[None]:
    """Keeps the calling thread on `free_cores` if its sessions are on `cpu`."""
    cores = free_cores() if device == "cpu" else set()
    if not cores:
        yield
        return
    allowed_before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed_before)


@dataclass
class HostProbe:
    """A probe of the host's pace."""

    dispatch_s: Callable[[], float]  # dispatches a fixed graph and returns how long that took, in seconds
    sorted_s: list[float]  # all readings so far in seconds, ascending; at first those of the first look, at least one
    # what a dispatch takes on an undisturbed host: the slowest of the fastest tenth of the readings, and the smallest such
    # value since the first look
    good_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.good_s = self._tenth_s()

    def reading_s(self) -> float:
        """The probe's current time, in seconds."""
        shortest = shortest_s(self.dispatch_s)
        bisect.insort(self.sorted_s, shortest)
        self.good_s = min(self.good_s, self._tenth_s())
        return shortest

    def _tenth_s(self) -> float:
        return self.sorted_s[len(self.sorted_s) // FASTEST]


@dataclass
class StallWatch:
    """Dispatches like a probe, and notes when the host stalled."""

    dispatch_s: Callable[[], float]
    usual_s: float  # usual time of a dispatch
    dispatched_s: float = 0.0  # the time of all dispatches
    # excess of each dispatch that took at least STALL_S longer than usual
    stalls_s: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        """Dispatches once and returns the time in seconds."""
        took_s = self.dispatch_s()
        self.dispatched_s += took_s
        if took_s > self.usual_s + STALL_S:
            self.stalls_s.append(took_s - self.usual_s)
        return took_s


def first_look(dispatch_s: Callable[[], float], seconds: float) -> HostProbe:
    """A probe that has been read for `seconds`, at least once, so that it knows what is normal."""
    return HostProbe(dispatch_s, sorted([shortest_s(dispatch_s), *(shortest_s(dispatch_s) for _ in turns(0, seconds))]))


def shortest_s(dispatch_s: Callable[[], float]) -> float:
    """The shortest of a few dispatches, in seconds."""
    return min(dispatch_s() for _ in range(DISPATCHES))


@dataclass(frozen=True)
class TimeSlot:
    """Runs between two readings of the probe: their times in ms, and the slower reading in seconds."""

    samples_ms: tuple[float, ...]
    probe_s: float


class HostSamples(NamedTuple):
    """Samples of one function, and the state of the host during them."""

    samples_ms: tuple[float, ...]  # one per run
    disturbance: float  # of the worst slot: the probe's reading over a good one, minus 1
    probe_us: float  # the probe's median reading, in microseconds


def quiet_samples_ms(probe: HostProbe, clocks: Mapping[str, Callable[[], float]], effort: Effort) -> dict[str, HostSamples]:
    """Samples of several functions (each returns its seconds), in alternating slots, from the least disturbed moments. `effort`
    is the undisturbed time and number of runs for each; after PATIENCE the least disturbed slots fill the gap."""
    slots: dict[str, list[TimeSlot]] = {label: [] for label in clocks}
    until = time.monotonic() + PATIENCE * effort.budget_s * len(clocks)
    missing = list(clocks)
    while missing:
        for label in missing:
            slots[label].append(_time_slot(probe, clocks[label]))
        late = time.monotonic() > until
        missing = [label for label in clocks if not _enough(slots[label], probe, effort, late)]
    return {label: _least_disturbed(taken, probe, effort) for label, taken in slots.items()}


def all_samples_ms(probe: HostProbe, run_s: Callable[[], float], effort: Effort) -> HostSamples:
    """Samples of `run_s` (which returns seconds) with the host as it is: disturbed slots count, too."""
    slots = [_time_slot(probe, run_s) for _ in turns(1, effort.budget_s)]
    while sum(len(slot.samples_ms) for slot in slots) < effort.least_runs:
        slots.append(_time_slot(probe, run_s))
    return _joined(slots, probe, effort)


def readings_s(probe: HostProbe, seconds: float) -> list[float]:
    """Readings of the probe in seconds, as during a model's runs: the slower one before and after a slot."""
    readings = [shortest_s(probe.dispatch_s)]
    for _ in turns(LEAST_READINGS, seconds):
        for _ in turns(0, SLOT_S):
            probe.dispatch_s()
        readings.append(shortest_s(probe.dispatch_s))
    return [max(neighbours) for neighbours in itertools.pairwise(readings)]


def watched_readings_s(probe: HostProbe, seconds: float) -> tuple[list[float], StallWatch]:
    """Like `readings_s`, with the stalls of the host."""
    watch = StallWatch(probe.dispatch_s, probe.good_s)
    return readings_s(replace(probe, dispatch_s=watch), seconds), watch


def _least_disturbed(slots: list[TimeSlot], probe: HostProbe, effort: Effort) -> HostSamples:
    """Samples of all undisturbed slots, in order, and of the others needed for the least number of runs."""
    counted = [slot for slot in slots if _is_quiet(slot, probe)]
    for slot in sorted((slot for slot in slots if not _is_quiet(slot, probe)), key=lambda slot: slot.probe_s):
        if sum(len(taken.samples_ms) for taken in counted) >= effort.least_runs:
            break
        counted.append(slot)
    return _joined(counted, probe, effort)


def _joined(counted: list[TimeSlot], probe: HostProbe, effort: Effort) -> HostSamples:
    samples = [sample for slot in counted for sample in slot.samples_ms]
    worst = max(slot.probe_s for slot in counted) / probe.good_s - 1.0
    return HostSamples(tuple(round(sample, 6) for sample in samples[:effort.most_runs]), round(max(worst, 0.0), 4),
                 round(1e6 * median(slot.probe_s for slot in counted), 2))


def _time_slot(probe: HostProbe, run_s: Callable[[], float]) -> TimeSlot:
    before_s = probe.reading_s()
    samples_ms = tuple(1000 * run_s() for _ in turns(1, SLOT_S))
    return TimeSlot(samples_ms, max(before_s, probe.reading_s()))


def _is_quiet(slot: TimeSlot, probe: HostProbe) -> bool:
    return slot.probe_s <= probe.good_s * (1 + DISTURBANCE_ADMITTED)


def _enough(slots: list[TimeSlot], probe: HostProbe, effort: Effort, late: bool) -> bool:
    """Whether the slots that count (all of them if `late`) hold the required runs and time."""
    samples = [sample for slot in slots if late or _is_quiet(slot, probe) for sample in slot.samples_ms]
    if late or len(samples) < effort.least_runs:
        return len(samples) >= effort.least_runs
    return len(samples) >= effort.most_runs or sum(samples) >= 1000 * effort.budget_s
