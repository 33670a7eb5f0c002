"""Plans that really run, with PyTorch and ONNX Runtime on the CPU as two units and a stand-in for a GPU's memory; and the files
of raw measurements and of copies between the host's memory and a unit's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_script

from hase.extras.graph_stages.measuring import worker
from hase.extras.graph_stages.measuring.analysis import analyze
from hase.extras.graph_stages.measuring.layer import OUTPUT, STAGES, GraphSize
from hase.extras.graph_stages.measuring.models import export_stages, stage_model_files
from hase.extras.graph_stages.measuring.profiling import Profile, measure_copies, record_of
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
from hase.extras.graph_stages.measuring.units import OpenedStage, StageTask, difference, open_stage
from hase.extras.graph_stages.measuring.worker import measure_stage
from hase.extras.graph_stages.planning.chains import read_chains, run_chain
from hase.extras.graph_stages.planning.ranked_plans import PlanRun, read_runs, size_rows, summary, with_current_predictions
from hase.extras.graph_stages.planning.tables import read_tables
from hase.records.measurement import Measurement
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

PLAN_STAGES = "extras/graph_stages/plan_stages.py"
SIZES = [GraphSize(nodes=nodes, edges=edges, features=12, hidden=6) for nodes, edges in ((40, 50), (40, 200), (150, 200))]


def task_of(folder: Path, size: GraphSize, stage: int, runtime: str) -> StageTask:
    return StageTask(size=size, graph="uniform", unit="CPU", stage=stage, runtime=runtime, threads=1, warmup=1, runs=5,
                     models=str(folder / "exported_models"))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of results of each runtime."""
    results = {}
    for runtime in ("ort", "torch"):
        workspace = Workspace(tmp_path_factory.mktemp(runtime))
        if runtime == "ort":
            export_stages(workspace.stage_models, list(stage_model_files(SIZES, 0)))
        work = [task_of(workspace.stage_results.parent, size, stage.id, runtime) for size in SIZES for stage in STAGES]
        records = tuple(record_of(task, measure_stage(task)) for task in work)
        assert {(record.runtime, record.status) for record in records} == {(runtime, "ok")}
        raw = RawMeasurements(machine={}, versions={}, warmup=1, runs=5, seed=0, units=(), records=records)
        files.write_json(workspace.stage_results / RAW, raw)
        analyze(workspace)
        results[runtime] = workspace.stage_results
    return results


@pytest.mark.slow
def test_plans_and_chains_run_in_turn(profiled: Mapping[str, Path]) -> None:
    """All plans, compared; times in chains replace those alone. A second command runs nothing twice."""
    folders = list(profiled.items())
    alone = read_tables(folders)
    results = [f"--results={runtime}={folder}" for runtime, folder in folders]
    chains = [*results, "--time-chains", "--runs", "2", "--rounds", "2"]
    options = [*chains, "--home", "CPU-torch", "--run", "--sizes", "40/50", "150/200", "--json"]
    done = run_script(PLAN_STAGES, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(row["nodes"], row["edges"]) for row in report["sizes"]] == [(40, 50), (150, 200)]
    assert {row["plans"] for row in report["sizes"]} <= {29, 30}  # the best of all may be one of the candidates
    runs, records = read_runs(profiled["ort"] / "plan_runs.jsonl"), read_chains(profiled["ort"]).stages
    assert {(len(run.rounds_ms), len(run.rounds_ms[0])) for run in runs} == {(2, 2)}
    assert max(run.output_error for run in runs) < 1e-4
    assert len(records) == 2 * (2 * 7 + 2 * 6)  # of each size; no stage comes before the first
    assert {len(record.samples_ms) for record in records if record.stage > 1} == {4}
    again = run_script(PLAN_STAGES, *options)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == report
    assert len(read_chains(profiled["ort"]).stages) == len(records)
    rest = run_script(PLAN_STAGES, *chains)
    assert (rest.returncode, "1 sizes timed in chains, 2 timed before" in rest.stderr) == (0, True), rest.stderr
    tables = read_tables(folders)
    times = tables.times["CPU-ort", 4]
    (after_ort,) = [record for record in records if (record.unit, record.previous) == ("CPU-ort", "CPU-ort")
                    and (record.stage, record.nodes) == (5, 150)]
    assert times.ms[150, 200] == np.median(after_ort.samples_ms)
    assert list(times.after_ms) == ["CPU-torch"]
    current = with_current_predictions(tables, runs)
    assert [run.predicted_ms for run in runs] == pytest.approx([run.predicted_ms for run in current])
    assert read_tables(folders, alone=True) == alone


class FarStage(OpenedStage):
    """Stands in for a stage on a GPU: its values can't be read without `to_host`; counts copies."""

    memory = "cuda"
    copies: list[tuple[str, str]] = []

    def to_unit(self, name: str, array: Any) -> Any:
        self.copies.append((name, "to unit"))
        return [array.copy()]

    def run_resident(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self.output: [self.run({name: value[0] for name, value in values.items()})]}

    def to_host(self, name: str, value: Any) -> Any:
        self.copies.append((name, "to host"))
        return value[0].copy()


