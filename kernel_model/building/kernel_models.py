"""Builds a kernel as an ONNX model of its own, or many kernels into one carrier model.

A kernel that runs alone in a loop finds its weights in the cache, and each run has the overhead of a session. In a carrier,
caches are as in a real model: a kernel's inputs were just written by the operator before it, and its weights were last used one
run ago. ORT's profile gives the kernel's own time. Each kernel is between an `Abs` for every floating input and a `Shape` that
uses its outputs without reading them.

A kernel's file is self-contained and small: nodes generate large weights from a few thousand random numbers. ONNX Runtime folds
these nodes into a constant if it optimises (up to 1 GiB). Hase replaces them by the constant (`take_weights`), since it runs
kernels without optimisation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hase.kernel_model.building import dummy_data
from hase.ort_analysis.graph.sizes import CACHES
from hase.ort_analysis.graph.source import KERNEL_KEY, built_kernel
from hase.records.attention import PAST, kernel_grouped_query_sizes
from hase.records.kernel_record import Kernel, KernelInput, numpy_dtype, type_code
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.model_files import read_whole_model
from hase.utils.ort_sessions import model_errors, open_session, ort_value

if TYPE_CHECKING:
    import onnxruntime

INLINE_BYTES = 1 << 16  # larger weights are made by nodes …
REPEATED_TYPES = {"float32", "float16", "bfloat16", "uint8", "int8"}  # … if they are of these types
REPEATED_ELEMENTS = 64, 1 << 12  # least and most random numbers that such a weight repeats
WEIGHT_PREFIX = "weight_"  # of the names of these nodes and of their constants
IR_VERSION = 10
WRITTEN_TYPES = {"cpu": {"float32", "float64"}, "cuda": {"float32", "float64", "float16", "bfloat16"}}  # inputs that Abs writes
WRITTEN_IF_NO_FLOATS = {"int64", "int32", "int8", "uint8"}  # of kernels without such inputs, to separate a GPU's work
WRITER_OP = "Abs"  # of the nodes in a carrier that write a kernel's inputs
WRITER = "abs_"  # prefix of the names of these nodes


def kernel_node(kernel: Kernel, inputs: list[str], outputs: list[str], name: str) -> onnx.NodeProto:
    """The kernel's node with the given tensor names."""
    node = onnx.helper.make_node(kernel.op_type, inputs, outputs, name=name, domain=kernel.domain)
    if kernel.subgraphs:
        raise UserError(f"{kernel.id}: holds a subgraph ({kernel.subgraphs[0]}); such a kernel can't be built alone")
    if unsupported := next((t.dtype for t in (*kernel.inputs, *kernel.outputs) if t.present and not t.is_tensor), None):
        raise UserError(f"{kernel.id}: takes or gives a {unsupported}, and only kernels of tensors can be built alone")
    for key, value in sorted(kernel.attributes.items()):
        if isinstance(value, dict):
            tensor_type = type_code(value["dtype"])
            value = onnx.helper.make_tensor(key, tensor_type, value["shape"], value["values"])
        if value == []:
            continue
        node.attribute.append(onnx.helper.make_attribute(key, value))
    return node


def is_large_weight(tensor: KernelInput) -> bool:
    """Whether a constant is large and its value does not matter."""
    return tensor.constant and tensor.bytes > INLINE_BYTES and tensor.dtype in REPEATED_TYPES


def repeated_numbers(tensor: KernelInput) -> np.ndarray:
    """The random numbers that a large weight repeats a whole number of times; none if its values must be in the model."""
    least, most = REPEATED_ELEMENTS
    count = next((count for count in range(most, least - 1, -1) if tensor.elements % count == 0), 0)
    if np.issubdtype(dtype := numpy_dtype(tensor.dtype), np.integer):
        return dummy_data.random_bytes((count,), dtype)
    return dummy_data.random_floats((count,), tensor.dtype)


