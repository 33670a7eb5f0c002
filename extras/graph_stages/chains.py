"""Runs the seven stages as a chain, each on the unit that a plan names, and times the chain, its stages and its copies.

The times of the parts are kept in `results/chain_times.jsonl` and `results/chain_copies.jsonl`. A stage that is timed alone,
again and again, finds its inputs in the caches. In a chain the stages before it have used them, and where it follows a stage of
another unit, that one's threads may still be spinning, and its own may sleep. So the same stage takes longer there: on a CPU by
a quarter to a half, and twice as long next to another unit on the same processor. So does a copy: in a chain its tensor was
just written, by threads on other cores or by the device.
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

from hase.benchmark.measuring.run_times import time_warm_runs_ms
from hase.extras.graph_stages.layer import GRAPH_INPUTS, HOST, OUTPUT, STAGES, Array
from hase.extras.graph_stages.opening import OpenedStage
from hase.extras.graph_stages.records import Direction
from hase.utils import files
from hase.utils.frozen import Frozen

Plan: TypeAlias = "tuple[str, ...]"  # the unit of each stage
OpenedStages: TypeAlias = "Mapping[tuple[str, int], OpenedStage]"  # by unit and number of the stage, from 0
CopyKey: TypeAlias = "tuple[str, Direction, str]"  # the memory of a device, by its name; from or to the host's; the tensor
CHAINS = "chain_times.jsonl"
COPIES = "chain_copies.jsonl"
REMEDY = "remove it, and time the chains again"


@dataclass
class PartTimes:
    """The times of one run's parts.

    Attributes:
        stages_ms: of each stage, with what `run_chain` does for it, but without copies.
        copies_ms: of each copy.
    """

    stages_ms: list[float] = field(default_factory=list)
    copies_ms: dict[CopyKey, float] = field(default_factory=dict)

    def copied(self, key: CopyKey, copy: Callable[[], Any]) -> Any:
        """What a copy gives; its time is kept."""
        began_s = perf_counter()
        value = copy()
        self.copies_ms[key] = 1e3 * (perf_counter() - began_s)
        return value


def place_of(opened: OpenedStage) -> str:
    """Where a stage's values lie. Two runtimes on one device don't take each other's; then they go through the host."""
    return HOST if opened.memory == HOST else f"{opened.memory} of {opened.runtime}"


def run_chain(stages: Sequence[OpenedStage], feed: Mapping[str, Array], times: PartTimes | None = None) -> Array:
    """The layer's output, in the host's memory as its inputs are.

    A tensor is copied when a stage needs it elsewhere, and then lies in both places.

    Args:
        stages: one for each of STAGES, in their order.
        feed: the layer's inputs by name.
        times: if given, those of this run's parts are added.
    """
    times = times or PartTimes()
    held: dict[tuple[str, str], Any] = {(name, HOST): feed[name] for name in GRAPH_INPUTS}
    makers: dict[str, OpenedStage] = {}  # of tensors that stages gave

    def fetch(name: str) -> None:
        if (name, HOST) not in held:
            maker = makers[name]
            held[name, HOST] = times.copied((maker.ran_on, "to_host", name),
                                            lambda: maker.to_host(name, held[name, place_of(maker)]))

    def bring(name: str, opened: OpenedStage) -> None:
        if (name, place_of(opened)) in held:
            return
        fetch(name)
        if opened.memory != HOST:
            held[name, place_of(opened)] = times.copied((opened.ran_on, "to_device", name),
                                                        lambda: opened.to_unit(name, held[name, HOST]))

    for definition, opened in zip(STAGES, stages, strict=True):
        place = place_of(opened)
        for name in definition.inputs:
            bring(name, opened)
        began_s = perf_counter()
        values = opened.run_resident({name: held[name, place] for name in definition.inputs})
        held |= {(name, place): value for name, value in values.items()}
        makers |= dict.fromkeys(values, opened)
        times.stages_ms.append(1e3 * (perf_counter() - began_s))
    fetch(OUTPUT)
    output: Array = held[OUTPUT, HOST]
    return output


def time_round(opened: OpenedStages, times_ms: Mapping[Plan, list[list[float]]], feed: Mapping[str, Array], warmup: int,
               runs: int, order: random.Random) -> None:
    """Runs each plan a few times, the plans in random order.

    Args:
        opened: the stages.
        times_ms: by plan, the times of each round; those of this one are appended.
        feed: the layer's inputs by name.
        warmup, runs: of a plan.
        order: draws the order.
    """
    for plan in order.sample(list(times_ms), len(times_ms)):
        stages = [opened[unit, stage] for stage, unit in enumerate(plan)]
        times_ms[plan].append(time_warm_runs_ms(partial(run_chain, stages, feed), warmup, runs))


