"""Simulates runs of a model while other processes use the same GPU.

They run in time slices (`shared_runs_ms`), or at the same time, through MPS (`mps_runs_ms`).

Through MPS, a kernel is cut into blocks. The GPU starts the blocks of all processes in the order in which their kernels were
queued, each as soon as there is room. So a kernel that is queued behind one with more blocks than fit waits until those have
started, and one that leaves room delays nobody. Blocks that run at the same time share the memory's bandwidth. The blocks of a
process with a share of the threads take no more room than that share.

Simulating each block would be too slow, so blocks that start at the same time are one event. The limits of the simulation, and
how the rules were found: docs/sharing.md.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.pipeline import Floats, PipelineCosts, Tracks, dispatched_ms, gpu_work, launch_ms, pipeline_ms
from hase.utils.config import Frozen

MAX_STAGES = 48  # per simulated run; twice as many change its mean by less than 1 % and take twice as long
SHARED_RUNS = (200, 10)  # callers, and runs of each; with fewer callers the 95th percentile is noise
LOOPED_RUNS = 30  # of a model in a loop; its turns repeat by then
BETWEEN_RUNS_MS = 0.02  # a caller's time between the end of a run and the start of the next
TINY_MS = 1e-6  # avoids a division by zero
DRAWN_AT_ONCE = 64  # waits per caller; drawing them one by one would take a third of a simulation
FILLS_GPU = 0.9  # a wider kernel counts as filling the GPU
MIN_WIDTH = 0.05  # minimum share of the GPU of a kernel
MPS_RUNS = 40
WARMUP_RUNS = 2  # dropped, since the processes are not yet in step
MIN_ROOM = 1e-9  # less room counts as none


class CoRunner(NamedTuple):
    """Another process that uses the GPU in time slices, as a model's process experiences it.

    Attributes:
        busy_ms, quiet_ms: alternating phases with work and without; it never pauses if quiet_ms is 0.
        waits_ms: a sample of the model's waits for the GPU while the other process is busy; empty if it never waits.
    """

    busy_ms: float
    quiet_ms: float
    waits_ms: Floats

    @property
    def cycle_ms(self) -> float:
        """From the start of one busy phase to the start of the next."""
        return self.busy_ms + self.quiet_ms

    @property
    def busy_share(self) -> float:
        """The share of the time in which it is busy, a ratio."""
        return self.busy_ms / self.cycle_ms


class _Stages(NamedTuple):
    """The work that a run queues on the GPU, by node or by group of nodes.

    Attributes:
        ready_ms: the earliest start of each, from the start of the run.
        work_ms: the GPU's time for it.
        dispatched_ms: when the host has dispatched everything.
    """

    ready_ms: Floats
    work_ms: Floats
    dispatched_ms: float

    def idle_ms(self, costs: PipelineCosts) -> float:
        """The latency of a run while nothing else uses the GPU, ms."""
        ends = self.ready_ms + np.cumsum(self.work_ms[::-1])[::-1]  # all work from each stage on
        return max(self.dispatched_ms, float(ends.max(initial=0.0))) + costs.end_ms


def _ungrouped_stages(tracks: Tracks, costs: PipelineCosts) -> _Stages:
    """A stage for each launch, or for several launches of one node."""
    at = dispatched_ms(tracks, costs)
    ready, work = gpu_work(tracks, costs, at)
    # no launch comes before its run, whatever the fitted lead
    return _Stages(np.maximum(ready, 0.0), work, float(at[-1]) if len(at) else costs.start_ms)


def _grouped_stages(tracks: Tracks, costs: PipelineCosts) -> _Stages:
    """The launches of a run in at most MAX_STAGES groups of neighbours. A group begins so late that its work never waits for a
    dispatch: pauses of the GPU within the group are moved before it."""
    ready, work, dispatched = _ungrouped_stages(tracks, costs)
    done = np.cumsum(work)
    slack = ready - (done - work)  # the latest start of all work with which no node waits for its dispatch
    begins = np.unique(np.linspace(0, len(work), min(len(work), MAX_STAGES), endpoint=False).astype(int))
    latest = np.maximum.reduceat(slack, begins) if len(work) else slack
    return _Stages(latest + (done - work)[begins], np.add.reduceat(work, begins) if len(work) else work, dispatched)


def shared_runs_ms(tracks: Tracks, costs: PipelineCosts, slice_ms: float, co_runner: CoRunner,
                   generator: np.random.Generator, shape: tuple[int, int] = SHARED_RUNS) -> Floats:
    """Latencies (ms) of consecutive runs on a GPU that another process also uses, in time slices.

    The two never run at the same time. The other process gets the GPU while this run has no work for it, and after this run has
    had it for `slice_ms`; it then keeps it for one of its waits. The host goes on dispatching meanwhile, so part of a wait is
    hidden if the host is the slower track. The rules were learned on an H200 (training/fit_sharing.py).

    Without a co-runner a run takes `pipeline_ms`. There, a fitted lead can let the GPU begin before the run, which no simulated
    launch can; the time that this saves an idle run is subtracted from every run.

    Args:
        generator: draws the waits, and the other process's phase at the start.
        shape: number of callers, which are simulated independently, and of runs of each. The first run of each is dropped,
            since the two processes are not yet in step; the result has the shape (runs − 1, callers).
    """
    callers, runs = shape
    stages = _grouped_stages(tracks, costs)
    begins_ms = generator.uniform(0.0, co_runner.cycle_ms, callers)
    begin, free, used = np.zeros(callers), -generator.uniform(0.0, 1.0, callers), np.zeros(callers)
    others = _CoRunnerByCaller(co_runner, begins_ms, _waits(co_runner, generator, callers))
    latencies = np.empty((runs, callers))
    for run in range(runs):
        for ready, work in zip(stages.ready_ms.tolist(), stages.work_ms.tolist(), strict=True):
            wait = next(others.waits)
            start = np.maximum(free, begin + ready)
            idle = start > free
            if np.count_nonzero(idle):  # rare if the GPU is the slower track
                gap = start - free
                lost = idle & others.busy(start)
                start = start + np.where(lost, wait - np.mod(gap, np.maximum(wait, TINY_MS)), 0.0)
                used = np.where(idle, 0.0, used)
            free, used = _end_of_work(work, start, used, slice_ms, others)
        end = np.maximum(begin + stages.dispatched_ms, free) + costs.end_ms
        latencies[run] = end - begin
        begin = end + BETWEEN_RUNS_MS
    return latencies[1:] + (pipeline_ms(tracks, costs) - stages.idle_ms(costs))


class _CoRunnerByCaller(NamedTuple):
    """The other process as each caller meets it.

    Attributes:
        begins_ms: where each caller's start lies in the cycle of busy and quiet phases.
        waits: yields a random wait (ms) for each caller.
    """

    co_runner: CoRunner
    begins_ms: Floats
    waits: Iterator[Floats]

    def busy(self, when: Floats) -> npt.NDArray[np.bool_]:
        """Whether the other process has work at each caller's time `when` (ms)."""
        if not self.co_runner.quiet_ms:
            return when < np.inf
        return (self.begins_ms + when) % self.co_runner.cycle_ms < self.co_runner.busy_ms


