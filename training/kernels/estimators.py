"""Estimators of a kernel's time: a roofline, XGBoost on log(time / roofline), and a random forest for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from records.measurement import GPU_LABEL
from training.kernels.class_boosters import ClassBoosters, WithClasses, class_names, class_rows, kind_code
from training.kernels.relatives import row_weights
from training.kernels.roofline import Roofline, fit_roofline
from training.kernels.schema import FeatureSchema
from training.kernels.settings import LAUNCHES, ForestSettings, TrainingConfig, XgboostSettings
from utils.lazy import sklearn, xgboost

if TYPE_CHECKING:
    from records.kernel_record import Kernel
    from training.kernels.training_set import TrainingSet

Floats = npt.NDArray[np.float64]
T = TypeVar("T")
R = TypeVar("R")
TABLES = "tables"  # the feature that the roofline needs: how many tables a kernel copies to the GPU
# A GPU's time of a type with so many rows is learned by twice as many trees. With collections left out in turn, that lowers the
# error of convolutions on an H200 from 8.2 to 7.8 % (weighted by time: 8.9 to 8.6); types with fewer rows gain nothing.
MANY_ROWS = 10_000
SHARED = "shared"  # the predictor of all types without one of their own


FLAT = Roofline(flops_per_ms=1e300, bytes_per_ms=1e300, floor_ms=1.0, scale=1.0)  # 1 for every kernel
LEAST_LAUNCHES = FLAT.model_copy(update={"table_ms": 1.0})  # one for the kernel, and one for each table


class TimePredictor(Protocol):
    """Predicts the times of kernels from their shapes; arguments and result as of `KernelModel.predict_ms`."""

    def predict_ms(self, types: Iterable[str], features: Floats, load: Floats, flops: Floats,
                   bytes_moved: Floats) -> Floats: ...


@dataclass(frozen=True)
class KernelModel:
    """The predictors of one label.

    Attributes:
        schema: of the features that the boosters read.
        roofline: of the label.
        type_codes: kernel types as numbers, in the order of their median log(time / roofline).
        predictor_of: for each kernel type, the name of its booster.
        boosters: by name, always with the shared one, and those of classes of operators (see `class_boosters`), if learned, for
            types that were never measured; they predict log(time / roofline).
        idle_load: the load of an idle device.
    """

    schema: FeatureSchema
    roofline: Roofline
    type_codes: Mapping[str, float]
    predictor_of: Mapping[str, str]
    boosters: Mapping[str, xgboost.Booster]
    idle_load: Sequence[float]

    def predict_ms(self, types: Iterable[str], features: Floats, load: Floats, flops: Floats,
                   bytes_moved: Floats) -> Floats:
        """The time (ms) of each row, by the predictor of its kernel type.

        A type without a predictor gets that of its class of operators, or the scaled roofline where classes were not learned.
        Under load, it is multiplied by the slowdown that the shared predictor gives for such a kernel.

        Args:
            types: kernel type of each row.
            features: rows × the schema's features.
            load: rows × metrics.
            flops, bytes_moved: of each row.
        """
        types = list(types)
        matrix = design_matrix(types, features, load, self.type_codes)
        log_ratio = np.full(len(types), np.log(self.roofline.scale))
        rows_of: dict[str, list[int]] = {}
        for row, name in enumerate(types):
            rows_of.setdefault(self.predictor_of.get(name) or self._class_predictor(name), []).append(row)
        for predictor, rows in rows_of.items():
            known = types[rows[0]] in self.predictor_of
            seen = matrix[rows]
            if not known:
                seen[:, features.shape[1]] = [kind_code(types[row]) for row in rows]
            if predictor:
                log_ratio[rows] = self.boosters[predictor].inplace_predict(seen)
            if known:
                continue
            idle = matrix[rows]
            idle[:, idle.shape[1] - len(self.idle_load):] = self.idle_load
            if not np.array_equal(idle, matrix[rows], equal_nan=True):  # otherwise the shared predictor need not be read
                shared = self.boosters[SHARED]
                log_ratio[rows] += shared.inplace_predict(matrix[rows]) - shared.inplace_predict(idle)
        return self.roofline.bound_ms(flops, bytes_moved, table_counts(self.schema, features)) * np.exp(log_ratio)

    def _class_predictor(self, kernel_type: str) -> str:
        """The booster of a type's kind, or of its class or of all where that was not measured, or "" where none was learned."""
        return next((name for name in class_names(kernel_type) if name in self.boosters), "")


