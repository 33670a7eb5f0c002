"""The sharing probe: real sessions on the CPU, alone and beside a real load, and what its readings show."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from command import printed

from hase.benchmark import sharing_probe
from hase.benchmark.load.stress import stress
from hase.benchmark.ort.probes import LEAST_RUNS, LONG_PRODUCTS, LONG_SIDE, SharingProbe
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
    short = opened.read(1e-6)  # the least runs take the time that they need
    check_order(short)
    assert len(short.tiny.latencies_ms) == len(short.long.latencies_ms) == LEAST_RUNS
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UserError, match="can't run for"):
            opened.read(seconds)


@pytest.mark.slow
def test_beside_a_real_load(opened: SharingProbe, workspace: Workspace) -> None:
    alone_ms = min(opened.read(0.2).long.latencies_ms)
    with stress(1.0, COMPUTE, "cpu", workspace=workspace):
        reading = opened.read(0.2)
    check_order(reading)
    assert sum(reading.long.latencies_ms) / len(reading.long.latencies_ms) > alone_ms


@pytest.mark.parametrize("side", LONG_SIDE.values())
def test_the_long_piece_stays_finite(side: int) -> None:
    """Numbers that overflow or vanish would not cost what others do."""
    weights = random_floats((side, side), "float32")
    rows = weights[:8]
    for _ in range(LONG_PRODUCTS):
        rows = rows @ weights
    assert np.isfinite(rows).all()
    assert 1e-3 < np.abs(rows).max() < 1e30


def test_files_that_are_refused(tmp_path: Path) -> None:
    path, document = tmp_path / "reading.json", made_up([0.016], [0.5]).model_dump(mode="json")
    for changes, message in (
            ({"version": 3}, r"version 3, this Hase reads version 2; make it anew: .*sharing_probe.py --out"),
            ({"sharing": "exclusive"}, "damaged at sharing"),
            ({"tiny": {"starts_ms": [], "latencies_ms": []}}, "damaged at tiny"),
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
    pytest.param([0.37] * 130, [0.8] * 60, (1.0, 1.0), id="a light load without gaps"),
])
def test_how_long_was_waited(tiny_ms: list[float], long_ms: list[float], waited: tuple[float, float]) -> None:
    assert made_up(tiny_ms, long_ms).waited == {"tiny": pytest.approx(waited[0]), "long": pytest.approx(waited[1])}


@pytest.mark.slow
def test_the_script(tmp_path: Path) -> None:
    path = tmp_path / "reading.json"
    reading = ProbeReading.model_validate_json(printed(
        "benchmark/sharing_probe.py", "--device", "cpu", "--seconds", "0.02", "--json", "--out", path, "--workspace", tmp_path))
    check_order(reading)
    assert read_reading(path) == reading
    assert "waited" not in path.read_text()  # nothing derived is stored


def test_the_script_warns_where_waiting_was_not_measured(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a made-up reading, since this machine may have no GPU."""
    monkeypatch.setattr(sharing_probe, "probe", lambda device, seconds: made_up([0.016] * 97 + [0.74] * 3, [0.5], "mps"))
    monkeypatch.setattr(sys, "argv", ["sharing_probe.py", "--workspace", str(tmp_path)])
    assert sharing_probe.main() == 0
    captured = capsys.readouterr()
    assert "sharing mode mps" in captured.err
    tiny, long = captured.out.splitlines()[1:3]
    assert (tiny.split("\t")[:4], tiny.split("\t")[4][:5]) == (["tiny", "100", "0.016", "0.016"], "0.588")
    assert long == "long\t1\t0.5\t0.5\t0"
