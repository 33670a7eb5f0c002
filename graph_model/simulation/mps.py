"""Simulates runs of a model while other processes use the same GPU at the same time, through MPS.

A kernel is cut into blocks. The GPU starts the blocks of all processes in the order in which their kernels were queued, each
as soon as there is room. So a kernel that is queued behind one with more blocks than fit waits until those have started, and
one that leaves room delays nobody. Blocks that run at the same time share the memory's bandwidth. Where a process has a share
of the threads, its blocks take no more room than that.

Block by block that would be too much, so blocks that start at the same time are one event. What a simulation can't know, and
how these rules were found: docs/sharing.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hase.graph_model.simulation.pipeline import Floats, PipelineCosts, Tracks, dispatched_ms, launch_ms
from hase.graph_model.simulation.sharing import BETWEEN_RUNS_MS
from hase.utils.frozen import Frozen

FULL = 0.9  # a kernel that is wider fills the GPU
NARROWEST = 0.05  # share of the GPU that any kernel takes
MPS_RUNS = 40
FIRST_RUNS = 2  # dropped: they only bring the processes into step
ROOM = 1e-9  # less is none


class Grids(NamedTuple):
    """How the kernels of a run's nodes use the GPU; one entry of each array per node.

    Attributes:
        width: the share of the GPU's threads that they can use at the same time, 0–1; 1 for kernels with more blocks than fit.
        bandwidth: the share of the memory's bandwidth that they use while nothing else runs, 0–1.
    """

    width: Floats
    bandwidth: Floats


class MpsRules(Frozen):
    """How kernels of several processes run at the same time; fitted (learned/sharing/mps.py).

    Attributes:
        wave_ms: how long the blocks of a kernel that fills the GPU take, about; such a kernel has as many waves of blocks as
            that fits into its time.
        last_wave: the share of the GPU that the last of its waves fills.
        slowdown: by what share of its time a block takes longer beside blocks that use the whole bandwidth.
        bandwidth_slowdown: the same in addition, times the share of the bandwidth that it uses itself.
        switch_ms: the GPU's pause before each launch while other processes use it.
        share_slowdown: how much of the room that a kernel lacks under a share of the threads it feels; 1: all of it, so that
            with half of its width it takes twice as long.
    """

    wave_ms: float
    last_wave: float
    slowdown: float
    bandwidth_slowdown: float
    switch_ms: float
    share_slowdown: float


class MpsProcess(NamedTuple):
    """A process that runs a model again and again without a pause.

    Attributes:
        tracks, costs: of a run.
        grids: of the tracks' nodes.
        share: of the GPU's threads that it may use, 0–1.
    """

    tracks: Tracks
    costs: PipelineCosts
    grids: Grids
    share: float = 1.0


def times_at_share(gpu_ms: Floats, width: Floats, share: float, rules: MpsRules) -> Floats:
    """The GPU's time of kernels (ms) whose process may use a share of the threads."""
    return gpu_ms * (1.0 + rules.share_slowdown * (np.maximum(1.0, width / share) - 1.0))


def with_share(tracks: Tracks, grids: Grids, share: float, rules: MpsRules) -> Tracks:
    """The tracks of a process that may use a share of the threads and has the GPU to itself."""
    return tracks._replace(gpu_ms=times_at_share(tracks.gpu_ms, grids.width, share, rules))


