"""The best candidates of a search so far, and its Pareto front; neither grows with the number of candidates."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from hase.inference.search.evaluating import Candidate

Rank = tuple[float, float, int]


class Best:
    """The candidates with the highest scores among those that keep to the limits; of those with equal scores, the fastest."""

    def __init__(self, count: int, least_chance: float) -> None:
        self._count, self._least_chance = count, least_chance
        self._seen = 0
        self._heap: list[tuple[Rank, Candidate]] = []

    def add(self, candidate: Candidate) -> None:
        self._seen += 1
        if not admitted(candidate, self._least_chance):
            return
        rank = candidate.score or 0.0, -(candidate.latency_ms or 0.0), -self._seen  # of equal ones, the first
        if len(self._heap) < self._count:
            heapq.heappush(self._heap, (rank, candidate))
        elif rank > self._heap[0][0]:
            heapq.heapreplace(self._heap, (rank, candidate))

    @property
    def candidates(self) -> list[Candidate]:
        """The best one first."""
        return [candidate for _, candidate in sorted(self._heap, key=lambda entry: entry[0], reverse=True)]


class Front:
    """The Pareto front of latency and score: the candidates that keep to the limits, and of which none that does is as fast and
    has as high a score."""

    def __init__(self, least_chance: float) -> None:
        self._least_chance = least_chance
        self._latencies: list[float] = []  # of the front, which grow, as the scores do
        self._front: list[Candidate] = []

    def add(self, candidate: Candidate) -> None:
        if not admitted(candidate, self._least_chance):
            return
        latency_ms, score = candidate.latency_ms or 0.0, candidate.score or 0.0
        place = bisect.bisect_right(self._latencies, latency_ms)
        if place and (self._front[place - 1].score or 0.0) >= score:
            return
        first = bisect.bisect_left(self._latencies, latency_ms)
        behind = first
        while behind < len(self._front) and (self._front[behind].score or 0.0) <= score:
            behind += 1
        self._front[first:behind], self._latencies[first:behind] = [candidate], [latency_ms]

    @property
    def candidates(self) -> list[Candidate]:
        """The fastest one first."""
        return list(self._front)


def admitted(candidate: Candidate, least_chance: float) -> bool:
    """Whether a candidate is likely enough to keep to the limits."""
    return candidate.chance is not None and candidate.chance >= least_chance


def hypervolume(points: Sequence[tuple[float, float]], slowest_ms: float) -> float:
    """How much of the plane of latency and score the points reach, ms × score: what is slower and lower than one of them, up to
    `slowest_ms` and down to a score of 0.

    Args:
        points: latencies (ms) and scores, of a front or any.
        slowest_ms: where the plane ends; slower points count nothing.
    """
    volume, highest = 0.0, 0.0
    for latency_ms, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if latency_ms < slowest_ms and score > highest:
            volume += (slowest_ms - latency_ms) * (score - highest)
            highest = score
    return volume
