"""Applies ONNX Runtime's CUDA-specific optimisations to a graph derived without a GPU.

Such a graph comes from the CPU provider (see `graph.parsing`). ONNX Runtime assigns nodes to providers before most optimisers
run, and many optimisers work only on nodes of some providers (core/optimizer/graph_transformer_utils.cc of version 1.31). So
the optimisers without matching nodes in a CUDA session are switched off (`CPU_ONLY_FUSIONS`). Two differences remain and are
corrected here: ONNX Runtime fuses Add + Softmax only for GPU providers, and it replaces an operator without a kernel by ONNX's
definition in other operators (HardSwish on the CPU).

The CPU provider, which optimises the graph and infers shapes, refuses operators that only GPUs have. So an If with the same
outputs replaces ("covers") each such node. No optimiser changes it, since its condition is a graph input. Both branches hold
the same small graph. It reads what the node reads, and its outputs have the node's shapes, computed (COVERS) or declared by the
operator's schema. ONNX Runtime may rename what the branches read; `uncover_gpu_only` restores the node with these names.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hase.ort_analysis.cuda.placement import CONTRIB
from hase.ort_analysis.graph.nodes import Shape, bodies_of
from hase.records.kernel_record import KernelInput
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import CPU_ONLY_FUSIONS

BIASED_DTYPES = ("float16", "float32", "float64")  # types that BiasSoftmax supports
SOFTMAX_PER_AXIS = 13  # since this operator set, Softmax works on one axis, not on all axes from `axis` on
# A quantised operator between DequantizeLinear and QuantizeLinear: the CPU fuses all three, CUDA runs them in floating point.
QDQ_FUSIONS = ("QDQSelectorActionTransformer", "QDQS8ToU8Transformer")
# Nodes after a product of integers: fused if all run on the CPU. CUDA runs the cast and the scaling after it.
INTEGER_PRODUCT_FUSIONS = ("MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion")
POOL_COVER = "/hase.indices"  # suffix of an output that a MaxPool has only during optimisation
BLOCKED_LAYOUT = ("NchwcTransformer",)  # would change the float convolutions, which run on the GPU in a CUDA session
CONDITION = "hase.covered"  # the condition of every If that covers a node
READ = "/hase.read."  # <first output of the node>/hase.read.<number of an input>: an output of the If, made from that input
CACHE_INPUT = 4  # the index of an input of DecoderMaskedSelfAttention
NUMBERED_SPLIT = 18  # since this operator set, Split needs the number of its parts


def rewrite_for_cuda(proto: onnx.ModelProto, original: onnx.GraphProto, tensors: Mapping[str, KernelInput],
                     known_shapes: Callable[[], Mapping[str, Shape]]) -> None:
    """Rewrites a CPU provider's graph in place as CUDA's optimisers would. Tensors keep their names; some are removed.

    `original` is the model before optimisation. `known_shapes` gives the shapes that a session knows while optimising; it is
    called only if they matter.
    """
    restore_hard_swish(proto.graph, original)
    fuse_bias_softmax(proto, tensors, known_shapes)


def restore_hard_swish(graph: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Restores each HardSwish: the CUDA provider has a kernel for it, the CPU provider splits it."""
    wanted = {node.output[0] for node in original.node if node.op_type == "HardSwish"}
    if not wanted:
        return
    producer = {name: node for node in graph.node for name in node.output}
    reads = _read_counts(graph)
    for node in [node for node in graph.node if node.op_type == "Mul" and node.output[0] in wanted]:
        for gate_name, value in ((node.input[0], node.input[1]), (node.input[1], node.input[0])):
            gate = producer.get(gate_name)
            if gate is not None and gate.op_type == "HardSigmoid" and gate.input[0] == value and reads[gate_name] == 1:
                _replace_nodes(graph, [gate, node], "HardSwish", "", [value], {})
                break


