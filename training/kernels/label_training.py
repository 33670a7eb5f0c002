"""Learns the times of one label: cross-validation chooses the predictors and measures their errors; then they are trained on
all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.estimators import (
    FOREST,
    SHARED,
    KernelModel,
    OtherPredictors,
    Transferred,
    design_matrix,
    table_counts,
)
from hase.learned.kernels.interface import TrainingConfig, TrainingSet
from hase.learned.kernels.sidecar import TypeErrors
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.kernels import fitting
from hase.training.kernels.left_out import LeftOutForm, LeftOutOperator, leave_forms_out, leave_operators_out, steady_classes
from hase.training.kernels.targets import CONFIG
from hase.utils.errors import UserError
from hase.utils.lazy import pandas as pd
from hase.utils.logger import get_logger
from hase.utils.timing import Floats, error_statistics

log = get_logger("training")
MARGIN = 0.97  # a type gets another predictor than the shared one only below this share of its error: each costs a call


@dataclass(frozen=True)
class Trained:
    """The predictors of one label, and their errors on held-out kernels. `times_ms` are measured and out-of-fold idle times by
    kernel id. Forms are left out only of label `gpu`, since GPUs' libraries have the most algorithms."""

    label: str
    model: KernelModel | Transferred
    errors: tuple[TypeErrors, ...]
    times_ms: dict[str, tuple[float, float]]
    left_out: tuple[LeftOutOperator, ...]
    forms_left_out: tuple[LeftOutForm, ...] = ()


@dataclass(frozen=True)
class HeldOutTimes:
    """The times (ms) that each estimator predicts for rows held out of its training; NaN if it predicts none."""

    shared_ms: Floats
    dedicated_ms: Floats
    forest_ms: Floats
    roofline_ms: Floats

    def from_ratios(self, other_ms: Floats, plain: HeldOutTimes) -> HeldOutTimes:
        """The times, if these are ratios to another device's times; the roofline's, for comparison, are those of `plain`."""
        return HeldOutTimes(self.shared_ms * other_ms, self.dedicated_ms * other_ms, self.forest_ms * other_ms,
                            plain.roofline_ms)

    def shipped(self, rows: TrainingSet, chosen: Mapping[str, str]) -> Floats:
        """The times by the predictors that are saved with these `chosen` ones (see `fit_kernel_model`)."""
        by_forest = np.isin(rows.types, [name for name, predictor in chosen.items() if predictor == FOREST])
        dedicated = np.isin(rows.types, list(chosen)) & np.isfinite(self.dedicated_ms)
        return np.where(by_forest, self.forest_ms, np.where(dedicated, self.dedicated_ms, self.shared_ms))


def cross_validate(rows: TrainingSet, label: str, candidates: Sequence[str], config: TrainingConfig) -> HeldOutTimes:
    """Predicts every row by estimators trained without the rows of its kernel; dedicated ones for the types in `candidates`."""
    folds = fitting.assign_folds(rows.ids, rows.types, config.folds, config.seed)

    def one_fold(fold: int) -> tuple[npt.NDArray[np.bool_], Floats]:
        test = folds == fold
        train, tested = rows.rows(~test), rows.rows(test)
        problem = fitting.learning_problem(train, label)
        model = fitting.fit_kernel_model(train, label, {name: name for name in candidates}, config, problem)
        shared_alone = replace(model, predictor_of=dict.fromkeys(problem.type_codes, SHARED))
        bound = problem.roofline.bound_ms(tested.flops, tested.bytes_moved, table_counts(tested.schema, tested.features))
        inputs = design_matrix(tested.types, tested.features, tested.load, problem.type_codes)
        forest = fitting.train_forest(problem.matrix, problem.log_ratios, config.forest, config.seed, problem.weights)
        is_dedicated = np.array([model.predictor_of.get(name, SHARED) != SHARED for name in tested.types])
        return test, np.column_stack([
            shared_alone.predict_ms(tested.kernels), np.where(is_dedicated, model.predict_ms(tested.kernels), np.nan),
            bound * np.exp(forest.inplace_predict(inputs)), bound * problem.roofline.scale])

    predicted = np.full((len(rows), 4), np.nan)
    for test, times in fitting.parallel_map(one_fold, sorted(set(folds.tolist())), config.workers):
        predicted[test] = times
    return HeldOutTimes(*predicted.T)


