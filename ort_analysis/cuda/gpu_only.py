"""Operators that ONNX Runtime has for GPUs only, in graphs that are derived on a machine without one.

There, the CPU provider optimises the graph and infers its shapes, and it refuses an operator without a kernel. So each such
node is covered: an If with the same outputs stands for it. No optimiser changes that, since its condition is an input of the
graph. Both branches hold the same small graph, which reads what the node reads and has its outputs' shapes: it computes them
(COVERS), or it declares those of the operator's schema. ONNX Runtime may rename what the branches read; `uncover` puts the node
back with these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hase.ort_analysis.cuda.placement import CONTRIB
from hase.ort_analysis.graph.nodes import bodies_of
from hase.records.kernel_record import KernelInput
from hase.utils.errors import UserError
from hase.utils.lazy import onnx

CONDITION = "hase.covered"  # the condition of every If that covers a node
READ = "/hase.read."  # <first output of the node>/hase.read.<number of an input>: an output of the If, made from that input
CACHE = 4  # an input of DecoderMaskedSelfAttention
SPLIT_BY_NUMBER = 18  # since this operator set, Split needs the number of its parts

# Makes the nodes of a branch, from the node that is covered, the names of what it reads, and the version of ONNX's operators.
Branch = Callable[["onnx.NodeProto", Sequence[str], int], list["onnx.NodeProto"]]


def _made(op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return onnx.helper.make_node(op_type, list(inputs), [output], **attributes)


def _as_first_input(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """Every output has the first input's shape."""
    return [_made("Identity", reads[:1], out) for out in node.output if out]


