"""Drives all measuring: plans blocks of units (kernels, models …), has actors measure them, and keeps the results.

The driver takes one load after another and decides which blocks are repeated; only it writes the journal. It knows units only
by their ids; its callers know what they are and how to time them. Each actor measures alone on one device. Usually there is one
actor, in the driver's own process (`LocalActor`); a cluster has one per device (benchmark/collecting/ray_actors.py).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from hase.benchmark.measuring.blocks import (
    Attempt,
    Bench,
    Measurer,
    PlannedBlock,
    StartLoad,
    Steadiness,
    TimeUnits,
    Unit,
    describe_load,
)
from hase.records.measurement import Background, Block, Journal, Measurement
from hase.utils.errors import UserError
from hase.utils.logger import get_logger, progress
from hase.utils.text import first_and_count

T = TypeVar("T")
U = TypeVar("U", bound=Unit)
MOST_FRUITLESS = 3  # blocks in sequence without a result, since the machine lacks something
StressLevel = tuple[float, Background | None]  # the share of time, 0–1, and what the device is busy with; None on an idle one
LoadKey = tuple[float, str]  # a load in the journal: its level, and the name of its background or ""
IDLE: tuple[StressLevel, ...] = ((0.0, None),)
Counts = Callable[[Measurement], bool]  # whether a measurement of a unit makes the unit count as measured

log = get_logger("collector")


# What is still to be measured --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockPlan(Generic[U]):
    """The blocks to measure under one load: those of each machine, which come first, and those that any machine may take."""

    own: Mapping[str, Sequence[PlannedBlock[U]]]
    shared: Sequence[PlannedBlock[U]] = ()

    @property
    def count(self) -> int:
        return len(self.shared) + sum(map(len, self.own.values()))


def _any_measurement(measurement: Measurement) -> bool:
    return True


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Splits `items` into pieces of `size`; the last may be shorter."""
    for begin in range(0, len(items), size):
        yield items[begin:begin + size]


def shuffled(items: Sequence[T], seed: int = 0) -> list[T]:
    """`items` in a random order that is always the same."""
    return [items[index] for index in np.random.default_rng(seed).permutation(len(items))]


def pending(units: Iterable[U], blocks: Iterable[Block], counts: Counts = _any_measurement) -> list[U]:
    """Units without a measurement in any block; failed measurements count, too."""
    measured = {m.id for block in blocks for m in block.measurements if counts(m)}
    return [unit for unit in units if unit.id not in measured]


def choose_ties(units: Sequence[U], blocks: Iterable[Block], machines: Sequence[str], count: int,
                counts: Counts = _any_measurement) -> dict[str, list[U]]:
    """Chooses for each machine units to measure there although other machines have measured them. These ties show how machines
    differ; each machine gets as many as it lacks to have `count` of them.

    Units that most machines have measured come first, so that the same units tie all machines; then the order of their ids'
    hashes. Failed units are not repeated. If several `machines` are about to measure, new units count as measured elsewhere,
    and the machine with the fewest measurements chooses first.
    """
    tried: dict[str, set[str]] = defaultdict(set)  # machines by unit id
    sound: dict[str, set[str]] = defaultdict(set)  # those of them that succeeded
    for block in blocks:
        for m in block.measurements:
            if counts(m):
                tried[m.id].add(block.machine)
                if m.status == "ok":
                    sound[m.id].add(block.machine)
    if len(machines) > 1:
        for unit in units:
            if not tried[unit.id]:
                sound[unit.id].add("one of them")  # stands for the machine that will measure it
    ties: dict[str, list[U]] = {}
    for machine in sorted(machines, key=lambda machine: sum(machine in by for by in tried.values())):
        elsewhere = [unit for unit in units if sound[unit.id] - {machine}]
        new = [unit for unit in elsewhere if machine not in tried[unit.id]]
        new.sort(key=lambda unit: (-len(sound[unit.id]), hashlib.sha256(unit.id.encode()).digest()))
        ties[machine] = new[:max(0, count - (len(elsewhere) - len(new)))]
        for unit in ties[machine]:
            sound[unit.id].add(machine)
    return ties


def block_key(units: Sequence[Unit]) -> str:
    """The key of a block: its first unit, and the number of others."""
    return first_and_count([unit.id for unit in units])


def in_blocks(units: Sequence[U], size: int) -> list[PlannedBlock[U]]:
    """Plans blocks of `size` units, in a reproducible order that spreads each kind over the whole measurement."""
    return [PlannedBlock(block_key(chunk), chunk) for chunk in chunks(shuffled(units), size)]


