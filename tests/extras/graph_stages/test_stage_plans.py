"""Plans of stages over units: their cost by hand, the best one against all assignments, the candidates."""

from __future__ import annotations

import itertools
import random

import pytest

from hase.extras.graph_stages.planning.plans import HOST, PlanningProblem, StageCost, StageData, best_plan, plan_cost
from hase.extras.graph_stages.planning.ranked_plans import candidate_plans, possible_plans
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


def test_a_stage_may_take_longer_after_another_unit() -> None:
    problem = three_stages(costs={
        ("CPU", 0): cpu(1.0), ("CPU", 1): cpu(5.0), ("CPU", 2): StageCost(3.0, HOST, "CPU", after_ms={"other": 9.0}),
        ("other", 1): StageCost(1.0, HOST, "CPU", after_ms={"CPU": 4.0})}, units=("CPU", "other"))
    assert plan_cost(problem, ("CPU",) * 3).latency_ms == 9.0
    assert plan_cost(problem, ("CPU", "other", "CPU")).latency_ms == 1.0 + 4.0 + 9.0
    assert best_plan(problem).assignment == ("CPU",) * 3


def test_units_on_one_processor_matter_to_all_stages_of_a_plan() -> None:
    """Units on another processor matter only to the stage right after them."""
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


def test_copies_occupy_both_ends_and_the_busiest_limits_the_throughput() -> None:
    cost = plan_cost(three_stages(), ("CPU", "CUDA", "CPU"))
    assert cost.busy_ms == pytest.approx({"CPU": 10 + 7 + 9 + 30, "CUDA": 7 + 2 + 9})
    assert cost.latency_ms == pytest.approx(58)
    assert cost.throughput_per_s == pytest.approx(1000 / 56)


def test_two_ways_to_use_a_processor_do_not_overlap() -> None:
    """As with OpenVINO and PyTorch on one CPU: nothing is copied, nothing runs at the same time."""
    problem = three_stages(units=("CPU", "CPU-torch"), costs={
        ("CPU", 0): cpu(1.0), ("CPU", 1): cpu(5.0), ("CPU", 2): cpu(3.0),
        ("CPU-torch", 0): cpu(2.0), ("CPU-torch", 1): cpu(1.0), ("CPU-torch", 2): cpu(4.0)})
    best = best_plan(problem)
    assert (best.assignment, best.latency_ms) == (("CPU", "CPU-torch", "CPU"), 5.0)
    assert best.interval_ms == 5.0


def test_two_devices_exchange_tensors_through_the_host() -> None:
    problem = three_stages(
        units=("CPU", "A", "B"), costs={("A", 0): on("a", 1.0), ("B", 1): on("b", 1.0), ("CPU", 2): cpu(1.0)},
        to_device_ms={(memory, name): 2.0 for memory in "ab" for name in ("x", "edges", "a", "b")},
        to_host_ms={(memory, name): 3.0 for memory in "ab" for name in ("a", "b", "y")})
    best = best_plan(problem)
    assert best.assignment == ("A", "B", "CPU")
    assert best.steps[1].copies == (("a", "a", HOST, 3.0), ("a", HOST, "b", 2.0))


@pytest.mark.parametrize(("seed", "units", "devices"), [(1, 2, 1), (2, 2, 1), (3, 3, 2), (4, 3, 1), (5, 4, 2)])
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
    listed = list(possible_plans(drawn(2, 1, 1), "u0"))
    assert [cost.assignment for cost in listed] == [("u0",) * 7]
    assert len(list(possible_plans(three_stages(), "CPU"))) == 1 + 6


def test_a_stage_that_nothing_can_run_is_named() -> None:
    problem = three_stages(costs={("CPU", 0): cpu(1.0), ("CPU", 2): cpu(1.0)})
    with pytest.raises(UserError, match=r"stage 2 was measured on no unit"):
        best_plan(problem)
    with pytest.raises(UserError, match=r"stage 2 has no time on CPU"):
        plan_cost(problem, ("CPU",) * 3)
