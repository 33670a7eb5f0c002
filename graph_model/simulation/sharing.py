"""Simulates runs of a model while another process takes turns on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.pipeline import Floats, PipelineCosts, Tracks, dispatched_ms, gpu_work, pipeline_ms

MOST_STAGES = 48  # of a simulated run on a shared GPU: twice as many change its mean by less than 1 % and take twice as long
SHARED_RUNS = (200, 10)  # callers, and runs of each: with fewer callers the 95th percentile is left to chance
LOOPED_RUNS = 30  # of a model in a loop: its turns repeat by then
BETWEEN_RUNS_MS = 0.02  # a caller's time between the end of a run and the start of the next
TINY_MS = 1e-6
DRAWN_AT_ONCE = 64  # waits of every caller: drawing them one by one takes a third of a simulation


class CoRunner(NamedTuple):
    """Another process on a GPU that processes share in time slices, as a model's process experiences it.

    Attributes:
        busy_ms, quiet_ms: how long it has work, and then none, in turn; where quiet_ms is 0 it never pauses.
        waits_ms: a sample of how long one waits for the GPU while it is busy; empty: one never waits.
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
        """The share of the time in which it is busy; a ratio."""
        return self.busy_ms / self.cycle_ms


class _Stages(NamedTuple):
    """What a run queues on the GPU, by node or by group of nodes.

    Attributes:
        ready_ms: the earliest start of each one's work, from the start of the run.
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


def _queued(tracks: Tracks, costs: PipelineCosts) -> _Stages:
    """The work of each launch, or of several of one node, as a stage of its own."""
    at = dispatched_ms(tracks, costs)
    ready, work = gpu_work(tracks, costs, at)
    # no launch comes before its run, whatever lead was fitted
    return _Stages(np.maximum(ready, 0.0), work, float(at[-1]) if len(at) else costs.start_ms)


def _stages(tracks: Tracks, costs: PipelineCosts) -> _Stages:
    """The launches in at most MOST_STAGES groups of neighbours. A group begins so late that its work never waits for a
    dispatch: the GPU's pauses within the group are moved to before it."""
    ready, work, dispatched = _queued(tracks, costs)
    done = np.cumsum(work)
    slack = ready - (done - work)  # the latest start of all work with which no node waits for its dispatch
    begins = np.unique(np.linspace(0, len(work), min(len(work), MOST_STAGES), endpoint=False).astype(int))
    latest = np.maximum.reduceat(slack, begins) if len(work) else slack
    return _Stages(latest + (done - work)[begins], np.add.reduceat(work, begins) if len(work) else work, dispatched)


def shared_runs_ms(tracks: Tracks, costs: PipelineCosts, slice_ms: float, co_runner: CoRunner,
                   generator: np.random.Generator, shape: tuple[int, int] = SHARED_RUNS) -> Floats:
    """Latencies (ms) of runs one after another on a GPU that another process uses too, in time slices.

    The two never run at the same time. The other process gets the GPU while this run has no work for it, and after this run
    has had it for `slice_ms`; it then keeps it for one of its waits. The host goes on dispatching meanwhile, so part of a
    wait is hidden where the host is the slower track. The rules were learned on an H200 (training/fit_sharing.py).

    Without a co-runner a run takes as long as `pipeline_ms` says. The fitted lead may let the GPU begin before the run, as no
    simulated launch can; what it thereby saves an idle run is subtracted from every run.

    Args:
        tracks: the run's.
        costs: of the target.
        slice_ms: how long a process keeps the GPU before another has its turn.
        co_runner: what else runs.
        generator: draws the waits, and the phase in which the other process is at the start.
        shape: number of callers, which are simulated independently, and number of runs of each. The first run of each is
            dropped: it only brings the two processes into step.

    Returns:
        latencies, shape (runs − 1, callers).
    """
    callers, runs = shape
    stages = _stages(tracks, costs)
    begins_ms = generator.uniform(0.0, co_runner.cycle_ms, callers)
    begin, free, used = np.zeros(callers), -generator.uniform(0.0, 1.0, callers), np.zeros(callers)
    met = _OtherMet(co_runner, begins_ms, _waits(co_runner, generator, callers))
    latencies = np.empty((runs, callers))
    for run in range(runs):
        for ready, work in zip(stages.ready_ms.tolist(), stages.work_ms.tolist(), strict=True):
            wait = met.wait()
            start = np.maximum(free, begin + ready)
            idle = start > free
            if np.count_nonzero(idle):  # seldom where the GPU is the slower track
                gap = start - free
                lost = idle & met.busy(start)
                start = start + np.where(lost, wait - np.mod(gap, np.maximum(wait, TINY_MS)), 0.0)
                used = np.where(idle, 0.0, used)
            free, used = _worked(work, start, used, slice_ms, met)
        end = np.maximum(begin + stages.dispatched_ms, free) + costs.end_ms
        latencies[run] = end - begin
        begin = end + BETWEEN_RUNS_MS
    return latencies[1:] + (pipeline_ms(tracks, costs) - stages.idle_ms(costs))


