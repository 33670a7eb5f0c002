"""Bodies of Loop, If and Scan: how often they run, their tensors, and a flat graph that includes their nodes.

A body is analysed as its own model, whose inputs are those of the body and the tensors that it captures from the graph around
it. A Scan's body runs once per item of its inputs. A Loop's trips come from its constant, else from `--dim trips=20` or `--dim
<node>.trips=20`; else DEFAULT_TRIPS is assumed. Of an If, the given branch runs (a size of 1: `<node>.else`, or `else` if there
is one If); else the more expensive one is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hase.ort_analysis.graph.nodes import (
    AnalysedBodies,
    Body,
    InferredTensors,
    ParsedNode,
    SizeNotKnown,
    Trips,
    Values,
    attention_lengths,
    bodies_of,
    control_flow_name,
    known_words,
    parsed_node,
)
from hase.records.kernel_costs import bytes_read, bytes_written, flops
from hase.records.kernel_record import BRANCHES, GuessedRuns, KernelInput, type_code
from hase.records.operators import VIEWS
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.model_files import tensor_array

if TYPE_CHECKING:
    import onnx

TRIPS = "trips"  # the name, for --dim, of the number of trips of all loops for which the model gives none
DEFAULT_TRIPS = 10
GUESS_RANGE = (0.1, 10.0)  # range of a guessed number of trips, as multiples of DEFAULT_TRIPS; chosen by hand
MOST_TRIPS = 10**9  # exporters write the largest integer for a loop that only its condition ends
FIRST_SCAN_OPSET = 9  # older versions of Scan had a batch and sequence lengths
PASSED_ON = VIEWS | {"Cast"}  # operators that keep the value of a single number
# Operations per ms, bytes per ms, and ms per node of a slow CPU and of a large GPU. Two branches are compared on both: a branch
# with fewer operations may take longer if it moves more bytes or has more nodes. The figures are chosen by hand.
RATES = ((50e6, 5e6, 0.001), (2e10, 2e9, 0.008))


def control_flow(graph: onnx.GraphProto, inside: str = "") -> Iterator[tuple[str, onnx.NodeProto]]:
    """The nodes with bodies in a graph and in all its bodies, with their names."""
    for node in graph.node:
        bodies = bodies_of(node)
        if bodies:
            name = control_flow_name(node, inside)
            yield name, node
            for body in bodies.values():
                yield from control_flow(body, name)


def outputs_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """The names of all outputs of nodes and of the nodes in their bodies."""
    for node in nodes:
        yield from (out for out in node.output if out)
        for body in bodies_of(node).values():
            yield from outputs_within(body.node)


def all_tensors(inferred: InferredTensors) -> Iterator[str]:
    """The names of tensors of a graph and its bodies, the latter with and without the node's name."""
    yield from inferred.tensors
    for node, held in inferred.held.items():
        for body in held.bodies:
            for name in all_tensors(body.inferred):
                yield from (name, f"{node}/{name}")


def body_sizes(graph: onnx.GraphProto) -> set[str]:
    """The names of sizes that set trips and branches."""
    nodes = list(control_flow(graph))
    sizes = {f"{name}.{TRIPS}" for name, node in nodes if node.op_type == "Loop"}
    sizes |= {TRIPS} if sizes else set()
    choices = [name for name, node in nodes if node.op_type == "If"]
    sizes |= {f"{name}.{branch}" for name in choices for branch in BRANCHES}
    return sizes | (set(BRANCHES) if len(choices) == 1 else set())


def unused_trips(held: Mapping[str, AnalysedBodies], dims: Mapping[str, int]) -> list[str]:
    """The given trips that have no effect, since the model itself determines them."""
    def open_loops(held: Mapping[str, AnalysedBodies]) -> Iterator[str]:
        for name, inside in held.items():
            if not inside.trips.fixed:
                yield name
            for body in inside.bodies:
                yield from open_loops(body.inferred.held)

    left_open = set(open_loops(held))
    used = {f"{name}.{TRIPS}" for name in left_open} | ({TRIPS} if left_open else set())
    return [name for name in dims if name.rpartition(".")[2] == TRIPS and name not in used]


