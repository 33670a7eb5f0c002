"""Probes of a host and of a shared device: timing while the host is undisturbed, with a made-up host that is disturbed at known
times; and the sharing probe, with real sessions on the CPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from command import printed

from hase.benchmark.load.stress import stress
from hase.benchmark.measuring import quiet_host
from hase.benchmark.measuring.quiet_host import HostProbe, HostSamples, StallWatch, quiet_samples_ms
from hase.benchmark.ort.probes import LEAST_RUNS, LONG_PRODUCTS, LONG_SIDE, SharingProbe
from hase.kernel_model.building.dummy_data import random_floats
from hase.records.measurement import COMPUTE, DISTURBANCE_ADMITTED, Effort
from hase.records.probe_reading import ProbedRuns, ProbeReading, read_reading
from hase.utils import files, timing
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine
from hase.utils.paths import Workspace

pytestmark = pytest.mark.measuring

FAST_S, SLOWER = 0.0002, 1.5
ODD_S = FAST_S * 5 / 6
EFFORT = Effort(budget_s=0.05, least_runs=5, most_runs=1000)


class Host:
    """Stands in for a host and the clock. Disturbed for the first part of every period: what it dispatches takes longer."""

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


def quiet_samples(host: Host) -> HostSamples:
    """Of the host's runs, where its good readings are known."""
    return quiet_samples_ms(HostProbe(host.dispatch_s, [FAST_S] * 100), {"latency": host.run_s}, EFFORT)["latency"]


@pytest.mark.slow
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
    assert (len(samples) >= EFFORT.least_runs, set(samples)) == (True, {1.5})


SLOW_S = SLOWER * FAST_S
DRAW = random.Random(0)


@pytest.mark.parametrize(("first_s", "then_s", "good_s"), [
    pytest.param([FAST_S] * 100, [SLOW_S] * 2000, FAST_S, id="a long disturbance does not count as normal"),
    pytest.param([SLOW_S] * 100, [FAST_S] * 11, SLOW_S, id="too few better ones to correct disturbed first ones"),
    pytest.param([SLOW_S] * 100, [FAST_S] * 12 + [SLOW_S] * 500, FAST_S, id="a tenth are better, and a later disturbance"),
    pytest.param([FAST_S] * 100, [ODD_S if DRAW.random() < 0.05 else FAST_S for _ in range(5000)], FAST_S, id="one in 20 odd"),
])
def test_what_a_good_reading_is(first_s: list[float], then_s: list[float], good_s: float) -> None:
    probe = HostProbe(lambda: FAST_S, first_s)
    for time_s in then_s:
        probe.dispatch_s = partial(float, time_s)
        probe.reading_s()
    assert (probe.good_s, probe.sorted_s[0]) == (good_s, min(first_s + then_s))


@pytest.mark.slow
def test_stalls_are_noted() -> None:
    """Made-up dispatches: two of them stall, by 4 and by 9 ms; one that takes 2 ms longer is only slow."""
    times = iter([0.3e-3, 4.3e-3, 2.3e-3, 0.3e-3, 9.3e-3])
    watch = StallWatch(lambda: next(times), 0.3e-3)
    assert [watch() for _ in range(5)] == [0.3e-3, 4.3e-3, 2.3e-3, 0.3e-3, 9.3e-3]
    assert watch.stalls_s == pytest.approx([4e-3, 9e-3])
    assert watch.dispatched_s == pytest.approx(16.5e-3)


def made_up(tiny_ms: list[float], long_ms: list[float]) -> ProbeReading:
    """A reading with these latencies (the starts do not matter)."""
    tiny, long = (ProbedRuns(starts_ms=tuple(range(len(taken))), latencies_ms=tuple(taken)) for taken in (tiny_ms, long_ms))
    return ProbeReading(machine_uuid="GPU-0", device="cuda", sharing="time_slices", started="2026-01-01T00:00:00+00:00",
                        seconds=0.1, tiny=tiny, long=long)


