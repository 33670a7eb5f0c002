"""Plans the tensor buffers of a run (sharing, life times, live bytes), and simulates their allocator.

The plan is ONNX Runtime's (onnxruntime/core/framework/allocation_planner.cc, 1.31): a buffer lives from the node that writes it
to the last node that reads it. A node that only renames a tensor (Reshape) shares its input's buffer. A node that can work in
place reuses an input that no later node reads. A dead buffer is kept for the next tensor of the same shape, if there is one,
and counts as alive until then. So a network of equal layers always holds one buffer for each shape in a layer.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hase.ort_analysis.cuda.kernel_choice import PART_COLUMNS, product_algorithm
from hase.records.attention import intermediate_bytes, kernel_grouped_query_sizes
from hase.records.kernel_record import DTYPE_BYTES, Kernel, ModelRecord, Node
from hase.records.operators import BLOCKED_DOMAIN, IN_PLACE_ON_CUDA, operator_row
from hase.utils.processes import MIB

ALIGNMENT = 256  # bytes, of a chunk's size and address
FIRST_REGION, LAST_REGION = MIB, 1024 * MIB  # DEFAULT_INITIAL_CHUNK_SIZE_BYTES, DEFAULT_MAX_POWER_OF_TWO_EXTEND_BYTES
REGION_BITS = 120  # of an address within a region: a region is smaller than that, so none touch
DEAD_BYTES = 128 * MIB  # DEFAULT_MAX_DEAD_BYTES_PER_CHUNK: a chunk with at least so much to spare is split
# Bytes that stay in the heap for each byte of a loaded weight: of a convolution, of one-byte integers, and of others.
LEFT_OF_CONV, LEFT_OF_INT8, LEFT_OF_OTHERS = 1.8, 1.0, 0.5
MMAPPED_BYTES = 32 * MIB  # weights of this size are mapped separately by glibc and released (mallopt(3), M_MMAP_THRESHOLD)
COPYING = {"BiasGelu", "FastGelu"}  # hold a copy of their output on a CPU
FEW_CHANNELS, SMALL_WINDOW = 4, 4  # up to which a convolution on CUDA takes no scratch
RECURRENT_MIB, GATES_FACTOR = 8.0, 1.6  # per direction, and a factor on the gates of all steps; chosen on 88 layers
FAST_REDUCTIONS = ("ReduceMean", "ReduceSum")
BufferKind = tuple[float, tuple[int, ...]]  # bytes of an element, and shape: one buffer fits all tensors of a kind


def chunk_bytes(size: int) -> int:
    """The bytes of the chunk that holds a tensor of `size` bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT or ALIGNMENT


