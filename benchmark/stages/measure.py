"""Times one stage on one unit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from benchmark.stages.opening import Feed, OpenedStage, Refused, open_stage, wrong
from benchmark.stages.work import StageUnit, facts_of
from measuring.run_times import time_warm_runs_ms
from model_zoo.stages.definition import HOST
from records.measurement import Measurement, Status, now

SUBJECT = "stage"
RESIDENT = "resident_ms"


def measure_stage(unit: StageUnit) -> Measurement:
    """The times of a stage's runs, after some that do not count; a stage that nothing can run is a measurement that says so."""
    began = now()
    try:
        opened, fallback = open_stage(unit)
    except Refused as refused:
        return failed(unit, "failed", str(refused), began)
    feed = unit.tensors
    samples_ms = time_opened(opened, feed, unit.warmup, unit.runs)
    quantities = {}
    if opened.memory != HOST:
        values = {name: opened.to_unit(name, feed[name]) for name in unit.definition.inputs}
        quantities[RESIDENT] = rounded(time_warm_runs_ms(partial(opened.run_resident, values), unit.warmup, unit.runs))
    if why := wrong(opened.run(feed), feed[unit.definition.outputs[0]], opened.inference_precision):
        return failed(unit, "failed", f"{opened.runtime}: after {unit.runs} runs {why}", began)
    facts = facts_of(unit) | {"runtime": opened.runtime, "ran_on": opened.ran_on, "fallback": fallback,
                              "inference_precision": opened.inference_precision, "threads": opened.threads}
    return Measurement(subject=SUBJECT, id=unit.id, label="run", context="alone", place="alone", facts=facts,
                       samples_ms=rounded(samples_ms), quantities=quantities, started=began, ended=now())


def time_opened(opened: OpenedStage, feed: Feed, warmup: int, runs: int) -> list[float]:
    """Times of runs in ms, with the copies to and from the unit."""
    return time_warm_runs_ms(partial(opened.run, feed), warmup, runs)


def failed(unit: StageUnit, status: Status, error: str, began: str = "") -> Measurement:
    """The measurement of a stage that could not be run."""
    facts = facts_of(unit) | {"runtime": unit.runtime, "ran_on": unit.unit, "fallback": "",
                              "inference_precision": unit.inference_precision, "threads": unit.threads}
    return Measurement(subject=SUBJECT, id=unit.id, label="run", context="alone", place="alone", facts=facts, status=status,
                       error=error, started=began or now(), ended=now())


def rounded(samples_ms: Iterable[float]) -> tuple[float, ...]:
    """Times to the nanosecond; clocks are no finer."""
    return tuple(round(sample, 6) for sample in samples_ms)
