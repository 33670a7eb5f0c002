"""The memory that a model's session holds, and that of the target's device.

It counts as ONNX Runtime's allocation plan does: a buffer lives from the node that makes it to the last node that reads it;
a node that only renames a tensor (Reshape) shares its input's buffer; a node that may work in place takes over an input
that no later node reads. The arena then keeps the buffers twice: the first run allocates tensor by tensor, later runs use
one block planned from it, and what the first run used is not given back.

On CUDA the arena takes whole regions from the device, each twice as large as the one before. cuDNN asks it for workspaces
that are in no record, and cuDNN and cuBLAS keep code and scratch of their own. These are two constants, fitted on an H200 to
12 torchvision models at batches of 1 to 64 (36 cases; ONNX Runtime 1.31, cuDNN 9.19; `inference/memory_error.py --device
cuda`). With each model held out of the fit, the median error is 13 %, 29 of 36 are within 30 %, and the worst are −41 and
+135 %. On a CPU a page counts only once it is written, so a region costs only the part that is used.

On a CPU a session's weights were copied while it was loaded (parsed, folded, reordered for blocked convolutions). The copies
are free again, but glibc keeps what lies under its greatest mmap threshold of 32 MiB in the process, where it counts as
resident (`malloc_trim` gives it back: a session then holds its weights and about 2 MiB). How much stays depends on the order
of loading and differs by tens of per cent from run to run: the shares below are medians over 24 models (ONNX Runtime 1.31,
glibc 2.36); `python inference/memory_error.py` measures them again.

TVM plans one place for each intermediate tensor beforehand: nothing is kept twice, and loading leaves nothing.

Not counted: the process without the session (about 70 MiB with Python and ONNX Runtime), and a CUDA context (some 0.5 GiB of
the device, the same for every model).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from records.kernel_record import Kernel, ModelRecord, Node
from records.operators import operator_row
from runtimes import runtime_named
from utils.fingerprint import Machine, Target
from utils.frozen import Frozen

MIB = 2**20
BLOCKED_DOMAIN = "com.microsoft.nchwc"
# bytes that stay in the heap for each byte of a weight: of a convolution, of one-byte integers, and of others
ONCE_LOADED_CONV, ONCE_LOADED_INT8, ONCE_LOADED = 1.8, 1.0, 0.5
LOADED_BASE_BYTES = 2 * MIB  # of the graph itself
MMAPPED_BYTES = 32 * MIB  # of a weight: glibc maps those apart and gives them back (mallopt(3), M_MMAP_THRESHOLD)
CUDA_ARENA = 3.0  # times the activations: the arena's surplus, with cuDNN's workspaces in it
CUDA_LIBRARIES_BYTES = 160 * MIB  # what cuDNN and cuBLAS keep
CUDA_LIBRARY_USERS = ("Conv", "Pool", "MatMul", "Gemm", "Attention", "LSTM", "GRU", "RNN", "Einsum")  # in the operator's name


class Memory(Frozen):
    """The memory that a session holds while it runs, in MiB: of the process on a CPU, of the device on CUDA.

    Attributes:
        weights_mib: constants of the optimised graph.
        activations_mib: inputs, outputs and intermediate tensors alive at the peak.
        arena_mib: the arena's surplus: the intermediate tensors once more; on CUDA more, with cuDNN's workspaces.
        workspace_mib: the kernels' own scratch, as far as it is known: columns of transposed convolutions on a CPU, what cuDNN
            and cuBLAS keep on CUDA.
        loading_mib: what loading leaves in the heap of a CPU's process; 0 on CUDA.
        peak_mib: the sum of all.
    """

    weights_mib: float
    activations_mib: float
    arena_mib: float
    workspace_mib: float | None = None
    loading_mib: float = 0.0
    peak_mib: float

    @property
    def least_mib(self) -> float:
        """The least memory with which a run works: the arena takes smaller regions where the device has no room for larger ones
        (ONNX Runtime's bfc_arena.cc: Extend), and what loading left is free again."""
        return self.weights_mib + self.activations_mib + (self.workspace_mib or 0.0)


class Activations(NamedTuple):
    """The most bytes alive while any node runs: of all activations, and of the intermediate ones alone."""

    peak_bytes: int
    intermediate_peak_bytes: int


class Layout(NamedTuple):
    """How a kernel uses memory: bytes of each output, whether it only renames its first input, the inputs in whose buffers it
    may work, its scratch on a CPU, and what loading its weights leaves in the heap there."""

    output_bytes: tuple[int, ...]
    renames: bool
    in_place: tuple[int, ...]
    scratch_bytes: int = 0
    loading_bytes: float = 0.0


def layout_of(kernel: Kernel) -> Layout:
    """How a kernel uses memory; the same in every model that holds it."""
    row = operator_row(kernel.op_type)
    in_place = row.in_place
    if kernel.domain == BLOCKED_DOMAIN and row.sum_input is not None:
        in_place = (row.sum_input,)
    return Layout(tuple(tensor.bytes for tensor in kernel.outputs), not kernel.moves_data, in_place, _column_bytes(kernel),
                  _loading_bytes(kernel))


def _loading_bytes(kernel: Kernel) -> float:
    """What loading a kernel's weights leaves in the heap of a CPU's process."""
    of_floats = ONCE_LOADED_CONV if "Conv" in kernel.op_type else ONCE_LOADED
    return sum(size * (ONCE_LOADED_INT8 if tensor.dtype in ("int8", "uint8") else of_floats)
               for tensor in kernel.inputs if tensor.constant and (size := tensor.bytes) < MMAPPED_BYTES)


def _column_bytes(kernel: Kernel) -> int:
    """The columns that a transposed convolution multiplies out before it adds them up, for one image (ONNX Runtime's
    conv_transpose.cc: col_buffer); 0 for other kernels."""
    if kernel.op_type != "ConvTranspose" or len(kernel.inputs) < 2 or len(kernel.inputs[1].shape) < 3:
        return 0
    image, weights = kernel.inputs[0], kernel.inputs[1]
    per_pixel = math.prod(weights.shape[1:]) * (image.bytes // max(image.elements, 1))
    return per_pixel * math.prod(image.shape[2:])


def peak_memory(record: ModelRecord, workspace_mib: float | None = None, layouts: Mapping[str, Layout] | None = None,
                apart: Collection[str] = ()) -> Memory:
    """The memory that a session of a model holds while it runs.

    Args:
        record: the model.
        workspace_mib: the kernels' scratch, where it was measured; by default estimated.
        layouts: of its kernels by id, where they are known already; by default computed.
        apart: tensors that are left out, since the caller counts them: the caches of a language model.
    """
    if layouts is None:
        layouts = {name: layout_of(kernel) for name, kernel in record.kernels.items()}
    activations = live_activations(record, layouts, apart)
    arena, scratch, loading = _surplus(record, activations, [layouts[node.kernel_id] for node in record.nodes])
    if workspace_mib is None:
        workspace_mib = scratch / MIB
    weights, live = record.weight_bytes / MIB, activations.peak_bytes / MIB
    return Memory(weights_mib=weights, activations_mib=live, arena_mib=arena / MIB, workspace_mib=workspace_mib,
                  loading_mib=loading / MIB, peak_mib=weights + live + arena / MIB + workspace_mib + loading / MIB)


def _surplus(record: ModelRecord, activations: Activations, used: Sequence[Layout]) -> tuple[float, float, float]:
    """Bytes beyond weights and activations: the arena's surplus, the kernels' scratch, and what loading leaves in the heap."""
    if not runtime_named(record.flavour.runtime).keeps_arena:
        return 0.0, 0.0, 0.0
    if record.flavour.device == "cuda":
        operators = {kernel.op_type for kernel in record.kernels.values()}
        libraries = any(user in operator for operator in operators for user in CUDA_LIBRARY_USERS)
        return CUDA_ARENA * activations.peak_bytes, CUDA_LIBRARIES_BYTES if libraries else 0, 0.0
    return (activations.intermediate_peak_bytes, max((layout.scratch_bytes for layout in used), default=0),
            LOADED_BASE_BYTES + sum(layout.loading_bytes for layout in used))


class NodeBuffers(NamedTuple):
    """The buffers that a node of a run makes, and those that nobody reads after it.

    Attributes:
        made: intermediate ones, with their bytes.
        lent_bytes: of the outputs of the graph that it makes, which belong to the caller.
        freed: the names of intermediate ones.
    """

    made: list[tuple[str, int]]
    lent_bytes: int
    freed: list[str]


def buffers_of_run(record: ModelRecord, layouts: Mapping[str, Layout], apart: Collection[str] = ()) -> Iterator[NodeBuffers]:
    """The buffers of each node of a run, in linear time; `layouts` and `apart` as for `peak_memory`."""
    sizes = {name: tensor.bytes for name, tensor in record.inputs.items() if name not in apart}
    buffer_of = {name: name for name in sizes}  # tensor name -> the tensor that its buffer is named after
    kept = {*record.inputs, *record.outputs}
    readers = Counter(itertools.chain.from_iterable(node.inputs for node in record.nodes))
    pending = {name: readers[name] for name in sizes}  # reads of a buffer still to come, under any of its names

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
        output_bytes, renames, in_place, *_ = layouts[node.kernel_id]
        made, freed, lent_bytes = list[tuple[str, int]](), list[str](), 0
        may_share = renames or bool(in_place)
        for name, size in zip(node.outputs, output_bytes, strict=False):
            if name and name not in apart:
                source = taken_over(node, renames, in_place, size) if may_share and name not in kept else None
                if source is not None:
                    buffer_of[name] = source
                    pending[source] += readers[name]
                else:
                    buffer_of[name], sizes[name], pending[name] = name, size, readers[name]
                    if name in kept:
                        lent_bytes += size
                    else:
                        made.append((name, size))
                        if not readers[name]:
                            freed.append(name)
            may_share = False  # only the first output may
        for name in node.inputs:
            buffer = buffer_of.get(name)
            if buffer is not None:  # else a constant, or an optional input left out
                pending[buffer] -= 1
                if not pending[buffer] and buffer not in kept:
                    freed.append(buffer)
        yield NodeBuffers(made, lent_bytes, freed)


def live_activations(record: ModelRecord, layouts: Mapping[str, Layout] | None = None,
                     apart: Collection[str] = ()) -> Activations:
    """The most bytes of tensors alive while any node runs; `layouts` and `apart` as for `peak_memory`.

    Inputs and outputs of the graph belong to the caller: inputs live throughout, outputs from the node that makes them.
    """
    if layouts is None:
        layouts = {name: layout_of(kernel) for name, kernel in record.kernels.items()}
    lent = sum(tensor.bytes for name, tensor in record.inputs.items() if name not in apart)
    intermediate, peak, intermediate_peak = 0, lent, 0
    alive: dict[str, int] = {}
    for made, lent_bytes, freed in buffers_of_run(record, layouts, apart):
        alive.update(made)
        lent += lent_bytes
        intermediate += sum(size for _, size in made)
        peak, intermediate_peak = max(peak, lent + intermediate), max(intermediate_peak, intermediate)
        intermediate -= sum(alive.pop(name) for name in freed)
    return Activations(peak, intermediate_peak)


GPU_MEMORY_MIB = {"NVIDIA H200": 143771.0}  # by device name, as nvidia-smi shows it


def device_memory_mib(target: Target, machines: Sequence[Machine]) -> float | None:
    """The memory of a target's device in MiB; None where it is not known.

    Args:
        target: the target.
        machines: those that were measured; for a CPU the smallest of their memories is taken.
    """
    if target.flavour.device == "cpu":
        return min((1024 * machine.memory_gib for machine in machines), default=None)
    return GPU_MEMORY_MIB.get(target.device_name)


def memory_warnings(memory: Memory, there_mib: float | None) -> tuple[str, ...]:
    """A warning where a model's peak is more memory than its device has (`there_mib`)."""
    if there_mib is None or memory.peak_mib <= there_mib:
        return ()
    has = f"the device has {there_mib / 1024:.4g} GiB"
    if memory.least_mib > there_mib:
        return (f"it can't run there: it needs at least {memory.least_mib / 1024:.4g} GiB of memory, and {has}; the latency is "
                "one that no run has",)
    return (f"it does not fit in the memory: its peak is {memory.peak_mib / 1024:.4g} GiB, and {has}. It can run only if ONNX "
            f"Runtime gets along with less, {memory.least_mib / 1024:.4g} GiB at least",)