class Arena:
    """Simulates ONNX Runtime's BFCArena, initially empty (onnxruntime/core/framework/bfc_arena.cc, 1.31).

    Regions are split into chunks. An allocation takes the smallest free chunk that is large enough; free neighbours are merged.
    Without a large enough chunk, the arena adds a region twice as large as the last, up to 1 GiB; for a larger tensor the size
    is doubled until it fits, and the next region is twice that. Regions are never released.

    Attributes:
        reserved_bytes: taken from the device.
        used_bytes: those that were ever in use. On a CPU only these cost memory, since a page counts once it is written.
    """

    def __init__(self) -> None:
        self.reserved_bytes = self.used_bytes = 0
        self._next_region_bytes = FIRST_REGION
        self._free: list[tuple[int, int]] = []  # size and address of the free chunks, the smallest first
        self._free_from: dict[int, int] = {}  # the sizes of the free chunks by their addresses
        self._free_up_to: dict[int, int] = {}  # the addresses of the free chunks by their ends
        self._ends: list[int] = []  # per region: the end of the part that was ever in use

    def allocate(self, size: int) -> tuple[int, int]:
        """Takes a chunk of at least `size` bytes; returns the handle for `free`."""
        size = chunk_bytes(size)
        whole, at = self._free.pop(self._find(size))
        end = at + whole
        del self._free_from[at], self._free_up_to[end]
        if whole >= 2 * size or whole - size >= DEAD_BYTES:
            self._add(at + size, end)
            whole = size
        self._use(at, at + size)
        return at, whole

    def use_scratch(self, size: int) -> None:
        """Takes a chunk of at least `size` bytes and frees it at once."""
        size = chunk_bytes(size)
        _, at = self._free[self._find(size)]
        self._use(at, at + size)

    def allocate_weights(self, sizes: Iterable[int]) -> None:
        """Takes chunks that are never freed, of at least these sizes (multiples of ALIGNMENT). `used_bytes` leaves them out."""
        free = self._free
        for size in sizes:
            whole, at = free.pop(self._find(size))
            if whole >= 2 * size or whole - size >= DEAD_BYTES:
                insort(free, (whole - size, at + size))
        self._free_from = {at: size for size, at in free}
        self._free_up_to = {at + size: at for size, at in free}

    def free(self, chunk: tuple[int, int]) -> None:
        """Frees a chunk."""
        start, size = chunk
        end = start + size
        if behind := self._free_from.pop(end, 0):
            del self._free[bisect_left(self._free, (behind, end))]
            end += behind
        if (before := self._free_up_to.pop(start, -1)) >= 0:
            del self._free[bisect_left(self._free, (self._free_from[before], before))]
            start = before
        self._add(start, end)

    def _find(self, size: int) -> int:
        """The index of the smallest free chunk of at least `size` bytes; without one, a region is added."""
        index = bisect_left(self._free, (size,))
        if index == len(self._free):
            self._extend(size)
            index = bisect_left(self._free, (size,))
        return index

    def _use(self, start: int, end: int) -> None:
        """Adds the bytes between two addresses to `used_bytes`, unless they were in use before."""
        region = start >> REGION_BITS
        if end > self._ends[region]:
            self.used_bytes += end - self._ends[region]
            self._ends[region] = end

    def _extend(self, size: int) -> None:
        """Adds a region with room for `size` bytes."""
        large_enough = size <= self._next_region_bytes
        while size > self._next_region_bytes:
            self._next_region_bytes *= 2
        start = len(self._ends) << REGION_BITS
        self._add(start, start + self._next_region_bytes)
        self._ends.append(start)
        self.reserved_bytes += self._next_region_bytes
        if large_enough:
            self._next_region_bytes = min(2 * self._next_region_bytes, LAST_REGION)

    def _add(self, start: int, end: int) -> None:
        """Adds a free chunk."""
        insort(self._free, (end - start, start))
        self._free_from[start], self._free_up_to[end] = end - start, start


