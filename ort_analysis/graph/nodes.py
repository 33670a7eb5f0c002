"""Reads the parts of a graph: nodes by unique names, plain attributes, bodies of control flow, and facts about tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hase.records import attention
from hase.records.kernel_record import KernelInput
from hase.records.operators import COPIES, VIEWS, operator_row
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.model_files import graph_tensors, locations, tensor_array

if TYPE_CHECKING:
    import onnx

ONNX_DOMAINS = ("", "ai.onnx")
VOCABULARIES = ("cats_strings", "keys_strings", "classlabels_strings", "pool_strings")  # attributes of encoders and n-grams
COUNTING = VIEWS | COPIES | {"Cast", "ReduceSum", "ReduceMax", "Sub", "Gather"}  # operators that get lengths out of a mask


@dataclass(frozen=True)
class ParsedNode:
    """One node of the optimised graph; tensors by name in order, "" for an omitted optional one."""

    name: str
    op_type: str
    domain: str
    provider: str
    attributes: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    runs: float = 1.0  # how often it runs in one run of the model
    inside: str = ""  # the node whose body it is in; "" for a node of the graph itself


def bodies_of(node: onnx.NodeProto) -> dict[str, onnx.GraphProto]:
    """The bodies of an If, a Loop or a Scan, by attribute; empty for other nodes."""
    names = operator_row(node.op_type).bodies if node.domain in ONNX_DOMAINS else ()
    return {attribute.name: attribute.g for attribute in node.attribute if attribute.name in names}


def control_flow_name(node: onnx.NodeProto, inside: str = "") -> str:
    """The name of an If, a Loop or a Scan in the body of node `inside`; `Loop_<first output>` if the file gives none."""
    name = node.name or f"{node.op_type}_{next((out for out in node.output if out), '')}"
    return name if not inside or name.startswith(f"{inside}/") else f"{inside}/{name}"


def name_nodes(graph: onnx.GraphProto, inside: str = "", seen: set[str] | None = None) -> None:
    """Gives every node of `graph` a unique name, and every node in its bodies: `<node>/<node of its body>`.

    Unique names stay. But ReorderOutputs are named after their outputs, since ORT's names for them vary, and so are unnamed
    nodes with bodies, since users give trips and branches by these names. For a body, `inside` is the node around it, and
    `seen` are the names that are taken.
    """
    seen = set() if seen is None else seen
    for number, node in enumerate(graph.node):
        by_output = f"{node.op_type}_{node.output[0]}" if node.op_type == "ReorderOutput" else ""
        name = by_output or node.name or f"{node.op_type}_{number}"
        bodies = bodies_of(node)
        if bodies:
            name = control_flow_name(node, inside)
        elif inside and not name.startswith(f"{inside}/"):
            name = f"{inside}/{name}"
        while name in seen:
            name = f"{name}_{number}"
        seen.add(name)
        node.name = name
        for body in bodies.values():
            name_nodes(body, name, seen)


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """An attribute as plain data: a tensor is `{"dtype", "shape", "values"}`, a subgraph `{"graph": <hash>}`."""
    if attribute.type == onnx.AttributeProto.GRAPH:
        return {"graph": hashlib.sha256(_without_locations(attribute.g).SerializeToString(deterministic=True)).hexdigest()[:12]}
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        array = tensor_array(value)
        return {"dtype": str(array.dtype), "shape": list(array.shape), "values": array.ravel().tolist()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (list, tuple)):
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in value]
    return value


def _without_locations(graph: onnx.GraphProto) -> onnx.GraphProto:
    """A copy of a graph whose constants do not name the file with their values."""
    bare = onnx.GraphProto()
    bare.CopyFrom(graph)
    for tensor in filter(locations, graph_tensors(bare)):
        tensor.ClearField("external_data")
    return bare


def parsed_node(node: onnx.NodeProto, provider: str) -> ParsedNode:
    """A node of the main graph, as ONNX Runtime runs it on `provider`."""
    return ParsedNode(name=node.name, op_type=node.op_type, domain=node.domain, provider=provider,
                      attributes={a.name: attribute_value(a) for a in sorted(node.attribute, key=lambda a: a.name)},
                      inputs=tuple(node.input), outputs=tuple(node.output))


def first_known_word(attributes: Mapping[str, Any]) -> str:
    """The first word of the vocabulary in an operator's attributes; "" if it has none."""
    return next((str(attributes[name][0]) for name in VOCABULARIES if attributes.get(name)), "")


