"""Derives CUDA graphs of float16 and bfloat16 models without a GPU, where the CPU provider would insert casts.

The model is converted to single precision, optimised, and converted back: the CUDA provider's fusions are the same for all
these types. In models that mix types, each Cast is followed by a mark, an operator that no optimiser touches, so that the
borders between types are not lost. Afterwards types are propagated from inputs, constants and marks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import numpy as np

from hase.ort_analysis.graph.constants import decisive_constants, seen_by_optimisers
from hase.ort_analysis.graph.nodes import bodies_of
from hase.records.kernel_record import KernelInput, type_code, type_name
from hase.records.operators import operator_row
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.model_files import tensor_array, tensor_bytes
from hase.utils.model_graphs import LARGE_BYTES, hollow, is_hollow, values_of

SINGLE = "float32"
REDUCED = ("float16", "bfloat16")
MARK = "ThresholdedRelu"  # works on single precision, and is part of no fusion
MARK_OPSET = 10  # the first operator set with it
ALPHAS = {"float32": 3.5e-20, "float16": 5.5e-20, "bfloat16": 7.5e-20}  # the mark's attribute, by the type of the cast
ALPHA_TOLERANCE = 1e-3  # relative: the attribute is stored in single precision
MOST_SEEN_BYTES = 1 << 26  # of a constant that an optimiser may read, such as a mask for 5,000 tokens
# Constants in the forms of Gelu that ONNX Runtime fuses: √2, 1/√2, √(2/π), that times 0.044715, 0.044715, 1.702. It compares
# them with a tolerance for their type; a half-precision number converted to single precision would be outside.
GELU_CONSTANTS = (1.4142135, 0.70710677, 0.7978846, 0.035677407, 0.044715, 1.702)


def floating_type(element: int) -> str:
    """`float32`, `float16` or `bfloat16` for ONNX's type number; "" for other types."""
    name = type_name(element)
    return name if name in ALPHAS else ""


def element_types(graph: onnx.GraphProto) -> Iterator[int]:
    """ONNX's type numbers of inputs, outputs, weights, constants and casts, including those in bodies."""
    for value in (*graph.input, *graph.output):
        yield value.type.tensor_type.elem_type
    for tensor in graph.initializer:
        yield tensor.data_type
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" or (attribute.name == "dtype" and operator_row(node.op_type).typed_by_attribute):
                yield attribute.i
            elif attribute.HasField("t"):
                yield attribute.t.data_type
        for body in bodies_of(node).values():
            yield from element_types(body)


@dataclass(frozen=True)
class SinglePrecisionModel:
    """A model converted to single precision, and its original types."""

    model: onnx.ModelProto  # the result
    only_type: str  # the original's only floating-point type; "" if it mixes several
    known_types: Mapping[str, str]  # if it mixes several, the types of inputs, weights and constants by name


def to_single_precision(model: onnx.ModelProto, name: str) -> SinglePrecisionModel | None:
    """A copy of a model in single precision; None if nothing in it is float16 or bfloat16. Large weights of products are not
    read but become hollow (see `hase.utils.model_graphs`)."""
    types = {floating_type(element) for element in element_types(model.graph)} - {""}
    if types.isdisjoint(REDUCED):
        return None
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    graph = proto.graph
    only_type = types.pop() if len(types) == 1 else ""
    known_types = {} if only_type else _known_types(graph)
    del graph.value_info[:]  # ORT infers the types again
    if not only_type:
        if any(bodies_of(node) for node in graph.node):
            raise UserError(f"{name}: mixes floating types and holds Loop, If or Scan, so its CUDA graph can't be derived "
                            "without a GPU: types can't be followed into the graphs that such nodes hold; analyse it on a "
                            "machine with a GPU, or use --device cpu")
        opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
        if opset < MARK_OPSET:
            raise UserError(f"{name}: mixes floating types in operator set {opset}, so its CUDA graph can't be derived without "
                            f"a GPU; analyse it on a machine with one, convert it to operator set {MARK_OPSET} or later, or "
                            "use --device cpu")
        _mark_casts(graph)
    _widen_graph(graph, frozenset(), frozenset())
    return SinglePrecisionModel(proto, only_type, known_types)


def _widen_graph(graph: onnx.GraphProto, decisive: Set[str], seen: Set[str]) -> None:
    """Converts a graph and its bodies to single precision, in place. `decisive` and `seen` are the `decisive_constants` and
    `seen_by_optimisers` of the graph around it."""
    decisive, seen = decisive | decisive_constants(graph), seen | seen_by_optimisers(graph)

    def most_bytes(name: str) -> float:
        return math.inf if name in decisive else MOST_SEEN_BYTES if name in seen else LARGE_BYTES

    for tensor in graph.initializer:
        _widen(tensor, most_bytes(tensor.name))
    for value in (*graph.input, *graph.output):
        if floating_type(value.type.tensor_type.elem_type) in REDUCED:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen(attribute.t, most_bytes(node.output[0]))
            elif attribute.name in ("to", "dtype") and floating_type(attribute.i) in REDUCED:
                attribute.i = onnx.TensorProto.FLOAT
        for body in bodies_of(node).values():
            del body.value_info[:]
            _widen_graph(body, decisive, seen)


