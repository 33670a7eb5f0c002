"""Compares times that were measured twice: on two machines, or a second time on the same one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from records.blocks import Block

CLOSE = 0.05  # a ratio within 1 ± this counts as the same
Kind = tuple[str, str, str]  # what was timed: subject, label, place
Times = dict[Kind, dict[str, float]]  # ms by kind and id


class TimedUnit(NamedTuple):
    """Samples (ms) of one unit on one machine."""

    machine: str
    kind: Kind
    id: str
    samples_ms: tuple[float, ...]


def idle_units(blocks: Iterable[Block]) -> Iterator[TimedUnit]:
    """Every measurement that went well on an idle device."""
    for block in blocks:
        for m in block.measurements if not block.level else ():
            if m.status == "ok":
                yield TimedUnit(block.machine, (m.subject, m.label, m.place), m.id, m.samples_ms)


def median_times(units: Iterable[TimedUnit]) -> dict[str, Times]:
    """The median of each unit's samples in ms, by machine."""
    samples: dict[str, dict[Kind, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for unit in units:
        samples[unit.machine][unit.kind][unit.id] += unit.samples_ms
    return {machine: {kind: {name: float(np.median(found)) for name, found in by_id.items()}
                      for kind, by_id in of_machine.items()} for machine, of_machine in samples.items()}


def compare(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Any] | None:
    """Statistics of other / one over what both timed, where it took any time; None where there is nothing such."""
    ratios = np.array([other[name] / one[name] for name in one if one[name] > 0 and other.get(name, 0.0) > 0])
    if not len(ratios):
        return None
    lower, median, upper = np.percentile(ratios, [25, 50, 75])
    return {"count": len(ratios), "median": float(median), "lower_quartile": float(lower), "upper_quartile": float(upper),
            "within_5_%": 100 * float((np.abs(ratios - 1) <= CLOSE).mean())}


def tie_rows(times: Mapping[str, Times]) -> list[dict[str, Any]]:
    """One row per pair of machines and kind that both timed: the ratio of the second's times to the first's."""
    rows = []
    for one, other in itertools.combinations(times, 2):
        for kind in sorted(set(times[one]) & set(times[other])):
            found = compare(times[one][kind], times[other][kind])
            if found:
                subject, label, place = kind
                rows.append({"machine": one, "other": other, "what": subject, "label": label, "where": place, **found})
    return rows
