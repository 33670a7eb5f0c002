"""Timing while the host is undisturbed, with a made-up host that is disturbed at known times."""

from __future__ import annotations

import itertools
import time

import pytest

from benchmark.dataset import DISTURBANCE_ADMITTED
from benchmark.protocol import Effort
from benchmark.quiet_host import HostProbe, host_probe, quiet_samples_ms

FAST_S, SLOWER = 0.0002, 1.5
EFFORT = Effort(budget_s=0.05, least_runs=5, most_runs=1000)


class Host:
    """Disturbed for the first part of every period: whatever it dispatches then takes longer."""

    def __init__(self, period_s: float, disturbed_share: float) -> None:
        self.began, self.period_s, self.disturbed_share = time.monotonic(), period_s, disturbed_share

    def factor(self) -> float:
        phase = (time.monotonic() - self.began) % self.period_s / self.period_s
        return SLOWER if phase < self.disturbed_share else 1.0

    def dispatch_s(self) -> float:
        return FAST_S * self.factor()

    def run_s(self) -> float:
        time.sleep(0.001)
        return 0.001 * self.factor()


def test_only_undisturbed_windows_count() -> None:
    host = Host(period_s=0.2, disturbed_share=0.5)
    samples, disturbance, _ = quiet_samples_ms(
        HostProbe(host.dispatch_s, [FAST_S] * 100), {"latency": host.run_s}, EFFORT)["latency"]
    assert len(samples) >= 40
    assert sum(sample == 1.0 for sample in samples) >= 0.95 * len(samples)  # a window may end as a disturbance begins
    assert disturbance <= DISTURBANCE_ADMITTED


def test_a_host_that_is_never_undisturbed() -> None:
    host = Host(period_s=1.0, disturbed_share=1.0)
    began = time.monotonic()
    samples, disturbance, probe_us = quiet_samples_ms(
        HostProbe(host.dispatch_s, [FAST_S] * 100), {"latency": host.run_s}, EFFORT)["latency"]
    assert probe_us == pytest.approx(1e6 * FAST_S * SLOWER)
    assert time.monotonic() - began < 2.0
    assert disturbance == pytest.approx(SLOWER - 1)
    assert len(samples) >= EFFORT.least_runs
    assert set(samples) == {1.5}


def test_several_in_turn() -> None:
    host = Host(period_s=1.0, disturbed_share=0.0)
    order: list[str] = []

    def noted(name: str) -> float:
        order.append(name)
        return host.run_s()

    found = quiet_samples_ms(HostProbe(host.dispatch_s), {"a": lambda: noted("a"), "b": lambda: noted("b")}, EFFORT)
    assert {name: one.disturbance for name, one in found.items()} == {"a": 0.0, "b": 0.0}
    assert len([1 for before, after in itertools.pairwise(order) if before != after]) >= 3


def test_the_real_probe() -> None:
    """On a CPU here; on a GPU it is the same graph, dispatched."""
    probe = host_probe("cpu")
    assert 0 < probe.good_s < 0.1
    assert probe.reading_s() >= probe.sorted_s[0]
    assert probe is host_probe("cpu")


def test_a_few_odd_readings_are_no_measure() -> None:
    assert HostProbe(lambda: FAST_S, [0.8 * FAST_S] * 9 + [FAST_S] * 91).good_s == FAST_S


@pytest.mark.parametrize("most", [7, 20])
def test_no_more_runs_than_asked_for(most: int) -> None:
    host = Host(period_s=1.0, disturbed_share=0.0)
    effort = Effort(budget_s=10.0, least_runs=5, most_runs=most)
    samples, _, _ = quiet_samples_ms(HostProbe(host.dispatch_s), {"x": host.run_s}, effort)["x"]
    assert len(samples) == most
