"""Kernels of OpenVINO: what describes one, and how it becomes an ONNX model of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.kernel_model.building.dummy_data import input_name, output_name
from hase.kernel_model.building.kernel_models import IR_VERSION, KERNEL_KEY, add_weights, kernel_build, onnx_prop
from hase.ort_analysis.graph.nodes import attribute_value
from hase.records.kernel_costs import bytes_read, bytes_written, flops
from hase.records.kernel_record import Kernel, KernelInput, Tensor, type_code
from hase.records.kernel_types import describe_kernel, kernel_id, normalize
from hase.records.operators import VIEWS, operator_row
from hase.runtimes.openvino.layers import Layer
from hase.runtimes.openvino.prepared import Prepared, node_name
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.lazy import onnx

if TYPE_CHECKING:
    from onnx import NodeProto

DOMAIN = "openvino"  # of kernels of several operators, or that take no time
NODES = "nodes"  # the attribute of such a kernel that describes its ONNX nodes
NAMED = 6  # operators that are spelled out in a type; the others are counted
VIEW = "Identity"  # stands for an operator whose output lies where its input does
AXES = ("perm", "axis", "axes")
NOTHING = KernelInput(dtype="")


def operator_attributes(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node as plain data."""
    return {attribute.name: attribute_value(attribute) for attribute in sorted(node.attribute, key=lambda each: each.name)}


def operator_flops(prepared: Prepared, node: NodeProto) -> int:
    """The operations of a node alone."""
    tensors = prepared.tensors
    return flops(node.op_type, operator_attributes(node), [tensors.get(name, NOTHING) for name in node.input],
                 [tensors.get(name, NOTHING) for name in node.output])


def main_node(prepared: Prepared, nodes: Sequence[NodeProto]) -> int:
    """The place of the node that decides a kernel's time: a convolution or a product, else the one with most operations, else
    the first that moves data."""
    def rank(place: int) -> tuple[bool, int, bool, int]:
        name = nodes[place].op_type
        return (operator_row(name).operator_class in ("convolution", "product"), operator_flops(prepared, nodes[place]),
                name not in VIEWS, -place)

    return max(range(len(nodes)), key=rank)


class Ends:
    """The tensors that a kernel reads and writes, by name.

    Attributes:
        inputs: those of the main node first, in its order; "" for one that is omitted.
        outputs: those that others read, in order.
    """

    def __init__(self, prepared: Prepared, nodes: Sequence[NodeProto], read_elsewhere: Iterable[str]) -> None:
        made, wanted = {name for node in nodes for name in node.output}, {*read_elsewhere, *prepared.outputs}
        self.main = main_node(prepared, nodes)
        order = [nodes[self.main], *(node for place, node in enumerate(nodes) if place != self.main)]
        if len(nodes) == 1:
            self.inputs = list(nodes[0].input)
        else:
            self.inputs = list(dict.fromkeys(name for node in order for name in node.input if name and name not in made))
        self.outputs = [name for node in nodes for name in node.output if name in wanted] or [
            name for name in nodes[-1].output if name]


def describe(prepared: Prepared, nodes: Sequence[NodeProto], ends: Ends, in_place: bool) -> Kernel:
    """The kernel of some ONNX nodes that run as one.

    One of a single node is described as any ONNX kernel. One of several has the operator of its main node, a type of all
    operators' names in order, and the nodes themselves as an attribute. One that works in place is an Identity, which takes no
    time.

    Args:
        prepared: the model.
        nodes: in order.
        ends: of the kernel.
        in_place: whether its outputs lie where its inputs do.
    """
    inputs = [tensor_named(prepared, name) for name in ends.inputs]
    while inputs and not inputs[-1].present:
        inputs.pop()
    written = [tensor_named(prepared, name) for name in (nodes[0].output if len(nodes) == 1 else ends.outputs)]
    outputs = [Tensor(dtype=tensor.dtype, shape=tensor.shape) for tensor in written]
    main, [*others] = nodes[ends.main], (node.op_type for place, node in enumerate(nodes) if place != ends.main)
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
    kind = "_".join([main.op_type, *others[:NAMED]]) + (f"_and{len(others) - NAMED}" if len(others) > NAMED else "")
    op_type = VIEW if in_place else main.op_type
    kept = normalize(attributes) | {NODES: plain_nodes(nodes, ends)}
    return Kernel(
        id=kernel_id(kind, op_type, DOMAIN, prepared.opset, kept, inputs, outputs), type=kind, op_type=op_type, domain=DOMAIN,
        opset=prepared.opset, attributes=kept, inputs=tuple(inputs), outputs=tuple(outputs),
        flops=flops(op_type, kept, inputs, outputs), bytes_read=bytes_read(op_type, kept, inputs, outputs),
        bytes_written=bytes_written(op_type, kept, inputs, outputs),
        weight_bytes=sum(tensor.bytes for tensor in inputs if tensor.constant))


