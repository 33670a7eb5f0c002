"""Finds the models that ONNX Runtime can't capture as a CUDA graph."""

from __future__ import annotations

from hase.records.kernel_costs import LAUNCHED_INPUTS, copied_tables
from hase.records.kernel_record import ModelRecord, Node
from hase.records.operators import operator_row


def capture_obstacle(record: ModelRecord) -> str | None:
    """The first node, in the order of execution, that keeps ONNX Runtime from capturing a model or that a replay would not run
    again, and the reason; None if there is no such node.

    Sources for ONNX Runtime 1.31. First, 270 models and sizes that were captured on an H200 (recipes/h200). Four of them
    failed; this function names these four and no other:

    - A Concat of more than 32 inputs is refused: DenseNet-169 fails at its first one with 33, after one of each smaller width.
      The widest Concat in a captured model has 25 inputs, in DenseNet-121.
    - A Split is not refused, although it copies tables too if its parts are unequal: 15 Swin transformers have such Splits and
      were captured. (It was not checked whether a replay then computes the right values.)

    Second, ONNX Runtime's inference_session.cc (`HasControlflowNodes`, `HasMemcpyNodes`), since none of those models has such
    nodes: a node with a body (If, Loop, Scan) is refused, and so is a copy between host and GPU, which ONNX Runtime inserts
    where nodes of the CPU provider and of the CUDA provider share a tensor.

    Third, what no captured graph can do. The host can't wait for the GPU during a capture, as kernels do that bring the size of
    their output to the host. And a replay runs nothing on the host. A node of the CPU provider that computes sizes from shapes
    alone is allowed, since the sizes stay those of the run that was captured.
    """
    from_data = set(record.inputs)  # tensors that depend on the values of inputs, not only on their shapes
    for node in record.nodes:
        reads_data = not from_data.isdisjoint(node.inputs) and operator_row(record.kernel_of(node).op_type).launches != "none"
        if obstacle := _obstacle(record, node, reads_data):
            return obstacle
        from_data.update(node.outputs if reads_data else ())
    return None


def _obstacle(record: ModelRecord, node: Node, reads_data: bool) -> str | None:
    """Why a node prevents the capture; None if it does not. `reads_data`: it reads values, not only shapes."""
    kernel = record.kernel_of(node)
    row = operator_row(kernel.op_type)
    if row.copies:
        return f"{node.name} ({kernel.op_type}) copies between the host and the GPU"
    if row.waits_for_size and not kernel.domain:
        return f"{node.name} ({kernel.op_type}) makes the host wait for the size of its output"
    if node.provider == "cpu" and reads_data:
        return f"{node.name} ({kernel.op_type}) runs on the CPU"
    if kernel.subgraphs:
        return f"{node.name} ({kernel.op_type}) holds a graph of its own"
    if kernel.op_type == "Concat" and copied_tables(kernel):
        return (f"{node.name} joins {len(node.inputs)} inputs, and a Concat of more than {LAUNCHED_INPUTS} copies tables from "
                "the host")
    return None