def _widen(tensor: onnx.TensorProto, most_bytes: float) -> None:
    """Converts a tensor to single precision, or makes it hollow if it exceeds `most_bytes`. One of GELU_CONSTANTS that was
    rounded gets its exact value."""
    if floating_type(tensor.data_type) not in REDUCED:
        return
    if is_hollow(tensor) or tensor_bytes(tensor) > most_bytes:
        tensor.data_type = onnx.TensorProto.FLOAT
        hollow(tensor)
        return
    values = tensor_array(values_of(tensor))
    wide = values.astype(np.float32)
    if values.size == 1:
        exact = [number for number in GELU_CONSTANTS if values.dtype.type(number) == values.reshape(())]
        wide = np.full_like(wide, exact[0]) if exact else wide
    tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))


def _known_types(graph: onnx.GraphProto) -> dict[str, str]:
    """The floating-point types, by name, of inputs, weights, and outputs of operators without floating-point inputs."""
    types = {value.name: floating_type(value.type.tensor_type.elem_type) for value in graph.input}
    types |= {tensor.name: floating_type(tensor.data_type) for tensor in graph.initializer}
    for node in graph.node:
        if operator_row(node.op_type).typed_by_attribute:
            kinds = [attribute.t.data_type if attribute.HasField("t") else attribute.i for attribute in node.attribute
                     if attribute.HasField("t") or attribute.name == "dtype"]
            types |= {name: floating_type(kinds[0]) if kinds else SINGLE for name in node.output}
    return {name: dtype for name, dtype in types.items() if dtype}


def _mark_casts(graph: onnx.GraphProto) -> None:
    """Inserts a mark (MARK) after each cast to a floating-point type."""
    nodes = []
    for node in graph.node:
        nodes.append(node)
        target = next((floating_type(attribute.i) for attribute in node.attribute if attribute.name == "to"), "")
        if node.op_type == "Cast" and target:
            output = node.output[0]
            node.output[0] = f"{output}/before_mark"
            nodes.append(onnx.helper.make_node(MARK, [node.output[0]], [output], f"{node.name or output}/mark",
                                               alpha=ALPHAS[target]))
    del graph.node[:]
    graph.node.extend(nodes)


def marked_type(node: onnx.NodeProto) -> str:
    """The type that a mark stands for; "" for another node."""
    if node.op_type != MARK or node.domain:
        return ""
    alpha = next((attribute.f for attribute in node.attribute if attribute.name == "alpha"), 1.0)
    return next((dtype for dtype, value in ALPHAS.items() if abs(alpha / value - 1.0) < ALPHA_TOLERANCE), "")


def restore_types(proto: onnx.ModelProto, reduced: SinglePrecisionModel,
                  tensors: Mapping[str, KernelInput]) -> dict[str, KernelInput]:
    """The tensors of the optimised graph `proto` with their types in the original model; marks become casts again."""
    if reduced.only_type:
        return {name: _typed(tensor, reduced.only_type) for name, tensor in tensors.items()}
    types = {name: dtype for name, dtype in reduced.known_types.items() if name in tensors}
    for node in proto.graph.node:
        floating = [name for name in node.input if name in tensors and tensors[name].dtype == SINGLE]
        sources = [types[name] for name in floating if name in types and not tensors[name].constant]
        sources = sources or [types[name] for name in floating if name in types]
        dtype = marked_type(node) or (sources[0] if sources else SINGLE)
        for name in floating:
            types.setdefault(name, dtype)  # a constant that ORT made
        for name in node.output:
            types.setdefault(name, dtype)
    _marks_to_casts(proto.graph, types, tensors)
    return {name: _typed(tensor, types.get(name, SINGLE)) for name, tensor in tensors.items()}


def _typed(tensor: KernelInput, dtype: str) -> KernelInput:
    return tensor.model_copy(update={"dtype": dtype}) if tensor.dtype == SINGLE and dtype != SINGLE else tensor


def _marks_to_casts(graph: onnx.GraphProto, types: Mapping[str, str], tensors: Mapping[str, KernelInput]) -> None:
    """Turns marks into casts as ONNX Runtime has them: merged with a cast from integers before them, and none that keeps the
    type."""
    reads = Counter(name for node in graph.node for name in node.input)
    outputs = {value.name for value in graph.output}
    producers = {name: node for node in graph.node for name in node.output}
    replaced: dict[str, str] = {}  # outputs of marks that change nothing -> the tensor to use instead
    removed: set[str] = set()  # outputs of removed nodes
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = replaced.get(name, name)
        target = marked_type(node)
        if not target:
            continue
        source, output = node.input[0], node.output[0]
        before = producers.get(source)
        from_integers = before is not None and before.op_type == "Cast" and tensors[before.input[0]].dtype != SINGLE
        if types.get(source) == target and tensors[source].dtype == SINGLE and output not in outputs and not from_integers:
            replaced[output] = source
            removed.add(output)
            continue
        if before is not None and from_integers and reads[source] == 1:
            removed.add(source)
            source = before.input[0]
        node.CopyFrom(onnx.helper.make_node("Cast", [source], [output], name=node.name, to=type_code(target)))
    kept = [node for node in graph.node if removed.isdisjoint(node.output)]
    del graph.node[:]
    graph.node.extend(kept)
