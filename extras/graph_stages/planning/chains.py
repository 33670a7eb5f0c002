"""Runs the seven stages as a chain, each on the unit that a plan names, and times the chain, its stages and its copies.

The times are kept in `results/chain_times.jsonl` and `results/chain_copies.jsonl`. A stage that is timed alone, repeatedly,
finds its inputs in the caches. In a chain, earlier stages have used the caches; after a stage on another unit, that unit's
threads may still be spinning, and its own may be asleep. So the stage takes longer: on a CPU by a quarter to a half, and twice
as long next to another unit on the same processor. Copies take longer too: the tensor was just written by other cores or by the
device.
"""

from __future__ import annotations

import itertools
import random
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
CopyKey: TypeAlias = "tuple[str, Direction, str]"  # the memory of a device, by its name; from or to the host's; the tensor
CHAINS = "chain_times.jsonl"
COPIES = "chain_copies.jsonl"
REMEDY = "remove it, and time the chains again"


@dataclass
class PartTimes:
    """Times of one run's parts; a stage's time includes the work of `run_chain` for it, but no copies."""

    stages_ms: list[float] = field(default_factory=list)
    copies_ms: dict[CopyKey, float] = field(default_factory=dict)

    def copied(self, key: CopyKey, copy: Callable[[], Any]) -> Any:
        """Makes a copy, records its time and returns its result."""
        began_s = perf_counter()
        value = copy()
        self.copies_ms[key] = 1e3 * (perf_counter() - began_s)
        return value


def value_memory(opened: OpenedStage) -> str:
    """Where a stage's values are. Values that pass between two runtimes on one device go through the host."""
    return HOST if opened.memory == HOST else f"{opened.memory} of {opened.runtime}"


def run_chain(stages: Sequence[OpenedStage], feed: Mapping[str, Array], times: PartTimes | None = None) -> Array:
    """Runs the stages on `feed` and returns the layer's output, both in the host's memory; adds part times to `times`."""
    times = times or PartTimes()
    held: dict[tuple[str, str], Any] = {(name, HOST): feed[name] for name in GRAPH_INPUTS}
    makers: dict[str, OpenedStage] = {}  # the stage that made each tensor

    def fetch(name: str) -> None:
        if (name, HOST) not in held:
            maker = makers[name]
            held[name, HOST] = times.copied((maker.ran_on, "to_host", name),
                                            lambda: maker.to_host(name, held[name, value_memory(maker)]))

    def bring(name: str, opened: OpenedStage) -> None:
        if (name, value_memory(opened)) in held:
            return
        fetch(name)
        if opened.memory != HOST:
            held[name, value_memory(opened)] = times.copied((opened.ran_on, "to_device", name),
                                                        lambda: opened.to_unit(name, held[name, HOST]))

    for definition, opened in zip(STAGES, stages, strict=True):
        where = value_memory(opened)
        for name in definition.inputs:
            bring(name, opened)
        began_s = perf_counter()
        values = opened.run_resident({name: held[name, where] for name in definition.inputs})
        held |= {(name, where): value for name, value in values.items()}
        makers |= dict.fromkeys(values, opened)
        times.stages_ms.append(1e3 * (perf_counter() - began_s))
    fetch(OUTPUT)
    output: Array = held[OUTPUT, HOST]
    return output


def time_round(opened: OpenedStages, times_ms: Mapping[Plan, list[list[float]]], feed: Mapping[str, Array], warmup: int,
               runs: int, order: random.Random) -> None:
    """Runs each plan a few times, in random order of plans, and appends the times of this round to those of each plan."""
    for plan in order.sample(list(times_ms), len(times_ms)):
        stages = [opened[unit, stage] for stage, unit in enumerate(plan)]
        times_ms[plan].append(time_runs_ms(partial(run_chain, stages, feed), runs, warmup=warmup))


