"""Analyses models under OpenVINO: groups layers and ONNX nodes into kernels, describes them, and builds models of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hase.kernel_model.building.dummy_data import input_name, output_name
from hase.kernel_model.building.kernel_models import IR_VERSION, add_weights, metadata_entry, write_kernel
from hase.ort_analysis.graph.nodes import attribute_value
from hase.ort_analysis.graph.source import KERNEL_KEY, read_source
from hase.records.kernel_costs import flops
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Node, Origin, Tensor, record_name, type_code
from hase.records.kernel_types import describe_kernel, fused_type, kernel_of_type, without_defaults
from hase.records.operators import VIEWS, operator_row
from hase.runtimes import local_flavour
from hase.runtimes.openvino.compiling import (
    NAME,
    Layer,
    PreparedModel,
    compile_model,
    layers_by_name,
    node_name,
    prepare_model,
    readers_by_layer,
)
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import networkx, onnx

if TYPE_CHECKING:
    import onnx
    from onnx import NodeProto

DOMAIN = "openvino"  # of kernels of several operators, or that take no time
NODES = "nodes"  # the attribute of such a kernel that describes its ONNX nodes
VIEW = "Identity"  # stands for an operator whose output is its input's memory
AXES = ("perm", "axis", "axes")
NOTHING = KernelInput(dtype="")


def operator_attributes(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node as plain data."""
    return {attribute.name: attribute_value(attribute) for attribute in sorted(node.attribute, key=lambda item: item.name)}


def operator_flops(prepared: PreparedModel, node: NodeProto) -> int:
    """The operations of a single node."""
    tensors = prepared.tensors
    return flops(node.op_type, operator_attributes(node), [tensors.get(name, NOTHING) for name in node.input],
                 [tensors.get(name, NOTHING) for name in node.output])


def main_node(prepared: PreparedModel, nodes: Sequence[NodeProto]) -> int:
    """The index of the node that decides a kernel's time. That is a convolution or product, else the node with most operations,
    else the first that moves data."""
    def rank(index: int) -> tuple[bool, int, bool, int]:
        name = nodes[index].op_type
        return (operator_row(name).operator_class in ("convolution", "product"), operator_flops(prepared, nodes[index]),
                name not in VIEWS, -index)

    return max(range(len(nodes)), key=rank)


class Ends:
    """The tensors that a kernel reads and writes, by name, and its main node's index. Inputs of the main node come first, ""
    for an omitted one. Only outputs that others read count."""

    def __init__(self, prepared: PreparedModel, nodes: Sequence[NodeProto], read_elsewhere: Iterable[str]) -> None:
        written, needed = {name for node in nodes for name in node.output}, {*read_elsewhere, *prepared.outputs}
        self.main = main_node(prepared, nodes)
        order = [nodes[self.main], *(node for index, node in enumerate(nodes) if index != self.main)]
        if len(nodes) == 1:
            self.inputs = list(nodes[0].input)
        else:
            self.inputs = list(dict.fromkeys(name for node in order for name in node.input if name and name not in written))
        self.outputs = [name for node in nodes for name in node.output if name in needed] or [
            name for name in nodes[-1].output if name]


