"""Estimators of a kernel's time: a roofline, and XGBoost or a random forest on log(time / roofline)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.boosters import from_forest
from hase.learned.kernels.class_boosters import (
    ClassBoosters,
    WithClasses,
    class_names,
    class_rows,
    is_class,
    kind_code,
    row_weights,
)
from hase.learned.kernels.features import KERNEL_FEATURES
from hase.learned.kernels.interface import Estimator, Measured
from hase.learned.kernels.schema import FeatureSchema, KernelRows
from hase.learned.kernels.settings import LAUNCHES, ForestSettings, TrainingConfig, XgboostSettings
from hase.records.measurement import GPU_LABEL
from hase.utils.config import Config
from hase.utils.lazy import sklearn, xgboost

if TYPE_CHECKING:
    from hase.records.kernel_record import Kernel
    from hase.training.kernels.training_set import TrainingSet

Floats = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")
TABLES = "tables"  # the feature that the roofline needs: how many tables a kernel copies to the GPU
# A GPU's time of a type with so many rows is learned by twice as many trees. With collections left out in turn, that lowers the
# error of convolutions on an H200 from 8.2 to 7.8 % (weighted by time: 8.9 to 8.6); types with fewer rows gain nothing.
MANY_ROWS = 10_000
SHARED = "shared"  # the booster of all types without one of their own
FOREST = "random_forest"  # the forest of all types, which is kept as a booster


class Roofline(Config):
    """The rates of a device, which bound the time of a kernel by arithmetic or by memory, and a floor for every kernel.

    Attributes:
        flops_per_ms, bytes_per_ms: the rates that efficient kernels reach.
        floor_ms: the time of a kernel that does nothing.
        scale: the median ratio of measured time to the bound. A kernel of unknown type is estimated as scale times its bound.
        table_ms: the time to copy one of the tables that some kernels copy to a GPU (feature `tables`).
    """

    flops_per_ms: float
    bytes_per_ms: float
    floor_ms: float
    scale: float
    table_ms: float = 0.0

    def bound_ms(self, flops: Floats, bytes_moved: Floats, tables: Floats | float = 0.0) -> Floats:
        """The lower bound (ms) of each kernel's time."""
        return (np.maximum(flops / self.flops_per_ms, bytes_moved / self.bytes_per_ms) + self.floor_ms
                + self.table_ms * tables)


def fit_roofline(flops: Floats, bytes_moved: Floats, times_ms: Floats, tables: Floats | None = None,
                 weights: Floats | None = None) -> Roofline:
    """The roofline of measured idle kernels: the rates that 2 % of them exceed, and as the floor the time that 2 % stay below.
    With `tables`, the copy of a table takes the time of the floor too. With `weights`, the kernels count as these say."""
    rates = flops / times_ms, bytes_moved / times_ms
    flops_per_ms, bytes_per_ms = (
        _percentile(rate[rate > 0], 98, None if weights is None else weights[rate > 0]) if (rate > 0).any() else 1.0
        for rate in rates)
    floor_ms = _percentile(times_ms, 2, weights)
    bare = Roofline(flops_per_ms=flops_per_ms, bytes_per_ms=bytes_per_ms, floor_ms=floor_ms, scale=1.0,
                    table_ms=0.0 if tables is None else floor_ms)
    bound_ms = bare.bound_ms(flops, bytes_moved, 0.0 if tables is None else tables)
    return bare.model_copy(update={"scale": _percentile(times_ms / bound_ms, 50, weights)})


def _percentile(values: Floats, percent: float, weights: Floats | None) -> float:
    if weights is None:
        return float(np.percentile(values, percent))
    return float(np.percentile(values, percent, weights=weights, method="inverted_cdf"))  # the only one that takes weights


FLAT = Roofline(flops_per_ms=1e300, bytes_per_ms=1e300, floor_ms=1.0, scale=1.0)  # 1 for every kernel
LEAST_LAUNCHES = FLAT.model_copy(update={"table_ms": 1.0})  # one for the kernel, and one for each table


