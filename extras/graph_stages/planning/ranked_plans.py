"""Ranks plans by predicted time, at one size or several, and runs them to find how far off the predictions are."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from hase.extras.graph_stages.measuring.layer import GRAPH_KINDS, OUTPUT, Array, GraphSource
from hase.extras.graph_stages.measuring.records import read_raw
from hase.extras.graph_stages.measuring.units import Refused, StageTask, difference, open_stage
from hase.extras.graph_stages.planning.chains import (
    ChainSamples,
    ChainTimes,
    OpenedStages,
    Plan,
    chain_of,
    chain_times,
    run_chain,
    sample_chains,
    time_round,
)
from hase.extras.graph_stages.planning.plans import Objective, PlanCost, PlanningProblem, best_plan, plan_cost
from hase.extras.graph_stages.planning.tables import Setting, Size, StageTables, estimated, in_chains, named
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError

Kind: TypeAlias = Literal["best of all", "home", "candidate"]
RUNS = "plan_runs.jsonl"
UNSTEADY = 0.1  # `repeat_difference` above which the machine was too unsteady for a comparison
MODELS = "exported_models"  # next to a folder of results
TOLERANCE = 2e-2  # of a plan's output, relative to the largest value: units may compute in FP16


class RankedPlan(NamedTuple):
    """A plan with its costs, and why it is listed: `home` runs all stages on the home unit, `candidate` moves one block of them
    to another unit."""

    kind: Kind
    cost: PlanCost

    def row(self, home_ms: float | None) -> dict[str, Any]:
        """The plan as a table row; `home_ms` is the latency of the home plan."""
        cost = self.cost
        return {"plan": plan_text(cost.assignment), "kind": self.kind, "latency (ms)": cost.latency_ms, "std (ms)": cost.std_ms,
                "copies (ms)": cost.transfer_ms, "runs/s": cost.throughput_per_s,
                "home / plan": home_ms / cost.latency_ms if home_ms else None}


def plan_text(assignment: Sequence[str]) -> str:
    """The unit of each stage as text: `CPU 1-2, CUDA 3-6, CPU 7`."""
    parts, first = [], 1
    for unit, same in groupby(assignment):
        last = first + len(list(same)) - 1
        parts.append(f"{unit} {first}" if first == last else f"{unit} {first}-{last}")
        first = last + 1
    return ", ".join(parts)


def home_unit(tables: StageTables, name: str | None) -> str:
    """The unit on which plans begin and end: the named one, else CPU, else the first."""
    if name is None:
        return "CPU" if "CPU" in tables.units else tables.units[0]
    if name not in tables.units:
        raise UserError(f"--home {name}: not among the units that were measured: {', '.join(tables.units)}")
    return name


def candidate_plans(stages: int, home: str, away: str) -> list[tuple[str, ...]]:
    """All plans that move one contiguous block of stages from home to another unit: n (n + 1) / 2 for n stages.

    The specification asks for 28 candidates for seven stages without naming them; this is Hase's reading of it.
    """
    return [tuple(away if first <= stage < end else home for stage in range(stages))
            for first in range(stages) for end in range(first + 1, stages + 1)]


def possible_plans(problem: PlanningProblem, home: str) -> Iterator[PlanCost]:
    """The home plan and the candidates of every other unit, without plans in which a stage can't run."""
    stages = len(problem.stages)
    assignments = [(home,) * stages]
    for unit in problem.units:
        if unit != home:
            assignments += candidate_plans(stages, home, unit)
    return (plan_cost(problem, assignment) for assignment in assignments if problem.can_run(assignment))


def _cost_ms(cost: PlanCost, objective: Objective) -> float:
    return cost.latency_ms if objective == "latency" else cost.interval_ms


def ranked_plans(setting: Setting, home: str, objective: Objective = "latency") -> list[RankedPlan]:
    """The best of all assignments, the home plan and the candidates, best first."""
    plans = [RankedPlan("best of all", best_plan(setting.problem, objective))]
    plans += [RankedPlan("home" if cost.units == (home,) else "candidate", cost)
              for cost in possible_plans(setting.problem, home)]
    return sorted(plans, key=lambda plan: (_cost_ms(plan.cost, objective), plan.kind != "best of all"))


