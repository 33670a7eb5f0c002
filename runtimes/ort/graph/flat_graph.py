"""A graph and its bodies as one list of nodes, each with the number of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from records.kernel_costs import bytes_read, bytes_written, flops
from records.kernel_record import BRANCHES, GuessedRuns, KernelInput
from runtimes.ort.graph.inferred import Body, Held, Trips, Values
from runtimes.ort.graph.parsed_nodes import ParsedNode, bodies_of, parsed_node

if TYPE_CHECKING:
    import onnx


# Operations per ms, bytes per ms, and ms per node of a slow CPU and of a large GPU. Two branches are compared on both: a branch
# with fewer operations may take longer if it moves more bytes or has more nodes. The figures are a choice.
RATES = ((50e6, 5e6, 0.001), (2e10, 2e9, 0.008))


@dataclass
class FlatGraph:
    """The nodes of a graph and of its bodies; the nodes of a body follow the node that holds it.

    Attributes:
        tensors, computed, assumed: as of `InferredTensors`; tensors that a body makes are called `<node>/<tensor>`.
        guessed: by node name, the range of the number of runs if it is a guess.
        originals: by node name, the body before the model was optimised.
        costs: of a body: operations, bytes moved, and runs of nodes. They decide which of two branches takes longer.
    """

    nodes: list[ParsedNode] = field(default_factory=list)
    tensors: dict[str, KernelInput] = field(default_factory=dict)
    computed: dict[str, Values] = field(default_factory=dict)
    assumed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    guessed: dict[str, GuessedRuns] = field(default_factory=dict)
    originals: dict[str, onnx.GraphProto] = field(default_factory=dict)
    costs: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, other: FlatGraph) -> None:
        """Adds everything of another one."""
        self.nodes += other.nodes
        for name in ("tensors", "computed", "assumed", "guessed", "originals"):
            getattr(self, name).update(getattr(other, name))


# (body, the original body) -> its tensors on the flavour's provider, and the provider of each node
Finish = Callable[[Body, "onnx.GraphProto"], tuple[Mapping[str, KernelInput], Sequence[str]]]


def flat_bodies(nodes: Sequence[onnx.NodeProto], assigned: Sequence[str], held: Mapping[str, Held], original: onnx.GraphProto,
                finish: Finish) -> FlatGraph:
    """The nodes of a graph with those of its bodies, and what is known of the bodies' tensors.

    Args:
        nodes: of the main graph, in order.
        assigned: the provider of each.
        held: by node name, the bodies of nodes.
        original: the graph before it was optimised.
        finish: what is done to a body before its nodes are read.
    """
    found = FlatGraph()
    before = {(node.op_type, out): node for node in original.node if bodies_of(node) for out in node.output if out}
    for node, provider in zip(nodes, assigned, strict=True):
        parsed = parsed_node(node, provider)
        inside = held.get(node.name)
        if inside is None:
            found.nodes.append(parsed)
            continue
        same = next((before[node.op_type, out] for out in node.output if (node.op_type, out) in before), node)
        variants = {body.attribute: _flat_body(node.name, body, bodies_of(same)[body.attribute], inside.trips, finish)
                    for body in inside.bodies}
        chosen, guess = _chosen(inside, variants)
        found.nodes.append(replace(parsed, runs=float(inside.trips.count)))
        found.add(variants[chosen])
        found.originals[node.name] = bodies_of(same)[chosen]
        if guess is not None:
            found.guessed[node.name] = guess
        for attribute in variants.keys() - {chosen}:  # the weights of the other branch are loaded too
            found.tensors |= {f"{node.name}/{attribute}/{name.removeprefix(f'{node.name}/')}": tensor
                              for name, tensor in variants[attribute].tensors.items() if tensor.constant}
    return found


def _flat_body(node: str, body: Body, original: onnx.GraphProto, trips: Trips, finish: Finish) -> FlatGraph:
    """The nodes of a body and of the bodies in it, with their numbers of runs per run of the node called `node`."""
    tensors, assigned = finish(body, original)
    flat = flat_bodies(body.proto.graph.node, assigned, body.inferred.held, original, finish)

    def here(name: str) -> str:
        return name if not name or name in body.captured or name.startswith(f"{node}/") else f"{node}/{name}"

    nodes = [replace(one, runs=one.runs * trips.count, inside=one.inside or node,
                     inputs=tuple(map(here, one.inputs)), outputs=tuple(map(here, one.outputs))) for one in flat.nodes]
    every = {**tensors, **flat.tensors}
    own = {name: tensor for name, tensor in every.items() if name and name not in body.captured}
    return FlatGraph(
        nodes, {here(name): tensor for name, tensor in own.items()},
        {here(name): values for name, values in {**body.inferred.computed, **flat.computed}.items()},
        {here(name): shape for name, shape in {**body.inferred.assumed, **flat.assumed}.items()}, flat.guessed,
        flat.originals, _costs(flat.nodes, every))


def _chosen(held: Held, variants: Mapping[str, FlatGraph]) -> tuple[str, GuessedRuns | None]:
    """The body of a node that runs, and the range of its number of runs if that is a guess (else None)."""
    trips = held.trips
    if len(variants) == 1:
        guess = GuessedRuns(taken=str(trips.count), low=trips.low, high=trips.high) if trips.low < 1.0 else None
        return next(iter(variants)), guess
    if held.chosen:
        return held.chosen, None
    costs = {attribute: flat.costs for attribute, flat in variants.items()}
    dear, cheap = sorted(costs, key=lambda attribute: costs[attribute], reverse=True)
    taken = next(branch for branch, attribute in BRANCHES.items() if attribute == dear)
    if costs[dear] == costs[cheap]:
        return dear, None
    ratios = [_time_ms(costs[cheap], rates) / max(_time_ms(costs[dear], rates), 1e-9) for rates in RATES]
    return dear, GuessedRuns(taken=taken, low=min(1.0, *ratios), high=max(1.0, *ratios))


def _time_ms(costs: tuple[float, float, float], rates: tuple[float, float, float]) -> float:
    """The time of a body with these costs on a device with these rates."""
    (operations, moved, runs), (operations_per_ms, bytes_per_ms, node_ms) = costs, rates
    return max(operations / operations_per_ms, moved / bytes_per_ms) + runs * node_ms


def _costs(nodes: Sequence[ParsedNode], tensors: Mapping[str, KernelInput]) -> tuple[float, float, float]:
    """Operations, bytes moved, and number of runs of some nodes."""
    left_out = KernelInput(dtype="")
    operations = moved = 0.0
    for node in nodes:
        inputs, outputs = ([tensors.get(name, left_out) for name in names] for names in (node.inputs, node.outputs))
        operations += node.runs * flops(node.op_type, node.attributes, inputs, outputs)
        moved += node.runs * (bytes_read(node.op_type, node.attributes, inputs, outputs) + bytes_written(node.op_type, outputs))
    return operations, moved, sum(node.runs for node in nodes)