def plan_blocks(units: Sequence[U], blocks: Sequence[Block], machine_uuid: str, *, size: int = 32, each_machine: bool = True,
                ties: int = 0, counts: Counts = _any_measurement) -> list[PlannedBlock[U]]:
    """The blocks that a machine still has to measure under one load; `blocks` are those of this load from all machines. Without
    `each_machine`, it skips units that another machine measured, except for `ties` units."""
    measured_here = [block for block in blocks if block.machine == machine_uuid]
    again = [] if each_machine else choose_ties(units, blocks, [machine_uuid], ties, counts)[machine_uuid]
    return in_blocks(again, size) + in_blocks(pending(units, measured_here if each_machine else blocks, counts), size)


# Who measures ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Actor:
    """What the driver knows about an actor. Actors of one host may disturb each other."""

    name: str  # for messages, and unique
    machine: str  # the identifier of the device that it measures (hase.utils.fingerprint.machine)
    host: str  # the computer with that device


class Finished(NamedTuple, Generic[U]):
    """The outcome of an attempt at a block."""

    actor: Actor
    attempt: Attempt[U]
    block: Block | None  # None if time was over before it began, or if the actor is lost
    seconds: float = 0.0  # how long the actor measured
    lost: UserError | None = None  # why the actor and all its blocks are lost


class Actors(Protocol[U]):
    """The actors that measure for a driver."""

    members: list[Actor]  # those that can measure; the driver removes those that are lost
    blocks_each: int  # given to an actor at a time, so that it need not wait for the driver between two of them

    def loaded(self, level: float, background: Background | None, best_canary_ms: Mapping[str, float],
               stop_at_s: float) -> AbstractContextManager[None]:
        """Puts all members' devices under a load within the `with` block, and drops members where that fails."""

    def begin(self, actor: Actor, attempt: Attempt[U]) -> None:
        """Gives a member a block; it measures its blocks in sequence."""

    def wait(self) -> Sequence[Finished[U]]:
        """Waits until at least one attempt has ended. A lost actor gives one last result."""


class LocalActor(Generic[U]):
    """The single actor in the driver's own process (see `Actors`)."""

    blocks_each = 1

    def __init__(self, measurer: Measurer[U]) -> None:
        self._measurer = measurer
        self.members = [Actor("this machine", measurer.bench.machine_uuid, "this machine")]
        self._begun: tuple[Actor, Attempt[U]] | None = None  # the attempt that `wait` measures

    def loaded(self, level: float, background: Background | None, best_canary_ms: Mapping[str, float],
               stop_at_s: float) -> AbstractContextManager[None]:
        return self._measurer.loaded(level, background, best_canary_ms.get(self._measurer.bench.machine_uuid, 0.0), stop_at_s)

    def begin(self, actor: Actor, attempt: Attempt[U]) -> None:
        self._begun = (actor, attempt)

    def wait(self) -> Sequence[Finished[U]]:
        if self._begun is None:
            raise RuntimeError("nothing was begun")
        (actor, attempt), self._begun = self._begun, None
        began_s = time.monotonic()
        try:
            block = self._measurer.measure(attempt)
        except UserError as error:
            return [Finished(actor, attempt, None, time.monotonic() - began_s, error)]
        return [Finished(actor, attempt, block, time.monotonic() - began_s)]


# The driver --------------------------------------------------------------------------------------------------------------


@dataclass
class Totals(Generic[U]):
    """What was measured."""

    units: list[U] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)  # the steadiest attempt of each
    unsteady_blocks: int = 0  # the number of these that were unsteady
    measuring_s: float = 0.0  # sum over all actors
    took_s: float = 0.0  # wall time without starting loads
    left: int = 0  # units that were not measured, since time was over or their machine was lost
    lost: list[str] = field(default_factory=list)  # the names of the actors that were lost
    interrupted: dict[str, str] = field(default_factory=dict)  # units to measure again: reasons by id


