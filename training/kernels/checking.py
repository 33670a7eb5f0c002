"""Compares estimators on held-out kernels with a roofline and the predictors in use, and admits those that are better."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hase.learned import target_files
from hase.learned.kernels.admitted import Admitted, AdmittedFile, KnownEstimator, checked_times, find_estimator, read_entries
from hase.learned.kernels.features import FeatureSchema, KernelRows
from hase.learned.kernels.interface import Estimator, Floats, Measured, TrainingConfig, TrainingSet
from hase.learned.kernels.saved_form import ESTIMATOR_PREFIX, save_estimator
from hase.records.dataset_files import read_kernels
from hase.records.kernel_record import Kernel
from hase.training.kernels.fitting import assign_folds
from hase.training.kernels.label_training import MARGIN
from hase.utils.errors import UserError
from hase.utils.paths import Workspace
from hase.utils.timing import ErrorStatistics, error_statistics, time_weighted_error

HoldOut = Literal["family", "kernel"]
LEAST_HELD_OUT = 20  # kernels; with fewer, a comparison is decided by chance
BEFORE, ROOFLINE = "what is in use", "roofline"
Mask = npt.NDArray[np.bool_]
Make = Callable[[], Estimator]


@dataclass(frozen=True)
class Task:
    """The kernels (by id) to compare estimators on: the `chosen` idle rows of some types, in folds that are held out in turn.
    `folds` have masks of the rows to learn from and to predict."""

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
        """The chosen rows in `mask`, with the features of `schema`."""
        kernels = [self.kernels[name] for name in self.rows.ids[mask].tolist()]
        return KernelRows.of(kernels, schema.matrix(kernels))

    def fitted(self, make: Make, learn: Mask, types: Sequence[str] | None = None) -> Estimator:
        """An estimator fitted to the rows in `learn`; of the chosen ones, only to those of `types` (default: all)."""
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
        """An estimator fitted to all chosen rows of the checked types."""
        return self.fitted(make, np.ones(len(self.rows), dtype=bool), self.types)

    def held_out_ms(self, make: Make, types: Sequence[str] | None = None) -> Floats:
        """The times of all rows of `types`, each predicted by a fit without its fold; NaN for other rows."""
        times_ms = np.full(len(self.rows), np.nan)
        wanted_rows = np.ones(len(self.rows), dtype=bool) if types is None else np.isin(self.rows.types, list(types))
        for learn, test in self.folds:
            if (mask := test & wanted_rows).any():
                estimator = self.fitted(make, learn, types)
                times_ms[mask] = checked_times(estimator, self.kernel_rows(estimator.features, mask))
        return times_ms


@dataclass(frozen=True)
class FamilyFold:
    """Families that are held out together, as masks of rows. `pool` may be learned from: no kernels of held-out families, nor
    sampled near their shapes. `tested` has kernels that only the held-out families have."""

    pool: Mask
    tested: Mask


def family_folds(groups: Sequence[frozenset[str]], in_models: Mask, count: int) -> tuple[FamilyFold, ...]:
    """At most `count` folds in which each family is held out once; with more families, several share a fold."""
    families = sorted(set().union(*groups))
    folds = []
    for index in range(min(count, len(families))):
        held_out = {name for number, name in enumerate(families) if number % count == index}
        tested = np.array([bool(names) and names <= held_out for names in groups])
        folds.append(FamilyFold(np.array([not names & held_out for names in groups]), tested & in_models))
    return tuple(fold for fold in folds if fold.tested.any())


def task_for(workspace: Workspace, rows: TrainingSet, label: str, wanted: Callable[[str], bool], hold_out: HoldOut | None,
             config: TrainingConfig) -> Task:
    """Chooses a target's kernels to compare estimators on, and the folds. `hold_out` selects what a fold holds out; by default
    families, or kernels if models of fewer than two families have such kernels."""
    target = rows.header.target.name
    rows = rows.rows(np.isfinite(rows.times_ms[label]))
    is_wanted = {name: wanted(name) for name in sorted(set(rows.types.tolist()))}
    chosen = rows.idle & np.array([is_wanted[name] for name in rows.types.tolist()], dtype=bool)
    ids = set(rows.ids[chosen].tolist())
    if len(ids) < LEAST_HELD_OUT:
        raise UserError(f"{target}: {len(ids)} such kernels were measured, a check needs {LEAST_HELD_OUT}; measure more, or "
                        "check for more types")
    entries = {entry.kernel.id: entry for entry in read_kernels(workspace.dataset(target), ids)}
    in_models = chosen & np.array([name in entries and bool(entries[name].models) for name in rows.ids.tolist()])
    folds = tuple((fold.pool, fold.tested & chosen) for fold in family_folds(rows.groups, in_models, config.folds))
    folds = tuple(fold for fold in folds if fold[1].any())
    if hold_out == "kernel" or (hold_out is None and len(folds) < 2):
        hold_out, fold_numbers = "kernel", assign_folds(rows.ids, rows.types, config.folds, config.seed)
        folds = tuple((fold_numbers != fold, (fold_numbers == fold) & chosen) for fold in range(config.folds))
    task = Task(rows, label, hold_out or "family", chosen, {name: entry.kernel for name, entry in entries.items()},
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
    """A row for each estimator and set of kernels (all types together, then each type), errors in per cent. `times_ms` are the
    held-out times by the estimator's name. One for some types only has rows for these alone."""
    table = []
    for type_or_all in ["all", *task.types] if len(task.types) > 1 else task.types:
        mask = task.tested & ((task.rows.types == type_or_all) | (type_or_all == "all"))
        measured = task.rows.times_ms[task.label][mask]
        for name, times in times_ms.items():
            if np.isnan(times[mask]).any():
                continue
            errors = error_statistics(times[mask].tolist(), measured.tolist())
            table.append({"type": type_or_all, "estimator": name, "kernels": len(set(task.rows.ids[mask].tolist())),
                          "MAPE_%": 100 * errors.mape, "median_%": 100 * errors.median, "within_10_%": 100 * errors.within_10,
                          "time_weighted_MAPE_%": 100 * time_weighted_error(times[mask], measured)})
    return table


