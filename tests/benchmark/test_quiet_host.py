"""Timing while the host is undisturbed, with a made-up host that is disturbed at known times."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable
from functools import partial

import pytest

from measuring.bench import Effort
from measuring.quiet_host import HostProbe, quiet_samples_ms
from records.labels import DISTURBANCE_ADMITTED
from runtimes.ort.probes import host_probe

FAST_S, SLOWER = 0.0002, 1.5
ODD_S = FAST_S * 5 / 6
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

    timed = {name: partial(noted, name) for name in ("a", "b")}
    found = quiet_samples_ms(HostProbe(host.dispatch_s, [FAST_S] * 100), timed, EFFORT)
    assert {name: one.disturbance for name, one in found.items()} == {"a": 0.0, "b": 0.0}
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


def test_a_long_disturbance_is_not_taken_for_usual() -> None:
    """However many readings it leaves, a good one stays what it was."""
    probe = HostProbe(lambda: FAST_S, [FAST_S] * 100)
    read(probe, [SLOWER * FAST_S] * 2000)
    assert probe.good_s == FAST_S
    _, disturbance, _ = quiet_samples_ms(probe, {"x": Host(period_s=1.0, disturbed_share=1.0).run_s}, EFFORT)["x"]
    assert disturbance == pytest.approx(SLOWER - 1)


def test_a_first_look_that_was_disturbed_is_mended() -> None:
    """As soon as a tenth of the readings tell better; a later disturbance changes nothing more."""
    probe = HostProbe(lambda: FAST_S, [SLOWER * FAST_S] * 100)
    read(probe, [FAST_S] * 11)
    assert probe.good_s == SLOWER * FAST_S
    read(probe, [FAST_S, *[SLOWER * FAST_S] * 500])
    assert probe.good_s == FAST_S


def test_odd_readings_are_no_measure_in_the_long_run_either() -> None:
    """One in twenty, at any time, takes a sixth less."""
    draw = random.Random(0)
    probe = HostProbe(lambda: FAST_S, [FAST_S] * 100)
    read(probe, [ODD_S if draw.random() < 0.05 else FAST_S for _ in range(5000)])
    assert (probe.good_s, probe.sorted_s[0]) == (FAST_S, ODD_S)


def test_a_few_odd_readings_are_no_measure() -> None:
    assert HostProbe(lambda: FAST_S, [0.8 * FAST_S] * 9 + [FAST_S] * 91).good_s == FAST_S


@pytest.mark.parametrize("most", [7, 20])
def test_no_more_runs_than_asked_for(most: int) -> None:
    host = Host(period_s=1.0, disturbed_share=0.0)
    effort = Effort(budget_s=10.0, least_runs=5, most_runs=most)
    samples, _, _ = quiet_samples_ms(HostProbe(host.dispatch_s, [FAST_S]), {"x": host.run_s}, effort)["x"]
    assert len(samples) == most
