"""The process that runs stages, so that a driver that crashes or hangs costs one stage.

Reads one Request a line on standard input, writes one Measurement a line on standard output, and ends when its input does.
benchmark/profile_stages.py starts it.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Literal

from benchmark.stages.measure import SUBJECT, failed, measure_stage, rounded, time_opened
from benchmark.stages.opening import Feed, OpenedStage, Refused, open_stage
from benchmark.stages.transfers import Copy, time_copy
from benchmark.stages.work import StageUnit
from model_zoo.stages.definition import HOST
from records.measurement import Measurement
from utils.allocator import keep_freed_memory
from utils.errors import UserError
from utils.frozen import Frozen
from utils.processes import serve_lines

CANARY, COPY = "canary", "copy"
CANARY_WARMUP, CANARY_RUNS = 3, 15


class Request(Frozen):
    """`measure` a unit, run it a few times as the `canary`, or time a `copy` between the host's memory and its own. For the
    last two the stage stays open."""

    do: Literal["measure", "canary", "copy"]
    unit: StageUnit
    copied: Copy | None = None


@lru_cache(maxsize=1)
def _canary(unit: StageUnit) -> tuple[OpenedStage, Feed]:
    return open_stage(unit)[0], unit.tensors


def run_canary(unit: StageUnit) -> Measurement:
    """Times of the canary."""
    try:
        opened, feed = _canary(unit)
    except Refused as refused:
        return failed(unit, "failed", str(refused))
    return Measurement(subject=SUBJECT, id=CANARY, label=CANARY, context="alone", place="alone",
                       samples_ms=rounded(time_opened(opened, feed, CANARY_WARMUP, CANARY_RUNS)))


def run_copy(unit: StageUnit, copy: Copy) -> Measurement:
    """Times of a copy; none where the stage has its data in the host's memory."""
    try:
        opened, _ = _canary(unit)
    except Refused as refused:
        return failed(unit, "failed", str(refused))
    name = unit.definition.inputs[0]
    copies = partial(opened.to_unit, name), partial(opened.to_host, name)
    samples_ms = time_copy(copy, *copies, unit.warmup, unit.runs) if opened.memory != HOST else []
    return Measurement(subject=COPY, id=COPY, label="run", context="alone", place="alone", samples_ms=rounded(samples_ms))


def answer(request: Request) -> Measurement:
    """What a request asks for; an error of the graph's file is one of the unit."""
    try:
        if request.copied:
            return run_copy(request.unit, request.copied)
        return measure_stage(request.unit) if request.do == "measure" else run_canary(request.unit)
    except UserError as error:
        return failed(request.unit, "failed", str(error))


def main() -> None:
    keep_freed_memory()
    serve_lines(lambda line: answer(Request.model_validate_json(line)).model_dump_json())


if __name__ == "__main__":
    main()
