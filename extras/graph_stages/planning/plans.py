"""The cost of a plan, and the best plan, found exactly by dynamic programming.

A plan names a unit for each stage. Stages run one after another. Tensors are in one or several *memories*; a stage reads and
writes the memory of its unit. A tensor that is missing there is copied first and also stays where it was, so nothing is copied
twice. Two device memories exchange tensors through the host's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from hase.extras.graph_stages.measuring.layer import HOST
from hase.utils.errors import UserError

Holders: TypeAlias = "frozenset[tuple[str, str]]"  # (tensor, memory) for each copy that is still needed
Objective: TypeAlias = Literal["latency", "throughput"]


@dataclass(frozen=True)
class StageData:
    """The tensors that a stage reads and writes, by name."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class StageCost:
    """Cost of a stage on a unit.

    Args:
        ms: its time, without the copies that the plan adds.
        memory: where it reads and writes: HOST (its time then includes the unit's own copies), or a processor's name.
        processor: what it occupies. Two units may be two ways to use one processor.
        std_ms: standard deviation of its runs.
        after_ms: its time after a stage on another unit, by that unit; `ms` applies to units not listed. A unit on another
            processor affects only the stage right after it. A unit on the same processor affects all stages of the plan, since
            its threads spin longer than a stage takes.
    """

    ms: float
    memory: str
    processor: str
    std_ms: float = 0.0
    after_ms: Mapping[str, float] = field(default_factory=dict)

    def beside(self, others: Iterable[str]) -> StageCost:
        """The cost if other units matter: the longest of its times after them."""
        times_ms = [self.after_ms[unit] for unit in others if unit in self.after_ms]
        return replace(self, ms=max(times_ms)) if times_ms else self


@dataclass(frozen=True)
class PlanningProblem:
    """One input size: the cost of each stage on each unit, and of moving each tensor between memories."""

    stages: tuple[StageData, ...]  # in run order
    inputs: tuple[str, ...]  # tensors in the host's memory before a run
    outputs: tuple[str, ...]  # tensors that must be there after it
    units: tuple[str, ...]
    costs: Mapping[tuple[str, int], StageCost]  # by unit and stage number (from 0); a missing stage cannot run there
    to_device_ms: Mapping[tuple[str, str], float]  # copy time from the host, by device memory and tensor
    to_host_ms: Mapping[tuple[str, str], float]
    host: str = "CPU"  # the processor that waits for copies

    def units_for(self, stage: int) -> list[str]:
        """The units that can run a stage."""
        return [unit for unit in self.units if (unit, stage) in self.costs]

    def can_run(self, assignment: Sequence[str]) -> bool:
        """Whether each stage can run on the unit named for it."""
        return all((unit, stage) in self.costs for stage, unit in enumerate(assignment))

    @property
    def shared(self) -> dict[str, frozenset[str]]:
        """For each unit, the other units on its processors."""
        uses = {unit: {cost.processor for (name, _), cost in self.costs.items() if name == unit} for unit in self.units}
        return {unit: frozenset(name for name in self.units if name != unit and uses[unit] & uses[name]) for unit in uses}

    @property
    def begin(self) -> Holders:
        """Where the tensors are before a run."""
        return frozenset((name, HOST) for name in self.inputs)


@dataclass(frozen=True)
class PlanStep:
    """A stage after its copies (tensor, from memory, to memory, ms); after the last stage, copies of the outputs alone."""

    cost: StageCost | None
    copies: tuple[tuple[str, str, str, float], ...]

    @property
    def ms(self) -> float:
        return (self.cost.ms if self.cost else 0.0) + sum(ms for *_, ms in self.copies)


@dataclass(frozen=True)
class PlanCost:
    """A plan and its predicted times."""

    assignment: tuple[str, ...]  # the unit of each stage
    steps: tuple[PlanStep, ...]
    busy_ms: Mapping[str, float]  # busy time of one run, by processor

    @property
    def latency_ms(self) -> float:
        """Time of one run: all stages and copies in sequence."""
        return sum(step.ms for step in self.steps)

    @property
    def std_ms(self) -> float:
        """Standard deviation of runs, if stages vary independently."""
        return math.sqrt(sum(step.cost.std_ms**2 for step in self.steps if step.cost))

    @property
    def transfer_ms(self) -> float:
        """Time of the copies that the plan adds. Units that work in the host's memory have copies in their stage times."""
        return sum(ms for step in self.steps for *_, ms in step.copies)

    @property
    def interval_ms(self) -> float:
        """Time between results when runs follow each other without pause; the busiest processor is then always busy."""
        return max(self.busy_ms.values())

    @property
    def throughput_per_s(self) -> float:
        return 1e3 / self.interval_ms

    @property
    def units(self) -> tuple[str, ...]:
        """The units used, in order of first use."""
        return tuple(dict.fromkeys(self.assignment))


def copies_to(problem: PlanningProblem, holders: Holders, names: Sequence[str], memory: str) -> tuple[
        tuple[tuple[str, str, str, float], ...], Holders]:
    """The copies that bring tensors into a memory, and where the tensors are afterwards."""
    copies: list[tuple[str, str, str, float]] = []
    for name in names:
        if (name, memory) in holders:
            continue
        if (name, HOST) not in holders:
            source = next(where for held, where in sorted(holders) if held == name)
            copies.append((name, source, HOST, problem.to_host_ms[source, name]))
        if memory != HOST:
            copies.append((name, HOST, memory, problem.to_device_ms[memory, name]))
        holders |= {(name, where) for where in (HOST, memory)}
    return tuple(copies), holders


