"""Runs the seven stages one after another, each on the unit that a plan names, and times them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

from benchmark.measuring.run_times import time_warm_runs_ms
from benchmark.stages.opening import OpenedStage
from model_zoo.stages.definition import GRAPH_INPUTS, HOST, OUTPUT, STAGES
from model_zoo.stages.layer import Array

Plan: TypeAlias = "tuple[str, ...]"  # the unit of each stage
OpenedStages: TypeAlias = "Mapping[tuple[str, int], OpenedStage]"  # by unit and number of the stage, from 0


def place_of(opened: OpenedStage) -> str:
    """Where a stage's values lie. Two runtimes on one device don't take each other's; then they go through the host."""
    return HOST if opened.memory == HOST else f"{opened.memory} of {opened.runtime}"


def run_chain(stages: Sequence[OpenedStage], feed: Mapping[str, Array], stages_ms: list[float] | None = None) -> Array:
    """The layer's output, in the host's memory as its inputs are.

    A tensor is copied when a stage needs it elsewhere, and then lies in both places.

    Args:
        stages: one for each of STAGES, in their order.
        feed: the layer's inputs by name.
        stages_ms: if given, the time of each stage is appended, with what this function does for it, but without copies.
    """
    held: dict[tuple[str, str], Any] = {(name, HOST): feed[name] for name in GRAPH_INPUTS}
    makers: dict[str, OpenedStage] = {}  # of tensors that stages gave

    def fetch(name: str) -> None:
        if (name, HOST) not in held:
            maker = makers[name]
            held[name, HOST] = maker.to_host(name, held[name, place_of(maker)])

    for definition, opened in zip(STAGES, stages, strict=True):
        place, began_s, copied_s = place_of(opened), perf_counter(), 0.0
        for name in definition.inputs:
            if (name, place) not in held:
                copying_s = perf_counter()
                fetch(name)
                held[name, place] = opened.to_unit(name, held[name, HOST])
                copied_s += perf_counter() - copying_s
        values = opened.run_resident({name: held[name, place] for name in definition.inputs})
        held |= {(name, place): value for name, value in values.items()}
        makers |= dict.fromkeys(values, opened)
        if stages_ms is not None:
            stages_ms.append(1e3 * (perf_counter() - began_s - copied_s))
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