def _waits(co_runner: CoRunner, generator: np.random.Generator, callers: int) -> Iterator[Floats]:
    """Endless random waits (ms) for each caller."""
    waits = co_runner.waits_ms if len(co_runner.waits_ms) else np.zeros(1)
    while True:  # same numbers as `choice`, in half the time
        yield from waits[generator.integers(0, len(waits), (DRAWN_AT_ONCE, callers))]


def _end_of_work(work: float, start: Floats, used: Floats, slice_ms: float, others: _CoRunnerByCaller) -> tuple[Floats, Floats]:
    """When `work` (ms) that begins at `start` is done for each caller, and how much of the caller's slice is used by then.
    `used` of the slice was used before. After `slice_ms` it is the other process's turn, if it has work."""
    now, left, used_after = start, np.asarray(work), used + work
    while np.count_nonzero(over := used_after > slice_ms):
        room = slice_ms - used
        now = np.where(over, now + room, now)
        now = np.where(over & others.busy(now), now + next(others.waits), now)
        left, used = np.where(over, left - room, left), np.where(over, 0.0, used)
        used_after = used + left
    return now + left, used_after


def gpu_work_ms(tracks: Tracks, costs: PipelineCosts) -> float:
    """The GPU's time for a run, with the pauses between launches, ms."""
    return float(_ungrouped_stages(tracks, costs).work_ms.sum())


