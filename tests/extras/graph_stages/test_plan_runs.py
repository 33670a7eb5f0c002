"""Plans that really run, with PyTorch and ONNX Runtime on the CPU as two units and a stand-in for a GPU's memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_script

from hase.extras.graph_stages.measuring.analysis import analyze
from hase.extras.graph_stages.measuring.layer import HOST, OUTPUT, STAGES, GraphSize
from hase.extras.graph_stages.measuring.models import export_stages, model_files
from hase.extras.graph_stages.measuring.profiling import record_of
from hase.extras.graph_stages.measuring.records import DIRECTIONS, RawMeasurements, TransferRecord, TransferTable, raw_path
from hase.extras.graph_stages.measuring.units import OpenedStage, StageTask, difference, open_stage
from hase.extras.graph_stages.measuring.worker import measure_stage
from hase.extras.graph_stages.planning.chains import append_chains, read_chains, run_chain, time_chains, time_in_chains
from hase.extras.graph_stages.planning.ranked_plans import PlanRun, append_runs, predicted_now, read_runs, size_rows, summary
from hase.extras.graph_stages.planning.tables import StageTables, StageTimes, in_chains, read_tables
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
            export_stages(workspace.stage_models, list(model_files(SIZES, 0)))
        work = [task_of(workspace.stage_results.parent, size, stage.id, runtime) for size in SIZES for stage in STAGES]
        records = tuple(record_of(task, measure_stage(task)) for task in work)
        assert {(record.runtime, record.status) for record in records} == {(runtime, "ok")}
        raw = RawMeasurements(machine={}, versions={}, warmup=1, runs=5, seed=0, units=(), records=records)
        files.write_json(raw_path(workspace), raw)
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
    for row in report["sizes"]:
        assert row["plans"] in (29, 30)  # the best of all may be one of the candidates
        assert row["regret"] >= 0
        assert row["best_ms"] <= row["chosen_ms"]
    assert report["summary"]["plans"] == sum(row["plans"] for row in report["sizes"])
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
    assert [run.predicted_ms for run in runs] == pytest.approx([run.predicted_ms for run in predicted_now(tables, runs)])
    assert read_tables(folders, alone=True) == alone
    assert read_tables([folders[1]]).times == read_tables([folders[1]], alone=True).times  # the chains are in the other folder


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
    plans = [("near",) * 7, ("far",) * 7]
    times_ms = time_chains(opened, plans, tensors, 1, 3, 2)
    assert [[len(samples) for samples in times_ms[plan]] for plan in plans] == [[3, 3], [3, 3]]


def test_copies_are_timed_in_chains(tmp_path: Path) -> None:
    opened, tensors = opened_stages(tmp_path)
    times = time_in_chains((150, 200), ("far", "near"), opened, tensors, 1, 2, 2)
    append_chains(tmp_path, times)
    assert read_chains(tmp_path) == times
    copied = {(copy.direction, copy.tensor): copy.samples_ms for copy in times.copies}
    passed = {"messages", "sums", "degrees", "means", "neighbours", "combined"}  # from one stage to a later one
    inputs = {"x", "source", "target", "node_count"}
    assert {tensor for direction, tensor in copied if direction == "to_device"} == passed | inputs
    assert {tensor for direction, tensor in copied if direction == "to_host"} == passed | {"output"}
    assert len(copied["to_device", "sums"]) == 4  # only one chain copies it
    assert {copy.memory for copy in times.copies} == {"CUDA"}
    alone = {(150, 200): 1.0}
    stages = {(unit, stage): StageTimes(alone, alone, memory, memory)
              for unit, memory in (("far", "CUDA"), ("near", HOST)) for stage in range(7)}
    by_bytes = TransferTable(records=tuple(TransferRecord(memory="CUDA", direction=direction, bytes=4096, samples_ms=(7.0,))
                                           for direction in DIRECTIONS))
    problem = in_chains(StageTables(stages, (12, 6), by_bytes), times).setting((150, 200)).problem
    assert problem.to_device_ms["CUDA", "output"] == 7.0  # no chain copies it
    assert problem.to_device_ms["CUDA", "sums"] == np.median(copied["to_device", "sums"])
    assert problem.to_host_ms["CUDA", "output"] == np.median(copied["to_host", "output"])


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
    append_runs(tmp_path / "runs.jsonl", runs)
    assert read_runs(tmp_path / "runs.jsonl") == runs
    (tmp_path / "runs.jsonl").write_text('[{"nodes": 1}]\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"runs\.jsonl: damaged"):
        read_runs(tmp_path / "runs.jsonl")
