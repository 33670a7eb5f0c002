"""How far off the estimated time of an operator is that was never measured: each measured operator is left out in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.class_boosters import LEAST_KERNELS, PREFIX, class_names, kind_code
from hase.learned.kernels.estimators import learn_classes, learning_problem, parallel_map, table_counts
from hase.records.kernel_types import operator_of
from hase.records.operators import OperatorClass, operator_row

if TYPE_CHECKING:
    from hase.learned.kernels.settings import TrainingConfig
    from hase.training.kernels.training_set import TrainingSet  # needs pandas, which a prediction does not

Floats = npt.NDArray[np.float64]
STEADY_MARGIN = 0.7  # of the error: with a closer choice few operators decide by chance


@dataclass(frozen=True)
class LeftOutOperator:
    """An operator, and what a training without it makes of its kernels.

    Attributes:
        operator: its name, without what is fused into it.
        kind: its class.
        ids: of its kernels.
        by_sizes: true time (or number of launches) over what the boosters of its kind or class say, of each kernel, idle.
        steady: true time over the median ratio of its class times the roofline.
        roofline: true time over the scaled roofline, for comparison.
        is_steady: whether the other operators of its class are clearly closer to that median than to their boosters.
    """

    operator: str
    kind: OperatorClass
    ids: npt.NDArray[np.str_]
    by_sizes: Floats
    steady: Floats
    roofline: Floats
    is_steady: bool = False

    @property
    def ratios(self) -> Floats:
        """True over estimated time of each kernel."""
        return self.steady if self.is_steady else self.by_sizes

    @property
    def errors(self) -> Floats:
        """The estimate's error on each kernel, as a share of the true time."""
        return np.abs(1.0 / self.ratios - 1.0)

    @property
    def roofline_errors(self) -> Floats:
        """The same of the scaled roofline."""
        return np.abs(1.0 / self.roofline - 1.0)


def leave_operators_out(rows: TrainingSet, label: str, config: TrainingConfig,
                        operators: Sequence[str] = ()) -> list[LeftOutOperator]:
    """Each operator with enough kernels, left out of the boosters of classes in turn; sorted by class and name.

    The roofline, a few numbers of the device, is fitted to all rows.

    Args:
        rows: of the dataset.
        label: whose times.
        config: of the training.
        operators: which; by default all with at least LEAST_KERNELS kernels.
    """
    known = rows.rows(rows.idle & np.isfinite(rows.times_ms[label]))
    if not len(known):
        return []
    problem = learning_problem(known, label)
    of_rows = np.array([operator_of(name) for name in known.types.tolist()], dtype=np.str_)
    names, counts = np.unique(of_rows, return_counts=True)
    chosen = [str(name) for name, count in zip(names, counts, strict=True)
              if (str(name) in operators if operators else count >= LEAST_KERNELS)]
    bound = problem.roofline.bound_ms(known.flops, known.bytes_moved, table_counts(known.schema, known.features))

    def leave_out(operator: str) -> LeftOutOperator:
        of_operator = of_rows == operator
        boosters = learn_classes(known, problem, config, operator)
        name = next(name for name in class_names(operator) if name in boosters)
        seen = problem.matrix[of_operator]
        seen[:, len(known.schema.names)] = kind_code(operator)
        ratios = known.times_ms[label][of_operator] / bound[of_operator]
        return LeftOutOperator(operator, operator_row(operator).operator_class, known.ids[of_operator],
                               ratios / np.exp(boosters[name].inplace_predict(seen)),
                               ratios / np.exp(boosters.rows.median_log_ratio(name)), ratios / problem.roofline.scale)

    if len(names) < 2:
        return []
    results = sorted(parallel_map(leave_out, chosen, config.workers), key=lambda result: (result.kind, result.operator))
    return [replace(result, is_steady=PREFIX + result.kind in steady_classes(results[:place] + results[place + 1:]))
            for place, result in enumerate(results)]


def steady_classes(left_out: Sequence[LeftOutOperator]) -> frozenset[str]:
    """The names of the classes whose operators, each left out in turn, are clearly closer to the median of the class than to
    what its boosters make of their sizes; means over operators of their median errors."""
    means: dict[str, list[tuple[float, float]]] = {}
    for operator in left_out:
        means.setdefault(PREFIX + operator.kind, []).append((median_error(operator.steady), median_error(operator.by_sizes)))
    return frozenset(name for name, errors in means.items() 
                     if np.mean(errors, axis=0)[0] < STEADY_MARGIN * np.mean(errors, axis=0)[1])


def median_error(ratios: Floats) -> float:
    """The median error, as a share of the true time, of estimates that the true times are `ratios` of."""
    return float(np.median(np.abs(1.0 / ratios - 1.0)))
