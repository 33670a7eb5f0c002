"""What ONNX Runtime's optimisers do differently for CUDA, applied to a graph that is derived on a machine without a GPU.

Such a graph comes from the CPU provider (see `graph.parsing`). ONNX Runtime assigns nodes to providers before most of its
optimisers run, and many of these work only on nodes of some providers (core/optimizer/graph_transformer_utils.cc of version
1.31). So the optimisers that would find no such node in a CUDA session are switched off (`CPU_ONLY_FUSIONS`). Two differences
remain, which are corrected here. ONNX Runtime fuses Add + Softmax for GPU providers only. And if a provider has no kernel for
an operator that ONNX defines by other operators (HardSwish on the CPU), ONNX Runtime uses these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hase.ort_analysis.cuda.placement import CONTRIB
from hase.ort_analysis.graph.open_shapes import Shape
from hase.records.kernel_record import KernelInput
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import CPU_ONLY_FUSIONS

BIASED_DTYPES = ("float16", "float32", "float64")  # types that BiasSoftmax supports
SOFTMAX_PER_AXIS = 13  # since this operator set, Softmax works on one axis, not on all axes from `axis` on
# A quantised operator between DequantizeLinear and QuantizeLinear: the CPU fuses all three, CUDA runs them in floating point.
QDQ_FUSIONS = ("QDQSelectorActionTransformer", "QDQS8ToU8Transformer")
# Nodes after a product of integers: fused if all run on the CPU. CUDA runs the cast and the scaling after it.
INTEGER_PRODUCT_FUSIONS = ("MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion")
COVER = "/hase.indices"  # suffix of an output that a MaxPool has only during optimisation
BLOCKED_LAYOUT = ("NchwcTransformer",)  # would change the float convolutions, which run on the GPU in a CUDA session


def rewrite_for_cuda(proto: onnx.ModelProto, original: onnx.GraphProto, tensors: Mapping[str, KernelInput],
                     known_shapes: Callable[[], Mapping[str, Shape]]) -> None:
    """Rewrites a derived graph in place. Tensors keep their names; some are removed.

    Args:
        proto: the graph that the CPU provider made, nodes in execution order.
        original: the model before any optimisation.
        tensors: type and shape of every tensor of `proto`.
        known_shapes: gives the shapes that a session knows while it optimises; called only if they matter.
    """
    restore_hard_swish(proto.graph, original)
    fuse_bias_softmax(proto, tensors, known_shapes)


def restore_hard_swish(graph: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Restores each HardSwish of the model: the CUDA provider has a kernel for it, the CPU provider splits it."""
    wanted = {node.output[0] for node in original.node if node.op_type == "HardSwish"}
    if not wanted:
        return
    producer = {name: node for node in graph.node for name in node.output}
    reads = _reads(graph)
    for node in [node for node in graph.node if node.op_type == "Mul" and node.output[0] in wanted]:
        for gate_name, value in ((node.input[0], node.input[1]), (node.input[1], node.input[0])):
            gate = producer.get(gate_name)
            if gate is not None and gate.op_type == "HardSigmoid" and gate.input[0] == value and reads[gate_name] == 1:
                _replace(graph, [gate, node], "HardSwish", "", [value], {})
                break


def fuse_bias_softmax(proto: onnx.ModelProto, tensors: Mapping[str, KernelInput],
                      known_shapes: Callable[[], Mapping[str, Shape]]) -> None:
    """Fuses Add + Softmax as ONNX Runtime's `BiasSoftmaxFusion` does for GPU providers.

    Args:
        proto: the graph that the CPU provider made, nodes in execution order.
        tensors: type and shape of every tensor of `proto`.
        known_shapes: gives the shapes that a session knows while it optimises; called only if they matter.
    """
    graph = proto.graph
    opset = next((entry.version for entry in proto.opset_import if entry.domain == ""), SOFTMAX_PER_AXIS)
    producer = {name: node for node in graph.node for name in node.output}
    reads = _reads(graph)
    fused = False
    known: Mapping[str, Shape] | None = None
    for softmax in [node for node in graph.node if node.op_type == "Softmax" and not node.domain]:
        add = producer.get(softmax.input[0])
        if add is None or add.op_type != "Add" or add.domain or reads[softmax.input[0]] != 1:
            continue
        if any(tensors[name].dtype not in BIASED_DTYPES for name in add.input):
            continue
        given = next((attribute.i for attribute in softmax.attribute if attribute.name == "axis"), None)
        known = known_shapes() if known is None else known
        left, right = (tensors[name].shape if tensors[name].constant else known.get(name) for name in add.input)
        if left is None or right is None:
            continue  # the rank is unknown
        alignment = bias_alignment(left, right, given, opset)
        if alignment is not None:
            swapped, axis, inner = alignment
            inputs = [add.input[1], add.input[0]] if swapped else list(add.input)
            _replace(graph, [add, softmax], "BiasSoftmax", CONTRIB, inputs, {"axis": axis, "is_inner_broadcast": int(inner)})
            fused = True
    if fused and not any(entry.domain == CONTRIB for entry in proto.opset_import):
        proto.opset_import.add(domain=CONTRIB, version=1)


