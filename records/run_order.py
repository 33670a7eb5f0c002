"""The order in which the nodes of a record run. The nodes of a body appear once per trip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from hase.records.kernel_record import BRANCHES, ModelRecord

TOLERANCE = 1e-6  # of sums
MOST_RUNS = 10_000  # of nodes in one order: longer loops are cut short, and the omitted trips are extrapolated


def holds_bodies(record: ModelRecord) -> bool:
    """Whether a record contains nodes of bodies."""
    return any(node.inside for node in record.nodes)


def _children(record: ModelRecord) -> Mapping[str, list[int]]:
    """The positions of nodes, by the name of the node whose body contains them."""
    positions: dict[str, list[int]] = defaultdict(list)
    for place, node in enumerate(record.nodes):
        positions[node.inside].append(place)
    return positions


def _body_runs(record: ModelRecord, places: Sequence[int]) -> float:
    """The number of runs of a body, given the positions of its nodes. A node in it that holds a body has that body's number."""
    return min((record.nodes[place].runs for place in places if record.nodes[place].runs), default=0.0)


def run_order(record: ModelRecord, cut: int = 1) -> list[int]:
    """The positions in `record.nodes` of the nodes that run, in order. Each trip of a body gives its nodes, and then the node
    that holds it, which checks for another trip.

    Args:
        record: of the model.
        cut: divides the number of trips of every body; at least one trip stays.
    """
    if not holds_bodies(record):
        return list(range(len(record.nodes)))
    children = _children(record)

    def ordered(places: list[int], outer_runs: float) -> list[int]:
        order: list[int] = []
        for place in places:
            inner = children.get(record.nodes[place].name)
            runs = _body_runs(record, inner or ())
            if not inner or not runs or not outer_runs:
                order += [place] if record.nodes[place].runs else []
                continue
            trips = max(1, round(runs / outer_runs))
            order += [*ordered(inner, runs), place] * max(1, trips // cut)
        return order

    return ordered(children[""], 1.0)


def runs_in_order(record: ModelRecord, cut: int = 1) -> int:
    """The length of `run_order`, without building it."""
    children = _children(record)

    def count(places: list[int], outer_runs: float) -> int:
        total = 0
        for place in places:
            inner = children.get(record.nodes[place].name)
            runs = _body_runs(record, inner or ())
            if not inner or not runs or not outer_runs:
                total += bool(record.nodes[place].runs)
                continue
            total += max(1, max(1, round(runs / outer_runs)) // cut) * (count(inner, runs) + 1)
        return total

    return count(children[""], 1.0)


def shortest_cut(record: ModelRecord) -> int:
    """The smallest `cut` that gives an order of at most MOST_RUNS nodes, or else the shortest order; 1 for a record without
    bodies."""
    cut = 1
    if holds_bodies(record):
        while (runs := runs_in_order(record, cut)) > MOST_RUNS and runs > runs_in_order(record, 2 * cut):
            cut *= 2
    return cut


def _costs(record: ModelRecord) -> dict[str, float]:
    """The costs of nodes by name, bodies included: operations plus bytes plus 1 per node."""
    costs: dict[str, float] = {}
    for node in reversed(record.nodes):  # a node comes before its body
        kernel = record.kernel_of(node)
        costs[node.name] = costs.get(node.name, 0.0) + node.runs * (kernel.flops + kernel.bytes_read + kernel.bytes_written + 1)
        if node.inside:
            costs[node.inside] = costs.get(node.inside, 0.0) + costs[node.name]
    return costs


def at_guess(record: ModelRecord, end: Literal["low", "high"]) -> ModelRecord:
    """The record with every uncertain number of runs at its lowest or its highest. Where the other branch of an If may be
    cheaper, only as many nodes of this branch stay as the other one costs."""
    factor = {"": 1.0}  # of bodies, by the node that holds them; a node comes before its body
    left: dict[str, float] = {}  # costs that the nodes of a branch may still use up
    costs = _costs(record) if record.guessed else {}
    nodes = []
    for node in record.nodes:
        times = factor[node.inside]
        if node.inside in left:
            fits = costs[node.name] <= left[node.inside] * (1 + TOLERANCE)
            left[node.inside] -= costs[node.name] * fits
            times *= fits
        guess = record.guessed.get(node.name)
        share = getattr(guess, end) if guess is not None else 1.0
        if guess is not None and guess.taken in BRANCHES and share < 1.0:
            left[node.name] = share * sum(costs[inner.name] for inner in record.nodes if inner.inside == node.name)
        elif guess is not None and guess.taken in BRANCHES:
            factor[node.name] = times * share
            nodes.append(node.model_copy(update={"runs": times * node.runs}))
            continue
        else:
            times *= share
        factor[node.name] = times
        nodes.append(node.model_copy(update={"runs": times * node.runs}))
    return record.model_copy(update={"nodes": tuple(nodes)})