def open_branches(graph: onnx.GraphProto, dims: Mapping[str, int]) -> bool:
    """Whether an input decides the branch of an If and `dims` do not give it."""
    steered = {name for name, value in steering_inputs(graph, {**dims, **dict.fromkeys(BRANCHES, 1)}).items()
               if isinstance(value, bool)}
    return bool(steered - set(steering_inputs(graph, dims)))


def steering_inputs(graph: onnx.GraphProto, dims: Mapping[str, int]) -> dict[str, Any]:
    """Values for inputs that decide trips or branches: from `dims`, else DEFAULT_TRIPS for a Loop.

    A run with them does the work that a prediction with the same sizes assumes. Text inputs get words that the model knows
    (`known_words`), and inputs of a decoder's attention get lengths (`attention_lengths`).
    """
    inputs = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    producer = {out: node for node in graph.node for out in node.output if out}

    def source(tensor: str) -> str:
        while tensor in producer and producer[tensor].op_type in PASSED_ON:
            tensor = producer[tensor].input[0]
        return tensor

    values: dict[str, Any] = {**known_words(graph), **attention_lengths(graph, dims)}
    for node in graph.node:
        if not bodies_of(node) or not node.input or source(node.input[0]) not in inputs:
            continue
        name = control_flow_name(node)
        if node.op_type == "Loop":
            values[source(node.input[0])] = dims.get(f"{name}.{TRIPS}", dims.get(TRIPS, DEFAULT_TRIPS))
        elif node.op_type == "If" and (chosen := given_branch(name, dims)):
            values[source(node.input[0])] = chosen == BRANCHES["then"]
    return values


def given_branch(name: str, dims: Mapping[str, int]) -> str:
    """The attribute of the branch that `dims` choose for the If `name`; "" if none."""
    for prefix in (f"{name}.", ""):
        for branch, opposite in (("then", "else"), ("else", "then")):
            if prefix + branch in dims:
                return BRANCHES[branch if dims[prefix + branch] else opposite]
    return ""


def captured(graph: onnx.GraphProto) -> list[str]:
    """The tensors that a body and its inner bodies take from the graphs around it."""
    defined = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    defined |= {out for node in graph.node for out in node.output}
    used = [name for node in graph.node for name in (
        *node.input, *(name for body in bodies_of(node).values() for name in captured(body)))]
    return [name for name in dict.fromkeys([*used, *(value.name for value in graph.output)]) if name and name not in defined]


def body_model(body: onnx.GraphProto, given: Sequence[KernelInput], outer: onnx.ModelProto,
               tensors: Mapping[str, KernelInput]) -> onnx.ModelProto:
    """A body as its own model, with inputs of types and shapes `given`, and constants of the model `outer` around it."""
    graph = onnx.GraphProto()
    graph.CopyFrom(body)
    graph.name = graph.name or "body"
    del graph.value_info[:]
    constants = {tensor.name: tensor for tensor in outer.graph.initializer}
    for value, tensor in zip(graph.input, given, strict=False):
        value.CopyFrom(_value_info(value.name, tensor))
    for name in captured(body):
        if name in constants:
            graph.initializer.append(constants[name])
        else:
            graph.input.append(_value_info(name, tensors[name]))
    model = onnx.helper.make_model(graph, opset_imports=list(outer.opset_import), ir_version=outer.ir_version)
    model.functions.extend(outer.functions)
    return model


def _value_info(name: str, tensor: KernelInput) -> onnx.ValueInfoProto:
    """The declaration of a tensor, or of a sequence or an optional of tensors, with open sizes."""
    def kind(words: str) -> onnx.TypeProto:
        outer, _, inner = words.removesuffix(")").partition("(")
        if inner and outer not in ("sequence", "optional"):
            raise UserError(f"{name}: a {words} goes into the body of a Loop, a Scan or an If, which can't be analysed")
        make = {"sequence": onnx.helper.make_sequence_type_proto, "optional": onnx.helper.make_optional_type_proto}
        return make[outer](kind(inner)) if inner else onnx.helper.make_tensor_type_proto(type_code(words), None)

    if tensor.is_tensor:
        return onnx.helper.make_tensor_value_info(name, type_code(tensor.dtype), tensor.shape)
    return onnx.helper.make_value_info(name, kind(tensor.dtype))


