"""ONNX Runtime's arena on a GPU: which regions of memory it takes from the device for a sequence of allocations, and for a run
of a language model.

As its BFCArena does it (onnxruntime/core/framework/bfc_arena.cc, 1.31): a region is split into chunks, of which the smallest
that is free and large enough is taken, and neighbours that are free are merged. Where no chunk is large enough, a further
region is taken, twice as large as the one before, up to 1 GiB; for a larger tensor it is doubled until that fits, and the next
region is as large once more. What was taken is never given back.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.core.memory import MIB, buffers_of_run, layout_of
from inference.llm.dimensions import DecoderFile
from records.attention import attended_by
from records.kernel_record import DTYPE_BYTES, Kernel, ModelRecord
from runtimes.ort.cuda.language_kernels import PART_COLUMNS, product_algorithm

ALIGNED = 256  # bytes
FIRST_REGION, LAST_REGION = MIB, 1024 * MIB  # DEFAULT_INITIAL_CHUNK_SIZE_BYTES, DEFAULT_MAX_POWER_OF_TWO_EXTEND_BYTES
DEAD_BYTES = 128 * MIB  # DEFAULT_MAX_DEAD_BYTES_PER_CHUNK: a chunk with at least so much to spare is split


@dataclass
class _Chunk:
    """A part of a region: its start and its size."""

    region: int
    start: int
    size: int
    is_free: bool = True
    before: _Chunk | None = field(default=None, repr=False)
    after: _Chunk | None = field(default=None, repr=False)

    @property
    def order(self) -> tuple[int, int, int]:
        return self.size, self.region, self.start


class Arena:
    """An arena that is empty at first.

    Attributes:
        taken: bytes that it took from the device.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._next, self._regions = FIRST_REGION, 0
        self._free: list[tuple[int, int, int]] = []  # the free chunks, the smallest first
        self._chunks: dict[tuple[int, int], _Chunk] = {}  # by region and start

    def allocate(self, size: int) -> tuple[int, int]:
        """Takes a chunk of at least `size` bytes; returns what `free` takes."""
        size = max(-(-size // ALIGNED) * ALIGNED, ALIGNED)
        place = bisect.bisect_left(self._free, (size, -1, -1))
        if place == len(self._free):
            self._extend(size)
            place = bisect.bisect_left(self._free, (size, -1, -1))
        _, region, start = self._free.pop(place)
        chunk = self._chunks[region, start]
        chunk.is_free = False
        if chunk.size >= 2 * size or chunk.size - size >= DEAD_BYTES:
            rest = _Chunk(region, start + size, chunk.size - size, before=chunk, after=chunk.after)
            if chunk.after:
                chunk.after.before = rest
            chunk.size, chunk.after = size, rest
            self._add(rest)
        return region, start

    def free(self, taken: tuple[int, int]) -> None:
        """Gives a chunk back to the arena."""
        chunk = self._chunks[taken]
        chunk.is_free = True
        if chunk.after and chunk.after.is_free:
            self._free.remove(chunk.after.order)
            self._join(chunk, chunk.after)
        if chunk.before and chunk.before.is_free:
            before = chunk.before
            self._free.remove(before.order)
            self._join(before, chunk)
            chunk = before
        self._add(chunk)

    def _extend(self, size: int) -> None:
        """Takes a further region."""
        as_usual = size <= self._next
        while size > self._next:
            self._next *= 2
        self._add(_Chunk(self._regions, 0, self._next))
        self._regions += 1
        self.taken += self._next
        if as_usual:
            self._next = self._next * 2 if self._next * 2 < LAST_REGION else LAST_REGION

    def _add(self, chunk: _Chunk) -> None:
        self._chunks[chunk.region, chunk.start] = chunk
        bisect.insort(self._free, chunk.order)

    def _join(self, first: _Chunk, second: _Chunk) -> None:
        """Makes one chunk of two neighbours."""
        del self._chunks[second.region, second.start]
        first.size, first.after = first.size + second.size, second.after
        if second.after:
            second.after.before = first


def weight_bytes_of(record: ModelRecord) -> Mapping[str, int]:
    """The constants that nodes on the GPU read, in the order in which they first do, with their bytes."""
    weights: dict[str, int] = {}
    for node in record.nodes:
        if node.provider == "cuda":
            weights |= {name: tensor.bytes for name, tensor in zip(node.inputs, record.kernel_of(node).inputs, strict=False)
                        if tensor.constant and name not in weights}
    return weights


def scratch_bytes(kernel: Kernel) -> int:
    """What a kernel takes while it runs: attention the rotated queries and a sum for each of them, a product with a quantised
    matrix that is dequantised first, this matrix or a part of its columns."""
    if sizes := attended_by(kernel):
        queries = sizes.batch * sizes.queries * sizes.heads
        return int(queries * (sizes.head_size * DTYPE_BYTES.get(kernel.dtype, 2) + DTYPE_BYTES["float32"]))
    if kernel.op_type == "MatMulNBits" and (algorithm := product_algorithm(kernel)).startswith("dequantised"):
        columns = int(kernel.attributes.get("N", 0))
        if algorithm == "dequantised in parts":
            columns = min(columns, PART_COLUMNS)
        return int(columns * int(kernel.attributes.get("K", 0)) * DTYPE_BYTES.get(kernel.dtype, 2))
    return 0


class Taken(NamedTuple):
    """Bytes that the arenas of a session, and of onnxruntime-genai, took from the device."""

    session: int
    genai: int


def taken_bytes(record: ModelRecord, file: DecoderFile, shares_cache: bool, times: float = 1.0) -> Taken:
    """What arenas hold after a run: weights and intermediate tensors lie in the session's; caches, the other inputs, and logits
    in that of onnxruntime-genai.

    Args:
        record: of the run.
        file: of the model.
        shares_cache: whether a run writes into the caches that it reads.
        times: how many times as many sequences run as in the record.
    """
    session, genai, apart = Arena(), Arena(), {*file.caches, *file.presents}
    for size in weight_bytes_of(record).values():
        session.allocate(size)
    presents = () if shares_cache else file.presents
    for tensors, names in ((record.inputs, file.caches), (record.outputs, presents),
                           *((tensors, tuple(name for name in tensors if name not in apart))
                             for tensors in (record.inputs, record.outputs))):
        for name in names:
            if name in tensors:
                genai.allocate(int(times * tensors[name].bytes))
    layouts = {name: layout_of(kernel) for name, kernel in record.kernels.items()}
    places: dict[str, tuple[int, int]] = {}
    for node, (made, _, freed) in zip(record.nodes, buffers_of_run(record, layouts, apart), strict=True):
        kernel = record.kernel_of(node)
        places |= {name: session.allocate(int(times * size)) for name, size in made}
        if scratch := scratch_bytes(kernel):
            session.free(session.allocate(int(times * scratch) if attended_by(kernel) else scratch))
        for name in freed:
            session.free(places.pop(name))
    return Taken(session.taken, genai.taken)
