"""The GPU's own times by CUPTI, and a run as a table: host, GPU, waiting.

CUPTI sees every kernel of the process, including ONNX Runtime's. Each kernel (or copy) on the GPU has the number of the call
that launched it, and each run is a named range on the host. So a run's kernels are those launched in its range.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from hase.utils import files
from hase.utils.frozen import Frozen
from hase.utils.lazy import torch
from hase.utils.temporary import temporary_folder
from hase.utils.timing import TimeSpan, covered_us
from hase.utils.trace_events import MEASURED, Span, document, process_events

RANGE_PREFIX = "hase:"
WRITER_KERNEL = "OP_Abs"  # part of the name of the CUDA kernel that ONNX Runtime runs for Abs
KERNEL = "kernel"
ON_GPU = (KERNEL, "gpu_memcpy", "gpu_memset")  # categories of a trace's events on the GPU
LAUNCHES = ("cuda_runtime", "cuda_driver")  # and of the host's calls


@dataclass(frozen=True)
class GpuWork(TimeSpan):
    """One kernel, copy or fill on the GPU, of a category of ON_GPU; times in microseconds on the trace's clock."""

    name: str
    start_us: float
    duration_us: float
    category: str = KERNEL
    stream: int = 0


@dataclass(frozen=True)
class Launch(TimeSpan):
    """A call on the host that launched work; times in microseconds on the trace's clock, which is the GPU's too."""

    name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class GpuRun:
    """The GPU's work in one run, in the order of the launches.

    Attributes:
        host_us: length of the run's range on the host.
        work: on the GPU.
        start_us: start of its range on the host, on the trace's clock.
        launches: for each piece of `work`, the call that launched it; a CUDA graph has one call for all its work.
    """

    host_us: float
    work: tuple[GpuWork, ...]
    start_us: float = 0.0
    launches: tuple[Launch, ...] = ()

    @property
    def end_us(self) -> float:
        """End of its range on the host."""
        return self.start_us + self.host_us

    @property
    def busy_us(self) -> float:
        """The GPU's own time. What runs side by side counts once: cuDNN runs the groups of some convolutions on streams of its
        own."""
        return covered_us(self.work)

    @property
    def span_us(self) -> float:
        """From the start of the first work to the end of the last; 0 without work."""
        return max(piece.end_us for piece in self.work) - min(piece.start_us for piece in self.work) if self.work else 0.0


class Recording(NamedTuple):
    """What the profiler kept of some runs; reading it takes seconds, in which the GPU is free."""

    profiler: torch.profiler.profile
    runs: int


def record(runs: Sequence[Callable[[], Any]], before_each: Callable[[], Any] = lambda: None) -> Recording:
    """Calls each of `runs` once under the profiler, in order; each must wait for its result. What `before_each` gives the GPU
    belongs to no run.

    Needs torch with CUDA.
    """
    def run_all() -> None:
        for number, run in enumerate(runs):
            before_each()
            with in_range(number):
                run()

    return record_ranges(run_all, len(runs))


def in_range(number: int) -> AbstractContextManager[Any]:
    """Marks what is launched in the block as run `number` of a recording."""
    return torch.profiler.record_function(f"{RANGE_PREFIX}{number}")


def record_ranges(run: Callable[[], Any], count: int) -> Recording:
    """Calls `run` once under the profiler; it must wait for its result, and marks `count` parts of itself by `in_range`. Work
    outside these is left out.

    Needs torch with CUDA.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    return Recording(profiler, count)


def trace_events(recording: Recording) -> list[dict[str, Any]]:
    """The events of a recording, as a Chrome trace has them."""
    with temporary_folder() as folder:
        path = folder / "trace.json"
        recording.profiler.export_chrome_trace(str(path))
        return list(files.read_json(path)["traceEvents"])


def read(recording: Recording) -> list[GpuRun]:
    """The GPU's work in each run of a recording."""
    return attribute(trace_events(recording), recording.runs)


