"""Copies between the host's memory and a unit's own; a list around an array stands in for a GPU's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hase.extras.graph_stages.measuring import worker
from hase.extras.graph_stages.measuring.layer import GraphSize
from hase.extras.graph_stages.measuring.profiling import Profile, measure_copies
from hase.extras.graph_stages.measuring.records import TransferTable, read_transfers, write_transfers
from hase.extras.graph_stages.measuring.units import OpenedStage, StageTask
from hase.records.measurement import Measurement
from hase.utils.errors import UserError

pytestmark = pytest.mark.slow

SIZE = GraphSize(nodes=30, edges=4000, features=8, hidden=4)  # the largest tensor: messages, 128,000 bytes


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
