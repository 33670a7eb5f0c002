"""Plans run for real, and how far their predictions are off."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.extras.graph_stages.chains import (
    ChainSamples,
    ChainTimes,
    OpenedStages,
    Plan,
    chain_times,
    run_chain,
    sample_chains,
    time_chains,
    time_round,
)
from hase.extras.graph_stages.graphs import DRAWN, GraphSource
from hase.extras.graph_stages.layer import OUTPUT, Array
from hase.extras.graph_stages.opening import Refused, difference, open_stage
from hase.extras.graph_stages.plans import plan_cost
from hase.extras.graph_stages.ranking import RankedPlan, described, ranked
from hase.extras.graph_stages.records import RAW, StageRecord, read_raw
from hase.extras.graph_stages.tables import Size, StageTables, in_chains, named
from hase.extras.graph_stages.units import StageTask
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.logger import get_logger

RUNS = "plan_runs.jsonl"
UNSTEADY = 0.1  # difference between the rounds of a plan above which its comparison says little
MODELS = "exported_models"  # next to a folder of results
TOLERANCE = 2e-2  # of a plan's output, relative to the largest value: units may compute in FP16
log = get_logger("plan_stages")


class PlanRun(Frozen):
    """A plan that was run at one size.

    Attributes:
        nodes, edges: the size.
        units: of each stage.
        kind: as in `RankedPlan`.
        predicted_ms: its latency by the tables when it was run.
        rounds_ms: measured latencies, those of each round together.
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
        """How far the medians of the two halves of its rounds lie apart, relative to their mean; NaN for a single round."""
        half = len(self.rounds_ms) // 2
        if not half:
            return float("nan")
        first, second = (float(np.median(np.concatenate(rounds))) for rounds in (self.rounds_ms[:half], self.rounds_ms[half:]))
        return abs(first - second) / ((first + second) / 2)


def stage_tasks(folders: Sequence[tuple[str, Path]]) -> dict[tuple[str, int, Size], StageTask]:
    """How to open what was measured: by unit, stage (from 0) and size.

    Args:
        folders: as in `read_tables`.

    Raises:
        UserError: a file of measurements is missing, or of a graph from a file.
    """
    tasks = {}
    for label, folder in folders:
        raw = read_raw(folder / RAW)
        for record in raw.records:
            if record.graph not in DRAWN:
                raise UserError(f"{folder}: measured on the graph {record.graph}; plans run on drawn graphs alone "
                                f"({', '.join(DRAWN)})")
            if record.samples_ms:
                size = (record.nodes, record.edges)
                tasks[named(label, record.unit), record.stage - 1, size] = _stage_task(record, raw.seed, folder)
    return tasks


def _stage_task(record: StageRecord, seed: int, folder: Path) -> StageTask:
    """By the runtime that ran it when it was measured."""
    return StageTask(size=record.size, source=GraphSource(kind=record.graph, seed=seed), graph=record.graph, unit=record.unit,
                     stage=record.stage, runtime=record.runtime, threads=record.threads, models=str(folder.parent / MODELS))


def opened_at(tasks: Mapping[tuple[str, int, Size], StageTask], size: Size) -> tuple[OpenedStages, dict[str, Array]]:
    """All stages at one size, opened, and all tensors of the layer there.

    Raises:
        UserError: a stage that was measured can't be opened now.
    """
    opened, tensors = {}, {}
    for (unit, stage, of_size), task in tasks.items():
        if of_size != size:
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
    """All candidates, home and the best plan by each of some tables, at a size that was measured; those that were not run."""
    ran = {run.units for run in done if run.size == size}
    plans = {plan.cost.assignment: plan for table in reversed(tables) for plan in reversed(ranked(table.setting(size), home))}
    return [plan for assignment, plan in plans.items() if assignment not in ran]


def run_plans(wanted: Sequence[RankedPlan], tasks: Mapping[tuple[str, int, Size], StageTask], size: Size,
              warmup: int, runs: int, rounds: int) -> list[PlanRun]:
    """Runs plans at a size that was measured.

    Raises:
        UserError: a stage can't be opened, or a plan computes something else than the reference.
    """
    opened, tensors = opened_at(tasks, size)
    times_ms = time_chains(opened, [plan.cost.assignment for plan in wanted], tensors, warmup, runs, rounds)
    return _judged(wanted, times_ms, opened, tensors, size)