def describe(prepared: PreparedModel, nodes: Sequence[NodeProto], ends: Ends, in_place: bool) -> Kernel:
    """The kernel of ONNX nodes that run as one.

    A kernel of one node is described like any ONNX kernel. One of several has its main node's operator, a type of all
    operators' names in order, and the nodes as an attribute. One that works in place (outputs share the inputs' memory) is an
    Identity, which takes no time.
    """
    inputs = [tensor_named(prepared, name) for name in ends.inputs]
    while inputs and not inputs[-1].present:
        inputs.pop()
    written = [tensor_named(prepared, name) for name in (nodes[0].output if len(nodes) == 1 else ends.outputs)]
    outputs = [Tensor(dtype=tensor.dtype, shape=tensor.shape) for tensor in written]
    main, [*others] = nodes[ends.main], (node.op_type for index, node in enumerate(nodes) if index != ends.main)
    if len(nodes) == 1 and (not in_place or main.op_type in VIEWS):
        opset = prepared.opset if main.domain in ("", "ai.onnx") else 1
        return describe_kernel(main.op_type, main.domain, opset, operator_attributes(main), inputs, outputs)
    attributes = operator_attributes(main)
    data = prepared.tensors.get(main.input[0] if main.input else "", NOTHING)
    if not inputs or len(data.shape) != len(inputs[0].shape):  # the main node reads what another one has reshaped
        attributes = {name: value for name, value in attributes.items() if name not in AXES}
        attributes |= {"perm": list(range(len(inputs[0].shape)))} if main.op_type == "Transpose" and inputs else {}
    if main.op_type == "Conv" and len(inputs) > 1:
        attributes["kernel_shape"] = list(inputs[1].shape[2:])
    others = [name for name in others if name not in VIEWS]
    if activations := [name for name in others if is_activation(name)]:
        attributes["activation"] = activations[-1]
    return kernel_of_type(fused_type(main.op_type, others), VIEW if in_place else main.op_type, DOMAIN, prepared.opset,
                          without_defaults(attributes) | {NODES: plain_nodes(nodes, ends)}, inputs, outputs)


def tensor_named(prepared: PreparedModel, name: str) -> KernelInput:
    """A tensor of the model; "" is an omitted one."""
    if not name:
        return NOTHING
    if name not in prepared.tensors:
        raise UserError(f"{prepared.source.name}: the size of {name} is known only when the model runs; such models can't be "
                        "taken apart under OpenVINO")
    return prepared.tensors[name]


def is_activation(name: str) -> bool:
    """Whether an operator computes each output element from the same element of its only activation input."""
    row = operator_row(name)
    return row.operator_class == "elementwise" and row.keeps_shape and row.linearity == "multiplicative"


def plain_nodes(nodes: Sequence[NodeProto], ends: Ends) -> list[dict[str, Any]]:
    """The nodes of a kernel as plain data, with tensor names that are equal in all models."""
    names = {"": ""}
    for node in nodes:
        for name in node.output:
            names.setdefault(name, f"t{len(names)}")
    names |= {name: input_name(index) for index, name in enumerate(ends.inputs) if name}
    names |= {name: output_name(index) for index, name in enumerate(ends.outputs)}
    return [{"op_type": node.op_type, "domain": node.domain, "attributes": operator_attributes(node),
             "inputs": [names[name] for name in node.input], "outputs": [names[name] for name in node.output]}
            for node in nodes]


def inserted_kernel(layer: Layer, source: Layer) -> Kernel | None:
    """The kernel of a layer that OpenVINO inserted; None if it moves nothing. A Reorder is a Transpose from the source's memory
    layout to its own. Blocked layouts count as a copy."""
    shape, dtype = layer.output.shape, layer.output.dtype
    if layer.kind == "Convert":
        return describe_kernel("Cast", "", 20, {"to": type_code(dtype)}, [KernelInput(dtype=source.output.dtype, shape=shape)],
                               [Tensor(dtype=dtype, shape=shape)])
    order = sorted(layer.layout)
    if len(shape) == len(order) and order == sorted(source.layout) == [chr(ord("a") + axis) for axis in range(len(shape))]:
        source_shape = [shape[order.index(letter)] for letter in source.layout]
        permutation = [source.layout.index(letter) for letter in layer.layout]
    else:
        source_shape, permutation = list(shape), list(range(len(shape)))
    moved = [axis for axis in permutation if source_shape[axis] != 1]
    if layer.in_place or (moved == sorted(moved) and permutation != sorted(permutation)):
        return None
    plain = describe_kernel("Transpose", "", 20, {"perm": permutation}, [KernelInput(dtype=dtype, shape=tuple(source_shape))],
                            [Tensor(dtype=dtype, shape=tuple(source_shape[axis] for axis in permutation))])
    return kernel_of_type(layer.kind, plain.op_type, plain.domain, plain.opset, plain.attributes, plain.inputs, plain.outputs)


