"""Learns the times of one label: predictors picked and judged by cross-validation, then trained on all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from training.kernels import estimators
from training.kernels.estimators import SHARED, KernelModel, fit_kernel_model
from training.kernels.settings import LAUNCHES, TrainingConfig
from training.kernels.sidecar import TypeErrors
from training.kernels.targets import CONFIG
from training.kernels.training_set import TrainingSet
from utils.errors import UserError
from utils.lazy import pandas as pd
from utils.logger import get_logger
from utils.timing import error_statistics

log = get_logger("training")
Floats = npt.NDArray[np.float64]
OWN_MARGIN = 0.97  # a type's own predictor must err this much less than the shared one: each costs a call


@dataclass(frozen=True)
class Trained:
    """One label's predictors, and how far off they are on kernels that they did not see."""

    label: str
    model: KernelModel
    errors: tuple[TypeErrors, ...]
    times_ms: dict[str, tuple[float, float]]  # of each kernel idle: measured, and predicted by a training that saw none of it


@dataclass(frozen=True)
class LeftOut:
    """Times in ms that each estimator gives the rows of the fold it was not trained on; NaN where it gives none."""

    shared: Floats
    own: Floats
    forest: Floats
    roofline: Floats

    def shipped(self, rows: TrainingSet, own: Sequence[str]) -> Floats:
        """Those of the estimators that are saved where the types in `own` get predictors of their own."""
        return np.where(np.isin(rows.types, own) & np.isfinite(self.own), self.own, self.shared)


def cross_validate(rows: TrainingSet, label: str, own: list[str], config: TrainingConfig) -> LeftOut:
    """Every row predicted by estimators that saw none of its kernel's rows."""
    folds = estimators.assign_folds(rows.ids, rows.types, config.folds, config.seed)

    def one_fold(fold: int) -> tuple[npt.NDArray[np.bool_], Floats]:
        test = folds == fold
        train, left = rows.rows(~test), rows.rows(test)
        problem = estimators.pose(train, label)
        model = estimators.fit_kernel_model(train, label, own, config, problem)
        alone = replace(model, predictor_of=dict.fromkeys(problem.type_codes, estimators.SHARED))
        bound = problem.roofline.bound_ms(left.flops, left.bytes_moved, estimators.table_counts(left.schema, left.features))
        seen = estimators.design_matrix(left.types, left.features, left.load, problem.type_codes)
        forest = estimators.train_forest(problem.matrix, problem.log_ratios, config.forest, config.seed)
        has_own = np.array([model.predictor_of.get(name, estimators.SHARED) != estimators.SHARED for name in left.types])
        return test, np.column_stack([
            estimators.predict_rows(alone, left), np.where(has_own, estimators.predict_rows(model, left), np.nan),
            bound * np.exp(forest.predict(seen)), bound * problem.roofline.scale])

    predicted = np.full((len(rows), 4), np.nan)
    for test, times in estimators.parallel_map(one_fold, sorted(set(folds.tolist())), config.workers):
        predicted[test] = times
    return LeftOut(*predicted.T)


def choose_own(rows: TrainingSet, label: str, left_out: LeftOut, candidates: list[str]) -> list[str]:
    """The kernel types whose own predictor errs clearly less than the shared one on idle rows."""
    measured, chosen = rows.times_ms[label], []
    for name in candidates:
        mask = (rows.types == name) & rows.idle & np.isfinite(left_out.own)
        own, shared = (np.abs(times[mask] / measured[mask] - 1).mean() if mask.any() else np.inf
                       for times in (left_out.own, left_out.shared))
        if own < OWN_MARGIN * shared:
            chosen.append(name)
    return chosen


def type_errors(rows: TrainingSet, label: str, left_out: LeftOut, own: list[str], short_ms: float) -> tuple[TypeErrors, ...]:
    """Errors on left-out kernels, of all types and of each: idle, idle without the shortest (where the label is a time), and at
    all levels."""
    measured = rows.times_ms[label]
    shipped = left_out.shipped(rows, own)
    sets: dict[str, Any] = {"idle": rows.idle}
    if label != LAUNCHES:
        idle_time = dict(zip(rows.ids[rows.idle], measured[rows.idle], strict=True))
        long = np.array([idle_time.get(name, time) >= short_ms for name, time in zip(rows.ids, measured, strict=True)])
        sets[f"idle, {short_ms * 1000:g} µs and more"] = rows.idle & long
    if not rows.idle.all():
        sets |= {"all levels": np.ones(len(rows), dtype=bool), "under load": ~rows.idle}
    found = []
    for rows_of, chosen in sets.items():
        counts = {name: len(set(rows.ids[chosen & (rows.types == name)])) for name in sorted(set(rows.types.tolist()))}
        for name in ["all", *sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])]:
            mask = chosen if name == "all" else chosen & (rows.types == name)
            if not mask.any():
                continue
            errors, forest, roofline = (error_statistics(times[mask], measured[mask])
                                        for times in (shipped, left_out.forest, left_out.roofline))
            found.append(TypeErrors(
                type=name, rows_of=rows_of, kernels=len(set(rows.ids[mask])), mape=errors.mape, median=errors.median,
                within_10=errors.within_10, forest_mape=forest.mape, roofline_mape=roofline.mape,
                predictor=("mixed" if own else SHARED) if name == "all" else name if name in own else SHARED))
    return tuple(found)


def idle_times(rows: TrainingSet, label: str, predicted: Floats) -> dict[str, tuple[float, float]]:
    """The measured idle time of each kernel by id, and that in `predicted` (of each row); medians over the machines."""
    both = pd.DataFrame({"measured": rows.times_ms[label], "predicted": predicted})[rows.idle]
    return {str(name): (float(measured), float(told))
            for name, measured, told in both.groupby(rows.ids[rows.idle]).median().itertuples()}


def train_label(rows: TrainingSet, label: str, config: TrainingConfig) -> Trained:
    """The predictors of one label, picked and judged by cross-validation, then trained on all of its rows.

    Raises:
        UserError: fewer kernels than folds.
    """
    rows = rows.rows(np.isfinite(rows.times_ms[label]))
    kernels = sorted(set(zip(rows.ids.tolist(), rows.types.tolist(), strict=True)))
    if len(kernels) < config.folds:
        raise UserError(f"{rows.header.target.name}, label {label}: {len(kernels)} kernels measured, but cross-validation in "
                        f"{config.folds} folds needs as many; measure more, or set fewer folds in {CONFIG.name}")
    counts: dict[str, int] = {}
    for _, name in kernels:
        counts[name] = counts.get(name, 0) + 1
    which = config.booster(label).own_predictors
    candidates = [name for name, count in counts.items() if which != "none" and count >= config.own_min_kernels]
    left_out = cross_validate(rows, label, candidates, config)
    own = choose_own(rows, label, left_out, candidates) if which == "better" else candidates
    log.info("%s: %d rows of %d kernels; predictors of their own: %s", label, len(rows), len(kernels), ", ".join(own) or "none")
    errors = type_errors(rows, label, left_out, own, config.short_ms)
    if errors[0].forest_mape < errors[0].mape:
        log.info("%s: the forest errs less on left-out kernels, %.1f %% against %.1f %%; it is not saved, being "
                 "a hundred times the size", label, 100 * errors[0].forest_mape, 100 * errors[0].mape)
    return Trained(label, fit_kernel_model(rows, label, own, config), errors,
                   idle_times(rows, label, left_out.shipped(rows, own)))
