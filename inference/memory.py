"""What a model's run holds in memory: its weights, the activations live at the fullest moment, and what the arena keeps.

Counts what ONNX Runtime's allocation plan counts: a buffer lives from the node that makes it to the last that reads it;
a node that only renames a tensor (Reshape) shares its input's buffer; a node that may work in place takes over an input
that nobody reads later. The arena then keeps them twice: the first run allocates tensor by tensor, later runs take one
block planned from it, and what the first run used is not given back.

Left out, as no record tells them: a kernel's own scratch (cuDNN workspaces, im2col) and the runtime itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ort_analysis.records import Frozen, Kernel, ModelRecord, Node

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


class Layout(NamedTuple):
    """What a kernel does with buffers: bytes of each output, whether it only renames its first input, and the inputs that
    it may work in."""

    output_bytes: tuple[int, ...]
    renames: bool
    in_place: tuple[int, ...]


def layout_of(kernel: Kernel) -> Layout:
    """What a kernel does with buffers; the same in every model that holds it."""
    in_place = IN_PLACE.get(kernel.op_type, ())
    if kernel.domain == _NCHWC_DOMAIN and kernel.op_type == "Conv":
        in_place = _NCHWC_CONV_IN_PLACE
    return Layout(tuple(tensor.bytes for tensor in kernel.outputs), not kernel.moves_data, in_place)


def peak_memory(record: ModelRecord, workspace_mib: float | None = None,
                layouts: Mapping[str, Layout] | None = None) -> Memory:
    """What a session of this model holds while it runs.

    Args:
        record: the model.
        workspace_mib: the kernels' scratch, where it is known.
        layouts: of its kernels by id, where they are known from another model; by default worked out.
    """
    activations = live_activations(record, layouts)
    weights, live, arena = (
        size / MIB for size in (record.weight_bytes, activations.peak_bytes, activations.intermediate_peak_bytes))
    return Memory(weights_mib=weights, activations_mib=live, arena_mib=arena, workspace_mib=workspace_mib,
                  peak_mib=weights + live + arena + (workspace_mib or 0.0))


def live_activations(record: ModelRecord, layouts: Mapping[str, Layout] | None = None) -> Activations:
    """The most bytes of tensors alive while any node runs, in linear time; `layouts` as for `peak_memory`.

    Inputs and outputs of the graph belong to the caller: inputs live throughout, outputs from the node that makes them.
    """
    if layouts is None:
        layouts = {name: layout_of(kernel) for name, kernel in record.kernels.items()}
    sizes = {name: tensor.bytes for name, tensor in record.inputs.items()}
    buffer_of = {name: name for name in sizes}  # tensor name -> the tensor that its buffer is named after
    kept = {*record.inputs, *record.outputs}
    readers = Counter(itertools.chain.from_iterable(node.inputs for node in record.nodes))
    pending = {name: readers[name] for name in sizes}  # reads of a buffer still to come, under any of its names
    lent = sum(sizes.values())  # bytes of inputs and outputs alive
    own, peak, own_peak = 0, lent, 0

    def taken_over(node: Node, renames: bool, in_place: tuple[int, ...], size: int) -> str | None:
        """The buffer that a node's first output of `size` bytes shares with an input; None where it needs its own."""
        if renames:
            return buffer_of.get(node.inputs[0]) if node.inputs else None
        for slot in in_place:
            if slot < len(node.inputs):
                buffer = buffer_of.get(node.inputs[slot])
                if buffer is not None and buffer not in kept and pending[buffer] == 1 and sizes[buffer] == size:
                    return buffer
        return None

    for node in record.nodes:
        output_bytes, renames, in_place = layouts[node.kernel_id]
        unread = 0  # bytes that nobody reads once they are made
        may_share = renames or bool(in_place)
        for name, size in zip(node.outputs, output_bytes, strict=False):
            if name:
                source = taken_over(node, renames, in_place, size) if may_share and name not in kept else None
                if source is not None:
                    buffer_of[name] = source
                    pending[source] += readers[name]
                else:
                    buffer_of[name], sizes[name], pending[name] = name, size, readers[name]
                    if name in kept:
                        lent += size
                    else:
                        own += size
                        unread += 0 if readers[name] else size
            may_share = False  # only the first output may
        if lent + own > peak:
            peak = lent + own
        if own > own_peak:
            own_peak = own
        own -= unread
        for name in node.inputs:
            buffer = buffer_of.get(name)
            if buffer is not None:  # else a constant, or an optional input left out
                pending[buffer] -= 1
                if not pending[buffer] and buffer not in kept:
                    own -= sizes[buffer]
    return Activations(peak, own_peak)
