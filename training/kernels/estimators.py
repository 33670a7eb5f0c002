"""What learns a kernel's time: a roofline, XGBoost on log(time / roofline), and a random forest to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from benchmark.records.labels import GPU_LABEL
from training.kernels.roofline import Roofline, fit_roofline
from training.kernels.schema import FeatureSchema
from training.kernels.settings import LAUNCHES, ForestSettings, TrainingConfig, XgboostSettings
from utils.lazy import sklearn, xgboost

if TYPE_CHECKING:
    from ort_analysis.records.kernel_record import Kernel
    from training.kernels.training_set import TrainingSet

Floats = npt.NDArray[np.float64]
T = TypeVar("T")
R = TypeVar("R")
TABLES = "tables"  # the feature that a roofline reads: how many tables a kernel copies to the GPU
SHARED = "shared"  # the predictor of all types that have none of their own


FLAT = Roofline(flops_per_ms=1e300, bytes_per_ms=1e300, floor_ms=1.0, scale=1.0)  # 1, whatever the kernel
LEAST_LAUNCHES = FLAT.model_copy(update={"table_ms": 1.0})  # one for the kernel, one for each table


class TimePredictor(Protocol):
    """What tells kernels' times from their shapes; arguments and result as of `KernelModel.predict_ms`."""

    def predict_ms(self, types: Iterable[str], features: Floats, load: Floats, flops: Floats,
                   bytes_moved: Floats) -> Floats: ...


@dataclass(frozen=True)
class KernelModel:
    """The predictors of one label.

    Attributes:
        schema: of the features that the boosters read.
        roofline: of the label.
        type_codes: kernel types as numbers, in the order of their median log(time / roofline).
        predictor_of: for each kernel type the name of its booster.
        boosters: by name, the shared one always among them; they hold log(time / roofline).
        idle_load: the load that stands for an idle device.
    """

    schema: FeatureSchema
    roofline: Roofline
    type_codes: Mapping[str, float]
    predictor_of: Mapping[str, str]
    boosters: Mapping[str, xgboost.Booster]
    idle_load: Sequence[float]

    def predict_ms(self, types: Iterable[str], features: Floats, load: Floats, flops: Floats,
                   bytes_moved: Floats) -> Floats:
        """The time of each row in ms, by the predictor of its kernel type.

        A type that has none gets the scaled roofline, slowed down as the shared predictor says that such a kernel is by
        the load.

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
            rows_of.setdefault(self.predictor_of.get(name, ""), []).append(row)
        for predictor, rows in rows_of.items():
            if predictor:
                log_ratio[rows] = self.boosters[predictor].inplace_predict(matrix[rows])
                continue
            idle = matrix[rows]
            idle[:, idle.shape[1] - len(self.idle_load):] = self.idle_load
            if not np.array_equal(idle, matrix[rows], equal_nan=True):  # else the shared predictor need not be read
                shared = self.boosters[SHARED]
                log_ratio[rows] += shared.inplace_predict(matrix[rows]) - shared.inplace_predict(idle)
        return self.roofline.bound_ms(flops, bytes_moved, table_counts(self.schema, features)) * np.exp(log_ratio)


def table_counts(schema: FeatureSchema, features: Floats) -> Floats:
    """How many tables each row's kernel copies to the GPU; 0 where the schema does not count them."""
    return features[:, schema.index(TABLES)] if TABLES in schema.names else np.zeros(len(features))


def design_matrix(types: Iterable[str], features: Floats, load: Floats,
                  codes: Mapping[str, float]) -> npt.NDArray[np.float32]:
    """What the estimators see: the features, the encoded kernel type (NaN: unknown) and the load."""
    encoded = np.array([codes.get(name, np.nan) for name in types]).reshape(-1, 1)
    return np.hstack([features, encoded, load]).astype(np.float32)


def encode_types(types: Iterable[str], log_ratios: Floats) -> dict[str, float]:
    """Kernel types numbered from the fastest to the slowest against the roofline, so that trees can split between."""
    by_type: dict[str, list[float]] = {}
    for name, ratio in zip(types, log_ratios, strict=True):
        by_type.setdefault(str(name), []).append(float(ratio))
    ordered = sorted(by_type, key=lambda name: (float(np.median(by_type[name])), name))
    return {name: float(place) for place, name in enumerate(ordered)}