def build_kernel(kernel: Kernel, folder: Path) -> Path:
    """Writes a kernel to `<folder>/<kernel id>.onnx`; returns the path."""
    if kernel.domain != DOMAIN:
        return write_kernel(kernel, folder)
    folder.mkdir(parents=True, exist_ok=True)

    def value_info(name: str, tensor: Tensor) -> Any:
        return onnx.helper.make_tensor_value_info(name, type_code(tensor.dtype), tensor.shape)

    graph = onnx.helper.make_graph(
        [made_node(kernel, index) for index in range(len(kernel.attributes[NODES]))], "kernel",
        [value_info(input_name(index), tensor) for index, tensor in enumerate(kernel.inputs)
         if tensor.present and not tensor.constant],
        [value_info(output_name(index), tensor) for index, tensor in enumerate(kernel.outputs) if tensor.present])
    add_weights(graph, kernel)
    domains = {node["domain"] for node in kernel.attributes[NODES]} - {"", "ai.onnx"}
    opsets = [onnx.helper.make_opsetid("", kernel.opset), *(onnx.helper.make_opsetid(domain, 1) for domain in sorted(domains))]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="hase")
    model.metadata_props.append(metadata_entry(KERNEL_KEY, kernel.model_dump_json()))
    path = folder / f"{kernel.id}.onnx"
    files.write_bytes(path, model.SerializeToString())
    return path


def made_node(kernel: Kernel, index: int) -> NodeProto:
    """A node, by index, of a kernel with several."""
    plain = kernel.attributes[NODES][index]
    node = onnx.helper.make_node(plain["op_type"], plain["inputs"], plain["outputs"], node_name(index, plain["op_type"]),
                                 domain=plain["domain"])
    for name, value in plain["attributes"].items():
        if isinstance(value, dict) and "graph" in value:
            raise UserError(f"{kernel.id}: holds a subgraph ({name}); such a kernel can't be built alone")
        if isinstance(value, dict):
            value = onnx.helper.make_tensor(name, type_code(value["dtype"]), value["shape"], value["values"])
        if value != []:
            node.attribute.append(onnx.helper.make_attribute(name, value))
    return node


class ModelKernel(NamedTuple):
    """A kernel in a model: its layers, the names of the tensors that it reads and writes, and its ONNX nodes."""

    kernel: Kernel
    layers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origins: tuple[Origin, ...] = ()


class OpenvinoModel(NamedTuple):
    """An analysed model."""

    record: ModelRecord
    layers: tuple[tuple[str, ...], ...]  # of each node of the record, the names of the layers that are timed together
    model: Any  # OpenVINO's, not compiled


def parse(model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, threads: int = 0) -> OpenvinoModel:
    """Analyses a model; `threads` are those of its runs, 0: one per physical core."""
    prepared = prepare_model(read_source(model, dims))
    compiled = compile_model(prepared.model, prepared.source.name, threads)
    producers = {name: index for index, node in enumerate(prepared.nodes) for name in node.output if name}
    steps = kernels_in_order(prepared, layers_by_name(compiled, prepared.source.name, producers))
    record = record_of(prepared, steps, local_flavour("cpu", NAME))
    return OpenvinoModel(record, tuple(step.layers for step in steps), prepared.model)