def time_chains(opened: OpenedStages, plans: Sequence[Plan], feed: Mapping[str, Array], warmup: int, runs: int, rounds: int,
                seed: int = 0) -> dict[Plan, list[list[float]]]:
    """Times plans: in each round each plan in turn, in random order, runs a few times. So what changes slowly on the machine
    reaches all plans alike.

    Args:
        opened: the stages.
        plans: units by stage.
        feed: the layer's inputs by name.
        warmup, runs: of a plan in one round.
        rounds: how often each plan has its turn.
        seed: of the order.

    Returns:
        By plan, the times in ms of each round.
    """
    order = random.Random(seed)
    times_ms: dict[Plan, list[list[float]]] = {plan: [] for plan in plans}
    for _ in range(rounds):
        time_round(opened, times_ms, feed, warmup, runs, order)
    return times_ms


class ChainRecord(Frozen):
    """Times of a stage in chains.

    Attributes:
        nodes, edges: the size.
        unit: that it ran on.
        previous: the unit of the stage before it; of the first stage, its own.
        stage: 1 to 7.
        samples_ms: one per run, without copies between memories.
    """

    nodes: int
    edges: int
    unit: str
    previous: str
    stage: int
    samples_ms: tuple[float, ...]


class CopyRecord(Frozen):
    """Times of a tensor's copy in chains.

    Attributes:
        nodes, edges: the size.
        memory: of the device, by its name.
        direction: from or to the host's memory.
        tensor: its name.
        samples_ms: one per run.
    """

    nodes: int
    edges: int
    memory: str
    direction: Direction
    tensor: str
    samples_ms: tuple[float, ...]


@dataclass
class ChainSamples:
    """Times at one size, in ms, one per run.

    Attributes:
        stages: by unit, the unit before it, and stage (from 1).
        copies: by the copy.
    """

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
    """Chains in which each stage follows its own and each other unit: all stages on a unit, and two units in turns. Without
    those that can't run."""
    plans = [(unit,) * len(STAGES) for unit in units]
    plans += [tuple(pair[stage % 2] for stage in range(len(STAGES))) for pair in itertools.permutations(units, 2)]
    return [plan for plan in plans if can_run(plan, opened)]


def copy_plans(units: Sequence[str], opened: OpenedStages) -> list[Plan]:
    """Chains in which what stage 2 gives to stage 4 is copied, which two units in turns do not: one unit, and from stage 3 on
    another with a memory of its own."""
    plans = [tuple(pair[stage >= 2] for stage in range(len(STAGES))) for pair in itertools.permutations(units, 2)]
    return [plan for plan in plans if can_run(plan, opened)
            and place_of(opened[plan[0], 0]) != place_of(opened[plan[-1], len(STAGES) - 1])]


def can_run(plan: Plan, opened: OpenedStages) -> bool:
    """Whether each stage is open on its unit."""
    return all((unit, stage) in opened for stage, unit in enumerate(plan))


def sample_chains(units: Sequence[str], opened: OpenedStages, feed: Mapping[str, Array], warmup: int, runs: int,
                  samples: ChainSamples) -> None:
    """Runs each chain a few times.

    Args:
        units: their names.
        opened: the stages.
        feed: the layer's inputs by name.
        warmup, runs: of a chain.
        samples: those of these runs are added.
    """
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
    """The samples at one size, its nodes and edges, as records."""
    nodes, edges = size
    return ChainTimes(
        tuple(ChainRecord(nodes=nodes, edges=edges, unit=unit, previous=previous, stage=stage, samples_ms=tuple(samples_ms))
              for (unit, previous, stage), samples_ms in samples.stages.items()),
        tuple(CopyRecord(nodes=nodes, edges=edges, memory=memory, direction=direction, tensor=tensor,
                         samples_ms=tuple(samples_ms))
              for (memory, direction, tensor), samples_ms in samples.copies.items()))


def time_in_chains(size: tuple[int, int], units: Sequence[str], opened: OpenedStages, feed: Mapping[str, Array], warmup: int,
                   runs: int, rounds: int) -> ChainTimes:
    """Times each stage on each unit, after each unit, and each copy.

    Args:
        size: nodes and edges.
        units: their names.
        opened: the stages.
        feed: the layer's inputs by name.
        warmup, runs: of a chain in one round.
        rounds: how often each chain has its turn.
    """
    samples = ChainSamples()
    for _ in range(rounds):
        sample_chains(units, opened, feed, warmup, runs, samples)
    return chain_times(size, samples)


def append_chains(folder: Path, times: ChainTimes) -> None:
    """Adds the records of one size, as one line of each file. Copies come first: a size is done when its stages are there."""
    if times.copies:
        files.append_records(folder / COPIES, times.copies)
    files.append_records(folder / CHAINS, times.stages)


def timed_sizes(folder: Path) -> set[tuple[int, int]]:
    """The sizes, nodes and edges, at which chains were timed.

    Raises:
        UserError: a line is damaged.
    """
    return {(record.nodes, record.edges) for record in _stages_in(folder)}


def read_chains(folder: Path) -> ChainTimes:
    """All records in a folder of results; none if chains were not timed.

    Raises:
        UserError: a line is damaged.
    """
    return ChainTimes(_stages_in(folder), tuple(files.read_records(folder / COPIES, CopyRecord, REMEDY)))


def _stages_in(folder: Path) -> tuple[ChainRecord, ...]:
    return tuple(files.read_records(folder / CHAINS, ChainRecord, REMEDY))
