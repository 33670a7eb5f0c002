"""Ranks plans by predicted time, at one size or several, and runs them to find how far off the predictions are."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from hase.extras.graph_stages.measuring.layer import DRAWN, OUTPUT, Array, GraphSource
from hase.extras.graph_stages.measuring.records import StageRecord, read_raw
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
from hase.utils.logger import get_logger

Kind: TypeAlias = Literal["best of all", "home", "candidate"]
RUNS = "plan_runs.jsonl"
UNSTEADY = 0.1  # a plan's comparison is unreliable above this difference of rounds
MODELS = "exported_models"  # next to a folder of results
TOLERANCE = 2e-2  # of a plan's output, relative to the largest value: units may compute in FP16
log = get_logger("plan_stages")


class RankedPlan(NamedTuple):
    """A plan, and why it is listed: `home` runs all stages at home, `candidate` moves one block of them to another unit."""

    kind: Kind
    cost: PlanCost

    def row(self, home_ms: float | None) -> dict[str, Any]:
        """The plan as a table row; `home_ms` is the latency of staying at home."""
        cost = self.cost
        return {"plan": described(cost.assignment), "kind": self.kind, "latency (ms)": cost.latency_ms, "std (ms)": cost.std_ms,
                "copies (ms)": cost.transfer_ms, "runs/s": cost.throughput_per_s,
                "home / plan": home_ms / cost.latency_ms if home_ms else None}


def described(assignment: Sequence[str]) -> str:
    """The unit of each stage as text: `CPU 1-2, CUDA 3-6, CPU 7`."""
    parts, first = [], 1
    for unit, same in groupby(assignment):
        last = first + len(list(same)) - 1
        parts.append(f"{unit} {first}" if first == last else f"{unit} {first}-{last}")
        first = last + 1
    return ", ".join(parts)


def home_of(tables: StageTables, wanted: str | None) -> str:
    """The unit that plans start from: the one wanted, else CPU, else the first."""
    if wanted is None:
        return "CPU" if "CPU" in tables.units else tables.units[0]
    if wanted not in tables.units:
        raise UserError(f"--home {wanted}: not among the units that were measured: {', '.join(tables.units)}")
    return wanted


def candidate_plans(stages: int, home: str, away: str) -> list[tuple[str, ...]]:
    """All plans that move one contiguous block of stages from home to another unit: 28 for seven stages, n (n + 1) / 2.

    The specification asks for 28 candidates without naming them; this is Hase's reading of it.
    """
    return [tuple(away if first <= stage < end else home for stage in range(stages))
            for first in range(stages) for end in range(first + 1, stages + 1)]


def possible_plans(problem: PlanningProblem, home: str) -> Iterator[PlanCost]:
    """The home plan, and the candidates that move a block from home to any other unit; only plans whose stages can all run."""
    stages = len(problem.stages)
    assignments = [(home,) * stages, *(plan for unit in problem.units if unit != home
                                       for plan in candidate_plans(stages, home, unit))]
    for assignment in assignments:
        if problem.can_run(assignment):
            yield plan_cost(problem, assignment)


def ranked(setting: Setting, home: str, objective: Objective = "latency") -> list[RankedPlan]:
    """The best of all assignments, the home plan and the candidates, best first."""
    best = best_plan(setting.problem, objective)
    plans = [RankedPlan("best of all", best)]
    for cost in possible_plans(setting.problem, home):
        plans.append(RankedPlan("home" if set(cost.assignment) == {home} else "candidate", cost))
    value = (lambda plan: plan.cost.latency_ms) if objective == "latency" else (lambda plan: plan.cost.interval_ms)
    return sorted(plans, key=lambda plan: (value(plan), plan.kind != "best of all"))


def home_latency(plans: Iterable[RankedPlan]) -> float | None:
    """The latency at home, in ms; None if home cannot run some stage."""
    return next((plan.cost.latency_ms for plan in plans if plan.kind == "home"), None)


def plan_table(tables: StageTables, sizes: Iterable[Size], home: str, objective: Objective = "latency",
               extrapolate: bool = False) -> list[dict[str, Any]]:
    """A row per size with its best plan; UserError if a size needs extrapolation that is not allowed.

    `loss_of_one_plan` is the loss (in time or throughput) of keeping the same plan at all sizes; None if it cannot run.
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
        rows.append({"nodes": size[0], "edges": size[1], "basis": setting.basis, "plan": described(cost.assignment),
                     "units": list(cost.assignment), "mixed": len(cost.units) > 1, "latency_ms": cost.latency_ms,
                     "throughput_per_s": cost.throughput_per_s, "home_ms": home_ms, "one_plan": described(fixed),
                     "loss_of_one_plan": losses[fixed][size]})
    return rows


