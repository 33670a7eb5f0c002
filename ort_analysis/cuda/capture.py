"""Which models ONNX Runtime can't capture as a CUDA graph."""

from __future__ import annotations

from ort_analysis.records.kernel_costs import LAUNCHED_INPUTS, copied_tables
from ort_analysis.records.kernel_record import ModelRecord, Node

COPIES = ("MemcpyToHost", "MemcpyFromHost")


def capture_obstacle(record: ModelRecord) -> str | None:
    """The first node, in the order of execution, for which ONNX Runtime refuses to capture a model, and why, in words; None
    where there is no such node.

    What is known, of ONNX Runtime 1.31. From the 270 models and sizes that an H200 was asked to capture (recipes/h200), four of
    which failed, as this function says of each (no other is suspected):

    - A Concat of more than 32 inputs is refused: DenseNet-169 fails at its first one of 33, having run one of each width below;
      as widest in a captured model stands one of 25, in DenseNet-121.
    - A Split is not, though for unequal parts it copies tables too: 15 Swin transformers split so and were captured. (Whether
      a replay then computes what it should was not looked at.)

    From ONNX Runtime's inference_session.cc (`HasControlflowNodes`, `HasMemcpyNodes`), since none of those models has such
    nodes: a node that holds a graph (If, Loop, Scan) is refused, and so is a copy between host and GPU, which ONNX Runtime puts
    where a node of the CPU provider and one of the CUDA provider share a tensor. A node of the CPU provider without such copies
    is admitted; it works out shapes. A graph derived without a GPU shows no copies, nor which nodes are the CPU's.
    """
    return next((obstacle for node in record.nodes if (obstacle := _obstacle(record, node))), None)


def _obstacle(record: ModelRecord, node: Node) -> str | None:
    """Why a node forbids capture; None where it doesn't."""
    kernel = record.kernel_of(node)
    if kernel.op_type in COPIES:
        return f"{node.name} ({kernel.op_type}) copies between the host and the GPU"
    if kernel.subgraphs:
        return f"{node.name} ({kernel.op_type}) holds a graph of its own"
    if kernel.op_type == "Concat" and copied_tables(kernel):
        return (f"{node.name} joins {len(node.inputs)} inputs, and a Concat of more than {LAUNCHED_INPUTS} copies tables from "
                "the host")
    return None
