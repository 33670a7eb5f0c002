"""The one timer: how often it runs, and what counts, by a made-up clock."""

from __future__ import annotations

import pytest

from hase.utils import timing
from hase.utils.timing import time_runs_ms, timed, turns, warm_up


class Clock:
    """A clock that moves only while something runs."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def run(self, seconds: float = 0.25) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made_up = Clock()
    monkeypatch.setattr(timing, "time", made_up)
    return made_up


@pytest.mark.parametrize(("least", "seconds", "most", "count"), [
    (3, 0.0, 9, 3), (3, 1.0, 9, 4), (1, 5.0, 9, 9), (0, 0.0, 9, 0), (5, 1.0, 2, 5)])
def test_turns_are_at_least_so_many_and_as_many_as_begin_in_time(clock: Clock, least: int, seconds: float, most: int,
                                                                 count: int) -> None:
    taken = []
    for number in turns(least, seconds, most):
        clock.run()
        taken.append(number)
    assert taken == list(range(count))


def test_every_run_is_kept_but_those_that_warm_up(clock: Clock) -> None:
    lengths_s = iter([9.0, 9.0, 0.5, 0.25, 0.5])
    assert time_runs_ms(lambda: clock.run(next(lengths_s)), 3, warmup=2) == [500.0, 250.0, 500.0]
    assert len(time_runs_ms(clock.run, 1, 2.0)) == 8


def test_what_comes_before_a_run_is_not_timed(clock: Clock) -> None:
    run_s = timed(clock.run, before=lambda: clock.run(100.0))
    assert [run_s(), run_s()] == [0.25, 0.25]


def test_warming_up_tells_how_often_and_how_long_the_last_run_took(clock: Clock) -> None:
    assert warm_up(clock.run, 2) == (2, 0.25)
    assert warm_up(clock.run, 2, 1.0) == (4, 0.25)
    assert warm_up(clock.run, 0) == (0, 0.0)