class Driver(Generic[U]):
    """Measures blocks under one load after another, and appends every block to the journal. Blocks of a lost actor are measured
    later. To resume after a kill, plan what the journal lacks."""

    def __init__(self, actors: Actors[U], journal: Journal, steadiness: Steadiness, stop_at_s: float = math.inf) -> None:
        self._actors, self._journal, self._steadiness, self._stop_at_s = actors, journal, steadiness, stop_at_s
        self._totals, self._began_with = Totals[U](), list(actors.members)

    def measured(self, level: float, background: Background | None) -> list[Block]:
        """The blocks of a load in the journal."""
        key = load_key(level, background)
        return [block for block in self._journal.blocks if block.load == key]

    def measure(self, level: float, background: Background | None, plan: BlockPlan[U]) -> None:
        """Measures a plan's blocks under a load, unless it is empty. Raises the last UserError if no actor is left."""
        if not plan.count:
            return
        measured = self.measured(level, background)
        best_ms = {machine: best_canary_ms(block for block in measured if block.machine == machine)
                   for machine in {actor.machine for actor in self._actors.members}}
        with self._actors.loaded(level, background, best_ms, self._stop_at_s):
            began_s = time.monotonic()
            _LoadRun(self._actors, load_key(level, background), self._journal, self._steadiness, self._totals,
                     self._stop_at_s).measure(plan)
            self._totals.took_s += time.monotonic() - began_s

    def finish(self) -> Totals[U]:
        """What was measured under all loads; warns about interrupted or unsteady measurements."""
        totals = self._totals
        totals.lost = [actor.name for actor in self._began_with if actor not in self._actors.members]
        if totals.interrupted:
            log.warning("%d units were interrupted: the machine lacked disk space, memory or open files, or a process could "
                        "not use its device, or was ended from outside; run again to measure them: %s",
                        len(totals.interrupted), first_and_count(list(totals.interrupted)))
        if totals.unsteady_blocks:
            count = len(totals.blocks)
            log.warning("%d of %d block%s: kept and marked, although the machine was unsteady by more than %.0f %% (by up to "
                        "%.0f %%)", totals.unsteady_blocks, count, "s" * (count != 1), 100 * self._steadiness.drift,
                        100 * max(block.drift for block in totals.blocks))
        return totals


def load_key(level: float, background: Background | None) -> LoadKey:
    """A load as the blocks of the journal name it."""
    return level, background.name if background else ""


def measure_loads(bench: Bench, blocks_of: Callable[[LoadKey, Sequence[Block]], Sequence[PlannedBlock[U]]],
                  time_units: TimeUnits[U], journal: Journal, loads: Iterable[StressLevel] = IDLE,
                  start: StartLoad | None = None, stop_at_s: float = math.inf) -> Totals[U]:
    """Measures in this process under each load; `blocks_of` gives a load's blocks, given those already measured."""
    driver = Driver(LocalActor(Measurer(bench, time_units, start)), journal, bench.steadiness, stop_at_s)
    for level, background in loads:
        blocks = blocks_of(load_key(level, background), driver.measured(level, background))
        driver.measure(level, background, BlockPlan({bench.machine_uuid: blocks}))
    return driver.finish()


def best_canary_ms(blocks: Iterable[Block]) -> float:
    """The shortest time of the canary, the reference workload before and after each block, in ms; 0 without blocks."""
    return min((min(block.canary_before_ms, block.canary_after_ms) for block in blocks), default=0.0)


class _Given(NamedTuple, Generic[U]):
    """A block given to an actor, and the queue it came from."""

    attempt: Attempt[U]
    queue: deque[PlannedBlock[U]]


