"""Plans at one size, ranked; the best plans over sizes, for switching; how well times are met at sizes left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

from hase.extras.graph_stages.plans import Objective, PlanCost, PlanningProblem, best_plan, plan_cost
from hase.extras.graph_stages.tables import Setting, Size, StageTables, estimated
from hase.utils.errors import UserError

Kind: TypeAlias = Literal["best of all", "home", "candidate"]


class RankedPlan(NamedTuple):
    """A plan, and why it is listed: `home` leaves all stages at home, `candidate` moves one block of them to another unit."""

    kind: Kind
    cost: PlanCost

    def row(self, home_ms: float | None) -> dict[str, Any]:
        """As a row of a table; `home_ms`: the latency of staying at home."""
        cost = self.cost
        return {"plan": described(cost.assignment), "kind": self.kind, "latency (ms)": cost.latency_ms, "std (ms)": cost.std_ms,
                "copies (ms)": cost.transfer_ms, "runs/s": cost.throughput_per_s,
                "home / plan": home_ms / cost.latency_ms if home_ms else None}


def described(assignment: Sequence[str]) -> str:
    """`CPU 1-2, CUDA 3-6, CPU 7` for a unit of each stage."""
    parts, first = [], 1
    for unit, same in groupby(assignment):
        last = first + len(list(same)) - 1
        parts.append(f"{unit} {first}" if first == last else f"{unit} {first}-{last}")
        first = last + 1
    return ", ".join(parts)


def home_of(tables: StageTables, wanted: str | None) -> str:
    """The unit that plans start from: the one wanted, else CPU, else the first.

    Raises:
        UserError: there is no such unit.
    """
    if wanted is None:
        return "CPU" if "CPU" in tables.units else tables.units[0]
    if wanted not in tables.units:
        raise UserError(f"--home {wanted}: not among the units that were measured: {', '.join(tables.units)}")
    return wanted


def candidate_plans(stages: int, home: str, away: str) -> list[tuple[str, ...]]:
    """All plans that move one contiguous block of stages from a home unit to another: 28 of seven stages.

    The user's document on stages asks for 28 candidates and does not say which. This is our reading: of n stages there are
    n (n + 1) / 2 such blocks.
    """
    return [tuple(away if first <= stage < end else home for stage in range(stages))
            for first in range(stages) for end in range(first + 1, stages + 1)]


def possible_plans(problem: PlanningProblem, home: str) -> Iterator[PlanCost]:
    """Staying at home, and the candidates that move a block from home to each other unit; those whose stages all can run."""
    number = len(problem.stages)
    assignments = [(home,) * number, *(plan for unit in problem.units if unit != home
                                       for plan in candidate_plans(number, home, unit))]
    for assignment in assignments:
        if problem.can_run(assignment):
            yield plan_cost(problem, assignment)


def ranked(setting: Setting, home: str, objective: Objective = "latency") -> list[RankedPlan]:
    """The best of all assignments, staying at home, and the candidates, the best first."""
    best = best_plan(setting.problem, objective)
    plans = [RankedPlan("best of all", best)]
    for cost in possible_plans(setting.problem, home):
        plans.append(RankedPlan("home" if set(cost.assignment) == {home} else "candidate", cost))
    value = (lambda plan: plan.cost.latency_ms) if objective == "latency" else (lambda plan: plan.cost.interval_ms)
    return sorted(plans, key=lambda plan: (value(plan), plan.kind != "best of all"))


def home_latency(plans: Iterable[RankedPlan]) -> float | None:
    """In ms; None where home can't run some stage."""
    return next((plan.cost.latency_ms for plan in plans if plan.kind == "home"), None)


def plan_table(tables: StageTables, sizes: Iterable[Size], home: str, objective: Objective = "latency",
               extrapolate: bool = False) -> list[dict[str, Any]]:
    """A row for each size with its best plan, for switching plans by size.

    `loss_of_one_plan` is how much longer (or how much less throughput) the one plan takes that would be best if it were kept at
    all sizes; None where it can't run.

    Raises:
        UserError: a size lies outside those measured, and extrapolating was not asked for.
    """
    settings = {size: tables.setting(size, extrapolate) for size in sizes}
    best = {size: best_plan(setting.problem, objective) for size, setting in settings.items()}
    losses = {plan: {size: _loss(setting, plan, best[size], objective) for size, setting in settings.items()}
              for plan in {cost.assignment for cost in best.values()}}
    fixed = min(losses, key=lambda plan: (sum(loss is None for loss in losses[plan].values()),
                                          sum(loss or 0.0 for loss in losses[plan].values()), plan))
    rows = []
    for size, setting in settings.items():
        stay = (home,) * len(setting.problem.stages)
        at_home = plan_cost(setting.problem, stay).latency_ms if setting.problem.can_run(stay) else None
        cost = best[size]
        rows.append({"nodes": size[0], "edges": size[1], "basis": setting.basis, "plan": described(cost.assignment),
                     "units": list(cost.assignment), "mixed": len(cost.units) > 1, "latency_ms": cost.latency_ms,
                     "throughput_per_s": cost.throughput_per_s, "home_ms": at_home, "one_plan": described(fixed),
                     "loss_of_one_plan": losses[fixed][size]})
    return rows


def _loss(setting: Setting, plan: Sequence[str], best: PlanCost, objective: Objective) -> float | None:
    """How much worse a plan is than the best, as a ratio less 1; None where it can't run."""
    if not setting.problem.can_run(plan):
        return None
    cost = plan_cost(setting.problem, plan)
    return (cost.latency_ms / best.latency_ms if objective == "latency" else cost.interval_ms / best.interval_ms) - 1.0


def left_out_rows(tables: StageTables) -> list[dict[str, Any]]:
    """For each stage and unit, and each size between others: its measured time, and the one interpolated without it."""
    rows = []
    for size in tables.sizes:
        without = tables.without(size)
        for (unit, stage), times in tables.times.items():
            if size not in times.ms:
                continue
            try:
                estimate = estimated(without.times[unit, stage].ms, size)
            except UserError:
                continue  # not between the others
            rows.append({"nodes": size[0], "edges": size[1], "unit": unit, "stage": stage + 1, "measured_ms": times.ms[size],
                         "interpolated_ms": estimate.ms, "error": estimate.ms / times.ms[size] - 1.0})
    return rows


def interpolation_error(tables: StageTables) -> float | None:
    """The mean error of times at sizes left out, as a ratio; None if no size lies between others."""
    errors = [abs(row["error"]) for row in left_out_rows(tables)]
    return sum(errors) / len(errors) if errors else None
