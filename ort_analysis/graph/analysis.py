"""Makes the record of a model from its parsed graph, with the original nodes of each kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.ort_analysis.graph.nodes import ParsedNode, counted
from hase.ort_analysis.graph.parsing import ParsedGraph, parse_graph
from hase.records import attention
from hase.records.kernel_record import (
    Kernel,
    KernelInput,
    ModelRecord,
    Node,
    Origin,
    Tensor,
    record_name,
)
from hase.records.kernel_types import describe_kernel
from hase.records.operators import operator_row
from hase.utils.paths import as_file_name

if TYPE_CHECKING:
    import onnx

BLOCKED_DOMAIN = "com.microsoft.nchwc"  # ORT's blocked CPU layout; its nodes are named `<tensor they make>_nchwc`
BLOCKED_SUFFIX = "_nchwc"


class OriginFinder:
    """Maps tensors of the optimised graph to tensors of the original, and regions between them to original nodes.

    Most fusions keep the names of tensors, so the original nodes of a fused node are between its named outputs and its named
    inputs. If ORT makes new tensors (blocked layouts, split fusions), the nodes that such tensors link are taken as one group
    and share their origins.
    """

    def __init__(self, original: onnx.GraphProto, nodes: tuple[ParsedNode, ...]) -> None:
        self.producer = {name: node for node in original.node for name in node.output if name}
        self.number = {id(node): index for index, node in enumerate(original.node)}
        self.consumers: dict[str, list[Any]] = defaultdict(list)
        for node in original.node:
            for name in node.input:
                self.consumers[name].append(node)
        self.constants = {tensor.name for tensor in original.initializer}
        self.inputs = {value.name for value in original.input} - self.constants
        self.known = set(self.producer) | self.inputs
        self.alias = self._blocked_tensors(nodes)

    def resolve(self, tensor: str) -> str | None:
        """The original name of a tensor of the optimised graph; None for a tensor that ORT made."""
        return tensor if tensor in self.known else self.alias.get(tensor)

    def _blocked_tensors(self, nodes: tuple[ParsedNode, ...]) -> dict[str, str]:
        """The original tensor of each tensor in a blocked layout: from the node's name, then past later fusions."""
        alias: dict[str, str] = {}
        for node in nodes:
            if node.domain != BLOCKED_DOMAIN:
                continue
            if node.op_type in ("ReorderInput", "ReorderOutput"):
                source, made = node.inputs[0], node.outputs[0]
                if made not in self.known and (resolved := source if source in self.known else alias.get(source)):
                    alias[made] = resolved
                continue
            base = node.name.partition(BLOCKED_SUFFIX)[0]
            if base not in self.known or not node.outputs or node.outputs[0] in self.known:
                continue
            sum_input = operator_row(node.op_type).sum_input
            if sum_input is not None and len(node.inputs) > sum_input and node.inputs[sum_input]:
                base = self._past(base, "Add")
            if activation := node.attributes.get("activation"):
                base = self._past(base, str(activation))
            alias[node.outputs[0]] = base
        return alias

    def _past(self, tensor: str, op_type: str) -> str:
        """The output of the `op_type` node that reads `tensor`; `tensor` itself if such a node made it, or if none reads it."""
        made_by = self.producer.get(tensor)
        if made_by is not None and made_by.op_type == op_type:
            return tensor
        after = [node for node in self.consumers[tensor] if node.op_type == op_type]
        return str(after[0].output[0]) if len(after) == 1 else tensor

    def region(self, outputs: set[str], inputs: set[str]) -> tuple[Origin, ...]:
        """The original nodes between original tensors `inputs` and `outputs`, in the original's order.

        Nodes that only read constants were folded into weights; they are origins too.
        """
        in_region: dict[int, Any] = {}
        waiting = [name for name in outputs if name not in inputs]
        seen = set(waiting)
        while waiting:
            node = self.producer.get(waiting.pop())
            if node is None:
                continue
            in_region[self.number[id(node)]] = node
            for name in node.input:
                if name and name not in inputs and name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return tuple(Origin(name=node.name or f"{node.op_type}_{number}", op_type=node.op_type)
                     for number, node in sorted(in_region.items()))

    def origins(self, nodes: tuple[ParsedNode, ...]) -> list[tuple[Origin, ...]]:
        """The original nodes of each node of the optimised graph."""
        group_of = [[index] for index in range(len(nodes))]  # without networkx, whose import is slow
        maker = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
        for index, node in enumerate(nodes):
            for name in node.inputs:
                if name in maker and self.resolve(name) is None and group_of[index] is not group_of[maker[name]]:
                    larger, smaller = sorted((group_of[index], group_of[maker[name]]), key=len, reverse=True)
                    larger += smaller
                    for moved in smaller:
                        group_of[moved] = larger
        result: list[tuple[Origin, ...]] = [()] * len(nodes)
        for group in {id(group): group for group in group_of}.values():
            outputs = {tensor for i in group for name in nodes[i].outputs if name and (tensor := self.resolve(name))}
            inputs = {tensor for i in group for name in nodes[i].inputs if name and (tensor := self.resolve(name))}
            region = self.region(outputs, inputs)
            for index in group:
                result[index] = region
        return result


