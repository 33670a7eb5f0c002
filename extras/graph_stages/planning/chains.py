"""Runs the seven stages as a chain, each on the unit that a plan names, and times the chain, its stages and its copies.

The times are kept in `results/chain_times.jsonl` and `results/chain_copies.jsonl`. In a chain a stage takes longer than alone,
on a CPU by a quarter to a half, and twice as long next to another unit on the same processor. Alone and repeated, it finds its
inputs in the caches; in a chain, earlier stages have used the caches, and after a stage on another unit, that unit's threads
may still be spinning while its own are asleep. Copies take longer, too: other cores or the device have just written the
tensor.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from hase.extras.graph_stages.measuring.layer import GRAPH_INPUTS, HOST, OUTPUT, STAGES, Array
from hase.extras.graph_stages.measuring.records import Direction
from hase.extras.graph_stages.measuring.units import OpenedStage
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.timing import time_runs_ms

Plan: TypeAlias = "tuple[str, ...]"  # the unit of each stage
OpenedStages: TypeAlias = "Mapping[tuple[str, int], OpenedStage]"  # by unit and number of the stage, from 0
CopyKey: TypeAlias = "tuple[str, Direction, str]"  # the device's memory, the direction, the tensor
CHAINS = "chain_times.jsonl"
COPIES = "chain_copies.jsonl"
REMEDY = "remove it, and time the chains again"


@dataclass
class PartTimes:
    """Times of the stages and copies of one run; a stage's time includes the work of `run_chain` for it, but no copies."""

    stages_ms: list[float] = field(default_factory=list)
    copies_ms: dict[CopyKey, float] = field(default_factory=dict)

    def timed_copy(self, key: CopyKey, copy: Callable[[], Any]) -> Any:
        """The result of `copy`, whose time is recorded."""
        began_s = perf_counter()
        value = copy()
        self.copies_ms[key] = 1e3 * (perf_counter() - began_s)
        return value


def value_memory(opened: OpenedStage) -> str:
    """The name of the memory that holds a stage's inputs and outputs. Two runtimes on one device do not share theirs: values
    that pass between them go through the host."""
    return HOST if opened.memory == HOST else f"{opened.memory} of {opened.runtime}"


def run_chain(stages: Sequence[OpenedStage], feed: Mapping[str, Array], times: PartTimes | None = None) -> Array:
    """The layer's output for `feed`, both in the host's memory; adds the times of stages and copies to `times`."""
    times = times or PartTimes()
    values: dict[tuple[str, str], Any] = {(name, HOST): feed[name] for name in GRAPH_INPUTS}  # by tensor and memory
    makers: dict[str, OpenedStage] = {}  # the stage that made each tensor

    def copy_to_host(name: str) -> None:
        if (name, HOST) not in values:
            maker = makers[name]
            values[name, HOST] = times.timed_copy((maker.ran_on, "to_host", name),
                                                  lambda: maker.to_host(name, values[name, value_memory(maker)]))

    def copy_to_unit(name: str, opened: OpenedStage) -> None:
        if (name, value_memory(opened)) in values:
            return
        copy_to_host(name)
        if opened.memory != HOST:
            values[name, value_memory(opened)] = times.timed_copy((opened.ran_on, "to_device", name),
                                                                  lambda: opened.to_unit(name, values[name, HOST]))

    for definition, opened in zip(STAGES, stages, strict=True):
        memory = value_memory(opened)
        for name in definition.inputs:
            copy_to_unit(name, opened)
        began_s = perf_counter()
        outputs = opened.run_resident({name: values[name, memory] for name in definition.inputs})
        values |= {(name, memory): value for name, value in outputs.items()}
        makers |= dict.fromkeys(outputs, opened)
        times.stages_ms.append(1e3 * (perf_counter() - began_s))
    copy_to_host(OUTPUT)
    output: Array = values[OUTPUT, HOST]
    return output


def chain_of(opened: OpenedStages, plan: Plan) -> list[OpenedStage]:
    """The stages of a plan, for `run_chain`."""
    return [opened[unit, stage] for stage, unit in enumerate(plan)]


def time_round(opened: OpenedStages, times_ms: Mapping[Plan, list[list[float]]], feed: Mapping[str, Array], warmup: int,
               runs: int, order: random.Random) -> None:
    """Runs each plan a few times, in random order of plans, and appends the times of this round to those of each plan."""
    for plan in order.sample(list(times_ms), len(times_ms)):
        times_ms[plan].append(time_runs_ms(partial(run_chain, chain_of(opened, plan), feed), runs, warmup=warmup))