def trace(runs: Sequence[Callable[[], Any]]) -> list[GpuRun]:
    """The GPU's work in each of some runs, which are called once each (`record`)."""
    return read(record(runs))


def attribute(events: Iterable[dict[str, Any]], count: int) -> list[GpuRun]:
    """The GPU's work in each of `count` runs, from the events of a Chrome trace.

    A run without a range in the trace has no work and a host time of 0.
    """
    ranges: dict[int, tuple[float, float]] = {}
    launches: dict[int, Launch] = {}
    on_gpu: list[tuple[int, GpuWork]] = []
    for event in events:
        category = event.get("cat")
        if category == "user_annotation" and event["name"].startswith(RANGE_PREFIX):
            ranges[int(event["name"].removeprefix(RANGE_PREFIX))] = (event["ts"], event["dur"])
        elif category in LAUNCHES:
            launches[event["args"].get("correlation", -1)] = Launch(event["name"], event["ts"], event["dur"])
        elif category in ON_GPU:
            about = event["args"]
            work = GpuWork(event["name"], event["ts"], event["dur"], category, about.get("stream", 0))
            on_gpu.append((about.get("correlation", -1), work))
    order = sorted(ranges, key=lambda number: ranges[number][0])
    starts = [ranges[number][0] for number in order]
    by_run: dict[int, list[tuple[Launch, GpuWork]]] = defaultdict(list)
    for correlation, work in on_gpu:
        launch = launches.get(correlation)
        place = bisect.bisect_right(starts, launch.start_us) - 1 if launch else -1
        if launch and place >= 0:
            begin, lasted = ranges[order[place]]
            if launch.start_us <= begin + lasted:
                by_run[order[place]].append((launch, work))
    return [_run(*ranges.get(number, (0.0, 0.0)), by_run[number]) for number in range(count)]


def _run(start_us: float, host_us: float, launched: list[tuple[Launch, GpuWork]]) -> GpuRun:
    """A run from its range and its work, each piece with its launch, in any order."""
    launched = sorted(launched, key=lambda pair: pair[0].start_us)
    return GpuRun(host_us, tuple(work for _, work in launched), start_us, tuple(launch for launch, _ in launched))


def split_carrier(run: GpuRun, order: Sequence[str], writer_prefix: str,
                  like_writers: Collection[str] = ()) -> dict[str, tuple[GpuWork, ...]] | None:
    """The GPU's work for each kernel of a carrier, by node name.

    The nodes that write a kernel's inputs show on the GPU under a name of their own, so that the work between them is the
    kernel's that stands between them.

    Args:
        run: one run of the carrier.
        order: the names of the carrier's nodes as they were executed.
        writer_prefix: how the names of the nodes that write inputs begin.
        like_writers: nodes of kernels that run one CUDA kernel of the writers' name.

    Returns:
        None where two nodes that may have worked on the GPU stand side by side, or where the run does not fit `order`.
    """
    by_node: dict[str, tuple[GpuWork, ...]] = {}
    waiting: str | None = None  # the node that the work at hand belongs to
    gathered: list[GpuWork] = []
    work = list(run.work)
    place = 0
    for name in order:
        if not name.startswith(writer_prefix):
            if waiting is not None:
                return None
            waiting = name
            continue
        writers_left = int(waiting in like_writers)
        while place < len(work) and (writers_left or WRITER_KERNEL not in work[place].name):
            writers_left -= WRITER_KERNEL in work[place].name
            gathered.append(work[place])
            place += 1
        if place == len(work) or (gathered and waiting is None):
            return None
        if waiting is not None:
            by_node[waiting], waiting, gathered = tuple(gathered), None, []
        place += 1
    left = work[place:]
    if sum(WRITER_KERNEL in piece.name for piece in left) != (waiting in like_writers) or (left and waiting is None):
        return None
    if waiting is not None:
        by_node[waiting] = tuple(left)
    return by_node


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