def turns_ms(tracks: Tracks, costs: PipelineCosts, longest_ms: float, away_ms: float, runs: int = LOOPED_RUNS) -> Floats:
    """How long each turn on the GPU lasts (ms) for a model in a loop while another process also uses the GPU. A turn ends when
    all dispatched work is done, as at the end of each run, or after `longest_ms` (positive). The host goes on dispatching
    during the other process's turn of `away_ms` (with the time for switching), so the next turn is longer. A first run, in
    which the processes are not yet in step, is simulated before `runs` others. A model without work for the GPU has no
    turns."""
    ready, work, dispatched_all = _ungrouped_stages(tracks, costs)
    turns: list[float] = []
    begin = free = used = 0.0
    for run in range(runs + 1):
        for dispatched, left in zip(ready.tolist(), work.tolist(), strict=True):
            if used and begin + dispatched > free:
                turns.append(used)
                free, used = free + away_ms, 0.0
            free = max(free, begin + dispatched)
            while used + left > longest_ms:
                turns.append(longest_ms)
                free, left, used = free + longest_ms - used + away_ms, left - (longest_ms - used), 0.0
            free, used = free + left, used + left
        begin = max(begin + dispatched_all, free) + costs.end_ms + BETWEEN_RUNS_MS
        if used:
            turns.append(used)
            free, used = free + away_ms, 0.0
        if run == 0:
            turns.clear()
    return np.array(turns)


class Grids(NamedTuple):
    """How the kernels of a run's nodes use the GPU; one entry of each array per node.

    Attributes:
        width: the share of the GPU's threads that they can use at once, 0–1; 1 for kernels with more blocks than fit at once.
        bandwidth: the share of the memory's bandwidth that they use while nothing else runs, 0–1.
    """

    width: Floats
    bandwidth: Floats


class MpsRules(Frozen):
    """How kernels of several processes run at the same time; fitted (learned/sharing.py).

    Attributes:
        wave_ms: approximate time of the blocks of a kernel that fills the GPU; its time divided by this is its number of waves.
        last_wave: the share of the GPU that the last wave fills.
        slowdown: a block's relative slowdown beside blocks that use the whole bandwidth.
        bandwidth_slowdown: an additional slowdown, times the share of the bandwidth that the block itself uses.
        switch_ms: the GPU's pause before each launch while other processes use it.
        share_slowdown: the effect of a share of the threads that is smaller than a kernel's width; 1: in full, so that half of
            the width doubles its time.
    """

    wave_ms: float
    last_wave: float
    slowdown: float
    bandwidth_slowdown: float
    switch_ms: float
    share_slowdown: float


class MpsProcess(NamedTuple):
    """A process that runs a model in a loop without a pause. `share`: of the GPU's threads that it may use, 0–1."""

    tracks: Tracks
    costs: PipelineCosts
    grids: Grids
    share: float = 1.0

    def tracks_alone(self, rules: MpsRules) -> Tracks:
        """The tracks of a run while nothing else uses the GPU, with the process's share of the threads."""
        return self.tracks._replace(gpu_ms=times_at_share(self.tracks.gpu_ms, self.grids.width, self.share, rules))


def times_at_share(gpu_ms: Floats, width: Floats, share: float, rules: MpsRules) -> Floats:
    """How long kernels take on the GPU (ms) if their process may use a share of the threads; `gpu_ms` is without shares."""
    return gpu_ms * (1.0 + rules.share_slowdown * (np.maximum(1.0, width / share) - 1.0))


class _Launches(NamedTuple):
    """The launches of a run in order; lists, since the simulation reads them one by one.

    Attributes:
        ready_ms: the earliest start, from the start of the run.
        room: what all its blocks need together; 1 is the whole GPU.
        block_ms: how long each block takes.
        bandwidth: as in `Grids`.
        dispatched_ms: when the host has dispatched everything.
    """

    ready_ms: list[float]
    room: list[float]
    block_ms: list[float]
    bandwidth: list[float]
    dispatched_ms: float


def _launches(process: MpsProcess, rules: MpsRules) -> _Launches:
    tracks, costs, grids, share = process
    at = dispatched_ms(tracks, costs)
    working = np.flatnonzero(tracks.launches > 0)
    counts = np.maximum(1, np.round(tracks.launches[working]).astype(int))
    nodes = np.repeat(working, counts)
    before_last = np.concatenate([np.arange(count)[::-1] for count in counts]) if len(counts) else np.zeros(0)
    ready = np.maximum(at[nodes] + costs.lead_ms - launch_ms(tracks, costs)[nodes] * before_last, 0.0)
    alone = tracks.gpu_ms[nodes] / np.repeat(counts, counts)
    width = np.clip(grids.width[nodes], MIN_WIDTH, 1.0)
    room = np.where(width > FILLS_GPU, np.maximum(1.0, np.round(alone / rules.wave_ms)) - 1.0 + rules.last_wave, width)
    waves = np.ceil(room / share - MIN_ROOM)
    block = times_at_share(alone, width, share, rules) / waves
    return _Launches(ready.tolist(), room.tolist(), block.tolist(), grids.bandwidth[nodes].tolist(),
                     float(at[-1]) if len(at) else costs.start_ms)


