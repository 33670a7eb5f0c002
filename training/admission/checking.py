"""Measures estimators on kernels that were held out, beside a roofline and what is in use, and admits those that are better."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.admitted import Admitted, KnownEstimator, checked_times, find_estimator
from hase.learned.kernels.estimators import assign_folds
from hase.learned.kernels.interface import Estimator, Floats, Measured
from hase.learned.kernels.schema import FeatureSchema, KernelRows
from hase.learned.kernels.settings import TrainingConfig
from hase.records.dataset_files import read_kernels
from hase.records.kernel_record import Kernel
from hase.training.kernels.label_training import MARGIN
from hase.training.kernels.replay import family_folds
from hase.training.kernels.training_set import TrainingSet
from hase.utils.errors import UserError
from hase.utils.paths import Workspace
from hase.utils.timing import ErrorStatistics, error_statistics, time_weighted_error

HoldOut = Literal["family", "kernel"]
LEAST_HELD_OUT = 20  # kernels; a comparison on fewer would be chance
BEFORE, ROOFLINE = "what is in use", "roofline"
Mask = npt.NDArray[np.bool_]
Make = Callable[[], Estimator]


@dataclass(frozen=True)
class Task:
    """The kernels that estimators are compared on: idle rows of some types, in folds that are held out in turn.

    Attributes:
        rows: all that may be learned from, with the label.
        chosen: mask of the rows that are estimated.
        kernels: by id, those of the chosen rows.
        folds: for each, masks of the rows to learn from and of the rows to predict.
    """

    rows: TrainingSet
    label: str
    hold_out: HoldOut
    chosen: Mask
    kernels: Mapping[str, Kernel]
    folds: tuple[tuple[Mask, Mask], ...]
    config: TrainingConfig

    @property
    def tested(self) -> Mask:
        """The rows that some fold predicts."""
        return np.any([test for _, test in self.folds], axis=0)

    @property
    def types(self) -> tuple[str, ...]:
        """The kernel types that some fold predicts."""
        return tuple(sorted(set(self.rows.types[self.tested].tolist())))

    def kernel_rows(self, schema: FeatureSchema[Kernel], mask: Mask) -> KernelRows:
        """The rows in `mask`, which are chosen ones, with the features of `schema`."""
        kernels = [self.kernels[name] for name in self.rows.ids[mask].tolist()]
        return KernelRows.of(kernels, schema.matrix(kernels))

    def fitted(self, make: Make, learn: Mask, types: Sequence[str] | None = None) -> Estimator:
        """An estimator that learned from the rows in `learn`; of the chosen ones, those of `types` (default: all)."""
        mask = learn & self.chosen
        if types is not None:
            mask &= np.isin(self.rows.types, list(types))
        if not mask.any():
            raise UserError(f"{self.rows.header.target.name}: no kernel is left to learn from in one fold; try --hold-out "
                            "kernel")
        estimator = make()
        kernels, weights = self.kernel_rows(estimator.features, mask), self.rows.weights(self.label)
        estimator.fit(Measured(types=kernels.types, features=kernels.features, flops=kernels.flops,
                               bytes_moved=kernels.bytes_moved, times_ms=self.rows.times_ms[self.label][mask],
                               target=self.rows.header.target, label=self.label, config=self.config,
                               all_rows=self.rows.rows(learn), weights=None if weights is None else weights[mask]))
        return estimator

    def fitted_to_all(self, make: Make) -> Estimator:
        """An estimator that learned from all chosen rows of the types that were checked."""
        return self.fitted(make, np.ones(len(self.rows), dtype=bool), self.types)

    def held_out_ms(self, make: Make, types: Sequence[str] | None = None) -> Floats:
        """The times of all rows, each predicted by a fit without its fold; NaN for rows that no fold predicts, or of other
        types than `types`."""
        times_ms = np.full(len(self.rows), np.nan)
        of_types = np.ones(len(self.rows), dtype=bool) if types is None else np.isin(self.rows.types, list(types))
        for learn, test in self.folds:
            if (mask := test & of_types).any():
                estimator = self.fitted(make, learn, types)
                times_ms[mask] = checked_times(estimator, self.kernel_rows(estimator.features, mask))
        return times_ms


def task_for(workspace: Workspace, rows: TrainingSet, label: str, wanted: Callable[[str], bool], hold_out: HoldOut | None,
             config: TrainingConfig) -> Task:
    """The task of a target.

    Args:
        rows: of the target's dataset.
        label: which time.
        wanted: says of a kernel type whether its kernels are estimated.
        hold_out: what is held out together; by default families, or kernels where models of less than two families hold such
            kernels.
        config: of the training; its folds.

    Raises:
        UserError: too few such kernels were measured.
    """
    target = rows.header.target.name
    rows = rows.rows(np.isfinite(rows.times_ms[label]))
    of_type = {name: wanted(name) for name in sorted(set(rows.types.tolist()))}
    chosen = rows.idle & np.array([of_type[name] for name in rows.types.tolist()], dtype=bool)
    ids = set(rows.ids[chosen].tolist())
    if len(ids) < LEAST_HELD_OUT:
        raise UserError(f"{target}: {len(ids)} such kernels were measured, a check needs {LEAST_HELD_OUT}; measure more, or "
                        "check for more types")
    described = {entry.kernel.id: entry for entry in read_kernels(workspace.dataset(target), ids)}
    of_models = chosen & np.array([name in described and bool(described[name].models) for name in rows.ids.tolist()])
    folds = tuple((fold.pool, fold.tested & chosen) for fold in family_folds(rows.groups, of_models, config.folds))
    folds = tuple(fold for fold in folds if fold[1].any())
    if hold_out == "kernel" or (hold_out is None and len(folds) < 2):
        hold_out, of_fold = "kernel", assign_folds(rows.ids, rows.types, config.folds, config.seed)
        folds = tuple((of_fold != fold, (of_fold == fold) & chosen) for fold in range(config.folds))
    task = Task(rows, label, hold_out or "family", chosen, {name: entry.kernel for name, entry in described.items()},
                tuple(fold for fold in folds if fold[1].any()), config)
    if not task.folds or len(set(rows.ids[task.tested].tolist())) < LEAST_HELD_OUT:
        raise UserError(f"{target}: fewer than {LEAST_HELD_OUT} such kernels can be held out; try --hold-out kernel")
    return task


def in_use_ms(task: Task, in_use: Make, entries: Sequence[Admitted], named: Sequence[Path]) -> Floats:
    """The held-out times by what predicts each type now: an admitted estimator, or the predictors (`in_use`)."""
    by_admitted = {name: entry for entry in entries if entry.label == task.label for name in entry.types}
    times_ms = task.held_out_ms(in_use)
    for entry in {entry.name: entry for entry in by_admitted.values()}.values():
        by_entry = task.held_out_ms(find_estimator(entry.name, named).estimator, entry.types)
        times_ms = np.where(np.isfinite(by_entry), by_entry, times_ms)
    return times_ms


def error_rows(task: Task, times_ms: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """A row for each estimator and set of kernels (all types together, then each type), errors in per cent.

    Args:
        times_ms: the held-out times by the estimator's name. One that predicts only some types has rows for these alone.
    """
    table = []
    for part in ["all", *task.types] if len(task.types) > 1 else task.types:
        mask = task.tested & ((task.rows.types == part) | (part == "all"))
        measured = task.rows.times_ms[task.label][mask]
        for name, times in times_ms.items():
            if np.isnan(times[mask]).any():
                continue
            errors = error_statistics(times[mask].tolist(), measured.tolist())
            table.append({"type": part, "estimator": name, "kernels": len(set(task.rows.ids[mask].tolist())),
                          "MAPE_%": 100 * errors.mape, "median_%": 100 * errors.median, "within_10_%": 100 * errors.within_10,
                          "time_weighted_MAPE_%": 100 * time_weighted_error(times[mask], measured)})
    return table


def errors_of(task: Task, times_ms: Floats, types: Sequence[str]) -> ErrorStatistics:
    """The errors on the held-out rows of some types."""
    mask = task.tested & np.isin(task.rows.types, list(types))
    return error_statistics(times_ms[mask].tolist(), task.rows.times_ms[task.label][mask].tolist())


def why_not(task: Task, estimator_ms: Floats, before_ms: Floats) -> dict[str, str]:
    """By kernel type, why an estimator is not admitted for it; "" where its error is clearly smaller than that of what it
    replaces.

    Args:
        estimator_ms, before_ms: the held-out times of the estimator, and of what it replaces.
    """
    reasons = {}
    for name in task.types:
        errors, before = (errors_of(task, times_ms, [name]) for times_ms in (estimator_ms, before_ms))
        kernels = len(set(task.rows.ids[task.tested & (task.rows.types == name)].tolist()))
        if kernels < LEAST_HELD_OUT:
            reasons[name] = f"fewer than {LEAST_HELD_OUT} kernels could be held out, too few to compare"
        elif errors.mape >= MARGIN * before.mape:
            reasons[name] = (f"its error on held-out kernels is {errors.mape:.1%}, and that of what it would replace "
                             f"{before.mape:.1%}; admitted are errors below {MARGIN:g} times that")
        else:
            reasons[name] = ""
    return reasons


def about_admitted(task: Task, known: KnownEstimator, times_ms: Mapping[str, Floats], types: Sequence[str], forced: bool,
                   created: str) -> dict[str, object]:
    """What `admit` is to list of an estimator.

    Args:
        times_ms: held-out times by name: the estimator's, BEFORE and ROOFLINE.
        types: the kernel types that it is admitted for.
    """
    estimator_ms = times_ms[known.estimator.name]
    ratios = (task.rows.times_ms[task.label] / estimator_ms)[task.tested & np.isin(task.rows.types, list(types))]
    return {"source": known.source, "code_sha256": known.code_sha256, "label": task.label,
            "types": tuple(types), "hold_out": task.hold_out,
            "errors": errors_of(task, estimator_ms, types), "errors_before": errors_of(task, times_ms[BEFORE], types),
            "errors_of_roofline": errors_of(task, times_ms[ROOFLINE], types),
            "true_over_predicted": tuple(np.quantile(ratios, (0.05, 0.95)).tolist()), "forced": forced,
            "dataset_sha256": task.rows.sha256, "created": created}


def environment_error(estimator: type[Estimator], rows: TrainingSet) -> str:
    """What is wrong where an estimator does not hold for a dataset's target; "" where it does."""
    if estimator.holds_for(rows.header.target):
        return ""
    stated = "; ".join(", ".join(f"{key} {value}" for key, value in pattern.model_dump().items() if value)
                       for pattern in estimator.environments)
    return f"estimator {estimator.name} does not hold for {rows.header.target.name} (it states: {stated})"