def _half(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """The output is half as long as the input on the last axis."""
    parts: dict[str, Any] = {"num_outputs": 2} if opset >= SPLIT_BY_NUMBER else {}
    return [onnx.helper.make_node("Split", reads[:1], [node.output[0], f"{node.output[0]}/rest"], axis=-1, **parts)]


def _attention_with_cache(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """The output is a third of the input's product with the weights, and the second one has the shape of the cache."""
    product, rest = f"{node.output[0]}/product", [f"{node.output[0]}/{part}" for part in ("keys", "values")]
    parts: dict[str, Any] = {"num_outputs": 3} if opset >= SPLIT_BY_NUMBER else {}
    cache = len([name for name in node.input[:CACHE] if name])  # the mask before it may be left out
    return [_made("MatMul", reads[:2], product),
            onnx.helper.make_node("Split", [product], [node.output[0], *rest], axis=-1, **parts),
            *(_made("Identity", [reads[cache]], out) for out in node.output[1:] if out)]


def _sum(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """The output has the shape to which the two inputs are broadcast."""
    return [_made("Add", reads[:2], node.output[0])]


def _channels_last(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """A convolution of images, whose channels are the last axis of input, weights and output."""
    image, weights, result = (f"{node.output[0]}/{part}" for part in ("image", "weights", "result"))
    made = _made("Conv", [image, weights], result)
    made.attribute.extend(node.attribute)
    return [_made("Transpose", reads[:1], image, perm=[0, 3, 1, 2]), _made("Transpose", reads[1:2], weights, perm=[0, 3, 1, 2]),
            made, _made("Transpose", [result], node.output[0], perm=[0, 2, 3, 1])]


# Operators of CONTRIB; the CUDA provider has kernels of them, the CPU provider has none: recipes/cuda_kernels/probe_kernels.py
# opened no graph with them on a machine without a GPU. Of the first ones the outputs' shapes are computed from the inputs', of
# the others they are those of their schemas.
COVERS: dict[str, Branch] = {
    "BiasAdd": _as_first_input, "BiasSoftmax": _as_first_input, "BiasSplitGelu": _half, "ComplexMul": _sum,
    "ComplexMulConj": _sum, "DecoderMaskedSelfAttention": _attention_with_cache, "GroupNorm": _as_first_input,
    "NhwcConv": _channels_last, "SkipGroupNorm": _as_first_input,
}
BY_SCHEMA = frozenset({
    "BiasDropout", "BitmaskBiasDropout", "BitmaskDropout", "DecoderAttention", "DequantizeWithOrder",
    "DynamicSparseAttention", "GatedDeltaNet", "GatedRelativePositionBias", "GemmFloat8", "Irfft",
    "LongformerAttention", "MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight", "PackedAttention",
    "PackedMultiHeadAttention", "PagedAttention", "QOrderedGelu", "QOrderedLayerNormalization", "QuantizeWithOrder",
    "RelativePositionBias", "RemovePadding", "RestorePadding", "Rfft", "SparsePagedAttention", "VarlenCausalConvWithState",
})


def is_gpu_only(node: onnx.NodeProto) -> bool:
    """Whether a node must be covered where there is no GPU."""
    return node.domain == CONTRIB and (node.op_type in COVERS or node.op_type in BY_SCHEMA)


def holds_gpu_only(graph: onnx.GraphProto) -> bool:
    """Whether a graph, or a body in it, has a node that must be covered."""
    return any(is_gpu_only(node) or any(map(holds_gpu_only, bodies_of(node).values())) for node in graph.node)


def check_on_gpu(name: str, nodes: Sequence[onnx.NodeProto], providers: Sequence[str],
                 tensors: Mapping[str, KernelInput]) -> None:
    """Checks that the CUDA provider runs what the CPU provider can't.

    Raises:
        UserError: it has no kernel for the types of such a node.
    """
    for node, provider in zip(nodes, providers, strict=True):
        if is_gpu_only(node) and provider == "cpu":
            types = sorted({tensors[read].dtype for read in node.input if read})
            raise UserError(f"{name}: holds an operator that ONNX Runtime can't run: {node.name}: the CUDA provider has no "
                            f"{node.op_type} of {' and '.join(types)}, and the CPU provider has none at all")


def cover(model: onnx.ModelProto, declared: Mapping[str, onnx.TypeProto]) -> onnx.ModelProto:
    """Covers the nodes of a model that only GPUs run, in place, those in bodies too; returns the model.

    Args:
        model: the model.
        declared: the types and shapes of tensors by name, as far as the schemas tell (`types_by_schema`).
    """
    if holds_gpu_only(model.graph):
        opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
        model.graph.input.append(onnx.helper.make_tensor_value_info(CONDITION, onnx.TensorProto.BOOL, []))
        _cover_nodes(model.graph, opset, declared)
    return model


def _cover_nodes(graph: onnx.GraphProto, opset: int, declared: Mapping[str, onnx.TypeProto]) -> None:
    for node in graph.node:
        if is_gpu_only(node):
            node.CopyFrom(_covering(node, opset, declared))
        for body in bodies_of(node).values():
            _cover_nodes(body, opset, declared)


def _covering(node: onnx.NodeProto, opset: int, declared: Mapping[str, onnx.TypeProto]) -> onnx.NodeProto:
    """The If that stands for a node."""
    reads = {place: f"{node.output[0]}{READ}{place}" for place, name in enumerate(node.input) if name}
    # no optimiser computes random numbers beforehand, so what is read keeps its own name
    nodes = [_made("RandomNormalLike", [node.input[place]], read, dtype=onnx.TensorProto.FLOAT)
             for place, read in reads.items()]
    outputs = [*(out for out in node.output if out), *reads.values()]
    types = dict.fromkeys(outputs, onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    if (computed := COVERS.get(node.op_type)) is not None:
        nodes += computed(node, list(reads.values()), opset)
    else:
        types |= {out: declared[out] for out in outputs if out in declared}
        nodes += _of_any_shape(node, list(reads.values()), types)
    branch = onnx.helper.make_graph(nodes, f"{node.output[0]}/hase.branch", [], [
        onnx.helper.make_value_info(out, types[out]) for out in outputs])
    return onnx.helper.make_node("If", [CONDITION], outputs, name=node.name, then_branch=branch, else_branch=branch)


def _of_any_shape(node: onnx.NodeProto, reads: Sequence[str], types: Mapping[str, onnx.TypeProto]) -> list[onnx.NodeProto]:
    """Outputs of shapes that no inference can tell, so that those which the branch declares hold."""
    places, minus_one, shape = (f"{node.output[0]}/{part}" for part in ("places", "minus_one", "shape"))
    last = onnx.helper.make_tensor(minus_one, onnx.TensorProto.INT64, [1], [-1])
    nodes = [_made("NonZero", reads[:1], places), _made("Constant", [], minus_one, value=last),
             _made("Reshape", [places, minus_one], shape)]  # a vector of unknown length, so a shape of unknown rank
    for out in filter(None, node.output):
        nodes += [_made("Reshape", [reads[0], shape], f"{out}/any"),
                  _made("Cast", [f"{out}/any"], out, to=types[out].tensor_type.elem_type)]
    return nodes


def uncover(graph: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Puts the covered nodes back into a graph, in place.

    Args:
        graph: after `cover` and ONNX Runtime's optimisers.
        original: before both.
    """
    nodes = {node.output[0]: node for node in _all_nodes(original) if is_gpu_only(node)}
    _uncover_nodes(graph, nodes)
    for value in [value for value in graph.input if value.name == CONDITION]:
        graph.input.remove(value)


def _all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [inner for node in graph.node
            for inner in (node, *(held for body in bodies_of(node).values() for held in _all_nodes(body)))]


def _uncover_nodes(graph: onnx.GraphProto, nodes: dict[str, onnx.NodeProto]) -> None:
    for node in graph.node:
        if node.op_type != "If" or node.input[0] != CONDITION:
            for body in bodies_of(node).values():
                _uncover_nodes(body, nodes)
            continue
        restored = onnx.NodeProto()
        restored.CopyFrom(nodes[node.output[0]])
        restored.name = node.name
        read_by = {reader.output[0]: reader.input[0] for reader in bodies_of(node)["then_branch"].node if reader.input}
        for place, name in enumerate(restored.input):
            restored.input[place] = read_by[f"{node.output[0]}{READ}{place}"] if name else ""
        node.CopyFrom(restored)