def run_with_chains(tables: StageTables, tasks: Mapping[tuple[str, int, Size], StageTask], size: Size, home: str,
                    warmup: int, runs: int, rounds: int) -> tuple[ChainTimes, list[PlanRun]]:
    """Times stages in chains and runs the plans in turns, so that what changes slowly on the machine reaches both.

    The plans are the candidates, home, and the best of all by times alone and by the first round of chains.

    Args:
        tables: of stages that ran alone.
        tasks: as `stage_tasks` gives them.
        size: one that was measured.
        home: the unit of the candidates.
        warmup, runs: of a chain or a plan in one round.
        rounds: how often each has its turn.

    Raises:
        UserError: a stage can't be opened, or a plan computes something else than the reference.
    """
    opened, tensors = opened_at(tasks, size)
    samples = ChainSamples()
    sample_chains(tables.units, opened, tensors, warmup, runs, samples)
    here = tables.only(size)
    wanted = plans_left((in_chains(here, chain_times(size, samples)), here), size, home, ())
    times_ms: dict[Plan, list[list[float]]] = {plan.cost.assignment: [] for plan in wanted}
    order = random.Random(0)
    for number in range(rounds):
        if number:
            sample_chains(tables.units, opened, tensors, warmup, runs, samples)
        time_round(opened, times_ms, tensors, warmup, runs, order)
    times = chain_times(size, samples)
    return times, predicted_anew(in_chains(here, times), _judged(wanted, times_ms, opened, tensors, size))


def _output_error(opened: OpenedStages, plan: Plan, tensors: Mapping[str, Array]) -> float:
    output = run_chain([opened[unit, stage] for stage, unit in enumerate(plan)], tensors)
    off = difference(output, tensors[OUTPUT])
    if not off <= TOLERANCE:
        raise UserError(f"the plan {described(plan)} computes something else: off by {off:.2g} of the largest value")
    return off


def _judged(plans: Sequence[RankedPlan], times_ms: Mapping[Plan, Sequence[Sequence[float]]], opened: OpenedStages,
            tensors: Mapping[str, Array], size: Size) -> list[PlanRun]:
    """The times of each round by plan, as records."""
    return [PlanRun(nodes=size[0], edges=size[1], units=plan.cost.assignment, kind=plan.kind, predicted_ms=plan.cost.latency_ms,
                    rounds_ms=tuple(map(tuple, times_ms[plan.cost.assignment])),
                    output_error=_output_error(opened, plan.cost.assignment, tensors)) for plan in plans]


def append_runs(path: Path, runs: Iterable[PlanRun]) -> None:
    """Adds the runs at one size to a file, as one line."""
    files.append_records(path, runs)


def read_runs(path: Path) -> list[PlanRun]:
    """The runs that a file holds; none if it is not there.

    Raises:
        UserError: a line is damaged.
    """
    return files.read_records(path, PlanRun, "remove it, and run the plans again")


def predicted_anew(tables: StageTables, runs: Iterable[PlanRun]) -> list[PlanRun]:
    """The runs with latencies predicted from the tables of now."""
    runs = list(runs)
    problems = {size: tables.setting(size).problem for size in {run.size for run in runs}}
    return [run.model_copy(update={"predicted_ms": plan_cost(problems[run.size], run.units).latency_ms}) for run in runs]


def size_rows(runs: Iterable[PlanRun]) -> list[dict[str, Any]]:
    """A row for each size: errors, and what the plan that was predicted to be the best loses against the best measured one."""
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
    """The figures over all sizes; ratios, not per cent."""
    mixed = [row["regret"] for row in rows if row["best_is_mixed"]]
    return {"sizes": len(rows), "plans": sum(row["plans"] for row in rows),
            "mape": float(np.mean([row["mape"] for row in rows])), "bias": float(np.mean([row["bias"] for row in rows])),
            "repeat": float(np.mean([row["repeat"] for row in rows])),
            "regret": float(np.mean([row["regret"] for row in rows])), "worst_regret": max(row["regret"] for row in rows),
            "best_is_mixed": len(mixed), "regret_where_mixed": float(np.mean(mixed)) if mixed else None}
