"""Which of ONNX Runtime's optimisers to leave out, so that the CPU provider's graph is the one that a CUDA session runs.

ONNX Runtime assigns nodes to providers before most of its optimisers run, and many of those work on the nodes of some
providers alone (core/optimizer/graph_transformer_utils.cc of version 1.31). On a machine without a GPU all nodes are the CPU's,
so those have to be off that would find no node of the CPU's in a CUDA session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.ort_sessions import CPU_ONLY_FUSIONS

if TYPE_CHECKING:
    import onnx

# A quantised operator between DequantizeLinear and QuantizeLinear: fused on the CPU; on CUDA all three run, in floating point.
QDQ_FUSIONS = ("QDQSelectorActionTransformer", "QDQS8ToU8Transformer")
# What follows a product of integers: fused where the CPU runs that, and the CUDA provider's kernel takes int8 by int8 alone.
INTEGER_PRODUCT_FUSIONS = ("MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion")
BLOCKED_LAYOUT = ("NchwcTransformer",)  # would take the float convolutions, which a CUDA session gives to the GPU


def cuda_optimizers(graph: onnx.GraphProto) -> tuple[str, tuple[str, ...]]:
    """The optimisation level and the optimisers to leave out, for the model `graph`, before any optimisation.

    Level `extended` is what CUDA's nodes get at `all` too; the CPU's nodes, of which quantised operators are most, get more.
    """
    types = {node.op_type for node in graph.node}
    if any(name.startswith("QLinear") for name in types):
        return "all", (*CPU_ONLY_FUSIONS, *QDQ_FUSIONS, *BLOCKED_LAYOUT)
    if types & {"QuantizeLinear", "DequantizeLinear"}:
        return "extended", (*CPU_ONLY_FUSIONS, *QDQ_FUSIONS)
    if "MatMulInteger" in types and not _products_of_unsigned(graph):
        return "extended", (*CPU_ONLY_FUSIONS, *INTEGER_PRODUCT_FUSIONS)
    return "extended", CPU_ONLY_FUSIONS


def _products_of_unsigned(graph: onnx.GraphProto) -> bool:
    """Whether the products of integers have a factor that CUDA's kernel does not take: one that DynamicQuantizeLinear makes
    (uint8), or weights of uint8."""
    from onnx import TensorProto

    unsigned = {node.output[0] for node in graph.node if node.op_type == "DynamicQuantizeLinear"}
    unsigned |= {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.UINT8}
    unsigned |= {value.name for value in graph.input if value.type.tensor_type.elem_type == TensorProto.UINT8}
    return any(unsigned & set(node.input[:2]) for node in graph.node if node.op_type == "MatMulInteger")
