"""One measurement: what every worker process returns and every journal keeps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from utils.frozen import Frozen
from utils.safe_names import FileName

Place = Literal["alone", "carrier", "in_model"]
Status = Literal["ok", "failed", "crashed", "timeout"]


def now() -> str:
    """The current time in UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat()


class Measurement(Frozen):
    """Raw samples of one unit under one label.

    Attributes:
        subject: what kind of unit it is, e.g. `kernel` or `model`.
        id: the unit's name within its kind: a kernel's id, a model record's name.
        label: what was timed. For a kernel one of LABELS; for a whole model `latency`, `host` (dispatch alone, without waiting
            for the GPU), `gpu`, `energy`, or one of VARIANTS.
        context: the place in words: `alone`, `carrier`, or the name of the model that the unit ran in.
        place: `alone` (a session of its own), `carrier` (a graph of many kernels, which finds the caches as
            in a model) or `in_model`.
        samples_ms: one per run.
        quantities: further samples by name and unit, e.g. `energy_j` or `power_w`. They need not be one per run.
        facts: what the unit is and how it was run, by name, where its id does not lead to a description elsewhere.
        members: of a batch of kernels (subject `kernels`): their ids.
        launches: label `gpu`: kernels, copies and fills on the GPU in a run.
        cuda_kernels: label `gpu` of a kernel: their names in order.
        disturbance: of a model on an idle GPU: how much other work slowed the host down meanwhile, a ratio (quiet_host).
        probe_us: of a model on an idle GPU: the time of the host probe meanwhile.
        status: `ok`, `failed`, `crashed` or `timeout`; `error` says why; of label `energy`, what is doubtful.
        started, ended: UTC, ISO 8601.
    """

    subject: str
    id: FileName
    label: str
    context: str
    place: Place
    samples_ms: tuple[float, ...] = ()
    quantities: dict[str, tuple[float, ...]] = {}
    facts: dict[str, str | int | float] = {}
    members: tuple[str, ...] = Field((), exclude_if=lambda members: not members)
    launches: int | None = None
    cuda_kernels: tuple[str, ...] = ()
    disturbance: float | None = None
    probe_us: float | None = None
    status: Status = "ok"
    error: str = ""
    started: str = ""
    ended: str = ""
