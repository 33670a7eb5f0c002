"""The sharing probe: real sessions on the CPU, alone and beside a real load, and what its readings show."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from command import printed
from pydantic import ValidationError

from hase.benchmark import sharing_probe
from hase.benchmark.load.stress import stress
from hase.benchmark.ort.probes import LEAST_RUNS, LONG_PRODUCTS, LONG_SIDE, SharingProbe, _kept, probe
from hase.benchmark.sharing_probe import rows
from hase.kernel_model.building.dummy_data import random_floats
from hase.records.measurement import COMPUTE
from hase.records.probe_reading import ProbedRuns, ProbeReading, read_reading
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import SharingMode, machine
from hase.utils.paths import Workspace

pytestmark = pytest.mark.measuring


@pytest.fixture(scope="module")
def opened() -> SharingProbe:
    return SharingProbe("cpu")


def made_up(tiny_ms: list[float], long_ms: list[float], sharing: SharingMode | None = "time_slices") -> ProbeReading:
    """A reading with these latencies (the starts do not matter)."""
    tiny, long = (ProbedRuns(starts_ms=tuple(range(len(taken))), latencies_ms=tuple(taken)) for taken in (tiny_ms, long_ms))
    return ProbeReading(machine_uuid="GPU-0", device="cuda", sharing=sharing,
                        started="2026-01-01T00:00:00+00:00", seconds=0.1, tiny=tiny, long=long)


def check_order(reading: ProbeReading) -> None:
    """Runs follow one another, the long piece's after the tiny's, and none begins before the last has ended."""
    runs = [*zip(reading.tiny.starts_ms, reading.tiny.latencies_ms, strict=True),
            *zip(reading.long.starts_ms, reading.long.latencies_ms, strict=True)]
    assert runs[0][0] >= 0.0
    assert all(latency > 0.0 for _, latency in runs)
    assert all(later >= start + latency for (start, latency), (later, _) in pairwise(runs))


def test_a_reading(opened: SharingProbe) -> None:
    reading = opened.read(0.1)
    check_order(reading)
    assert (reading.machine_uuid, reading.sharing, reading.seconds) == (machine("cpu").uuid, None, 0.1)
    assert len(reading.tiny.starts_ms) >= LEAST_RUNS
    assert len(reading.long.starts_ms) >= LEAST_RUNS
    assert reading.tiny.starts_ms[-1] < reading.long.starts_ms[0]
    assert reading.long.starts_ms[0] >= 50.0  # half of the time is the tiny piece's
    assert min(reading.tiny.latencies_ms) < min(reading.long.latencies_ms)


def test_the_least_runs_take_the_time_they_need(opened: SharingProbe) -> None:
    reading = opened.read(1e-6)
    check_order(reading)
    assert len(reading.tiny.latencies_ms) == len(reading.long.latencies_ms) == LEAST_RUNS


@pytest.mark.slow
def test_beside_a_real_load(opened: SharingProbe, workspace: Workspace) -> None:
    alone_ms = min(opened.read(0.2).long.latencies_ms)
    with stress(1.0, COMPUTE, "cpu", workspace=workspace):
        reading = opened.read(0.2)
    check_order(reading)
    assert sum(reading.long.latencies_ms) / len(reading.long.latencies_ms) > alone_ms


def test_a_process_keeps_its_probe() -> None:
    readings = [probe("cpu", 0.01) for _ in range(2)]
    assert _kept.cache_info().currsize == 1
    assert readings[0].started < readings[1].started


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times(opened: SharingProbe, seconds: float) -> None:
    with pytest.raises(UserError, match="can't run for"):
        opened.read(seconds)


@pytest.mark.slow
@pytest.mark.parametrize("side", LONG_SIDE.values())
def test_the_long_piece_stays_finite(side: int) -> None:
    """Numbers that overflow or vanish would not cost what others do."""
    weights = random_floats((side, side), "float32")
    product = weights
    for _ in range(LONG_PRODUCTS):
        product = product @ weights
    assert np.isfinite(product).all()
    assert 1e-3 < np.abs(product).max() < 1e30


def test_a_free_gpu_is_not_waited_for() -> None:
    reading = made_up([0.016] * 100 + [0.05], [0.48] * 10 + [0.5])
    assert reading.waited == {"tiny": 0.0, "long": 0.0}


def test_waits_in_phases() -> None:
    """As seen on an H200 beside a load that is on for half of each 20 ms: 97 % of the tiny runs wait for nothing."""
    reading = made_up([0.016] * 97 + [0.74] * 3, [0.48] * 6 + [1.3] * 3)
    assert reading.waited["tiny"] == pytest.approx(2.22 / (2.22 + 1.552))
    assert reading.waited["long"] == pytest.approx(3.9 / (3.9 + 2.88))


def test_a_load_without_gaps_is_reported_without_an_idle_reading() -> None:
    """All runs are alike, but none is one of a free device."""
    assert made_up([2.42] * 20, [2.9] * 17).waited == {"tiny": 1.0, "long": 1.0}
    assert made_up([0.37] * 130, [0.8] * 60).waited == {"tiny": 1.0, "long": 1.0}


def test_the_table() -> None:
    assert rows(made_up([0.016] * 97 + [0.74] * 3, [0.5])) == [
        {"work": "tiny", "runs": 100, "median_ms": 0.016, "p95_ms": 0.016, "waited": pytest.approx(0.5885, abs=1e-4)},
        {"work": "long", "runs": 1, "median_ms": 0.5, "p95_ms": 0.5, "waited": 0.0}]


def test_file_round_trip(opened: SharingProbe, tmp_path: Path) -> None:
    reading = opened.read(0.01)
    files.write_json(tmp_path / "reading.json", reading)
    assert read_reading(tmp_path / "reading.json") == reading
    assert "waited" not in (tmp_path / "reading.json").read_text()  # nothing derived is stored


def test_files_that_are_refused(tmp_path: Path) -> None:
    path, document = tmp_path / "reading.json", made_up([0.016], [0.5]).model_dump(mode="json")
    files.write_json(path, document | {"version": 3})
    with pytest.raises(UserError, match=r"version 3, this Hase reads version 2; make it anew: .*sharing_probe.py --out"):
        read_reading(path)
    files.write_json(path, document | {"sharing": "exclusive"})
    with pytest.raises(UserError, match="damaged at sharing"):
        read_reading(path)


@pytest.mark.parametrize(("starts", "latencies"), [((), ()), ((0.0, 1.0), (1.0,))])
def test_runs_are_whole(starts: tuple[float, ...], latencies: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match="one each a run"):
        ProbedRuns(starts_ms=starts, latencies_ms=latencies)


@pytest.mark.slow
def test_the_script(tmp_path: Path) -> None:
    reading = ProbeReading.model_validate_json(printed(
        "benchmark/sharing_probe.py", "--device", "cpu", "--seconds", "0.02", "--json", "--out", tmp_path / "reading.json",
        "--workspace", tmp_path))
    check_order(reading)
    assert read_reading(tmp_path / "reading.json") == reading


def test_the_script_warns_where_waiting_was_not_measured(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a made-up reading, since this machine may have no GPU."""
    monkeypatch.setattr(sharing_probe, "probe", lambda device, seconds: made_up([0.016], [0.5], "mps"))
    monkeypatch.setattr(sys, "argv", ["sharing_probe.py", "--workspace", str(tmp_path)])
    assert sharing_probe.main() == 0
    captured = capsys.readouterr()
    assert "sharing mode mps" in captured.err
    assert captured.out.splitlines()[1] == "tiny\t1\t0.016\t0.016\t0"