def home_latency_ms(plans: Iterable[RankedPlan]) -> float | None:
    """The latency of the home plan, in ms; None if the home unit can't run some stage."""
    return next((plan.cost.latency_ms for plan in plans if plan.kind == "home"), None)


def plan_table(tables: StageTables, sizes: Iterable[Size], home: str, objective: Objective = "latency",
               extrapolate: bool = False) -> list[dict[str, Any]]:
    """A row per size with its best plan; UserError if a size needs extrapolation that is not allowed.

    `loss_of_one_plan` is the loss (in time or throughput) if one plan were used at all sizes; None if it can't run.
    """
    settings = {size: tables.setting(size, extrapolate) for size in sizes}
    best = {size: best_plan(setting.problem, objective) for size, setting in settings.items()}
    losses = {plan: {size: _loss(setting, plan, best[size], objective) for size, setting in settings.items()}
              for plan in {cost.assignment for cost in best.values()}}
    fixed = min(losses, key=lambda plan: (sum(loss is None for loss in losses[plan].values()),
                                          sum(loss or 0.0 for loss in losses[plan].values()), plan))
    rows = []
    for size, setting in settings.items():
        home_plan = (home,) * len(setting.problem.stages)
        home_ms = plan_cost(setting.problem, home_plan).latency_ms if setting.problem.can_run(home_plan) else None
        cost = best[size]
        rows.append({"nodes": size[0], "edges": size[1], "basis": setting.basis, "plan": plan_text(cost.assignment),
                     "units": list(cost.assignment), "mixed": len(cost.units) > 1, "latency_ms": cost.latency_ms,
                     "throughput_per_s": cost.throughput_per_s, "home_ms": home_ms, "one_plan": plan_text(fixed),
                     "loss_of_one_plan": losses[fixed][size]})
    return rows


def _loss(setting: Setting, plan: Sequence[str], best: PlanCost, objective: Objective) -> float | None:
    """How much worse a plan is than the best: ratio minus 1; None if it can't run."""
    if not setting.problem.can_run(plan):
        return None
    return _cost_ms(plan_cost(setting.problem, plan), objective) / _cost_ms(best, objective) - 1.0


def left_out_rows(tables: StageTables) -> list[dict[str, Any]]:
    """For each stage, unit and size between others: the measured time, and the time interpolated without it."""
    rows = []
    for size in tables.sizes:
        without = tables.of_sizes({*tables.sizes} - {size})
        for (unit, stage), times in tables.times.items():
            if size in times.ms:
                with suppress(UserError):  # the size is not between others
                    estimate_ms = estimated(without.times[unit, stage].ms, size).ms
                    rows.append({"nodes": size[0], "edges": size[1], "unit": unit, "stage": stage + 1,
                                 "measured_ms": times.ms[size], "interpolated_ms": estimate_ms,
                                 "error": estimate_ms / times.ms[size] - 1.0})
    return rows


def interpolation_error(tables: StageTables) -> float | None:
    """The mean error of interpolated times at left-out sizes, as a ratio; None if no size lies between others."""
    errors = [abs(row["error"]) for row in left_out_rows(tables)]
    return sum(errors) / len(errors) if errors else None


# running plans -----------------------------------------------------------------------------------------------------------

