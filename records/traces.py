"""Traces of runs: the GPU's work, a breakdown of a run's time (host, GPU, waiting), and Chrome's trace-event files.

The files are for Perfetto (ui.perfetto.dev) and chrome://tracing. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.timing import TimeSpan, covered_us

KERNEL = "kernel"
PARTS = ("kernels_us", "copies_us", "waiting_us", "gaps_us", "before_us", "after_us")
PREDICTED, MEASURED = "predicted", "measured"  # names of the processes in a trace; each is one run of a model
Time = Annotated[float, Field(allow_inf_nan=False, ge=0)]


@dataclass(frozen=True)
class GpuWork(TimeSpan):
    """One kernel, copy or fill on the GPU, of a category in ON_GPU; microseconds on the trace's clock."""

    name: str
    start_us: float
    duration_us: float
    category: str = KERNEL
    stream: int = 0


@dataclass(frozen=True)
class Launch(TimeSpan):
    """A host call that launched work; microseconds on the trace's clock, which is also the GPU's."""

    name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class GpuRun:
    """The GPU's work in one run, in launch order."""

    host_us: float  # length of the run's range on the host
    work: tuple[GpuWork, ...]
    start_us: float = 0.0  # start of that range, on the trace's clock
    launches: tuple[Launch, ...] = ()  # the launching call of each piece of `work`; a CUDA graph has one call for all its work

    @property
    def end_us(self) -> float:
        """End of the run's range on the host."""
        return self.start_us + self.host_us

    @property
    def busy_us(self) -> float:
        """The GPU's busy time. Parallel work counts once: cuDNN runs groups of some convolutions on streams of its own."""
        return covered_us(self.work)

    @property
    def span_us(self) -> float:
        """From the start of the first work to the end of the last; 0 without work."""
        return max(piece.end_us for piece in self.work) - min(piece.start_us for piece in self.work) if self.work else 0.0


class Anatomy(Frozen):
    """The breakdown of a run's time (us) on the host; the parts named in PARTS add up to `run_us`."""

    run_us: float
    launches: int
    launching_us: float  # time of the host in launching calls; parallel to the GPU's work, so not a part
    # kernels_us, copies_us: GPU time in kernels, and in copies and fills
    kernels_us: float
    copies_us: float
    waiting_us: float  # the GPU was idle because the call that launched its next work had not ended yet
    gaps_us: float  # the GPU was idle although the next work was already launched
    # before_us, after_us: before the first work, and after the last. A run without GPU work is all `after_us`
    before_us: float
    after_us: float


def anatomy_of(run: GpuRun) -> Anatomy:
    """The breakdown of a traced run. Overlapping work (on two streams) counts once, for the piece that started first. Work that
    continues after the run counts up to the run's end."""
    parts = dict.fromkeys(PARTS, 0.0)
    split_us = run.start_us  # the run is split up to here
    order = sorted(zip(run.work, run.launches, strict=True), key=lambda pair: pair[0].start_us)
    for index, (work, launch) in enumerate(order):
        begin_us, end_us = (min(max(time, split_us), run.end_us) for time in (work.start_us, work.end_us))
        pause = "before_us" if not index else "waiting_us" if launch.end_us > split_us else "gaps_us"
        parts[pause] += begin_us - split_us
        parts["kernels_us" if work.category == KERNEL else "copies_us"] += end_us - begin_us
        split_us = end_us
    parts["after_us"] = run.end_us - split_us
    return Anatomy(run_us=run.host_us, launches=len(run.work),
                   launching_us=sum(launch.duration_us for launch in set(run.launches)), **parts)


def typical_run(runs: Sequence[GpuRun]) -> GpuRun:
    """The run of median length (of two, the shorter); a real run, so that its parts add up."""
    return sorted(runs, key=lambda run: run.host_us)[(len(runs) - 1) // 2]


def measured_trace(run: GpuRun) -> dict[str, Any]:
    """A traced run in Chrome's trace-event format: the run and its launches on the host, the work on the GPU. Starts at 0."""
    host = [TraceSpan("run", 0.0, run.host_us),
            *(TraceSpan(launch.name, launch.start_us - run.start_us, launch.duration_us)
              for launch in dict.fromkeys(run.launches))]
    gpu = [TraceSpan(work.name, work.start_us - run.start_us, work.duration_us) for work in run.work]
    return document(process_events(1, MEASURED, {"host": host, "GPU": gpu}))


class TraceSpan(NamedTuple):
    """A span on a track, in microseconds from the start of the run."""

    name: str
    start_us: float
    duration_us: float


class _Event(BaseModel):
    """The fields of an event that are read."""

    name: str
    ph: str
    pid: Annotated[int, Field(strict=True)]
    ts: Time = 0.0
    dur: Time = 0.0
    args: dict[str, Any] = {}


def process_events(number: int, name: str, tracks: Mapping[str, Sequence[TraceSpan]]) -> list[dict[str, Any]]:
    """The trace events of one process, tracks in order. Spans of a track may overlap only if one contains the other."""
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}}]
    for track, (title, spans) in enumerate(tracks.items(), 1):
        events.append({"name": "thread_name", "ph": "M", "pid": number, "tid": track, "args": {"name": title}})
        events += ({"name": span.name, "ph": "X", "pid": number, "tid": track, "ts": round(span.start_us, 3),
                    "dur": round(span.duration_us, 3)} for span in spans)
    return events


def document(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A trace file's document with these events."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}


def read_processes(path: Path, name: str, number: int) -> list[dict[str, Any]]:
    """The events of the processes called `name` in a trace file, renumbered from `number`."""
    data = files.read_json(path)
    events = data.get("traceEvents") if isinstance(data, dict) else None
    advice = f"a trace with a process named {name} is written by: python benchmark/run_anatomy.py --trace"
    try:
        parsed = TypeAdapter(list[_Event]).validate_python(events)
    except ValidationError:
        raise UserError(f"{path}: no such trace; {advice}") from None
    pids = [event.pid for event in parsed
            if (event.ph, event.name) == ("M", "process_name") and event.args.get("name") == name]
    if not any(event.ph == "X" and event.pid in pids for event in parsed):
        raise UserError(f"{path}: a trace, but without a process named {name}; {advice}")
    numbers = {pid: index for index, pid in enumerate(dict.fromkeys(pids), number)}
    return [event | {"pid": numbers[event["pid"]]} for event in events or () if event["pid"] in numbers]
