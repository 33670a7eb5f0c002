"""The file of raw measurements, and the bytes that stages take and give."""

from __future__ import annotations

from pathlib import Path

import pytest

from hase.extras.graph_stages.measuring.layer import STAGES, GraphSize
from hase.extras.graph_stages.measuring.records import RAW, RawMeasurements, StageRecord, UnitReport, read_raw
from hase.utils import files
from hase.utils.errors import UserError

SIZE = GraphSize(nodes=10, edges=30, features=5, hidden=4)


def test_bytes() -> None:
    bytes_in = [stage.bytes_in(SIZE) for stage in STAGES]
    bytes_out = [stage.bytes_out(SIZE) for stage in STAGES]
    assert bytes_in == [200 + 240, 600 + 240 + 8, 240 + 8, 200 + 40, 200, 200 + 160, 160]
    assert bytes_out == [600, 200, 40, 200, 160, 160, 160]


def test_the_file_holds_samples_and_statistics(tmp_path: Path) -> None:
    record = StageRecord(nodes=10, edges=30, features=5, hidden=4, graph="uniform", unit="CPU", stage=2, stage_name="sum",
                         runtime="torch", ran_on="CPU", precision="FP32", inference_precision="f32", bytes_in=848,
                         bytes_out=200, samples_ms=(1.0, 2.0, 6.0))
    assert record.statistics == pytest.approx({"mean": 3.0, "std": 7**0.5, "min": 1.0, "max": 6.0, "median": 2.0})
    assert (record.resident_statistics, record.size, record.definition.name) == ({}, SIZE, "sum")
    raw = RawMeasurements(machine={}, versions={}, warmup=1, runs=3, seed=0, records=(record,),
                          units=(UnitReport(name="NPU", present=False, why="no driver"),))
    files.write_json(tmp_path / RAW, raw)
    assert files.read_json(tmp_path / RAW)["records"][0]["statistics"]["median"] == 2.0
    assert read_raw(tmp_path / RAW) == raw
    with pytest.raises(UserError, match=r"profile_stages\.py --measure"):
        read_raw(tmp_path / "none.json")