class PlanRun(Frozen):
    """A plan (one unit per stage) that was run at one size."""

    nodes: int
    edges: int
    units: tuple[str, ...]
    kind: str
    predicted_ms: float  # by the tables at the time of the run
    rounds_ms: tuple[tuple[float, ...], ...]  # measured latencies, grouped by round
    output_error: float  # the largest difference from the reference, relative to the largest value

    @property
    def size(self) -> Size:
        return self.nodes, self.edges

    @property
    def measured_ms(self) -> float:
        """The median of all runs."""
        return float(np.median(np.concatenate(self.rounds_ms)))

    @property
    def repeat_difference(self) -> float:
        """Relative difference between the medians of the first and second half of the rounds; NaN for one round."""
        half = len(self.rounds_ms) // 2
        if not half:
            return float("nan")
        first, second = (float(np.median(np.concatenate(rounds))) for rounds in (self.rounds_ms[:half], self.rounds_ms[half:]))
        return abs(first - second) / ((first + second) / 2)


def stage_tasks(folders: Sequence[tuple[str, Path]]) -> dict[tuple[str, int, Size], StageTask]:
    """The tasks that open what was measured, by unit, stage (from 0) and size."""
    tasks = {}
    for label, folder in folders:
        raw = read_raw(folder)
        for record in raw.records:
            if record.graph not in GRAPH_KINDS:
                raise UserError(f"{folder}: measured on the graph {record.graph}; plans run on drawn graphs alone "
                                f"({', '.join(GRAPH_KINDS)})")
            if record.samples_ms:
                tasks[named(label, record.unit), record.stage - 1, (record.nodes, record.edges)] = StageTask(
                    size=record.size, source=GraphSource(kind=record.graph, seed=raw.seed), graph=record.graph,
                    unit=record.unit, stage=record.stage, runtime=record.runtime, threads=record.threads,
                    models=str(folder.parent / MODELS))
    return tasks


def open_stages(tasks: Mapping[tuple[str, int, Size], StageTask], size: Size) -> tuple[OpenedStages, dict[str, Array]]:
    """Opens all stages at one size; returns them and all tensors of the layer."""
    opened, tensors = {}, {}
    for (unit, stage, task_size), task in tasks.items():
        if task_size != size:
            continue
        try:
            opened[unit, stage], fallback = open_stage(task)
        except Refused as refused:
            raise UserError(f"stage {stage + 1} on {unit}: {refused}; it was measured, so is this another machine?") from None
        if fallback:
            raise UserError(f"stage {stage + 1} on {unit}: {fallback}; it was measured without falling back")
        tensors = task.tensors
    return opened, tensors


def plans_to_run(tables: Sequence[StageTables], size: Size, home: str, done: Iterable[PlanRun]) -> list[RankedPlan]:
    """The plans at a measured size that were not run yet: all candidates, the home plan, and the best plan by each table."""
    ran = {run.units for run in done if run.size == size}
    plans = {plan.cost.assignment: plan
             for table in reversed(tables) for plan in reversed(ranked_plans(table.setting(size), home))}
    return [plan for assignment, plan in plans.items() if assignment not in ran]


def run_plans(plans: Sequence[RankedPlan], tasks: Mapping[tuple[str, int, Size], StageTask], size: Size,
              warmup: int, runs: int, rounds: int) -> list[PlanRun]:
    """Runs plans at a measured size. Raises UserError if a plan's output differs from the reference."""
    opened, tensors = open_stages(tasks, size)
    times_ms: dict[Plan, list[list[float]]] = {plan.cost.assignment: [] for plan in plans}
    order = random.Random(0)
    for _ in range(rounds):
        time_round(opened, times_ms, tensors, warmup, runs, order)
    return _plan_runs(plans, times_ms, opened, tensors, size)


def run_with_chains(tables: StageTables, tasks: Mapping[tuple[str, int, Size], StageTask], size: Size, home: str,
                    warmup: int, runs: int, rounds: int) -> tuple[ChainTimes, list[PlanRun]]:
    """Times stages in chains and runs plans in turns, so that slow drift of the machine affects both equally.

    The plans are the candidates, the home plan, and the best plans by stages timed alone (`tables`) and by the first round of
    chains. `warmup` and `runs` are per chain or plan and round. Errors as in `run_plans`.
    """
    opened, tensors = open_stages(tasks, size)
    samples = ChainSamples()
    sample_chains(tables.units, opened, tensors, warmup, runs, samples)
    at_size = tables.of_sizes({size})
    plans = plans_to_run((in_chains(at_size, chain_times(size, samples)), at_size), size, home, ())
    times_ms: dict[Plan, list[list[float]]] = {plan.cost.assignment: [] for plan in plans}
    order = random.Random(0)
    for round_number in range(rounds):
        if round_number:
            sample_chains(tables.units, opened, tensors, warmup, runs, samples)
        time_round(opened, times_ms, tensors, warmup, runs, order)
    times = chain_times(size, samples)
    return times, with_current_predictions(in_chains(at_size, times), _plan_runs(plans, times_ms, opened, tensors, size))


