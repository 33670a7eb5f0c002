"""Runs of a model while another process uses the GPU in turn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graph_model.simulation.pipeline import PipelineCosts, dispatched_ms
from graph_model.simulation.tracks import Floats, Tracks

MOST_STAGES = 48  # of a simulated run on a shared GPU: twice as many change its mean by less than 1 %, and take twice as long
SHARED_RUNS = (200, 10)  # fewer callers leave the 95th percentile to chance
LOOPED_RUNS = 30  # of a model in a loop, whose turns are then known
BETWEEN_RUNS_MS = 0.02  # of a caller: what it takes between a run's end and the next one's start
TINY_MS = 1e-6


class CoRunner(NamedTuple):
    """What else runs on a GPU that processes share in time slices, as one of them meets it.

    Attributes:
        busy_ms, quiet_ms: how long it has work and none, in turn; it never pauses where quiet_ms is 0.
        waits_ms: how long another process waits for the GPU while it is busy, from many such waits; none are drawn where it
            is empty.
    """

    busy_ms: float
    quiet_ms: float
    waits_ms: Floats

    @property
    def cycle_ms(self) -> float:
        """From the beginning of one busy phase to the next."""
        return self.busy_ms + self.quiet_ms

    @property
    def busy_share(self) -> float:
        """For what share of the time it is busy; a ratio."""
        return self.busy_ms / self.cycle_ms


class _Stages(NamedTuple):
    """What a run queues on the GPU, by node or by group of nodes: when the work of each can begin at the earliest (ms from the
    start of the run), how long it takes the GPU, and when the host is done."""

    ready_ms: Floats
    work_ms: Floats
    dispatched_ms: float


def _queued(tracks: Tracks, costs: PipelineCosts) -> _Stages:
    """The nodes that leave the GPU something to do, each by itself."""
    at, working = dispatched_ms(tracks, costs), tracks.launches > 0
    ready = np.maximum(at + costs.lead_ms, 0.0)  # no launch comes before its run, whatever lead was fitted
    return _Stages(ready[working], (tracks.gpu_ms + costs.gap_ms * tracks.launches)[working],
                   float(at[-1]) if len(at) else costs.start_ms)


def _stages(tracks: Tracks, costs: PipelineCosts) -> _Stages:
    """At most MOST_STAGES groups of neighbouring nodes. A group begins as late as its last node's dispatch demands, so that
    the GPU's pauses within it come before it."""
    ready, work, dispatched = _queued(tracks, costs)
    done = np.cumsum(work)
    slack = ready - (done - work)  # the start of all work that would make a node wait for its dispatch just not
    begins = np.unique(np.linspace(0, len(work), min(len(work), MOST_STAGES), endpoint=False).astype(int))
    latest = np.maximum.reduceat(slack, begins) if len(work) else slack
    return _Stages(latest + (done - work)[begins], np.add.reduceat(work, begins) if len(work) else work, dispatched)


def shared_runs_ms(tracks: Tracks, costs: PipelineCosts, slice_ms: float, co_runner: CoRunner,
                   generator: np.random.Generator, shape: tuple[int, int] = SHARED_RUNS) -> Floats:
    """Latencies (ms) of runs one after another on a GPU that another process uses too, in time slices.

    The two never run side by side. The other one gets the GPU while this run has no work for it, and when it has had the
    GPU for `slice_ms`; it then keeps it for one of its waits. The host goes on dispatching meanwhile, so that part of a wait
    is hidden where the host is the slower track. Of an H200: see `training/fit_sharing.py`.

    Args:
        tracks, costs: as `pipeline_ms` takes them.
        slice_ms: how long a process has the GPU before another's turn.
        co_runner: what else runs.
        generator: draws waits, and where in its phases the other one is.
        shape: how many callers are simulated, each on its own, and how many runs each makes; the first one of each only
            brings it into step.

    Returns:
        latencies, shape (runs − 1, callers).
    """
    callers, runs = shape
    stages = _stages(tracks, costs)
    met = _OtherMet(co_runner, generator, generator.uniform(0.0, co_runner.cycle_ms, callers))
    begin, free, used = np.zeros(callers), -generator.uniform(0.0, 1.0, callers), np.zeros(callers)
    latencies = np.empty((runs, callers))
    for run in range(runs):
        for ready, work in zip(stages.ready_ms.tolist(), stages.work_ms.tolist(), strict=True):
            wait = met.wait()
            start = np.maximum(free, begin + ready)
            gap = start - free
            lost = (gap > 0) & met.busy(start)
            start = start + np.where(lost, wait - np.mod(gap, np.maximum(wait, TINY_MS)), 0.0)
            free, used = _worked(work, start, np.where(gap > 0, 0.0, used), slice_ms, met)
        end = np.maximum(begin + stages.dispatched_ms, free) + costs.end_ms
        latencies[run] = end - begin
        begin = end + BETWEEN_RUNS_MS
    return latencies[1:]


class _OtherMet(NamedTuple):
    """What else runs, as many callers meet it: for each of them it begins somewhere in its phases (ms)."""

    co_runner: CoRunner
    generator: np.random.Generator
    begins_ms: Floats

    def busy(self, when: Floats) -> npt.NDArray[np.bool_]:
        """Whether it has work, at a time of each caller."""
        if not self.co_runner.quiet_ms:
            return when < np.inf
        return (self.begins_ms + when) % self.co_runner.cycle_ms < self.co_runner.busy_ms

    def wait(self) -> Floats:
        """A wait of each caller, drawn."""
        waits = self.co_runner.waits_ms if len(self.co_runner.waits_ms) else np.zeros(1)
        return waits[self.generator.integers(0, len(waits), len(self.begins_ms))]  # as `choice` does, in half the time


def _worked(work: float, start: Floats, used: Floats, slice_ms: float, met: _OtherMet) -> tuple[Floats, Floats]:
    """When the GPU has done `work` (ms) that each caller has it begin at `start`, and how much of the caller's slice is used
    then, of which `used` was before; whenever a slice is over, the other one has its turn if it has work."""
    left, now = np.full(len(start), work), start
    while (over := used + left > slice_ms).any():
        room = slice_ms - used
        now = np.where(over, now + room, now)
        now = np.where(over & met.busy(now), now + met.wait(), now)
        left, used = np.where(over, left - room, left), np.where(over, 0.0, used)
    return now + left, used + left


def gpu_work_ms(tracks: Tracks, costs: PipelineCosts) -> float:
    """What a run takes the GPU, the pauses between launches with it; arguments as `pipeline_ms` takes them."""
    return float(_queued(tracks, costs).work_ms.sum())


def turns_ms(tracks: Tracks, costs: PipelineCosts, longest_ms: float, away_ms: float, runs: int = LOOPED_RUNS) -> Floats:
    """How long a model that runs in a loop has the GPU at a time, where another process has it in between.

    A turn ends when all that was dispatched is done, as at the end of each run, or after `longest_ms`. The host goes on
    dispatching while the other process has its turn, so that the next one is the longer for it.

    Args:
        tracks, costs: as `pipeline_ms` takes them.
        longest_ms: after which the GPU is taken away; positive.
        away_ms: the other process's turn, and the switching.
        runs: how many are simulated after a first one, which only brings the two into step.

    Returns:
        the turns, in order; none of a model that leaves the GPU nothing to do.
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
