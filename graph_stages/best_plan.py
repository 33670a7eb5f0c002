"""The best of all assignments of stages to units, exactly, by dynamic programming; and the 28 candidate plans of a pair."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from graph_stages.plan_cost import (
    Holders,
    PlanCost,
    PlanningProblem,
    Step,
    advanced,
    busy_times,
    delivered,
    plan_cost,
)
from utils.errors import UserError

Objective: TypeAlias = Literal["latency", "throughput"]


@dataclass(frozen=True)
class _Partial:
    """The first stages of a plan: its units, and what they cost: the latency, or the busy time of each processor."""

    assignment: tuple[str, ...]
    cost: tuple[float, ...]


def best_plan(problem: PlanningProblem, objective: Objective = "latency") -> PlanCost:
    """The plan with the lowest latency, or with the highest throughput, of all assignments of stages to units.

    Raises:
        UserError: no unit can run some stage.
    """
    for stage in range(len(problem.stages)):
        if not problem.units_for(stage):
            raise UserError(f"stage {stage + 1} was measured on no unit; measure it first: "
                            "python graph_stages/profile_stages.py --measure")
    complete = [partial for units in _unit_sets(problem) for partial in _best_of(problem, objective, units)]
    return plan_cost(problem, min(complete, key=lambda partial: max(partial.cost)).assignment)


def _unit_sets(problem: PlanningProblem) -> list[frozenset[str]]:
    """The sets of units to plan with: all at once, unless units on one processor slow each other down by being used at all."""
    units = [unit for unit in problem.units if any(of == unit for of, _ in problem.costs)]
    shared = problem.shared
    if not any(shared[unit] & cost.after_ms.keys() for (unit, _), cost in problem.costs.items()):
        return [frozenset(units)]
    return [frozenset(some) for number in range(1, len(units) + 1) for some in itertools.combinations(units, number)]


def _best_of(problem: PlanningProblem, objective: Objective, units: frozenset[str]) -> list[_Partial]:
    """The best plans with some units, which slow each other down as if all of them were used; none if they can't run a stage.

    Stage by stage, all that the past means for the future is the unit of the last stage, and where the tensors lie that later
    stages read. So of all beginnings that agree in these, one is enough: the cheapest; for the throughput, all that no other
    beats on every processor.
    """
    processors = sorted({problem.host, *(cost.processor for cost in problem.costs.values())})
    shared = problem.shared

    def cost_of(step: Step) -> tuple[float, ...]:
        if objective == "latency":
            return (step.ms,)
        busy = busy_times(problem, [step])
        return tuple(busy.get(processor, 0.0) for processor in processors)

    kept: dict[tuple[Holders, str], list[_Partial]] = {
        (problem.begin, ""): [_Partial((), (0.0,) * len(cost_of(Step(None, ()))))]}
    for stage in range(len(problem.stages)):
        reached: dict[tuple[Holders, str], list[_Partial]] = {}
        for (holders, last), beginnings in kept.items():
            for unit in units.intersection(problem.units_for(stage)):
                step, after = advanced(problem, holders, stage, unit, ((shared[unit] & units) | {last}) - {unit})
                reached.setdefault((after, unit), []).extend(_added(beginnings, cost_of(step), unit))
        kept = {state: _not_beaten(partials) for state, partials in reached.items()}
    return [ended for (holders, _), partials in kept.items()
            for ended in _added(partials, cost_of(delivered(problem, holders)))]


def _added(partials: Sequence[_Partial], cost: tuple[float, ...], *units: str) -> list[_Partial]:
    return [_Partial((*partial.assignment, *units), tuple(a + b for a, b in zip(partial.cost, cost, strict=True)))
            for partial in partials]


def _not_beaten(partials: Sequence[_Partial]) -> list[_Partial]:
    """Those that no other equals or beats in every cost."""
    kept: list[_Partial] = []
    for partial in sorted(partials, key=lambda one: one.cost):
        if not any(all(a <= b for a, b in zip(one.cost, partial.cost, strict=True)) for one in kept):
            kept.append(partial)
    return kept


def candidate_plans(stages: int, home: str, other: str) -> list[tuple[str, ...]]:
    """All plans that move one contiguous block of stages from a home unit to another: 28 of seven stages.

    The document asks for 28 candidates and does not say which. This is our reading: of n stages there are n (n + 1) / 2 such
    blocks.
    """
    return [tuple(other if first <= stage < end else home for stage in range(stages))
            for first in range(stages) for end in range(first + 1, stages + 1)]


def possible_plans(problem: PlanningProblem, home: str) -> Iterator[PlanCost]:
    """Staying at home, and the candidates that move a block from home to each other unit; those whose stages all can run."""
    number = len(problem.stages)
    named = [(home,) * number, *(plan for other in problem.units if other != home
                                 for plan in candidate_plans(number, home, other))]
    for assignment in named:
        if problem.can_run(assignment):
            yield plan_cost(problem, assignment)