def fuse_bias_softmax(proto: onnx.ModelProto, tensors: Mapping[str, KernelInput],
                      known_shapes: Callable[[], Mapping[str, Shape]]) -> None:
    """Fuses Add + Softmax as ONNX Runtime's `BiasSoftmaxFusion` does for GPU providers."""
    graph = proto.graph
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    producer = {name: node for node in graph.node for name in node.output}
    reads, shapes = _read_counts(graph), functools.cache(known_shapes)
    for softmax in [node for node in graph.node if node.op_type == "Softmax" and not node.domain]:
        add = producer.get(softmax.input[0])
        if add is None or add.op_type != "Add" or add.domain or reads[softmax.input[0]] != 1:
            continue
        if any(tensors[name].dtype not in BIASED_DTYPES for name in add.input):
            continue
        given_axis = next((attribute.i for attribute in softmax.attribute if attribute.name == "axis"), None)
        left, right = (tensors[name].shape if tensors[name].constant else shapes().get(name) for name in add.input)
        if left is None or right is None:
            continue  # the rank is unknown
        if (alignment := bias_alignment(left, right, given_axis, opsets.get("", SOFTMAX_PER_AXIS))) is not None:
            swapped, axis, inner = alignment
            inputs = [add.input[1], add.input[0]] if swapped else list(add.input)
            attributes = {"axis": axis, "is_inner_broadcast": int(inner)}
            _replace_nodes(graph, [add, softmax], "BiasSoftmax", CONTRIB, inputs, attributes)
    if CONTRIB not in opsets and any(node.domain == CONTRIB for node in graph.node):
        proto.opset_import.add(domain=CONTRIB, version=1)


def bias_alignment(left: Sequence[int | str], right: Sequence[int | str], axis: int | None,
                   opset: int) -> tuple[bool, int, bool] | None:
    """Whether and how softmax(left + right) can run as one BiasSoftmax; None if it can't.

    From the softmax's axis on, the bias must have the input's sizes. Before it, the bias either begins with the input's sizes
    and ends in ones (inner broadcast), or begins with ones, or nothing, and ends in the input's sizes (outer broadcast). An
    open size is its name; equal names are equal sizes.

    Returns whether the bias is `left` (not `right`), the non-negative axis, and whether the broadcast is inner.
    """
    rank = max(len(left), len(right))
    if min(len(left), len(right)) < 1:
        return None
    first = (-1 if opset >= SOFTMAX_PER_AXIS else 1) if axis is None else axis
    first %= rank
    normalised = rank - first  # number of axes that one softmax covers
    if (opset >= SOFTMAX_PER_AXIS and normalised != 1) or normalised > min(len(left), len(right)):
        return None
    if tuple(left[-normalised:]) != tuple(right[-normalised:]):
        return None
    before_left, before_right = tuple(left[:-normalised]), tuple(right[:-normalised])
    if len(left) == len(right):
        same = _equal_leading(before_left, before_right)
        swapped = same < first and before_left[same] == 1
        bias = before_left if swapped else before_right
        if all(size == 1 for size in bias[same:]):
            return swapped, first, True
    same = _equal_leading(before_left[::-1], before_right[::-1])
    rest_left, rest_right = before_left[:len(before_left) - same], before_right[:len(before_right) - same]
    swapped = len(rest_left) < len(rest_right) or (
        len(rest_left) == len(rest_right) and bool(rest_left) and rest_left[-1] == 1)
    if any(size != 1 for size in (rest_left if swapped else rest_right)):
        return None
    return swapped, first, False


def _equal_leading(first: Sequence[int | str], second: Sequence[int | str]) -> int:
    """The number of equal leading sizes of two shapes."""
    return next((count for count, (size, other) in enumerate(zip(first, second, strict=False)) if size != other),
                min(len(first), len(second)))


def _read_counts(graph: onnx.GraphProto) -> Counter[str]:
    """How often each tensor is read; being a graph output counts as once."""
    return Counter([name for node in graph.node for name in node.input] + [value.name for value in graph.output])


def _replace_nodes(graph: onnx.GraphProto, old: Sequence[onnx.NodeProto], op_type: str, domain: str, inputs: Sequence[str],
                   attributes: Mapping[str, Any]) -> None:
    """Replaces the nodes `old` by one node with the last one's name and outputs."""
    last = old[-1]
    new = onnx.helper.make_node(op_type, list(inputs), list(last.output), name=last.name, domain=domain, **attributes)
    indices = [index for index, node in enumerate(graph.node) if any(node is replaced or node == replaced for replaced in old)]
    graph.node[indices[-1]].CopyFrom(new)
    for index in reversed(indices[:-1]):
        del graph.node[index]


def cuda_optimizers(graph: onnx.GraphProto) -> tuple[str, tuple[str, ...]]:
    """The optimisation level for a model's graph, and the optimisers to switch off.

    In a CUDA session at level `all`, CUDA's nodes get only the optimisers of `extended`. The CPU's nodes, mostly quantised
    operators, get all, so a model with quantised operators needs level `all`.
    """
    disabled = (*CPU_ONLY_FUSIONS, *INTEGER_PRODUCT_FUSIONS, *QDQ_FUSIONS)
    if has_quantised_operators(graph):
        return "all", (*disabled, *BLOCKED_LAYOUT)
    return "extended", disabled