def analyse_bodies(node: onnx.NodeProto, outer: onnx.ModelProto, tensors: Mapping[str, KernelInput],
                   values: Mapping[str, Sequence[int | float | bool]], dims: Mapping[str, int],
                   infer: Callable[[onnx.ModelProto, str], InferredTensors]) -> AnalysedBodies | None:
    """The analysed bodies of a node; None for a node without bodies, and for a Scan older than FIRST_SCAN_OPSET. `tensors` are
    those that the node reads or captures, `values` those of small integer tensors that the graph computes, `dims` given dynamic
    dimensions, trips and branches; `infer` finds the tensors of a body (as a model) in a node."""
    bodies = bodies_of(node)
    opset = next((entry.version for entry in outer.opset_import if entry.domain in ("", "ai.onnx")), 1)
    if not bodies or (node.op_type == "Scan" and opset < FIRST_SCAN_OPSET):
        return None

    def analysed(attribute: str, given: Sequence[KernelInput]) -> Body:
        proto = body_model(bodies[attribute], given, outer, tensors)
        return Body(attribute, proto, frozenset(captured(bodies[attribute])), infer(proto, node.name))

    def output_shapes(body: Body) -> list[tuple[int, ...]]:
        return [body.inferred.tensors[value.name].shape for value in body.proto.graph.output]

    if node.op_type == "If":
        chosen = given_branch(node.name, dims)
        branches = tuple(_branches(sorted(bodies, reverse=True), chosen, analysed))
        larger = max(branches, key=lambda body: (body.attribute == chosen, sum(
            body.inferred.tensors[value.name].elements for value in body.proto.graph.output)))
        return AnalysedBodies(Trips(1), branches, chosen, dict(zip(node.output, output_shapes(larger), strict=False)))
    if node.op_type == "Scan":
        return _scan_bodies(node, tensors, analysed, output_shapes)
    trips = trips_of(node, bodies["body"], tensors, values, dims)
    given = [KernelInput(dtype="int64"), KernelInput(dtype="bool"), *(tensors[name] for name in node.input[2:])]
    body = analysed("body", given)
    states = list(zip((tensor.shape for tensor in given[2:]), output_shapes(body)[1:], strict=False))
    grown = [_shape_after(before, after, trips.count) for before, after in states]
    if any(before != after for before, after in states) and trips.count > 1:  # the shapes are those of the middle trip
        halfway = [_shape_after(before, after, (trips.count - 1) // 2) for before, after in states]
        body = analysed("body", [*given[:2], *(tensor.model_copy(update={"shape": shape, "values": None})
                                               for tensor, shape in zip(given[2:], halfway, strict=True))])
    kept = [(trips.count, *shape) for shape in output_shapes(body)[1 + len(states):]]
    return AnalysedBodies(trips, (body,), "", dict(zip(node.output, [*grown, *kept], strict=False)))


def _branches(attributes: Sequence[str], chosen: str,
              analysed: Callable[[str, Sequence[KernelInput]], Body]) -> Iterator[Body]:
    """The analysed branches of an If. The branch not chosen by the user is omitted if its sizes are unknown."""
    for attribute in attributes:
        try:
            yield analysed(attribute, ())
        except SizeNotKnown:
            if not chosen or attribute == chosen:
                raise


def _shape_after(before: tuple[int, ...], after: tuple[int, ...], trips: int) -> tuple[int, ...]:
    """The shape of a loop's state after some trips, if each trip adds as much as the first (`before` to `after`)."""
    if len(before) != len(after):
        return after
    return tuple(max(0, size + (size_after - size) * trips) for size, size_after in zip(before, after, strict=True))


def _scan_bodies(node: onnx.NodeProto, tensors: Mapping[str, KernelInput],
                  analysed: Callable[[str, Sequence[KernelInput]], Body],
                  output_shapes: Callable[[Body], list[tuple[int, ...]]]) -> AnalysedBodies:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    scanned = attributes["num_scan_inputs"].i
    states = len(node.input) - scanned

    def axes(name: str, count: int) -> list[int]:
        return list(attributes[name].ints) if name in attributes else [0] * count

    items, trips = [], 0
    for name, axis in zip(node.input[states:], axes("scan_input_axes", scanned), strict=True):
        sizes = list(tensors[name].shape)
        trips = sizes.pop(axis)
        items.append(tensors[name].model_copy(update={"shape": tuple(sizes), "constant": False, "values": None}))
    body = analysed("body", [*(tensors[name] for name in node.input[:states]), *items])
    shapes = output_shapes(body)
    kept = []
    for shape, axis in zip(shapes[states:], axes("scan_output_axes", len(shapes) - states), strict=True):
        position = axis % (len(shape) + 1)
        kept.append((*shape[:position], trips, *shape[position:]))
    return AnalysedBodies(Trips(trips), (body,), "", dict(zip(node.output, [*shapes[:states], *kept], strict=False)))


def trips_of(node: onnx.NodeProto, body: onnx.GraphProto, tensors: Mapping[str, KernelInput],
             values: Mapping[str, Sequence[int | float | bool]], dims: Mapping[str, int]) -> Trips:
    """How often a Loop's body runs; the constant is the maximum if the condition depends on data."""
    limit = next(iter(node.input), "")
    known = (tensors[limit].values or values.get(limit)) if limit else None
    most = int(known[0]) if known and known[0] < MOST_TRIPS else None
    if most is not None and _always_goes_on(body):
        return Trips(max(most, 0))
    given = dims.get(f"{node.name}.{TRIPS}", dims.get(TRIPS))
    if given is not None:
        return Trips(given if most is None else min(given, most), fixed=False)
    if most is not None:
        return Trips(max(most, 0), low=1.0 / max(most, 1), fixed=False)
    return Trips(DEFAULT_TRIPS, *GUESS_RANGE, fixed=False)


def _always_goes_on(body: onnx.GraphProto) -> bool:
    """Whether a Loop's condition never ends it: the body returns it unchanged, or as a constant."""
    producer = {out: node for node in body.node for out in node.output if out}
    tensor = body.output[0].name
    while tensor in producer and producer[tensor].op_type == "Identity":
        tensor = producer[tensor].input[0]
    constant = next((initializer for initializer in body.initializer if initializer.name == tensor), None)
    if constant is None and tensor in producer and producer[tensor].op_type == "Constant":
        constant = next((attribute.t for attribute in producer[tensor].attribute if attribute.name == "value"), None)
    if constant is not None:
        return bool(tensor_array(constant).all())
    return tensor not in producer and tensor in [value.name for value in body.input][1:2]


# the flat graph ----------------------------------------------------------------------------------------------------------

@dataclass
class FlatGraph:
    """The nodes of a graph and its bodies; a body's nodes follow its node."""

    nodes: list[ParsedNode] = field(default_factory=list)
    # tensors, computed, assumed: those of `InferredTensors` for the graph and its bodies together; tensors that a body
    # computes are named `<node>/<tensor>`
    tensors: dict[str, KernelInput] = field(default_factory=dict)
    computed: dict[str, Values] = field(default_factory=dict)
    assumed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # by node name, the range of the number of runs if it is a guess
    guessed: dict[str, GuessedRuns] = field(default_factory=dict)
    originals: dict[str, onnx.GraphProto] = field(default_factory=dict)  # by node name, the body before the model was optimised
    # of a body: operations, bytes moved, and runs of nodes. They decide which of two branches takes longer.
    costs: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, graph: FlatGraph) -> None:
        """Adds everything in another one."""
        self.nodes += graph.nodes
        for name in ("tensors", "computed", "assumed", "guessed", "originals"):
            getattr(self, name).update(getattr(graph, name))


# (body, the original body) -> its tensors on the flavour's provider, and the provider of each node
Finish = Callable[[Body, "onnx.GraphProto"], tuple[Mapping[str, KernelInput], Sequence[str]]]


def flat_bodies(nodes: Sequence[onnx.NodeProto], assigned: Sequence[str], held: Mapping[str, AnalysedBodies],
                original: onnx.GraphProto, finish: Finish) -> FlatGraph:
    """The nodes of a graph and its bodies, with facts about the bodies' tensors."""
    flat = FlatGraph()
    original_nodes = {(node.op_type, out): node for node in original.node if bodies_of(node) for out in node.output if out}
    for node, provider in zip(nodes, assigned, strict=True):
        parsed = parsed_node(node, provider)
        inside = held.get(node.name)
        if inside is None:
            flat.nodes.append(parsed)
            continue
        keys = [(node.op_type, out) for out in node.output]
        original_node = next((original_nodes[key] for key in keys if key in original_nodes), node)
        variants = {body.attribute: _flat_body(node.name, body, bodies_of(original_node)[body.attribute], inside.trips, finish)
                    for body in inside.bodies}
        chosen, guess = _chosen(inside, variants)
        flat.nodes.append(replace(parsed, runs=float(inside.trips.count)))
        flat.add(variants[chosen])
        flat.originals[node.name] = bodies_of(original_node)[chosen]
        if guess is not None:
            flat.guessed[node.name] = guess
        for attribute in variants.keys() - {chosen}:  # the weights of the other branch are loaded too
            flat.tensors |= {f"{node.name}/{attribute}/{name.removeprefix(f'{node.name}/')}": tensor
                             for name, tensor in variants[attribute].tensors.items() if tensor.constant}
    return flat


def _flat_body(node: str, body: Body, original: onnx.GraphProto, trips: Trips, finish: Finish) -> FlatGraph:
    """The nodes of a body and its inner bodies, with their runs per run of node `node`."""
    tensors, assigned = finish(body, original)
    flat = flat_bodies(body.proto.graph.node, assigned, body.inferred.held, original, finish)

    def full_name(name: str) -> str:
        return name if not name or name in body.captured or name.startswith(f"{node}/") else f"{node}/{name}"

    nodes = [replace(inner, runs=inner.runs * trips.count, inside=inner.inside or node,
                     inputs=tuple(map(full_name, inner.inputs)), outputs=tuple(map(full_name, inner.outputs)))
             for inner in flat.nodes]
    every_tensor = {**tensors, **flat.tensors}
    own_tensors = {name: tensor for name, tensor in every_tensor.items() if name and name not in body.captured}
    return FlatGraph(
        nodes, {full_name(name): tensor for name, tensor in own_tensors.items()},
        {full_name(name): values for name, values in {**body.inferred.computed, **flat.computed}.items()},
        {full_name(name): shape for name, shape in {**body.inferred.assumed, **flat.assumed}.items()}, flat.guessed,
        flat.originals, _costs(flat.nodes, every_tensor))


def _chosen(held: AnalysedBodies, variants: Mapping[str, FlatGraph]) -> tuple[str, GuessedRuns | None]:
    """The body of a node that runs, and the range of its number of runs if that is assumed (else None)."""
    trips = held.trips
    if len(variants) == 1:
        guess = GuessedRuns(taken=str(trips.count), low=trips.low, high=trips.high) if trips.low < 1.0 else None
        return next(iter(variants)), guess
    if held.chosen:
        return held.chosen, None
    costs = {attribute: flat.costs for attribute, flat in variants.items()}
    costlier, cheaper = sorted(costs, key=lambda attribute: costs[attribute], reverse=True)
    taken = next(branch for branch, attribute in BRANCHES.items() if attribute == costlier)
    if costs[costlier] == costs[cheaper]:
        return costlier, None
    ratios = [_time_ms(costs[cheaper], rates) / max(_time_ms(costs[costlier], rates), 1e-9) for rates in RATES]
    return costlier, GuessedRuns(taken=taken, low=min(1.0, *ratios), high=max(1.0, *ratios))


def _time_ms(costs: tuple[float, float, float], rates: tuple[float, float, float]) -> float:
    """The time of a body with these costs on a device with these rates."""
    (operations, moved, runs), (operations_per_ms, bytes_per_ms, node_ms) = costs, rates
    return max(operations / operations_per_ms, moved / bytes_per_ms) + runs * node_ms


def _costs(nodes: Sequence[ParsedNode], tensors: Mapping[str, KernelInput]) -> tuple[float, float, float]:
    """Operations, bytes moved, and runs of some nodes."""
    absent = KernelInput(dtype="")
    operations = moved = 0.0
    for node in nodes:
        inputs, outputs = ([tensors.get(name, absent) for name in names] for names in (node.inputs, node.outputs))
        arguments = node.op_type, node.attributes, inputs, outputs
        operations += node.runs * flops(*arguments)
        moved += node.runs * (bytes_read(*arguments) + bytes_written(*arguments))
    return operations, moved, sum(node.runs for node in nodes)
