"""Blocks between canaries and loads one after another, with canaries whose times are made up here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from measuring.bench import Bench, Canary, Steadiness
from measuring.loads import RunningLoad, best_canary_ms, idle, measure_block, measure_loads
from measuring.metrics.sources import open_source
from measuring.pending import Planned, in_blocks, pending, plan_blocks
from measuring.stress import Stress
from records.backgrounds import COMPUTE, Background
from records.blocks import Block, Journal
from records.measurement import Measurement
from utils.errors import UserError


@dataclass(frozen=True)
class Named:
    id: str


def timed(name: str) -> Measurement:
    return Measurement(subject="made up", id=name, label="run", context="alone", place="alone", samples_ms=(1.0,))


def bench_with(times_ms: Sequence[float], **steadiness: float) -> Bench:
    """A bench whose canary takes these times, one after another, and fails when it is asked for more."""
    remaining_ms = list(times_ms)
    return Bench("cpu", "here", lambda loaded: [remaining_ms.pop(0)], steadiness=Steadiness.model_validate(
        {"drift": 0.05, "patience_s": 0.0, **steadiness}))


# one block ---------------------------------------------------------------------------------------------------------------

def test_a_steady_block_is_measured_once() -> None:
    bench = bench_with([1.0, 1.04])
    block = measure_block(bench, "k", lambda: [timed("a")], idle(bench))
    assert (block.attempts, block.key, block.load, block.machine) == (1, "k", (0.0, ""), "here")
    assert [m.id for m in block.measurements] == ["a"]
    assert (block.background, block.during, block.background_s, block.during_s) == ({}, {}, 0.0, 0.0)  # there is no source


@pytest.fixture
def bench() -> Bench:
    return bench_with([1.0, 1.3, 1.0, 1.2, 1.0, 1.4], attempts=3)


def test_the_steadiest_of_the_attempts_is_kept(bench: Bench) -> None:
    runs: list[int] = []

    def time_units() -> list[Measurement]:
        runs.append(1)
        return [timed(f"in attempt {len(runs)}")]

    block = measure_block(bench, "k", time_units, idle(bench))
    assert len(runs) == block.attempts == 3
    assert block.measurements[0].id == "in attempt 2"
    assert (block.canary_before_ms, block.canary_after_ms, block.canary_best_ms) == (1.0, 1.2, 1.0)


def test_a_block_waits_until_the_machine_is_at_its_best_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("measuring.bench.PAUSE_S", 0.001)
    bench = bench_with([2.0, 1.5, 1.05, 1.05], patience_s=60.0)
    assert measure_block(bench, "k", list, idle(bench, best_canary_ms=1.0)).canary_before_ms == 1.05
    bench = bench_with([2.0, 2.0], attempts=1)  # no patience: the block is measured and reported as unsteady
    assert measure_block(bench, "k", list, idle(bench, best_canary_ms=1.0)).drift == pytest.approx(0.95)


def test_under_load_the_canary_is_a_mean_and_has_no_best() -> None:
    loads_asked: list[bool] = []

    def canary_ms(loaded: bool) -> list[float]:
        loads_asked.append(loaded)
        return [1.0, 1.0, 4.0]

    bench = Bench("cpu", "here", canary_ms, steadiness=Steadiness(attempts_under_load=1))
    load = RunningLoad(Canary(canary_ms, loaded=True), Stress(0.0, None), 0.5, "compute")
    block = measure_block(bench, "k", list, load)
    assert (block.canary_before_ms, block.canary_best_ms, block.load) == (2.0, 0.0, (0.5, "compute"))
    assert loads_asked == [True, True]


def test_a_window_that_is_too_short_for_the_source_is_refused() -> None:
    with pytest.raises(UserError, match=r"window_s 0\.01: psutil needs at least 0\.2 s"):
        Bench("cpu", "here", lambda loaded: [1.0], open_source("cpu", []), window_s=0.01)


# many --------------------------------------------------------------------------------------------------------------------

def test_each_load_is_started_once_and_only_where_something_is_missing() -> None:
    """The best canary of an idle device is known from the journal, and only from this machine's blocks."""
    units = [Named(name) for name in "abcde"]
    bench = Bench("cpu", "here", lambda loaded: [1.0], steadiness=Steadiness(drift=0.05))
    loads: list[tuple[float, Background | None]] = [(0.0, None), (0.5, COMPUTE)]
    started: list[tuple[float, str]] = []

    @contextmanager
    def start(level: float, background: Background | None) -> Iterator[Stress]:
        started.append((level, background.name if background else ""))
        yield Stress(0.0, None)

    def blocks_of(load: tuple[float, str], blocks: Sequence[Block]) -> list[Planned[Named]]:
        return plan_blocks(units, blocks, "here", size=2)

    journal = Journal()
    totals = measure_loads(bench, blocks_of, lambda named, level: [timed(unit.id) for unit in named],
                           journal, loads, start)
    assert started == [(0.0, ""), (0.5, "compute")]
    assert [len(block.measurements) for block in journal.blocks] == [2, 2, 1] * 2
    assert {(block.load, m.id) for block in journal.blocks for m in block.measurements} == {
        (load, name) for load in started for name in "abcde"}
    assert (len(totals.units), totals.unsteady_blocks, totals.blocks) == (10, 0, journal.blocks)
    assert totals.measuring_s > 0
    journal.blocks = [block for block in journal.blocks if block.level]
    started.clear()
    measure_loads(bench, blocks_of, lambda named, level: [timed(unit.id) for unit in named],
                  journal, loads, start)
    assert started == [(0.0, "")]
    elsewhere = journal.blocks[-1].model_copy(update={"machine": "elsewhere", "canary_before_ms": 0.1})
    assert best_canary_ms([*journal.blocks, elsewhere]) == 0.1
    assert best_canary_ms([]) == 0.0


def test_the_order_mixes_kinds_and_is_the_same_each_time() -> None:
    units = [Named(f"{kind}{number}") for kind in "ab" for number in range(20)]
    planned = in_blocks(units, 10)
    assert planned == in_blocks(units, 10)
    assert {unit for block in planned for unit in block.units} == set(units)
    assert all({unit.id[0] for unit in block.units} == {"a", "b"} for block in planned)
    assert planned[0].key == f"{planned[0].units[0].id} and 9 more"


def test_the_caller_says_what_counts_as_measured() -> None:
    """A unit with only its label `energy` still lacks its label `run`."""
    energy = timed("a").model_copy(update={"label": "energy"})
    bench = bench_with([1.0, 1.0])
    block = measure_block(bench, "k", lambda: [energy, timed("b")], idle(bench))
    units = [Named("a"), Named("b"), Named("c")]
    assert pending(units, [block]) == [Named("c")]
    assert pending(units, [block], lambda m: m.label == "run") == [Named("a"), Named("c")]
