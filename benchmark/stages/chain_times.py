"""Times of stages within a chain: `results/chain_times.jsonl`.

A stage that is timed alone, again and again, finds its inputs in the caches. In a chain the stages before it have used them,
and where it follows a stage of another unit, that one's threads may still be spinning, and its own may sleep. So the same stage
takes longer there: on a CPU by a quarter to a half, and twice as long next to another unit on the same processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmark.stages.chain import OpenedStages, Plan, run_chain
from model_zoo.stages.definition import STAGES
from model_zoo.stages.layer import Array
from utils import files
from utils.frozen import Frozen

CHAINS = "chain_times.jsonl"
Samples: TypeAlias = "dict[tuple[str, str, int], list[float]]"  # in ms, by unit, the unit before it, and stage (from 1)


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


def chain_plans(units: Sequence[str], opened: OpenedStages) -> list[Plan]:
    """Chains in which each stage follows its own and each other unit: all stages on a unit, and two units in turns. Without
    those that can't run."""
    plans = [(unit,) * len(STAGES) for unit in units]
    plans += [tuple(pair[stage % 2] for stage in range(len(STAGES))) for pair in itertools.permutations(units, 2)]
    return [plan for plan in plans if all((unit, stage) in opened for stage, unit in enumerate(plan))]


def sample_chains(units: Sequence[str], opened: OpenedStages, feed: Mapping[str, Array], warmup: int, runs: int,
                  samples: Samples) -> None:
    """Runs each chain a few times.

    Args:
        units: their names.
        opened: the stages.
        feed: the layer's inputs by name.
        warmup, runs: of a chain.
        samples: the times of stages; those of these runs are appended.
    """
    for plan in chain_plans(units, opened):
        stages = [opened[unit, stage] for stage, unit in enumerate(plan)]
        for _ in range(warmup):
            run_chain(stages, feed)
        for _ in range(runs):
            stages_ms: list[float] = []
            run_chain(stages, feed, stages_ms)
            for stage, ms in enumerate(stages_ms):
                samples.setdefault((plan[stage], plan[max(stage - 1, 0)], stage + 1), []).append(ms)


def chain_records(size: tuple[int, int], samples: Samples) -> list[ChainRecord]:
    """The samples at one size, its nodes and edges, as records."""
    return [ChainRecord(nodes=size[0], edges=size[1], unit=unit, previous=previous, stage=stage, samples_ms=tuple(samples_ms))
            for (unit, previous, stage), samples_ms in samples.items()]


def time_in_chains(size: tuple[int, int], units: Sequence[str], opened: OpenedStages, feed: Mapping[str, Array], warmup: int,
                   runs: int, rounds: int) -> list[ChainRecord]:
    """Times each stage on each unit, after each unit.

    Args:
        size: nodes and edges.
        units: their names.
        opened: the stages.
        feed: the layer's inputs by name.
        warmup, runs: of a chain in one round.
        rounds: how often each chain has its turn.
    """
    samples: Samples = {}
    for _ in range(rounds):
        sample_chains(units, opened, feed, warmup, runs, samples)
    return chain_records(size, samples)


def append_chains(folder: Path, records: Iterable[ChainRecord]) -> None:
    """Adds the records of one size, as one line."""
    files.append_records(folder / CHAINS, records)


def timed_sizes(folder: Path) -> set[tuple[int, int]]:
    """The sizes, nodes and edges, at which chains were timed; errors as of `read_chains`."""
    return {(record.nodes, record.edges) for record in read_chains(folder)}


def read_chains(folder: Path) -> list[ChainRecord]:
    """All records in a folder of results; none if chains were not timed.

    Raises:
        UserError: a line is damaged.
    """
    return files.read_records(folder / CHAINS, ChainRecord, "remove it, and time the chains again")
