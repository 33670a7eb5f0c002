"""The files of raw measurements and of copies between the host's memory and a unit's own, for which a list around an array
stands in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hase.extras.graph_stages.measuring import worker
from hase.extras.graph_stages.measuring.layer import STAGES, GraphSize
from hase.extras.graph_stages.measuring.profiling import Profile, measure_copies
from hase.extras.graph_stages.measuring.records import (
    RAW,
    RawMeasurements,
    StageRecord,
    TransferTable,
    UnitReport,
    read_raw,
    read_transfers,
    write_transfers,
)
from hase.extras.graph_stages.measuring.units import OpenedStage, StageTask
from hase.records.measurement import Measurement
from hase.utils import files
from hase.utils.errors import UserError

SIZE = GraphSize(nodes=30, edges=4000, features=8, hidden=4)  # the largest tensor: messages, 128,000 bytes
SMALL = GraphSize(nodes=10, edges=30, features=5, hidden=4)


class FarStage(OpenedStage):
    memory = "cuda"

    def to_unit(self, name: str, array: Any) -> Any:
        return [array.copy()]

    def to_host(self, name: str, value: Any) -> Any:
        return value[0].copy()


class InProcess:
    """Stands in for a worker process."""

    def ask(self, request: worker.StageRequest) -> Measurement:
        return worker.answer(worker.StageRequest.model_validate_json(request.model_dump_json()))


def task_of(folder: Path) -> StageTask:
    return StageTask(size=SIZE, graph="uniform", unit="CUDA", stage=5, runtime="ort", warmup=1, runs=3, models=str(folder))


@pytest.mark.slow
def test_the_worker_times_copies_of_up_to_the_largest_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(tmp_path)
    monkeypatch.setattr(worker, "open_stage", lambda _: (FarStage(task, "CUDA", "ort", "f32", lambda feed: feed["means"]), ""))
    worker._canary.cache_clear()
    records = measure_copies("CUDA", Profile([task], [], 1, 3, 0), InProcess())  # type: ignore[arg-type]
    worker._canary.cache_clear()
    assert {(record.memory, record.direction) for record in records} == {("CUDA", "to_device"), ("CUDA", "to_host")}
    assert max(record.bytes for record in records) == 4 * 4000 * 8
    assert {len(record.samples_ms) for record in records} == {3}
    write_transfers(tmp_path, records)
    assert read_transfers(tmp_path) == TransferTable(records=tuple(records))
    damaged = (tmp_path / "transfer_table.json").read_text(encoding="utf-8").replace("to_host", "to_hell")
    (tmp_path / "transfer_table.json").write_text(damaged, encoding="utf-8")
    with pytest.raises(UserError, match=r"transfer_table\.json: damaged"):
        read_transfers(tmp_path)
    assert read_transfers(tmp_path / "none") is None


def test_copy_times_follow_the_measured_bytes() -> None:
    """Between, below and above the numbers of bytes that were measured."""
    record = {"memory": "CUDA", "direction": "to_host"}
    table = TransferTable.model_validate({"records": [
        record | {"bytes": 1000, "samples_ms": [1.0, 1.0, 9.0]}, record | {"bytes": 2000, "samples_ms": [3.0]}]})
    assert [table.copy_ms("CUDA", "to_host", moved) for moved in (10, 1000, 1500, 4000)] == [1.0, 1.0, 2.0, 6.0]
    with pytest.raises(KeyError):
        table.copy_ms("CUDA", "to_device", 10)


def test_bytes() -> None:
    bytes_in = [stage.bytes_in(SMALL) for stage in STAGES]
    bytes_out = [stage.bytes_out(SMALL) for stage in STAGES]
    assert bytes_in == [200 + 240, 600 + 240 + 8, 240 + 8, 200 + 40, 200, 200 + 160, 160]
    assert bytes_out == [600, 200, 40, 200, 160, 160, 160]


def test_the_file_holds_samples_and_statistics(tmp_path: Path) -> None:
    record = StageRecord(nodes=10, edges=30, features=5, hidden=4, graph="uniform", unit="CPU", stage=2, stage_name="sum",
                         runtime="torch", ran_on="CPU", precision="FP32", inference_precision="f32", bytes_in=848,
                         bytes_out=200, samples_ms=(1.0, 2.0, 6.0))
    assert record.statistics == pytest.approx({"mean": 3.0, "std": 7**0.5, "min": 1.0, "max": 6.0, "median": 2.0})
    assert (record.resident_statistics, record.size, record.definition.name) == ({}, SMALL, "sum")
    raw = RawMeasurements(machine={}, versions={}, warmup=1, runs=3, seed=0, records=(record,),
                          units=(UnitReport(name="NPU", present=False, why="no driver"),))
    files.write_json(tmp_path / RAW, raw)
    assert files.read_json(tmp_path / RAW)["records"][0]["statistics"]["median"] == 2.0
    assert read_raw(tmp_path / RAW) == raw
    with pytest.raises(UserError, match=r"profile_stages\.py --measure"):
        read_raw(tmp_path / "none.json")
