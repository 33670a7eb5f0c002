"""Replays a dataset as if only some of its kernels had been measured, to see how the error falls with their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from hase.kernel_model.sampling.usefulness import Points, error_weights, order_by_usefulness
from hase.learned.kernels.estimators import assign_folds, fit_kernel_model, parallel_map, predict_rows
from hase.learned.kernels.features import KERNEL_FEATURES
from hase.learned.kernels.interface import Estimator
from hase.learned.kernels.transfer import OtherPredictors, fit_transferred
from hase.records.dataset_files import read_kernels
from hase.utils.timing import time_weighted_error

if TYPE_CHECKING:
    from hase.learned.kernels.settings import TrainingConfig
    from hase.records.kernel_record import Kernel, Tensor
    from hase.training.kernels.training_set import TrainingSet
    from hase.utils.paths import Workspace

Order = Literal["random", "useful", "errors"]
ORDERS: tuple[Order, ...] = ("random", "useful", "errors")
INNER_FOLDS = 3  # that give the errors of kernels measured so far
HALF, SINGLE = "float16", "float32"
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Fold:
    """Families that are held out together.

    Attributes:
        pool: rows that may be learned from: kernels of no held-out family, nor sampled near one's shapes.
        tested: rows of kernels that models of the held-out families alone hold.
        start: another device's predictors.
    """

    pool: Mask
    tested: Mask
    start: OtherPredictors | None = None


@dataclass(frozen=True)
class Replay:
    """A dataset to replay: one idle row for each kernel with the label.

    Attributes:
        points: of the kernels, for their order.
        of_models: whether a model holds the kernel.
    """

    rows: TrainingSet
    label: str
    points: Points
    of_models: Mask
    folds: Sequence[Fold] = field(default_factory=tuple)

    def held_out(self, count: int) -> Replay:
        """The same with each family held out, at most `count` folds."""
        return replace(self, folds=family_folds(self.rows.groups, self.of_models, count))


def family_folds(groups: Sequence[frozenset[str]], of_models: Mask, count: int) -> tuple[Fold, ...]:
    """At most `count` folds in which each family is held out once.

    Args:
        groups: the families of each row.
        of_models: whether a model holds the kernel of each row.
        count: of the folds; several families share one where there are more of them.
    """
    families = sorted(set().union(*groups))
    folds = []
    for place in range(min(count, len(families))):
        out = {name for number, name in enumerate(families) if number % count == place}
        tested = np.array([bool(of_row) and of_row <= out for of_row in groups])
        folds.append(Fold(np.array([not of_row & out for of_row in groups]), tested & of_models))
    return tuple(fold for fold in folds if fold.tested.any())


def read_replay(workspace: Workspace, target: str, rows: TrainingSet, label: str) -> Replay:
    """A target's dataset to replay, of which `rows` are the rows; no folds yet."""
    idle = np.flatnonzero(rows.idle & np.isfinite(rows.times_ms[label]))
    _, first = np.unique(rows.ids[idle], return_index=True)  # several machines may have measured a kernel
    rows = rows.rows(np.isin(np.arange(len(rows)), idle[first]))
    described = {entry.kernel.id: entry for entry in read_kernels(workspace.dataset(target))}
    return Replay(rows, label, Points.of([described[name].kernel for name in rows.ids]),
                  np.array([bool(described[name].models) for name in rows.ids]))


def half_from_single(replay: Replay, kernels: Mapping[str, Kernel], count: int, config: TrainingConfig) -> Replay:
    """The kernels of half precision, which start from predictors of single precision: these stand for another device.

    A kernel of half precision is described as the same one of single precision, and the other predictors see neither its family
    nor half precision.
    """
    is_half = np.array([kernels[name].dtype == HALF for name in replay.rows.ids])
    whole = replay.held_out(count)
    twins = [in_single_precision(kernels[name]) for name in replay.rows.ids[is_half]]
    half = replace(
        replay.rows.rows(is_half), features=KERNEL_FEATURES.matrix(twins),
        flops=np.array([kernel.flops for kernel in twins], dtype=float),
        bytes_moved=np.array([kernel.bytes_read + kernel.bytes_written for kernel in twins], dtype=float))
    folds = []
    for fold in whole.folds:
        if fold.tested[is_half].any():
            single = replay.rows.rows(fold.pool & ~is_half)
            single_model = fit_kernel_model(single, replay.label, chosen_predictors(single, replay.label, config), config)
            folds.append(Fold(fold.pool[is_half], fold.tested[is_half], OtherPredictors(SINGLE, single_model)))
    return Replay(half, replay.label, replay.points.only(is_half), replay.of_models[is_half], tuple(folds))