def table_counts(schema: FeatureSchema, features: Floats) -> Floats:
    """How many tables the kernel of each row copies to the GPU; 0 where the schema does not count them."""
    return features[:, schema.index(TABLES)] if TABLES in schema.names else np.zeros(len(features))


def design_matrix(types: Iterable[str], features: Floats, load: Floats,
                  codes: Mapping[str, float]) -> npt.NDArray[np.float32]:
    """The input of the estimators: the features, the code of the kernel type (NaN: unknown), and the load."""
    encoded = np.array([codes.get(name, np.nan) for name in types]).reshape(-1, 1)
    return np.hstack([features, encoded, load]).astype(np.float32)


def encode_types(types: Iterable[str], log_ratios: Floats) -> dict[str, float]:
    """A number for each kernel type, in the order of the median ratio to the roofline, so that trees can split between them."""
    by_type: dict[str, list[float]] = {}
    for name, ratio in zip(types, log_ratios, strict=True):
        by_type.setdefault(str(name), []).append(float(ratio))
    ordered = sorted(by_type, key=lambda name: (float(np.median(by_type[name])), name))
    return {name: float(place) for place, name in enumerate(ordered)}


def assign_folds(ids: Iterable[str], types: Iterable[str], folds: int, seed: int) -> npt.NDArray[np.int64]:
    """A fold for each row. All rows of a kernel are in one fold, and the kernels of each type are spread evenly over the
    folds."""
    kernels = sorted(set(zip(map(str, types), map(str, ids), strict=True)))
    shuffled = np.random.default_rng(seed).permutation(len(kernels))
    by_type = sorted((kernels[place] for place in shuffled), key=lambda kernel: kernel[0])  # stable: shuffled within a type
    fold = {name: place % folds for place, (_, name) in enumerate(by_type)}
    return np.array([fold[str(name)] for name in ids], dtype=np.int64)


def train_booster(matrix: npt.NDArray[np.float32], log_ratios: Floats, settings: XgboostSettings, seed: int,
                  weights: Floats | None = None) -> xgboost.Booster:
    """A booster trained on log(time / roofline), with `weights` of the rows where they are given. It uses one thread, since
    several trainings run in parallel, and XGBoost's own threads stall on busy cores."""
    parameters = {
        "objective": f"reg:{settings.objective}", "max_depth": settings.depth, "eta": settings.learning_rate,
        "subsample": settings.row_share, "colsample_bytree": settings.column_share,
        "min_child_weight": settings.min_leaf_weight, "max_bin": settings.bins, "tree_method": "hist", "seed": seed,
        "nthread": 1, "verbosity": 0,
    }
    return xgboost.train(parameters, xgboost.DMatrix(matrix, log_ratios, weight=weights, nthread=1), settings.trees)


def train_forest(matrix: npt.NDArray[np.float32], log_ratios: Floats, settings: ForestSettings, seed: int) -> Any:
    """A random forest of unlimited depth, trained on the same numbers."""
    forest = sklearn.ensemble.RandomForestRegressor(
        n_estimators=settings.trees, max_features=settings.column_share, random_state=seed, n_jobs=1)
    return forest.fit(matrix, log_ratios)


@dataclass(frozen=True)
class Problem:
    """The input and the target of a training: roofline, type codes, matrix and log(time / roofline) of some rows."""

    roofline: Roofline
    type_codes: dict[str, float]
    matrix: npt.NDArray[np.float32]
    log_ratios: Floats


def pose(rows: TrainingSet, label: str, roofline: Roofline | None = None) -> Problem:
    """The learning problem of `label`, from `rows` alone.

    Args:
        rows: to learn from; all have the label.
        label: the label whose times are learned.
        roofline: in place of the one that is fitted to the rows (for launches: in place of LEAST_LAUNCHES).
    """
    times, tables = rows.times_ms[label], table_counts(rows.schema, rows.features)
    base = rows.idle if rows.idle.any() else np.ones(len(rows), dtype=bool)
    if roofline is None:
        roofline = LEAST_LAUNCHES if label == LAUNCHES else fit_roofline(
            rows.flops[base], rows.bytes_moved[base], times[base], tables[base] if label == GPU_LABEL else None)
    log_ratios = np.log(times / roofline.bound_ms(rows.flops, rows.bytes_moved, tables))
    codes = encode_types(rows.types, log_ratios)
    return Problem(roofline, codes, design_matrix(rows.types, rows.features, rows.load, codes), log_ratios)