def time_chains(opened: OpenedStages, plans: Sequence[Plan], feed: Mapping[str, Array], warmup: int, runs: int, rounds: int,
                seed: int = 0) -> dict[Plan, list[list[float]]]:
    """Times plans in rounds, each in random order, against slow drift; returns the times in ms by plan and round."""
    order = random.Random(seed)
    times_ms: dict[Plan, list[list[float]]] = {plan: [] for plan in plans}
    for _ in range(rounds):
        time_round(opened, times_ms, feed, warmup, runs, order)
    return times_ms


class ChainRecord(Frozen):
    """Times of a stage (1 to 7) in chains, without copies; `previous` is the unit of the stage before, else its own."""

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
    """Times at one size, in ms per run; `stages` are by unit, previous unit, and stage (from 1)."""

    stages: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)
    copies: dict[CopyKey, list[float]] = field(default_factory=dict)

    def add_stages(self, plan: Plan, times: PartTimes) -> None:
        """Adds the stages of one run of a plan."""
        for stage, ms in enumerate(times.stages_ms):
            self.stages.setdefault((plan[stage], plan[max(stage - 1, 0)], stage + 1), []).append(ms)

    def add_copies(self, times: PartTimes) -> None:
        """Adds the copies of one run."""
        for key, ms in times.copies_ms.items():
            self.copies.setdefault(key, []).append(ms)


@dataclass(frozen=True)
class ChainTimes:
    """Times of stages and of copies in chains, at one or several sizes."""

    stages: tuple[ChainRecord, ...] = ()
    copies: tuple[CopyRecord, ...] = ()


def chain_plans(units: Sequence[str], opened: OpenedStages) -> list[Plan]:
    """Chains in which each stage follows every unit: one unit for all stages, and two in turns; only those that can run."""
    plans = [(unit,) * len(STAGES) for unit in units]
    plans += [tuple(pair[stage % 2] for stage in range(len(STAGES))) for pair in itertools.permutations(units, 2)]
    return [plan for plan in plans if can_run(plan, opened)]


def copy_plans(units: Sequence[str], opened: OpenedStages) -> list[Plan]:
    """Chains that copy the output of stage 2 for stage 4: one unit, then from stage 3 on another with its own memory."""
    plans = [tuple(pair[stage >= 2] for stage in range(len(STAGES))) for pair in itertools.permutations(units, 2)]
    return [plan for plan in plans if can_run(plan, opened)
            and value_memory(opened[plan[0], 0]) != value_memory(opened[plan[-1], len(STAGES) - 1])]


def can_run(plan: Plan, opened: OpenedStages) -> bool:
    """Whether each stage is open on its unit."""
    return all((unit, stage) in opened for stage, unit in enumerate(plan))


def sample_chains(units: Sequence[str], opened: OpenedStages, feed: Mapping[str, Array], warmup: int, runs: int,
                  samples: ChainSamples) -> None:
    """Runs each chain a few times."""
    chains = chain_plans(units, opened)
    for plan in [*chains, *copy_plans(units, opened)]:
        stages = [opened[unit, stage] for stage, unit in enumerate(plan)]
        for _ in range(warmup):
            run_chain(stages, feed)
        for _ in range(runs):
            times = PartTimes()
            run_chain(stages, feed, times)
            samples.add_copies(times)
            if plan in chains:
                samples.add_stages(plan, times)


def chain_times(size: tuple[int, int], samples: ChainSamples) -> ChainTimes:
    """Converts the samples at one size (nodes, edges) to records."""
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
    """Appends the records of one size to both files; copies come first, so that a size with stages is complete."""
    if times.copies:
        files.append_records(folder / COPIES, times.copies)
    files.append_records(folder / CHAINS, times.stages)


def timed_sizes(folder: Path) -> set[tuple[int, int]]:
    """The sizes (nodes, edges) at which chains were timed."""
    return {(record.nodes, record.edges) for record in _stages_in(folder)}


def read_chains(folder: Path) -> ChainTimes:
    """All records in a results folder; none if chains were not timed."""
    return ChainTimes(_stages_in(folder), tuple(files.read_records(folder / COPIES, CopyRecord, REMEDY)))


def _stages_in(folder: Path) -> tuple[ChainRecord, ...]:
    return tuple(files.read_records(folder / CHAINS, ChainRecord, REMEDY))
