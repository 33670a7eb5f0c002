"""Makes the record of a model from its parsed graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from records.kernel_record import (
    Kernel,
    KernelInput,
    ModelRecord,
    Node,
    Tensor,
    record_name,
)
from records.kernel_types import describe_kernel
from runtimes.ort.graph.origins import origins_by_node
from runtimes.ort.graph.parsed_nodes import ParsedNode
from runtimes.ort.graph.parsing import ParsedGraph, parse_graph
from utils.safe_names import as_file_name

if TYPE_CHECKING:
    import onnx

SIZE_INPUTS = {"Slice": (1, 2, 3, 4), "Range": (0, 1, 2), "ConstantOfShape": (0,), "Tile": (1,), "Pad": (1, 3),
               "Resize": (2, 3), "Upsample": (1,), "Split": (1,), "Squeeze": (1,), "Unsqueeze": (1,), "TopK": (1,),
               "OneHot": (1,), "CenterCropPad": (1,)}  # Reshape and Expand: the output's shape has it


def _with_value(graph: ParsedGraph, node: ParsedNode, place: int, name: str) -> KernelInput:
    """An input of a node; with its value if that decides the output's size and the graph computes it from shapes."""
    tensor = graph.tensors[name]
    if tensor.constant or place not in SIZE_INPUTS.get(node.op_type, ()):
        return tensor
    return tensor.model_copy(update={"values": graph.computed.get(name)})


def kernel_of(graph: ParsedGraph, node: ParsedNode) -> Kernel:
    """The kernel that a node of the optimised graph runs."""
    inputs = [_with_value(graph, node, place, name) for place, name in enumerate(node.inputs)]
    while inputs and not inputs[-1].present:
        inputs.pop()
    outputs = [Tensor(dtype=graph.tensors[name].dtype, shape=graph.tensors[name].shape) for name in node.outputs]
    opset = graph.opsets.get(node.domain, graph.opsets.get("ai.onnx", 1) if not node.domain else 1)
    return describe_kernel(node.op_type, node.domain, opset, node.attributes, inputs, outputs)


def record_of(graph: ParsedGraph, group: str = "", collection: str = "") -> ModelRecord:
    """The record of a parsed model.

    Args:
        graph: of the model.
        group: of the model; by default the one that its file names, else the model is its own group.
        collection: of the model; by default the one that its file names, if any.
    """
    stem, collection = as_file_name(graph.source.name), collection or graph.source.collection
    origins_of = origins_by_node(graph)
    kernels = [kernel_of(graph, node) for node in graph.nodes]
    nodes = tuple(
        Node(name=node.name, kernel_id=kernel.id, provider=node.provider, inputs=node.inputs, outputs=node.outputs,
             origins=origins_of[node.name], runs=node.runs, inside=node.inside)
        for node, kernel in zip(graph.nodes, kernels, strict=True))

    def tensors(names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: Tensor(dtype=graph.tensors[name].dtype, shape=graph.tensors[name].shape) for name in names}

    return ModelRecord(
        model=record_name(graph.source.name, graph.source.dims, graph.static), file_stem=stem,
        group=as_file_name(group or graph.source.group or stem).replace("|", "_"),
        collection=as_file_name(collection) if collection else "", sha256=graph.source.sha256, dims=graph.source.dims,
        flavour=graph.flavour, derived=graph.derived, static=graph.static, assumed=graph.assumed, guessed=graph.guessed,
        inputs=tensors(graph.inputs), outputs=tensors(graph.outputs),
        weight_bytes=sum(tensor.bytes for tensor in graph.tensors.values() if tensor.constant),
        opsets=graph.opsets, kernels={kernel.id: kernel for kernel in kernels}, nodes=nodes,
    )


def analyze(model: Path | onnx.ModelProto, device: str = "auto", dims: Mapping[str, int] | None = None,
            name: str | None = None, static: bool = False, group: str = "", collection: str = "") -> ModelRecord:
    """The kernels of a model as `cpu` or `cuda` runs it (`auto`: what this machine has); arguments as of `parse_graph` and
    `record_of`.

    Raises:
        UserError: as `parsing.parse_graph`.
    """
    return record_of(parse_graph(model, device, dims, name, static), group, collection)