def has_quantised_operators(graph: onnx.GraphProto) -> bool:
    """Whether a model contains quantised operators, which only the CPU provider has."""
    return any(node.op_type.startswith("QLinear") for node in graph.node)


def cover_pools(graph: onnx.GraphProto) -> None:
    """Gives each MaxPool a second output, in place, so that no optimiser changes it; `uncover_pools` removes it. Otherwise
    pools would become channels-last with the CPU's quantised convolutions, but a CUDA session runs them on the GPU."""
    for node in graph.node:
        if node.op_type == "MaxPool" and len(node.output) == 1:
            node.output.append(node.output[0] + POOL_COVER)


def uncover_pools(graph: onnx.GraphProto) -> None:
    """Removes the outputs that `cover_pools` added, in place."""
    for node in graph.node:
        if node.op_type == "MaxPool" and len(node.output) == 2 and node.output[1].endswith(POOL_COVER):
            del node.output[1]


# Makes the nodes of a branch from the covered node, the names of its inputs in the branch, and the version of ONNX's operators.
MakeBranch = Callable[["onnx.NodeProto", Sequence[str], int], list["onnx.NodeProto"]]


def _node(op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return onnx.helper.make_node(op_type, list(inputs), [output], **attributes)


def _split(tensor: str, outputs: Sequence[str], opset: int) -> onnx.NodeProto:
    """Splits a tensor into equal parts along its last axis."""
    number: dict[str, Any] = {"num_outputs": len(outputs)} if opset >= NUMBERED_SPLIT else {}
    return onnx.helper.make_node("Split", [tensor], list(outputs), axis=-1, **number)


def _as_first_input(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """Every output has the first input's shape."""
    return [_node("Identity", reads[:1], out) for out in node.output if out]


def _halved(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """The output has half the input's length on the last axis."""
    return [_split(reads[0], [node.output[0], f"{node.output[0]}/rest"], opset)]


def _attention_with_cache(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """The first output is a third of the product of input and weights; the second one has the cache's shape."""
    product, rest = f"{node.output[0]}/product", [f"{node.output[0]}/{part}" for part in ("keys", "values")]
    cache = len([name for name in node.input[:CACHE_INPUT] if name])  # the mask before it may be left out
    return [_node("MatMul", reads[:2], product), _split(product, [node.output[0], *rest], opset),
            *(_node("Identity", [reads[cache]], out) for out in node.output[1:] if out)]


def _broadcast(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """The output has the broadcast shape of the two inputs."""
    return [_node("Add", reads[:2], node.output[0])]


def _channels_last(node: onnx.NodeProto, reads: Sequence[str], opset: int) -> list[onnx.NodeProto]:
    """An image convolution with channels as the last axis of input, weights and output."""
    image, weights, result = (f"{node.output[0]}/{part}" for part in ("image", "weights", "result"))
    convolution = _node("Conv", [image, weights], result)
    convolution.attribute.extend(node.attribute)
    return [_node("Transpose", reads[:1], image, perm=[0, 3, 1, 2]), _node("Transpose", reads[1:2], weights, perm=[0, 3, 1, 2]),
            convolution, _node("Transpose", [result], node.output[0], perm=[0, 2, 3, 1])]


# Operators of CONTRIB with kernels in the CUDA provider only: recipes/cuda_kernels/probe_kernels.py opened no graph with them
# on a machine without a GPU. For those of COVERS, the branch computes the outputs' shapes from the inputs'; for those of
# BY_SCHEMA, the operator's schema declares them.
COVERS: dict[str, MakeBranch] = {
    "BiasAdd": _as_first_input, "BiasSoftmax": _as_first_input, "BiasSplitGelu": _halved, "ComplexMul": _broadcast,
    "ComplexMulConj": _broadcast, "DecoderMaskedSelfAttention": _attention_with_cache, "GroupNorm": _as_first_input,
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
    """Whether a node must be covered if there is no GPU."""
    return node.domain == CONTRIB and (node.op_type in COVERS or node.op_type in BY_SCHEMA)


def has_gpu_only_nodes(graph: onnx.GraphProto) -> bool:
    """Whether a graph or one of its bodies has a node that must be covered."""
    return any(map(is_gpu_only, _all_nodes(graph)))


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, each followed by those of its bodies."""
    for node in graph.node:
        yield node
        for body in bodies_of(node).values():
            yield from _all_nodes(body)


def check_gpu_only_nodes(name: str, nodes: Sequence[onnx.NodeProto], providers: Sequence[str],
                 tensors: Mapping[str, KernelInput]) -> None:
    """Refuses a graph with a GPU-only node if the CUDA provider has no kernel for the node's types either."""
    for node, provider in zip(nodes, providers, strict=True):
        if is_gpu_only(node) and provider == "cpu":
            types = sorted({tensors[read].dtype for read in node.input if read})
            raise UserError(f"{name}: holds an operator that ONNX Runtime can't run: {node.name}: the CUDA provider has no "
                            f"{node.op_type} of {' and '.join(types)}, and the CPU provider has none at all")


def cover_gpu_only(model: onnx.ModelProto, declared: Mapping[str, onnx.TypeProto]) -> onnx.ModelProto:
    """Covers the GPU-only nodes of a model and its bodies, in place; returns the model. `declared`: types and shapes of tensors
    by name, as far as the schemas tell (`types_by_schema`)."""
    if has_gpu_only_nodes(model.graph):
        opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
        model.graph.input.append(onnx.helper.make_tensor_value_info(CONDITION, onnx.TensorProto.BOOL, []))
        for node in _all_nodes(model.graph):
            if is_gpu_only(node):
                node.CopyFrom(_cover(node, opset, declared))
    return model


def _cover(node: onnx.NodeProto, opset: int, declared: Mapping[str, onnx.TypeProto]) -> onnx.NodeProto:
    """The If that covers a GPU-only node."""
    reads = {index: f"{node.output[0]}{READ}{index}" for index, name in enumerate(node.input) if name}
    # no optimiser computes random numbers beforehand, so what is read keeps its own name
    nodes = [_node("RandomNormalLike", [node.input[index]], read, dtype=onnx.TensorProto.FLOAT)
             for index, read in reads.items()]
    outputs = [*(out for out in node.output if out), *reads.values()]
    types = dict.fromkeys(outputs, onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    if (computed := COVERS.get(node.op_type)) is not None:
        nodes += computed(node, list(reads.values()), opset)
    else:
        types |= {out: declared[out] for out in outputs if out in declared}
        nodes += _nodes_of_any_shape(node, list(reads.values()), types)
    branch = onnx.helper.make_graph(nodes, f"{node.output[0]}/hase.branch", [], [
        onnx.helper.make_value_info(out, types[out]) for out in outputs])
    return onnx.helper.make_node("If", [CONDITION], outputs, name=node.name, then_branch=branch, else_branch=branch)


def _nodes_of_any_shape(node: onnx.NodeProto, reads: Sequence[str],
                        types: Mapping[str, onnx.TypeProto]) -> list[onnx.NodeProto]:
    """Nodes whose output shapes can't be inferred, so that the declared ones are used."""
    indices, minus_one, shape = (f"{node.output[0]}/{part}" for part in ("indices", "minus_one", "shape"))
    last = onnx.helper.make_tensor(minus_one, onnx.TensorProto.INT64, [1], [-1])
    nodes = [_node("NonZero", reads[:1], indices), _node("Constant", [], minus_one, value=last),
             _node("Reshape", [indices, minus_one], shape)]  # a vector of unknown length, so a shape of unknown rank
    for out in filter(None, node.output):
        nodes += [_node("Reshape", [reads[0], shape], f"{out}/any"),
                  _node("Cast", [f"{out}/any"], out, to=types[out].tensor_type.elem_type)]
    return nodes


def uncover_gpu_only(graph: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Restores the covered nodes of the `original` graph in an optimised graph, in place."""
    covered = {node.output[0]: node for node in _all_nodes(original) if is_gpu_only(node)}
    for node in _all_nodes(graph):
        if node.op_type == "If" and node.input[0] == CONDITION:
            read_by = {reader.output[0]: reader.input[0] for reader in bodies_of(node)["then_branch"].node if reader.input}
            restored = onnx.NodeProto()
            restored.CopyFrom(covered[node.output[0]])
            restored.name = node.name
            for index, name in enumerate(restored.input):
                restored.input[index] = read_by[f"{node.output[0]}{READ}{index}"] if name else ""
            node.CopyFrom(restored)
    for value in [value for value in graph.input if value.name == CONDITION]:
        graph.input.remove(value)
