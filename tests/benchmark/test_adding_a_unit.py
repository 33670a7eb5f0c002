"""The script of docs/extending.md runs as it is printed: on a CPU, with torch's real convolutions."""

from __future__ import annotations

import csv
import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest

from hase.benchmark.measuring.blocks import Steadiness
from hase.benchmark.metrics.source import MetricSource, OpenWindow
from hase.records.measurement import best_measurements, read_blocks
from hase.utils.paths import ROOT

pytestmark = pytest.mark.slow

PRETENDED_W = 40.0


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's code as a file in a folder of its own, imported."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"),
                         re.MULTILINE | re.DOTALL)
    script = tmp_path / "scripts" / "benchmark" / "convolution_times.py"
    script.parent.mkdir(parents=True)
    script.write_text(code, encoding="utf-8")
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # the script replaces the first entry
    spec = importlib.util.spec_from_file_location("convolution_times", script)
    assert spec
    assert spec.loader
    imported = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "convolution_times", imported)
    spec.loader.exec_module(imported)
    as_it_is = Steadiness(drift=100.0, patience_s=0.0, attempts=1)  # as unsteady as a test's machine may be
    monkeypatch.setattr(imported, "Bench", functools.partial(imported.Bench, window_s=0.01, steadiness=as_it_is))
    return imported


def table_of(folder: Path) -> dict[str, dict[str, str]]:
    """The table's rows by unit."""
    with (folder / "convolutions.csv").open() as table:
        return {row["Unit"]: row for row in csv.DictReader(table)}


class PretendedPower(MetricSource):
    """Pretends to be a power sensor: this machine need not have one."""

    name, minimum_window_s = "the pretended power sensor", 0.001

    def __init__(self, field: str) -> None:
        super().__init__([field], None)

    def _read(self) -> Any:
        return None

    def _readings(self, before: OpenWindow, after: OpenWindow) -> Mapping[str, Sequence[float]]:
        return {field: [PRETENDED_W] for field in self.fields}


def test_the_command_resumes_after_ctrl_c(module: ModuleType, tmp_path: Path) -> None:
    """Stopped after its first block; a kill may also tear the line that is being written. The second run measures the rest, the
    third nothing."""
    folder, options = tmp_path / "benchmark" / "convolutions", ["--seconds", "0.02", "--image-sizes", "8,10,12,14"]
    command = [sys.executable, str(module.__file__), "--device", "cpu", "--workspace", str(tmp_path), *options]
    process = subprocess.Popen(command, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    journal = folder / "measurements.jsonl"
    while not read_blocks(journal) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGINT, stderr
    before = best_measurements(read_blocks(journal))
    assert 0 < len(before) < 16
    with journal.open("a") as torn:
        torn.write('{"level": 0.0, "key": "to')
    units = [module.Convolution(name, channels, side)
             for name in module.ALGORITHMS for channels in (16, 64) for side in (8, 10, 12, 14)]
    totals = module.collect(folder, units, "cpu", 0.01)
    assert {unit.id for unit in totals.units} == {unit.id for unit in units} - set(before)
    assert not module.collect(folder, units, "cpu", 0.01).units
    after = best_measurements(read_blocks(journal))
    assert after.items() >= before.items()
    assert {m.status for m in after.values()} == {"ok"}
    assert set(table_of(folder)) == set(after) == {unit.id for unit in units}


def test_power_energy_and_a_unit_that_fails(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(images: object, weights: object) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(module, "open_power", lambda device: PretendedPower(module.POWER))
    monkeypatch.setitem(module.ALGORITHMS, "fft", refuse)
    units = [module.Convolution(name, 8, 8) for name in ("guess", "gemm", "fft")]
    module.collect(tmp_path, units, "cpu", 0.05)
    assert not module.collect(tmp_path, units, "cpu", 0.05).units  # all are measured, the failed one too
    [block], rows = read_blocks(tmp_path / "measurements.jsonl"), table_of(tmp_path)
    measurements = {m.id: m for m in block.measurements}
    failed, row = measurements.pop("conv3x3_8_8_fft"), rows.pop("conv3x3_8_8_fft")
    assert (failed.status, failed.error, failed.samples_ms) == ("failed", "not supported", ())
    assert (row["Status"], row["Error"], row["run_ms"]) == ("failed", "not supported", "")
    assert block.background == {module.POWER: PRETENDED_W}
    assert set(measurements) == set(rows) == {"conv3x3_8_8_guess", "conv3x3_8_8_gemm"}
    for name, m in measurements.items():
        (watts,), (joules,), row = m.quantities["power_w"], m.quantities["energy_j"], rows[name]
        assert sum(m.samples_ms) / 1e3 <= joules * len(m.samples_ms) / watts <= block.during_s  # the window's seconds
        assert (row["Status"], row["Runs"], row[module.POWER]) == ("ok", str(len(m.samples_ms)), str(PRETENDED_W))
        assert float(row["run_ms"]) == pytest.approx(median(m.samples_ms), abs=1e-6)
