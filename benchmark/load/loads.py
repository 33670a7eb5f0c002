"""The driver of all measuring: blocks of units under one load after another, each block kept as soon as it is measured.

It plans, hands blocks out to actors (benchmark/measuring/actors.py), says which of them are measured again, and alone writes the journal.
It knows units only by their ids. Its callers know what they are, and how to time one.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from hase.benchmark.measuring.actors import Actor, Actors, Finished, LocalActor, Measurer, Start, Task, TimeUnits, describe_load
from hase.benchmark.measuring.bench import Bench, Steadiness
from hase.benchmark.measuring.pending import Plan, Planned, Unit
from hase.records.backgrounds import Background
from hase.records.blocks import Block, Journal
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.logger import get_logger

log = get_logger("collector")
U = TypeVar("U", bound=Unit)
MOST_FRUITLESS = 3  # blocks in a row of which nothing is kept, since the machine lacks something
StressLevel = tuple[float, Background | None]  # the share of time, 0–1, and what the device is busy with; None on an idle one
IDLE: tuple[StressLevel, ...] = ((0.0, None),)
PlanOf = Callable[[tuple[float, str], Sequence[Block]], Plan[U]]


def without_interrupted(block: Block) -> tuple[Block, dict[str, str]]:
    """A block without the units of which some measurement was interrupted; and why, by the ids of these units."""
    interrupted = {m.id: m.error for m in block.measurements if m.status == "interrupted"}
    if not interrupted:
        return block, interrupted
    kept = tuple(m for m in block.measurements if m.id not in interrupted)
    return block.model_copy(update={"measurements": kept}), interrupted


def best_canary_ms(blocks: Iterable[Block]) -> float:
    """The canary's shortest time in some blocks, in ms; 0 where there are none."""
    return min((min(block.canary_before_ms, block.canary_after_ms) for block in blocks), default=0.0)


@dataclass
class Totals(Generic[U]):
    """What was measured.

    Attributes:
        units: those that were.
        blocks: of each its steadiest attempt.
        unsteady_blocks: how many of these were unsteady.
        measuring_s: the seconds that measuring took, of all actors together.
        took_s: the seconds that it took on the clock, without the start of loads.
        left: how many units were left because the time was over or their machine was lost.
        lost: the names of the actors that were lost.
        interrupted: the ids of units that are to be measured again, and why.
    """

    units: list[U] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    unsteady_blocks: int = 0
    measuring_s: float = 0.0
    took_s: float = 0.0
    left: int = 0
    lost: list[str] = field(default_factory=list)
    interrupted: dict[str, str] = field(default_factory=dict)


def measure_loads(bench: Bench, blocks_of: Callable[[tuple[float, str], Sequence[Block]], Sequence[Planned[U]]],
                  time_units: TimeUnits[U], journal: Journal, loads: Iterable[StressLevel] = IDLE, start: Start | None = None,
                  stop_at_s: float = math.inf) -> Totals[U]:
    """Measures in this process, under each load, what `blocks_of` says, and adds every block to the journal.

    To resume after a kill is to call it again: `blocks_of` plans what the journal does not hold (as `plan_blocks` does).

    Args:
        bench: what is measured with.
        blocks_of: the blocks to measure under a load (its level and the name of its background), of which the given blocks are
            measured already.
        time_units: times the units of a block at a level. One that fails is a measurement that says so, and no exception.
        journal: keeps the blocks.
        loads: one after another; by default the idle device alone.
        start: starts one of them; by default `started`.
        stop_at_s: the time (of `time.monotonic`) after which no block begins. What is left, a later call measures.

    Raises:
        UserError: metrics, probe or canary can't be read, a load can't be had, or block after block was interrupted.
    """
    return measure_by(LocalActor(Measurer(bench, time_units, start)),
                      lambda load, measured: Plan({bench.machine_uuid: blocks_of(load, measured)}),
                      journal, bench.steadiness, loads, stop_at_s)


