"""The nodes of an optimised graph, named, with the values that their attributes and text inputs give."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hase.records import attention
from hase.records.operators import COPIES, VIEWS, operator_row
from hase.utils.lazy import onnx
from hase.utils.model_files import array_of, locations, tensors_of

if TYPE_CHECKING:
    import onnx

ONNX_DOMAINS = ("", "ai.onnx")
TAUGHT = ("cats_strings", "keys_strings", "classlabels_strings", "pool_strings")  # attributes of encoders and n-gram operators
UNKNOWN = ""
COUNTED = VIEWS | COPIES | {"Cast", "ReduceSum", "ReduceMax", "Sub", "Gather"}


@dataclass(frozen=True)
class ParsedNode:
    """One node of the optimised graph; tensor names in order, "" for an optional one that is missing.

    Attributes:
        runs: how often it runs in one run of the model.
        inside: the node whose body it is in; "" for a node of the graph itself.
    """

    name: str
    op_type: str
    domain: str
    provider: str
    attributes: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    runs: float = 1.0
    inside: str = ""


def bodies_of(node: onnx.NodeProto) -> dict[str, onnx.GraphProto]:
    """The graphs that an If, a Loop or a Scan holds, by attribute; nothing for other nodes."""
    names = operator_row(node.op_type).bodies if node.domain in ONNX_DOMAINS else ()
    return {attribute.name: attribute.g for attribute in node.attribute if attribute.name in names}


def control_flow_name(node: onnx.NodeProto, inside: str = "") -> str:
    """The name of an If, a Loop or a Scan: `Loop_<its first output>` if the file gives it none.

    Args:
        node: the node.
        inside: the name of the node that holds the body with it; "" for the main graph.
    """
    name = node.name or f"{node.op_type}_{next((out for out in node.output if out), '')}"
    return name if not inside or name.startswith(f"{inside}/") else f"{inside}/{name}"


def name_nodes(graph: onnx.GraphProto) -> None:
    """Gives every node of `graph` a unique name, and every node in its bodies: `<node>/<node of its body>`. Names that are
    unique stay.

    Some nodes are named after their outputs: ReorderOutputs, since ORT names them in another order each time, and nodes with
    bodies, since users give trips and branches by these names.
    """
    _name_nodes(graph, "", set())


def _name_nodes(graph: onnx.GraphProto, inside: str, seen: set[str]) -> None:
    for number, node in enumerate(graph.node):
        made = f"{node.op_type}_{node.output[0]}" if node.op_type == "ReorderOutput" else ""
        name = made or node.name or f"{node.op_type}_{number}"
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
            _name_nodes(body, name, seen)


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """An attribute as plain data: a tensor is `{"dtype", "shape", "values"}`, a subgraph `{"graph": <hash>}`."""
    if attribute.type == onnx.AttributeProto.GRAPH:
        return {"graph": hashlib.sha256(_without_places(attribute.g).SerializeToString(deterministic=True)).hexdigest()[:12]}
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        array = array_of(value)
        return {"dtype": str(array.dtype), "shape": list(array.shape), "values": array.ravel().tolist()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (list, tuple)):
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in value]
    return value


def _without_places(graph: onnx.GraphProto) -> onnx.GraphProto:
    """A graph whose constants don't say in which file they lie."""
    bare = onnx.GraphProto()
    bare.CopyFrom(graph)
    for tensor in filter(locations, tensors_of(bare)):
        tensor.ClearField("external_data")
    return bare


def parsed_node(node: onnx.NodeProto, provider: str) -> ParsedNode:
    """A node of the main graph, as ONNX Runtime runs it on `provider`."""
    return ParsedNode(name=node.name, op_type=node.op_type, domain=node.domain, provider=provider,
                      attributes={a.name: attribute_value(a) for a in sorted(node.attribute, key=lambda a: a.name)},
                      inputs=tuple(node.input), outputs=tuple(node.output))


def first_taught(attributes: Mapping[str, Any]) -> str:
    """The first word of an operator's vocabulary; UNKNOWN if it has none."""
    return next((str(attributes[name][0]) for name in TAUGHT if attributes.get(name)), UNKNOWN)


def known_words(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """By text input that encoders read: one word per column, or one word for all columns.

    The encoders are assumed to be in the order of the columns that they read, as converters of pipelines write them.
    """
    words_of = {}
    for value in graph.input:
        kind = value.type.tensor_type
        if kind.elem_type != onnx.TensorProto.STRING:
            continue
        reached, words = {value.name}, []
        for node in graph.node:
            if not reached & set(node.input):
                continue
            word = first_taught({
                attribute.name: attribute_value(attribute) for attribute in node.attribute if attribute.name in TAUGHT})
            if word:
                words.append(word)
            else:
                reached.update(node.output)
        columns = kind.shape.dim[-1].dim_value if len(kind.shape.dim) > 1 else 1
        if words:
            words_of[value.name] = words[:columns] if len(words) >= columns else words[:1]
    return words_of


def attention_lengths(graph: onnx.GraphProto, dims: Mapping[str, int]) -> dict[str, int]:
    """Values for the inputs that give GroupQueryAttention its lengths: the number of tokens in the cache and one more; 1 for a
    mask whose sum is the length. (A mask of zeros would give length 0, which the operator refuses.)

    Args:
        graph: of the model.
        dims: sizes of its dynamic dimensions.
    """
    inputs = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    maker = {out: node for node in graph.node for out in node.output if out}
    lengths = {}
    for node in graph.node:
        if node.op_type != attention.OPERATOR or len(node.input) <= attention.TOTAL:
            continue
        cache = inputs.get(node.input[min(attention.PAST)], ())
        cached = (cache[2].dim_value or dims.get(cache[2].dim_param, 0)) if len(cache) == 4 else 0
        for place, length in ((attention.LAST_PLACES, cached), (attention.TOTAL, cached + 1)):
            tensor = counted(node.input[place], maker)
            if tensor in inputs:
                lengths[tensor] = 1 if len(inputs[tensor]) > 1 else length
    return lengths


def counted(tensor: str, maker: Mapping[str, onnx.NodeProto] | Mapping[str, ParsedNode]) -> str:
    """The tensor that a number of tokens is counted in, such as a mask.

    Args:
        tensor: that holds the number.
        maker: the node that makes each tensor; graph inputs have none.
    """
    while tensor in maker and maker[tensor].op_type in COUNTED:
        node = maker[tensor]
        tensor = (node.inputs if isinstance(node, ParsedNode) else node.input)[0]
    return tensor


def shared_caches(graph: onnx.GraphProto, dims: Mapping[str, int]) -> dict[str, str]:
    """The outputs of a graph that are written into the buffer of an input, and that input: caches of attention with room for
    all tokens, as those who generate text bind them.

    Args:
        graph: of the model.
        dims: sizes of its dynamic dimensions.
    """
    def room(values: Sequence[onnx.ValueInfoProto]) -> dict[str, int]:
        axes = {value.name: value.type.tensor_type.shape.dim for value in values}
        return {name: of[2].dim_value or dims.get(of[2].dim_param, 0) for name, of in axes.items() if len(of) == 4}

    before, after = room(graph.input), room(graph.output)
    shared = {}
    for node in graph.node:
        if node.op_type != attention.OPERATOR:
            continue
        for past, present in attention.PAST.items():
            given, made = ([*names, *[""] * 8][place] for names, place in ((node.input, past), (node.output, present)))
            if 0 < after.get(made, 0) <= before.get(given, 0):  # a model's file may say "the total length" for either
                shared[made] = given
    return shared
