"""Which units are still to be measured, in which blocks, and which tie two machines to each other."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from hase.records.blocks import Block
from hase.records.measurement import Measurement
from hase.utils import cli

T = TypeVar("T")


class Unit(Protocol):
    """Anything that can be measured. Its measurements bear its id."""

    @property
    def id(self) -> str: ...


U = TypeVar("U", bound=Unit)
U_co = TypeVar("U_co", bound=Unit, covariant=True)
Counts = Callable[[Measurement], bool]  # whether a measurement is the one that a unit was measured for


class Planned(NamedTuple, Generic[U_co]):
    """A block to be measured: its name, and its units."""

    key: str
    units: Sequence[U_co]


@dataclass(frozen=True)
class Plan(Generic[U]):
    """The blocks to be measured under one load.

    Attributes:
        own: by machine, the blocks that it is to measure itself; they come first.
        shared: the blocks that any machine may measure.
    """

    own: Mapping[str, Sequence[Planned[U]]]
    shared: Sequence[Planned[U]] = ()

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.shared) + sum(map(len, self.own.values()))


def every(measurement: Measurement) -> bool:
    """Counts every measurement."""
    return True


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """`items` in pieces of `size`; the last may be shorter."""
    for begin in range(0, len(items), size):
        yield items[begin:begin + size]


def shuffled(items: Sequence[T], seed: int = 0) -> list[T]:
    """`items` in an order that is the same each time."""
    return [items[place] for place in np.random.default_rng(seed).permutation(len(items))]


def pending(units: Iterable[U], blocks: Iterable[Block], counts: Counts = every) -> list[U]:
    """The units that no block holds a measurement of, failed ones included."""
    measured = {m.id for block in blocks for m in block.measurements if counts(m)}
    return [unit for unit in units if unit.id not in measured]


def choose_ties(units: Sequence[U], blocks: Iterable[Block], machines: Sequence[str], count: int,
                counts: Counts = every) -> dict[str, list[U]]:
    """By machine, the units to measure there although others have, so that `count` of its units tie it to them.

    Those that most machines have measured come first, so that the same ones tie all; then the order is that of their ids'
    hashes, which is the same each time and prefers no kind of unit. One that failed on a machine is not tried there again.
    Where several `machines` are about to measure, what nobody has measured counts as measured elsewhere, since one of them
    will; and the one that has measured least chooses first, so that it makes up for what others have ready.
    """
    tried: dict[str, set[str]] = defaultdict(set)
    sound: dict[str, set[str]] = defaultdict(set)
    for block in blocks:
        for m in block.measurements:
            if counts(m):
                tried[m.id].add(block.machine)
                if m.status == "ok":
                    sound[m.id].add(block.machine)
    if len(machines) > 1:
        for unit in units:
            if not tried[unit.id]:
                sound[unit.id].add("one of them")
    ties: dict[str, list[U]] = {}
    for machine in sorted(machines, key=lambda machine: sum(machine in by for by in tried.values())):
        elsewhere = [unit for unit in units if sound[unit.id] - {machine}]
        new = [unit for unit in elsewhere if machine not in tried[unit.id]]
        new.sort(key=lambda unit: (-len(sound[unit.id]), hashlib.sha256(unit.id.encode()).digest()))
        ties[machine] = new[:max(0, count - (len(elsewhere) - len(new)))]
        for unit in ties[machine]:
            sound[unit.id].add(machine)
    return ties


def first_names(units: Sequence[Unit]) -> str:
    """The name of a block: its first unit, and how many more there are."""
    return cli.first_of([unit.id for unit in units])


def in_blocks(units: Sequence[U], size: int, name: Callable[[Sequence[U]], str] = first_names) -> list[Planned[U]]:
    """Units in blocks of `size`, in an order that is the same each time but mixes kinds, so that none is measured at one time
    of day alone."""
    return [Planned(name(chunk), chunk) for chunk in chunks(shuffled(units), size)]


def plan_blocks(units: Sequence[U], blocks: Sequence[Block], machine_uuid: str, *, size: int = 32, each_machine: bool = True,
                ties: int = 0, counts: Counts = every) -> list[Planned[U]]:
    """The blocks that a machine has still to measure under one load.

    Args:
        units: to be measured.
        blocks: all blocks of this load, of every machine.
        machine_uuid: the machine that will measure.
        size: units in a block.
        each_machine: whether a unit is measured on each machine. If not, what one measured the others leave out, but for
            `ties`: so many units that they measure too.
        counts: the measurements that a unit is measured for.
    """
    measured_here = [block for block in blocks if block.machine == machine_uuid]
    again = [] if each_machine else choose_ties(units, blocks, [machine_uuid], ties, counts)[machine_uuid]
    return in_blocks(again, size) + in_blocks(pending(units, measured_here if each_machine else blocks, counts), size)


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
    return {machine: {kind: {name: float(np.median(samples_ms)) for name, samples_ms in by_id.items()}
                      for kind, by_id in of_machine.items()} for machine, of_machine in samples.items()}


def compare(first_ms: Mapping[str, float], second_ms: Mapping[str, float]) -> dict[str, Any] | None:
    """Statistics of second / first over what both timed, where it took any time; None where there is nothing such."""
    ratios = np.array([second_ms[name] / time_ms for name, time_ms in first_ms.items()
                       if time_ms > 0 and second_ms.get(name, 0.0) > 0])
    if not len(ratios):
        return None
    lower, median, upper = np.percentile(ratios, [25, 50, 75])
    return {"count": len(ratios), "median": float(median), "lower_quartile": float(lower), "upper_quartile": float(upper),
            "within_5_%": 100 * float((np.abs(ratios - 1) <= CLOSE).mean())}


def tie_rows(times: Mapping[str, Times]) -> list[dict[str, Any]]:
    """One row per pair of machines and kind that both timed: the ratio of the second's times to the first's."""
    rows = []
    for first, second in itertools.combinations(times, 2):
        for kind in sorted(set(times[first]) & set(times[second])):
            statistics = compare(times[first][kind], times[second][kind])
            if statistics:
                subject, label, place = kind
                rows.append({"machine": first, "other": second, "what": subject, "label": label, "where": place, **statistics})
    return rows