def kernels_in_order(prepared: PreparedModel, layers: Mapping[str, Layer]) -> list[ModelKernel]:
    """The kernels of a model in running order, including those that OpenVINO inserted."""
    groups = groups_of(prepared.nodes, layers)
    group_of = {layer.name: index for index, group in enumerate(groups) for layer in group.layers}
    order = list(layers)
    steps = [(max((order.index(layer.name) for layer in group.layers), default=-1), kernel_of_group(prepared, group))
             for group in groups]
    readers = readers_by_layer(layers)
    inserted: dict[str, str] = {}  # by the name of an inserted layer, the tensor that it writes
    for layer in filter(lambda layer: layer.inserted, layers.values()):
        source = layers[layer.sources[0]]
        kernel = inserted_kernel(layer, source)
        reading = [group_of[name] for name in beyond_inserted(readers[layer.name], layers, readers) if name in group_of]
        tensor = inserted.get(source.name) or tensor_between(
            prepared, steps[group_of[source.name]][1].outputs if source.name in group_of else (source.name,),
            [steps[index][1] for index in reading])
        inserted[layer.name] = tensor
        if kernel is None:
            continue
        inserted[layer.name] = written = f"{tensor}/{layer.layout}" if tensor else ""
        for index in reading if tensor else ():
            when, step = steps[index]
            steps[index] = when, step._replace(inputs=tuple(written if name == tensor else name for name in step.inputs))
        steps.append((order.index(layer.name), ModelKernel(kernel, (layer.name,), (tensor,), (written,))))
    return in_running_order(steps)


def in_running_order(steps: Sequence[tuple[int, ModelKernel]]) -> list[ModelKernel]:
    """The kernels ordered by their last layers; those without a layer come just before the first that reads them."""
    producers = {name: number for number, (_, step) in enumerate(steps) for name in step.outputs if name}
    ordered: list[int] = []
    seen: set[int] = set()

    def add(number: int) -> None:
        if number not in seen:
            seen.add(number)
            for name in steps[number][1].inputs:
                if name in producers:
                    add(producers[name])
            ordered.append(number)

    for number in sorted(range(len(steps)), key=lambda number: steps[number][0]):
        if steps[number][0] >= 0:
            add(number)
    for number in range(len(steps)):
        add(number)
    return [steps[number][1] for number in ordered]


def tensor_between(prepared: PreparedModel, written: Sequence[str], reading: Sequence[ModelKernel]) -> str:
    """The tensor among `written` that most of the kernels `reading` read, or ""."""
    activations = [name for name in written if name in prepared.tensors and not prepared.tensors[name].constant]
    by_readers = sorted(activations, key=lambda name: -sum(name in step.inputs for step in reading))
    return next(iter(by_readers), "")


def kernel_of_group(prepared: PreparedModel, group: NodeGroup) -> ModelKernel:
    """The kernel of a group of nodes."""
    if not group.nodes:
        raise UserError(f"{prepared.source.name}: OpenVINO does not say which ONNX nodes are in its layer "
                        f"{group.layers[0].name}, and no other layer is next to it; such models can't be taken apart")
    nodes = [prepared.nodes[index] for index in group.nodes]
    inside = set(group.nodes)
    read_elsewhere = {name for index, node in enumerate(prepared.nodes) if index not in inside for name in node.input}
    ends = Ends(prepared, nodes, read_elsewhere)
    kernel = describe(prepared, nodes, ends, in_place=all(layer.in_place for layer in group.layers))
    outputs = tuple(nodes[0].output) if len(nodes) == 1 else tuple(ends.outputs)
    origins = tuple(Origin(name=prepared.names[index], op_type=prepared.nodes[index].op_type) for index in group.nodes)
    return ModelKernel(kernel, tuple(layer.name for layer in group.layers), tuple(ends.inputs)[:len(kernel.inputs)], outputs,
                       origins)


def record_of(prepared: PreparedModel, steps: Sequence[ModelKernel], flavour: Flavour) -> ModelRecord:
    """A model's record under OpenVINO, which fixes all sizes."""
    source = prepared.source

    def tensors(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: Tensor(dtype=prepared.tensors[name].dtype, shape=prepared.tensors[name].shape) for name in names}

    return ModelRecord(
        model=record_name(source.name, source.dims), **source.record_fields(),
        flavour=flavour, derived=False, inputs=tensors(prepared.inputs), outputs=tensors(prepared.outputs),
        weight_bytes=sum(step.kernel.weight_bytes for step in steps), opsets={"": prepared.opset},
        kernels={step.kernel.id: step.kernel for step in steps},
        nodes=tuple(Node(name=f"{number:04d}_{step.kernel.type}", kernel_id=step.kernel.id, provider=flavour.device,
                         inputs=step.inputs, outputs=step.outputs, origins=step.origins) for number, step in enumerate(steps)))


