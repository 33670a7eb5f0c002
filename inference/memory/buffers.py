"""The tensor buffers of a run (shared buffers, life times, live bytes), and their allocator.

It follows ONNX Runtime's allocation plan (onnxruntime/core/framework/allocation_planner.cc, 1.31): a buffer lives from the node
that writes it to the last node that reads it. A node that only renames a tensor (Reshape) shares its input's buffer. A node
that can work in place reuses an input that no later node reads. A dead buffer is kept for the next tensor of the same shape, if
there is one, and counts as alive until then. So a network of equal layers always holds one buffer for each shape in a layer.
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

MIB = 2**20
ALIGNED = 256  # bytes
FIRST_REGION, LAST_REGION = MIB, 1024 * MIB  # DEFAULT_INITIAL_CHUNK_SIZE_BYTES, DEFAULT_MAX_POWER_OF_TWO_EXTEND_BYTES
REGION_BITS = 120  # of an address within a region: a region is smaller than that, so none touch
DEAD_BYTES = 128 * MIB  # DEFAULT_MAX_DEAD_BYTES_PER_CHUNK: a chunk with at least so much to spare is split
# bytes that stay in the heap for each byte of a weight: of a convolution, of one-byte integers, and of others
ONCE_LOADED_CONV, ONCE_LOADED_INT8, ONCE_LOADED = 1.8, 1.0, 0.5
MMAPPED_BYTES = 32 * MIB  # weights of this size are mapped separately by glibc and released (mallopt(3), M_MMAP_THRESHOLD)
COPYING = {"BiasGelu", "FastGelu"}  # on a CPU
FEW_CHANNELS, SMALL_WINDOW = 4, 4
RECURRENT_MIB, GATES_TIMES = 8.0, 1.6  # per direction, and a factor on the gates of all steps; chosen on 88 layers
FAST_REDUCTIONS = ("ReduceMean", "ReduceSum")
Kind = tuple[float, tuple[int, ...]]  # bytes of an element, and shape: one buffer fits all tensors of a kind


def aligned(size: int) -> int:
    """The bytes of the chunk that a tensor of `size` bytes takes."""
    return -(-size // ALIGNED) * ALIGNED or ALIGNED


class Arena:
    """Simulates ONNX Runtime's BFCArena, initially empty (onnxruntime/core/framework/bfc_arena.cc, 1.31).

    Regions are split into chunks. An allocation takes the smallest free chunk that is large enough; free neighbours are merged.
    Without a large enough chunk, the arena adds a region twice as large as the last, up to 1 GiB; for a larger tensor the size
    is doubled until it fits, and the next region is twice that. Regions are never released.

    Attributes:
        taken: bytes taken from the device.
        used: bytes of `taken` that were ever in use. On a CPU only these cost memory, since a page counts once it is written.
    """

    def __init__(self) -> None:
        self.taken = self.used = 0
        self._next = FIRST_REGION
        self._free: list[tuple[int, int]] = []  # size and address of the free chunks, the smallest first
        self._free_from: dict[int, int] = {}  # the sizes of the free chunks by their addresses
        self._free_up_to: dict[int, int] = {}  # the addresses of the free chunks by their ends
        self._ends: list[int] = []  # per region: the end of the part that was ever in use

    def allocate(self, size: int) -> tuple[int, int]:
        """Takes a chunk of at least `size` bytes; returns the handle for `free`."""
        size = aligned(size)
        whole, at = self._free.pop(self._find(size))
        end = at + whole
        del self._free_from[at], self._free_up_to[end]
        if whole >= 2 * size or whole - size >= DEAD_BYTES:
            self._add(at + size, end)
            whole = size
        self._use(at, at + size)
        return at, whole

    def lend(self, size: int) -> None:
        """Takes a chunk of at least `size` bytes and frees it at once, as scratch."""
        size = aligned(size)
        _, at = self._free[self._find(size)]
        self._use(at, at + size)

    def keep(self, sizes: Iterable[int]) -> None:
        """Takes chunks of at least these sizes, multiples of ALIGNED, that are never freed, such as weights on CUDA; `used`
        leaves them out.
        """
        free = self._free
        for size in sizes:
            whole, at = free.pop(self._find(size))
            if whole >= 2 * size or whole - size >= DEAD_BYTES:
                insort(free, (whole - size, at + size))
        self._free_from = {at: size for size, at in free}
        self._free_up_to = {at + size: at for size, at in free}

    def free(self, taken: tuple[int, int]) -> None:
        """Frees a chunk."""
        start, size = taken
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
        """Counts the bytes of a region that were never in use before."""
        region = start >> REGION_BITS
        if end > self._ends[region]:
            self.used += end - self._ends[region]
            self._ends[region] = end

    def _extend(self, size: int) -> None:
        """Adds a region."""
        as_usual = size <= self._next
        while size > self._next:
            self._next *= 2
        start = len(self._ends) << REGION_BITS
        self._add(start, start + self._next)
        self._ends.append(start)
        self.taken += self._next
        if as_usual:
            self._next = self._next * 2 if self._next * 2 < LAST_REGION else LAST_REGION

    def _add(self, start: int, end: int) -> None:
        """Adds a free chunk."""
        insort(self._free, (end - start, start))
        self._free_from[start], self._free_up_to[end] = end - start, start


class Block:
    """The block in which a session lays out a run's tensors in advance, from the second run of a shape on. Each tensor is
    placed in the smallest gap between live tensors that is large enough, else at the end
    (onnxruntime/core/framework/mem_pattern_planner.h).
    """

    def __init__(self) -> None:
        self.size = 0
        self._alive: list[tuple[int, int]] = []  # start and end of each tensor, in the order of their places

    def allocate(self, size: int) -> tuple[int, int]:
        """Places a tensor of `size` bytes; returns the handle for `free`."""
        size = -(-size // ALIGNED) * ALIGNED
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
        """Ends the life of a tensor."""
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
    return _on_cuda(kernel) if device == "cuda" else _on_cpu(kernel)


def _on_cpu(kernel: Kernel) -> int:
    """Scratch on a CPU. A transposed convolution holds the columns of one image before it adds them up (ONNX Runtime's
    conv_transpose.cc: col_buffer); a Gelu with a bias holds a copy (bias_gelu.cc: tmp_data).
    """
    if kernel.op_type in COPYING:
        return kernel.outputs[0].bytes
    if kernel.op_type != "ConvTranspose" or len(kernel.inputs) < 2 or len(kernel.inputs[1].shape) < 3:
        return 0
    image, weights = kernel.inputs[0], kernel.inputs[1]
    per_pixel = math.prod(weights.shape[1:]) * (image.bytes // max(image.elements, 1))
    return per_pixel * math.prod(image.shape[2:])


def _on_cuda(kernel: Kernel) -> int:
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
    of_gates = GATES_TIMES * steps * rows * directions * gates * DTYPE_BYTES.get(kernel.dtype, 4)
    return int(RECURRENT_MIB * MIB * directions + sum(tensor.bytes for tensor in kernel.inputs[:3]) + of_gates)


class Activations(NamedTuple):
    """Peak bytes of live activations and of intermediate ones alone; bytes of inputs and outputs, which belong to the caller.
    """

    peak_bytes: int
    intermediate_peak_bytes: int
    lent_bytes: int


class Layout(NamedTuple):
    """How a kernel uses memory.

    It has bytes and kind of each output, whether the kernel only renames its first input, the inputs that it may overwrite in
    place, its scratch, and what loading its weights leaves in the heap of a CPU's process.
    """

    output_bytes: tuple[int, ...]
    output_kinds: tuple[Kind, ...]
    renames: bool
    in_place: tuple[int, ...]
    scratch_bytes: int = 0
    loading_bytes: float = 0.0


def layout_of(kernel: Kernel, device: str = "cpu") -> Layout:
    """How a kernel uses memory on a device (`cpu` or `cuda`); independent of the model."""
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
    of_floats = ONCE_LOADED_CONV if "Conv" in kernel.op_type else ONCE_LOADED
    return sum(size * (ONCE_LOADED_INT8 if tensor.dtype in ("int8", "uint8") else of_floats)
               for tensor in kernel.inputs if tensor.constant and (size := tensor.bytes) < MMAPPED_BYTES)


class NodeBuffers(NamedTuple):
    """The buffers that a node of a run creates, and those that are dead after it.

    `made` are intermediate ones with their bytes; `lent_bytes` are graph outputs that it writes, which belong to the caller.
    """

    made: list[tuple[str, int]]
    lent_bytes: int
    freed: list[str]


def buffers_of_run(record: ModelRecord, layouts: Mapping[str, Layout], apart: Collection[str] = (),
                   keeps: bool = True) -> list[NodeBuffers]:
    """The buffers of each node of a run.

    Args:
        apart: tensors to leave out, since the caller counts them: the caches of a language model.
        keeps: whether a dead buffer is kept for the next tensor of its shape, as ONNX Runtime's planner does.
    """
    planned = _Plan(record, frozenset(apart), keeps)
    planned.add(record.nodes, layouts)
    for buffer, last in planned.last_use.items():
        planned.nodes[last].freed.append(buffer)
    return planned.nodes


def lay_out(store: Arena | Block, run: Sequence[NodeBuffers], scratch_bytes: Sequence[int] | None = None,
            times: float = 1.0) -> None:
    """Allocates and frees the buffers of a run, node by node, with their sizes multiplied by `times`. Scratch lies in an arena
    alone.
    """
    handles: dict[str, tuple[int, int]] = {}
    for (made, _, freed), scratch in zip(run, [0] * len(run) if scratch_bytes is None else scratch_bytes, strict=True):
        for name, size in made:
            handles[name] = store.allocate(int(times * size))
        if scratch and isinstance(store, Arena):
            store.lend(scratch)
        for name in freed:
            store.free(handles.pop(name))


class _Plan:
    """Plans the buffers of a run, node by node. `last_use`: the index of the last node that needs each intermediate buffer."""

    def __init__(self, record: ModelRecord, apart: frozenset[str], keeps: bool) -> None:
        self.nodes: list[NodeBuffers] = []
        self.last_use: dict[str, int] = {}
        self._apart, self._keeps = apart, keeps
        self._bytes = {name: tensor.bytes for name, tensor in record.inputs.items() if name not in apart}
        self._buffer_of = {name: name for name in self._bytes}  # tensor name -> the tensor that its buffer is named after
        self._lasting = {*record.inputs, *record.outputs}
        self._readers = Counter(itertools.chain.from_iterable(node.inputs for node in record.nodes))
        self._pending = {name: self._readers[name] for name in self._bytes}  # reads of a buffer still to come, by all its names
        self._kind_of: dict[str, Kind] = {}
        self._unread: dict[Kind, list[str]] = {}  # dead buffers kept for the next tensor of their kind, latest last

    def add(self, nodes: Iterable[Node], layouts: Mapping[str, Layout]) -> None:
        """Adds the nodes of a run, in order."""
        buffer_of, pending, kind_of = self._buffer_of, self._pending, self._kind_of
        for index, node in enumerate(nodes):
            layout, made, lent_bytes = layouts[node.kernel_id], list[tuple[str, int]](), 0
            outputs = zip(node.outputs, layout.output_bytes, layout.output_kinds, strict=False)
            for slot, (name, size, kind) in enumerate(outputs):
                if not name or name in self._apart:
                    continue
                if name in self._lasting:
                    self._own(name, name, size)
                    lent_bytes += size
                    continue
                if slot == 0 and (source := self._shared(node, layout, size)) is not None:
                    buffer_of[name] = source
                    pending[source] += self._readers[name]
                elif self._keeps and kind[1] and (unread := self._unread.get(kind)):
                    self._own(name, unread.pop(), size)
                else:
                    self._own(name, name, size)
                    kind_of[name] = kind
                    made.append((name, size))
                if (buffer := buffer_of[name]) in kind_of:
                    self._used(buffer, index)
            for name in node.inputs:
                if name in buffer_of:  # otherwise a constant, or a missing optional input
                    buffer = buffer_of[name]
                    pending[buffer] -= 1
                    if buffer in kind_of:
                        self._used(buffer, index)
            self.nodes.append(NodeBuffers(made, lent_bytes, []))

    def _own(self, name: str, buffer: str, size: int) -> None:
        """Gives a tensor its own buffer."""
        self._buffer_of[name], self._bytes[buffer], self._pending[buffer] = buffer, size, self._readers[name]

    def _used(self, buffer: str, index: int) -> None:
        """Marks an intermediate buffer as needed by a node."""
        self.last_use[buffer] = index
        if not self._pending[buffer]:
            self._unread.setdefault(self._kind_of[buffer], []).append(buffer)

    def _shared(self, node: Node, layout: Layout, size: int) -> str | None:
        """The input buffer that a node's first output of `size` bytes reuses; None if it needs its own."""
        if layout.renames:
            return self._buffer_of.get(node.inputs[0]) if node.inputs else None
        for slot in layout.in_place:
            if slot < len(node.inputs):
                buffer = self._buffer_of.get(node.inputs[slot])
                if (buffer is not None and buffer not in self._lasting and self._pending[buffer] == 1
                        and self._bytes[buffer] == size):
                    return buffer
        return None


def layouts_of(record: ModelRecord, device: str = "cpu") -> dict[str, Layout]:
    """How the kernels of a model use memory on a device, by id."""
    return {name: layout_of(kernel, device) for name, kernel in record.kernels.items()}


def live_activations(record: ModelRecord, run: Sequence[NodeBuffers], apart: Collection[str] = ()) -> Activations:
    """The peak bytes of live tensors in a run; `apart` as for `buffers_of_run`.

    Inputs and outputs of the graph belong to the caller: inputs live throughout, outputs from the node that writes them.
    """
    lent = sum(tensor.bytes for name, tensor in record.inputs.items() if name not in apart)
    intermediate, peak, intermediate_peak = 0, lent, 0
    alive: dict[str, int] = {}
    for made, lent_bytes, freed in run:
        lent += lent_bytes
        for name, size in made:
            alive[name] = size
            intermediate += size
        if made or lent_bytes:
            peak, intermediate_peak = max(peak, lent + intermediate), max(intermediate_peak, intermediate)
        for name in freed:
            intermediate -= alive.pop(name)
    return Activations(peak, intermediate_peak, lent)