def _loss(setting: Setting, plan: Sequence[str], best: PlanCost, objective: Objective) -> float | None:
    """How much worse a plan is than the best: ratio minus 1; None if it cannot run."""
    if not setting.problem.can_run(plan):
        return None
    cost = plan_cost(setting.problem, plan)
    return (cost.latency_ms / best.latency_ms if objective == "latency" else cost.interval_ms / best.interval_ms) - 1.0


def left_out_rows(tables: StageTables) -> list[dict[str, Any]]:
    """For each stage, unit and size between others: the measured time, and the time interpolated without it."""
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
    """Mean error of the times at left-out sizes, as a ratio; None if no size lies between others."""
    errors = [abs(row["error"]) for row in left_out_rows(tables)]
    return sum(errors) / len(errors) if errors else None


# running plans -----------------------------------------------------------------------------------------------------------

class PlanRun(Frozen):
    """A plan (one unit per stage) that was run at one size.

    Attributes:
        predicted_ms: latency by the tables at the time of the run.
        rounds_ms: measured latencies, grouped by round.
        output_error: the largest difference from the reference, relative to the largest value.
    """

    nodes: int
    edges: int
    units: tuple[str, ...]
    kind: str
    predicted_ms: float
    rounds_ms: tuple[tuple[float, ...], ...]
    output_error: float

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
            if record.graph not in DRAWN:
                raise UserError(f"{folder}: measured on the graph {record.graph}; plans run on drawn graphs alone "
                                f"({', '.join(DRAWN)})")
            if record.samples_ms:
                size = (record.nodes, record.edges)
                tasks[named(label, record.unit), record.stage - 1, size] = _stage_task(record, raw.seed, folder)
    return tasks


def _stage_task(record: StageRecord, seed: int, folder: Path) -> StageTask:
    """The task for a record, with the runtime that ran it when it was measured."""
    return StageTask(size=record.size, source=GraphSource(kind=record.graph, seed=seed), graph=record.graph, unit=record.unit,
                     stage=record.stage, runtime=record.runtime, threads=record.threads, models=str(folder.parent / MODELS))


def opened_at(tasks: Mapping[tuple[str, int, Size], StageTask], size: Size) -> tuple[OpenedStages, dict[str, Array]]:
    """All stages at one size, opened, and all tensors of the layer there."""
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


def plans_left(tables: Sequence[StageTables], size: Size, home: str, done: Iterable[PlanRun]) -> list[RankedPlan]:
    """The plans at a measured size that were not run yet: all candidates, home, and the best plan by each of some tables."""
    ran = {run.units for run in done if run.size == size}
    plans = {plan.cost.assignment: plan for table in reversed(tables) for plan in reversed(ranked(table.setting(size), home))}
    return [plan for assignment, plan in plans.items() if assignment not in ran]


def run_plans(wanted: Sequence[RankedPlan], tasks: Mapping[tuple[str, int, Size], StageTask], size: Size,
              warmup: int, runs: int, rounds: int) -> list[PlanRun]:
    """Runs plans at a measured size. Raises UserError if a plan's output differs from the reference."""
    opened, tensors = opened_at(tasks, size)
    times_ms: dict[Plan, list[list[float]]] = {plan.cost.assignment: [] for plan in wanted}
    order = random.Random(0)
    for _ in range(rounds):
        time_round(opened, times_ms, tensors, warmup, runs, order)
    return _plan_runs(wanted, times_ms, opened, tensors, size)