def known_words(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """Words that a model knows, by text input that its encoders read: one per column, or one for all columns. Assumes that the
    encoders are in the order of the columns, as converters of pipelines write them."""
    words_of = {}
    for value in graph.input:
        kind = value.type.tensor_type
        if kind.elem_type != onnx.TensorProto.STRING:
            continue
        reached, words = {value.name}, []
        for node in graph.node:
            if not reached & set(node.input):
                continue
            if word := first_known_word({attribute.name: attribute_value(attribute) for attribute in node.attribute
                                         if attribute.name in VOCABULARIES}):
                words.append(word)
            else:
                reached.update(node.output)
        columns = kind.shape.dim[-1].dim_value if len(kind.shape.dim) > 1 else 1
        if words:
            words_of[value.name] = words[:columns] if len(words) >= columns else words[:1]
    return words_of


def attention_lengths(graph: onnx.GraphProto, dims: Mapping[str, int]) -> dict[str, int]:
    """Values for inputs that give GroupQueryAttention its lengths: the tokens in the cache, and one more. A mask whose sum is
    the length gets 1: a mask of zeros would give length 0, which the operator refuses."""
    inputs = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    maker = {out: node for node in graph.node for out in node.output if out}
    lengths = {}
    for node in graph.node:
        if node.op_type != attention.OPERATOR or len(node.input) <= attention.TOTAL:
            continue
        cache = inputs.get(node.input[min(attention.PAST)], ())
        cached = (cache[2].dim_value or dims.get(cache[2].dim_param, 0)) if len(cache) == 4 else 0
        for index, length in ((attention.LAST_PLACES, cached), (attention.TOTAL, cached + 1)):
            tensor = length_source(node.input[index], maker)
            if tensor in inputs:
                lengths[tensor] = 1 if len(inputs[tensor]) > 1 else length
    return lengths


def length_source(tensor: str, maker: Mapping[str, onnx.NodeProto] | Mapping[str, ParsedNode]) -> str:
    """The tensor, such as a mask, from which the length in `tensor` was computed. `maker`: the node of each output."""
    while tensor in maker and maker[tensor].op_type in COUNTING:
        node = maker[tensor]
        tensor = (node.inputs if isinstance(node, ParsedNode) else node.input)[0]
    return tensor


def shared_caches(graph: onnx.GraphProto, dims: Mapping[str, int]) -> dict[str, str]:
    """The outputs of a graph that share the buffer of an input, with that input. These are attention caches with room for all
    tokens, as text generators bind them."""
    def room(values: Sequence[onnx.ValueInfoProto]) -> dict[str, int]:
        axes = {value.name: value.type.tensor_type.shape.dim for value in values}
        return {name: sizes[2].dim_value or dims.get(sizes[2].dim_param, 0) for name, sizes in axes.items() if len(sizes) == 4}

    before, after = room(graph.input), room(graph.output)
    shared = {}
    for node in graph.node:
        if node.op_type != attention.OPERATOR:
            continue
        for past, present in attention.PAST.items():
            if past < len(node.input) and present < len(node.output):
                given, result = node.input[past], node.output[present]
                if 0 < after.get(result, 0) <= before.get(given, 0):  # a model's file may say "the total length" for either
                    shared[result] = given
    return shared


Shape = tuple[int | str, ...] | None  # an unknown size is its name, or ""; None: the rank is unknown


class SizeNotKnown(UserError):
    """A shape depends on data, and ONNX gives no bound; `tensor` is the name for which the user can give sizes."""

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


Values = tuple[int | float | bool, ...]


@dataclass(frozen=True)
class InferredTensors:
    """What was inferred about the tensors of a graph."""

    tensors: dict[str, KernelInput]  # type and shape by name, constants with their small values
    computed: dict[str, Values]  # values of small integer tensors that the graph computes from shapes and constants, by name
    providers: dict[str, str]  # by node name, the provider that ORT assigned
    assumed: dict[str, tuple[int, ...]]  # by tensor name, shapes that depend on data; the largest possible ones are assumed
    plain: dict[str, Shape]  # by tensor name, shapes as far as ORT infers them from shapes alone: what its optimisers know
    held: dict[str, AnalysedBodies] = field(default_factory=dict)  # by name of a node with bodies
    used: frozenset[str] = frozenset()  # the names of the given sizes that a tensor of this graph, or of a body in it, has


@dataclass(frozen=True)
class Trips:
    """How often a body runs per run of its node."""

    count: int
    low: float = 1.0  # low, high: the range, as multiples of `count`, if it is a guess
    high: float = 1.0
    fixed: bool = True  # the model itself sets it, not a given size


@dataclass(frozen=True)
class Body:
    """A body as its own model."""

    attribute: str  # of the node that holds it
    proto: onnx.ModelProto  # the body as a model
    captured: frozenset[str]  # the tensors that it takes from the graph around it
    inferred: InferredTensors  # facts about its tensors


@dataclass(frozen=True)
class AnalysedBodies:
    """The analysed bodies of a node."""

    trips: Trips  # of the body; a branch of an If runs once
    bodies: tuple[Body, ...]  # one; of an If, both branches
    chosen: str  # the attribute of the If's branch that the user chose; "" if none
    shapes: dict[str, tuple[int, ...]]  # of the node's outputs, from those of the bodies
