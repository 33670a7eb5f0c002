"""Makes the record of a model: ONNX Runtime's kernels, each with its original nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hase.ort_analysis.graph.fusion import origins_by_node
from hase.ort_analysis.graph.nodes import ParsedNode, length_source
from hase.ort_analysis.graph.parsing import ParsedGraph, parse_graph
from hase.records import attention
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Node, Tensor, record_name
from hase.records.kernel_types import describe_kernel
from hase.records.operators import operator_row

if TYPE_CHECKING:
    import onnx


def _with_value(graph: ParsedGraph, node: ParsedNode, index: int, name: str) -> KernelInput:
    """An input of a node, with its value if the output's size depends on it and the graph computes it from shapes."""
    tensor = graph.tensors[name]
    if tensor.constant or index not in operator_row(node.op_type).size_inputs:
        return tensor
    return tensor.model_copy(update={"values": graph.computed.get(name)})


def _attended_tokens(graph: ParsedGraph, node: ParsedNode, inputs: Sequence[KernelInput]) -> int:
    """The number of tokens that a GroupQueryAttention attends to. It is the second dimension of the mask from which they are
    counted, or a value that the graph computes from shapes. If it depends on input values, a full cache is assumed before the
    new tokens.
    """
    producers = {name: producer for producer in graph.nodes for name in producer.outputs if name}
    for index in (attention.TOTAL, attention.LAST_PLACES):
        mask = graph.tensors[length_source(node.inputs[index], producers)]
        if len(mask.shape) == 2:
            return mask.shape[1]
    values = inputs[attention.TOTAL].values or graph.computed.get(node.inputs[attention.TOTAL])
    return int(values[0]) if values else attention.grouped_query_sizes(node.attributes, inputs).total


def kernel_of(graph: ParsedGraph, node: ParsedNode) -> Kernel:
    """The kernel that a node of the optimised graph runs."""
    inputs = [_with_value(graph, node, index, name) for index, name in enumerate(node.inputs)]
    while inputs and not inputs[-1].present:
        inputs.pop()
    outputs = [Tensor(dtype=graph.tensors[name].dtype, shape=graph.tensors[name].shape) for name in node.outputs]
    if node.op_type == attention.OPERATOR and len(inputs) > attention.TOTAL:
        inputs = attention.with_lengths(inputs, _attended_tokens(graph, node, inputs))
        outputs = attention.with_present(outputs, attention.grouped_query_sizes(node.attributes, inputs).present)
    opset = graph.opsets.get(node.domain, graph.opsets.get("ai.onnx", 1) if not node.domain else 1)
    return describe_kernel(node.op_type, node.domain, opset, node.attributes, inputs, outputs)


def record_of(graph: ParsedGraph, group: str = "", collection: str = "") -> ModelRecord:
    """The record of a parsed model; a given group or collection wins over the file's."""
    origins_of = origins_by_node(graph)
    kernels = [kernel_of(graph, node) for node in graph.nodes]
    nodes = tuple(
        Node(name=node.name, kernel_id=kernel.id, provider=node.provider, inputs=node.inputs, outputs=node.outputs,
             origins=origins_of[node.name], runs=node.runs, inside=node.inside)
        for node, kernel in zip(graph.nodes, kernels, strict=True))

    def tensors(names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: Tensor(dtype=graph.tensors[name].dtype, shape=graph.tensors[name].shape) for name in names}

    return ModelRecord(
        model=record_name(graph.source.name, graph.source.dims, graph.static), **graph.source.record_fields(group, collection),
        flavour=graph.flavour, derived=graph.derived, static=graph.static, assumed=graph.assumed, guessed=graph.guessed,
        inputs=tensors(graph.inputs), outputs=tensors(graph.outputs),
        weight_bytes=sum(tensor.bytes for tensor in graph.tensors.values() if tensor.constant),
        opsets=graph.opsets, kernels={kernel.id: kernel for kernel in kernels}, nodes=nodes,
    )


def analyze(model: Path | onnx.ModelProto, device: str = "auto", dims: Mapping[str, int] | None = None,
            name: str | None = None, static: bool = False, group: str = "", collection: str = "") -> ModelRecord:
    """The record of a model: its kernels as `cpu` or `cuda` runs them (`auto`: what this machine has)."""
    return record_of(parse_graph(model, device, dims, name, static), group, collection)
