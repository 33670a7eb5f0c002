"""In which order the nodes of a record run, those of bodies as often as they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from ort_analysis.graph.bodies import BRANCHES
from ort_analysis.records.kernel_record import ModelRecord

TOLERANCE = 1e-6  # of sums
MOST_RUNS = 10_000  # of nodes in one order: longer loops are cut short, and what is left out is extrapolated


def holds_bodies(record: ModelRecord) -> bool:
    """Whether a record holds nodes of bodies."""
    return any(node.inside for node in record.nodes)


def _children(record: ModelRecord) -> Mapping[str, list[int]]:
    """The places of nodes by the name of the node in whose body they stand."""
    found: dict[str, list[int]] = defaultdict(list)
    for place, node in enumerate(record.nodes):
        found[node.inside].append(place)
    return found


def _body_runs(record: ModelRecord, places: Sequence[int]) -> float:
    """How often a body with its nodes at such places runs; a node in it that holds a body itself counts that one's trips."""
    return min((record.nodes[place].runs for place in places if record.nodes[place].runs), default=0.0)


def run_order(record: ModelRecord, cut: int = 1) -> list[int]:
    """The place in `record.nodes` of each node that runs, in order; in each trip of a body its nodes, then the node that holds
    it, which looks whether there is another trip.

    Args:
        record: the model's.
        cut: bodies run this many times less, but once.
    """
    if not holds_bodies(record):
        return list(range(len(record.nodes)))
    children = _children(record)

    def ordered(places: list[int], outer_runs: float) -> list[int]:
        found: list[int] = []
        for place in places:
            inner = children.get(record.nodes[place].name)
            runs = _body_runs(record, inner or ())
            if not inner or not runs or not outer_runs:
                found += [place] if record.nodes[place].runs else []
                continue
            trips = max(1, round(runs / outer_runs))
            found += [*ordered(inner, runs), place] * max(1, trips // cut)
        return found

    return ordered(children[""], 1.0)


def runs_in_order(record: ModelRecord, cut: int = 1) -> int:
    """How many nodes `run_order` gives, without making it."""
    children = _children(record)

    def count(places: list[int], outer_runs: float) -> int:
        found = 0
        for place in places:
            inner = children.get(record.nodes[place].name)
            runs = _body_runs(record, inner or ())
            if not inner or not runs or not outer_runs:
                found += bool(record.nodes[place].runs)
                continue
            found += max(1, max(1, round(runs / outer_runs)) // cut) * (count(inner, runs) + 1)
        return found

    return count(children[""], 1.0)


def shortest_cut(record: ModelRecord) -> int:
    """By how much bodies must be cut short for an order of at most MOST_RUNS nodes, or of as few as there are; 1 for a record
    without bodies."""
    cut = 1
    if holds_bodies(record):
        while (runs := runs_in_order(record, cut)) > MOST_RUNS and runs > runs_in_order(record, 2 * cut):
            cut *= 2
    return cut


def _costs(record: ModelRecord) -> dict[str, float]:
    """What nodes do, with what the bodies do that they hold, by name: operations and bytes, and one that it is a node."""
    found: dict[str, float] = {}
    for node in reversed(record.nodes):  # a node comes before its body
        kernel = record.kernel_of(node)
        found[node.name] = found.get(node.name, 0.0) + node.runs * (kernel.flops + kernel.bytes_read + kernel.bytes_written + 1)
        if node.inside:
            found[node.inside] = found.get(node.inside, 0.0) + found[node.name]
    return found


def at_guess(record: ModelRecord, end: Literal["low", "high"]) -> ModelRecord:
    """A record in which every body whose number of runs is a guess runs as rarely, or as often, as it may. Of a branch that
    may be the cheaper one no more of its nodes are left than that one costs."""
    factor = {"": 1.0}  # of bodies by the node that holds them; a node comes before its body
    left: dict[str, float] = {}  # what the nodes of a branch that run may cost
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
            left[node.name] = share * sum(costs[one.name] for one in record.nodes if one.inside == node.name)
        elif guess is not None and guess.taken in BRANCHES:
            factor[node.name] = times * share
            nodes.append(node.model_copy(update={"runs": times * node.runs}))
            continue
        else:
            times *= share
        factor[node.name] = times
        nodes.append(node.model_copy(update={"runs": times * node.runs}))
    return record.model_copy(update={"nodes": tuple(nodes)})