def _output_error(opened: OpenedStages, plan: Plan, tensors: Mapping[str, Array]) -> float:
    output = run_chain(chain_of(opened, plan), tensors)
    error = difference(output, tensors[OUTPUT])
    if not error <= TOLERANCE:
        raise UserError(f"the plan {plan_text(plan)} computes something else: off by {error:.2g} of the largest value")
    return error


def _plan_runs(plans: Sequence[RankedPlan], times_ms: Mapping[Plan, Sequence[Sequence[float]]], opened: OpenedStages,
               tensors: Mapping[str, Array], size: Size) -> list[PlanRun]:
    """The records of plans that were run; `times_ms` has the times of each round, by plan."""
    return [PlanRun(nodes=size[0], edges=size[1], units=plan.cost.assignment, kind=plan.kind, predicted_ms=plan.cost.latency_ms,
                    rounds_ms=tuple(map(tuple, times_ms[plan.cost.assignment])),
                    output_error=_output_error(opened, plan.cost.assignment, tensors)) for plan in plans]



def read_runs(path: Path) -> list[PlanRun]:
    """The runs in a file; none if it does not exist."""
    return files.read_records(path, PlanRun, "remove it, and run the plans again")


def with_current_predictions(tables: StageTables, runs: Iterable[PlanRun]) -> list[PlanRun]:
    """The runs, with latencies predicted from the current tables."""
    runs = list(runs)
    problems = {size: tables.setting(size).problem for size in {run.size for run in runs}}
    return [run.model_copy(update={"predicted_ms": plan_cost(problems[run.size], run.units).latency_ms}) for run in runs]


def size_rows(runs: Iterable[PlanRun]) -> list[dict[str, Any]]:
    """A row per size: errors, and the loss of the plan predicted best against the plan measured best."""
    grouped: defaultdict[Size, list[PlanRun]] = defaultdict(list)
    for run in runs:
        grouped[run.size].append(run)
    return [_size_row(size, group) for size, group in grouped.items()]


def _size_row(size: Size, runs: Sequence[PlanRun]) -> dict[str, Any]:
    best, chosen = min(runs, key=lambda run: run.measured_ms), min(runs, key=lambda run: run.predicted_ms)
    errors = [run.predicted_ms / run.measured_ms - 1.0 for run in runs]
    return {"nodes": size[0], "edges": size[1], "plans": len(runs), "mape": float(np.mean(np.abs(errors))),
            "bias": float(np.mean(errors)), "repeat": float(np.mean([run.repeat_difference for run in runs])),
            "chosen": plan_text(chosen.units), "chosen_ms": chosen.measured_ms, "best": plan_text(best.units),
            "best_ms": best.measured_ms, "best_is_mixed": len(set(best.units)) > 1,
            "regret": chosen.measured_ms / best.measured_ms - 1.0}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The means over all sizes of the errors and of the loss (`regret`), as ratios."""
    means = {name: float(np.mean([row[name] for row in rows])) for name in ("mape", "bias", "repeat", "regret")}
    mixed = [row["regret"] for row in rows if row["best_is_mixed"]]
    return {"sizes": len(rows), "plans": sum(row["plans"] for row in rows), **means,
            "worst_regret": max(row["regret"] for row in rows), "best_is_mixed": len(mixed),
            "regret_where_mixed": float(np.mean(mixed)) if mixed else None}
