"""Finds the models that ONNX Runtime can't capture as a CUDA graph."""

from __future__ import annotations

from records.kernel_costs import LAUNCHED_INPUTS, copied_tables
from records.kernel_record import ModelRecord, Node
from records.operators import operator_row


def capture_obstacle(record: ModelRecord) -> str | None:
    """The first node, in the order of execution, for which ONNX Runtime refuses to capture a model, and the reason; None if
    there is no such node.

    Sources for ONNX Runtime 1.31. First, 270 models and sizes that were captured on an H200 (recipes/h200). Four of them
    failed; this function names these four and no other:

    - A Concat of more than 32 inputs is refused: DenseNet-169 fails at its first one with 33, after one of each smaller width.
      The widest Concat in a captured model has 25 inputs, in DenseNet-121.
    - A Split is not refused, although it copies tables too if its parts are unequal: 15 Swin transformers have such Splits and
      were captured. (It was not checked whether a replay then computes the right values.)

    Second, ONNX Runtime's inference_session.cc (`HasControlflowNodes`, `HasMemcpyNodes`), since none of those models has such
    nodes: a node with a body (If, Loop, Scan) is refused, and so is a copy between host and GPU, which ONNX Runtime inserts
    where nodes of the CPU provider and of the CUDA provider share a tensor. A node of the CPU provider without such copies is
    allowed; it computes shapes. A graph derived without a GPU shows neither copies nor which nodes run on the CPU.
    """
    return next((obstacle for node in record.nodes if (obstacle := _obstacle(record, node))), None)


def _obstacle(record: ModelRecord, node: Node) -> str | None:
    """Why a node prevents the capture; None if it does not."""
    kernel = record.kernel_of(node)
    if operator_row(kernel.op_type).copies:
        return f"{node.name} ({kernel.op_type}) copies between the host and the GPU"
    if kernel.subgraphs:
        return f"{node.name} ({kernel.op_type}) holds a graph of its own"
    if kernel.op_type == "Concat" and copied_tables(kernel):
        return (f"{node.name} joins {len(node.inputs)} inputs, and a Concat of more than {LAUNCHED_INPUTS} copies tables from "
                "the host")
    return None
