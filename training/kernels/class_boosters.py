"""Times of operators that were never measured, learned from measured operators of their class.

A booster of a class learns log(time / roofline) from bytes, sizes, reduced and contiguous elements, rank and layout, but sees
nothing that tells one operator from another: neither the kernel type nor op_class. So it takes an unknown operator for what
others of its class would be. Each operator counts as the square root of its kernels (at most MOST_KERNELS of them), so that the
many convolutions or additions do not speak for all. Operators of other classes are learned from too, with a smaller weight:
they tell what a class of few operators leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ort_analysis.records.kernel_types import operator_of
from training.kernels.operator_classes import class_of_operator, class_of_type

if TYPE_CHECKING:
    import xgboost

Floats = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float32]
TELLTALE = ("op_class", "activation", "adds")  # features that follow from the operator's name
MOST_KERNELS = 400  # of an operator; more change nothing
LEAST_KERNELS = 20  # of a class, else operators of all classes speak for it
OTHER_CLASSES = 0.3  # weight of a kernel of another class
PREFIX = "class "
ANY = "class other"  # the booster for operators without a class, and for classes that were not measured


def class_name(kernel_type: str) -> str:
    """The name of the booster of a type's class. It is no name of a type: these have no spaces."""
    return PREFIX + class_of_type(kernel_type)


def is_class(name: str) -> bool:
    """Whether a booster is that of a class, and not of a type."""
    return name.startswith(PREFIX)


@dataclass(frozen=True)
class ClassRows:
    """What the boosters of classes learn from.

    Attributes:
        matrix: rows × (features, type code, load); NaN in all columns that tell operators apart, and in those of the load.
        log_ratios: log(time / roofline) of each row.
        operators: of each row.
    """

    matrix: Matrix
    log_ratios: Floats
    operators: npt.NDArray[np.str_]

    def without(self, operator: str) -> ClassRows:
        """The rows of all other operators."""
        kept = self.operators != operator
        return ClassRows(self.matrix[kept], self.log_ratios[kept], self.operators[kept])

    def weights(self, name: str) -> Floats:
        """The weight of each row in the booster `name`; the mean is 1."""
        found, counts = np.unique(self.operators, return_inverse=True, return_counts=True)[1:]
        weights = counts[found] ** -0.5
        if name != ANY:
            weights = weights * np.where(self.of_class(name), 1.0, OTHER_CLASSES)
        return np.asarray(weights / weights.mean())

    def of_class(self, name: str) -> npt.NDArray[np.bool_]:
        """A mask of the rows of a class."""
        return np.array([PREFIX + class_of_operator(operator) == name for operator in self.operators], dtype=bool)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The boosters that can be trained: ANY, and one for each class of enough rows."""
        classes = [PREFIX + class_of_operator(str(operator)) for operator in self.operators]
        return tuple(sorted({ANY, *(name for name in set(classes) if classes.count(name) >= LEAST_KERNELS)}))


def class_rows(matrix: Matrix, log_ratios: Floats, types: npt.NDArray[np.str_], idle: npt.NDArray[np.bool_],
               columns: tuple[str, ...], seed: int) -> ClassRows:
    """At most MOST_KERNELS idle rows of each operator.

    Args:
        matrix: as of `design_matrix`.
        log_ratios, types, idle: of each row.
        columns: names of the features in the matrix; the type code and the load follow.
        seed: of the choice.
    """
    generator = np.random.default_rng(seed)
    operators = np.array([operator_of(name) for name in types.tolist()], dtype=np.str_)
    base = idle if idle.any() else np.ones(len(idle), dtype=bool)
    chosen: list[int] = []
    for operator in sorted(set(operators[base].tolist())):
        places = np.flatnonzero(base & (operators == operator))
        chosen += sorted(generator.permutation(places)[:MOST_KERNELS].tolist())
    kept = matrix[chosen].copy()
    kept[:, [place for place, name in enumerate(columns) if name in TELLTALE]] = np.nan
    kept[:, len(columns):] = np.nan
    return ClassRows(kept, log_ratios[chosen], operators[chosen])


@dataclass(frozen=True)
class ClassBoosters(Mapping[str, "xgboost.Booster"]):
    """The boosters of the classes by name, each trained at its first look-up: most trainings need none or few of them."""

    rows: ClassRows
    train: Callable[[Matrix, Floats, Floats], xgboost.Booster]
    _trained: dict[str, xgboost.Booster] = field(default_factory=dict)

    def __getitem__(self, name: str) -> xgboost.Booster:
        if name not in self._trained:
            if name not in self:
                raise KeyError(name)
            self._trained[name] = self.train(self.rows.matrix, self.rows.log_ratios, self.rows.weights(name))
        return self._trained[name]

    def __contains__(self, name: object) -> bool:
        return name in self.rows.names  # does not train it

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows.names)

    def __len__(self) -> int:
        return len(self.rows.names)


class WithClasses(Mapping[str, "xgboost.Booster"]):
    """The boosters of types, and those of classes, as one mapping."""

    def __init__(self, of_types: Mapping[str, xgboost.Booster], of_classes: Mapping[str, xgboost.Booster]) -> None:
        self._of_types, self._of_classes = of_types, of_classes

    def __getitem__(self, name: str) -> xgboost.Booster:
        return (self._of_classes if is_class(name) else self._of_types)[name]

    def __contains__(self, name: object) -> bool:
        return name in self._of_types or name in self._of_classes

    def __iter__(self) -> Iterator[str]:
        return iter([*self._of_types, *self._of_classes])

    def __len__(self) -> int:
        return len(self._of_types) + len(self._of_classes)
