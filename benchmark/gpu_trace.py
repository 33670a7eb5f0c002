"""Label `gpu`: what the GPU itself spends on each run, as CUPTI tells it through torch's profiler.

CUPTI sees every kernel of the process, ONNX Runtime's too. Each kernel (or copy) on the GPU carries the number of the
call that launched it, and each run stands in a named range on the host, so that a run's kernels are those whose launch
lies in its range.
"""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils import files
from utils.timing import Interval

RANGE_PREFIX = "hase:"
WRITER_KERNEL = "OP_Abs"  # part of the name of the CUDA kernel that ONNX Runtime runs for Abs
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events on the GPU
LAUNCHES = ("cuda_runtime", "cuda_driver")  # and of the host's calls


@dataclass(frozen=True)
class GpuWork(Interval):
    """One kernel, copy or fill on the GPU; times in microseconds on the trace's clock."""

    name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class GpuRun:
    """What one run had the GPU do, in the order of launching; `host_us` is how long its range lasted on the host."""

    host_us: float
    work: tuple[GpuWork, ...]

    @property
    def busy_us(self) -> float:
        """The GPU's own time: the sum over its work, which one stream runs one after another."""
        return sum(one.duration_us for one in self.work)

    @property
    def span_us(self) -> float:
        """From the first work's start to the last one's end; 0 where there is none."""
        return max(one.end_us for one in self.work) - min(one.start_us for one in self.work) if self.work else 0.0


def trace(runs: Sequence[Callable[[], Any]]) -> list[GpuRun]:
    """Calls each of `runs` once under the profiler, in order; each must wait for its result.

    Needs torch with CUDA.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    with tempfile.TemporaryDirectory(prefix="hase-") as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for number, run in enumerate(runs):
                with record_function(f"{RANGE_PREFIX}{number}"):
                    run()
        profiler.export_chrome_trace(str(path))
        return attribute(files.read_json(path)["traceEvents"], len(runs))


def attribute(events: Iterable[dict[str, Any]], count: int) -> list[GpuRun]:
    """What each of `count` runs had the GPU do, from the events of a Chrome trace.

    A run whose range the trace lacks has no work and a host time of 0.
    """
    ranges: dict[int, tuple[float, float]] = {}
    launched_us: dict[int, float] = {}
    on_gpu: list[tuple[int, GpuWork]] = []
    for event in events:
        category = event.get("cat")
        if category == "user_annotation" and event["name"].startswith(RANGE_PREFIX):
            ranges[int(event["name"].removeprefix(RANGE_PREFIX))] = (event["ts"], event["dur"])
        elif category in LAUNCHES:
            launched_us[event["args"].get("correlation", -1)] = event["ts"]
        elif category in ON_GPU:
            on_gpu.append((event["args"].get("correlation", -1), GpuWork(event["name"], event["ts"], event["dur"])))
    order = sorted(ranges, key=lambda number: ranges[number][0])
    starts = [ranges[number][0] for number in order]
    work: dict[int, list[tuple[float, GpuWork]]] = {number: [] for number in order}
    for correlation, one in on_gpu:
        at = launched_us.get(correlation)
        place = bisect.bisect_right(starts, at) - 1 if at is not None else -1
        if at is not None and place >= 0:
            begin, lasted = ranges[order[place]]
            if at <= begin + lasted:
                work[order[place]].append((at, one))
    return [GpuRun(host_us=ranges.get(number, (0.0, 0.0))[1],
                   work=tuple(one for _, one in sorted(work.get(number, []), key=lambda pair: pair[0])))
            for number in range(count)]


def split_carrier(run: GpuRun, order: Sequence[str], writer_prefix: str) -> dict[str, tuple[GpuWork, ...]] | None:
    """What each kernel of a carrier had the GPU do, by node name.

    The nodes that write a kernel's inputs show on the GPU under a name of their own, so that the work between them is the
    kernel's that stands between them.

    Args:
        run: one run of the carrier.
        order: the names of the carrier's nodes as they were executed.
        writer_prefix: how the names of the nodes that write inputs begin.

    Returns:
        None where two nodes that may have worked on the GPU stand side by side, or where the run does not fit `order`.
    """
    found: dict[str, tuple[GpuWork, ...]] = {}
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
        while place < len(work) and WRITER_KERNEL not in work[place].name:
            gathered.append(work[place])
            place += 1
        if place == len(work) or (gathered and waiting is None):
            return None
        if waiting is not None:
            found[waiting], waiting, gathered = tuple(gathered), None, []
        place += 1
    rest = work[place:]
    if any(WRITER_KERNEL in one.name for one in rest) or (rest and waiting is None):
        return None
    if waiting is not None:
        found[waiting] = tuple(rest)
    return found
