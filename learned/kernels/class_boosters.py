"""What is learned from related operators: boosters of classes, and weights of rows.

Boosters of classes are for operators that were never measured, which they learn from measured ones of their kind and class.

The booster of a class learns log(time / roofline) from bytes, sizes, reduced and contiguous elements, rank, layout and the kind
of operator, but sees nothing that tells one operator of a kind from another: neither the kernel type nor op_class. So it takes
an unknown operator for what others of its kind would be. Each operator counts as the square root of its kernels (at most
MOST_KERNELS of them), so that many convolutions or additions do not speak for all. Operators of other kinds and classes are
learned from too, with smaller weights: they tell what a kind of few operators leaves open. On an H200, kinds lowered the mean
over 50 operators, each left out in turn, of their median errors from 41 to 33 %, most for Concat, Split and Slice.

A type's own booster learns from its rows with weight 1, and from those of related types with weight RELATED_WEIGHT: a MatMul
with a constant matrix takes about as long as the Gemm of the same size, and many more of these are measured. The type with the
most rows of its group learns alone. Only the GPU's times are learned like this: related types differ in how often they launch.
On an H200, with each collection of models left out in turn, this changed the errors of kernels, weighted by time, from 29 to
15 % for MatMul, from 22 to 18 for FusedMatMul, from 82 to 27 for ReduceSum, from 28 to 15 for ReduceMax, from 16 to 13 for
BiasSoftmax, and from 10 to 8 for Split. With weights of 0.03 and 0.3 products gain less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.form_features import FORM_GROUPS
from hase.records.kernel_types import operator_of
from hase.records.operators import OperatorClass, OperatorKind, operator_row

if TYPE_CHECKING:
    import xgboost

Floats = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float32]
# Features that follow from the operator's name, and those of forms, by which few operators of a class can be told apart.
TELLTALE = ("op_class", "activation", "adds", *(name for group in FORM_GROUPS.values() for name in group))
MOST_KERNELS = 400  # of an operator; more change nothing
LEAST_KERNELS = 20  # of a kind or class, else the next wider group speaks for it
OTHER_KINDS, OTHER_CLASSES = 0.3, 0.1  # weights of a kernel of another kind of the class, and of another class
CODES = {name: float(place) for place, name in enumerate((*get_args(OperatorKind), *get_args(OperatorClass)))}
PREFIX = "class "
RELATED_WEIGHT = 0.1
RELATED_KINDS = ("softmax", "joint", "pool")  # of operators, each of which is a group
ANY = "class other"  # the booster for operators without a class, and for classes that were not measured


def class_names(kernel_type: str) -> tuple[str, str, str]:
    """The boosters that a type may have: of its kind, its class, and all. They are no names of types: these have no spaces."""
    row = operator_row(operator_of(kernel_type))
    return PREFIX + row.kind_or_class, PREFIX + row.operator_class, ANY


def kind_code(kernel_type: str) -> float:
    """The number of a type's kind, which takes the place of the type's own."""
    return CODES[operator_row(operator_of(kernel_type)).kind_or_class]


def is_class(name: str) -> bool:
    """Whether a booster is that of a class, and not of a type."""
    return name.startswith(PREFIX)


@dataclass(frozen=True)
class ClassRows:
    """What the boosters of classes learn from.

    Attributes:
        matrix: rows × (features, code of the kind, load); NaN in the columns that tell operators apart, and in those of the
            load.
        log_ratios: log(time / roofline) of each row.
        operators: of each row.
        row_weights: how much each row counts by itself; None: all alike.
    """

    matrix: Matrix
    log_ratios: Floats
    operators: npt.NDArray[np.str_]
    row_weights: Floats | None = None

    def without(self, operator: str) -> ClassRows:
        """The rows of all other operators."""
        kept = self.operators != operator
        return ClassRows(self.matrix[kept], self.log_ratios[kept], self.operators[kept],
                         None if self.row_weights is None else self.row_weights[kept])

    def weights(self, name: str) -> Floats:
        """The weight of each row in the booster `name`; the mean is 1."""
        operator, counts = np.unique(self.operators, return_inverse=True, return_counts=True)[1:]
        weights = counts[operator] ** -0.5 * (1.0 if self.row_weights is None else self.row_weights)
        kinds, classes = self._groups
        if name in kinds:
            of_class = next(of for kind, of in zip(kinds, classes, strict=True) if kind == name)
            weights = weights * np.where(kinds == name, 1.0, np.where(classes == of_class, OTHER_KINDS, OTHER_CLASSES))
        elif name != ANY:
            weights = weights * np.where(classes == name, 1.0, OTHER_KINDS)
        return np.asarray(weights / weights.mean())

    @cached_property
    def _groups(self) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
        """The boosters of the kind and of the class of each row."""
        named = [class_names(operator)[:2] for operator in self.operators.tolist()]
        return np.array([kind for kind, _ in named], dtype=np.str_), np.array([of for _, of in named], dtype=np.str_)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The boosters that can be trained: ANY, and one for each kind and each class of enough rows."""
        names, counts = np.unique(np.concatenate(self._distinct), return_counts=True)
        return tuple(sorted({ANY, *names[counts >= LEAST_KERNELS].tolist()}))

    def class_of(self, name: str) -> str:
        """The class that the booster `name` is of, or is a kind of."""
        kinds, classes = self._groups
        return str(next((of for kind, of in zip(kinds, classes, strict=True) if kind == name), name))

    def median_log_ratio(self, name: str) -> float:
        """The median log ratio of the class that `name` is of; each operator counts as in `weights`."""
        of = self.class_of(name)
        rows = (self._groups[1] == of) if of != ANY else np.ones(len(self.operators), dtype=bool)
        order = np.argsort(self.log_ratios[rows])
        summed = np.cumsum(self.weights(ANY)[rows][order])
        return float(self.log_ratios[rows][order][np.searchsorted(summed, summed[-1] / 2)])

    @property
    def _distinct(self) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
        """The boosters of the kinds, and of those classes that are no kinds."""
        kinds, classes = self._groups
        return kinds, classes[classes != kinds]


