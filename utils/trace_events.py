"""Chrome's trace-event format for Perfetto (ui.perfetto.dev) and chrome://tracing: processes with tracks of spans.

The format: "Trace Event Format", Google, 2016; times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hase.utils import files
from hase.utils.errors import UserError

PREDICTED, MEASURED = "predicted", "measured"  # names of the processes in a trace; each is one run of a model
Time = Annotated[float, Field(allow_inf_nan=False, ge=0)]


class Span(NamedTuple):
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


def process_events(number: int, name: str, tracks: Mapping[str, Sequence[Span]]) -> list[dict[str, Any]]:
    """The events of one process; its tracks keep their order.

    Args:
        number: of the process in its file.
        name: of the process.
        tracks: spans by track name; spans of a track overlap only if one contains the other.
    """
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}}]
    for track, (title, spans) in enumerate(tracks.items(), 1):
        events.append({"name": "thread_name", "ph": "M", "pid": number, "tid": track, "args": {"name": title}})
        events += ({"name": span.name, "ph": "X", "pid": number, "tid": track, "ts": round(span.start_us, 3),
                    "dur": round(span.duration_us, 3)} for span in spans)
    return events


def document(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The document of a trace file with these events."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}


def read_processes(path: Path, name: str, number: int) -> list[dict[str, Any]]:
    """The events of the processes called `name` in a trace file, renumbered from `number` on.

    Raises:
        UserError: no such file, not a trace, or no such process with events.
    """
    data = files.read_json(path)
    events = data.get("traceEvents") if isinstance(data, dict) else None
    advice = f"a trace with a process named {name} is written by: python benchmark/run_anatomy.py --trace"
    try:
        parsed = TypeAdapter(list[_Event]).validate_python(events)
    except ValidationError:
        raise UserError(f"{path}: no such trace; {advice}") from None
    named = [event.pid for event in parsed
             if (event.ph, event.name) == ("M", "process_name") and event.args.get("name") == name]
    if not any(event.ph == "X" and event.pid in named for event in parsed):
        raise UserError(f"{path}: a trace, but without a process named {name}; {advice}")
    numbers = {pid: place for place, pid in enumerate(dict.fromkeys(named), number)}
    return [event | {"pid": numbers[event["pid"]]} for event in events or () if event["pid"] in numbers]