def choose_predictors(rows: TrainingSet, label: str, left_out: HeldOutTimes, candidates: Sequence[str],
                      config: TrainingConfig) -> dict[str, str]:
    """Chooses the predictors of kernel types (see `fit_kernel_model`) by their errors on held-out idle rows. In the order
    shared, dedicated and random forest, one replaces the one before if its error is clearly smaller. Types with few kernels all
    get the forest, or none of them. Without xgboost in the settings the forest predicts all types. `candidates` are the types
    with enough kernels."""
    types = sorted(set(rows.types.tolist()))
    if "xgboost" not in config.estimators:
        return dict.fromkeys(types, FOREST)
    measured, chosen, own_predictors = rows.times_ms[label], {}, config.booster(label).own_predictors

    def error(times_ms: Floats, *names: str) -> float:
        mask = np.isin(rows.types, names) & rows.idle & np.isfinite(times_ms)
        return float(np.abs(times_ms[mask] / measured[mask] - 1).mean()) if mask.any() else np.inf

    def forest_is_better(than: float, *names: str) -> bool:
        return FOREST in config.estimators and error(left_out.forest_ms, *names) < MARGIN * than

    for name in candidates:
        best, dedicated = error(left_out.shared_ms, name), error(left_out.dedicated_ms, name)
        if own_predictors == "all" or (own_predictors == "better" and dedicated < MARGIN * best):
            chosen[name], best = name, dedicated
        if forest_is_better(best, name):
            chosen[name] = FOREST
    few = [name for name in types if name not in candidates]
    if forest_is_better(error(left_out.shared_ms, *few), *few):
        chosen |= dict.fromkeys(few, FOREST)
    return chosen


def type_errors(rows: TrainingSet, label: str, left_out: HeldOutTimes, chosen_predictors: Mapping[str, str],
                short_ms: float) -> tuple[TypeErrors, ...]:
    """Errors on held-out kernels, of all types together and of each, for several sets of rows. The sets are idle rows, idle
    rows of at least `short_ms` (if the label is a time), all rows, and rows under load."""
    measured = rows.times_ms[label]
    shipped = left_out.shipped(rows, chosen_predictors)
    sets: dict[str, Any] = {"idle": rows.idle}
    if label != LAUNCHES:
        idle_time = dict(zip(rows.ids[rows.idle], measured[rows.idle], strict=True))
        long = np.array([idle_time.get(name, time) >= short_ms for name, time in zip(rows.ids, measured, strict=True)])
        sets[f"idle, {short_ms * 1000:g} µs and more"] = rows.idle & long
    if not rows.idle.all():
        sets |= {"all levels": np.ones(len(rows), dtype=bool), "under load": ~rows.idle}
    table = []
    for rows_of, chosen in sets.items():
        counts = {name: len(set(rows.ids[chosen & (rows.types == name)])) for name in sorted(set(rows.types.tolist()))}
        for name in ["all", *sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])]:
            mask = chosen if name == "all" else chosen & (rows.types == name)
            if not mask.any():
                continue
            errors, forest, roofline = (error_statistics(times[mask], measured[mask])
                                        for times in (shipped, left_out.forest_ms, left_out.roofline_ms))
            table.append(TypeErrors(
                type=name, rows_of=rows_of, kernels=len(set(rows.ids[mask])), mape=errors.mape, median=errors.median,
                within_10=errors.within_10, forest_mape=forest.mape, roofline_mape=roofline.mape,
                predictor=chosen_predictors.get(name, SHARED) if name != "all" else "mixed" if chosen_predictors else SHARED))
    return tuple(table)


