"""Advice against measured sets: what an H100 measured, predicted for an H200; and the errors of made-up cases."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from benchmark.serving.results import ModelResult, Times
from graph_model.simulation.serving import Served
from inference.core.predictor import Predictor
from recipes.h200.judge_advice import Judged, JudgedWay, judge, tables
from utils.errors import UserError
from utils.paths import Workspace

ARCHIVE = Path(__file__).parents[2] / "recipes/h200/served-nvidia-h100.tar.xz"
CARD, TARGET = "nvidia-h100-80gb-hbm3-cuda-ort1.31-all", "nvidia-h200-cuda-ort1.31-all"


def made_up(measured_ms: float, predicted_ms: float, unserved: int = 0, host_bound: float = 1.0) -> Judged:
    """A model with an objective of 10 ms whose latencies are all alike."""
    times = Times(count=100, mean_ms=measured_ms, p50_ms=measured_ms, p95_ms=measured_ms, p99_ms=measured_ms)
    measured = ModelResult(requests=100, served=100 - unserved, unserved=unserved, latency=times, within_slo=1.0, runs=times,
                           requests_per_run=1.0, busy=0.1)
    predicted = Served(predicted_ms, (predicted_ms,) * 101, predicted_ms, 0.1, 0.1)
    return Judged("net", 10.0, measured, predicted, (0.9 * predicted_ms, 1.1 * predicted_ms), host_bound)


def test_errors_and_advice() -> None:
    """In the first set MPS is advised and best; in the second slices are advised, miss, and MPS would have met; in the third no
    way meets, since one leaves requests unserved and the other is late, and that is said."""
    sets = [
        [JudgedWay("slices", (made_up(8.0, 8.8),)), JudgedWay("mps", (made_up(5.0, 4.0, host_bound=1.3),))],
        [JudgedWay("slices", (made_up(11.0, 5.5),)), JudgedWay("mps", (made_up(8.0, 8.0, host_bound=1.3),))],
        [JudgedWay("slices", (made_up(5.0, 20.0, unserved=3),)), JudgedWay("mps:50/50", (made_up(20.0, 40.0),))],
    ]
    errors, advice = tables(sets)
    by_name = {row["of"]: row for row in errors}
    assert {name: row["cases"] for name, row in by_name.items()} == {
        "all": 5, "slices": 2, "mps": 2, "mps with shares": 1, "the GPU is the slower track": 3, "the host is": 2}
    assert by_name["slices"]["p95_%"] == pytest.approx((10.0 + 50.0) / 2)
    assert (by_name["slices"]["p95_in_90_%"], by_name["mps"]["p95_in_90_%"]) == (50.0, 50.0)
    assert by_name["mps"]["run_bias_%"] == pytest.approx(100 * (np.sqrt(0.8) - 1.0))
    assert by_name["mps with shares"]["mean_%"] == pytest.approx(100.0)
    assert [row["count"] for row in advice] == [3, 2, 1, 1, 2, 1, 3]


@pytest.mark.slow
def test_a_measured_set(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    served = Workspace(tmp_path)
    with pytest.raises(UserError, match="no set of several models was measured"):
        judge(Predictor(target=TARGET), served)
    lines = served.served_sets(CARD).read_text().splitlines()
    of_pairs = [line for line in lines if line.count('"slo_ms"') == 2 and '"status":"ok"' in line]
    served.served_sets(TARGET).write_text("\n".join(of_pairs[:5]) + "\n")  # as if an H200 had measured them
    ways, = judge(Predictor(target=TARGET), served)
    assert sorted(way.way for way in ways) == ["mps", "mps:25/75", "mps:50", "mps:75/25", "slices"]
    ratios = [model.predicted.run_ms / model.measured.runs.mean_ms for way in ways for model in way.models
              if model.measured.runs]
    assert len(ratios) == 10
    assert 0.6 < min(ratios) < max(ratios) < 1.6
    assert all(model.measured.unserved <= 2 for way in ways for model in way.models)