def measure_by(actors: Actors[U], plan_of: PlanOf[U], journal: Journal, steadiness: Steadiness,
               loads: Iterable[StressLevel] = IDLE, stop_at_s: float = math.inf,
               may_share: Callable[[Planned[U]], bool] = lambda planned: False) -> Totals[U]:
    """As `measure_loads`, by actors.

    An actor that is lost costs the blocks that it had been given: they go back to those that are still to be measured.

    Args:
        actors: measure the blocks.
        plan_of: the blocks to measure under a load.
        journal, loads, stop_at_s: as for `measure_loads`.
        steadiness: how steady a machine must be.
        may_share: whether a block may be measured while another actor of its host measures one that may, too.

    Raises:
        UserError: no actor is left; it is the last one's error.
    """
    totals, began_with = Totals[U](), list(actors.members)
    for level, background in loads:
        load = (level, background.name if background else "")
        measured = [block for block in journal.blocks if block.load == load]
        plan = plan_of(load, measured)
        if not plan.count:
            continue
        best_ms = {machine: best_canary_ms(block for block in measured if block.machine == machine)
                   for machine in {actor.machine for actor in actors.members}}
        with actors.loaded(level, background, best_ms, stop_at_s):
            began_s = time.monotonic()
            _LoadDriver(actors, load, journal, steadiness, totals, stop_at_s, may_share).measure(plan)
            totals.took_s += time.monotonic() - began_s
    totals.lost = [actor.name for actor in began_with if actor not in actors.members]
    if totals.interrupted:
        log.warning("%d units were interrupted: the machine lacked disk space, memory or open files, or a process could not "
                    "use its device, or was ended from outside; run again to measure them: %s", len(totals.interrupted),
                    cli.first_of(list(totals.interrupted)))
    if totals.unsteady_blocks:
        count = len(totals.blocks)
        log.warning("%d of %d block%s kept, and marked, although the machine was unsteady by more than %.0f %% (by up to "
                    "%.0f %%)", totals.unsteady_blocks, count, "s" * (count != 1), 100 * steadiness.drift,
                    100 * max(block.drift for block in totals.blocks))
    return totals


class _Given(NamedTuple, Generic[U]):
    """A task that an actor was given, and the queue from which it came."""

    task: Task[U]
    queue: deque[Planned[U]]


