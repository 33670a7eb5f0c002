"""Predicted pairs against measured ones: what an H100 measured, predicted for an H200; and the errors of made-up cases."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from inference.core.predictor import Predictor
from recipes.h200.judge_pairs import Case, judge, row, table
from utils.errors import UserError
from utils.paths import Workspace

ARCHIVE = Path(__file__).parents[2] / "recipes/h200/sharing-nvidia-h100.tar.xz"
CARD, TARGET = "nvidia-h100-80gb-hbm3-cuda-ort1.31-all", "nvidia-h200-cuda-ort1.31-all"
WAY = "mps-25_75"


def test_errors_by_way_and_kind() -> None:
    def case(way: str, processes: int, of_gpu: bool, alone: float, beside: Sequence[float], in_interval: bool) -> Case:
        """Predicted to be so many times what was measured: 2 ms alone, and 4 ms beside others."""
        return Case(way, way, "net", "loop", processes, of_gpu, (2.0 * alone, 2.0), 4.0 * np.array(beside), np.full(4, 4.0),
                    in_interval)

    cases = [case("mps", 1, True, 1.0, [1.1, 1.0, 0.8, 0.9], True), case("mps", 1, False, 0.9, [0.9, 1.0, 0.8, 1.0], False),
             case("mps with shares", 3, False, 1.0, [1.2, 1.0, 0.5, 1.0], True)]
    assert row(cases[0]) | {"alone_predicted": 2.0, "mean_predicted": pytest.approx(4.4)} == row(cases[0])
    rows = {row["of"]: row for row in table(cases)}
    assert {name: row["cases"] for name, row in rows.items()} == {
        "mps": 2, "mps, beside 1, the GPU is the slower track": 1, "mps, beside 1, the host is the slower track": 1,
        "mps with shares": 1, "mps with shares, beside 3, the host is the slower track": 1}
    assert rows["mps"]["mean_%"] == pytest.approx(10.0)
    assert rows["mps"]["mean_bias_%"] == pytest.approx(100 * (np.sqrt(0.99) - 1.0))
    assert (rows["mps"]["alone_%"], rows["mps"]["p95_%"], rows["mps"]["p95_unstalled_%"]) == pytest.approx((5.0, 20.0, 5.0))
    assert (rows["mps"]["mean_in_90_%"], rows["mps with shares"]["mean_in_90_%"]) == (50.0, 100.0)


@pytest.mark.slow
def test_measured_pairs(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        kept = [member for member in archive if "ort_kernel_record" in member.name or f"/{WAY}/" in f"/{member.name}"]
        archive.extractall(tmp_path, kept, filter="data")
    measured = Workspace(tmp_path)
    with pytest.raises(UserError, match=f"no dataset of {TARGET} in any folder of it"):
        judge(Predictor(target=TARGET), measured)
    folder = Workspace(tmp_path / WAY)
    shutil.move(folder.dataset(CARD), folder.dataset(TARGET))  # as if an H200 had measured them
    cases = judge(Predictor(target=TARGET), measured)
    assert {(case.way, case.processes) for case in cases} == {("mps with shares", 1), ("mps with shares", 2)}
    assert len(cases) == 17 * 3
    ratios = [case.predicted_ms[0] / case.measured_ms[0] for case in cases]
    assert 0.7 < min(ratios) < max(ratios) < 1.5
