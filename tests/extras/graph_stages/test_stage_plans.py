"""Plans of stages and of networks over units: their cost by hand, the best one against all assignments, the candidates; from
tables to plans at measured sizes, between and outside them; the commands on made-up tables and datasets."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
from command import printed, run_script
from made_up_dataset import FLAVOUR, TARGET, chain, collect, conv, relu

from hase.extras.graph_stages.measuring.analysis import LookupKey, LookupRecord, write_lookup
from hase.extras.graph_stages.measuring.records import RAW, RawMeasurements, StageRecord, TransferRecord, write_transfers
from hase.extras.graph_stages.plan_network import CPU, GPU, compare_plans, planning_problem
from hase.extras.graph_stages.planning.plans import HOST, PlanningProblem, StageCost, StageData, best_plan, plan_cost
from hase.extras.graph_stages.planning.ranked_plans import (
    candidate_plans,
    plan_text,
    possible_plans,
    ranked_plans,
)
from hase.extras.graph_stages.planning.tables import estimated, read_tables
from hase.records.kernel_record_files import record_path
from hase.utils import files
from hase.utils.errors import UserError

STAGES = (StageData(("x", "edges"), ("a",)), StageData(("a",), ("b",)), StageData(("b", "x"), ("y",)))
SEVEN = (StageData(("x", "edges"), ("x_j",)), StageData(("x_j",), ("messages",)), StageData(("messages", "edges"), ("sum",)),
         StageData(("edges",), ("count",)), StageData(("sum", "count"), ("mean",)), StageData(("mean", "x"), ("out",)),
         StageData(("out",), ("y",)))


def cpu(ms: float) -> StageCost:
    return StageCost(ms, HOST, "CPU")


def on(device: str, ms: float) -> StageCost:
    return StageCost(ms, device, device)


def three_stages(**changes: object) -> PlanningProblem:
    """A CPU, and a GPU that is ten times as fast behind slow copies."""
    facts = {
        "stages": STAGES, "inputs": ("x", "edges"), "outputs": ("y",), "units": ("CPU", "CUDA"),
        "costs": {("CPU", 0): cpu(10.0), ("CPU", 1): cpu(20.0), ("CPU", 2): cpu(30.0),
                  ("CUDA", 0): on("CUDA", 1.0), ("CUDA", 1): on("CUDA", 2.0), ("CUDA", 2): on("CUDA", 3.0)},
        "to_device_ms": {("CUDA", name): ms for name, ms in {"x": 4.0, "edges": 0.5, "a": 7.0, "b": 8.0, "y": 1.0}.items()},
        "to_host_ms": {("CUDA", name): ms for name, ms in {"x": 5.0, "edges": 0.5, "a": 6.0, "b": 9.0, "y": 1.5}.items()}}
    return PlanningProblem(**(facts | changes))  # type: ignore[arg-type]


def drawn(seed: int, units: int, devices: int) -> PlanningProblem:
    """Seven stages of a graph network on units of random speed; some can't run everywhere, some run in the host's memory."""
    draw = random.Random(seed)
    names = [f"u{number}" for number in range(units)]
    tensors = sorted({name for data in SEVEN for name in (*data.reads, *data.writes)})
    copies = {direction: {(f"d{device}", name): draw.uniform(0.01, 3) for device in range(devices) for name in tensors}
              for direction in ("in", "out")}
    costs = {}
    for number, unit in enumerate(names):
        for stage in range(7):
            ms, device_name = draw.uniform(0.1, 4), f"d{draw.randrange(devices)}"
            if number == 0 or draw.random() < 0.9:
                memory = HOST if number == 0 or draw.random() < 0.2 else device_name
                after_ms = {name: ms * draw.uniform(0.8, 3) for name in names if name != unit and draw.random() < 0.7}
                costs[unit, stage] = StageCost(ms, memory, "CPU" if number == 0 else device_name, after_ms=after_ms)
    return PlanningProblem(SEVEN, ("x", "edges"), ("y",), tuple(names), costs, copies["in"], copies["out"])


def test_copies_occupy_both_ends_and_units_on_one_processor_matter_to_all_stages_of_a_plan() -> None:
    """Units on another processor matter only to the stage right after them. The busiest unit limits the throughput."""
    cost = plan_cost(three_stages(), ("CPU", "CUDA", "CPU"))
    assert cost.busy_ms == pytest.approx({"CPU": 10 + 7 + 9 + 30, "CUDA": 7 + 2 + 9})
    assert (cost.latency_ms, cost.throughput_per_s) == pytest.approx((58, 1000 / 56))
    slow = {"other": 8.0}
    costs = {("CPU", stage): StageCost(3.0, HOST, "CPU", after_ms=slow) for stage in range(3)}
    for processor, latency_ms in (("CPU", 8.0 + 8.0 + 1.0), ("NPU", 3.0 + 3.0 + 1.0)):
        problem = three_stages(costs=costs | {("other", 2): StageCost(1.0, HOST, processor)}, units=("CPU", "other"))
        assert plan_cost(problem, ("CPU", "CPU", "other")).latency_ms == latency_ms
        assert plan_cost(problem, ("CPU", "CPU", "CPU")).latency_ms == 9.0
        assert best_plan(problem).latency_ms == min(9.0, latency_ms)


def test_a_tensor_is_copied_once_and_stays_where_it_was() -> None:
    """x goes to the GPU for the first stage, and is still on the CPU for the third."""
    problem = three_stages()
    cost = plan_cost(problem, ("CUDA", "CUDA", "CPU"))
    assert [step.copies for step in cost.steps] == [
        (("x", HOST, "CUDA", 4.0), ("edges", HOST, "CUDA", 0.5)), (), (("b", "CUDA", HOST, 9.0),), ()]
    assert cost.latency_ms == pytest.approx(4.5 + 1 + 2 + 9 + 30)
    assert cost.transfer_ms == pytest.approx(13.5)
    on_gpu = plan_cost(problem, ("CUDA",) * 3)
    assert on_gpu.latency_ms == pytest.approx(4.5 + 1 + 2 + 3 + 1.5)  # x once, though two stages read it


def test_two_devices_exchange_tensors_through_the_host() -> None:
    problem = three_stages(
        units=("CPU", "A", "B"), costs={("A", 0): on("a", 1.0), ("B", 1): on("b", 1.0), ("CPU", 2): cpu(1.0)},
        to_device_ms={(memory, name): 2.0 for memory in "ab" for name in ("x", "edges", "a", "b")},
        to_host_ms={(memory, name): 3.0 for memory in "ab" for name in ("a", "b", "y")})
    best = best_plan(problem)
    assert best.assignment == ("A", "B", "CPU")
    assert best.steps[1].copies == (("a", "a", HOST, 3.0), ("a", HOST, "b", 2.0))


@pytest.mark.parametrize(("seed", "units", "devices"), [(1, 2, 1), (3, 3, 2)])
def test_it_is_the_best_of_all_assignments(seed: int, units: int, devices: int) -> None:
    """Against every assignment that can run, for both objectives."""
    problem = drawn(seed, units, devices)
    possible = itertools.product(*(problem.units_for(stage) for stage in range(7)))
    costs = [plan_cost(problem, assignment) for assignment in possible]
    assert best_plan(problem).latency_ms == pytest.approx(min(cost.latency_ms for cost in costs))
    assert best_plan(problem, "throughput").interval_ms == pytest.approx(min(cost.interval_ms for cost in costs))


def test_twenty_eight_candidates_of_a_pair() -> None:
    plans = candidate_plans(7, "CPU", "CUDA")
    assert len(plans) == len(set(plans)) == 28
    blocks = {"".join("1" if unit == "CUDA" else "0" for unit in plan).strip("0") for plan in plans}
    assert blocks == {"1" * length for length in range(1, 8)}  # without a gap; the home unit alone is not a candidate
    assert len(list(possible_plans(three_stages(), "CPU"))) == 1 + 6


def test_a_stage_that_nothing_can_run_is_named() -> None:
    problem = three_stages(costs={("CPU", 0): cpu(1.0), ("CPU", 2): cpu(1.0)})
    with pytest.raises(UserError, match=r"stage 2 was measured on no unit"):
        best_plan(problem)
    with pytest.raises(UserError, match=r"stage 2 has no time on CPU"):
        plan_cost(problem, ("CPU",) * 3)


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
    plans = ranked_plans(setting, "CPU")
    assert len(plans) == 1 + 1 + 28
    moving = next(plan.cost for plan in plans if plan_text(plan.cost.assignment) == "CPU 1-4, CUDA 5, CPU 6-7")
    copies_ms = MS_PER_BYTE * 4 * 4000 * (20 + 8 / 2)
    assert moving.transfer_ms == pytest.approx(copies_ms)
    cpu = sum(cpu_ms(stage, 4000, 6000) for stage in (1, 2, 3, 4, 6, 7))
    assert moving.latency_ms == pytest.approx(cpu + gpu_ms(5, 4000, 6000) + copies_ms)
    assert moving.throughput_per_s == pytest.approx(1e3 / (cpu + copies_ms))
    assert plans[0].kind == "best of all"
    assert plans[0].cost.latency_ms <= min(plan.cost.latency_ms for plan in plans)


def test_two_folders_are_two_units_on_one_processor(results: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_results(tmp_path / name, only_cpu=True)
    tables = read_tables([("", tmp_path / "one"), ("torch", tmp_path / "two")])
    assert tables.units == ("CPU", "CPU-torch")
    assert {times.processor for times in tables.times.values()} == {"CPU"}
    with pytest.raises(UserError, match="has units that another folder has, too: CPU; give it a name"):
        read_tables([("", tmp_path / "one"), ("", tmp_path / "two")])
    copied = shutil.copytree(results, tmp_path / "three", ignore=shutil.ignore_patterns("transfer_table.json"))
    with pytest.raises(UserError, match=r"copies between the host and CUDA were not measured; run: .*--measure"):
        read_tables([("", copied)])


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


@pytest.mark.parametrize("size", [(4000, 6000), (1500, 1500), (1000, 7000)])
def test_linear_times_are_interpolated_exactly(size: tuple[int, int]) -> None:
    estimate = estimated(LINEAR, size)
    assert estimate.basis == "interpolated"
    assert estimate.ms == pytest.approx(0.05 + 2e-4 * size[0] + 7e-5 * size[1])
    odd = estimated(LINEAR | {(2000, 3000): 7.0}, (2000, 3000))
    assert (odd.ms, odd.basis) == (7.0, "measured")


def test_outside_is_an_error_or_marked() -> None:
    with pytest.raises(UserError, match=r"20000 nodes with 20000 edges lie outside .*1000 to 10000 nodes.*--extrapolate"):
        estimated(LINEAR, (20000, 20000))
    with pytest.raises(UserError, match="lie outside"):
        estimated(LINEAR, (5000, 1000))  # within both ranges, but not between measured sizes
    estimate = estimated(LINEAR, (20000, 30000), extrapolate=True)
    assert estimate.basis == "extrapolated"
    assert estimate.ms == pytest.approx(0.05 + 2e-4 * 20000 + 7e-5 * 30000)


SIDES = (8, 12, 16, 24, 28, 32)


def test_the_best_plan_of_a_network() -> None:
    """The GPU computes faster, but each copy costs 0.05 ms: short kernels in between stay where the data is."""
    record = chain("anet1", [make(side=side) for side in SIDES[:3] for make in (conv, relu)])
    kernels = [record.kernel_of(node) for node in record.nodes]
    times_ms = {CPU: {kernel.id: 0.01 + kernel.flops / 1e7 for kernel in kernels},
                GPU: {kernel.id: 0.02 + kernel.flops / 1e9 for kernel in kernels}}
    problem = planning_problem(record, times_ms, 0.05, 1e7)
    every_cost = [plan_cost(problem, units).latency_ms for units in itertools.product((CPU, GPU), repeat=len(kernels))]
    plan_of = dict(compare_plans(problem))
    assert plan_of["the best of all"].latency_ms == pytest.approx(min(every_cost))
    assert plan_of["all on the CPU"].latency_ms == pytest.approx(sum(times_ms[CPU].values()))
    copied = [record.inputs[name].bytes for name in record.inputs] + [record.outputs[name].bytes for name in record.outputs]
    assert plan_of["all on the GPU"].latency_ms == pytest.approx(
        sum(times_ms[GPU].values()) + sum(0.05 + size / 1e7 for size in copied))


def test_a_network_by_command(tmp_path: Path) -> None:
    on_gpu = TARGET.model_copy(update={
        "flavour": FLAVOUR.model_copy(update={"device": "cuda", "instruction_set": ""}), "threads": 0})
    record = chain("anet1", [conv(side=side) for side in SIDES])
    workspace = collect(tmp_path, record)
    collect(tmp_path, record, target=on_gpu)
    for target in (TARGET, on_gpu):
        files.write_json(record_path(workspace, target.flavour, "anet1"), record.model_copy(update={"flavour": target.flavour}))
    command = ("extras/graph_stages/plan_network.py", "--workspace", tmp_path, "--model", "anet1", "--copy-us", "10",
               "--copy-gb-s", "10")
    rows = json.loads(printed(*command, "--cpu", TARGET.name, "--gpu", on_gpu.name, "--json"))
    assert [row["plan"] for row in rows] == ["all on the CPU", "all on the GPU", "the best of all"]
    assert rows[2]["latency_ms"] == rows[0]["latency_ms"] < rows[1]["latency_ms"]  # as fast on both: copies do not pay
    assert (rows[1]["copies"], rows[2]["copies"], rows[2]["kernels"]) == (2, 0, "CPU 1-6")
    swapped = run_script(*command, "--cpu", on_gpu.name, "--gpu", TARGET.name)
    assert (swapped.returncode, swapped.stdout) == (1, "")
    assert "a dataset of device cuda, not cpu" in swapped.stderr