@dataclass
class _LoadDriver(Generic[U]):
    """Has the blocks of one load measured.

    Attributes:
        actors, journal, steadiness, stop_at_s, may_share: as for `measure_by`.
        load: its level and the name of its background.
        totals: to which is added what was measured.
        fruitless: of each actor, the blocks in a row of which nothing was kept.
        first: every block's first attempt, with its machine.
        steadiest: of each block, by machine and key, the steadiest attempt so far.
    """

    actors: Actors[U]
    load: tuple[float, str]
    journal: Journal
    steadiness: Steadiness
    totals: Totals[U]
    stop_at_s: float
    may_share: Callable[[Planned[U]], bool]
    fruitless: Counter[Actor] = field(default_factory=Counter)
    first: list[tuple[str, Planned[U]]] = field(default_factory=list)
    steadiest: dict[tuple[str, str], Block] = field(default_factory=dict)
    given: defaultdict[Actor, list[_Given[U]]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, plan: Plan[U]) -> None:
        """Each block once; then those during which the machine was unsteady again, on the same machine, since a disturbance has
        often passed by then. Every attempt is kept at once; of several, the steadiest counts."""
        attempts = self.steadiness.attempts_under_load if self.load[0] else self.steadiness.attempts
        text = _described(self.load, self.stop_at_s)
        for _ in cli.progress(self._blocks(plan, 1), text, plan.count):
            pass
        for attempt in range(2, attempts + 1):
            again: defaultdict[str, list[Planned[U]]] = defaultdict(list)
            for machine, planned in self.first:
                if (machine, planned.key) in self.steadiest and self.steadiest[machine, planned.key].unsteady:
                    again[machine].append(planned)
            once_more = Plan(again)
            for _ in cli.progress(self._blocks(once_more, attempt), f"{text}, once more", once_more.count) if again else ():
                pass
        self.totals.blocks += self.steadiest.values()
        self.totals.unsteady_blocks += sum(block.unsteady for block in self.steadiest.values())

    def _blocks(self, plan: Plan[U], attempt: int) -> Iterator[None]:
        """Has the blocks of a plan measured, and yields after each.

        Raises:
            UserError: no actor is left.
        """
        own = {machine: deque(blocks) for machine, blocks in plan.own.items()}
        shared = deque(plan.shared)
        while True:
            if time.monotonic() < self.stop_at_s:
                self._hand_out(own, shared, attempt)
            if not any(self.given.values()):
                break
            for finished in self.actors.wait():
                self._take(finished)
                yield
        if attempt == 1 and (left := sum(len(planned.units) for queue in (*own.values(), shared) for planned in queue)):
            self.totals.left += left
            if time.monotonic() < self.stop_at_s:
                log.warning("%d units are left, since the actors of their machine are lost; run again to measure them", left)

    def _hand_out(self, own: dict[str, deque[Planned[U]]], shared: deque[Planned[U]], attempt: int) -> None:
        """Gives every actor as many tasks as it may have at a time; nobody gets a second one before all have a first."""
        for wanted in range(1, self.actors.tasks_each + 1):
            for actor in self.actors.members:
                if len(self.given[actor]) < wanted and (given := self._next_for(actor, own, shared, attempt)):
                    self.given[actor].append(given)
                    self.actors.begin(actor, given.task)

    def _next_for(self, actor: Actor, own: dict[str, deque[Planned[U]]], shared: deque[Planned[U]],
                  attempt: int) -> _Given[U] | None:
        """The first block that an actor may begin now: of those of its machine alone, else of those that all share."""
        beside = [given.task.planned for other, of_other in self.given.items() for given in of_other
                  if other.host == actor.host and other != actor]
        alone_on_host = not beside
        if not alone_on_host and not all(self.may_share(planned) for planned in beside):
            return None
        for queue in (own.get(actor.machine), shared):
            for place, planned in enumerate(queue or ()):
                if queue is not None and (alone_on_host or self.may_share(planned)):
                    del queue[place]
                    return _Given(Task(planned, attempt), queue)
        return None

    def _take(self, finished: Finished[U]) -> None:
        """Keeps what came of a task. What an actor was given and did not begin or finish goes back into its queue.

        Raises:
            UserError: the actor is lost, and it was the last one.
        """
        actor, task, block, seconds, lost = finished
        if actor not in self.actors.members:  # it was given up, and what it still had is back in the queues
            return
        self.totals.measuring_s += seconds
        place = next(place for place, given in enumerate(self.given[actor]) if given.task is task)
        given = self.given[actor].pop(place)
        if block is None:
            given.queue.appendleft(task.planned)
        else:
            lost = self._keep(actor, task, block)
        if lost is not None:
            self._lose(actor, lost)

    def _keep(self, actor: Actor, task: Task[U], block: Block) -> UserError | None:
        """Adds a block to the journal without the units that were interrupted, unless it would have none; returns an error if
        block after block of this actor was interrupted."""
        planned, attempt = task
        block, interrupted = without_interrupted(block)
        if attempt == 1:
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
        """Goes on without an actor.

        Raises:
            UserError: `error`, if it was the last actor.
        """
        self.actors.members.remove(actor)
        for given in reversed(self.given.pop(actor)):
            given.queue.appendleft(given.task.planned)
        if not self.actors.members:
            raise error
        log.warning("%s is lost, and others measure what it had not finished: %s", actor.name, error)


def _described(load: tuple[float, str], stop_at_s: float) -> str:
    """The text of the progress bar."""
    if math.isinf(stop_at_s):
        return describe_load(*load)
    return f"{describe_load(*load)}, for {max(stop_at_s - time.monotonic(), 0.0):.0f} s at most"
