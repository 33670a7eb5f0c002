"""Which of ONNX Runtime's optimisers to leave out, so that the CPU provider's graph is the one that a CUDA session runs.

ONNX Runtime assigns nodes to providers before most of its optimisers run, and many of those work on the nodes of some
providers alone (core/optimizer/graph_transformer_utils.cc of version 1.31). On a machine without a GPU all nodes are the CPU's,
so those have to be off that would find no node of the CPU's in a CUDA session.
"""

from __future__ import annotations

from pathlib import Path

from utils.lazy import onnx
from utils.model_files import read_whole_model
from utils.ort_sessions import CPU_ONLY_FUSIONS

# A quantised operator between DequantizeLinear and QuantizeLinear: fused on the CPU; on CUDA all three run, in floating point.
QDQ_FUSIONS = ("QDQSelectorActionTransformer", "QDQS8ToU8Transformer")
# What follows a product of integers: fused where all of it is the CPU's. CUDA takes the cast and the scaling behind it.
INTEGER_PRODUCT_FUSIONS = ("MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion")
COVER = "/hase.indices"  # ends the name of an output that a MaxPool has only while it is optimised
BLOCKED_LAYOUT = ("NchwcTransformer",)  # would take the float convolutions, which a CUDA session gives to the GPU


def cuda_optimizers(graph: onnx.GraphProto) -> tuple[str, tuple[str, ...]]:
    """The optimisation level and the optimisers to leave out, for the model `graph`, before any optimisation.

    Level `extended` is what CUDA's nodes get at `all` too; the CPU's nodes, of which quantised operators are most, get more.
    """
    disabled = (*CPU_ONLY_FUSIONS, *INTEGER_PRODUCT_FUSIONS, *QDQ_FUSIONS)
    if runs_on_whole_numbers(graph):
        return "all", (*disabled, *BLOCKED_LAYOUT)
    return "extended", disabled


def runs_on_whole_numbers(graph: onnx.GraphProto) -> bool:
    """Whether a model holds quantised operators of its own, which only the CPU provider has."""
    return any(node.op_type.startswith("QLinear") for node in graph.node)


def cover_pools(loadable: Path | bytes) -> bytes:
    """A model whose MaxPools the optimiser leaves as they are, while the CPU's quantised convolutions around them turn channels
    last, since a CUDA session runs them on the GPU. They get an output more than it takes; `uncover_pools` takes it away."""
    proto = read_whole_model(loadable) if isinstance(loadable, Path) else onnx.load_from_string(loadable)
    for node in proto.graph.node:
        if node.op_type == "MaxPool" and len(node.output) == 1:
            node.output.append(node.output[0] + COVER)
    return bytes(proto.SerializeToString())


def uncover_pools(graph: onnx.GraphProto) -> None:
    """Takes away, in place, the outputs that `cover_pools` added."""
    for node in graph.node:
        if node.op_type == "MaxPool" and len(node.output) == 2 and node.output[1].endswith(COVER):
            del node.output[1]
