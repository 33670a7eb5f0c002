"""From tables to plans for a CPU and a GPU with its own memory, at measured sizes, between and outside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run_script

from hase.extras.graph_stages.measuring.analysis import LookupKey, LookupRecord, write_lookup
from hase.extras.graph_stages.measuring.layer import STAGES
from hase.extras.graph_stages.measuring.records import RAW, RawMeasurements, StageRecord, TransferRecord, write_transfers
from hase.extras.graph_stages.planning.ranked_plans import described, left_out_rows, plan_table, ranked
from hase.extras.graph_stages.planning.tables import estimated, read_tables, surrounding
from hase.utils import files
from hase.utils.errors import UserError

STEPS = (1000, 2000, 3000, 5000, 10000)
SIZES = [(nodes, edges) for nodes in STEPS for edges in STEPS if edges >= nodes]
LINEAR = {(nodes, edges): 0.05 + 2e-4 * nodes + 7e-5 * edges for nodes, edges in SIZES}
WIDTHS = {"features": 20, "hidden": 8}
MS_PER_BYTE = 1e-6  # of a copy to the GPU; a copy back takes half as long


def cpu_ms(stage: int, nodes: int, edges: int) -> float:
    """Stage 5 is a product, slow on a CPU; all are linear in the size."""
    return (0.01 + 1e-6 * edges + 1e-6 * nodes) * (1000 if stage == 5 else 1)


def gpu_ms(stage: int, nodes: int, edges: int) -> float:
    return 0.05 + 1e-7 * edges + 1e-7 * nodes


def write_results(folder: Path, only_cpu: bool = False) -> None:
    """Tables with known laws."""
    table = {}
    for nodes, edges in SIZES:
        for stage in range(1, 8):
            ms = cpu_ms(stage, nodes, edges)
            table[LookupKey(nodes, edges, "CPU", stage)] = LookupRecord(
                compute_time=None, transfer_time=None, total_time=ms, std=0.1 * ms, reason="no bandwidth")
            if not only_cpu:
                ms = gpu_ms(stage, nodes, edges)
                table[LookupKey(nodes, edges, "CUDA", stage)] = LookupRecord(
                    compute_time=ms, transfer_time=5.0, total_time=ms + 5.0, std=0.0, transfer_by="measured", ran_on="CUDA")
    write_lookup(folder, table)
    if only_cpu:
        return
    write_transfers(folder, [
        TransferRecord.model_validate({"memory": "CUDA", "direction": direction, "bytes": moved, "samples_ms": (ms, ms)})
        for moved in (4, 1000, 100_000_000)
        for direction, ms in (("to_device", MS_PER_BYTE * moved), ("to_host", MS_PER_BYTE * moved / 2))])
    record = StageRecord.model_validate({
        "nodes": 1000, "edges": 1000, **WIDTHS, "graph": "uniform", "unit": "CPU", "stage": 1, "stage_name": "gather",
        "runtime": "ort", "ran_on": "CPU", "precision": "FP32", "inference_precision": "f32", "bytes_in": 1, "bytes_out": 1})
    files.write_json(folder / RAW, RawMeasurements(machine={}, versions={}, warmup=1, runs=1, seed=0, units=(),
                                                   records=(record,)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write_results(folder)
    return folder


def test_a_plan_between_sizes_by_hand(results: Path) -> None:
    """Stage 5 alone on the GPU: means go there, neighbours come back; both are 4 bytes a value."""
    setting = read_tables([("", results)]).setting((4000, 6000))
    assert (setting.basis, setting.left_out) == ("interpolated", ())
    assert all("node_count" not in data.reads for data in setting.problem.stages)  # it is never copied
    plans = ranked(setting, "CPU")
    assert len(plans) == 1 + 1 + 28
    moving = next(plan.cost for plan in plans if described(plan.cost.assignment) == "CPU 1-4, CUDA 5, CPU 6-7")
    copies_ms = MS_PER_BYTE * 4 * 4000 * (20 + 8 / 2)
    assert moving.transfer_ms == pytest.approx(copies_ms)
    cpu = sum(cpu_ms(stage, 4000, 6000) for stage in (1, 2, 3, 4, 6, 7))
    assert moving.latency_ms == pytest.approx(cpu + gpu_ms(5, 4000, 6000) + copies_ms)
    assert moving.throughput_per_s == pytest.approx(1e3 / (cpu + copies_ms))
    assert plans[0].kind == "best of all"
    assert plans[0].cost.latency_ms <= min(plan.cost.latency_ms for plan in plans)
    assert "CUDA 5" in described(plans[0].cost.assignment).replace("CUDA 5-6", "CUDA 5")


def test_plans_over_sizes(results: Path) -> None:
    rows = plan_table(read_tables([("", results)]), [(1000, 1000), (10000, 10000)], "CPU")
    assert [row["nodes"] for row in rows] == [1000, 10000]
    for row in rows:
        assert row["mixed"] is (len(set(row["units"])) > 1)
        assert row["latency_ms"] <= row["home_ms"]
        assert row["loss_of_one_plan"] >= 0
    assert 0 in [row["loss_of_one_plan"] for row in rows]
    left_out = left_out_rows(read_tables([("", results)]))
    assert len({(row["nodes"], row["edges"]) for row in left_out}) == 12  # all but the three corners
    assert max(abs(row["error"]) for row in left_out) < 1e-6  # linear times are predicted exactly


def test_two_folders_are_two_units_on_one_processor(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_results(tmp_path / name, only_cpu=True)
    tables = read_tables([("", tmp_path / "one"), ("torch", tmp_path / "two")])
    assert tables.units == ("CPU", "CPU-torch")
    assert {times.processor for times in tables.times.values()} == {"CPU"}
    with pytest.raises(UserError, match="has units that another folder has, too: CPU; give it a name"):
        read_tables([("", tmp_path / "one"), ("", tmp_path / "two")])


def test_a_table_from_elsewhere_has_only_the_four_documented_values(tmp_path: Path) -> None:
    files.write_json(tmp_path / "lookup_table.json", {
        f"{nodes},{edges},NPU,{stage}": {"compute_time": 1, "transfer_time": 1, "total_time": 2, "std": 0.1}
        for nodes, edges in SIZES for stage in range(1, 8)})
    best = ranked(read_tables([("", tmp_path)]).setting((1500, 1500)), "NPU")[0].cost
    assert (best.latency_ms, best.transfer_ms) == (pytest.approx(14), 0)  # copies are in the total times


def test_copies_that_were_not_measured(tmp_path: Path) -> None:
    write_results(tmp_path)
    (tmp_path / "transfer_table.json").unlink()
    with pytest.raises(UserError, match=r"copies between the host and CUDA were not measured; run: .*--measure"):
        read_tables([("", tmp_path)])


def test_the_command(results: Path, tmp_path: Path) -> None:
    script = ("extras/graph_stages/plan_stages.py", "--results", str(results))
    done = run_script(*script, "--nodes", "4000", "--edges", "6000", "--top", "3")
    assert done.returncode == 0, done.stderr
    assert [line.split("\t")[1] for line in done.stdout.splitlines()][:2] == ["kind", "best of all"]
    assert len(done.stdout.splitlines()) == 4
    assert "interpolated: times of stages at sizes left out are off by 0.0 % on average" in done.stderr
    done = run_script(*script, "--out", str(tmp_path / "plans.json"), "--json")
    assert json.loads(done.stdout) == files.read_json(tmp_path / "plans.json")
    assert len(json.loads(done.stdout)) == 15
    for options, code, part in (
            (("--nodes", "4"), 2, "--nodes and --edges go together"), (("--sizes", "4/4/4"), 2, "'4/4/4' is not NODES/EDGES"),
            (("--home", "TPU"), 1, "--home TPU: not among the units that were measured: CPU, CUDA"),
            (("--nodes", "20000", "--edges", "20000"), 1, "lie outside the sizes that were measured"),
            (("--run", "--left-out"), 2, "exclude one another"), (("--out", "plans.txt"), 2, "a .json or .csv")):
        done = run_script(*script, *options)
        assert (done.returncode, part in done.stderr) == (code, True), done.stderr
    done = run_script(*script, "--nodes", "20000", "--edges", "20000", "--extrapolate", "--json")
    assert (json.loads(done.stdout)["basis"], "guesses" in done.stderr) == ("extrapolated", True)
    assert len(STAGES) == len(json.loads(done.stdout)["plans"][0]["units"])


@pytest.mark.parametrize("size", [(4000, 6000), (1500, 1500), (1000, 7000), (2500, 9999), (9000, 9500)])
def test_linear_times_are_interpolated_exactly(size: tuple[int, int]) -> None:
    estimate = estimated(LINEAR, size)
    assert estimate.basis == "interpolated"
    assert estimate.ms == pytest.approx(0.05 + 2e-4 * size[0] + 7e-5 * size[1])


def test_only_sizes_near_it_count() -> None:
    weights = surrounding(tuple(SIZES), (2500, 4000))
    assert weights is not None
    assert set(weights) <= {(2000, 3000), (2000, 5000), (3000, 3000), (3000, 5000)}
    assert sum(weights.values()) == pytest.approx(1)


def test_a_measured_size_gives_the_measurement() -> None:
    odd = LINEAR | {(2000, 3000): 7.0}
    estimate = estimated(odd, (2000, 3000))
    assert (estimate.ms, estimate.basis) == (7.0, "measured")
    assert estimated({(1000, 1000): 2.0}, (1000, 1000)).ms == 2.0


def test_sizes_on_a_line_are_enough_along_it() -> None:
    line = {(1000, 2000): 1.0, (2000, 4000): 2.0, (4000, 8000): 4.0}
    assert estimated(line, (3000, 6000)).ms == pytest.approx(3.0)
    with pytest.raises(UserError, match=r"3000 nodes with 5000 edges lie outside .* in these pairs: 1000/2000, "):
        estimated(line, (3000, 5000))


def test_outside_is_an_error_or_marked() -> None:
    with pytest.raises(UserError, match=r"20000 nodes with 20000 edges lie outside .*1000 to 10000 nodes.*--extrapolate"):
        estimated(LINEAR, (20000, 20000))
    with pytest.raises(UserError, match="lie outside"):
        estimated(LINEAR, (5000, 1000))  # within both ranges, but not between measured sizes
    estimate = estimated(LINEAR, (20000, 30000), extrapolate=True)
    assert estimate.basis == "extrapolated"
    assert estimate.ms == pytest.approx(0.05 + 2e-4 * 20000 + 7e-5 * 30000)
    assert estimated({size: 1e-6 * size[1] for size in SIZES}, (500, 500), extrapolate=True).ms == pytest.approx(5e-4)


def test_the_sizes_around_a_size_are_searched_once() -> None:
    """However many stages and units ask: the search takes most of the time, and a runtime waits for it."""
    surrounding.cache_clear()
    for factor in (1.0, 2.0, 3.0):
        estimated({size: factor * time_ms for size, time_ms in LINEAR.items()}, (4000, 6000))
    assert surrounding.cache_info().misses == 1
