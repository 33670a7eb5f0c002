"""The process that times stages; a driver that crashes or hangs then costs only one stage.

It reads one Request per line on standard input, writes one Measurement per line on standard output, and ends at end of input.
profile_stages.py starts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from hase.extras.graph_stages.measuring.layer import HOST
from hase.extras.graph_stages.measuring.records import DIRECTIONS, Direction
from hase.extras.graph_stages.measuring.units import Feed, OpenedStage, Refused, StageTask, facts_of, open_stage, wrong
from hase.records.measurement import Measurement, Status, now
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.processes import keep_freed_memory, serve_lines
from hase.utils.timing import time_runs_ms

SUBJECT = "stage"
RESIDENT = "resident_ms"
CANARY, COPY = "canary", "copy"
CANARY_WARMUP, CANARY_RUNS = 3, 15
COPY_SIZES = 9  # evenly spaced on a logarithmic scale
FEWEST_BYTES = 4096  # of a copy


class Copy(Frozen):
    """A copy to time, with its direction and bytes (a multiple of 4)."""

    direction: Direction
    bytes: int


class StageRequest(Frozen):
    """What to time: a stage (`measure`), the `canary`, or a `copy` between host and unit; the last two keep the stage open."""

    do: Literal["measure", "canary", "copy"]
    task: StageTask
    copied: Copy | None = None


def measure_stage(task: StageTask) -> Measurement:
    """Times a stage after warm-up. A stage that nothing can run gives a measurement with that status."""
    began = now()
    try:
        opened, fallback = open_stage(task)
    except Refused as refused:
        return failed_measurement(task, "failed", str(refused), began)
    feed = task.tensors
    samples_ms = rounded(time_runs_ms(partial(opened.run, feed), task.runs, warmup=task.warmup))
    quantities = {}
    if opened.memory != HOST:
        values = {name: opened.to_unit(name, feed[name]) for name in task.definition.inputs}
        quantities[RESIDENT] = rounded(time_runs_ms(partial(opened.run_resident, values), task.runs, warmup=task.warmup))
    if why := wrong(opened.run(feed), feed[task.definition.outputs[0]], opened.inference_precision):
        return failed_measurement(task, "failed", f"{opened.runtime}: after {task.runs} runs {why}", began)
    facts = facts_of(task) | {"runtime": opened.runtime, "ran_on": opened.ran_on, "fallback": fallback,
                              "inference_precision": opened.inference_precision, "threads": opened.threads}
    return alone(task.id, facts=facts, samples_ms=samples_ms, quantities=quantities, started=began, ended=now())


def alone(name: str, subject: str = SUBJECT, label: str = "run", **fields: Any) -> Measurement:
    """The measurement of what ran by itself."""
    return Measurement(subject=subject, id=name, label=label, context="alone", place="alone", **fields)


def failed_measurement(task: StageTask, status: Status, error: str, began: str = "") -> Measurement:
    """The measurement of a stage that could not be run."""
    facts = facts_of(task) | {"runtime": task.runtime, "ran_on": task.unit, "fallback": "",
                              "inference_precision": task.inference_precision, "threads": task.threads}
    return alone(task.id, facts=facts, status=status, error=error, started=began or now(), ended=now())


def rounded(samples_ms: Iterable[float]) -> tuple[float, ...]:
    """Times rounded to the nanosecond; clocks are no finer."""
    return tuple(round(sample, 6) for sample in samples_ms)


@lru_cache(maxsize=1)
def _canary(task: StageTask) -> tuple[OpenedStage, Feed]:
    return open_stage(task)[0], task.tensors


def run_canary(task: StageTask) -> Measurement:
    """Times the canary. Raises Refused."""
    opened, feed = _canary(task)
    return alone(CANARY, label=CANARY, samples_ms=rounded(
        time_runs_ms(partial(opened.run, feed), CANARY_RUNS, warmup=CANARY_WARMUP)))


def copies_to_time(largest_bytes: int) -> list[Copy]:
    """Copies in both directions at several sizes (whole float32 values), up to the largest tensor."""
    sizes = np.geomspace(FEWEST_BYTES, max(largest_bytes, 2 * FEWEST_BYTES), COPY_SIZES)
    return [Copy(direction=direction, bytes=size) for size in sorted({4 * round(size / 4) for size in sizes})
            for direction in DIRECTIONS]


def run_copy(task: StageTask, copy: Copy) -> Measurement:
    """Times complete copies of an array; takes no samples if the stage has its data in the host's memory. Raises Refused."""
    opened, _ = _canary(task)
    samples_ms = list[float]()
    if opened.memory != HOST:
        name, array = task.definition.inputs[0], np.random.default_rng(0).random(copy.bytes // 4, np.float32)
        run = (partial(opened.to_unit, name, array) if copy.direction == "to_device" else
               partial(opened.to_host, name, opened.to_unit(name, array)))
        samples_ms = time_runs_ms(run, task.runs, warmup=task.warmup)
    return alone(COPY, COPY, samples_ms=rounded(samples_ms))


def answer(request: StageRequest) -> Measurement:
    """Answers a request. The task fails if nothing can run it, or if a graph's file cannot be read."""
    try:
        if request.copied:
            return run_copy(request.task, request.copied)
        return measure_stage(request.task) if request.do == "measure" else run_canary(request.task)
    except (Refused, UserError) as error:
        return failed_measurement(request.task, "failed", str(error))


def main() -> None:
    keep_freed_memory()
    serve_lines(lambda line: answer(StageRequest.model_validate_json(line)).model_dump_json())


if __name__ == "__main__":
    main()
