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
from collections.abc import Iterable

MIB = 2**20
ALIGNED = 256  # bytes
FIRST_REGION, LAST_REGION = MIB, 1024 * MIB  # DEFAULT_INITIAL_CHUNK_SIZE_BYTES, DEFAULT_MAX_POWER_OF_TWO_EXTEND_BYTES
REGION = 2**120  # from the address of a region to that of the next: more than any region has, so no two touch
DEAD_BYTES = 128 * MIB  # DEFAULT_MAX_DEAD_BYTES_PER_CHUNK: a chunk with at least so much to spare is split


class Arena:
    """An arena that is empty at first.

    Attributes:
        taken: bytes that it took from the device.
        used: bytes of these that were ever in use: a region of a CPU costs no more, since a page counts once it is written.
    """

    def __init__(self) -> None:
        self.taken = self.used = 0
        self._next = FIRST_REGION
        self._free: list[tuple[int, int]] = []  # size and address of the free chunks, the smallest first
        self._free_from: dict[int, int] = {}  # the sizes of the free chunks by their addresses
        self._free_up_to: dict[int, int] = {}  # the addresses of the free chunks by their ends
        self._ends: list[int] = []  # of each region: where what was ever in use of it ends

    def allocate(self, size: int) -> tuple[int, int]:
        """Takes a chunk of at least `size` bytes; returns what `free` takes."""
        size = -(-size // ALIGNED) * ALIGNED or ALIGNED
        free = self._free
        place = bisect.bisect_left(free, (size,))
        if place == len(free):
            self._extend(size)
            place = bisect.bisect_left(free, (size,))
        whole, at = free.pop(place)
        end = at + whole
        del self._free_from[at], self._free_up_to[end]
        if whole >= 2 * size or whole - size >= DEAD_BYTES:
            self._add(at + size, end)
            whole = size
        region = at // REGION
        if at + size > self._ends[region]:
            self.used += at + size - self._ends[region]
            self._ends[region] = at + size
        return at, whole

    def keep(self, sizes: Iterable[int]) -> None:
        """Takes chunks of at least these sizes that are never given back, as weights are."""
        free, ends = self._free, self._ends
        for size in sizes:
            size = -(-size // ALIGNED) * ALIGNED or ALIGNED
            place = bisect.bisect_left(free, (size,))
            if place == len(free):
                self._extend(size)
                place = bisect.bisect_left(free, (size,))
            whole, at = free.pop(place)
            end = at + size
            if whole >= 2 * size or whole - size >= DEAD_BYTES:
                bisect.insort(free, (whole - size, end))
            region = at // REGION
            if end > ends[region]:
                self.used += end - ends[region]
                ends[region] = end
        self._free_from = {at: size for size, at in free}
        self._free_up_to = {at + size: at for size, at in free}

    def free(self, taken: tuple[int, int]) -> None:
        """Gives a chunk back to the arena."""
        start, size = taken
        end = start + size
        if behind := self._free_from.pop(end, 0):
            del self._free[bisect.bisect_left(self._free, (behind, end))]
            end += behind
        if (before := self._free_up_to.pop(start, -1)) >= 0:
            del self._free[bisect.bisect_left(self._free, (self._free_from[before], before))]
            start = before
        self._add(start, end)

    def _extend(self, size: int) -> None:
        """Takes a further region."""
        as_usual = size <= self._next
        while size > self._next:
            self._next *= 2
        start = len(self._ends) * REGION
        self._add(start, start + self._next)
        self._ends.append(start)
        self.taken += self._next
        if as_usual:
            self._next = self._next * 2 if self._next * 2 < LAST_REGION else LAST_REGION

    def _add(self, start: int, end: int) -> None:
        """Adds a free chunk."""
        bisect.insort(self._free, (end - start, start))
        self._free_from[start], self._free_up_to[end] = end - start, start


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