def add_weights(graph: onnx.GraphProto, kernel: Kernel, weights: Mapping[int, np.ndarray] | None = None,
                repeated: bool = True) -> None:
    """Adds a kernel's constants: `weights` (by input index), else random ones, which nodes generate if large and `repeated`."""
    generators: list[onnx.NodeProto] = []
    given = weights or {}
    for position, tensor in enumerate(kernel.inputs):
        name, prefix = dummy_data.input_name(position), f"{WEIGHT_PREFIX}{position}_"
        if not tensor.present or not dummy_data.is_initializer(kernel, position):
            continue
        by_nodes = repeated and is_large_weight(tensor) and position not in given
        numbers = repeated_numbers(tensor) if by_nodes else np.zeros(0)
        if not len(numbers):
            value = given[position] if position in given else dummy_data.dummy_tensor(kernel, position)
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, order="C"), name))
            continue
        constants = {"random": numbers, "times": np.array([tensor.elements // len(numbers)]), "shape": np.array(tensor.shape)}
        graph.initializer.extend(onnx.numpy_helper.from_array(value, prefix + key) for key, value in constants.items())
        for op_type, inputs, output in (("Tile", ("random", "times"), prefix + "flat"), ("Reshape", ("flat", "shape"), name)):
            sources = [prefix + key for key in inputs]
            generators.append(onnx.helper.make_node(op_type, sources, [output], name=prefix + op_type))
    nodes = [*generators, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def take_weights(model: onnx.ModelProto, kernel: Kernel) -> dict[str, np.ndarray]:
    """Removes the nodes that generate large weights from a built kernel; returns these weights by name."""
    graph, generated = model.graph, {output for node in model.graph.node if node.name.startswith(WEIGHT_PREFIX)
                                     for output in node.output}
    for members in (graph.node, graph.initializer):
        kept = [member for member in members if not member.name.startswith(WEIGHT_PREFIX)]
        del members[:]
        members.extend(kept)
    return {dummy_data.input_name(position): np.resize(repeated_numbers(tensor), tensor.shape)
            for position, tensor in enumerate(kernel.inputs) if dummy_data.input_name(position) in generated}


def read_built(path: Path) -> tuple[onnx.ModelProto, Kernel]:
    """A built kernel with all weights inside, and its description."""
    model, kernel = read_whole_model(path), built_kernel(path)
    for name, value in take_weights(model, kernel).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model, kernel


def weight_declaration(name: str, value: np.ndarray) -> onnx.TensorProto:
    """A constant without its value, which is given to the session: protobuf messages can't hold large values."""
    declaration = onnx.TensorProto(name=name, data_type=onnx.helper.np_dtype_to_tensor_dtype(value.dtype), dims=value.shape,
                                   data_location=onnx.TensorProto.EXTERNAL)
    for key, text in (("location", name), ("length", str(value.nbytes))):
        declaration.external_data.append(onnx.StringStringEntryProto(key=key, value=text))
    return declaration


def open_kernel(path: Path, device: str, kernel: Kernel, **options: Any) -> onnxruntime.InferenceSession:
    """A session that runs a built kernel unoptimised; `options` are those of `open_session`."""
    with model_errors(str(path)):
        model = onnx.load(str(path), load_external_data=False)
    weights = take_weights(model, kernel)
    model.graph.initializer.extend(weight_declaration(name, value) for name, value in weights.items())
    return open_session(model.SerializeToString() if weights else path, device, optimize="none", name=str(path),
                        weights=weights, **options)


def build_model(kernel: Kernel, weights: Mapping[int, np.ndarray] | None = None, repeated: bool = False) -> onnx.ModelProto:
    """A kernel as a model of one node: inputs `x<i>`, constants (see `add_weights`), outputs `y<i>`."""
    names = [dummy_data.input_name(i) if tensor.present else "" for i, tensor in enumerate(kernel.inputs)]
    outs = [dummy_data.output_name(i) if tensor.present else "" for i, tensor in enumerate(kernel.outputs)]
    graph = onnx.helper.make_graph(
        [kernel_node(kernel, names, outs, kernel.type)], "kernel",
        [onnx.helper.make_tensor_value_info(names[i], type_code(t.dtype), t.shape)
         for i, t in enumerate(kernel.inputs) if t.present and not dummy_data.is_initializer(kernel, i)],
        [onnx.helper.make_tensor_value_info(outs[i], type_code(t.dtype), t.shape)
         for i, t in enumerate(kernel.outputs) if t.present])
    add_weights(graph, kernel, weights, repeated)
    opsets = {kernel.domain: kernel.opset} | ({} if kernel.domain == "" else {"": 20})
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in opsets.items()],
                              ir_version=IR_VERSION, producer_name="hase")
    model.metadata_props.append(metadata_entry(KERNEL_KEY, kernel.model_dump_json()))
    return model


def metadata_entry(key: str, value: str) -> onnx.StringStringEntryProto:
    """A metadata entry of a model."""
    return onnx.StringStringEntryProto(key=key, value=value)


def write_kernel(kernel: Kernel, folder: Path, weights: Mapping[int, np.ndarray] | None = None) -> Path:
    """Writes a kernel with the given `weights` to `<folder>/<kernel id>.onnx`; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(kernel, weights, repeated=True)
    path = folder / f"{kernel.id}.onnx"
    files.write_bytes(path, model.SerializeToString())
    return path


def check_kernel(path: Path, kernel: Kernel, device: str) -> None:
    """Runs a built kernel once on dummy inputs."""
    session = open_kernel(path, device, kernel)
    with model_errors(str(path)):
        if any(tensor.dtype == "bfloat16" for tensor in (*kernel.inputs, *kernel.outputs)):  # which numpy lacks
            values = {name: ort_value(value) for name, value in dummy_data.dummy_inputs(kernel).items()}
            results = session.run_with_ort_values(None, values)
            outputs = [value.numpy() for value in results if value.data_type() != "tensor(bfloat16)"]
        else:
            outputs = session.run(None, dummy_data.dummy_inputs(kernel))
    if any(np.issubdtype(out.dtype, np.floating) and np.isnan(out).any() for out in map(np.asarray, outputs)):
        raise UserError(f"{path}: gives NaN on its dummy inputs")


def node_name(position: int) -> str:
    """The name of a kernel's node in a carrier, by the kernel's index."""
    return f"kernel_{position}"


def carrier_bytes(kernel: Kernel) -> int:
    """Memory of a kernel in a carrier: its tensors, and its inputs again as the graph's."""
    activations = sum(tensor.bytes for tensor in kernel.activations)
    return kernel.weight_bytes + 2 * activations + sum(tensor.bytes for tensor in kernel.outputs)


def shared_outputs(kernel: Kernel) -> dict[int, int]:
    """The outputs of a kernel that overwrite an input, with the index of that input."""
    sizes = kernel_grouped_query_sizes(kernel)
    return {present: past for past, present in PAST.items()} if sizes and sizes.shares_buffer else {}


def is_cache(kernel: Kernel, position: int) -> bool:
    """Whether an input is a cache of attention. In a model, it is used once per run, like weights."""
    cache_positions, _ = CACHES.get((kernel.domain, kernel.op_type), ((), ""))
    return position in cache_positions


class Carrier(NamedTuple):
    """A model that runs many kernels, one after another."""

    model: onnx.ModelProto  # the graph
    values: dict[str, np.ndarray]  # for its inputs, by name
    weights: dict[str, np.ndarray]  # values of large constants, by name; external data in the graph
    caches: list[str]  # names of inputs that are caches of attention


class _CarrierBuilder:
    """Builds a carrier kernel by kernel."""

    def __init__(self, device: str, with_floats: bool) -> None:
        self._device, self._written_types = device, WRITTEN_TYPES[device]
        self._with_floats = with_floats
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.inputs: dict[str, onnx.ValueInfoProto] = {}
        self.values: dict[str, np.ndarray] = {}  # values of inputs that have one
        self.weights: dict[str, np.ndarray] = {}  # values of external constants
        self.caches: list[str] = []  # the inputs that are caches of attention

    def add(self, number: int, kernel: Kernel) -> None:
        """Adds a kernel, with nodes that write its inputs and use its outputs."""
        written = self._written(kernel)
        names = [self._add_input(number, kernel, position, written) if tensor.present else ""
                 for position, tensor in enumerate(kernel.inputs)]
        outputs = [f"k{number}_y{position}" if tensor.present else "" for position, tensor in enumerate(kernel.outputs)]
        self.nodes.append(kernel_node(kernel, names, outputs, node_name(number)))
        in_place = shared_outputs(kernel)
        for position, name in enumerate(outputs):
            if position in in_place:
                tensor = kernel.outputs[position]
                self.outputs.append(onnx.helper.make_tensor_value_info(name, type_code(tensor.dtype), tensor.shape))
            elif name:
                shape = f"k{number}_shape{position}"
                self.nodes.append(onnx.helper.make_node("Shape", [name], [shape], name=f"shape_{number}_{position}"))
                rank = len(kernel.outputs[position].shape)
                self.outputs.append(onnx.helper.make_tensor_value_info(shape, type_code("int64"), [rank]))

    def _add_constant(self, name: str, kernel: Kernel, position: int, number: int) -> None:
        """Adds a constant input of a kernel; a large one is stored outside the graph."""
        value = np.asarray(dummy_data.dummy_tensor(kernel, position, number), order="C")
        if value.nbytes <= INLINE_BYTES or value.dtype == object:
            self.constants.append(onnx.numpy_helper.from_array(value, name))
            return
        self.constants.append(weight_declaration(name, value))
        self.weights[name] = value

    def _written(self, kernel: Kernel) -> list[int]:
        """The inputs of a kernel that an `Abs` writes: the floating-point ones, or else, on a GPU, an integer one."""
        read = [position for position, tensor in enumerate(kernel.inputs)
                if tensor.present and not dummy_data.is_initializer(kernel, position) and not is_cache(kernel, position)]
        floating = [position for position in read if kernel.inputs[position].dtype in self._written_types]
        whole = [position for position in read if kernel.inputs[position].dtype in WRITTEN_IF_NO_FLOATS]
        return floating or (whole[:1] if self._device == "cuda" else [])

    def _add_input(self, number: int, kernel: Kernel, position: int, written: Collection[int]) -> str:
        """Adds an input of a kernel: a constant, the output of an `Abs` (`written`), or a graph input. Returns its name."""
        name, tensor = f"k{number}_x{position}", kernel.inputs[position]
        if dummy_data.is_initializer(kernel, position):
            self._add_constant(name, kernel, position, number)
        elif is_cache(kernel, position):
            self.inputs[name] = onnx.helper.make_tensor_value_info(name, type_code(tensor.dtype), tensor.shape)
            self.caches.append(name)
            if self._with_floats or "float" not in tensor.dtype:
                self.values[name] = dummy_data.dummy_tensor(kernel, position, number)
        elif position in written:
            value_matters = "float" not in tensor.dtype or dummy_data.required_value(kernel, position) is not None
            shared = f"in_{name}" if value_matters else f"in_{tensor.dtype}_{'x'.join(map(str, tensor.shape))}"
            self.inputs[shared] = onnx.helper.make_tensor_value_info(shared, type_code(tensor.dtype), tensor.shape)
            if (value_matters or self._with_floats) and shared not in self.values:
                self.values[shared] = dummy_data.dummy_tensor(kernel, position, number)
            self.nodes.append(onnx.helper.make_node(WRITER_OP, [shared], [name], name=f"{WRITER}{number}_{position}"))
        else:
            self.inputs[name] = onnx.helper.make_tensor_value_info(name, type_code(tensor.dtype), tensor.shape)
            self.values[name] = dummy_data.dummy_tensor(kernel, position, number)
        return name


def build_carrier(kernels: Sequence[Kernel], device: str, with_floats: bool = True) -> Carrier:
    """The carrier of `kernels`, in order, for `cpu` or `cuda`. The node of kernel i is named `node_name(i)`. Opsets are those
    of the last kernel of each domain. Without `with_floats`, inputs of an `Abs` that may have any value get no value."""
    carrier = _CarrierBuilder(device, with_floats)
    opsets: dict[str, int] = {"": 20}
    for number, kernel in enumerate(kernels):
        opsets[kernel.domain] = kernel.opset
        carrier.add(number, kernel)
    graph = onnx.helper.make_graph(carrier.nodes, "carrier", list(carrier.inputs.values()), carrier.outputs, carrier.constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in opsets.items()],
                                   ir_version=IR_VERSION, producer_name="hase")
    return Carrier(model, carrier.values, carrier.weights, carrier.caches)
