"""Learns how far off predictions may be, from operators, forms and kernels that were left out of training.

- Each measured operator is left out in turn: how far off is the time of an operator that was never measured?
- Forms are left out in FOLDS parts, each with a fifth of every type's forms. A form (`kernel_form`) is element type, rank, and
  for some operators groups, windows or axes. How far off is a kernel whose form was never measured?
- Doubt: a booster learns from the features of kernels how far off they were when they were left out. Predictions err most where
  libraries change their algorithm: there neighbours disagree. A kernel counts with the GPU's time or with the host's time for
  its launches, whichever is longer: a convolution that a library runs group by group may have a thousand launches where its
  neighbours have two, and hardly more work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hase.learned import target_files
from hase.learned.kernels.estimators import PREFIX, KernelModel, class_names, kind_code, table_counts
from hase.learned.kernels.interface import XgboostSettings
from hase.learned.kernels.uncertainty import DEFAULT_LAUNCHES, DEFAULT_RANGES, Range, Uncertainty
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import kernel_form, operator_in_type
from hase.records.measurement import LAUNCHES
from hase.records.operators import OperatorClass, operator_row
from hase.training.kernels import fitting
from hase.utils import files
from hase.utils.timing import Floats

if TYPE_CHECKING:
    from hase.learned.kernels.interface import TrainingConfig, TrainingSet


STEADY_MARGIN = 0.7  # of the error; closer to 1, chance decides where a class has few operators


@dataclass(frozen=True)
class LeftOutOperator:
    """An operator, and predictions of its kernels by a training without it.

    Attributes:
        operator: its name, without what is fused into it.
        by_sizes: true time (or launches) over the prediction of its kind's or class's boosters, of each idle kernel.
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
        """The error of the scaled roofline on each kernel, as a share of the true time."""
        return np.abs(1.0 / self.roofline - 1.0)


def leave_operators_out(rows: TrainingSet, label: str, config: TrainingConfig,
                        operators: Sequence[str] = ()) -> list[LeftOutOperator]:
    """Each operator (default: all with at least LEAST_KERNELS kernels) left out of the boosters of classes in turn. Sorted by
    class and name. The roofline, a few numbers of the device, is fitted to all rows."""
    known = rows.rows(rows.idle & np.isfinite(rows.times_ms[label]))
    if not len(known):
        return []
    problem = fitting.learning_problem(known, label)
    row_operators = np.array([operator_in_type(name) for name in known.types.tolist()], dtype=np.str_)
    names, counts = np.unique(row_operators, return_counts=True)
    chosen = [str(name) for name, count in zip(names, counts, strict=True)
              if (str(name) in operators if operators else count >= fitting.LEAST_KERNELS)]
    bound = problem.roofline.bound_ms(known.flops, known.bytes_moved, table_counts(known.schema, known.features))

    def leave_out(operator: str) -> LeftOutOperator:
        own_rows = row_operators == operator
        boosters = fitting.fit_class_boosters(known, problem, config, operator)
        name = next(name for name in class_names(operator) if name in boosters)
        seen = problem.matrix[own_rows]
        seen[:, len(known.schema.names)] = kind_code(operator)
        ratios = known.times_ms[label][own_rows] / bound[own_rows]
        return LeftOutOperator(operator, operator_row(operator).operator_class, known.ids[own_rows],
                               ratios / np.exp(boosters[name].inplace_predict(seen)),
                               ratios / np.exp(boosters.rows.median_log_ratio(name)), ratios / problem.roofline.scale)

    if len(names) < 2:
        return []
    results = sorted(fitting.parallel_map(leave_out, chosen, config.workers), key=lambda result: (result.kind, result.operator))
    return [replace(result, is_steady=PREFIX + result.kind in steady_classes(results[:index] + results[index + 1:]))
            for index, result in enumerate(results)]


def steady_classes(left_out: Sequence[LeftOutOperator]) -> frozenset[str]:
    """The classes whose left-out operators are clearly closer to the class's median ratio than to its boosters. Compared by
    means over operators of their median errors."""
    means: dict[str, list[tuple[float, float]]] = {}
    for operator in left_out:
        means.setdefault(PREFIX + operator.kind, []).append((median_error(operator.steady), median_error(operator.by_sizes)))
    return frozenset(name for name, errors in means.items()
                     if np.mean(errors, axis=0)[0] < STEADY_MARGIN * np.mean(errors, axis=0)[1])


def median_error(ratios: Floats) -> float:
    """The median error of estimates, as a share of the true time; `ratios` are true over estimated."""
    return float(np.median(np.abs(1.0 / ratios - 1.0)))


# forms -------------------------------------------------------------------------------------------------------------------

FOLDS = 5


@dataclass(frozen=True)
class LeftOutForm:
    """A form of a kernel type (as in `kernel_form`), and predictions of its kernels by a training without it. `times_ms` are
    measured idle times, `ratios` true over predicted times."""

    type: str
    form: str
    kind: OperatorClass
    times_ms: Floats
    ratios: Floats

    @property
    def errors(self) -> Floats:
        """The prediction's error on each kernel, as a share of the true time."""
        return np.abs(1.0 / self.ratios - 1.0)


