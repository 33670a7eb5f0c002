"""What recurrent layers cost the host: the file that was measured on an H200, and a try without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run_script

from recipes.cuda_kernels.measure_recurrent import Layer, layers, measure, read
from utils.paths import ROOT

MEASURE = "recipes/cuda_kernels/measure_recurrent.py"
ON_H200 = ROOT / "recipes" / "cuda_kernels" / "recurrent-nvidia-h200.jsonl.xz"


def test_slow_launches_take_longer() -> None:
    """The figures of docs/accuracy.md: 5.7 and 7.8 µs a launch, which the shipped composition knows."""
    done = run_script(MEASURE, "--measured", ON_H200, "--json")
    rows = {(row["node"], row["steps"]): row for row in json.loads(done.stdout)}
    assert sum(row["layers"] for row in rows.values()) == 280
    assert rows["recurrent", 72]["launch_us"] == pytest.approx(5.7, abs=0.1)
    assert rows["slow_recurrent", 72]["launch_us"] == pytest.approx(7.8, abs=0.1)
    assert [round(rows[kind, 72]["median_error_%"]) for kind in ("recurrent", "slow_recurrent")] == [-4, 1]


def test_the_file_holds_what_the_host_called() -> None:
    asked = {bool(row.traced and row.traced.calls.get("cudaFuncGetAttributes", 0) >= row.layer.steps): row.layer.rows
             for row in read(ON_H200) if row.layer.rows == 1 and row.layer.dtype == "float32"}
    assert asked == {False: 1}  # a product with a vector asks for nothing


def test_layers_are_measured_without_a_gpu() -> None:
    """On the CPU, where nothing is traced."""
    chosen = [Layer("LSTM", "float32", 1, 2, 16, 4), Layer("GRU", "float32", 2, 1, 16, 4)]
    measured = list(measure(chosen, "cpu", 60.0))
    assert [row.layer for row in measured] == chosen
    assert all(len(row.run_ms) == len(row.dispatch_ms) == 18 and min(row.run_ms) > 0 for row in measured)
    assert all(row.probe_us > 0 and row.traced is None for row in measured)
    assert len(set(layers())) == len(layers()) == 280


@pytest.mark.parametrize(("name", "says"), [("missing.jsonl", "no such file"),
                                            ("README.md", "not a file that this command wrote with --out")])
def test_another_file_is_refused(name: str, says: str, tmp_path: Path) -> None:
    path = ROOT / name if name == "README.md" else tmp_path / name
    done = run_script(MEASURE, "--measured", path)
    assert (done.returncode, done.stderr.strip()) == (1, f"error: {path}: {says}")
