"""The buffers of a run: which tensors share one, how long each lives, and how many bytes of them are alive at once.

It counts as ONNX Runtime's allocation plan does (onnxruntime/core/framework/allocation_planner.cc, 1.31): a buffer lives from
the node that makes it to the last node that reads it; a node that only renames a tensor (Reshape) shares its input's buffer; a
node that may work in place takes over an input that no later node reads. And a buffer that nobody reads any more is kept for
the next tensor of the same shape, if there is one: it then lives on between the two. So a network of equal layers holds a
buffer for each shape in a layer throughout.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hase.inference.core.arena import MIB, Arena, Block
from hase.inference.core.scratch import scratch_bytes
from hase.records.kernel_record import DTYPE_BYTES, Kernel, ModelRecord, Node
from hase.records.operators import IN_PLACE_ON_CUDA, operator_row

BLOCKED_DOMAIN = "com.microsoft.nchwc"
# bytes that stay in the heap for each byte of a weight: of a convolution, of one-byte integers, and of others
ONCE_LOADED_CONV, ONCE_LOADED_INT8, ONCE_LOADED = 1.8, 1.0, 0.5
MMAPPED_BYTES = 32 * MIB  # of a weight: glibc maps those apart and gives them back (mallopt(3), M_MMAP_THRESHOLD)
Kind = tuple[float, tuple[int, ...]]  # bytes of an element, and shape: one buffer fits all tensors of a kind


class Activations(NamedTuple):
    """The most bytes alive while any node runs, of all activations and of the intermediate ones alone; and bytes of the inputs
    and outputs, which belong to the caller."""

    peak_bytes: int
    intermediate_peak_bytes: int
    lent_bytes: int


class Layout(NamedTuple):
    """How a kernel uses memory: bytes and kind of each output, whether it only renames its first input, the inputs in whose
    buffers it may work, its scratch, and what loading its weights leaves in the heap of a CPU's process."""

    output_bytes: tuple[int, ...]
    output_kinds: tuple[Kind, ...]
    renames: bool
    in_place: tuple[int, ...]
    scratch_bytes: int = 0
    loading_bytes: float = 0.0


def layout_of(kernel: Kernel, device: str = "cpu") -> Layout:
    """How a kernel uses memory on a device (`cpu` or `cuda`); the same in every model that holds it."""
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
    """What loading a kernel's weights leaves in the heap of a CPU's process."""
    of_floats = ONCE_LOADED_CONV if "Conv" in kernel.op_type else ONCE_LOADED
    return sum(size * (ONCE_LOADED_INT8 if tensor.dtype in ("int8", "uint8") else of_floats)
               for tensor in kernel.inputs if tensor.constant and (size := tensor.bytes) < MMAPPED_BYTES)


class NodeBuffers(NamedTuple):
    """The buffers that a node of a run makes, and those that nobody needs after it.

    Attributes:
        made: intermediate ones, with their bytes.
        lent_bytes: of the outputs of the graph that it makes, which belong to the caller.
        freed: the names of intermediate ones.
    """

    made: list[tuple[str, int]]
    lent_bytes: int
    freed: list[str]


def buffers_of_run(record: ModelRecord, layouts: Mapping[str, Layout], apart: Collection[str] = (),
                   keeps: bool = True) -> list[NodeBuffers]:
    """The buffers of each node of a run.

    Args:
        record: the model.
        layouts: of its kernels by id.
        apart: tensors that are left out, since the caller counts them: the caches of a language model.
        keeps: whether a buffer is kept for the next tensor of its shape, as ONNX Runtime's planner does it.
    """
    planned = _Plan(record, frozenset(apart), keeps)
    for place, node in enumerate(record.nodes):
        planned.add(place, node, layouts[node.kernel_id])
    for buffer, place in planned.last_use.items():
        planned.nodes[place].freed.append(buffer)
    return planned.nodes


def lay_out(store: Arena | Block, run: Iterable[NodeBuffers], scratch_bytes: Iterable[int], times: float = 1.0) -> None:
    """Allocates the buffers of a run, node by node, in an arena or a block, and frees them.

    Args:
        store: where.
        run: the buffers of each node.
        scratch_bytes: what each node takes while it runs.
        times: how many times as large as in `run` the buffers are.
    """
    places: dict[str, tuple[int, int]] = {}
    for buffers, scratch in zip(run, scratch_bytes, strict=True):
        for name, size in buffers.made:
            places[name] = store.allocate(int(times * size))
        if scratch:
            store.free(store.allocate(scratch))
        for name in buffers.freed:
            store.free(places.pop(name))


class _Plan:
    """The buffers of a run, node by node.

    Attributes:
        nodes: of each node that was added; nothing is freed yet.
        last_use: of each intermediate buffer: the place of the last node that needs it.
    """

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
        self._unread: dict[Kind, list[str]] = {}  # buffers that are kept for the next tensor of their kind, the latest last

    def add(self, place: int, node: Node, layout: Layout) -> None:
        """Adds the next node."""
        buffers = NodeBuffers([], 0, [])
        for slot, (name, size, kind) in enumerate(zip(node.outputs, layout.output_bytes, layout.output_kinds, strict=False)):
            if name and name not in self._apart:
                source = self._shared(node, layout, size) if slot == 0 and name not in self._lasting else None
                if source is not None:
                    self._buffer_of[name] = source
                    self._pending[source] += self._readers[name]
                elif name in self._lasting:
                    self._own(name, name, size)
                    buffers = buffers._replace(lent_bytes=buffers.lent_bytes + size)
                elif self._keeps and kind[1] and (unread := self._unread.get(kind)):
                    self._own(name, unread.pop(), size)
                else:
                    self._own(name, name, size)
                    self._kind_of[name] = kind
                    buffers.made.append((name, size))
                self._used(self._buffer_of[name], place)
        for name in node.inputs:
            buffer = self._buffer_of.get(name)
            if buffer is not None:  # else a constant, or an optional input left out
                self._pending[buffer] -= 1
                self._used(buffer, place)
        self.nodes.append(buffers)

    def _own(self, name: str, buffer: str, size: int) -> None:
        """Gives a tensor a buffer that no other one uses."""
        self._buffer_of[name], self._bytes[buffer], self._pending[buffer] = buffer, size, self._readers[name]

    def _used(self, buffer: str, place: int) -> None:
        """A node needs a buffer, perhaps as the last one."""
        if buffer in self._kind_of:
            self.last_use[buffer] = place
            if not self._pending[buffer]:
                self._unread.setdefault(self._kind_of[buffer], []).append(buffer)

    def _shared(self, node: Node, layout: Layout, size: int) -> str | None:
        """The buffer that a node's first output of `size` bytes shares with an input; None where it needs its own."""
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
    """The most bytes of tensors alive while any node runs.

    Inputs and outputs of the graph belong to the caller: inputs live throughout, outputs from the node that makes them.

    Args:
        record: the model.
        run: the buffers of its nodes.
        apart: as for `buffers_of_run`.
    """
    lent = sum(tensor.bytes for name, tensor in record.inputs.items() if name not in apart)
    intermediate, peak, intermediate_peak = 0, lent, 0
    alive: dict[str, int] = {}
    for made, lent_bytes, freed in run:
        alive.update(made)
        lent += lent_bytes
        intermediate += sum(size for _, size in made)
        peak, intermediate_peak = max(peak, lent + intermediate), max(intermediate_peak, intermediate)
        intermediate -= sum(alive.pop(name) for name in freed)
    return Activations(peak, intermediate_peak, lent)