def opened_stages(folder: Path) -> tuple[dict[tuple[str, int], OpenedStage], dict[str, Any]]:
    """Each stage near (in the host's memory) and far, and the tensors of the graph."""
    opened: dict[tuple[str, int], OpenedStage] = {}
    for number, stage in enumerate(STAGES):
        task = task_of(folder, SIZES[2], stage.id, "torch")
        near = opened["near", number] = open_stage(task)[0]
        opened["far", number] = FarStage(task, "CUDA", "ort", "f32", near.run)
    return opened, task.tensors


def test_a_tensor_is_copied_once(tmp_path: Path) -> None:
    opened, tensors = opened_stages(tmp_path)

    def copied(plan: str) -> list[tuple[str, str]]:
        FarStage.copies.clear()
        chosen = [opened["far" if place == "f" else "near", stage] for stage, place in enumerate(plan)]
        assert difference(run_chain(chosen, tensors), tensors[OUTPUT]) < 1e-4
        return [copy for copy in FarStage.copies if copy[0] != "node_count"]

    assert copied("nnnnnnn") == []
    assert copied("nnnnfnn") == [("means", "to unit"), ("neighbours", "to host")]
    assert copied("fnnnnfn") == [("x", "to unit"), ("source", "to unit"), ("messages", "to host"), ("neighbours", "to unit"),
                                 ("combined", "to host")]  # x is on the unit already
    assert len(copied("fffffff")) == 4


def run_of(units: str, predicted_ms: float, measured_ms: float) -> PlanRun:
    rounds = ((measured_ms, measured_ms), (1.1 * measured_ms, 1.1 * measured_ms))
    return PlanRun(nodes=1, edges=2, units=tuple(units), kind="candidate", predicted_ms=predicted_ms, rounds_ms=rounds,
                   output_error=0.0)


def test_errors_and_regret_by_hand(tmp_path: Path) -> None:
    runs = [run_of("aaaaaaa", 9.0, 10.0), run_of("aabbaaa", 8.0, 9.0), run_of("bbbbbbb", 10.0, 8.0)]
    (row,) = size_rows(runs)
    assert np.mean([9 / 10.5, 8 / 9.45, 2 - 10 / 8.4]) == pytest.approx(1 - row["mape"])
    assert (row["chosen"], row["best"], row["best_is_mixed"]) == ("a 1-2, b 3-4, a 5-7", "b 1-7", False)
    assert row["regret"] == pytest.approx(9 / 8 - 1)
    assert row["repeat"] == pytest.approx(0.1 / 1.05)
    assert (summary([row])["regret_where_mixed"], summary([row])["plans"]) == (None, 3)
    files.append_records(tmp_path / "runs.jsonl", runs)
    assert read_runs(tmp_path / "runs.jsonl") == runs
    (tmp_path / "runs.jsonl").write_text('[{"nodes": 1}]\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"runs\.jsonl: damaged"):
        read_runs(tmp_path / "runs.jsonl")


class InProcess:
    """Stands in for a worker process."""

    def ask(self, request: worker.StageRequest) -> Measurement:
        return worker.answer(worker.StageRequest.model_validate_json(request.model_dump_json()))


@pytest.mark.slow
def test_the_worker_times_copies_of_up_to_the_largest_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = GraphSize(nodes=30, edges=4000, features=8, hidden=4)  # the largest tensor: messages, 128,000 bytes
    task = StageTask(size=size, graph="uniform", unit="CUDA", stage=5, runtime="ort", warmup=1, runs=3, models=str(tmp_path))
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


def test_the_file_holds_samples_and_statistics(tmp_path: Path) -> None:
    record = StageRecord(nodes=10, edges=30, features=5, hidden=4, graph="uniform", unit="CPU", stage=2, stage_name="sum",
                         runtime="torch", ran_on="CPU", precision="FP32", inference_precision="f32", bytes_in=848,
                         bytes_out=200, samples_ms=(1.0, 2.0, 6.0))
    assert record.statistics == pytest.approx({"mean": 3.0, "std": 7**0.5, "min": 1.0, "max": 6.0, "median": 2.0})
    bytes_in, bytes_out = ([getattr(stage, way)(record.size) for stage in STAGES] for way in ("bytes_in", "bytes_out"))
    assert bytes_in == [200 + 240, 600 + 240 + 8, 240 + 8, 200 + 40, 200, 200 + 160, 160]
    assert bytes_out == [600, 200, 40, 200, 160, 160, 160]
    raw = RawMeasurements(machine={}, versions={}, warmup=1, runs=3, seed=0, records=(record,),
                          units=(UnitReport(name="NPU", present=False, why="no driver"),))
    files.write_json(tmp_path / RAW, raw)
    assert files.read_json(tmp_path / RAW)["records"][0]["statistics"]["median"] == 2.0
    assert read_raw(tmp_path) == raw
    with pytest.raises(UserError, match=r"profile_stages\.py --measure"):
        read_raw(tmp_path / "none")
