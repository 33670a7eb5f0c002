"""Timing while the host is undisturbed, with a made-up host that is disturbed at known times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from hase.benchmark.measuring import quiet_host
from hase.benchmark.measuring.quiet_host import HostProbe, HostSamples, StallWatch, quiet_samples_ms
from hase.benchmark.ort.probes import host_probe
from hase.records.measurement import DISTURBANCE_ADMITTED, Effort
from hase.utils import timing

pytestmark = pytest.mark.measuring

FAST_S, SLOWER = 0.0002, 1.5
ODD_S = FAST_S * 5 / 6
EFFORT = Effort(budget_s=0.05, least_runs=5, most_runs=1000)


class Host:
    """Stands in for a host and for the clock. Disturbed for the first part of every period: what it dispatches takes longer."""

    def __init__(self, period_s: float, disturbed_share: float) -> None:
        self.now_s, self.period_s, self.disturbed_share = 0.0, period_s, disturbed_share

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic

    def _after(self, undisturbed_s: float) -> float:
        time_s = undisturbed_s * (SLOWER if self.now_s % self.period_s / self.period_s < self.disturbed_share else 1.0)
        self.now_s += time_s
        return time_s

    def dispatch_s(self) -> float:
        return self._after(FAST_S)

    def run_s(self) -> float:
        return self._after(0.001)


StartHost = Callable[..., Host]


@pytest.fixture
def start_host(monkeypatch: pytest.MonkeyPatch) -> StartHost:
    """`start_host(period_s, disturbed_share)` is a host whose clock the measuring loop reads."""
    def start(period_s: float = 1.0, disturbed_share: float = 0.0) -> Host:
        host = Host(period_s, disturbed_share)
        for module in (quiet_host, timing):
            monkeypatch.setattr(module, "time", host)
        return host

    return start


def quiet_samples(host: Host, effort: Effort = EFFORT) -> HostSamples:
    """Of the host's runs, where its good readings are known."""
    return quiet_samples_ms(HostProbe(host.dispatch_s, [FAST_S] * 100), {"latency": host.run_s}, effort)["latency"]


def test_only_undisturbed_windows_count(start_host: StartHost) -> None:
    samples, disturbance, _ = quiet_samples(start_host(period_s=0.2, disturbed_share=0.5))
    assert len(samples) >= 40
    assert sum(sample == 1.0 for sample in samples) >= 0.95 * len(samples)  # a window may end as a disturbance begins
    assert disturbance <= DISTURBANCE_ADMITTED


def test_a_host_that_is_never_undisturbed(start_host: StartHost) -> None:
    host = start_host(disturbed_share=1.0)
    samples, disturbance, probe_us = quiet_samples(host)
    assert probe_us == pytest.approx(1e6 * FAST_S * SLOWER)
    assert host.now_s == pytest.approx(quiet_host.PATIENCE * EFFORT.budget_s, abs=3 * quiet_host.SLOT_S)
    assert disturbance == pytest.approx(SLOWER - 1)
    assert len(samples) >= EFFORT.least_runs
    assert set(samples) == {1.5}


def test_several_in_turn(start_host: StartHost) -> None:
    host = start_host()
    order: list[str] = []

    def noted(name: str) -> float:
        order.append(name)
        return host.run_s()

    timed = {name: partial(noted, name) for name in ("a", "b")}
    results = quiet_samples_ms(HostProbe(host.dispatch_s, [FAST_S] * 100), timed, EFFORT)
    assert {name: samples.disturbance for name, samples in results.items()} == {"a": 0.0, "b": 0.0}
    assert len([1 for before, after in itertools.pairwise(order) if before != after]) >= 3


def test_the_real_probe() -> None:
    """On a CPU here; on a GPU it is the same graph, dispatched."""
    probe = host_probe("cpu")
    assert 0 < probe.good_s < 0.1
    assert probe.reading_s() >= probe.sorted_s[0]
    assert probe is host_probe("cpu")


def read(probe: HostProbe, taken_s: Iterable[float]) -> None:
    """Made-up further readings."""
    for time_s in taken_s:
        probe.dispatch_s = partial(float, time_s)
        probe.reading_s()


SLOW_S = SLOWER * FAST_S
DRAW = random.Random(0)


@pytest.mark.parametrize(("first_s", "then_s", "good_s"), [
    pytest.param([FAST_S] * 100, [SLOW_S] * 2000, FAST_S, id="a long disturbance does not count as normal"),
    pytest.param([SLOW_S] * 100, [FAST_S] * 11, SLOW_S, id="too few better ones to correct disturbed first ones"),
    pytest.param([SLOW_S] * 100, [FAST_S] * 12 + [SLOW_S] * 500, FAST_S, id="a tenth are better, and a later disturbance"),
    pytest.param([FAST_S] * 100, [ODD_S if DRAW.random() < 0.05 else FAST_S for _ in range(5000)], FAST_S, id="one in 20 odd"),
    pytest.param([0.8 * FAST_S] * 9 + [FAST_S] * 91, [], FAST_S, id="a few odd first ones"),
])
def test_what_a_good_reading_is(first_s: list[float], then_s: list[float], good_s: float) -> None:
    probe = HostProbe(lambda: FAST_S, first_s)
    read(probe, then_s)
    assert probe.good_s == good_s
    assert probe.sorted_s[0] == min(first_s + then_s)


@pytest.mark.parametrize("most", [7, 20])
def test_no_more_runs_than_asked_for(most: int, start_host: StartHost) -> None:
    assert len(quiet_samples(start_host(), effort=Effort(budget_s=10.0, least_runs=5, most_runs=most)).samples_ms) == most


def test_stalls_are_noted() -> None:
    """Made-up dispatches: two of them stall, by 4 and by 9 ms; one that takes 2 ms longer is only slow."""
    times = iter([0.3e-3, 4.3e-3, 2.3e-3, 0.3e-3, 9.3e-3])
    watch = StallWatch(lambda: next(times), 0.3e-3)
    assert [watch() for _ in range(5)] == [0.3e-3, 4.3e-3, 2.3e-3, 0.3e-3, 9.3e-3]
    assert watch.stalls_s == pytest.approx([4e-3, 9e-3])
    assert watch.dispatched_s == pytest.approx(16.5e-3)
