"""A carrier: many kernels one after another in one graph, so that each meets the caches as it does inside a model.

A kernel run alone in a loop finds its weights in the cache and pays for a whole session run. In a carrier its inputs
were just written by the operator before it, its weights were last used a whole run ago, and ORT's profile gives its own
time. Each kernel stands between an `Abs` for every floating input and a `Shape` that uses up its outputs without
reading them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from records.elements import type_code
from records.kernel_record import Kernel
from runtimes.ort.building.chosen_data import chosen
from runtimes.ort.building.dummy_data import dummy_tensor
from runtimes.ort.building.kernel_models import IR_VERSION, kernel_node
from utils.lazy import onnx

WRITTEN_BEFORE = {"cpu": {"float32", "float64"}, "cuda": {"float32", "float64", "float16"}}  # types that Abs takes

WRITER_OP = "Abs"
WRITER = "abs_"  # how the names of the nodes that write a kernel's inputs begin


def node_name(position: int) -> str:
    """The name of the carrier's kernel number `position`."""
    return f"kernel_{position}"


def carrier_bytes(kernel: Kernel) -> int:
    """Memory that a kernel takes in a carrier: its tensors, and its inputs a second time as the graph's."""
    activations = sum(tensor.bytes for tensor in kernel.activations)
    return kernel.weight_bytes + 2 * activations + sum(tensor.bytes for tensor in kernel.outputs)


class _Graph:
    """A carrier that grows by one kernel at a time.

    Attributes:
        nodes, constants, outputs: of the graph.
        inputs: of the graph, by name.
        values: of those inputs that have one, by name.
    """

    def __init__(self, device: str, with_floats: bool) -> None:
        """Arguments are those of `build_carrier`."""
        self._written_before = WRITTEN_BEFORE[device]
        self._with_floats = with_floats
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.inputs: dict[str, onnx.ValueInfoProto] = {}
        self.values: dict[str, np.ndarray] = {}

    def add(self, number: int, kernel: Kernel) -> None:
        """Adds a kernel between the nodes that write its inputs and those that use up its outputs."""
        names = [self._add_input(number, kernel, position) if tensor.present else ""
                 for position, tensor in enumerate(kernel.inputs)]
        outputs = [f"k{number}_y{position}" if tensor.present else "" for position, tensor in enumerate(kernel.outputs)]
        self.nodes.append(kernel_node(kernel, names, outputs, node_name(number)))
        for position, name in enumerate(outputs):
            if name:
                shape = f"k{number}_shape{position}"
                self.nodes.append(onnx.helper.make_node("Shape", [name], [shape], name=f"shape_{number}_{position}"))
                rank = len(kernel.outputs[position].shape)
                self.outputs.append(onnx.helper.make_tensor_value_info(shape, type_code("int64"), [rank]))

    def _add_input(self, number: int, kernel: Kernel, position: int) -> str:
        """What input `position` of a kernel reads: a constant, what an `Abs` wrote, or an input of the graph; its name."""
        name, tensor = f"k{number}_x{position}", kernel.inputs[position]
        if tensor.constant:
            value = dummy_tensor(kernel, position, number)
            self.constants.append(onnx.numpy_helper.from_array(np.asarray(value, order="C"), name))
        elif tensor.dtype in self._written_before:
            own = chosen(kernel, position) is not None  # any numbers will not do
            shared = f"in_{name}" if own else f"in_{tensor.dtype}_{'x'.join(map(str, tensor.shape))}"
            self.inputs[shared] = onnx.helper.make_tensor_value_info(shared, type_code(tensor.dtype), tensor.shape)
            if (own or self._with_floats) and shared not in self.values:
                self.values[shared] = dummy_tensor(kernel, position, number)
            self.nodes.append(onnx.helper.make_node(WRITER_OP, [shared], [name], name=f"{WRITER}{number}_{position}"))
        else:
            self.inputs[name] = onnx.helper.make_tensor_value_info(name, type_code(tensor.dtype), tensor.shape)
            self.values[name] = dummy_tensor(kernel, position, number)
        return name


def build_carrier(kernels: Sequence[Kernel], device: str,
                  with_floats: bool = True) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The carrier of `kernels`, in order, and values for its inputs.

    Node number i is called `node_name(i)`. Opsets are those of the first kernel of each domain.

    Args:
        kernels: what to carry.
        device: `cpu` or `cuda`: whose `Abs` writes the inputs.
        with_floats: whether there are values for those inputs that an `Abs` reads, too, for which any numbers will do.

    Raises:
        UserError: a kernel that can't be built.
    """
    carrier = _Graph(device, with_floats)
    opsets: dict[str, int] = {"": 20}
    for number, kernel in enumerate(kernels):
        opsets[kernel.domain] = kernel.opset
        carrier.add(number, kernel)
    graph = onnx.helper.make_graph(carrier.nodes, "carrier", list(carrier.inputs.values()), carrier.outputs, carrier.constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in opsets.items()],
                                   ir_version=IR_VERSION, producer_name="hase")
    return model, carrier.values