def errors_of(task: Task, times_ms: Floats, types: Sequence[str]) -> ErrorStatistics:
    """The errors on the held-out rows of some types."""
    mask = task.tested & np.isin(task.rows.types, list(types))
    return error_statistics(times_ms[mask].tolist(), task.rows.times_ms[task.label][mask].tolist())


def why_not(task: Task, estimator_ms: Floats, before_ms: Floats) -> dict[str, str]:
    """By kernel type, why an estimator is not admitted; "" if it is clearly better than what it would replace."""
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
    """The fields that `admit` saves for an estimator. `times_ms` are held-out times by name: the estimator's, BEFORE and
    ROOFLINE; `types` those that it is admitted for."""
    estimator_ms = times_ms[known.estimator.name]
    ratios = (task.rows.times_ms[task.label] / estimator_ms)[task.tested & np.isin(task.rows.types, list(types))]
    return {"source": known.source, "code_sha256": known.code_sha256, "label": task.label,
            "types": tuple(types), "hold_out": task.hold_out,
            "errors": errors_of(task, estimator_ms, types), "errors_before": errors_of(task, times_ms[BEFORE], types),
            "errors_of_roofline": errors_of(task, times_ms[ROOFLINE], types),
            "true_over_predicted": tuple(np.quantile(ratios, (0.05, 0.95)).tolist()), "forced": forced,
            "dataset_sha256": task.rows.sha256, "created": created}


def environment_error(estimator: type[Estimator], rows: TrainingSet) -> str:
    """An error message if an estimator is not valid for a dataset's target; else ""."""
    if estimator.holds_for(rows.header.target):
        return ""
    environments = "; ".join(", ".join(f"{key} {value}" for key, value in pattern.model_dump().items() if value)
                             for pattern in estimator.environments)
    return f"estimator {estimator.name} does not hold for {rows.header.target.name} (it states: {environments})"


def admit(folder: Path, estimator: Estimator, about: Mapping[str, object]) -> Admitted:
    """Saves a fitted estimator and lists it. It replaces the estimators that predicted its types before. `about` has the fields
    of `Admitted` that are not of `Saved`."""
    saved = save_estimator(folder, f"{ESTIMATOR_PREFIX}{estimator.name}", estimator)
    entry = Admitted.model_validate({**about, **dict(saved)})
    others = []
    for other in read_entries(folder):
        types = tuple(name for name in other.types if name not in entry.types)
        if other.label != entry.label:
            others.append(other)
        elif types and other.name != entry.name:
            others.append(other.model_copy(update={"types": types}))
    _write(folder, [*others, entry])
    return entry


def remove(folder: Path, name: str) -> None:
    """Removes an estimator from the list, so that the predictors predict its types again."""
    entries = read_entries(folder)
    if name not in (admitted := sorted({entry.name for entry in entries})):
        raise UserError(f"{target_files.ESTIMATORS.path(folder)}: estimator {name} is not admitted (admitted: "
                        f"{', '.join(admitted) or 'none'})")
    _write(folder, [entry for entry in entries if entry.name != name])


def _write(folder: Path, entries: Sequence[Admitted]) -> None:
    """Writes the list, then removes the files that it no longer names."""
    target_files.ESTIMATORS.write(folder, AdmittedFile(estimators=tuple(entries)))
    for old in folder.glob(f"{ESTIMATOR_PREFIX}*-*.npz"):
        if old.name not in {entry.file for entry in entries}:
            old.unlink()
