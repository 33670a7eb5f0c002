"""The optimisers of ONNX Runtime to switch off, so that the CPU provider's graph is the one that a CUDA session runs.

ONNX Runtime assigns nodes to providers before most of its optimisers run, and many of these work only on nodes of some
providers (core/optimizer/graph_transformer_utils.cc of version 1.31). On a machine without a GPU all nodes belong to the CPU
provider, so the optimisers that would find no such node in a CUDA session must be off.
"""

from __future__ import annotations

from pathlib import Path

from utils.lazy import onnx
from utils.model_files import read_whole_model
from utils.ort_sessions import CPU_ONLY_FUSIONS

# A quantised operator between DequantizeLinear and QuantizeLinear: the CPU fuses all three, CUDA runs them in floating point.
QDQ_FUSIONS = ("QDQSelectorActionTransformer", "QDQS8ToU8Transformer")
# Nodes after a product of integers: fused if all run on the CPU. CUDA runs the cast and the scaling after it.
INTEGER_PRODUCT_FUSIONS = ("MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion")
COVER = "/hase.indices"  # suffix of an output that a MaxPool has only during optimisation
BLOCKED_LAYOUT = ("NchwcTransformer",)  # would change the float convolutions, which run on the GPU in a CUDA session


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


def cover_pools(loadable: Path | bytes) -> bytes:
    """The model with MaxPools that the optimiser does not change. It would move them to a channels-last layout together with
    the CPU's quantised convolutions, but a CUDA session runs them on the GPU. They get a second output, which the optimiser
    does not handle; `uncover_pools` removes it."""
    proto = read_whole_model(loadable) if isinstance(loadable, Path) else onnx.load_from_string(loadable)
    for node in proto.graph.node:
        if node.op_type == "MaxPool" and len(node.output) == 1:
            node.output.append(node.output[0] + COVER)
    return bytes(proto.SerializeToString())


def uncover_pools(graph: onnx.GraphProto) -> None:
    """Removes, in place, the outputs that `cover_pools` added."""
    for node in graph.node:
        if node.op_type == "MaxPool" and len(node.output) == 2 and node.output[1].endswith(COVER):
            del node.output[1]