def leave_forms_out(rows: TrainingSet, label: str, chosen: Mapping[str, str], config: TrainingConfig) -> list[LeftOutForm]:
    """Each form of the types with several, left out of everything; sorted. `chosen` as in `fit_kernel_model`."""
    known = rows.rows(rows.idle & np.isfinite(rows.times_ms[label]))
    if not len(known):
        return []
    names = [f"{kind}\t{form}" for kind, form in zip(known.types.tolist(), known.forms.tolist(), strict=True)]
    folds = fitting.assign_folds(names, known.types.tolist(), FOLDS, config.seed)
    predicted = np.full(len(known), np.nan)

    def one_fold(fold: int) -> None:
        train, test = known.rows(folds != fold), folds == fold
        test = test & np.isin(known.types, sorted(set(train.types.tolist())))  # other types have no measured form left
        if len(train) and test.any():
            predicted[test] = fitting.fit_kernel_model(train, label, chosen, config).predict_ms(known.rows(test).kernels)

    fitting.parallel_map(one_fold, sorted(set(folds.tolist())), config.workers)
    results, ratios = [], known.times_ms[label] / predicted
    indices: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        if np.isfinite(predicted[index]):
            indices.setdefault(name, []).append(index)
    for name, form_rows in sorted(indices.items()):
        kind, form = name.split("\t")
        operator_class = operator_row(operator_in_type(kind)).operator_class
        results.append(LeftOutForm(kind, form, operator_class, known.times_ms[label][form_rows], ratios[form_rows]))
    return results


# doubt and uncertainty ---------------------------------------------------------------------------------------------------

MeasuredAndPredicted = Mapping[str, tuple[float, float]]  # by kernel id
LARGEST = float(np.log(50.0))  # error that counts, as a logarithm: a few kernels are off by a factor of a thousand
LAUNCH_MS = 0.0045  # the host's time for a launch, fitted for an H200
SETTINGS = XgboostSettings(trees=200, depth=7, learning_rate=0.08, min_leaf_weight=6.0, objective="squarederror",
                           own_predictors="none")


def learn_doubt(rows: TrainingSet, gpu_ms: MeasuredAndPredicted, launches: MeasuredAndPredicted, seed: int) -> KernelModel:
    """The doubt of each kernel, as a model that predicts the mean error of its time as a factor. `gpu_ms` and `launches` are
    measured and out-of-fold values of idle kernels; launches may be incomplete."""
    known = rows.rows(rows.idle & np.isin(rows.ids, list(gpu_ms)))
    on_gpu_ms = np.array([gpu_ms[name] for name in known.ids.tolist()])
    launching_ms = LAUNCH_MS * np.array([launches.get(name, (0.0, 0.0)) for name in known.ids.tolist()])
    measured_ms, predicted_ms = np.maximum(on_gpu_ms, launching_ms).T
    errors = np.minimum(np.abs(np.log(predicted_ms / measured_ms) - known.carried_errors), LARGEST)
    return fitting.fit_factors(known, errors, SETTINGS, seed)


LEAST_OPERATORS, LEAST_FORMS = 3, 12
TAIL = 0.05  # share of the ratios that is cut off at each end, which leaves 90 %
PARTS = 101  # quantiles that replace the kernels of an operator, so that operators have equal weight


def save_uncertainty(rows: TrainingSet, kernels: Iterable[Kernel], folder: Path,
                     left_out: Mapping[str, Sequence[LeftOutOperator]],
                     forms_left_out: Mapping[str, Sequence[LeftOutForm]]) -> None:
    """Writes the ranges and forms in the idle rows of a dataset, from left-out operators and forms of each label."""
    by_id = {kernel.id: kernel for kernel in kernels}
    forms: dict[str, set[str]] = {}
    for name in set(rows.ids.tolist()):
        forms.setdefault(by_id[name].type, set()).add(kernel_form(by_id[name]))
    files.write_json(target_files.UNCERTAINTY.path(folder), Uncertainty(
        dataset_sha256=rows.sha256, forms={name: tuple(sorted(forms[name])) for name in sorted(forms)},
        ranges={label: ranges_of(operators, DEFAULT_LAUNCHES if label == LAUNCHES else DEFAULT_RANGES, LEAST_OPERATORS)
                for label, operators in left_out.items()},
        form_ranges={label: ranges_of(label_forms, {}, LEAST_FORMS) for label, label_forms in forms_left_out.items()}))


def ranges_of(left_out: Iterable[LeftOutOperator] | Iterable[LeftOutForm], defaults: Mapping[OperatorClass, Range],
              least: int) -> dict[str, Range]:
    """The range of true over predicted times of each class of operators, from left-out operators or forms. `defaults` are
    joined with the range of classes with fewer than `least` left out; without a default, such a class has none."""
    ratios_by_class: dict[OperatorClass, list[Floats]] = {}
    for result in left_out:
        ratios_by_class.setdefault(result.kind, []).append(np.quantile(result.ratios, np.linspace(0.0, 1.0, PARTS)))
    ranges: dict[str, Range] = {}
    for kind, ratios in ratios_by_class.items():
        low, high = np.quantile(np.concatenate(ratios), [TAIL, 1.0 - TAIL])
        learned = Range(low=min(1.0, float(low)), high=max(1.0, float(high)), operators=len(ratios))
        if len(ratios) >= least:
            ranges[kind] = learned
        elif kind in defaults:
            ranges[kind] = learned.joined(defaults[kind])
    return ranges


