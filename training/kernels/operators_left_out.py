"""How far off the estimated time of an operator is that was never measured: each measured operator is left out in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ort_analysis.records.kernel_types import operator_of
from training.kernels.class_boosters import ANY, LEAST_KERNELS, class_name
from training.kernels.estimators import learn_classes, parallel_map, pose, table_counts
from training.kernels.operator_classes import OperatorClass, class_of_operator

if TYPE_CHECKING:
    from training.kernels.settings import TrainingConfig
    from training.kernels.training_set import TrainingSet  # needs pandas, which a prediction does not

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LeftOutOperator:
    """An operator, and what a training without it makes of its kernels.

    Attributes:
        operator: its name, without what is fused into it.
        kind: its class.
        ids: of its kernels.
        ratios: true over estimated time (or number of launches) of each kernel, idle.
        roofline: true time over the scaled roofline of each kernel, for comparison.
    """

    operator: str
    kind: OperatorClass
    ids: npt.NDArray[np.str_]
    ratios: Floats
    roofline: Floats

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
    problem = pose(known, label)
    of_rows = np.array([operator_of(name) for name in known.types.tolist()], dtype=np.str_)
    names, counts = np.unique(of_rows, return_counts=True)
    chosen = [str(name) for name, count in zip(names, counts, strict=True)
              if (str(name) in operators if operators else count >= LEAST_KERNELS)]
    bound = problem.roofline.bound_ms(known.flops, known.bytes_moved, table_counts(known.schema, known.features))

    def one(operator: str) -> LeftOutOperator:
        own = of_rows == operator
        boosters = learn_classes(known, problem, config, operator)
        name = next(name for name in (class_name(operator), ANY) if name in boosters)
        guessed = bound[own] * np.exp(boosters[name].inplace_predict(problem.matrix[own]))
        true = known.times_ms[label][own]
        return LeftOutOperator(operator, class_of_operator(operator), known.ids[own], true / guessed,
                               true / (bound[own] * problem.roofline.scale))

    if len(names) < 2:
        return []
    return sorted(parallel_map(one, chosen, config.workers), key=lambda found: (found.kind, found.operator))
