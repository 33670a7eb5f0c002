"""A stage's time at a size that was not measured: from measured sizes around it, or, marked as such, beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from utils.errors import UserError
from utils.lazy import scipy

Size: TypeAlias = "tuple[int, int]"  # nodes, edges
Basis: TypeAlias = Literal["measured", "interpolated", "extrapolated"]


@dataclass(frozen=True)
class Estimate:
    """A time in ms, and what it rests on."""

    ms: float
    basis: Basis


def surrounding(sizes: list[Size], wanted: Size) -> dict[Size, float] | None:
    """Measured sizes whose weighted mean is the size wanted, as near to it as possible; None if it lies outside all of them.

    Weights are positive and sum to 1. Of all such weights, those with the smallest sum of weight × squared distance, where a
    distance counts ratios of nodes and of edges (doubling is as far at 1000 as at 5000). A time that is linear in nodes and
    edges is met exactly, one at a measured size is that of the measurement.
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

    An extrapolation is the fit of b + n·nodes + e·edges, none of the three below 0, to all sizes, each with the same relative
    error. It is a guess: caches make times grow faster than sizes, and large sizes may not fit into a memory.

    Raises:
        UserError: the size lies outside those measured, and extrapolating was not asked for; or nothing was measured.
    """
    if not times_ms:
        raise UserError("no size was measured")
    sizes = sorted(times_ms)
    if (weights := surrounding(sizes, wanted)) is not None:
        ms = sum(weight * times_ms[size] for size, weight in weights.items())
        return Estimate(ms, "measured" if wanted in times_ms else "interpolated")
    if not extrapolate:
        raise UserError(outside(sizes, wanted))
    points = np.array([(1.0, *size) for size in sizes])
    measured = np.array([times_ms[size] for size in sizes])
    scale = points.max(axis=0)
    factors, _ = scipy.optimize.nnls(points / scale / measured[:, None], np.ones(len(sizes)))
    return Estimate(float(np.array([1.0, *wanted]) / scale @ factors), "extrapolated")


def outside(sizes: list[Size], wanted: Size) -> str:
    """Says that a size is not among or between those measured."""
    nodes, edges = zip(*sizes, strict=True)
    within = min(nodes) <= wanted[0] <= max(nodes) and min(edges) <= wanted[1] <= max(edges)
    near = ", ".join(f"{n}/{e}" for n, e in sizes)
    return (f"{wanted[0]} nodes with {wanted[1]} edges lie outside the sizes that were measured "
            f"({min(nodes)} to {max(nodes)} nodes, {min(edges)} to {max(edges)} edges"
            + (f", in these pairs: {near}" if within else "")
            + "); measure larger ones, or allow a guess with --extrapolate")
