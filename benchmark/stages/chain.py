"""Runs the seven stages one after another, each on the unit that a plan names, and times them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

from benchmark.stages.opening import OpenedStage
from benchmark.stages.transfers import Direction
from measuring.run_times import time_warm_runs_ms
from model_zoo.stages.definition import GRAPH_INPUTS, HOST, OUTPUT, STAGES
from model_zoo.stages.layer import Array

Plan: TypeAlias = "tuple[str, ...]"  # the unit of each stage
OpenedStages: TypeAlias = "Mapping[tuple[str, int], OpenedStage]"  # by unit and number of the stage, from 0
CopyKey: TypeAlias = "tuple[str, Direction, str]"  # the memory of a device, by its name; from or to the host's; the tensor


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
