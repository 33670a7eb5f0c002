"""ONNX Runtime's arena: which regions of memory it takes from the device for a sequence of allocations, and how much of them is
written to; and the block in which a session lays out the tensors of a run beforehand.

As its BFCArena does it (onnxruntime/core/framework/bfc_arena.cc, 1.31): a region is split into chunks, of which the smallest
that is free and large enough is taken, and neighbours that are free are merged. Where no chunk is large enough, a further
region is taken, twice as large as the one before, up to 1 GiB; for a larger tensor it is doubled until that fits, and the next
region is as large once more. What was taken is never given back.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

MIB = 2**20
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
        used: bytes of these that were ever in use: a region of a CPU costs no more, since a page counts once it is written.
    """

    def __init__(self) -> None:
        self.taken = self.used = 0
        self._next, self._regions = FIRST_REGION, 0
        self._free: list[tuple[int, int, int]] = []  # the free chunks, the smallest first
        self._chunks: dict[tuple[int, int], _Chunk] = {}  # by region and start
        self._ends: list[int] = []  # of each region: where what was ever in use of it ends

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
        if (beyond := start + size - self._ends[region]) > 0:
            self.used, self._ends[region] = self.used + beyond, start + size
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
        self._ends.append(0)
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


class Block:
    """The block in which a session lays out the tensors of a run beforehand, from the second run of a shape on: each lies in
    the smallest gap between those alive that is large enough, else behind them (onnxruntime/core/framework/
    mem_pattern_planner.h).

    Attributes:
        size: bytes of it.
    """

    def __init__(self) -> None:
        self.size = 0
        self._alive: list[tuple[int, int]] = []  # start and end of each tensor, in the order of their places

    def allocate(self, size: int) -> tuple[int, int]:
        """Places a tensor of `size` bytes; returns what `free` takes."""
        size = -(-size // ALIGNED) * ALIGNED
        at, smallest, end = self._alive[-1][1] if self._alive else 0, math.inf, 0
        for start, behind in self._alive:
            if size <= start - end < smallest:
                at, smallest = end, start - end
            end = max(end, behind)
        placed = at, at + size
        bisect.insort(self._alive, placed)
        self.size = max(self.size, at + size)
        return placed

    def free(self, placed: tuple[int, int]) -> None:
        """Ends the life of a tensor."""
        self._alive.remove(placed)
