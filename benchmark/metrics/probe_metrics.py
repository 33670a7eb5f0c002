"""A summary of the sharing probe as metrics: their names, and the conversion to samples and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pydantic import ValidationError

from hase.records.probe_reading import QUANTILES, ProbeSummary
from hase.utils.errors import UserError

LATENCY, PHASE, TAKEN = "hase_probe_latency_seconds", "hase_probe_phase_seconds", "hase_probe_timestamp_seconds"
MEANINGS = {
    LATENCY: "latency of the sharing probe's runs; runs: all, or those that waited for other work (s)",
    PHASE: "mean length of phases in which other work kept the device busy or left it idle (s)",
    TAKEN: "time of the sharing probe's measurement; mode: how processes share the device (s since 1970)",
}
RUNS, QUANTILE, KIND, MODE = "runs", "quantile", "phase", "mode"  # labels
OWN_LABELS = {LATENCY: (RUNS, QUANTILE), PHASE: (KIND,), TAKEN: (MODE,)}
ALL, WAITED, BUSY, QUIET = "all", "waited", "busy", "quiet"
NO_GPU = "cpu"  # the mode on a CPU: an empty label would be the same as no label
AT = tuple(f"{place / (QUANTILES - 1):g}" for place in range(QUANTILES))


class Unreadable(UserError):
    """Samples that give no valid summary.

    Attributes:
        fact: what is wrong with them.
    """

    def __init__(self, fact: str) -> None:
        super().__init__(f"the sharing probe's reading: {fact}")
        self.fact = fact


class Sample(NamedTuple):
    """A value of a metric with its labels, except those of the device."""

    name: str
    labels: Mapping[str, str]
    value: float


class Probed(NamedTuple):
    """The summary of a measurement with the sharing probe, and its time (seconds since 1970)."""

    summary: ProbeSummary
    taken_s: float


def samples_of(probed: Probed) -> Iterator[Sample]:
    """The samples to serve, metric by metric. If no run waited, there are no samples of runs that waited."""
    summary = probed.summary
    for runs, latencies_ms in ((ALL, summary.latencies_ms), (WAITED, summary.waited_ms)):
        for at, latency_ms in zip(AT, latencies_ms, strict=False):
            yield Sample(LATENCY, {RUNS: runs, QUANTILE: at}, latency_ms / 1e3)
    for kind, length_ms in ((BUSY, summary.busy_ms), (QUIET, summary.quiet_ms)):
        yield Sample(PHASE, {KIND: kind}, length_ms / 1e3)
    yield Sample(TAKEN, {MODE: summary.sharing or NO_GPU}, probed.taken_s)


def probed_of(samples: Iterable[Sample]) -> Probed:
    """The summary that samples give.

    A server may keep series for a while after they are no longer served (as with federation). Then there may be old samples of
    runs that waited although the summary has none, or of a second sharing mode. They are ignored.

    Raises:
        Unreadable: a sample is missing or not a number, or samples contradict each other.
    """
    samples_by_key = {(sample.name, *(sample.labels.get(label, "") for label in OWN_LABELS[sample.name])): sample.value
                      for sample in samples}

    def values(*keys: tuple[str, ...]) -> tuple[float, ...]:
        if missing := [key for key in keys if key not in samples_by_key]:
            name, *labels = missing[0]
            shown = ",".join(f'{label}="{value}"' for label, value in zip(OWN_LABELS[name], labels, strict=True))
            raise Unreadable(f"{len(missing)} of its samples are missing, {name}{{{shown}}} first")
        return tuple(samples_by_key[key] for key in keys)

    taken = {key[1]: value for key, value in samples_by_key.items() if key[0] == TAKEN}
    if not taken:
        raise Unreadable(f"{TAKEN} is missing")
    if not all(math.isfinite(taken_s) for taken_s in taken.values()):
        raise Unreadable(f"{TAKEN} is not a time")
    mode = max(taken, key=lambda mode: taken[mode])
    busy_s, quiet_s = values((PHASE, BUSY), (PHASE, QUIET))
    everything, waited = (values(*((LATENCY, runs, at) for at in AT)) if served else () for runs, served in (
        (ALL, True), (WAITED, busy_s != 0.0)))
    try:
        summary = ProbeSummary.model_validate({
            "sharing": None if mode == NO_GPU else mode, "latencies_ms": [1e3 * value for value in everything],
            "waited_ms": [1e3 * value for value in waited], "busy_ms": 1e3 * busy_s, "quiet_ms": 1e3 * quiet_s})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Unreadable(f"{place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}") from None
    return Probed(summary, taken[mode])