class _Launches(NamedTuple):
    """The launches of a run in order, as lists.

    Attributes:
        ready_ms: the earliest start, from the start of the run.
        room: that all blocks take together; 1 is the whole GPU.
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
    width = np.clip(grids.width[nodes], NARROWEST, 1.0)
    room = np.where(width > FULL, np.maximum(1.0, np.round(alone / rules.wave_ms)) - 1.0 + rules.last_wave, width)
    waves = np.ceil(room / share - ROOM)
    block = times_at_share(alone, width, share, rules) / waves
    return _Launches(ready.tolist(), room.tolist(), block.tolist(), grids.bandwidth[nodes].tolist(),
                     float(at[-1]) if len(at) else costs.start_ms)


class _Process:
    """A process in the simulation: which of its launches it is at, and what of that is left."""

    def __init__(self, process: MpsProcess, rules: MpsRules, alone: bool) -> None:
        self.launches, self.share = _launches(process, rules), process.share
        self.end_ms = process.costs.end_ms
        self.gap_ms = process.costs.gap_ms + (0.0 if alone else rules.switch_ms)
        self.place, self.begin, self.latencies = 0, 0.0, list[float]()
        self.waiting = 0.0  # room that the blocks take which have not started
        self.running = 0.0  # the same of those that run
        self.bandwidth = 0.0  # that they ask for, as a share of the memory's

    def run(self, room: float) -> float:
        """Lets blocks run that take so much more room (less, if it is negative). Returns how much more bandwidth they ask for:
        all of the kernel's, or less where fewer of them run than would fit."""
        before, self.running = self.bandwidth, self.running + room
        if self.running < ROOM:
            self.running = self.bandwidth = 0.0
        else:
            whole = min(1.0, self.launches.room[self.place])
            self.bandwidth = self.launches.bandwidth[self.place] * min(1.0, self.running / whole)
        return self.bandwidth - before

    def ended(self, now: float) -> None:
        """The launch that ran has ended: on to the next, which may be of the next run."""
        self.place += 1
        if self.place == len(self.launches.room):
            end = max(now, self.begin + self.launches.dispatched_ms) + self.end_ms
            self.latencies.append(end - self.begin)
            self.begin, self.place = end + BETWEEN_RUNS_MS, 0

    @property
    def ready(self) -> float:
        """When the host has launched the next one."""
        return self.begin + self.launches.ready_ms[self.place]


def mps_runs_ms(model: MpsProcess, co_runners: Sequence[MpsProcess], rules: MpsRules, generator: np.random.Generator,
                runs: int = MPS_RUNS) -> Floats:
    """Latencies (ms) of runs one after another while other processes run their models through MPS.

    Args:
        model: whose runs they are; it has work for the GPU.
        co_runners: the other processes; those without work for the GPU are left out.
        rules: of the target.
        generator: draws when the others begin.
        runs: their number, after FIRST_RUNS more that are dropped.
    """
    others = [process for process in co_runners if np.any(process.tracks.launches > 0)]
    processes = [_Process(process, rules, not others) for process in (model, *others)]
    events: list[tuple[float, int, int, float]] = []  # when; a number, so that no two are alike; the process; room set free
    count = 0
    for number, process in enumerate(processes):
        process.begin = generator.uniform(0.0, 1.0) if number else 0.0
        heapq.heappush(events, (process.ready, count, number, 0.0))
        count += 1
    free, asked = 1.0, 0.0  # room, and bandwidth
    queue: list[_Process] = []
    number_of = {id(process): number for number, process in enumerate(processes)}
    while len(processes[0].latencies) < runs + FIRST_RUNS:
        now, _, number, room = heapq.heappop(events)
        process = processes[number]
        if not room:  # a launch is queued
            process.waiting = process.launches.room[process.place]
            queue.append(process)
        else:
            free, asked = free + room, asked + process.run(-room)
            if not process.running and not process.waiting:
                process.ended(now)
                heapq.heappush(events, (max(now + process.gap_ms, process.ready), count, number, 0.0))
                count += 1
        for queued in list(queue):  # in order; one that has used up its share lets the next pass
            started = min(free, queued.waiting, queued.share - queued.running)
            if started < ROOM:
                if free < ROOM:
                    break
                continue
            place, launches, others_bandwidth = queued.place, queued.launches, min(1.0, asked - queued.bandwidth)
            longer = 1.0 + others_bandwidth * (rules.slowdown + rules.bandwidth_slowdown * launches.bandwidth[place])
            heapq.heappush(events, (now + launches.block_ms[place] * longer, count, number_of[id(queued)], started))
            count += 1
            free, asked, queued.waiting = free - started, asked + queued.run(started), queued.waiting - started
            if queued.waiting < ROOM:
                queued.waiting = 0.0
                queue.remove(queued)
    return np.array(processes[0].latencies[FIRST_RUNS:])