def in_single_precision(kernel: Kernel) -> Kernel:
    """The same kernel with single precision in place of half."""
    def single(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensor.model_copy(update={"dtype": SINGLE}) if tensor.dtype == HALF else tensor for tensor in tensors)

    return kernel.model_copy(update={"inputs": single(kernel.inputs), "outputs": single(kernel.outputs)})


def chosen_predictors(rows: TrainingSet, label: str, config: TrainingConfig) -> dict[str, str]:
    """As in `fit_kernel_model`: a dedicated one for all types with enough kernels, where the settings say so; else none."""
    names, counts = np.unique(rows.types, return_counts=True)
    return {str(name): str(name) for name, count in zip(names, counts, strict=True)
            if count >= config.own_min_kernels and config.booster(label).own_predictors == "all"}


def fit(rows: TrainingSet, label: str, config: TrainingConfig, start: OtherPredictors | None = None) -> Estimator:
    """Predictors of a label from some rows; with `start`, from those of another device."""
    chosen = chosen_predictors(rows, label, config)
    return fit_transferred(rows, label, chosen, config, start) if start else fit_kernel_model(rows, label, chosen, config)


def grow(replay: Replay, fold: Fold, sizes: Sequence[int], order: Order, config: TrainingConfig,
         seed: int) -> list[npt.NDArray[np.int64]]:
    """The rows measured at each of the sizes, which ascend; each holds those of the size before.

    In order `errors`, what is measured after the first size depends on the errors of what was measured before.
    """
    pool = np.flatnonzero(fold.pool)
    if order == "random":
        shuffled = np.random.default_rng(seed).permutation(pool)
        return [shuffled[:size] for size in sizes]
    if order == "useful":
        points = replay.points.only(pool)
        places = order_by_usefulness(points, points.only(pool[:0]), max(sizes), np.random.default_rng(seed))
        return [pool[places[:size]] for size in sizes]
    grown = [np.sort(grow(replay, fold, sizes[:1], "useful", config, seed)[0])]
    for size in sizes[1:]:
        known = grown[-1]
        left = np.setdiff1d(pool, known)
        measured, candidates = replay.points.only(known), replay.points.only(left)
        weights = error_weights(candidates, measured, left_out_log_errors(replay, known, config))
        places = order_by_usefulness(candidates, measured, size - len(known), np.random.default_rng([seed, size]), weights)
        grown.append(np.sort(np.concatenate([known, left[places]])))
    return grown


def left_out_log_errors(replay: Replay, known: npt.NDArray[np.int64], config: TrainingConfig) -> Floats:
    """log(predicted / measured) of measured kernels (rows, ascending), each predicted by a training without it."""
    rows = replay.rows.rows(np.isin(np.arange(len(replay.rows)), known))
    folds = assign_folds(rows.ids, rows.types, INNER_FOLDS, config.seed)
    errors = np.empty(len(rows))
    for number in set(folds.tolist()):
        out = folds == number
        left = rows.rows(out)
        model = fit(rows.rows(~out), replay.label, config)
        errors[out] = np.log(predict_rows(model, left) / left.times_ms[replay.label])
    return errors


def errors_of(replay: Replay, sizes: Sequence[int], order: Order, config: TrainingConfig, seed: int = 0,
              start: bool = False) -> list[dict[str, float]]:
    """For each size, the error of kernels of families that were held out, in per cent: mean, median, and weighted by time.

    Args:
        replay: the dataset, with folds.
        sizes: numbers of kernels measured, ascending.
        order: in which they are measured.
        config: of the training.
        seed: of the order.
        start: whether a training starts from the other device's predictors of the fold.
    """
    pairs_of: list[list[tuple[Floats, Floats]]] = [[] for _ in sizes]

    def one_fold(fold: Fold) -> list[tuple[Floats, Floats]]:
        tested = replay.rows.rows(fold.tested)
        pairs = []
        for chosen in grow(replay, fold, sizes, order, config, seed):
            rows = replay.rows.rows(np.isin(np.arange(len(replay.rows)), chosen))
            model = fit(rows, replay.label, config, fold.start if start else None)
            pairs.append((predict_rows(model, tested), tested.times_ms[replay.label]))
        return pairs

    for pairs in parallel_map(one_fold, replay.folds, config.workers):
        for place, pair in enumerate(pairs):
            pairs_of[place].append(pair)
    table = []
    for parts in pairs_of:
        predicted, measured = (np.concatenate(times) for times in zip(*parts, strict=True))
        errors = np.abs(predicted / measured - 1)
        table.append({"MAPE_%": 100 * float(errors.mean()), "median_%": 100 * float(np.median(errors)),
                      "time_weighted_MAPE_%": 100 * time_weighted_error(predicted, measured), "tested": len(errors)})
    return table