def class_rows(matrix: Matrix, log_ratios: Floats, types: npt.NDArray[np.str_], idle: npt.NDArray[np.bool_],
               columns: tuple[str, ...], seed: int, weights: Floats | None = None) -> ClassRows:
    """At most MOST_KERNELS idle rows of each operator.

    Args:
        matrix: made by `design_matrix`.
        log_ratios, types, idle: of each row.
        columns: names of the features in the matrix; the type code and the load follow.
        seed: of the choice.
        weights: of each row by itself; None: all count alike.
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
    kept[:, len(columns)] = [CODES[operator_row(operator).kind_or_class] for operator in operators[chosen].tolist()]
    return ClassRows(kept, log_ratios[chosen], operators[chosen], None if weights is None else weights[chosen])


@dataclass(frozen=True)
class ClassBoosters(Mapping[str, "xgboost.Booster"]):
    """The boosters of the classes by name, each trained at its first look-up: most trainings need none or few of them.

    Attributes:
        rows: to learn from.
        train: trains a booster from a matrix, what it is to predict, and weights; with an empty matrix one that says the mean.
        steady: classes of which only the median ratio is used, since sizes tell less (see `steady_classes`).
    """

    rows: ClassRows
    train: Callable[[Matrix, Floats, Floats], xgboost.Booster]
    steady: frozenset[str] = frozenset()
    _trained: dict[str, xgboost.Booster] = field(default_factory=dict)

    def __getitem__(self, name: str) -> xgboost.Booster:
        if name not in self._trained:
            if name not in self:
                raise KeyError(name)
            self._trained[name] = self._steady(name) if self.rows.class_of(name) in self.steady else self.train(
                self.rows.matrix, self.rows.log_ratios, self.rows.weights(name))
        return self._trained[name]

    def _steady(self, name: str) -> xgboost.Booster:
        ratio = self.rows.median_log_ratio(name)
        return self.train(self.rows.matrix[:0], np.array([ratio]), np.ones(1))

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


def group_of(operator: str) -> str:
    """The group of operators that learn from each other: one of RELATED_KINDS, all products, or all reductions; "" for the
    rest."""
    row = operator_row(operator)
    if row.kind in RELATED_KINDS:
        return row.kind
    reduces = row.operator_class == "reduction" and row.dispatch == "reducing"
    return row.operator_class if reduces or row.operator_class == "product" else ""


def related_types(name: str, types: npt.NDArray[np.str_]) -> frozenset[str]:
    """The types that the booster of type `name` learns from besides its own; `types` is the type of each row."""
    group = group_of(operator_of(name))
    if not group:
        return frozenset()
    counts = {str(kernel_type): int(count) for kernel_type, count in zip(*np.unique(types, return_counts=True), strict=True)
              if group_of(operator_of(str(kernel_type))) == group}
    related = frozenset(counts) - {name}
    return related if max((counts[kernel_type] for kernel_type in related), default=0) > counts.get(name, 0) else frozenset()


def row_weights(name: str, types: npt.NDArray[np.str_]) -> Floats:
    """The weight of each row in the booster of type `name`, 0 for those that it does not learn from; `types` is the type of
    each row."""
    related = np.isin(types, list(related_types(name, types)))
    return np.where(types == name, 1.0, np.where(related, RELATED_WEIGHT, 0.0))
