"""A feature schema: the names of the numbers that describe a kernel or another unit, their order, and what computes them; and
kernels as rows of such numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hase.records.kernel_record import Kernel

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
        codes: names of features whose values are no sizes, so that none lies beyond another (`times_beyond`).
    """

    name: str
    version: int
    groups: Mapping[str, tuple[str, ...]]
    compute: Callable[[T], Sequence[float]]
    codes: frozenset[str] = frozenset()

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


@dataclass(frozen=True, kw_only=True)
class KernelRows:
    """Kernels as estimators read them, a row each.

    Attributes:
        types: kernel type of each row.
        features: rows × the estimator's features.
        flops, bytes_moved: of each row.
        load: rows × metrics; None: an idle device.
    """

    types: npt.NDArray[np.str_]
    features: Floats
    flops: Floats
    bytes_moved: Floats
    load: Floats | None = None

    def __len__(self) -> int:
        return len(self.types)

    @classmethod
    def of(cls, kernels: Sequence[Kernel], features: Floats, load: Sequence[float] | None = None) -> KernelRows:
        """The rows of `kernels`, all under one load (a value for each metric)."""
        return cls(types=np.array([kernel.type for kernel in kernels], dtype=np.str_), features=features,
                   flops=np.array([kernel.flops for kernel in kernels], dtype=float),
                   bytes_moved=np.array([kernel.bytes_read + kernel.bytes_written for kernel in kernels], dtype=float),
                   load=None if load is None else np.tile(np.array(load, dtype=float), (len(kernels), 1)))


def times_beyond(schema: FeatureSchema, features: Floats, low: Floats, high: Floats) -> Floats:
    """By what factor each kernel is beyond the range of the training, the largest over its features; 1 within the range.

    Args:
        features: kernels × the schema's features.
        low, high: of the training, by feature.
    """
    sized = np.array([name not in schema.codes for name in schema.names], dtype=bool)
    beyond = sized & ((features < low - SLACK) | (features > high + SLACK))
    sizes, least, most = (np.where(schema.logarithmic, values, np.log2(1.0 + np.abs(values)))
                          for values in (features, low, high))
    doublings = np.where(beyond, np.maximum(sizes - most, least - sizes), 0.0).max(axis=1)
    return np.asarray(2.0 ** np.maximum(doublings, 0.0))