def _after_stage(problem: PlanningProblem, holders: Holders, stage: int, unit: str,
                 others: Iterable[str]) -> tuple[PlanStep, Holders]:
    """The step of a stage on a unit, and where the tensors are afterwards; `others` are the units that slow it down."""
    cost = problem.costs[unit, stage].beside(others)
    copies, holders = copies_to(problem, holders, problem.stages[stage].reads, cost.memory)
    holders |= {(name, cost.memory) for name in problem.stages[stage].writes}
    later = {name for data in problem.stages[stage + 1:] for name in data.reads} | set(problem.outputs)
    return PlanStep(cost, copies), frozenset((name, where) for name, where in holders if name in later)


def delivered(problem: PlanningProblem, holders: Holders) -> PlanStep:
    """The last step, which copies the outputs back to the host."""
    return PlanStep(None, copies_to(problem, holders, problem.outputs, HOST)[0])


def busy_times(problem: PlanningProblem, steps: Sequence[PlanStep]) -> dict[str, float]:
    """How long one run occupies each processor, in ms. A copy occupies both ends, since the host's processor waits for it."""
    busy: dict[str, float] = {}
    for step in steps:
        spent = [(step.cost.processor, step.cost.ms)] if step.cost else []
        spent += [(problem.host if memory == HOST else memory, ms) for *_, source, target, ms in step.copies
                  for memory in (source, target)]
        for processor, ms in spent:
            busy[processor] = busy.get(processor, 0.0) + ms
    return busy


def plan_cost(problem: PlanningProblem, assignment: Sequence[str]) -> PlanCost:
    """Cost of a run with each stage on its assigned unit. Raises UserError if a unit cannot run its stage."""
    holders, steps, shared = problem.begin, [], problem.shared
    for stage, unit in enumerate(assignment):
        if (unit, stage) not in problem.costs:
            raise UserError(f"stage {stage + 1} has no time on {unit}; it was measured on: "
                            f"{', '.join(problem.units_for(stage)) or 'no unit'}")
        others = (shared[unit] & set(assignment)) | set(assignment[stage - 1:stage])
        step, holders = _after_stage(problem, holders, stage, unit, others - {unit})
        steps.append(step)
    steps.append(delivered(problem, holders))
    return PlanCost(tuple(assignment), tuple(steps), busy_times(problem, steps))


@dataclass(frozen=True)
class _Partial:
    """The first stages of a plan: units and cost (the latency, or the busy time of each processor)."""

    assignment: tuple[str, ...]
    cost: tuple[float, ...]


def best_plan(problem: PlanningProblem, objective: Objective = "latency") -> PlanCost:
    """The plan with the lowest latency or the highest throughput, of all assignments of stages to units."""
    for stage in range(len(problem.stages)):
        if not problem.units_for(stage):
            raise UserError(f"stage {stage + 1} was measured on no unit; measure it first: "
                            "python extras/graph_stages/profile_stages.py --measure")
    complete = [partial for units in _unit_sets(problem) for partial in _best_of(problem, objective, units)]
    return plan_cost(problem, min(complete, key=lambda partial: max(partial.cost)).assignment)


def _unit_sets(problem: PlanningProblem) -> list[frozenset[str]]:
    """The sets of units to plan with: all at once, unless units on one processor slow each other down when in use."""
    units = [unit for unit in problem.units if any(name == unit for name, _ in problem.costs)]
    shared = problem.shared
    if not any(shared[unit] & cost.after_ms.keys() for (unit, _), cost in problem.costs.items()):
        return [frozenset(units)]
    return [frozenset(chosen) for count in range(1, len(units) + 1) for chosen in itertools.combinations(units, count)]


def _best_of(problem: PlanningProblem, objective: Objective, units: frozenset[str]) -> list[_Partial]:
    """The best plans with some units, with slowdowns as if all of them were used; none if they cannot run a stage.

    Dynamic programming over stages: the future depends only on the unit of the last stage, and on where the tensors are that
    later stages read. Of all beginnings with the same state only the cheapest is kept; for throughput, all that no other beats
    on every processor.
    """
    processors = sorted({problem.host, *(cost.processor for cost in problem.costs.values())})
    shared = problem.shared

    def cost_of(step: PlanStep) -> tuple[float, ...]:
        if objective == "latency":
            return (step.ms,)
        busy = busy_times(problem, [step])
        return tuple(busy.get(processor, 0.0) for processor in processors)

    kept: dict[tuple[Holders, str], list[_Partial]] = {
        (problem.begin, ""): [_Partial((), (0.0,) * len(cost_of(PlanStep(None, ()))))]}
    for stage in range(len(problem.stages)):
        reached: dict[tuple[Holders, str], list[_Partial]] = {}
        for (holders, last), beginnings in kept.items():
            for unit in units.intersection(problem.units_for(stage)):
                step, after = _after_stage(problem, holders, stage, unit, ((shared[unit] & units) | {last}) - {unit})
                reached.setdefault((after, unit), []).extend(_extended(beginnings, cost_of(step), unit))
        kept = {state: _undominated(partials) for state, partials in reached.items()}
    return [ended for (holders, _), partials in kept.items()
            for ended in _extended(partials, cost_of(delivered(problem, holders)))]


def _extended(partials: Sequence[_Partial], cost: tuple[float, ...], *units: str) -> list[_Partial]:
    return [_Partial((*partial.assignment, *units), tuple(a + b for a, b in zip(partial.cost, cost, strict=True)))
            for partial in partials]


def _undominated(partials: Sequence[_Partial]) -> list[_Partial]:
    """The beginnings that are not dominated: no other one is at least as good in every cost."""
    kept: list[_Partial] = []
    for partial in sorted(partials, key=lambda partial: partial.cost):
        if not any(all(a <= b for a, b in zip(better.cost, partial.cost, strict=True)) for better in kept):
            kept.append(partial)
    return kept
