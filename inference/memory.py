"""What a model's run holds in memory: its weights, the activations live at the fullest moment, and what the arena keeps.

Counts what ONNX Runtime's allocation plan counts: a buffer lives from the node that makes it to the last that reads it;
a node that only renames a tensor (Reshape) shares its input's buffer; a node that may work in place takes over an input
that nobody reads later. The arena then keeps them twice: the first run allocates tensor by tensor, later runs take one
block planned from it, and what the first run used is not given back.

Left out, as no record tells them: a kernel's own scratch (cuDNN workspaces, im2col) and the runtime itself.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ort_analysis.records import Frozen, Kernel, ModelRecord

MIB = 2**20

# Inputs whose buffer the output may take over, by operator: the `MayInplace` hints of ONNX Runtime's kernels.
_UNARY = (
    "Relu", "LeakyRelu", "ThresholdedRelu", "Elu", "Selu", "Sigmoid", "HardSigmoid", "Softplus", "Softsign", "Tanh", "Clip",
    "Abs", "Neg", "Floor", "Ceil", "Reciprocal", "Sqrt", "Exp", "Log", "Softmax", "LogSoftmax", "Cast", "Not",
)
_BINARY = ("Add", "Sub", "Mul", "Div")
IN_PLACE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_UNARY, (0,)), **dict.fromkeys(_BINARY, (0, 1)), "Sum": (0,), "FusedConv": (3,),
}
_NCHWC_CONV_IN_PLACE = (3,)  # the tensor that a Conv with a fused Add adds to its product
_NCHWC_DOMAIN = "com.microsoft.nchwc"


class Memory(Frozen):
    """Memory that a session holds while it runs, in MiB.

    Attributes:
        weights_mib: constants of the optimised graph.
        activations_mib: inputs, outputs and intermediate tensors alive at the fullest moment.
        arena_mib: what the arena keeps beside them: the intermediate tensors once more.
        workspace_mib: the kernels' own scratch; None where it is not known.
        peak_mib: all of it.
    """

    weights_mib: float
    activations_mib: float
    arena_mib: float
    workspace_mib: float | None = None
    peak_mib: float


class Activations(NamedTuple):
    """The most bytes alive while any node runs: of all activations, and of the intermediate ones alone."""

    peak_bytes: int
    intermediate_peak_bytes: int


def peak_memory(record: ModelRecord, workspace_mib: float | None = None) -> Memory:
    """What a session of this model holds while it runs; `workspace_mib`: the kernels' scratch, where it is known."""
    activations = live_activations(record)
    weights, live, arena = (
        size / MIB for size in (record.weight_bytes, activations.peak_bytes, activations.intermediate_peak_bytes))
    return Memory(weights_mib=weights, activations_mib=live, arena_mib=arena, workspace_mib=workspace_mib,
                  peak_mib=weights + live + arena + (workspace_mib or 0.0))


def live_activations(record: ModelRecord) -> Activations:
    """The most bytes of tensors alive while any node runs, in linear time.

    Inputs and outputs of the graph belong to the caller: inputs live throughout, outputs from the node that makes them.
    """
    sizes = {name: tensor.bytes for name, tensor in record.inputs.items()}
    buffer_of = {name: name for name in sizes}  # tensor name -> the tensor that its buffer is named after
    kept = {*record.inputs, *record.outputs}
    readers = Counter(name for node in record.nodes for name in node.inputs)
    pending = {name: readers[name] for name in sizes}  # reads of a buffer still to come, under any of its names
    lent = sum(sizes.values())  # bytes of inputs and outputs alive
    own, peak, own_peak = 0, lent, 0
    layouts = {kernel_id: _layout(kernel) for kernel_id, kernel in record.kernels.items()}

    for node in record.nodes:
        output_bytes, renames, reusable = layouts[node.kernel_id]
        for position, (name, size) in enumerate(zip(node.outputs, output_bytes, strict=False)):
            if not name:
                continue
            source = None
            if position == 0 and name not in kept:
                if renames:
                    source = buffer_of.get(node.inputs[0]) if node.inputs else None
                else:
                    source = next((
                        buffer for slot in reusable if slot < len(node.inputs)
                        and (buffer := buffer_of.get(node.inputs[slot])) is not None
                        and buffer not in kept and pending[buffer] == 1 and sizes[buffer] == size
                    ), None)
            if source is None:
                buffer_of[name], sizes[name], pending[name] = name, size, readers[name]
                lent, own = (lent + size, own) if name in kept else (lent, own + size)
            else:
                buffer_of[name] = source
                pending[source] += readers[name]
        peak, own_peak = max(peak, lent + own), max(own_peak, own)
        for name in node.inputs:
            if name in buffer_of:  # else a constant, or an optional input left out
                pending[buffer_of[name]] -= 1
        for buffer in {buffer_of[name] for name in (*node.inputs, *node.outputs) if name in buffer_of} - kept:
            if pending[buffer] == 0:
                own -= sizes[buffer]
    return Activations(peak, own_peak)


def _layout(kernel: Kernel) -> tuple[tuple[int, ...], bool, tuple[int, ...]]:
    """Bytes of each output, whether the kernel only renames its first input, and the inputs it may work in."""
    renames = kernel.bytes_read == 0 and kernel.bytes_written == 0
    in_place = IN_PLACE.get(kernel.op_type, ())
    if kernel.domain == _NCHWC_DOMAIN and kernel.op_type == "Conv":
        in_place = _NCHWC_CONV_IN_PLACE
    return tuple(tensor.bytes for tensor in kernel.outputs), renames, in_place