def bias_alignment(left: Sequence[int | str], right: Sequence[int | str], axis: int | None,
                   opset: int) -> tuple[bool, int, bool] | None:
    """Whether softmax(left + right) can run as one BiasSoftmax, and how.

    From the softmax's axis on, the bias must have the input's sizes. Before it, the bias either begins with the input's sizes
    and ends in ones (inner broadcast), or begins with ones, or nothing, and ends in the input's sizes (outer broadcast).

    Args:
        left, right: shapes of the two summands; an open size is its name, and equal names are equal sizes.
        axis: of the softmax; None for its default.
        opset: operator set of the softmax.

    Returns:
        Whether the bias is `left` (not `right`); the axis, not negative; whether the broadcast is inner. None if they can't
        be fused.
    """
    rank = max(len(left), len(right))
    if min(len(left), len(right)) < 1:
        return None
    place = (-1 if opset >= SOFTMAX_PER_AXIS else 1) if axis is None else axis
    place %= rank
    whole = rank - place  # dimensions of one softmax
    if (opset >= SOFTMAX_PER_AXIS and whole != 1) or whole > min(len(left), len(right)):
        return None
    if tuple(left[-whole:]) != tuple(right[-whole:]):
        return None
    before_left, before_right = tuple(left[:-whole]), tuple(right[:-whole])
    if len(left) == len(right):
        same = _common(before_left, before_right)
        swapped = same < place and before_left[same] == 1
        bias = before_left if swapped else before_right
        if all(size == 1 for size in bias[same:]):
            return swapped, place, True
    same = _common(before_left[::-1], before_right[::-1])
    rest_left, rest_right = before_left[:len(before_left) - same], before_right[:len(before_right) - same]
    swapped = len(rest_left) < len(rest_right) or (
        len(rest_left) == len(rest_right) and bool(rest_left) and rest_left[-1] == 1)
    if any(size != 1 for size in (rest_left if swapped else rest_right)):
        return None
    return swapped, place, False


def _common(first: Sequence[int | str], second: Sequence[int | str]) -> int:
    """The number of leading sizes that two shapes share."""
    for count, (size, size_in_second) in enumerate(zip(first, second, strict=False)):
        if size != size_in_second:
            return count
    return min(len(first), len(second))


def _reads(graph: onnx.GraphProto) -> Counter[str]:
    """How often each tensor is read; an output of the graph counts once more."""
    return Counter([name for node in graph.node for name in node.input] + [value.name for value in graph.output])


def _replace(graph: onnx.GraphProto, old: Sequence[onnx.NodeProto], op_type: str, domain: str, inputs: Sequence[str],
             attributes: Mapping[str, Any]) -> None:
    """Replaces the nodes `old` by one node, with the name and the outputs of the last of them."""
    last = old[-1]
    made = onnx.helper.make_node(op_type, list(inputs), list(last.output), name=last.name, domain=domain, **attributes)
    places = [number for number, node in enumerate(graph.node) if any(node is replaced or node == replaced for replaced in old)]
    graph.node[places[-1]].CopyFrom(made)
    for place in reversed(places[:-1]):
        del graph.node[place]


def cuda_optimizers(graph: onnx.GraphProto) -> tuple[str, tuple[str, ...]]:
    """The optimisation level and the optimisers to switch off, for the graph of a model before optimisation.

    At level `all`, CUDA's nodes get the optimisers of `extended`; the CPU's nodes, mostly quantised operators, get more.
    """
    disabled = (*CPU_ONLY_FUSIONS, *INTEGER_PRODUCT_FUSIONS, *QDQ_FUSIONS)
    if runs_on_whole_numbers(graph):
        return "all", (*disabled, *BLOCKED_LAYOUT)
    return "extended", disabled


def runs_on_whole_numbers(graph: onnx.GraphProto) -> bool:
    """Whether a model itself contains quantised operators, which only the CPU provider has."""
    return any(node.op_type.startswith("QLinear") for node in graph.node)


def cover_pools(graph: onnx.GraphProto) -> None:
    """Gives, in place, each MaxPool a second output, so that the optimiser does not change it. It would move them to a
    channels-last layout together with the CPU's quantised convolutions, but a CUDA session runs them on the GPU.
    `uncover_pools` removes these outputs."""
    for node in graph.node:
        if node.op_type == "MaxPool" and len(node.output) == 1:
            node.output.append(node.output[0] + COVER)


def uncover_pools(graph: onnx.GraphProto) -> None:
    """Removes, in place, the outputs that `cover_pools` added."""
    for node in graph.node:
        if node.op_type == "MaxPool" and len(node.output) == 2 and node.output[1].endswith(COVER):
            del node.output[1]