class ChainRecord(Frozen):
    """Times of a stage (1 to 7) in chains, without copies; `previous` is the unit of the stage before it, or its own if it is
    the first."""

    nodes: int
    edges: int
    unit: str
    previous: str
    stage: int
    samples_ms: tuple[float, ...]


class CopyRecord(Frozen):
    """Times of copying a tensor in chains, between the host's memory and that of a device."""

    nodes: int
    edges: int
    memory: str
    direction: Direction
    tensor: str
    samples_ms: tuple[float, ...]


@dataclass
class ChainSamples:
    """Times at one graph size, in ms per run; `stages` are by unit, previous unit, and stage (from 1)."""

    stages: defaultdict[tuple[str, str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    copies: defaultdict[CopyKey, list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class ChainTimes:
    """Records of stages and of copies in chains, at one or several graph sizes."""

    stages: tuple[ChainRecord, ...] = ()
    copies: tuple[CopyRecord, ...] = ()


def chain_plans(units: Sequence[str], opened: OpenedStages) -> list[Plan]:
    """Chains in which each stage follows every unit: one unit for all stages, and two in turns; only those that can run."""
    plans = [(unit,) * len(STAGES) for unit in units]
    plans += [tuple(pair[stage % 2] for stage in range(len(STAGES))) for pair in itertools.permutations(units, 2)]
    return [plan for plan in plans if can_run(plan, opened)]


def copy_plans(units: Sequence[str], opened: OpenedStages) -> list[Plan]:
    """Chains that copy the output of stage 2 for stage 4: one unit, and from stage 3 on another one with its own memory."""
    plans = [tuple(pair[stage >= 2] for stage in range(len(STAGES))) for pair in itertools.permutations(units, 2)]
    return [plan for plan in plans if can_run(plan, opened)
            and value_memory(opened[plan[0], 0]) != value_memory(opened[plan[-1], len(STAGES) - 1])]


def can_run(plan: Plan, opened: OpenedStages) -> bool:
    """Whether each stage is open on its unit."""
    return all((unit, stage) in opened for stage, unit in enumerate(plan))


def sample_chains(units: Sequence[str], opened: OpenedStages, feed: Mapping[str, Array], warmup: int, runs: int,
                  samples: ChainSamples) -> None:
    """Runs each chain a few times, and adds the times of its stages and copies to `samples`."""
    chains = chain_plans(units, opened)
    for plan in [*chains, *copy_plans(units, opened)]:
        stages = chain_of(opened, plan)
        for _ in range(warmup):
            run_chain(stages, feed)
        for _ in range(runs):
            times = PartTimes()
            run_chain(stages, feed, times)
            for key, copy_ms in times.copies_ms.items():
                samples.copies[key].append(copy_ms)
            for stage, stage_ms in enumerate(times.stages_ms if plan in chains else ()):
                samples.stages[plan[stage], plan[max(stage - 1, 0)], stage + 1].append(stage_ms)


def chain_times(size: tuple[int, int], samples: ChainSamples) -> ChainTimes:
    """The records of the samples at one size (nodes, edges)."""
    nodes, edges = size
    return ChainTimes(
        tuple(ChainRecord(nodes=nodes, edges=edges, unit=unit, previous=previous, stage=stage, samples_ms=tuple(samples_ms))
              for (unit, previous, stage), samples_ms in samples.stages.items()),
        tuple(CopyRecord(nodes=nodes, edges=edges, memory=memory, direction=direction, tensor=tensor,
                         samples_ms=tuple(samples_ms))
              for (memory, direction, tensor), samples_ms in samples.copies.items()))


def time_in_chains(size: tuple[int, int], units: Sequence[str], opened: OpenedStages, feed: Mapping[str, Array], warmup: int,
                   runs: int, rounds: int) -> ChainTimes:
    """Times each stage on each unit after each unit, and each copy; `warmup` and `runs` are per chain and round."""
    samples = ChainSamples()
    for _ in range(rounds):
        sample_chains(units, opened, feed, warmup, runs, samples)
    return chain_times(size, samples)


def append_chains(folder: Path, times: ChainTimes) -> None:
    """Appends the records of one size to both files. Copies are written first, so that a size with stages is complete."""
    if times.copies:
        files.append_records(folder / COPIES, times.copies)
    files.append_records(folder / CHAINS, times.stages)


def timed_sizes(folder: Path) -> set[tuple[int, int]]:
    """The sizes (nodes, edges) at which chains were timed."""
    return {(record.nodes, record.edges) for record in read_chains(folder).stages}


def read_chains(folder: Path) -> ChainTimes:
    """All records in a results folder; none if chains were not timed."""
    return ChainTimes(tuple(files.read_records(folder / CHAINS, ChainRecord, REMEDY)),
                      tuple(files.read_records(folder / COPIES, CopyRecord, REMEDY)))