@dataclass
class _LoadRun(Generic[U]):
    """Measures the blocks of one load."""

    actors: Actors[U]
    load: LoadKey
    journal: Journal
    steadiness: Steadiness
    totals: Totals[U]
    stop_at_s: float
    fruitless: Counter[Actor] = field(default_factory=Counter)  # per actor: blocks in sequence without a result
    first: list[tuple[str, PlannedBlock[U]]] = field(default_factory=list)  # every block's first attempt, with its machine
    steadiest: dict[tuple[str, str], Block] = field(default_factory=dict)  # the best attempt so far, by machine and key
    given: defaultdict[Actor, list[_Given[U]]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, plan: BlockPlan[U]) -> None:
        """Measures each block, then repeats unsteady ones on the same machine; keeps every attempt, the steadiest counts."""
        attempts = self.steadiness.attempts_under_load if self.load[0] else self.steadiness.attempts
        text = describe_load(*self.load)
        if not math.isinf(self.stop_at_s):
            text += f", for {max(self.stop_at_s - time.monotonic(), 0.0):.0f} s at most"
        self._measure_each(plan, 1, text)
        for attempt in range(2, attempts + 1):
            again: defaultdict[str, list[PlannedBlock[U]]] = defaultdict(list)
            for machine, planned in self.first:
                if (machine, planned.key) in self.steadiest and self.steadiest[machine, planned.key].unsteady:
                    again[machine].append(planned)
            if again:
                self._measure_each(BlockPlan(again), attempt, f"{text}, once more")
        self.totals.blocks += self.steadiest.values()
        self.totals.unsteady_blocks += sum(block.unsteady for block in self.steadiest.values())

    def _measure_each(self, plan: BlockPlan[U], attempt: int, text: str) -> None:
        """Measures each block of a plan once. Raises UserError if no actor is left."""
        own = {machine: deque(blocks) for machine, blocks in plan.own.items()}
        shared = deque(plan.shared)
        ended = deque[Finished[U]]()
        for _ in progress(itertools.count(), text, plan.count):
            if not ended:
                if time.monotonic() < self.stop_at_s:
                    self._hand_out(own, shared, attempt)
                if not any(self.given.values()):
                    break
                ended.extend(self.actors.wait())
            self._take(ended.popleft())
        if attempt == 1 and (left := sum(len(planned.units) for queue in (*own.values(), shared) for planned in queue)):
            self.totals.left += left
            if time.monotonic() < self.stop_at_s:
                log.warning("%d units are not measured, since the actors of their machine are lost; run again to measure them",
                            left)

    def _hand_out(self, own: dict[str, deque[PlannedBlock[U]]], shared: deque[PlannedBlock[U]], attempt: int) -> None:
        """Gives every actor as many blocks as it may hold; nobody gets a second one before all have a first."""
        for wanted in range(1, self.actors.blocks_each + 1):
            for actor in self.actors.members:
                if len(self.given[actor]) < wanted and (given := self._next_for(actor, own, shared, attempt)):
                    self.given[actor].append(given)
                    self.actors.begin(actor, given.attempt)

    def _next_for(self, actor: Actor, own: dict[str, deque[PlannedBlock[U]]], shared: deque[PlannedBlock[U]],
                  attempt: int) -> _Given[U] | None:
        """The next block that an actor may begin: from its machine's own queue, else from the shared one. While other actors
        measure on its host, only if all these blocks share the host."""
        beside = [given.attempt.planned for other, held in self.given.items() for given in held
                  if other.host == actor.host and other != actor]
        if not all(planned.shares_host for planned in beside):
            return None
        for queue in (own.get(actor.machine), shared):
            for index, planned in enumerate(queue or ()):
                if queue is not None and (not beside or planned.shares_host):
                    del queue[index]
                    return _Given(Attempt(planned, attempt), queue)
        return None

    def _take(self, finished: Finished[U]) -> None:
        """Keeps the outcome of an attempt; unfinished blocks return to their queue. UserError if the last actor is lost."""
        actor, attempt, block, seconds, lost = finished
        if actor not in self.actors.members:  # a lost actor; its blocks are back in the queues
            return
        self.totals.measuring_s += seconds
        index = next(index for index, given in enumerate(self.given[actor]) if given.attempt is attempt)
        given = self.given[actor].pop(index)
        if block is None:
            given.queue.appendleft(attempt.planned)
        else:
            lost = self._keep(actor, attempt, block)
        if lost is not None:
            self._lose(actor, lost)

    def _keep(self, actor: Actor, attempt: Attempt[U], block: Block) -> UserError | None:
        """Adds a block without interrupted units to the journal; returns an error after several interrupted blocks."""
        planned, number = attempt
        interrupted = {m.id: m.error for m in block.measurements if m.status == "interrupted"}
        block = block.model_copy(update={"measurements": tuple(m for m in block.measurements if m.id not in interrupted)})
        if number == 1:
            self.first.append((block.machine, planned))
            self.totals.interrupted |= interrupted
            self.totals.units += [unit for unit in planned.units if unit.id not in interrupted]
        if not block.measurements and interrupted:
            self.fruitless[actor] += 1
            if self.fruitless[actor] == MOST_FRUITLESS:
                return UserError(f"the last {MOST_FRUITLESS} blocks were interrupted: {interrupted[next(iter(interrupted))]}; "
                                 "free what is lacking and run the same command again: what was finished is kept")
            return None
        self.fruitless[actor] = 0
        self.journal.append(block)
        before = self.steadiest.get((block.machine, planned.key))
        if before is None or block.drift < before.drift:
            self.steadiest[block.machine, planned.key] = block
        return None

    def _lose(self, actor: Actor, error: UserError) -> None:
        """Continues without an actor; raises `error` if it was the last one."""
        self.actors.members.remove(actor)
        for given in reversed(self.given.pop(actor)):
            given.queue.appendleft(given.attempt.planned)
        if not self.actors.members:
            raise error
        log.warning("%s is lost, and others measure what it had not finished: %s", actor.name, error)
