"""A feature schema: the names of the numbers that describe a kernel or another unit, their order, and what computes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Floats = npt.NDArray[np.float64]
SLACK = 1e-6  # a feature may be beyond its range by this much, for rounding


@dataclass(frozen=True)
class FeatureSchema(Generic[T]):
    """The features of a unit (a kernel, a convolution) that estimators read.

    Estimators can only predict with the schema that they were trained with, so its name and version are saved with them.

    Attributes:
        name: of the schema.
        version: changes whenever the names, their order or the values of `compute` change.
        groups: names of the features by group, in the order of the values. The name of a feature that is a logarithm to base 2
            begins with `log_`.
        compute: returns the values of one unit, one for each name.
    """

    name: str
    version: int
    groups: Mapping[str, tuple[str, ...]]
    compute: Callable[[T], Sequence[float]]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The features in order."""
        return tuple(itertools.chain.from_iterable(self.groups.values()))

    @cached_property
    def logarithmic(self) -> npt.NDArray[np.bool_]:
        """A mask of the features that are logarithms to base 2."""
        return np.array([name.startswith("log_") for name in self.names], dtype=bool)

    def index(self, name: str) -> int:
        """The column of a feature.

        Raises:
            KeyError: the schema has no such feature.
        """
        if name not in self.names:
            raise KeyError(f"feature schema {self} has no feature {name}")
        return self.names.index(name)

    def matrix(self, units: Iterable[T]) -> Floats:
        """units × features."""
        rows = [self.compute(unit) for unit in units]
        return np.array(rows, dtype=float).reshape(len(rows), len(self.names))


def times_beyond(schema: FeatureSchema, features: Floats, low: Floats, high: Floats) -> Floats:
    """By what factor each kernel is beyond the range of the training, the largest over its features; 1 within the range.

    Args:
        features: kernels × the schema's features.
        low, high: of the training, by feature.
    """
    beyond = (features < low - SLACK) | (features > high + SLACK)
    sizes, least, most = (np.where(schema.logarithmic, values, np.log2(1.0 + np.abs(values)))
                          for values in (features, low, high))
    doublings = np.where(beyond, np.maximum(sizes - most, least - sizes), 0.0).max(axis=1)
    return np.asarray(2.0 ** np.maximum(doublings, 0.0))
