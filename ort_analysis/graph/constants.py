"""Constants of a graph: folding as in ONNX Runtime's optimisation, and which values matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hase.ort_analysis.graph.nodes import ONNX_DOMAINS, bodies_of
from hase.utils.lazy import onnx
from hase.utils.model_files import locations, tensor_bytes
from hase.utils.model_graphs import hollow

# Operators that make conditions, indices, or a tensor of another size from the values of floating-point tensors.
DECIDING_BY_VALUE = {"ArgMax", "ArgMin", "Compress", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less",
                     "LessOrEqual", "NonZero", "TopK", "Unique"}
FLOATING = {1, 10, 11, 16}  # ONNX's numbers of float32, float16, float64 and bfloat16
# Operators that multiply by their constants, or look them up: no optimiser looks at the values of these.
WEIGHTED = {"Attention", "Conv", "ConvTranspose", "Einsum", "EmbedLayerNormalization", "FusedConv", "FusedMatMul", "GRU",
            "Gather", "GatherBlockQuantized", "Gemm", "GroupQueryAttention", "LSTM", "MatMul", "MatMulNBits", "MoE",
            "MultiHeadAttention", "NhwcConv", "QMoE", "RNN"}
# Bytes that ONNX Runtime may compute from constants; beyond that, large results get a type and a shape, but no values.
MOST_FOLDED_BYTES = 1 << 28
LARGE_RESULT_BYTES = 1 << 20
MOVES = {"Concat", "Expand", "Flatten", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
ARITHMETIC = {"Add", "Div", "Mul", "Neg", "Pow", "Sqrt", "Sub"}
COMPUTED_IN = {1, 11}  # float32 and float64, for which the CPU provider has kernels of all of these


def constant_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, in order, that read only constants."""
    constants = {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update(node.output)
        elif node.input and constants.issuperset(name for name in node.input if name) and not bodies_of(node):
            constants.update(node.output)
            yield node


def _decides_by_value(node: onnx.NodeProto) -> bool:
    """Whether a node computes integers, conditions or sizes from the values that it reads."""
    to_other_type = any(attribute.name == "to" and attribute.i not in FLOATING for attribute in node.attribute)
    return node.op_type in DECIDING_BY_VALUE or to_other_type


def decisive_constants(graph: onnx.GraphProto) -> set[str]:
    """The constants of a graph whose values, directly or indirectly, decide what is computed."""
    sources_of: dict[str, set[str]] = {}
    decisive: set[str] = set()
    for node in constant_nodes(graph):
        sources = set().union(*({name} | sources_of.get(name, set()) for name in node.input))
        decisive |= sources if _decides_by_value(node) else set()
        sources_of |= dict.fromkeys(node.output, sources)
    return decisive


def seen_by_optimisers(graph: onnx.GraphProto) -> set[str]:
    """The tensors whose values an optimiser may read, such as an added mask. These are all but the weights of products and
    their sources."""
    constant = {node.output[0] for node in constant_nodes(graph)}
    names = {value.name for value in graph.output}
    for node in reversed(graph.node):
        if node.output and node.output[0] in constant and not _decides_by_value(node):
            names.update(node.input if names & set(node.output) else ())
        elif node.op_type not in WEIGHTED:
            names.update(node.input)
        for body in bodies_of(node).values():
            names |= seen_by_optimisers(body)
    return names


def fold_large(model: onnx.ModelProto, most_bytes: int = MOST_FOLDED_BYTES) -> None:
    """Folds nodes that produce large constants, in place, like ONNX Runtime but without reading or writing values.

    Each becomes a hollow constant with its type and shape. Nothing changes if ONNX Runtime would compute at most `most_bytes`.
    A Transpose before a Gemm stays: ONNX Runtime makes it an attribute of the Gemm.
    """
    graph = model.graph
    unfolded = seen_by_optimisers(graph)
    unfolded |= {name for node in graph.node if node.op_type == "Gemm" for name in node.input}
    folded = {node.output[0]: results for node, results in _large_results(model) if unfolded.isdisjoint(node.output)}
    if sum(tensor_bytes(tensor) for results in folded.values() for tensor in results) <= most_bytes:
        return
    remaining = [node for node in graph.node if node.output[0] not in folded]
    for results in folded.values():
        graph.initializer.extend(results)
    del graph.node[:]
    graph.node.extend(remaining)


def _large_results(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, list[onnx.TensorProto]]]:
    """The nodes that compute large floating-point constants or packed weights from constants, with hollow outputs."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 1))
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    known |= {node.output[0]: attribute.t for node in model.graph.node if node.op_type == "Constant"
              for attribute in node.attribute if attribute.HasField("t")}
    integers = {onnx.TensorProto.BOOL, onnx.TensorProto.INT32, onnx.TensorProto.INT64}
    for node in constant_nodes(model.graph):
        inputs = {name: known[name] for name in node.input if name in known}
        if node.domain not in ONNX_DOMAINS or set(node.input) - {"", *inputs}:
            continue
        results = _results(node, inputs, opset)
        known |= {tensor.name: tensor for tensor in results}
        if results and _is_folded(node, inputs, results) and all(
                tensor.data_type not in integers and tensor_bytes(tensor) > LARGE_RESULT_BYTES for tensor in results):
            yield node, results


def _is_folded(node: onnx.NodeProto, inputs: dict[str, onnx.TensorProto], results: Sequence[onnx.TensorProto]) -> bool:
    """Whether ONNX Runtime computes a node's outputs beforehand, and does not remove it in another way."""
    input_types, output_types = ({tensor.data_type for tensor in tensors} for tensors in (inputs.values(), results))
    if node.op_type == "Cast":
        return input_types != output_types
    return node.op_type in MOVES or (node.op_type in ARITHMETIC and input_types <= COMPUTED_IN)


def _results(node: onnx.NodeProto, inputs: dict[str, onnx.TensorProto], opset: int) -> list[onnx.TensorProto]:
    """The outputs of a standard ONNX node as hollow tensors; none if their shapes can't be inferred."""
    types = {name: onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)) for name, tensor in inputs.items()}
    values = {name: tensor for name, tensor in inputs.items() if not locations(tensor)}
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        types_of_outputs = onnx.shape_inference.infer_node_outputs(schema, node, types, values,
                                                                   opset_imports=[onnx.helper.make_opsetid("", opset)])
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, onnx.defs.SchemaError):  # ORT says what is wrong
        return []
    results = []
    for name, kind in types_of_outputs.items():
        dims = kind.tensor_type.shape.dim
        if not kind.tensor_type.HasField("shape") or not all(dim.HasField("dim_value") for dim in dims):
            return []
        results.append(onnx.TensorProto(name=name, data_type=kind.tensor_type.elem_type, dims=[dim.dim_value for dim in dims]))
        hollow(results[-1])
    return results