def check_order(reading: ProbeReading) -> None:
    """Runs follow one another, the long piece's after the tiny's, and none begins before the last has ended."""
    runs = [*zip(reading.tiny.starts_ms, reading.tiny.latencies_ms, strict=True),
            *zip(reading.long.starts_ms, reading.long.latencies_ms, strict=True)]
    assert runs[0][0] >= 0.0
    assert all(latency > 0.0 for _, latency in runs)
    assert all(later >= start + latency for (start, latency), (later, _) in pairwise(runs))


def test_a_reading() -> None:
    opened = SharingProbe("cpu")
    reading = opened.read(0.1)
    check_order(reading)
    assert (reading.machine_uuid, reading.sharing, reading.seconds) == (machine("cpu").uuid, None, 0.1)
    assert min(len(reading.tiny.starts_ms), len(reading.long.starts_ms)) >= LEAST_RUNS
    assert reading.tiny.starts_ms[-1] < reading.long.starts_ms[0]
    assert reading.long.starts_ms[0] >= 50.0  # half of the time is the tiny piece's
    assert min(reading.tiny.latencies_ms) < min(reading.long.latencies_ms)
    short = opened.read(1e-6)  # the least runs take the time that they need
    assert len(short.tiny.latencies_ms) == len(short.long.latencies_ms) == LEAST_RUNS
    for seconds in (0.0, math.nan, math.inf):
        with pytest.raises(UserError, match="can't run for"):
            opened.read(seconds)
    for side in LONG_SIDE.values():  # numbers that overflow or vanish would not cost what others do
        weights = random_floats((side, side), "float32")
        rows = weights[:8]
        for _ in range(LONG_PRODUCTS):
            rows = rows @ weights
        assert 1e-3 < np.abs(rows).max() < 1e30


@pytest.mark.slow
def test_the_script_alone_and_the_probe_beside_a_real_load(tmp_path: Path) -> None:
    path = tmp_path / "reading.json"
    reading = ProbeReading.model_validate_json(printed(
        "benchmark/sharing_probe.py", "--device", "cpu", "--seconds", "0.2", "--json", "--out", path, "--workspace", tmp_path))
    check_order(reading)
    assert read_reading(path) == reading
    assert "waited" not in path.read_text()  # nothing derived is stored
    with stress(1.0, COMPUTE, "cpu", workspace=Workspace(tmp_path)):
        beside = SharingProbe("cpu").read(0.2)
    assert sum(beside.long.latencies_ms) / len(beside.long.latencies_ms) > min(reading.long.latencies_ms)


def test_files_that_are_refused(tmp_path: Path) -> None:
    path, document = tmp_path / "reading.json", made_up([0.016], [0.5]).model_dump(mode="json")
    for changes, message in (
            ({"version": 3}, r"version 3, this Hase reads version 2; make it anew: .*sharing_probe.py --out"),
            ({"sharing": "exclusive"}, "damaged at sharing"),
            ({"tiny": {"starts_ms": [0.0, 1.0], "latencies_ms": [1.0]}}, "damaged at tiny")):
        files.write_json(path, document | changes)
        with pytest.raises(UserError, match=message):
            read_reading(path)


@pytest.mark.parametrize(("tiny_ms", "long_ms", "waited"), [
    pytest.param([0.016] * 100 + [0.05], [0.48] * 10 + [0.5], (0.0, 0.0), id="a free GPU"),
    # as seen on an H200 beside a load that is on for half of each 20 ms: 97 % of the tiny runs wait for nothing
    pytest.param([0.016] * 97 + [0.74] * 3, [0.48] * 6 + [1.3] * 3, (2.22 / 3.772, 3.9 / 6.78), id="in phases"),
    # all runs are alike, but none is one of a free device: no idle reading is needed
    pytest.param([2.42] * 20, [2.9] * 17, (1.0, 1.0), id="a load without gaps"),
])
def test_how_long_was_waited(tiny_ms: list[float], long_ms: list[float], waited: tuple[float, float]) -> None:
    assert made_up(tiny_ms, long_ms).waited == {"tiny": pytest.approx(waited[0]), "long": pytest.approx(waited[1])}
