"""Kernel types whose own predictors learn from related types too.

A type's own predictor learns from its rows with weight 1, and from those of related types with weight WEIGHT: a MatMul with a
constant matrix takes about as long as the Gemm of the same size, and many more of these are measured. The type with the most
rows of its group learns alone. Only the GPU's times are learned like this: related types differ in how often they launch.

On an H200, with each collection of models left out in turn, this changed the errors of kernels, weighted by time, from 29 to
15 % for MatMul, from 22 to 18 for FusedMatMul, from 82 to 27 for ReduceSum, from 28 to 15 for ReduceMax, from 16 to 13 for
BiasSoftmax, and from 10 to 8 for Split. With weights of 0.03 and 0.3 products gain less.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from records.kernel_types import operator_of
from records.operators import operator_row

WEIGHT = 0.1
KINDS = ("softmax", "joint", "pool")  # of operators, each of which is a group


def group_of(operator: str) -> str:
    """The group of operators that learn from each other: one of KINDS, all products, or all reductions; "" for the rest."""
    row = operator_row(operator)
    if row.kind in KINDS:
        return row.kind
    reduces = row.operator_class == "reduction" and row.dispatch == "reducing"
    return row.operator_class if reduces or row.operator_class == "product" else ""


def relatives(name: str, types: npt.NDArray[np.str_]) -> frozenset[str]:
    """The types that the predictor of type `name` learns from besides its own; `types` is the type of each row."""
    group = group_of(operator_of(name))
    if not group:
        return frozenset()
    counts = {str(one): int(count) for one, count in zip(*np.unique(types, return_counts=True), strict=True)
              if group_of(operator_of(str(one))) == group}
    others = frozenset(counts) - {name}
    return others if max((counts[one] for one in others), default=0) > counts.get(name, 0) else frozenset()


def row_weights(name: str, types: npt.NDArray[np.str_]) -> npt.NDArray[np.float64]:
    """The weight of each row in the predictor of type `name`, 0 for those that it does not learn from; `types` as of
    `relatives`."""
    return np.where(types == name, 1.0, np.where(np.isin(types, list(relatives(name, types))), WEIGHT, 0.0))