# groups of layers and nodes ----------------------------------------------------------------------------------------------

Key = str | int  # a layer's name, or the index of an ONNX node


class NodeGroup(NamedTuple):
    """The ONNX nodes of a kernel, by index, and its layers; both in order."""

    nodes: tuple[int, ...]
    layers: tuple[Layer, ...]


def groups_of(nodes: Sequence[onnx.NodeProto], layers: Mapping[str, Layer]) -> list[NodeGroup]:
    """The kernels of a model in running order, without those that OpenVINO inserted.

    All nodes of one layer are one kernel, and so are all layers of one node. A layer without a node (the normalisation in a
    LayerNormalization) or a node without a layer (a MatMul whose layer is named after its bias) belongs to the kernel that
    reads it, if there is exactly one, and else to the one that it reads.
    """
    computing = {name: layer for name, layer in layers.items() if layer.computes and not layer.inserted}
    together: Any = networkx.utils.UnionFind([*computing, *range(len(nodes))])
    for layer in computing.values():
        together.union(layer.name, *layer.nodes)
    readers, sources = readers_by_layer(layers), {name: layer.sources for name, layer in layers.items()}
    for layer in reversed(computing.values()):
        if not layer.nodes:
            reading = beyond_inserted(readers[layer.name], layers, readers)
            read = beyond_inserted(layer.sources, layers, sources)
            join_neighbour(together, layer.name, [name for name in reading if name in computing],
                 [name for name in read if name in computing])
    producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    before_of = [[producers[name] for name in node.input if name in producers] for node in nodes]
    after_of: list[list[int]] = [[] for _ in nodes]
    for index, before in enumerate(before_of):
        for source in before:
            after_of[source].append(index)
    in_layers = {index for layer in computing.values() for index in layer.nodes}
    for index in reversed(range(len(nodes))):
        if index not in in_layers:
            join_neighbour(together, index, after_of[index], before_of[index])
    return groups_in_order(len(nodes), computing, together, after_of)


def join_neighbour(together: Any, key: Key, readers: Iterable[Key], sources: Sequence[Key]) -> None:
    """Adds a layer or node to the only kernel that reads it, or else to the first one that it reads."""
    reading = {together[reader] for reader in readers}
    if len(reading) == 1:
        together.union(key, reading.pop())
    elif sources:
        together.union(key, sources[0])


def beyond_inserted(names: Iterable[str], layers: Mapping[str, Layer], neighbours: Mapping[str, Iterable[str]]) -> list[str]:
    """The layers, with each inserted one replaced by what follows it in `neighbours` (readers or sources)."""
    return [other for name in names for other in (
        beyond_inserted(neighbours.get(name, ()), layers, neighbours) if layers[name].inserted else [name])]


def groups_in_order(count: int, computing: Mapping[str, Layer], together: Any,
                    after_of: Sequence[Sequence[int]]) -> list[NodeGroup]:
    """The groups ordered by their layers. Groups that wait for each other are merged."""
    position = {name: order for order, name in enumerate(computing)}
    while True:
        graph: Any = networkx.DiGraph()
        graph.add_nodes_from({together[key] for key in (*range(count), *computing)})
        graph.add_edges_from((together[index], together[reader]) for index in range(count) for reader in after_of[index]
                             if together[index] != together[reader])
        cycles = [cycle for cycle in networkx.strongly_connected_components(graph) if len(cycle) > 1]
        if not cycles:
            break
        for cycle in cycles:
            together.union(*cycle)
    members: dict[Key, list[Key]] = {root: [] for root in graph}
    for key in (*range(count), *computing):
        members[together[key]].append(key)
    first = {root: min((position[key] for key in keys if isinstance(key, str)), default=0) for root, keys in members.items()}
    return [NodeGroup(tuple(key for key in members[root] if isinstance(key, int)),
                  tuple(computing[key] for key in members[root] if isinstance(key, str)))
            for root in networkx.lexicographical_topological_sort(graph, key=lambda root: first[root])]