def run_with_chains(tables: StageTables, tasks: Mapping[tuple[str, int, Size], StageTask], size: Size, home: str,
                    warmup: int, runs: int, rounds: int) -> tuple[ChainTimes, list[PlanRun]]:
    """Times stages in chains and runs plans in turns, so that slow drift of the machine affects both equally.

    The plans are the candidates, home, and the best plan by times alone and by the first round of chains. `tables` are of
    stages that ran alone; `warmup` and `runs` are per chain or plan and round. Errors as in `run_plans`.
    """
    opened, tensors = opened_at(tasks, size)
    samples = ChainSamples()
    sample_chains(tables.units, opened, tensors, warmup, runs, samples)
    at_size = tables.only(size)
    wanted = plans_left((in_chains(at_size, chain_times(size, samples)), at_size), size, home, ())
    times_ms: dict[Plan, list[list[float]]] = {plan.cost.assignment: [] for plan in wanted}
    order = random.Random(0)
    for round_number in range(rounds):
        if round_number:
            sample_chains(tables.units, opened, tensors, warmup, runs, samples)
        time_round(opened, times_ms, tensors, warmup, runs, order)
    times = chain_times(size, samples)
    return times, predicted_now(in_chains(at_size, times), _plan_runs(wanted, times_ms, opened, tensors, size))


def _output_error(opened: OpenedStages, plan: Plan, tensors: Mapping[str, Array]) -> float:
    output = run_chain(chain_of(opened, plan), tensors)
    error = difference(output, tensors[OUTPUT])
    if not error <= TOLERANCE:
        raise UserError(f"the plan {described(plan)} computes something else: off by {error:.2g} of the largest value")
    return error


def _plan_runs(plans: Sequence[RankedPlan], times_ms: Mapping[Plan, Sequence[Sequence[float]]], opened: OpenedStages,
               tensors: Mapping[str, Array], size: Size) -> list[PlanRun]:
    """Converts the times of each round, by plan, to records."""
    return [PlanRun(nodes=size[0], edges=size[1], units=plan.cost.assignment, kind=plan.kind, predicted_ms=plan.cost.latency_ms,
                    rounds_ms=tuple(map(tuple, times_ms[plan.cost.assignment])),
                    output_error=_output_error(opened, plan.cost.assignment, tensors)) for plan in plans]


def append_runs(path: Path, runs: Iterable[PlanRun]) -> None:
    """Appends the runs at one size to a file, as one line."""
    files.append_records(path, runs)


def read_runs(path: Path) -> list[PlanRun]:
    """The runs in a file; none if it does not exist."""
    return files.read_records(path, PlanRun, "remove it, and run the plans again")


def predicted_now(tables: StageTables, runs: Iterable[PlanRun]) -> list[PlanRun]:
    """The runs, with latencies predicted from the current tables."""
    runs = list(runs)
    problems = {size: tables.setting(size).problem for size in {run.size for run in runs}}
    return [run.model_copy(update={"predicted_ms": plan_cost(problems[run.size], run.units).latency_ms}) for run in runs]


def size_rows(runs: Iterable[PlanRun]) -> list[dict[str, Any]]:
    """A row per size: errors, and the loss of the plan predicted best against the plan measured best."""
    grouped: dict[Size, list[PlanRun]] = {}
    for run in runs:
        grouped.setdefault(run.size, []).append(run)
    return [_size_row(size, group) for size, group in grouped.items()]


def _size_row(size: Size, runs: Sequence[PlanRun]) -> dict[str, Any]:
    best, chosen = min(runs, key=lambda run: run.measured_ms), min(runs, key=lambda run: run.predicted_ms)
    errors = [run.predicted_ms / run.measured_ms - 1.0 for run in runs]
    return {"nodes": size[0], "edges": size[1], "plans": len(runs), "mape": float(np.mean(np.abs(errors))),
            "bias": float(np.mean(errors)), "repeat": float(np.mean([run.repeat_difference for run in runs])),
            "chosen": described(chosen.units), "chosen_ms": chosen.measured_ms, "best": described(best.units),
            "best_ms": best.measured_ms, "best_is_mixed": len(set(best.units)) > 1,
            "regret": chosen.measured_ms / best.measured_ms - 1.0}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures over all sizes, as ratios."""
    mixed = [row["regret"] for row in rows if row["best_is_mixed"]]
    return {"sizes": len(rows), "plans": sum(row["plans"] for row in rows),
            "mape": float(np.mean([row["mape"] for row in rows])), "bias": float(np.mean([row["bias"] for row in rows])),
            "repeat": float(np.mean([row["repeat"] for row in rows])),
            "regret": float(np.mean([row["regret"] for row in rows])), "worst_regret": max(row["regret"] for row in rows),
            "best_is_mixed": len(mixed), "regret_where_mixed": float(np.mean(mixed)) if mixed else None}