class TensorBlock:
    """The block in which a session lays out a run's tensors in advance, from the second run of a shape on. Each tensor is
    placed in the smallest gap between live tensors that is large enough, else at the end
    (onnxruntime/core/framework/mem_pattern_planner.h)."""

    def __init__(self) -> None:
        self.size = 0
        self._alive: list[tuple[int, int]] = []  # start and end of each live tensor, ascending

    def allocate(self, size: int) -> tuple[int, int]:
        """Places a tensor of `size` bytes; returns the handle for `free`."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        at, smallest, end = self._alive[-1][1] if self._alive else 0, math.inf, 0
        for start, behind in self._alive:
            if size <= start - end < smallest:
                at, smallest = end, start - end
            end = max(end, behind)
        placed = at, at + size
        insort(self._alive, placed)
        self.size = max(self.size, at + size)
        return placed

    def free(self, placed: tuple[int, int]) -> None:
        """Frees the place of a tensor."""
        self._alive.remove(placed)


# Scratch that kernels take from the arena while they run.
#
# On a CPU few kernels take anything. On CUDA cuDNN's scratch was measured with 1,424 convolutions alone, each with an arena
# that takes no more than it is asked for (ONNX Runtime 1.31, cuDNN 9.19, an H100). A convolution with a window turns its
# tensors into another layout, and so takes as much as its input, weight and output together (median of 247 dense ones of
# images 1.0; of 204 in groups 1.0, a quarter more than 1.3). Pointwise and depthwise ones mostly take nothing (79 and 98 % of
# them), nor do most that cut an image into patches or have a small window over its three channels. What recurrent layers,
# reductions, Einsum and attention take was read off a hundred kernels in the same way.


def scratch_bytes(kernel: Kernel, device: str = "cpu") -> int:
    """The temporary memory of a kernel on a device (`cpu` or `cuda`), bytes."""
    return _cuda_scratch_bytes(kernel) if device == "cuda" else _cpu_scratch_bytes(kernel)


def _cpu_scratch_bytes(kernel: Kernel) -> int:
    """Scratch on a CPU: a transposed convolution holds the columns of one image before it adds them up (ONNX Runtime's
    conv_transpose.cc: col_buffer); a Gelu with a bias holds a copy (bias_gelu.cc: tmp_data)."""
    if kernel.op_type in COPYING:
        return kernel.outputs[0].bytes
    if kernel.op_type != "ConvTranspose" or len(kernel.inputs) < 2 or len(kernel.inputs[1].shape) < 3:
        return 0
    image, weights = kernel.inputs[0], kernel.inputs[1]
    per_pixel = math.prod(weights.shape[1:]) * (image.bytes // max(image.elements, 1))
    return per_pixel * math.prod(image.shape[2:])


def _cuda_scratch_bytes(kernel: Kernel) -> int:
    operator_class = operator_row(kernel.op_type).operator_class
    if operator_class == "convolution":
        return _convolution_bytes(kernel)
    if operator_class == "recurrent":
        return _recurrent_bytes(kernel)
    if sizes := kernel_grouped_query_sizes(kernel):  # the rotated queries, and a sum for each of them
        queries = sizes.batch * sizes.queries * sizes.heads
        return int(queries * (sizes.head_size * DTYPE_BYTES.get(kernel.dtype, 2) + DTYPE_BYTES["float32"]))
    if operator_row(kernel.op_type).cost == "attention":
        return intermediate_bytes(kernel.op_type, kernel.attributes, kernel.inputs)
    if kernel.op_type == "MatMulNBits" and (algorithm := product_algorithm(kernel)).startswith("dequantised"):
        columns = int(kernel.attributes.get("N", 0))
        if algorithm == "dequantised in parts":
            columns = min(columns, PART_COLUMNS)
        return int(columns * int(kernel.attributes.get("K", 0)) * DTYPE_BYTES.get(kernel.dtype, 2))
    if kernel.op_type == "Einsum":  # operands and result in another order
        return kernel.bytes_read + kernel.bytes_written
    if kernel.op_type.startswith("Reduce") and kernel.op_type not in FAST_REDUCTIONS and kernel.inputs:
        return int(kernel.inputs[0].elements * DTYPE_BYTES["float32"])
    return 0


def _convolution_bytes(kernel: Kernel) -> int:
    if len(kernel.inputs) < 2:
        return 0
    image, weight = kernel.inputs[:2]
    window, groups = weight.shape[2:], int(kernel.attributes.get("group", 1))
    if not window or max(window) == 1 or (groups > 1 and weight.shape[1] == 1):
        return 0
    patches = max(kernel.attributes.get("strides") or [1]) >= max(window)
    if image.shape[1] <= FEW_CHANNELS and (max(window) <= SMALL_WINDOW or patches):
        return 0
    return image.bytes + weight.bytes + kernel.outputs[0].bytes


def _recurrent_bytes(kernel: Kernel) -> int:
    if len(kernel.inputs) < 3 or len(kernel.inputs[0].shape) != 3 or len(kernel.inputs[2].shape) != 3:
        return 0
    (steps, rows, _), (directions, gates, _) = kernel.inputs[0].shape, kernel.inputs[2].shape
    gate_bytes = GATES_FACTOR * steps * rows * directions * gates * DTYPE_BYTES.get(kernel.dtype, 4)
    return int(RECURRENT_MIB * MIB * directions + sum(tensor.bytes for tensor in kernel.inputs[:3]) + gate_bytes)


class Activations(NamedTuple):
    """The peak of live tensors in a run, and the inputs and outputs, which belong to the caller."""

    peak_bytes: int
    caller_bytes: int


class Layout(NamedTuple):
    """How a kernel uses memory.

    Attributes:
        renames: whether its output is its first input under another name.
        in_place: indices of inputs that it may overwrite with its output.
        loading_bytes: what loading its weights leaves in the heap of a CPU's process.
    """

    output_bytes: tuple[int, ...]
    output_kinds: tuple[BufferKind, ...]
    renames: bool
    in_place: tuple[int, ...]
    scratch_bytes: int = 0
    loading_bytes: float = 0.0


def layout_of(kernel: Kernel, device: str = "cpu") -> Layout:
    """How a kernel uses memory on a device (`cpu` or `cuda`), in any model."""
    row = operator_row(kernel.op_type)
    in_place = row.in_place
    if device == "cuda":
        in_place = (0,) if kernel.op_type in IN_PLACE_ON_CUDA else ()
    elif kernel.domain == BLOCKED_DOMAIN and row.sum_input is not None:
        in_place = (row.sum_input,)
    return Layout(tuple(tensor.bytes for tensor in kernel.outputs),
                  tuple((DTYPE_BYTES.get(tensor.dtype, 4), tensor.shape) for tensor in kernel.outputs), not kernel.moves_data,
                  in_place, scratch_bytes(kernel, device), _loading_bytes(kernel) if device == "cpu" else 0.0)


def _loading_bytes(kernel: Kernel) -> float:
    """Bytes that stay in the heap of a CPU's process after a kernel's weights are loaded."""
    left_of_floats = LEFT_OF_CONV if "Conv" in kernel.op_type else LEFT_OF_OTHERS
    return sum(size * (LEFT_OF_INT8 if tensor.dtype in ("int8", "uint8") else left_of_floats)
               for tensor in kernel.inputs if tensor.constant and (size := tensor.bytes) < MMAPPED_BYTES)


class NodeBuffers(NamedTuple):
    """The buffers that a node of a run creates, and those that are dead after it. `created` are intermediate ones with their
    bytes; `caller_bytes` those of graph outputs that it writes, which belong to the caller."""

    created: list[tuple[str, int]]
    caller_bytes: int
    freed: list[str]


def buffers_of_run(record: ModelRecord, layouts: Mapping[str, Layout], excluded: Collection[str] = (),
                   keeps_dead: bool = True) -> list[NodeBuffers]:
    """The buffers of each node of a run, by the kernels' `layouts`.

    Args:
        excluded: tensors to leave out, since the caller counts them: the caches of a language model.
        keeps_dead: whether a dead buffer is kept for the next tensor of its shape, as ONNX Runtime's planner does.
    """
    return _Plan(record, layouts, frozenset(excluded), keeps_dead).nodes


def lay_out(store: Arena | TensorBlock, run: Sequence[NodeBuffers], scratch_bytes: Sequence[int] | None = None,
            factor: float = 1.0) -> None:
    """Allocates and frees the buffers of a run, node by node, with their sizes multiplied by `factor`. Scratch is only taken
    from an arena."""
    handles: dict[str, tuple[int, int]] = {}
    for (created, _, freed), scratch in zip(run, scratch_bytes or [0] * len(run), strict=True):
        for name, size in created:
            handles[name] = store.allocate(int(factor * size))
        if scratch and isinstance(store, Arena):
            store.use_scratch(scratch)
        for name in freed:
            store.free(handles.pop(name))


class _Plan:
    """Plans the buffers of a run, node by node."""

    def __init__(self, record: ModelRecord, layouts: Mapping[str, Layout], excluded: frozenset[str], keeps_dead: bool) -> None:
        self.nodes: list[NodeBuffers] = []
        self._excluded, self._keeps_dead = excluded, keeps_dead
        self._bytes = {name: tensor.bytes for name, tensor in record.inputs.items() if name not in excluded}
        self._buffer_of = {name: name for name in self._bytes}  # tensor name -> the tensor that its buffer is named after
        self._caller_tensors = {*record.inputs, *record.outputs}
        self._readers = Counter(itertools.chain.from_iterable(node.inputs for node in record.nodes))
        self._pending = {name: self._readers[name] for name in self._bytes}  # reads of a buffer still to come, by all its names
        self._kind_of: dict[str, BufferKind] = {}  # of intermediate buffers
        self._dead: dict[BufferKind, list[str]] = {}  # buffers kept for the next tensor of their kind, latest last
        self._last_use: dict[str, int] = {}  # the index of the last node that needs each intermediate buffer
        for index, node in enumerate(record.nodes):
            self._add(index, node, layouts[node.kernel_id])
        for buffer, index in self._last_use.items():
            self.nodes[index].freed.append(buffer)

    def _add(self, index: int, node: Node, layout: Layout) -> None:
        """Adds the next node of the run."""
        created, caller_bytes = list[tuple[str, int]](), 0
        outputs = zip(node.outputs, layout.output_bytes, layout.output_kinds, strict=False)
        for slot, (name, size, kind) in enumerate(outputs):
            if not name or name in self._excluded:
                continue
            if name in self._caller_tensors:
                self._assign(name, name, size)
                caller_bytes += size
                continue
            if slot == 0 and (source := self._reusable_input(node, layout, size)) is not None:
                self._buffer_of[name] = source
                self._pending[source] += self._readers[name]
            elif self._keeps_dead and kind[1] and (dead := self._dead.get(kind)):
                self._assign(name, dead.pop(), size)
            else:
                self._assign(name, name, size)
                self._kind_of[name] = kind
                created.append((name, size))
            self._use(self._buffer_of[name], index)
        for name in node.inputs:
            if name in self._buffer_of:  # otherwise a constant, or a missing optional input
                buffer = self._buffer_of[name]
                self._pending[buffer] -= 1
                self._use(buffer, index)
        self.nodes.append(NodeBuffers(created, caller_bytes, []))

    def _assign(self, name: str, buffer: str, size: int) -> None:
        """Gives a tensor a buffer that no other tensor uses."""
        self._buffer_of[name], self._bytes[buffer], self._pending[buffer] = buffer, size, self._readers[name]

    def _use(self, buffer: str, index: int) -> None:
        """Marks a buffer, if it is an intermediate one, as needed by a node."""
        if (kind := self._kind_of.get(buffer)) is not None:
            self._last_use[buffer] = index
            if not self._pending[buffer]:
                self._dead.setdefault(kind, []).append(buffer)

    def _reusable_input(self, node: Node, layout: Layout, size: int) -> str | None:
        """The input buffer that a node's first output of `size` bytes reuses; None if it needs its own."""
        if layout.renames:
            return self._buffer_of.get(node.inputs[0]) if node.inputs else None
        for slot in layout.in_place:
            if slot < len(node.inputs):
                buffer = self._buffer_of.get(node.inputs[slot])
                if (buffer is not None and buffer not in self._caller_tensors and self._pending[buffer] == 1
                        and self._bytes[buffer] == size):
                    return buffer
        return None


def layouts_of(record: ModelRecord, device: str = "cpu") -> dict[str, Layout]:
    """How the kernels of a model use memory on a device, by id."""
    return {name: layout_of(kernel, device) for name, kernel in record.kernels.items()}


def live_activations(record: ModelRecord, run: Sequence[NodeBuffers], excluded: Collection[str] = ()) -> Activations:
    """The bytes of live tensors in a run; `excluded` as for `buffers_of_run`. Inputs and outputs of the graph belong to the
    caller: inputs live throughout, outputs from the node that writes them."""
    caller_bytes = sum(tensor.bytes for name, tensor in record.inputs.items() if name not in excluded)
    live_bytes = peak_bytes = caller_bytes
    sizes: dict[str, int] = {}
    for created, output_bytes, freed in run:
        sizes |= created
        caller_bytes += output_bytes
        live_bytes += output_bytes + sum(size for _, size in created)
        peak_bytes = max(peak_bytes, live_bytes)
        live_bytes -= sum(sizes[name] for name in freed)
    return Activations(peak_bytes, caller_bytes)