def fit_kernel_model(rows: TrainingSet, label: str, own: Sequence[str], config: TrainingConfig,
                     problem: Problem | None = None, steady: frozenset[str] = frozenset()) -> KernelModel:
    """Boosters for `label`: a shared one of all rows, and one for each kernel type in `own` that has rows.

    The shared booster is trained on the rows of all types; `predictor_of` says which booster predicts a type. That of the GPU's
    time of one type learns a little from related types, too (see relatives.py). `steady` is as of `ClassBoosters`.
    """
    problem, settings = problem or pose(rows, label), config.booster(label)
    boosters = {SHARED: train_booster(problem.matrix, problem.log_ratios, settings, config.seed)}
    predictor_of = dict.fromkeys(problem.type_codes, SHARED)
    for name in own:
        if (rows.types == name).any():
            boosters[name] = train_own(name, rows, problem, settings, config.seed, label == GPU_LABEL)
            predictor_of[name] = name
    of_classes = learn_classes(rows, problem, config, steady=steady)
    return KernelModel(rows.schema, problem.roofline, problem.type_codes, predictor_of, WithClasses(boosters, of_classes),
                       tuple(rows.idle_load.values()))


def train_own(name: str, rows: TrainingSet, problem: Problem, settings: XgboostSettings, seed: int,
               on_gpu: bool) -> xgboost.Booster:
    """The booster of one kernel type; `on_gpu`: of the GPU's time, learned from related types too (see relatives.py)."""
    weights = row_weights(name, rows.types) if on_gpu else (rows.types == name).astype(float)
    mask = weights > 0
    alone = bool((weights[mask] == 1.0).all())
    if on_gpu and (rows.types == name).sum() >= MANY_ROWS:
        settings = settings.model_copy(update={"trees": 2 * settings.trees})
    return train_booster(problem.matrix[mask], problem.log_ratios[mask], settings, seed, None if alone else weights[mask])


def learn_classes(rows: TrainingSet, problem: Problem, config: TrainingConfig, without: str = "",
                  steady: frozenset[str] = frozenset()) -> ClassBoosters:
    """The boosters of the classes of operators, from idle rows.

    Args:
        rows, problem: to learn from.
        config: of the training.
        without: an operator that is left out; "" for none.
        steady: as of `ClassBoosters`.
    """
    found = class_rows(problem.matrix, problem.log_ratios, rows.types, rows.idle, rows.schema.names, config.seed)
    return ClassBoosters(found.without(without) if without else found, partial(
        _train_class, settings=config.xgboost_class, seed=config.seed), steady)


def _train_class(matrix: npt.NDArray[np.float32], log_ratios: Floats, weights: Floats, settings: XgboostSettings,
                 seed: int) -> xgboost.Booster:
    if not len(matrix):
        flat = xgboost.DMatrix(np.zeros((1, matrix.shape[1]), dtype=np.float32), np.zeros(1), nthread=1)
        return xgboost.train({"objective": "reg:squarederror", "base_score": float(log_ratios.mean()), "nthread": 1}, flat, 0)
    return train_booster(matrix, log_ratios, settings, seed, weights)


def predict_kernels(predictor: TimePredictor, kernels: Sequence[Kernel], features: Floats, load: Sequence[float]) -> Floats:
    """The time (ms) of each kernel under one load.

    Args:
        features: kernels × the features that the predictor reads.
        load: one value per metric.
    """
    return predictor.predict_ms(
        [kernel.type for kernel in kernels], features, np.tile(np.array(load, dtype=float), (len(kernels), 1)),
        np.array([kernel.flops for kernel in kernels], dtype=float),
        np.array([kernel.bytes_read + kernel.bytes_written for kernel in kernels], dtype=float))


def predict_rows(model: KernelModel, rows: TrainingSet) -> Floats:
    """The times (ms) that `model` predicts for rows of a dataset."""
    return model.predict_ms(rows.types, rows.features, rows.load, rows.flops, rows.bytes_moved)


def parallel_map(task: Callable[[T], R], items: Iterable[T], workers: int) -> list[R]:
    """The results of `task` for each item, in order, computed by `workers` threads. Threads are enough, since the estimators
    release the interpreter's lock while they compute."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(task, items))