def assign_folds(ids: Iterable[str], types: Iterable[str], folds: int, seed: int) -> npt.NDArray[np.int64]:
    """A fold for each row: all rows of a kernel in one, and each type's kernels spread evenly over all."""
    kernels = sorted(set(zip(map(str, types), map(str, ids), strict=True)))
    shuffled = np.random.default_rng(seed).permutation(len(kernels))
    by_type = sorted((kernels[place] for place in shuffled), key=lambda kernel: kernel[0])  # stable: shuffled within a type
    fold = {name: place % folds for place, (_, name) in enumerate(by_type)}
    return np.array([fold[str(name)] for name in ids], dtype=np.int64)


def train_booster(matrix: npt.NDArray[np.float32], log_ratios: Floats, settings: XgboostSettings,
                  seed: int) -> xgboost.Booster:
    """XGBoost on log(time / roofline). One thread: fits run side by side, and busy cores stall its own threads."""
    parameters = {
        "objective": f"reg:{settings.objective}", "max_depth": settings.depth, "eta": settings.learning_rate,
        "subsample": settings.row_share, "colsample_bytree": settings.column_share,
        "min_child_weight": settings.min_leaf_weight, "max_bin": settings.bins, "tree_method": "hist", "seed": seed,
        "nthread": 1, "verbosity": 0,
    }
    return xgboost.train(parameters, xgboost.DMatrix(matrix, log_ratios, nthread=1), settings.trees)


def train_forest(matrix: npt.NDArray[np.float32], log_ratios: Floats, settings: ForestSettings, seed: int) -> Any:
    """A random forest of unlimited depth on the same numbers."""
    forest = sklearn.ensemble.RandomForestRegressor(
        n_estimators=settings.trees, max_features=settings.column_share, random_state=seed, n_jobs=1)
    return forest.fit(matrix, log_ratios)


@dataclass(frozen=True)
class Problem:
    """What the estimators of one label learn from: the roofline, type codes, matrix and log ratios of some rows."""

    roofline: Roofline
    type_codes: dict[str, float]
    matrix: npt.NDArray[np.float32]
    log_ratios: Floats


def pose(rows: TrainingSet, label: str, roofline: Roofline | None = None) -> Problem:
    """The learning problem of `label` on `rows`, which all have that label; nothing of other rows enters.

    Args:
        rows: to learn from.
        label: whose times.
        roofline: another than the one that is fitted to the rows (for launches: than LEAST_LAUNCHES).
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
                     problem: Problem | None = None) -> KernelModel:
    """Boosters for `label`: one for all rows, and one for each kernel type in `own` that has rows.

    Every type keeps the shared booster as well; `predictor_of` says which one counts.
    """
    problem, settings = problem or pose(rows, label), config.booster(label)
    boosters = {SHARED: train_booster(problem.matrix, problem.log_ratios, settings, config.seed)}
    predictor_of = dict.fromkeys(problem.type_codes, SHARED)
    for name in own:
        mask = rows.types == name
        if mask.any():
            boosters[name] = train_booster(problem.matrix[mask], problem.log_ratios[mask], settings, config.seed)
            predictor_of[name] = name
    return KernelModel(rows.schema, problem.roofline, problem.type_codes, predictor_of, boosters,
                       tuple(rows.idle_load.values()))


def predict_kernels(predictor: TimePredictor, kernels: Sequence[Kernel], features: Floats, load: Sequence[float]) -> Floats:
    """The time of each kernel in ms beside one load.

    Args:
        features: kernels × the features that the predictor reads.
        load: a value for each metric.
    """
    return predictor.predict_ms(
        [kernel.type for kernel in kernels], features, np.tile(np.array(load, dtype=float), (len(kernels), 1)),
        np.array([kernel.flops for kernel in kernels], dtype=float),
        np.array([kernel.bytes_read + kernel.bytes_written for kernel in kernels], dtype=float))


def predict_rows(model: KernelModel, rows: TrainingSet) -> Floats:
    """`model`'s times in ms for rows of a dataset."""
    return model.predict_ms(rows.types, rows.features, rows.load, rows.flops, rows.bytes_moved)


def parallel_map(task: Callable[[T], R], items: Iterable[T], workers: int) -> list[R]:
    """`task` of each item, in order, `workers` at a time. Threads will do: the estimators compute outside the interpreter."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(task, items))
