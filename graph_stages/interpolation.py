"""A stage's time at a size that was not measured: from measured sizes around it, or, marked as such, beyond them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from utils.errors import UserError
from utils.lazy import scipy

Size: TypeAlias = "tuple[int, int]"  # nodes, edges
Basis: TypeAlias = Literal["measured", "interpolated", "extrapolated"]
BASES: tuple[Basis, ...] = ("measured", "interpolated", "extrapolated")  # the most certain first


@dataclass(frozen=True)
class Estimate:
    """A time in ms, and what it rests on."""

    ms: float
    basis: Basis


@functools.lru_cache(maxsize=4096)  # all stages of all units were measured at the same sizes, as a rule
def surrounding(sizes: tuple[Size, ...], wanted: Size) -> dict[Size, float] | None:
    """Measured sizes whose weighted mean is the size wanted, as near to it as possible; None if it lies outside all of them.

    Weights are positive and sum to 1. Of all such weights, those with the smallest sum of weight × squared distance, where a
    distance counts ratios of nodes and of edges (doubling is as far at 1000 as at 5000).
    """
    if wanted in sizes:
        return {wanted: 1.0}
    points = np.array(sizes, float)
    distances = (np.log(points / np.array(wanted, float)) ** 2).sum(axis=1)
    scale = np.array(wanted, float)
    balance = np.vstack([(points / scale).T, np.ones(len(sizes))])
    solved = scipy.optimize.linprog(distances, A_eq=balance, b_eq=np.ones(3), bounds=(0, None), method="highs")
    if not solved.success:
        return None
    return {size: float(weight) for size, weight in zip(sizes, solved.x, strict=True) if weight > 1e-9}


def estimated(times_ms: Mapping[Size, float], wanted: Size, extrapolate: bool = False) -> Estimate:
    """The time at a size: measured, interpolated, or, if asked for, extrapolated.

    A trend, b + n·nodes + e·edges with none of the three below 0, is fitted to all sizes, each with the same relative error.
    What the times around the size are to their trend (their weighted geometric mean) corrects it. So a time that is linear in
    nodes and edges is met exactly, and so are bends, such as where a cache is full, that sizes around it have, too.

    An extrapolation is the trend alone. It is a guess: caches make times grow faster than sizes, and large sizes may not fit
    into a memory.

    Raises:
        UserError: the size lies outside those measured, and extrapolating was not asked for; or nothing was measured.
    """
    if not times_ms:
        raise UserError("no size was measured")
    if wanted in times_ms:
        return Estimate(times_ms[wanted], "measured")
    sizes = tuple(sorted(times_ms))
    around = surrounding(sizes, wanted)
    if around is None and not extrapolate:
        raise UserError(outside(sizes, wanted))
    ms = _trend(times_ms, wanted)
    if around is None:
        return Estimate(ms, "extrapolated")
    if min(times_ms[size] for size in around) <= 0 or ms <= 0:  # as a spread of a single run is
        return Estimate(sum(weight * times_ms[size] for size, weight in around.items()), "interpolated")
    ratios = [weight * math.log(times_ms[size] / _trend(times_ms, size)) for size, weight in around.items()]
    return Estimate(ms * math.exp(sum(ratios)), "interpolated")


def _trend(times_ms: Mapping[Size, float], wanted: Size) -> float:
    """The fitted time at a size, in ms."""
    sizes, measured = np.array([(1.0, *size) for size in times_ms]), np.array(list(times_ms.values()))
    return float(np.array([1.0, *wanted]) @ np.array(_coefficients(sizes.tobytes(), measured.tobytes())))


@functools.lru_cache(maxsize=4096)
def _coefficients(points: bytes, times: bytes) -> tuple[float, ...]:
    """Those of b + n·nodes + e·edges, from rows of (1, nodes, edges) and the times, both as the bytes of an array of floats."""
    measured = np.frombuffer(times)
    rows = np.frombuffer(points).reshape(len(measured), -1)
    scale = rows.max(axis=0)
    weights = 1.0 / np.maximum(measured, 1e-3 * measured.max() or 1.0)
    factors, _ = scipy.optimize.nnls(rows / scale * weights[:, None], measured * weights)
    return tuple(factors / scale)


def outside(sizes: Sequence[Size], wanted: Size) -> str:
    """Says that a size is not among or between those measured."""
    nodes, edges = zip(*sizes, strict=True)
    within = min(nodes) <= wanted[0] <= max(nodes) and min(edges) <= wanted[1] <= max(edges)
    near = ", ".join(f"{n}/{e}" for n, e in sizes)
    return (f"{wanted[0]} nodes with {wanted[1]} edges lie outside the sizes that were measured "
            f"({min(nodes)} to {max(nodes)} nodes, {min(edges)} to {max(edges)} edges"
            + (f", in these pairs: {near}" if within else "")
            + "); measure larger ones, or allow a guess with --extrapolate")
