"""Keeps runs undisturbed: off the cores of worker threads, and in quiet moments of the host.

Cores: ONNX Runtime pins each of its worker threads to a core and leaves the caller's thread free. Now and then the system puts
the caller on a worker's core. The two then share it, and the whole session takes twice as long. So the caller of a session on
the CPU is kept off these cores. That of a session on a GPU stays free: its workers rest, and the only core without one is the
same for every process. Processes that are timed at the same time on several GPUs would share it, and each wait for the others'
turns of 4 ms.

Moments: a virtual machine shares its cores with others. For tenths of a second at a time its host dispatches 1.4 to 1.7 times
more slowly, on every core alike. A short model becomes slower with it, although the GPU's own times stay the same. So a model
is timed in slots of some hundredths of a second. Before and after each slot a probe is read: a fixed graph that is all
dispatch. A slot counts if the probe was about as fast as in the fastest tenth of its readings: of all readings so far, or of
those up to an earlier moment if they were faster, so that a long disturbance is not taken for the normal state. (The very
fastest reading is no measure: on an undisturbed host, too, the probe sometimes takes a sixth less.)
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

from hase.benchmark.measuring.run_times import Effort
from hase.records.host_pace import STALL_S
from hase.records.measurement import DISTURBANCE_ADMITTED

THREADS = Path("/proc/self/task")
READINGS = 3  # the shortest one counts
FASTEST = 10  # a tenth of the readings: the slowest of the fastest tenth is that of an undisturbed host
SLOT_S = 0.02
LEAST_READINGS = 3  # of the probe, however short the time
PATIENCE = 4.0  # times the budget: how long to wait for enough undisturbed slots


def free_cores() -> set[int]:
    """The cores that this thread may use and to which no other thread of this process is pinned; empty if the system does not
    say."""
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
    """Keeps the calling thread on the cores that `free_cores` finds, if there are any, where its sessions are on a `cpu`."""
    cores = free_cores() if device == "cpu" else set()
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class HostProbe:
    """A probe of the host's pace.

    Attributes:
        dispatch_s: dispatches a fixed graph and returns the seconds it took.
        sorted_s: all readings so far in seconds, ascending; at first those of the first look, at least one.
        good_s: what a dispatch takes on an undisturbed host: the slowest of the fastest tenth of the readings, and the
            smallest such value since the first look.
    """

    dispatch_s: Callable[[], float]
    sorted_s: list[float]
    good_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.good_s = self._tenth_s()

    def reading_s(self) -> float:
        """What the probe takes now, in seconds."""
        shortest = shortest_s(self.dispatch_s)
        bisect.insort(self.sorted_s, shortest)
        self.good_s = min(self.good_s, self._tenth_s())
        return shortest

    def _tenth_s(self) -> float:
        return self.sorted_s[len(self.sorted_s) // FASTEST]


@dataclass
class StallWatch:
    """Dispatches as a probe does, and notes when the host did nothing meanwhile.

    Attributes:
        dispatch_s: the probe's.
        usual_s: what a dispatch takes.
        dispatched_s: the time of all dispatches.
        stalls_s: by how much each dispatch was longer that took STALL_S longer than usual.
    """

    dispatch_s: Callable[[], float]
    usual_s: float
    dispatched_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        """Dispatches once; the seconds it took."""
        took_s = self.dispatch_s()
        self.dispatched_s += took_s
        if took_s > self.usual_s + STALL_S:
            self.stalls_s.append(took_s - self.usual_s)
        return took_s


def first_look(dispatch_s: Callable[[], float], seconds: float) -> HostProbe:
    """A probe that has been read for `seconds`, at least once, so that it knows what is normal."""
    first, until = [shortest_s(dispatch_s)], time.monotonic() + seconds
    while time.monotonic() < until:
        first.append(shortest_s(dispatch_s))
    return HostProbe(dispatch_s, sorted(first))


def shortest_s(dispatch_s: Callable[[], float]) -> float:
    """The shortest of a few dispatches, in seconds."""
    return min(dispatch_s() for _ in range(READINGS))


@dataclass(frozen=True)
class TimeSlot:
    """Runs between two readings of the probe: their times in ms, and the slower reading in seconds."""

    samples_ms: tuple[float, ...]
    probe_s: float


class Timed(NamedTuple):
    """Samples of one function, and the state of the host meanwhile.

    Attributes:
        samples_ms: one per run.
        disturbance: of the worst slot: the probe's reading over a good one, minus 1.
        probe_us: the probe's median reading, in microseconds.
    """

    samples_ms: tuple[float, ...]
    disturbance: float
    probe_us: float


def quiet_samples_ms(probe: HostProbe, timed: Mapping[str, Callable[[], float]], effort: Effort) -> dict[str, Timed]:
    """Samples of several functions, in alternating slots, from the moments in which the host was least disturbed.

    Args:
        probe: of the host.
        timed: functions by label; each runs once and returns the seconds it took.
        effort: undisturbed time and runs wanted of each. If PATIENCE ends first, the least disturbed slots fill up what is
            missing.
    """
    slots: dict[str, list[TimeSlot]] = {label: [] for label in timed}
    until = time.monotonic() + PATIENCE * effort.budget_s * len(timed)
    missing = list(timed)
    while missing:
        for label in missing:
            slots[label].append(_time_slot(probe, timed[label]))
        late = time.monotonic() > until
        missing = [label for label in timed if not _enough(slots[label], probe, effort, late)]
    return {label: _least_disturbed(of_label, probe, effort) for label, of_label in slots.items()}


def all_samples_ms(probe: HostProbe, run_s: Callable[[], float], effort: Effort) -> Timed:
    """Samples of one function with the host as it is: disturbed slots count too, and the probe's median is that of all slots.

    Args:
        probe: of the host.
        run_s: runs once and returns the seconds it took.
        effort: time and runs wanted.
    """
    slots: list[TimeSlot] = []
    until = time.monotonic() + effort.budget_s
    while time.monotonic() < until or sum(len(slot.samples_ms) for slot in slots) < effort.least_runs:
        slots.append(_time_slot(probe, run_s))
    return _joined(slots, probe, effort)


def readings_s(probe: HostProbe, seconds: float) -> list[float]:
    """What the probe takes over a while, in seconds. The probe does not remember these readings.

    Each value is taken as during a model's runs: the slower one of the readings before and after a slot, in which the probe
    itself keeps the host at work.
    """
    readings = [shortest_s(probe.dispatch_s)]
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(readings) <= LEAST_READINGS:
        slot_ends = time.monotonic() + SLOT_S
        while time.monotonic() < slot_ends:
            probe.dispatch_s()
        readings.append(shortest_s(probe.dispatch_s))
    return [max(neighbours) for neighbours in itertools.pairwise(readings)]


def watched_readings_s(probe: HostProbe, seconds: float) -> tuple[list[float], StallWatch]:
    """As `readings_s`, with the stalls meanwhile."""
    watch = StallWatch(probe.dispatch_s, probe.good_s)
    return readings_s(replace(probe, dispatch_s=watch), seconds), watch


def _least_disturbed(slots: list[TimeSlot], probe: HostProbe, effort: Effort) -> Timed:
    """The samples of all undisturbed slots, in order, and of as few others as are needed for the least number of runs."""
    counted = [slot for slot in slots if _is_quiet(slot, probe)]
    for slot in sorted((w for w in slots if not _is_quiet(w, probe)), key=lambda slot: slot.probe_s):
        if sum(len(taken.samples_ms) for taken in counted) >= effort.least_runs:
            break
        counted.append(slot)
    return _joined(counted, probe, effort)


def _joined(counted: list[TimeSlot], probe: HostProbe, effort: Effort) -> Timed:
    samples = [sample for slot in counted for sample in slot.samples_ms]
    worst = max(slot.probe_s for slot in counted) / probe.good_s - 1.0
    return Timed(tuple(round(sample, 6) for sample in samples[:effort.most_runs]), round(max(worst, 0.0), 4),
                 round(1e6 * median(slot.probe_s for slot in counted), 2))


def _time_slot(probe: HostProbe, run_s: Callable[[], float]) -> TimeSlot:
    before, began, samples = probe.reading_s(), time.monotonic(), list[float]()
    while not samples or time.monotonic() - began < SLOT_S:
        samples.append(1000 * run_s())
    return TimeSlot(tuple(samples), max(before, probe.reading_s()))


def _is_quiet(slot: TimeSlot, probe: HostProbe) -> bool:
    return slot.probe_s <= probe.good_s * (1 + DISTURBANCE_ADMITTED)


def _enough(slots: list[TimeSlot], probe: HostProbe, effort: Effort, late: bool) -> bool:
    """Whether the slots that count (all of them if it is late) hold the runs and the time that are wanted."""
    samples = [sample for slot in slots if late or _is_quiet(slot, probe) for sample in slot.samples_ms]
    if late or len(samples) < effort.least_runs:
        return len(samples) >= effort.least_runs
    return len(samples) >= effort.most_runs or sum(samples) >= 1000 * effort.budget_s
