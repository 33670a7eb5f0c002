"""Splits the time of one traced run on a GPU into parts, and shows that run as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from measuring.gpu_trace import KERNEL, GpuRun
from utils.frozen import Frozen
from utils.trace_events import MEASURED, Span, document, process_events


class Anatomy(Frozen):
    """One run's time in microseconds, from its start to its end on the host; the parts named in PARTS add up to `run_us`.

    In a run without work on the GPU all time is `after_us`.

    Attributes:
        launches: kernels, copies and fills on the GPU.
        launching_us: time of the host in the calls that launched them; parallel to the GPU's work, so not a part.
        kernels_us, copies_us: time of the GPU in kernels; in copies and fills.
        waiting_us: the GPU was idle and waited for the host: the call that launched the next work ended after the previous
            work.
        gaps_us: the GPU was idle although the next work was already launched.
        before_us, after_us: before the first work began, and after the last ended.
    """

    run_us: float
    launches: int
    launching_us: float
    kernels_us: float
    copies_us: float
    waiting_us: float
    gaps_us: float
    before_us: float
    after_us: float


PARTS = ("kernels_us", "copies_us", "waiting_us", "gaps_us", "before_us", "after_us")


def anatomy_of(run: GpuRun) -> Anatomy:
    """The split of a traced run. If two pieces of work overlap (on two streams), the time counts once, for the earlier one.
    Work that continues after the run counts up to the run's end."""
    parts = dict.fromkeys(PARTS, 0.0)
    done_us = run.start_us  # up to here the run is split
    order = sorted(zip(run.work, run.launches, strict=True), key=lambda pair: pair[0].start_us)
    for place, (work, launch) in enumerate(order):
        begins, ends = (min(max(time, done_us), run.end_us) for time in (work.start_us, work.end_us))
        pause = "before_us" if not place else "waiting_us" if launch.end_us > done_us else "gaps_us"
        parts[pause] += begins - done_us
        parts["kernels_us" if work.category == KERNEL else "copies_us"] += ends - begins
        done_us = ends
    parts["after_us"] = run.end_us - done_us
    return Anatomy(run_us=run.host_us, launches=len(run.work),
                   launching_us=sum(launch.duration_us for launch in set(run.launches)), **parts)


def typical_run(runs: Sequence[GpuRun]) -> GpuRun:
    """The run of median length (of two, the shorter one): one real run, so that its parts add up."""
    return sorted(runs, key=lambda run: run.host_us)[(len(runs) - 1) // 2]


def measured_trace(run: GpuRun) -> dict[str, Any]:
    """A traced run in Chrome's trace-event format: on the host the run and its launches, on the GPU the work. Times begin with
    the run."""
    host = [Span("run", 0.0, run.host_us),
            *(Span(launch.name, launch.start_us - run.start_us, launch.duration_us) for launch in dict.fromkeys(run.launches))]
    gpu = [Span(work.name, work.start_us - run.start_us, work.duration_us) for work in run.work]
    return document(process_events(1, MEASURED, {"host": host, "GPU": gpu}))