class _OtherMet(NamedTuple):
    """The other process as many callers meet it: for each of them it is at another point (ms) of its phases at the start, and
    `waits` has a wait (ms) of each for every turn."""

    co_runner: CoRunner
    begins_ms: Floats
    waits: Iterator[Floats]

    def busy(self, when: Floats) -> npt.NDArray[np.bool_]:
        """Whether it has work at the time `when` (ms) of each caller."""
        if not self.co_runner.quiet_ms:
            return when < np.inf
        return (self.begins_ms + when) % self.co_runner.cycle_ms < self.co_runner.busy_ms

    def wait(self) -> Floats:
        """One wait (ms) for each caller, drawn at random."""
        return next(self.waits)


def _waits(co_runner: CoRunner, generator: np.random.Generator, callers: int) -> Iterator[Floats]:
    """Waits (ms) for each caller, drawn at random, without end."""
    waits = co_runner.waits_ms if len(co_runner.waits_ms) else np.zeros(1)
    while True:  # as `choice` draws them, in half the time
        yield from waits[generator.integers(0, len(waits), (DRAWN_AT_ONCE, callers))]


def _worked(work: float, start: Floats, used: Floats, slice_ms: float, met: _OtherMet) -> tuple[Floats, Floats]:
    """When the GPU has done `work` (ms) for each caller, and how much of the caller's slice is used up by then.

    Args:
        work: the GPU's time for it.
        start: when it begins, of each caller.
        used: how much of the slice was used before.
        slice_ms: after which the other process has its turn, if it has work.
        met: the other process.
    """
    now, left, used_after = start, np.asarray(work), used + work
    while np.count_nonzero(over := used_after > slice_ms):
        room = slice_ms - used
        now = np.where(over, now + room, now)
        now = np.where(over & met.busy(now), now + met.wait(), now)
        left, used = np.where(over, left - room, left), np.where(over, 0.0, used)
        used_after = used + left
    return now + left, used_after


def gpu_work_ms(tracks: Tracks, costs: PipelineCosts) -> float:
    """The GPU's time for a run with these tracks and costs, with the pauses between launches, ms."""
    return float(_queued(tracks, costs).work_ms.sum())


def turns_ms(tracks: Tracks, costs: PipelineCosts, longest_ms: float, away_ms: float, runs: int = LOOPED_RUNS) -> Floats:
    """The turns on the GPU (ms) of a model that runs in a loop, while another process has the GPU in between.

    A turn ends when everything that was dispatched is done, as at the end of each run, or after `longest_ms`. The host goes on
    dispatching during the other process's turn, so the next turn is longer.

    Args:
        tracks: the run's.
        costs: of the target.
        longest_ms: the longest turn; positive.
        away_ms: the other process's turn, with the time for switching.
        runs: number of runs that are simulated after a first one, which only brings the two processes into step.

    Returns:
        the turns, in order; empty for a model that gives the GPU no work.
    """
    ready, work, dispatched_all = _queued(tracks, costs)
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
