"""Where the time of one traced run on a GPU went, and that run as tracks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmark.traces.gpu_trace import KERNEL, GpuRun
from utils.frozen import Frozen
from utils.trace_events import MEASURED, Span, document, process_events


class Anatomy(Frozen):
    """One run's time in microseconds, from its start to its end on the host; the parts named in PARTS add up to `run_us`.

    A run without work on the GPU is all `after_us`.

    Attributes:
        launches: kernels, copies and fills on the GPU.
        launching_us: what the host spent inside the calls that launched them; beside the GPU's work, and no part.
        kernels_us, copies_us: the GPU at work: on kernels; on copies and fills.
        waiting_us: the GPU stood still and waited for the host: the call that launched what came next ended only after what
            came before was done.
        gaps_us: the GPU stood still although what came next was launched already.
        before_us, after_us: until the first work began, and since the last ended.
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
    """The split of a traced run. Work beside other work (on another stream) counts once, as what began first; work that
    outlasts the run counts up to its end."""
    parts = dict.fromkeys(PARTS, 0.0)
    done_us = run.start_us  # until when the run is told
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
    """The run of median length (the shorter of two in the middle), of at least one: one whole run, so that its parts add up."""
    return sorted(runs, key=lambda run: run.host_us)[(len(runs) - 1) // 2]


def measured_trace(run: GpuRun) -> dict[str, Any]:
    """A traced run in Chrome's trace-event format: the run and the calls that launched its work on the host, the work on the
    GPU; times begin with the run."""
    host = [Span("run", 0.0, run.host_us),
            *(Span(launch.name, launch.start_us - run.start_us, launch.duration_us) for launch in dict.fromkeys(run.launches))]
    gpu = [Span(work.name, work.start_us - run.start_us, work.duration_us) for work in run.work]
    return document(process_events(1, MEASURED, {"host": host, "GPU": gpu}))