def idle_times(rows: TrainingSet, label: str, predicted: Floats) -> dict[str, tuple[float, float]]:
    """The idle times (ms) of each kernel by id: measured, and from `predicted` (one per row); medians over the machines."""
    times = pd.DataFrame({"measured": rows.times_ms[label], "predicted": predicted})[rows.idle]
    return {str(name): (float(measured_ms), float(predicted_ms))
            for name, measured_ms, predicted_ms in times.groupby(rows.ids[rows.idle]).median().itertuples()}


@dataclass(frozen=True)
class CrossValidated:
    """Cross-validation's outcome for one way to learn: predictions, chosen predictors (`fit_kernel_model`), their errors."""

    left_out: HeldOutTimes
    predictors: dict[str, str]
    errors: tuple[TypeErrors, ...]


def train_label(rows: TrainingSet, label: str, config: TrainingConfig, start_from: OtherPredictors | None = None) -> Trained:
    """The predictors of one label with their errors, chosen by cross-validation and trained on all rows. Corrections of
    `start_from` are kept if their error is smaller. Raises UserError: fewer kernels than folds."""
    rows = rows.rows(np.isfinite(rows.times_ms[label]))
    kernels = sorted(set(zip(rows.ids.tolist(), rows.types.tolist(), strict=True)))
    if len(kernels) < config.folds:
        raise UserError(f"{rows.header.target.name}, label {label}: {len(kernels)} kernels measured, but cross-validation in "
                        f"{config.folds} folds needs as many; measure more, or set fewer folds in {CONFIG.name}")
    counts: dict[str, int] = {}
    for _, name in kernels:
        counts[name] = counts.get(name, 0) + 1
    enough = [name for name, count in counts.items() if count >= config.own_min_kernels]
    dedicated = [] if config.booster(label).own_predictors == "none" or "xgboost" not in config.estimators else enough

    def cross_validated(left_out: HeldOutTimes) -> CrossValidated:
        predictors = choose_predictors(rows, label, left_out, enough, config)
        return CrossValidated(left_out, predictors, type_errors(rows, label, left_out, predictors, config.short_ms))

    best, start = cross_validated(cross_validate(rows, label, dedicated, config)), None
    if start_from is not None:
        ratios, other_ms = fitting.as_ratios(rows, label, start_from.model)
        corrected = cross_validated(cross_validate(ratios, label, dedicated, config).from_ratios(other_ms, best.left_out))
        log.info("%s: starting from %s, kernels that were held out are predicted with an error of %.1f %% (without: %.1f %%)",
                 label, start_from.target, 100 * corrected.errors[0].mape, 100 * best.errors[0].mape)
        if corrected.errors[0].mape < best.errors[0].mape:
            best, start = corrected, start_from
    errors, by_forest = best.errors, [name for name, predictor in best.predictors.items() if predictor == FOREST]
    log.info("%s: %d rows of %d kernels; predictors of their own: %s; by the random forest: %s", label, len(rows), len(kernels),
             ", ".join(name for name in best.predictors if name not in by_forest) or "none", ", ".join(by_forest) or "none")
    if errors[0].forest_mape < errors[0].mape and FOREST not in config.estimators:
        log.info("%s: the random forest has a smaller error on held-out kernels (%.1f %%, boosters %.1f %%); to save it where "
                 "it is better: --set estimators=[xgboost,random_forest]", label, 100 * errors[0].forest_mape,
                 100 * errors[0].mape)
    left_out = leave_operators_out(rows, label, config)
    model = fitting.fit_transferred(rows, label, best.predictors, config, start) if start else fitting.fit_kernel_model(
        rows, label, best.predictors, config, steady=steady_classes(left_out))
    shipped = best.left_out.shipped(rows, best.predictors)
    return Trained(label, model, errors, idle_times(rows, label, shipped), tuple(left_out),
                   tuple(leave_forms_out(rows, label, best.predictors, config)) if label == GPU_LABEL else ())
