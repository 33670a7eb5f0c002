"""The driver with several actors. They are stand-ins that measure nothing, for the GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from hase.benchmark.measuring.blocks import Attempt, PlannedBlock, Steadiness
from hase.benchmark.measuring.driver import Actor, BlockPlan, Driver, Finished, Totals
from hase.records.measurement import Background, Block, Journal, Measurement, Status, now
from hase.utils.errors import UserError

A, B, C = Actor("a", "gpu a", "host 1"), Actor("b", "gpu b", "host 1"), Actor("c", "gpu c", "host 2")


@dataclass(frozen=True)
class Named:
    id: str


@dataclass
class StandIns:
    """Actors of which each measures a block while the driver waits once.

    Attributes:
        lost_at: of an actor, at which of its blocks it is lost, counted from 0.
        drift: of a block's canaries, by actor and attempt.
        status: of what an actor measures.
        together: what was under way, and by whom, at each wait.
    """

    members: list[Actor]
    blocks_each: int = 2
    lost_at: Mapping[Actor, int] = field(default_factory=dict)
    drift: Callable[[Actor, int], float] = lambda actor, attempt: 0.0
    status: Mapping[Actor, Status] = field(default_factory=dict)
    together: list[list[tuple[Actor, Attempt[Named]]]] = field(default_factory=list)
    under_way: list[tuple[Actor, Attempt[Named]]] = field(default_factory=list)
    begun: dict[Actor, int] = field(default_factory=dict)

    @contextmanager
    def loaded(self, level: float, background: Background | None, best_canary_ms: Mapping[str, float],
               stop_at_s: float) -> Iterator[None]:
        yield

    def begin(self, actor: Actor, attempt: Attempt[Named]) -> None:
        assert actor in self.members
        self.under_way.append((actor, attempt))

    def wait(self) -> Sequence[Finished[Named]]:
        self.together.append(list(self.under_way))
        finished = []
        for actor in [*dict.fromkeys(actor for actor, _ in self.under_way)]:
            attempt = next(attempt for other, attempt in self.under_way if other == actor)
            number = self.begun[actor] = self.begun.get(actor, -1) + 1
            if number == self.lost_at.get(actor):
                self.under_way = [(other, of_other) for other, of_other in self.under_way if other != actor]
                finished.append(Finished(actor, attempt, None, lost=UserError("its node has ended")))
                continue
            self.under_way.remove((actor, attempt))
            finished.append(Finished(actor, attempt, self.block(actor, attempt), 1.0))
        return finished

    def block(self, actor: Actor, attempt: Attempt[Named]) -> Block:
        status = self.status.get(actor, "ok")
        came: dict[str, Any] = {"samples_ms": (1.0,)} if status == "ok" else {"error": "no memory left"}
        measurements = tuple(Measurement(subject="kernel", id=unit.id, label="run", context="alone", place="alone",
                                         started=now(), ended=now(), status=status, **came) for unit in attempt.planned.units)
        return Block(level=0.0, key=attempt.planned.key, background={}, during={}, canary_before_ms=1.0,
                     canary_after_ms=1.0 + self.drift(actor, attempt.number), attempts=attempt.number, machine=actor.machine,
                     measurements=measurements)


def blocks(names: Iterable[str]) -> list[PlannedBlock[Named]]:
    return [PlannedBlock(name, [Named(name)]) for name in names]


def measure(actors: StandIns, plan: BlockPlan[Named], journal: Journal | None = None,
            attempts: int = 1) -> tuple[Totals[Named], list[Block]]:
    """Blocks of a name `gpu…` may be measured while another device of the host measures."""
    journal = journal or Journal()
    driver = Driver[Named](actors, journal, Steadiness(attempts=attempts))
    shared = [planned._replace(shares_host=planned.key.startswith("gpu")) for planned in plan.shared]
    driver.measure(0.0, None, BlockPlan(plan.own, shared))
    return driver.finish(), journal.blocks


def who_measured(measured: Iterable[Block]) -> dict[str, list[str]]:
    return {block.key: [other.machine for other in measured if other.key == block.key] for block in measured}


def test_actors_share_the_blocks_and_each_has_two_at_a_time() -> None:
    actors = StandIns([A, C])
    totals, measured = measure(actors, BlockPlan({}, blocks("rstuvw")))
    assert {key: len(machines) for key, machines in who_measured(measured).items()} == dict.fromkeys("rstuvw", 1)
    assert {block.machine for block in measured} == {"gpu a", "gpu c"}
    assert [(actor, attempt.planned.key) for actor, attempt in actors.together[0]] == [(A, "r"), (C, "s"), (A, "t"), (C, "u")]
    assert (totals.left, totals.lost, totals.measuring_s, len(totals.units)) == (0, [], 6.0, 6)


def test_what_a_machine_is_to_measure_itself_no_other_does() -> None:
    _, measured = measure(StandIns([A, C]), BlockPlan({"gpu a": blocks("rs"), "gpu c": blocks("rt")}, blocks("u")))
    found = who_measured(measured)
    assert {key: sorted(machines) for key, machines in found.items() if key != "u"} == {
        "r": ["gpu a", "gpu c"], "s": ["gpu a"], "t": ["gpu c"]}
    assert len(found["u"]) == 1


def test_a_lost_actor_costs_only_what_it_had_been_given(caplog: pytest.LogCaptureFixture) -> None:
    actors = StandIns([A, C], lost_at={C: 1})
    totals, measured = measure(actors, BlockPlan({}, blocks("rstuvwxy")))
    assert {key: len(machines) for key, machines in who_measured(measured).items()} == dict.fromkeys("rstuvwxy", 1)
    assert [block.machine for block in measured].count("gpu c") == 1
    assert (totals.lost, totals.left) == (["c"], 0)
    assert "c is lost, and others measure what it had not finished: its node has ended" in caplog.text


def test_what_only_a_lost_machine_could_measure_is_left(caplog: pytest.LogCaptureFixture) -> None:
    totals, measured = measure(StandIns([A, C], lost_at={C: 0}), BlockPlan({"gpu a": blocks("rs"), "gpu c": blocks("tu")}))
    assert [block.key for block in measured] == ["r", "s"]
    assert totals.left == 2
    assert "2 units are left, since the actors of their machine are lost" in caplog.text
    twin = Actor("c2", "gpu c", "host 2")  # a second actor of the machine
    totals, measured = measure(StandIns([C, twin], lost_at={C: 0}), BlockPlan({"gpu c": blocks("tu")}))
    assert sorted(block.key for block in measured) == ["t", "u"]


def test_the_last_actors_error_ends_all_and_what_was_measured_is_kept() -> None:
    journal = Journal()
    with pytest.raises(UserError, match="its node has ended"):
        measure(StandIns([A, C], lost_at={A: 1, C: 2}), BlockPlan({}, blocks("rstuvwxy")), journal)
    assert len(journal.blocks) == 3


def test_an_actor_whose_blocks_are_all_interrupted_is_given_up() -> None:
    totals, measured = measure(StandIns([A, C], status={C: "interrupted"}), BlockPlan({}, blocks("rstuvwxyz")))
    assert totals.lost == ["c"]
    assert {block.machine for block in measured} == {"gpu a"}
    assert len(totals.interrupted) == 3
    assert {block.key for block in measured} | totals.interrupted.keys() == set("rstuvwxyz")


def test_an_unsteady_block_is_measured_again_on_its_machine() -> None:
    actors = StandIns([A, C], drift=lambda actor, attempt: 0.3 if actor == C and attempt < 3 else 0.0)
    totals, measured = measure(actors, BlockPlan({}, blocks("rstu")), attempts=3)
    by_machine = who_measured(measured)
    assert sorted(map(len, by_machine.values())) == [1, 1, 3, 3]
    assert all(len(set(machines)) == 1 for machines in by_machine.values())
    assert totals.unsteady_blocks == 0


def test_actors_of_one_host_measure_together_only_what_may_share_it() -> None:
    """Beside another block, nobody of its host measures. Another host does not matter."""
    actors, names = StandIns([A, B, C]), ["model 1", "gpu 1", "gpu 2", "model 2", "gpu 3", "gpu 4", "model 3"]
    _, measured = measure(actors, BlockPlan({}, blocks(names)))
    assert sorted(block.key for block in measured) == sorted(names)
    for moment in actors.together:
        on_host_1 = {actor: [attempt.planned.key for other, attempt in moment if other == actor] for actor in (A, B)}
        if all(on_host_1.values()):
            assert all(key.startswith("gpu") for keys in on_host_1.values() for key in keys)
    assert len({block.machine for block in measured}) >= 2
    actors = StandIns([A, B])
    measure(actors, BlockPlan({}, blocks(["gpu 1", "gpu 2", "gpu 3"])))
    assert {actor for actor, _ in actors.together[0]} == {A, B}