def origins_by_node(graph: ParsedGraph) -> dict[str, tuple[Origin, ...]]:
    """The original nodes of each node, by its name; for a node in a body, nodes of that body."""
    origins_of: dict[str, tuple[Origin, ...]] = {}
    for inside, original in {"": graph.source.graph_only.graph, **graph.bodies}.items():
        prefix = f"{inside}/" if inside else ""

        def bare(names: tuple[str, ...], prefix: str = prefix) -> tuple[str, ...]:
            return tuple(name.removeprefix(prefix) for name in names)

        nodes = tuple(replace(node, inputs=bare(node.inputs), outputs=bare(node.outputs))
                      for node in graph.nodes if node.inside == inside)
        origins_of |= zip((node.name for node in nodes), OriginFinder(original, nodes).origins(nodes), strict=True)
    return origins_of


def _with_value(graph: ParsedGraph, node: ParsedNode, place: int, name: str) -> KernelInput:
    """An input of a node; with its value if that decides the output's size and the graph computes it from shapes."""
    tensor = graph.tensors[name]
    if tensor.constant or place not in operator_row(node.op_type).size_inputs:
        return tensor
    return tensor.model_copy(update={"values": graph.computed.get(name)})


def _attended_tokens(graph: ParsedGraph, node: ParsedNode, inputs: Sequence[KernelInput]) -> int:
    """How many tokens a GroupQueryAttention attends to, as the sizes of the model say: the second dimension of the mask that it
    counts them in, or a value that the graph computes from shapes. Where only the values of an input say it, the new tokens
    follow a full cache.

    Args:
        graph: with the node.
        node: the attention.
        inputs: of the node.
    """
    maker = {name: each for each in graph.nodes for name in each.outputs if name}
    for place in (attention.TOTAL, attention.LAST_PLACES):
        mask = graph.tensors[counted(node.inputs[place], maker)]
        if len(mask.shape) == 2:
            return mask.shape[1]
    values = inputs[attention.TOTAL].values or graph.computed.get(node.inputs[attention.TOTAL])
    return int(values[0]) if values else attention.attended(node.attributes, inputs).total


def kernel_of(graph: ParsedGraph, node: ParsedNode) -> Kernel:
    """The kernel that a node of the optimised graph runs."""
    inputs = [_with_value(graph, node, place, name) for place, name in enumerate(node.inputs)]
    while inputs and not inputs[-1].present:
        inputs.pop()
    outputs = [Tensor(dtype=graph.tensors[name].dtype, shape=graph.tensors[name].shape) for name in node.outputs]
    if node.op_type == attention.OPERATOR and len(inputs) > attention.TOTAL:
        inputs = attention.with_lengths(inputs, _attended_tokens(graph, node, inputs))
        outputs = attention.with_present(outputs, attention.attended(node.attributes, inputs).present)
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
    """The record of a model: its kernels as `cpu` or `cuda` runs them (`auto`: what this machine has).

    Args:
        model: the ONNX file, or a model in memory.
        device: `cpu`, `cuda` or `auto`.
        dims: sizes of dynamic dimensions.
        name: of a model in memory.
        static: whether it is optimised as if it had been exported at these sizes.
        group: of the model; by default the one that its file names, else the model is its own group.
        collection: of the model; by default the one that its file names, if any.

    Raises:
        UserError: the model can't be read (no such file, no ONNX, no nodes, weights missing), a dynamic dimension is unknown or
            has no size, or ORT can't load the model.
    """
    return record_of(parse_graph(model, device, dims, name, static), group, collection)
