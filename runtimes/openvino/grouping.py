"""Which layers and ONNX nodes are one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from runtimes.openvino.layers import Layer, readers_of
from utils.lazy import networkx

if TYPE_CHECKING:
    import onnx

Key = str | int  # a layer's name, or the place of an ONNX node


class Group(NamedTuple):
    """The ONNX nodes of a kernel, by place, and its layers; both in order."""

    nodes: tuple[int, ...]
    layers: tuple[Layer, ...]


def groups_of(nodes: Sequence[onnx.NodeProto], layers: Mapping[str, Layer]) -> list[Group]:
    """The kernels of a model, in the order in which they run, without those that OpenVINO inserted.

    Nodes that one layer computes are a kernel, and so are layers that compute one node. A layer that names no node (the
    normalisation within a LayerNormalization) and a node that no layer names (a MatMul whose bias has given the layer its name)
    belong to the kernel that reads them, if it is one, and else to the one that they read.
    """
    computing = {name: layer for name, layer in layers.items() if layer.computes and not layer.inserted}
    together: Any = networkx.utils.UnionFind([*computing, *range(len(nodes))])
    for layer in computing.values():
        together.union(layer.name, *layer.nodes)
    readers, sources = readers_of(layers), {name: layer.sources for name, layer in layers.items()}
    for layer in reversed(computing.values()):
        if not layer.nodes:
            reading = beyond_inserted(readers[layer.name], layers, readers)
            read = beyond_inserted(layer.sources, layers, sources)
            join(together, layer.name, [name for name in reading if name in computing],
                 [name for name in read if name in computing])
    made_by = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    before_of = [[made_by[name] for name in node.input if name in made_by] for node in nodes]
    after_of: list[list[int]] = [[] for _ in nodes]
    for place, before in enumerate(before_of):
        for source in before:
            after_of[source].append(place)
    named = {place for layer in computing.values() for place in layer.nodes}
    for place in reversed(range(len(nodes))):
        if place not in named:
            join(together, place, after_of[place], before_of[place])
    return in_order(len(nodes), computing, together, after_of)


def join(together: Any, key: Key, readers: Iterable[Key], sources: Sequence[Key]) -> None:
    """Puts a layer or a node to the only kernel that reads it, or else to the first one that it reads."""
    reading = {together[reader] for reader in readers}
    if len(reading) == 1:
        together.union(key, reading.pop())
    elif sources:
        together.union(key, sources[0])


def beyond_inserted(names: Iterable[str], layers: Mapping[str, Layer], neighbours: Mapping[str, Iterable[str]]) -> list[str]:
    """Layers, with what comes after an inserted one in place of it; `neighbours` are the readers, or the sources, of each."""
    return [far for name in names for far in (
        beyond_inserted(neighbours.get(name, ()), layers, neighbours) if layers[name].inserted else [name])]


def in_order(count: int, computing: Mapping[str, Layer], together: Any, after_of: Sequence[Sequence[int]]) -> list[Group]:
    """The groups in the order of their layers. Groups that wait for each other become one."""
    when = {name: order for order, name in enumerate(computing)}
    while True:
        graph: Any = networkx.DiGraph()
        graph.add_nodes_from({together[key] for key in (*range(count), *computing)})
        graph.add_edges_from((together[place], together[reader]) for place in range(count) for reader in after_of[place]
                             if together[place] != together[reader])
        circles = [circle for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
        if not circles:
            break
        for circle in circles:
            together.union(*circle)
    members: dict[Key, list[Key]] = {root: [] for root in graph}
    for key in (*range(count), *computing):
        members[together[key]].append(key)
    first = {root: min((when[key] for key in keys if isinstance(key, str)), default=0) for root, keys in members.items()}
    return [Group(tuple(key for key in members[root] if isinstance(key, int)),
                  tuple(computing[key] for key in members[root] if isinstance(key, str)))
            for root in networkx.lexicographical_topological_sort(graph, key=lambda root: first[root])]
