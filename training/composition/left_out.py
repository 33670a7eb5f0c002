"""Kernel times of held-out models, predicted by trainings without the models' groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from training.composition.measured_models import MeasuredModel, TimesOfModels
from training.kernels.estimators import TimePredictor, fit_kernel_model, parallel_map, predict_kernels
from training.kernels.predictors import Predictors, leaves_gpu_idle
from training.kernels.transfer import learner
from utils import cli
from utils.logger import get_logger
from utils.timing import time_weighted_error

if TYPE_CHECKING:
    from records.kernel_record import Kernel
    from training.kernels.settings import TrainingConfig
    from training.kernels.training_set import TrainingSet

log = get_logger("composition")
HeldOutKind = Literal["family", "collection", "model", "nothing"]  # what a group of models is that is held out together
LEAST_KERNELS = 20  # to learn from when a group is held out; predictions by fewer would mean nothing


@dataclass(frozen=True)
class Fold:
    """Groups of models that are held out together.

    Attributes:
        groups: their names.
        models: their models.
        kernels: of these models, by id.
        seen: the rows of the training set that may be learned from.
    """

    groups: frozenset[str]
    models: tuple[MeasuredModel, ...]
    kernels: dict[str, Kernel]
    seen: npt.NDArray[np.bool_]


def owners_of(rows: TrainingSet, left_out: HeldOutKind) -> tuple[frozenset[str], ...]:
    """The groups that each row of the training set belongs to, so that it is held out with each of them; none where the groups
    are single models, whose kernels are held out by their ids."""
    return {"family": rows.groups, "collection": rows.collections}.get(left_out, (frozenset(),) * len(rows))


def folds_of(rows: TrainingSet, models: Sequence[MeasuredModel], groups: Sequence[str], left_out: HeldOutKind,
             most: int) -> list[Fold]:
    """At most `most` folds, so that every group is held out once; where there are more groups, several share a fold.

    Where families or collections are held out, kernels that were sampled near the shapes of one are held out with it.
    """
    names, owners = sorted(set(groups)), owners_of(rows, left_out)
    found = []
    for fold in range(min(most, len(names))):
        out = frozenset(name for place, name in enumerate(names) if place % most == fold)
        held = tuple(model for model, group in zip(models, groups, strict=True) if group in out)
        kernels = {kernel.id: kernel for model in held for kernel in model.record.kernels.values()}
        seen = ~np.isin(rows.ids, list(kernels))
        seen &= np.array([not (of_row & out) for of_row in owners], dtype=bool)
        found.append(Fold(out, held, kernels, seen))
    return found


def by_model(fold: Fold, times_ms: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The times of a fold's kernels (by id) for each of its models."""
    return {model.record.model: {name: times_ms[name] for name in model.record.kernels} for model in fold.models}


def predict_out_of_fold(rows: TrainingSet, models: Sequence[MeasuredModel], groups: Sequence[str], left_out: HeldOutKind,
                        label: str, own: Sequence[str], config: TrainingConfig,
                        learn: Callable[[TrainingSet], TimePredictor] | None = None) -> dict[str, dict[str, float]]:
    """For each model, the idle times (ms) of its kernels by id, predicted by a training without them (see `folds_of`).

    Args:
        rows: to learn from.
        models, groups, left_out: as of `left_out_groups`.
        label: the label whose times are learned.
        own: kernel types with predictors of their own.
        config: of the training.
        learn: a training in place of Hase's own; takes the rows to learn from.
    """
    rows = rows.rows(np.isfinite(rows.times_ms[label]))
    idle_load = list(rows.idle_load.values())

    def one_fold(fold: Fold) -> dict[str, dict[str, float]]:
        seen = fold.seen
        if len(set(rows.ids[seen])) < LEAST_KERNELS:
            log.warning("%s: too few kernels are left to learn from without %s, so its kernels stay in the training, and the "
                        "errors below are too optimistic", label, ", ".join(sorted(fold.groups)))
            seen = np.ones(len(rows), dtype=bool)
        fitted: TimePredictor = (
            learn(rows.rows(seen)) if learn else fit_kernel_model(rows.rows(seen), label, own, config))
        listed = list(fold.kernels.values())
        times = predict_kernels(fitted, listed, rows.schema.matrix(listed), idle_load)
        return by_model(fold, {kernel.id: 0.0 if leaves_gpu_idle(kernel, label) else float(time)
                               for kernel, time in zip(listed, times, strict=True)})

    folds = folds_of(rows, models, groups, left_out, config.folds)
    return {name: times for part in parallel_map(one_fold, folds, config.workers) for name, times in part.items()}


def predict_as_learned(predictors: Predictors, labels: Sequence[str], rows: TrainingSet, models: Sequence[MeasuredModel],
                       groups: Sequence[str], left_out: HeldOutKind, config: TrainingConfig,
                       doing: str) -> dict[str, dict[str, dict[str, float]]]:
    """`predict_out_of_fold` for each of some labels, learned in the same way as the predictors of a target: kernel types have
    the same own predictors, and what starts from another target does so without a group, too. Times by label, model and id.

    Args:
        predictors: of the target.
        labels: those of `predictors`.
        rows, models, groups, left_out, config: as of `predict_out_of_fold`.
        doing: what the progress bar says.
    """
    found = {}
    for label in cli.progress(labels, doing):
        own = predictors.sidecar.labels[label].own_types
        learn = learner(predictors.kernel_model(label), label, own, config)
        found[label] = predict_out_of_fold(rows, models, groups, left_out, label, own, config, learn)
    return found


def kernel_errors(out_of_fold: TimesOfModels, measured: Mapping[str, Mapping[str, float]], label: str) -> dict[str, float]:
    """Errors of the kernels of all models, in per cent: mean, median, and mean weighted by time; none where no kernel was
    measured. Each kernel counts once per group."""
    pairs = {(kernel, round(time, 9)): (time, measured[kernel][label]) for times in out_of_fold.values()
             for kernel, time in times.items() if time and label in measured.get(kernel, {})}
    if not pairs:
        return {}
    predicted, times = np.array(list(pairs.values())).T
    errors = np.abs(predicted / times - 1)
    return {"MAPE_%": 100 * float(errors.mean()), "median_%": 100 * float(np.median(errors)),
            "time_weighted_MAPE_%": 100 * time_weighted_error(predicted, times), "kernels": len(pairs)}