class OnRoofline(Estimator):
    """A roofline times a learned ratio, the logarithm of which a subclass learns.

    Attributes:
        roofline: of the kernels that it was fitted to.
        type_codes: kernel types as numbers, in the order of their median log(time / roofline).
    """

    features = KERNEL_FEATURES
    saved_classes = (Roofline,)
    roofline: Roofline
    type_codes: Mapping[str, float]

    @abstractmethod
    def log_ratios(self, types: Sequence[str], matrix: Matrix) -> Floats:
        """log(time / roofline) of each row of a `design_matrix`."""

    def predict_ms(self, kernels: KernelRows) -> Floats:
        types = [str(name) for name in kernels.types]
        log_ratios = self.log_ratios(types, design_matrix(types, kernels.features, kernels.load, self.type_codes))
        tables = table_counts(self.features, kernels.features)
        return self.roofline.bound_ms(kernels.flops, kernels.bytes_moved, tables) * np.exp(log_ratios)

    def saved(self) -> dict[str, Any]:
        return {"roofline": self.roofline, "type_codes": dict(self.type_codes)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.roofline, self.type_codes = saved["roofline"], saved["type_codes"]


@dataclass
class KernelModel(OnRoofline):
    """The predictors that training learns for a label: a booster for each type with enough kernels, a shared one for the rest,
    or a random forest, where the settings allow one.

    A type that was not learned from gets the booster of its class of operators, or the scaled roofline where classes were not
    learned. Under load, its time is multiplied by the slowdown that the shared booster gives for such a kernel.

    Attributes:
        features: what the boosters read.
        roofline: of the label.
        type_codes: kernel types as numbers, in the order of their median log(time / roofline).
        predictor_of: for each kernel type, the name of its booster.
        boosters: by name, with those of classes of operators (see class_boosters.py), if learned, for types that were never
            measured; they predict log(time / roofline).
        idle_load: the load of an idle device.
        chosen: as in `fit_kernel_model`, what `fit` learns; None: a dedicated booster for all types with as many kernels as the
            settings ask for (`own_min_kernels`).
    """

    name = "in_use"  # other estimators are compared with it
    features: FeatureSchema = KERNEL_FEATURES
    roofline: Roofline = FLAT
    type_codes: Mapping[str, float] = field(default_factory=dict)
    predictor_of: Mapping[str, str] = field(default_factory=dict)
    boosters: Mapping[str, xgboost.Booster] = field(default_factory=dict)
    idle_load: Sequence[float] = ()
    chosen: Mapping[str, str] | None = None

    def fit(self, measured: Measured) -> None:
        rows, config = measured.all_rows, measured.config
        rows = rows.rows(np.isfinite(rows.times_ms[measured.label]))
        wanted = sorted(set(measured.types.tolist()))
        chosen = self.chosen
        if chosen is None:
            chosen = {name: name for name in wanted
                      if len(set(rows.ids[rows.types == name].tolist())) >= config.own_min_kernels}
        learned = fit_kernel_model(rows, measured.label, chosen, config, types=wanted)
        for attribute in fields(learned):
            if attribute.name != "chosen":
                setattr(self, attribute.name, getattr(learned, attribute.name))

    def predict_ms(self, kernels: KernelRows) -> Floats:
        if kernels.load is None:
            idle = np.tile(np.array(self.idle_load, dtype=float), (len(kernels), 1))
            kernels = replace(kernels, load=idle)
        return super().predict_ms(kernels)

    def log_ratios(self, types: Sequence[str], matrix: Matrix) -> Floats:
        code = matrix.shape[1] - len(self.idle_load) - 1  # the column of the type's code; the load follows
        log_ratios = np.full(len(types), np.log(self.roofline.scale))
        rows_of: dict[str, list[int]] = {}
        for row, name in enumerate(types):
            rows_of.setdefault(self.predictor_of.get(name) or self._class_predictor(name), []).append(row)
        for predictor, rows in rows_of.items():
            known = types[rows[0]] in self.predictor_of
            read = matrix[rows]
            if not known:
                read[:, code] = [kind_code(types[row]) for row in rows]
            if predictor:
                log_ratios[rows] = self.boosters[predictor].inplace_predict(read)
            if known:
                continue
            idle = matrix[rows]
            idle[:, code + 1:] = self.idle_load
            if not np.array_equal(idle, matrix[rows], equal_nan=True):  # otherwise the shared booster need not be read
                shared = self.boosters[SHARED]
                log_ratios[rows] += shared.inplace_predict(matrix[rows]) - shared.inplace_predict(idle)
        return log_ratios

    def saved(self) -> dict[str, Any]:
        of_classes = filter(is_class, self.boosters)
        used = sorted({*self.predictor_of.values(), *of_classes} | ({SHARED} & set(self.boosters)))
        return super().saved() | {
            "predictor_of": dict(self.predictor_of), "idle_load": list(self.idle_load),
            "boosters": {name: self.boosters[name] for name in used}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        self.predictor_of, self.boosters, self.idle_load = saved["predictor_of"], saved["boosters"], saved["idle_load"]
        if absent := sorted(set(self.predictor_of.values()) - set(self.boosters)):
            raise ValueError(f"booster {absent[0]} is missing")

    def _class_predictor(self, kernel_type: str) -> str:
        """The booster of a type's kind, or of its class or of all where that was not measured, or "" where none was learned."""
        return next((name for name in class_names(kernel_type) if name in self.boosters), "")


def table_counts(schema: FeatureSchema, features: Floats) -> Floats:
    """How many tables the kernel of each row copies to the GPU; 0 where the schema does not count them."""
    return features[:, schema.index(TABLES)] if TABLES in schema.names else np.zeros(len(features))


def design_matrix(types: Iterable[str], features: Floats, load: Floats | None, codes: Mapping[str, float]) -> Matrix:
    """The input of the estimators: the features, the code of the kernel type (NaN: unknown), and the load, if any."""
    encoded = np.array([codes.get(name, np.nan) for name in types], dtype=float).reshape(-1, 1)
    return np.hstack([features, encoded, *([] if load is None else [load])]).astype(np.float32)


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


def train_booster(matrix: Matrix, log_ratios: Floats, settings: XgboostSettings, seed: int,
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


def train_forest(matrix: Matrix, log_ratios: Floats, settings: ForestSettings, seed: int,
                 weights: Floats | None = None) -> xgboost.Booster:
    """scikit-learn's random forest of unlimited depth, trained on the same numbers, as a booster."""
    forest = sklearn.ensemble.RandomForestRegressor(
        n_estimators=settings.trees, max_features=settings.column_share, min_samples_leaf=settings.least_in_leaf,
        random_state=seed, n_jobs=1)
    return from_forest(forest.fit(matrix, log_ratios, sample_weight=weights))


@dataclass(frozen=True)
class Problem:
    """The input and the target of a training: roofline, type codes, matrix and log(time / roofline) of some rows, and how much
    each of them counts (None: all alike)."""

    roofline: Roofline
    type_codes: dict[str, float]
    matrix: Matrix
    log_ratios: Floats
    weights: Floats | None = None


def problem_of(kernels: KernelRows, times_ms: Floats, roofline: Roofline | None = None,
               tables: Floats | float = 0.0, weights: Floats | None = None) -> Problem:
    """The learning problem of measured kernels.

    Args:
        kernels: to learn from.
        times_ms: of each of them.
        roofline: in place of the one that is fitted to them.
        tables: how many tables each kernel copies to the GPU.
        weights: how much each kernel counts; None: all alike.
    """
    roofline = roofline or fit_roofline(kernels.flops, kernels.bytes_moved, times_ms, weights=weights)
    log_ratios = np.log(times_ms / roofline.bound_ms(kernels.flops, kernels.bytes_moved, tables))
    types = kernels.types.tolist()
    codes = encode_types(types, log_ratios)
    return Problem(roofline, codes, design_matrix(types, kernels.features, kernels.load, codes), log_ratios, weights)


def learning_problem(rows: TrainingSet, label: str, roofline: Roofline | None = None) -> Problem:
    """The learning problem of `label`, from `rows` alone.

    Args:
        rows: to learn from; all have the label.
        label: the label whose times are learned.
        roofline: in place of the one that is fitted to the rows (for launches: in place of LEAST_LAUNCHES).
    """
    times_ms, tables, weights = rows.times_ms[label], table_counts(rows.schema, rows.features), rows.weights(label)
    base = rows.idle if rows.idle.any() else np.ones(len(rows), dtype=bool)
    if roofline is None:
        roofline = LEAST_LAUNCHES if label == LAUNCHES else fit_roofline(
            rows.flops[base], rows.bytes_moved[base], times_ms[base], tables[base] if label == GPU_LABEL else None,
            None if weights is None else weights[base])
    return problem_of(rows.kernels, times_ms, roofline, tables, weights)


def fit_kernel_model(rows: TrainingSet, label: str, chosen: Mapping[str, str], config: TrainingConfig,
                     problem: Problem | None = None, steady: frozenset[str] = frozenset(),
                     types: Sequence[str] | None = None) -> KernelModel:
    """Boosters for `label`: a shared one of all rows, and those of `chosen` types that have rows. A dedicated one of the GPU's
    time learns a little from related types, too (see `related_types`).

    Args:
        rows: to learn from; all have the label.
        label: the label whose times are learned.
        chosen: for kernel types that the shared booster does not predict, the one that does: the type's name for a dedicated
            one, or FOREST.
        config: of the training.
        problem: of these rows, if it is known.
        steady: classes of operators that boosters of classes give the median ratio (see `ClassBoosters`).
        types: the only types that will be predicted, so that no booster is trained that none of them needs; default: all.
    """
    problem, settings = problem or learning_problem(rows, label), config.booster(label)
    learned = {name for name in chosen if (rows.types == name).any() and (types is None or name in types)}
    predictor_of = {name: chosen[name] if name in learned else SHARED for name in types or problem.type_codes}

    def train(name: str) -> xgboost.Booster:
        if name == SHARED:
            return train_booster(problem.matrix, problem.log_ratios, settings, config.seed, problem.weights)
        if name == FOREST:
            return train_forest(problem.matrix, problem.log_ratios, config.forest, config.seed, problem.weights)
        return train_dedicated(name, rows, problem, settings, config.seed, label == GPU_LABEL)

    needed = dict.fromkeys([*([SHARED] if types is None else []), *predictor_of.values()])
    boosters = WithClasses({name: train(name) for name in needed}, learn_classes(rows, problem, config, steady=steady))
    return KernelModel(rows.schema, problem.roofline, problem.type_codes, predictor_of, boosters,
                       tuple(rows.idle_load.values()))


def train_dedicated(name: str, rows: TrainingSet, problem: Problem, settings: XgboostSettings, seed: int,
              on_gpu: bool) -> xgboost.Booster:
    """The booster of one kernel type; `on_gpu`: of the GPU's time, learned from related types too (see `related_types`)."""
    weights = row_weights(name, rows.types) if on_gpu else (rows.types == name).astype(float)
    mask = weights > 0
    if problem.weights is not None:
        weights = weights * problem.weights
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
        steady: classes that get the median ratio (see `ClassBoosters`).
    """
    known = class_rows(problem.matrix, problem.log_ratios, rows.types, rows.idle, rows.schema.names, config.seed,
                       problem.weights)
    return ClassBoosters(known.without(without) if without else known, partial(
        _train_class, settings=config.xgboost_class, seed=config.seed), steady)


def _train_class(matrix: Matrix, log_ratios: Floats, weights: Floats, settings: XgboostSettings,
                 seed: int) -> xgboost.Booster:
    if not len(matrix):
        flat = xgboost.DMatrix(np.zeros((1, matrix.shape[1]), dtype=np.float32), np.zeros(1), nthread=1)
        return xgboost.train({"objective": "reg:squarederror", "base_score": float(log_ratios.mean()), "nthread": 1}, flat, 0)
    return train_booster(matrix, log_ratios, settings, seed, weights)


def fit_factors(rows: TrainingSet, logs: Floats, settings: XgboostSettings, seed: int) -> KernelModel:
    """A booster of one factor for each kernel, such as an error or a width, for all types together.

    Args:
        rows: the kernels.
        logs: the factor of each row, as a logarithm.
        settings, seed: of the booster.
    """
    types = rows.types.tolist()
    codes = encode_types(types, logs)
    booster = train_booster(design_matrix(types, rows.features, rows.load, codes), logs, settings, seed)
    return KernelModel(rows.schema, type_codes=codes, predictor_of=dict.fromkeys(codes, SHARED), boosters={SHARED: booster},
                       idle_load=tuple(rows.idle_load.values()))


def predict_kernels(predictor: Estimator, kernels: Sequence[Kernel], features: Floats, load: Sequence[float]) -> Floats:
    """The time (ms) of each kernel under one load.

    Args:
        features: kernels × the features that the predictor reads.
        load: one value per metric.
    """
    return predictor.predict_ms(KernelRows.of(kernels, features, load))


def predict_rows(predictor: Estimator, rows: TrainingSet) -> Floats:
    """The times (ms) that `predictor` predicts for rows of a dataset."""
    return predictor.predict_ms(rows.kernels)


def parallel_map(task: Callable[[T], R], items: Iterable[T], workers: int) -> list[R]:
    """The results of `task` for each item, in order, computed by `workers` threads. Threads are enough, since the estimators
    release the interpreter's lock while they compute."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(task, items))