class _Process:
    """The state of a simulated process: its current launch (`index`), and what is left of it."""

    def __init__(self, process: MpsProcess, rules: MpsRules, alone: bool) -> None:
        self.launches, self.share = _launches(process, rules), process.share
        self.end_ms = process.costs.end_ms
        self.gap_ms = process.costs.gap_ms + (0.0 if alone else rules.switch_ms)
        self.index, self.begin, self.latencies = 0, 0.0, list[float]()
        self.waiting = 0.0  # room needed by blocks that have not started
        self.running = 0.0  # room of running blocks
        self.bandwidth = 0.0  # demand of running blocks, as a share of the memory's

    def change_running(self, room: float) -> float:
        """Changes the room of running blocks by `room`; returns the change in their demand for bandwidth. The demand is all of
        the kernel's bandwidth, or less if fewer blocks run than would fit."""
        before, self.running = self.bandwidth, self.running + room
        if self.running < MIN_ROOM:
            self.running = self.bandwidth = 0.0
        else:
            whole = min(1.0, self.launches.room[self.index])
            self.bandwidth = self.launches.bandwidth[self.index] * min(1.0, self.running / whole)
        return self.bandwidth - before

    def next_launch(self, now: float) -> None:
        """Goes on to the next launch, which may be in the next run."""
        self.index += 1
        if self.index == len(self.launches.room):
            end = max(now, self.begin + self.launches.dispatched_ms) + self.end_ms
            self.latencies.append(end - self.begin)
            self.begin, self.index = end + BETWEEN_RUNS_MS, 0

    @property
    def ready(self) -> float:
        """When the host has dispatched the current launch."""
        return self.begin + self.launches.ready_ms[self.index]


def mps_runs_ms(model: MpsProcess, co_runners: Sequence[MpsProcess], rules: MpsRules, generator: np.random.Generator,
                runs: int = MPS_RUNS) -> Floats:
    """Latencies (ms) of `runs` consecutive runs while other processes run their models through MPS. The model must have work
    for the GPU; co-runners without are left out. WARMUP_RUNS more runs come before, and are dropped. `generator` draws when the
    others begin."""
    others = [process for process in co_runners if np.any(process.tracks.launches > 0)]
    processes = [_Process(process, rules, not others) for process in (model, *others)]
    events: list[tuple[float, int, _Process, float]] = []  # time, number, process, released room (0: a launch is queued)
    event_numbers = itertools.count()  # events at the same time come in the order in which they were added
    for process in processes:
        process.begin = generator.uniform(0.0, 1.0) if process is not processes[0] else 0.0
        heapq.heappush(events, (process.ready, next(event_numbers), process, 0.0))
    free, demand = 1.0, 0.0  # of room, and for bandwidth
    queue: list[_Process] = []
    while len(processes[0].latencies) < runs + WARMUP_RUNS:
        now, _, process, room = heapq.heappop(events)
        if not room:
            process.waiting = process.launches.room[process.index]
            queue.append(process)
        else:
            free, demand = free + room, demand + process.change_running(-room)
            if not process.running and not process.waiting:
                process.next_launch(now)
                heapq.heappush(events, (max(now + process.gap_ms, process.ready), next(event_numbers), process, 0.0))
        for queued in list(queue):  # in order; one that has used up its share lets the next pass
            started = min(free, queued.waiting, queued.share - queued.running)
            if started < MIN_ROOM:
                if free < MIN_ROOM:
                    break
                continue
            index, launches, others_bandwidth = queued.index, queued.launches, min(1.0, demand - queued.bandwidth)
            longer = 1.0 + others_bandwidth * (rules.slowdown + rules.bandwidth_slowdown * launches.bandwidth[index])
            heapq.heappush(events, (now + launches.block_ms[index] * longer, next(event_numbers), queued, started))
            free, demand, queued.waiting = free - started, demand + queued.change_running(started), queued.waiting - started
            if queued.waiting < MIN_ROOM:
                queued.waiting = 0.0
                queue.remove(queued)
    return np.array(processes[0].latencies[WARMUP_RUNS:])