def tensor_named(prepared: Prepared, name: str) -> KernelInput:
    """A tensor of the model; "" names one that is omitted.

    Raises:
        UserError: its size is known only when the model runs.
    """
    if not name:
        return NOTHING
    if name not in prepared.tensors:
        raise UserError(f"{prepared.source.name}: the size of {name} is known only when the model runs; such models can't be "
                        "taken apart under OpenVINO")
    return prepared.tensors[name]


def is_activation(name: str) -> bool:
    """Whether an operator computes each element of its output from the same element of its only activation."""
    row = operator_row(name)
    return row.operator_class == "elementwise" and row.keeps_shape and row.linearity == "multiplicative"


def plain_nodes(nodes: Sequence[NodeProto], ends: Ends) -> list[dict[str, Any]]:
    """The nodes of a kernel as plain data, with names of tensors that are the same in every model."""
    names = {"": ""}
    for node in nodes:
        for name in node.output:
            names.setdefault(name, f"t{len(names)}")
    names |= {name: input_name(place) for place, name in enumerate(ends.inputs) if name}
    names |= {name: output_name(place) for place, name in enumerate(ends.outputs)}
    return [{"op_type": node.op_type, "domain": node.domain, "attributes": operator_attributes(node),
             "inputs": [names[name] for name in node.input], "outputs": [names[name] for name in node.output]}
            for node in nodes]


def inserted_kernel(layer: Layer, source: Layer) -> Kernel | None:
    """The kernel of a layer that OpenVINO inserted; None where it moves nothing.

    A Reorder is a Transpose of the memory: from the dimensions in the order of the source's layout to those of its own. Blocked
    layouts count as a copy.
    """
    shape, dtype = layer.output.shape, layer.output.dtype
    if layer.kind == "Convert":
        return describe_kernel("Cast", "", 20, {"to": type_code(dtype)}, [KernelInput(dtype=source.output.dtype, shape=shape)],
                               [Tensor(dtype=dtype, shape=shape)])
    order = sorted(layer.layout)
    if len(shape) == len(order) and order == sorted(source.layout) == [chr(ord("a") + axis) for axis in range(len(shape))]:
        before = [shape[order.index(letter)] for letter in source.layout]
        permutation = [source.layout.index(letter) for letter in layer.layout]
    else:
        before, permutation = list(shape), list(range(len(shape)))
    moved = [axis for axis in permutation if before[axis] != 1]
    if layer.in_place or (moved == sorted(moved) and permutation != sorted(permutation)):
        return None
    plain = describe_kernel("Transpose", "", 20, {"perm": permutation}, [KernelInput(dtype=dtype, shape=tuple(before))],
                            [Tensor(dtype=dtype, shape=tuple(before[axis] for axis in permutation))])
    return plain.model_copy(update={"type": layer.kind, "id": kernel_id(
        layer.kind, plain.op_type, plain.domain, plain.opset, plain.attributes, plain.inputs, plain.outputs)})


def build_kernel(kernel: Kernel, folder: Path) -> Path:
    """Writes a kernel to `<folder>/<kernel id>.onnx`, returns the path.

    Raises:
        UserError: it holds a subgraph, of which records keep only a hash; or a tensor's type has no numpy counterpart.
    """
    if kernel.domain != DOMAIN:
        return kernel_build(kernel, folder)
    folder.mkdir(parents=True, exist_ok=True)

    def described(name: str, tensor: Tensor) -> Any:
        return onnx.helper.make_tensor_value_info(name, type_code(tensor.dtype), tensor.shape)

    graph = onnx.helper.make_graph(
        [made_node(kernel, place) for place in range(len(kernel.attributes[NODES]))], "kernel",
        [described(input_name(place), tensor) for place, tensor in enumerate(kernel.inputs)
         if tensor.present and not tensor.constant],
        [described(output_name(place), tensor) for place, tensor in enumerate(kernel.outputs) if tensor.present])
    add_weights(graph, kernel)
    domains = {node["domain"] for node in kernel.attributes[NODES]} - {"", "ai.onnx"}
    opsets = [onnx.helper.make_opsetid("", kernel.opset), *(onnx.helper.make_opsetid(domain, 1) for domain in sorted(domains))]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="hase")
    model.metadata_props.append(onnx_prop(KERNEL_KEY, kernel.model_dump_json()))
    path = folder / f"{kernel.id}.onnx"
    files.write_bytes(path, model.SerializeToString())
    return path


def made_node(kernel: Kernel, place: int) -> NodeProto:
    """A node of a kernel of several.

    Raises:
        UserError: it holds a subgraph.
    """
    plain = kernel.attributes[NODES][place]
    node = onnx.helper.make_node(plain["op_type"], plain["inputs"], plain["outputs"], node_name(place, plain["op_type"]),
                                 domain=plain["domain"])
    for name, value in plain["attributes"].items():
        if isinstance(value, dict) and "graph" in value:
            raise UserError(f"{kernel.id}: holds a subgraph ({name}); such a kernel can't be built alone")
        if isinstance(value, dict):
            value = onnx.helper.make_tensor(name, type_code(value["dtype"]), value["shape"], value["values"])
        if value != []:
            node.attribute.append(onnx.helper.make_attribute(name, value))
    return node
