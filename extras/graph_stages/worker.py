"""The process that times stages, so that a driver that crashes or hangs costs one stage.

Reads one Request a line on standard input, writes one Measurement a line on standard output, and ends when its input does.
profile_stages.py starts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from hase.benchmark.measuring.run_times import time_warm_runs_ms
from hase.extras.graph_stages.layer import HOST
from hase.extras.graph_stages.opening import Feed, OpenedStage, Refused, open_stage, wrong
from hase.extras.graph_stages.records import DIRECTIONS, Direction
from hase.extras.graph_stages.units import StageTask, facts_of
from hase.records.measurement import Measurement, Status, now
from hase.utils.allocator import keep_freed_memory
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.processes import serve_lines

SUBJECT = "stage"
RESIDENT = "resident_ms"
CANARY, COPY = "canary", "copy"
CANARY_WARMUP, CANARY_RUNS = 3, 15
STEPS = 9  # numbers of bytes of copies, evenly spaced on a logarithmic scale
FEWEST_BYTES = 4096


class Copy(Frozen):
    """A copy to time: its direction, and its bytes, a multiple of 4."""

    direction: Direction
    bytes: int


class Request(Frozen):
    """`measure` a unit, run it a few times as the `canary`, or time a `copy` between the host's memory and its own. For the
    last two the stage stays open."""

    do: Literal["measure", "canary", "copy"]
    task: StageTask
    copied: Copy | None = None


def measure_stage(task: StageTask) -> Measurement:
    """The times of a stage's runs, after some that do not count; a stage that nothing can run is a measurement that says so."""
    began = now()
    try:
        opened, fallback = open_stage(task)
    except Refused as refused:
        return failed(task, "failed", str(refused), began)
    feed = task.tensors
    samples_ms = time_opened(opened, feed, task.warmup, task.runs)
    quantities = {}
    if opened.memory != HOST:
        values = {name: opened.to_unit(name, feed[name]) for name in task.definition.inputs}
        quantities[RESIDENT] = rounded(time_warm_runs_ms(partial(opened.run_resident, values), task.warmup, task.runs))
    if why := wrong(opened.run(feed), feed[task.definition.outputs[0]], opened.inference_precision):
        return failed(task, "failed", f"{opened.runtime}: after {task.runs} runs {why}", began)
    facts = facts_of(task) | {"runtime": opened.runtime, "ran_on": opened.ran_on, "fallback": fallback,
                              "inference_precision": opened.inference_precision, "threads": opened.threads}
    return Measurement(subject=SUBJECT, id=task.id, label="run", context="alone", place="alone", facts=facts,
                       samples_ms=rounded(samples_ms), quantities=quantities, started=began, ended=now())


def time_opened(opened: OpenedStage, feed: Feed, warmup: int, runs: int) -> list[float]:
    """Times of runs in ms, with the copies to and from the unit."""
    return time_warm_runs_ms(partial(opened.run, feed), warmup, runs)


def failed(task: StageTask, status: Status, error: str, began: str = "") -> Measurement:
    """The measurement of a stage that could not be run."""
    facts = facts_of(task) | {"runtime": task.runtime, "ran_on": task.unit, "fallback": "",
                              "inference_precision": task.inference_precision, "threads": task.threads}
    return Measurement(subject=SUBJECT, id=task.id, label="run", context="alone", place="alone", facts=facts, status=status,
                       error=error, started=began or now(), ended=now())


def rounded(samples_ms: Iterable[float]) -> tuple[float, ...]:
    """Times to the nanosecond; clocks are no finer."""
    return tuple(round(sample, 6) for sample in samples_ms)


@lru_cache(maxsize=1)
def _canary(task: StageTask) -> tuple[OpenedStage, Feed]:
    return open_stage(task)[0], task.tensors


def run_canary(task: StageTask) -> Measurement:
    """Times of the canary."""
    try:
        opened, feed = _canary(task)
    except Refused as refused:
        return failed(task, "failed", str(refused))
    return Measurement(subject=SUBJECT, id=CANARY, label=CANARY, context="alone", place="alone",
                       samples_ms=rounded(time_opened(opened, feed, CANARY_WARMUP, CANARY_RUNS)))


def copies_to_time(largest_bytes: int) -> list[Copy]:
    """Both directions at several sizes, whole float32 values, up to the largest tensor."""
    sizes = np.geomspace(FEWEST_BYTES, max(largest_bytes, 2 * FEWEST_BYTES), STEPS)
    return [Copy(direction=direction, bytes=size) for size in sorted({4 * round(size / 4) for size in sizes})
            for direction in DIRECTIONS]


def time_copy(copy: Copy, to_device: Callable[[Any], Any], to_host: Callable[[Any], Any], warmup: int,
              runs: int) -> list[float]:
    """Times in ms of copies of an array, each to its end.

    Args:
        copy: which.
        to_device: copies an array to the device, and returns when that is done.
        to_host: copies what `to_device` returned to a new array.
        warmup, runs: copies before and in the measurement.
    """
    array = np.random.default_rng(0).random(copy.bytes // 4, np.float32)
    run = partial(to_device, array) if copy.direction == "to_device" else partial(to_host, to_device(array))
    return time_warm_runs_ms(run, warmup, runs)


def run_copy(task: StageTask, copy: Copy) -> Measurement:
    """Times of a copy; none where the stage has its data in the host's memory."""
    try:
        opened, _ = _canary(task)
    except Refused as refused:
        return failed(task, "failed", str(refused))
    name = task.definition.inputs[0]
    copies = partial(opened.to_unit, name), partial(opened.to_host, name)
    samples_ms = time_copy(copy, *copies, task.warmup, task.runs) if opened.memory != HOST else []
    return Measurement(subject=COPY, id=COPY, label="run", context="alone", place="alone", samples_ms=rounded(samples_ms))


def answer(request: Request) -> Measurement:
    """What a request asks for. A graph's file that can't be read makes the task fail."""
    try:
        if request.copied:
            return run_copy(request.task, request.copied)
        return measure_stage(request.task) if request.do == "measure" else run_canary(request.task)
    except UserError as error:
        return failed(request.task, "failed", str(error))


def main() -> None:
    keep_freed_memory()
    serve_lines(lambda line: answer(Request.model_validate_json(line)).model_dump_json())


if __name__ == "__main__":
    main()
