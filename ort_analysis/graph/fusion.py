"""Finds the original nodes in each node of ONNX Runtime's optimised graph."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hase.ort_analysis.graph.nodes import ParsedNode
from hase.ort_analysis.graph.parsing import ParsedGraph
from hase.records.kernel_record import Origin
from hase.records.operators import BLOCKED_DOMAIN, operator_row

if TYPE_CHECKING:
    import onnx

BLOCKED_SUFFIX = "_nchwc"  # the name of a node in the blocked layout is `<tensor that it writes>_nchwc`


class OriginFinder:
    """Finds the original tensors for tensors of the optimised graph, and the original nodes for its nodes.

    Most fusions keep tensor names, so a fused node's original nodes are between its named outputs and inputs. If ORT creates
    new tensors (blocked layouts, split fusions), the nodes that they link are one group and share their origins.
    """

    def __init__(self, original: onnx.GraphProto, nodes: tuple[ParsedNode, ...]) -> None:
        self.producer = {name: node for node in original.node for name in node.output if name}
        self.index = {id(node): index for index, node in enumerate(original.node)}
        self.consumers: dict[str, list[Any]] = defaultdict(list)
        for node in original.node:
            for name in node.input:
                self.consumers[name].append(node)
        constants = {tensor.name for tensor in original.initializer}
        self.original_tensors = set(self.producer) | ({value.name for value in original.input} - constants)
        self.original_of = self._blocked_tensors(nodes)

    def resolve(self, tensor: str) -> str | None:
        """The original name of an optimised graph's tensor; None for one that ORT created."""
        return tensor if tensor in self.original_tensors else self.original_of.get(tensor)

    def _blocked_tensors(self, nodes: tuple[ParsedNode, ...]) -> dict[str, str]:
        """The original tensor of each tensor in the blocked layout, from the names of nodes and what was fused into them."""
        original_of: dict[str, str] = {}
        for node in nodes:
            if node.domain != BLOCKED_DOMAIN:
                continue
            if node.op_type in ("ReorderInput", "ReorderOutput"):
                read, written = node.inputs[0], node.outputs[0]
                found = read if read in self.original_tensors else original_of.get(read)
                if written not in self.original_tensors and found:
                    original_of[written] = found
                continue
            tensor = node.name.partition(BLOCKED_SUFFIX)[0]
            if tensor not in self.original_tensors or not node.outputs or node.outputs[0] in self.original_tensors:
                continue
            sum_input = operator_row(node.op_type).sum_input
            if sum_input is not None and len(node.inputs) > sum_input and node.inputs[sum_input]:
                tensor = self._after(tensor, "Add")
            if activation := node.attributes.get("activation"):
                tensor = self._after(tensor, str(activation))
            original_of[node.outputs[0]] = tensor
        return original_of

    def _after(self, tensor: str, op_type: str) -> str:
        """The output of the only `op_type` node that reads `tensor`. It is `tensor` itself if such a node wrote it, or if none
        or several read it."""
        producer = self.producer.get(tensor)
        if producer is not None and producer.op_type == op_type:
            return tensor
        readers = [node for node in self.consumers[tensor] if node.op_type == op_type]
        return str(readers[0].output[0]) if len(readers) == 1 else tensor

    def region(self, outputs: set[str], inputs: set[str]) -> tuple[Origin, ...]:
        """The original nodes between original tensors `inputs` and `outputs`, in the original order. Nodes that only read
        constants were folded into weights; they count as origins too."""
        in_region: dict[int, Any] = {}
        waiting = [name for name in outputs if name not in inputs]
        seen = set(waiting)
        while waiting:
            node = self.producer.get(waiting.pop())
            if node is None:
                continue
            in_region[self.index[id(node)]] = node
            for name in node.input:
                if name and name not in inputs and name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return tuple(Origin(name=node.name or f"{node.op_type}_{index}", op_type=node.op_type)
                     for index, node in sorted(in_region.items()))

    def origins(self, nodes: tuple[ParsedNode, ...]) -> list[tuple[Origin, ...]]:
        """The original nodes of each node of the optimised graph."""
        group_of = [[index] for index in range(len(nodes))]  # a list for each group; networkx would be slow to import
        producer = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
        for index, node in enumerate(nodes):
            for name in node.inputs:
                if name in producer and self.resolve(name) is None and group_of[index] is not group_of[producer[name]]:
                    larger, smaller = sorted((group_of[index], group_of[producer[name]]), key=len, reverse=True)
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
    """The original nodes in each node of an optimised graph, by name; for a node in a body, nodes of that body."""
    origins_of: dict[str, tuple[Origin, ...]] = {}
    for inside, original in {"": graph.source.graph_only.graph, **graph.bodies}.items():
        prefix = f"{inside}/" if inside else ""

        def bare(names: tuple[str, ...], prefix: str = prefix) -> tuple[str, ...]:
            return tuple(name.removeprefix(prefix) for name in names)

        nodes = tuple(replace(node, inputs=bare(node.inputs), outputs=bare(node.outputs))
                      for node in graph.nodes if node.inside == inside)
        origins_of |= zip((node.name for node in nodes), OriginFinder(original, nodes).origins(nodes), strict=True)
    return origins_of
