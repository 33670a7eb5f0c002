"""The GPU's own times by CUPTI, and turns of several processes that trace kernels on one GPU.

CUPTI sees every kernel of the process, including ONNX Runtime's. Each kernel (or copy) carries the number of the call that
launched it, and each run is a named range on the host, so a run's kernels are those launched in its range.

Turns (Linux only): several processes trace kernels, but only one measures at a time. They trace them in carriers, models that
run many kernels one after another. Most of a carrier's time goes into its session and cuDNN's choices on the host, which the
processes do in parallel. The locks are files in a common folder: all who prepare share the room, and who measures has it alone.
Who waits for it alone holds the turnstile, the lock before the room, so that no other begins to prepare first.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from hase.records.traces import KERNEL, GpuRun, GpuWork, Launch
from hase.utils import files
from hase.utils.files import temporary_folder
from hase.utils.lazy import torch

RANGE_PREFIX = "hase:"
WRITER_KERNEL = "OP_Abs"  # part of the name of the CUDA kernel that ONNX Runtime runs for Abs
ON_GPU = (KERNEL, "gpu_memcpy", "gpu_memset")  # categories of a trace's events on the GPU
LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of the host's calls


class Recording(NamedTuple):
    """What the profiler recorded of some runs. Reading it takes seconds, in which the GPU is free."""

    profiler: torch.profiler.profile
    runs: int


def record(runs: Sequence[Callable[[], Any]], before_each: Callable[[], Any] = lambda: None) -> Recording:
    """Calls each of `runs` once under the profiler, and waits for it; GPU work of `before_each` is left out."""
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
    """Calls `run` once under the profiler; it must mark its `count` parts by `in_range`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    return Recording(profiler, count)


def trace_events(recording: Recording) -> list[dict[str, Any]]:
    """The events of a recording, in the form of a Chrome trace."""
    with temporary_folder() as folder:
        path = folder / "trace.json"
        recording.profiler.export_chrome_trace(str(path))
        return list(files.read_json(path)["traceEvents"])


def read(recording: Recording) -> list[GpuRun]:
    """The GPU's work in each run of a recording."""
    return gpu_runs(trace_events(recording), recording.runs)


def trace(runs: Sequence[Callable[[], Any]]) -> list[GpuRun]:
    """The GPU's work in each of some runs; each is called once (`record`)."""
    return read(record(runs))


def gpu_runs(events: Iterable[dict[str, Any]], count: int) -> list[GpuRun]:
    """The GPU's work in each of `count` runs, from a Chrome trace; a run without a range has no work and host time 0."""
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
            arguments = event["args"]
            work = GpuWork(event["name"], event["ts"], event["dur"], category, arguments.get("stream", 0))
            on_gpu.append((arguments.get("correlation", -1), work))
    order = sorted(ranges, key=lambda number: ranges[number][0])
    starts = [ranges[number][0] for number in order]
    by_run: dict[int, list[tuple[Launch, GpuWork]]] = defaultdict(list)
    for correlation, work in on_gpu:
        launch = launches.get(correlation)
        index = bisect.bisect_right(starts, launch.start_us) - 1 if launch else -1
        if launch and index >= 0:
            begin, duration = ranges[order[index]]
            if launch.start_us <= begin + duration:
                by_run[order[index]].append((launch, work))
    return [_run(*ranges.get(number, (0.0, 0.0)), by_run[number]) for number in range(count)]


def _run(start_us: float, host_us: float, launched: list[tuple[Launch, GpuWork]]) -> GpuRun:
    """A run from its range and its work; each piece comes with its launch, in any order."""
    launched = sorted(launched, key=lambda pair: pair[0].start_us)
    return GpuRun(host_us, tuple(work for _, work in launched), start_us, tuple(launch for launch, _ in launched))


def split_carrier(run: GpuRun, order: Sequence[str], writer_prefix: str,
                  like_writers: Collection[str] = ()) -> dict[str, tuple[GpuWork, ...]] | None:
    """The GPU's work in one run of a carrier, by node name of each kernel; None if it cannot be attributed.

    Nodes that write a kernel's inputs (writers) run a CUDA kernel of a known name, so the work between two of them belongs to
    the kernel between them. `order` has the node names as executed; those of writers begin with `writer_prefix`. `like_writers`
    are kernels' nodes that run one CUDA kernel of that name themselves.
    """
    by_node: dict[str, tuple[GpuWork, ...]] = {}
    current: str | None = None  # the node of the current work
    current_work: list[GpuWork] = []
    work = list(run.work)
    index = 0
    for name in order:
        if not name.startswith(writer_prefix):
            if current is not None:
                return None
            current = name
            continue
        like_writer_left = int(current in like_writers)  # work of the current node that only looks like a writer's
        while index < len(work) and (like_writer_left or WRITER_KERNEL not in work[index].name):
            like_writer_left -= WRITER_KERNEL in work[index].name
            current_work.append(work[index])
            index += 1
        if index == len(work) or (current_work and current is None):
            return None
        if current is not None:
            by_node[current], current, current_work = tuple(current_work), None, []
        index += 1
    rest = work[index:]  # after the last writer: the last kernel's
    if sum(WRITER_KERNEL in piece.name for piece in rest) != (current in like_writers) or (rest and current is None):
        return None
    if current is not None:
        by_node[current] = tuple(rest)
    return by_node


# turns on the GPU --------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    """Holds the lock of a file; `operation` as for `fcntl.flock`."""
    with path.open("a") as file:
        fcntl.flock(file, operation)
        yield  # closing the file releases the lock


@contextlib.contextmanager
def preparing_on_gpu(folder: str) -> Iterator[None]:
    """For unmeasured work on the GPU, while others may prepare too. Without a folder there are no others, and no locks."""
    if not folder:
        yield
        return
    with contextlib.ExitStack() as stack:
        with _locked(Path(folder) / "turnstile", fcntl.LOCK_EX):
            stack.enter_context(_locked(Path(folder) / "room", fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def alone_on_gpu(folder: str) -> Iterator[None]:
    """Exclusive access to the GPU: no other process prepares or measures. Without a folder there are no others."""
    if not folder:
        yield
        return
    with _locked(Path(folder) / "turnstile", fcntl.LOCK_EX), _locked(Path(folder) / "room", fcntl.LOCK_EX):
        yield
