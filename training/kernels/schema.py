"""A feature schema: which numbers describe a kernel, in which order, and the function that computes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ort_analysis.records.kernel_record import Kernel

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FeatureSchema:
    """What estimators read of a kernel.

    Estimators that were trained with one schema can predict with no other, so the name and the version are saved with them.

    Attributes:
        name: of the schema.
        version: another one wherever the names, their order or the values that `compute` gives change.
        groups: names of the features by group, in the order of the values. A feature that is a logarithm to base 2 has a
            name that begins with `log_`.
        compute: the values of one kernel, one for each name.
    """

    name: str
    version: int
    groups: Mapping[str, tuple[str, ...]]
    compute: Callable[[Kernel], Sequence[float]]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The features in order."""
        return tuple(itertools.chain.from_iterable(self.groups.values()))

    @cached_property
    def logarithmic(self) -> npt.NDArray[np.bool_]:
        """For each feature, whether it is a logarithm to base 2."""
        return np.array([name.startswith("log_") for name in self.names], dtype=bool)

    def index(self, name: str) -> int:
        """The column of a feature.

        Raises:
            KeyError: the schema has no such feature.
        """
        if name not in self.names:
            raise KeyError(f"feature schema {self} has no feature {name}")
        return self.names.index(name)

    def matrix(self, kernels: Iterable[Kernel]) -> Floats:
        """kernels × features."""
        rows = [self.compute(kernel) for kernel in kernels]
        return np.array(rows, dtype=float).reshape(len(rows), len(self.names))
