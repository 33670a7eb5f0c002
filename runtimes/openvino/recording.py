"""Takes models apart under OpenVINO: which layers and ONNX nodes are one kernel, and a model's record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hase.ort_analysis.graph.source import read_source
from hase.records.kernel_record import Kernel, ModelOrigin, ModelRecord, Node, Origin, Tensor, record_name
from hase.records.kernel_record_files import record_path
from hase.runtimes.openvino.kernels import Ends, describe, inserted_kernel
from hase.runtimes.openvino.layers import Layer, layers_of, readers_of
from hase.runtimes.openvino.package import compile_model, openvino_flavour
from hase.runtimes.openvino.prepared import Prepared, prepare
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import networkx
from hase.utils.paths import Workspace, as_file_name

if TYPE_CHECKING:
    import onnx


class Step(NamedTuple):
    """A kernel in a model: its layers, the names of the tensors that it reads and writes, and the ONNX nodes in it."""

    kernel: Kernel
    layers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origins: tuple[Origin, ...] = ()


class Parsed(NamedTuple):
    """A model taken apart.

    Attributes:
        record: its record.
        layers: of each node of the record, the names of the layers that are timed together.
        model: OpenVINO's, not compiled.
    """

    record: ModelRecord
    layers: tuple[tuple[str, ...], ...]
    model: Any


def parse(model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, threads: int = 0) -> Parsed:
    """A model's kernels; `threads` are those that it runs with, 0: one for each physical core.

    Raises:
        UserError: no such file, no ONNX, no nodes, weights missing, an unknown dimension, or one left open; OpenVINO is not
            installed, or can't read, compile or run this model.
    """
    prepared = prepare(read_source(model, dims))
    compiled = compile_model(prepared.model, prepared.source.name, threads)
    made_by = {name: place for place, node in enumerate(prepared.nodes) for name in node.output if name}
    steps = steps_of(prepared, layers_of(compiled, prepared.source.name, made_by))
    return Parsed(record_of(prepared, steps, openvino_flavour()), tuple(step.layers for step in steps), prepared.model)


def steps_of(prepared: Prepared, layers: Mapping[str, Layer]) -> list[Step]:
    """The kernels of a model in the order in which they run, those that OpenVINO inserted included."""
    groups = groups_of(prepared.nodes, layers)
    group_of = {layer.name: number for number, group in enumerate(groups) for layer in group.layers}
    order = list(layers)
    steps = [(max((order.index(layer.name) for layer in group.layers), default=-1), step_of(prepared, group))
             for group in groups]
    readers = readers_of(layers)
    inserted: dict[str, str] = {}  # by the name of an inserted layer, the tensor that it writes
    for layer in filter(lambda layer: layer.inserted, layers.values()):
        source = layers[layer.sources[0]]
        kernel = inserted_kernel(layer, source)
        reading = [group_of[name] for name in beyond_inserted(readers[layer.name], layers, readers) if name in group_of]
        tensor = inserted.get(source.name) or between(
            prepared, steps[group_of[source.name]][1].outputs if source.name in group_of else (source.name,),
            [steps[number][1] for number in reading])
        inserted[layer.name] = tensor
        if kernel is None:
            continue
        inserted[layer.name] = written = f"{tensor}/{layer.layout}" if tensor else ""
        for number in reading if tensor else ():
            when, step = steps[number]
            steps[number] = when, step._replace(inputs=tuple(written if name == tensor else name for name in step.inputs))
        steps.append((order.index(layer.name), Step(kernel, (layer.name,), (tensor,), (written,))))
    return in_running_order(steps)


def in_running_order(steps: Sequence[tuple[int, Step]]) -> list[Step]:
    """Steps in the order of their last layers; those without a layer of their own just before the first that reads them."""
    made_by = {name: number for number, (_, step) in enumerate(steps) for name in step.outputs if name}
    done: list[int] = []
    seen: set[int] = set()

    def add(number: int) -> None:
        if number not in seen:
            seen.add(number)
            for name in steps[number][1].inputs:
                if name in made_by:
                    add(made_by[name])
            done.append(number)

    for number in sorted(range(len(steps)), key=lambda number: steps[number][0]):
        if steps[number][0] >= 0:
            add(number)
    for number in range(len(steps)):
        add(number)
    return [steps[number][1] for number in done]


def between(prepared: Prepared, written: Sequence[str], reading: Sequence[Step]) -> str:
    """The tensor among those written that most of some steps read; "" where there is none."""
    activations = [name for name in written if name in prepared.tensors and not prepared.tensors[name].constant]
    by_readers = sorted(activations, key=lambda name: -sum(name in step.inputs for step in reading))
    return next(iter(by_readers), "")


def step_of(prepared: Prepared, group: Group) -> Step:
    """The kernel of a group of nodes.

    Raises:
        UserError: the group has none.
    """
    if not group.nodes:
        raise UserError(f"{prepared.source.name}: OpenVINO does not say which ONNX nodes are in its layer "
                        f"{group.layers[0].name}, and no other layer is next to it; such models can't be taken apart")
    nodes = [prepared.nodes[place] for place in group.nodes]
    inside = set(group.nodes)
    read_elsewhere = {name for place, node in enumerate(prepared.nodes) if place not in inside for name in node.input}
    ends = Ends(prepared, nodes, read_elsewhere)
    kernel = describe(prepared, nodes, ends, in_place=all(layer.in_place for layer in group.layers))
    outputs = tuple(nodes[0].output) if len(nodes) == 1 else tuple(ends.outputs)
    return Step(kernel, tuple(layer.name for layer in group.layers), tuple(ends.inputs)[:len(kernel.inputs)], outputs,
                tuple(Origin(name=prepared.names[place], op_type=prepared.nodes[place].op_type) for place in group.nodes))


def record_of(prepared: Prepared, steps: Sequence[Step], flavour: Flavour) -> ModelRecord:
    """A model's record under OpenVINO, which fixes all sizes."""
    source = prepared.source
    stem = as_file_name(source.name)

    def tensors(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: Tensor(dtype=prepared.tensors[name].dtype, shape=prepared.tensors[name].shape) for name in names}

    return ModelRecord(
        model=record_name(source.name, source.dims), file_stem=stem, group=as_file_name(source.group or stem).replace("|", "_"),
        collection=as_file_name(source.collection) if source.collection else "", sha256=source.sha256, dims=source.dims,
        flavour=flavour, derived=False, inputs=tensors(prepared.inputs), outputs=tensors(prepared.outputs),
        weight_bytes=sum(step.kernel.weight_bytes for step in steps), opsets={"": prepared.opset},
        kernels={step.kernel.id: step.kernel for step in steps},
        nodes=tuple(Node(name=f"{number:04d}_{step.kernel.type}", kernel_id=step.kernel.id, provider=flavour.device,
                         inputs=step.inputs, outputs=step.outputs, origins=step.origins) for number, step in enumerate(steps)))


def write_parsed(workspace: Workspace, parsed: Parsed, origin: ModelOrigin) -> list[ModelRecord]:
    """Writes a model's record; what `origin` gives wins over what the model's file says."""
    record = parsed.record.model_copy(update={name: text for name, text in origin._asdict().items() if text})
    files.write_json(record_path(workspace, record.flavour, record.model), record)
    return [record]


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
