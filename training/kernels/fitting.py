"""Fits predictors of kernel times: rooflines, and boosters and forests that learn log(time / roofline).

Boosters of classes predict operators that were never measured from measured ones of their kind and class. They learn from
bytes, sizes, reduced and contiguous elements, rank, layout and the kind of operator, but not from the kernel type or op_class,
by which operators of a kind differ. So they treat an unknown operator like others of its kind. The total weight of an operator
is the square root of its number of kernels (at most MOST_KERNELS), so that many convolutions or additions do not dominate.
Operators of other kinds and classes have smaller weights; they help kinds with few operators. On an H200, learning by kinds
lowered the mean over 50 operators, each left out in turn, of their median errors from 41 to 33 %, most for Concat, Split and
Slice.

A type's own booster learns from its rows with weight 1, and from those of related types with weight RELATED_WEIGHT: a MatMul
with a constant matrix takes about as long as the Gemm of the same size, and many more of these are measured. The type with the
most rows of its group learns alone. Only the GPU's times are learned like this, since related types differ in their numbers of
launches. On an H200, with each collection of models left out in turn, this changed the errors of kernels, weighted by time,
from 29 to 15 % for MatMul, from 22 to 18 for FusedMatMul, from 82 to 27 for ReduceSum, from 28 to 15 for ReduceMax, from 16 to
13 for BiasSoftmax, and from 10 to 8 for Split. With weights of 0.03 and 0.3 products gain less.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.estimators import (
    ANY,
    CODES,
    CORRECTION_FEATURES,
    FOREST,
    LEAST_LAUNCHES,
    SHARED,
    KernelModel,
    Matrix,
    OtherPredictors,
    Roofline,
    Transferred,
    class_names,
    design_matrix,
    from_other_device,
    table_counts,
)
from hase.learned.kernels.features import FORM_GROUPS, KernelRows
from hase.learned.kernels.interface import ForestSettings, TimePredictor, TrainingConfig, XgboostSettings
from hase.learned.kernels.saved_form import LazyBoosters, booster_from_forest
from hase.records.kernel_types import operator_in_type
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.records.operators import operator_row
from hase.utils.lazy import sklearn, xgboost
from hase.utils.timing import Floats

if TYPE_CHECKING:
    from hase.learned.kernels.interface import TrainingSet

T = TypeVar("T")
R = TypeVar("R")
# A GPU's time of a type with so many rows is learned by twice as many trees. With collections left out in turn, that lowers the
# error of convolutions on an H200 from 8.2 to 7.8 % (weighted by time: 8.9 to 8.6); types with fewer rows gain nothing.
MANY_ROWS = 10_000
# Features by which operators of a class differ: those of the operator's name, and of forms.
TELLTALE = ("op_class", "activation", "adds", *(name for group in FORM_GROUPS.values() for name in group))
MOST_KERNELS = 400  # of an operator; more have no effect
LEAST_KERNELS = 20  # of a kind or class; with fewer, the next wider group is used
OTHER_KINDS, OTHER_CLASSES = 0.3, 0.1  # weights of a kernel of another kind of the class, and of another class
RELATED_WEIGHT = 0.1
RELATED_KINDS = ("softmax", "joint", "pool")  # of operators, each of which is a group


def fit_roofline(flops: Floats, bytes_moved: Floats, times_ms: Floats, tables: Floats | None = None,
                 weights: Floats | None = None) -> Roofline:
    """The roofline of measured idle kernels: rates that 2 % of them exceed, and a floor that 2 % stay below. With `tables` (how
    many tables each kernel copies to the GPU), copying a table takes the time of the floor, too."""
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
    return float(np.percentile(values, percent, weights=weights, method="inverted_cdf"))  # the only method with weights


def encode_types(types: Iterable[str], log_ratios: Floats) -> dict[str, float]:
    """A number for each kernel type, in the order of the median ratio to the roofline, so that trees can split by it."""
    by_type: dict[str, list[float]] = {}
    for name, ratio in zip(types, log_ratios, strict=True):
        by_type.setdefault(str(name), []).append(float(ratio))
    ordered = sorted(by_type, key=lambda name: (float(np.median(by_type[name])), name))
    return {name: float(index) for index, name in enumerate(ordered)}


def assign_folds(ids: Iterable[str], types: Iterable[str], folds: int, seed: int) -> npt.NDArray[np.int64]:
    """A fold for each row; all rows of a kernel are in one fold, and the kernels of each type are spread evenly."""
    kernels = sorted(set(zip(map(str, types), map(str, ids), strict=True)))
    shuffled = np.random.default_rng(seed).permutation(len(kernels))
    by_type = sorted((kernels[index] for index in shuffled), key=lambda kernel: kernel[0])  # stable: shuffled within a type
    fold = {name: index % folds for index, (_, name) in enumerate(by_type)}
    return np.array([fold[str(name)] for name in ids], dtype=np.int64)


def train_booster(matrix: Matrix, log_ratios: Floats, settings: XgboostSettings, seed: int,
                  weights: Floats | None = None) -> xgboost.Booster:
    """Trains a booster on log(time / roofline) with one thread: several train in parallel, and more stall on busy cores."""
    parameters = {
        "objective": f"reg:{settings.objective}", "max_depth": settings.depth, "eta": settings.learning_rate,
        "subsample": settings.row_share, "colsample_bytree": settings.column_share,
        "min_child_weight": settings.min_leaf_weight, "max_bin": settings.bins, "tree_method": "hist", "seed": seed,
        "nthread": 1, "verbosity": 0,
    }
    return xgboost.train(parameters, xgboost.DMatrix(matrix, log_ratios, weight=weights, nthread=1), settings.trees)


def train_forest(matrix: Matrix, log_ratios: Floats, settings: ForestSettings, seed: int,
                 weights: Floats | None = None) -> xgboost.Booster:
    """Trains scikit-learn's random forest of unlimited depth on log(time / roofline), and converts it to a booster."""
    forest = sklearn.ensemble.RandomForestRegressor(
        n_estimators=settings.trees, max_features=settings.column_share, min_samples_leaf=settings.least_in_leaf,
        random_state=seed, n_jobs=1)
    return booster_from_forest(forest.fit(matrix, log_ratios, sample_weight=weights))


@dataclass(frozen=True)
class Problem:
    """The input and target (log(time / roofline)) of a training, and weights of rows (None: equal)."""

    roofline: Roofline
    type_codes: dict[str, float]
    matrix: Matrix
    log_ratios: Floats
    weights: Floats | None = None


def problem_of(kernels: KernelRows, times_ms: Floats, roofline: Roofline | None = None,
               tables: Floats | float = 0.0, weights: Floats | None = None) -> Problem:
    """The learning problem of measured kernels, by default with a roofline fitted to them. `tables`: copied to the GPU."""
    roofline = roofline or fit_roofline(kernels.flops, kernels.bytes_moved, times_ms, weights=weights)
    log_ratios = np.log(times_ms / roofline.bound_ms(kernels.flops, kernels.bytes_moved, tables))
    types = kernels.types.tolist()
    codes = encode_types(types, log_ratios)
    return Problem(roofline, codes, design_matrix(types, kernels.features, kernels.load, codes), log_ratios, weights)


def learning_problem(rows: TrainingSet, label: str) -> Problem:
    """The learning problem of a label that all rows have. The roofline is fitted to idle rows; for launches it is fixed."""
    times_ms, tables, weights = rows.times_ms[label], table_counts(rows.schema, rows.features), rows.weights(label)
    base = rows.idle if rows.idle.any() else np.ones(len(rows), dtype=bool)
    roofline = LEAST_LAUNCHES if label == LAUNCHES else fit_roofline(
        rows.flops[base], rows.bytes_moved[base], times_ms[base], tables[base] if label == GPU_LABEL else None,
        None if weights is None else weights[base])
    return problem_of(rows.kernels, times_ms, roofline, tables, weights)


def fit_kernel_model(rows: TrainingSet, label: str, chosen: Mapping[str, str], config: TrainingConfig,
                     problem: Problem | None = None, steady: frozenset[str] = frozenset(),
                     types: Sequence[str] | None = None) -> KernelModel:
    """Trains the boosters of a label: a shared one from all rows, those of `chosen` types that have rows, and those of classes.

    Args:
        chosen: for kernel types without the shared booster, the type's name for a dedicated one, or FOREST.
        steady: classes of operators that get the median ratio (see `ClassBoosters`).
        types: the only types that will be predicted, so that only their boosters are trained; default: all.
    """
    problem, settings = problem or learning_problem(rows, label), config.booster(label)
    learned = {name for name in chosen if (rows.types == name).any() and (types is None or name in types)}
    predictor_of = {name: chosen[name] if name in learned else SHARED for name in types or problem.type_codes}

    def train(name: str) -> xgboost.Booster:
        if name == SHARED:
            return train_booster(problem.matrix, problem.log_ratios, settings, config.seed, problem.weights)
        if name == FOREST:
            return train_forest(problem.matrix, problem.log_ratios, config.forest, config.seed, problem.weights)
        return _train_dedicated(name, rows, problem, settings, config.seed, label == GPU_LABEL)

    needed = dict.fromkeys([*([SHARED] if types is None else []), *predictor_of.values()])
    of_types, of_classes = {name: train(name) for name in needed}, fit_class_boosters(rows, problem, config, steady=steady)
    return KernelModel(rows.schema, problem.roofline, problem.type_codes, predictor_of,
                       ChainMap(of_types, of_classes),  # type: ignore[arg-type]  # it is only read
                       tuple(rows.idle_load.values()))


def _train_dedicated(name: str, rows: TrainingSet, problem: Problem, settings: XgboostSettings, seed: int,
                     on_gpu: bool) -> xgboost.Booster:
    """Trains the booster of one kernel type; for times `on_gpu` also from related types (see `related_types`)."""
    weights = row_weights(name, rows.types) if on_gpu else (rows.types == name).astype(float)
    mask = weights > 0
    if problem.weights is not None:
        weights = weights * problem.weights
    alone = bool((weights[mask] == 1.0).all())
    if on_gpu and (rows.types == name).sum() >= MANY_ROWS:
        settings = settings.model_copy(update={"trees": 2 * settings.trees})
    return train_booster(problem.matrix[mask], problem.log_ratios[mask], settings, seed, None if alone else weights[mask])


def fit_class_boosters(rows: TrainingSet, problem: Problem, config: TrainingConfig, left_out: str = "",
                       steady: frozenset[str] = frozenset()) -> ClassBoosters:
    """The boosters of classes, from idle rows without operator `left_out`. `steady` ones get the median ratio."""
    known = class_rows(problem.matrix, problem.log_ratios, rows.types, rows.idle, rows.schema.names, config.seed,
                       problem.weights)
    return ClassBoosters(known.without(left_out) if left_out else known, partial(
        _train_class, settings=config.xgboost_class, seed=config.seed), steady)


def _train_class(matrix: Matrix, log_ratios: Floats, weights: Floats, settings: XgboostSettings, seed: int) -> xgboost.Booster:
    if not len(matrix):  # a booster without trees, whose prediction is the mean
        flat = xgboost.DMatrix(np.zeros((1, matrix.shape[1]), dtype=np.float32), np.zeros(1), nthread=1)
        return xgboost.train({"objective": "reg:squarederror", "base_score": float(log_ratios.mean()), "nthread": 1}, flat, 0)
    return train_booster(matrix, log_ratios, settings, seed, weights)


def fit_factors(rows: TrainingSet, logs: Floats, settings: XgboostSettings, seed: int) -> KernelModel:
    """Trains a booster for all types that predicts a factor, such as an error or a width, from the logarithms of the rows'."""
    types = rows.types.tolist()
    codes = encode_types(types, logs)
    booster = train_booster(design_matrix(types, rows.features, rows.load, codes), logs, settings, seed)
    return KernelModel(rows.schema, type_codes=codes, predictor_of=dict.fromkeys(codes, SHARED), boosters={SHARED: booster},
                       idle_load=tuple(rows.idle_load.values()))


def parallel_map(task: Callable[[T], R], items: Iterable[T], workers: int) -> list[R]:
    """The results of `task` for each item, in order, computed by `workers` threads. These suffice, since XGBoost and
    scikit-learn release the interpreter's lock while they compute."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(task, items))


def as_ratios(rows: TrainingSet, label: str, other_model: KernelModel) -> tuple[TrainingSet, Floats]:
    """Rows whose times are ratios to those on another device, from which a correction learns, and the times (ms) there."""
    other_ms, extended = from_other_device(other_model, rows.kernels)
    return replace(rows, schema=CORRECTION_FEATURES, features=extended.features, flops=extended.flops,
                   bytes_moved=extended.bytes_moved, times_ms={label: rows.times_ms[label] / other_ms}), other_ms


def fit_transferred(rows: TrainingSet, label: str, chosen: Mapping[str, str], config: TrainingConfig,
                    start: OtherPredictors) -> Transferred:
    """Trains corrections of another target's predictors (`start`); other arguments are as in `fit_kernel_model`."""
    return Transferred(start, fit_kernel_model(as_ratios(rows, label, start.model)[0], label, chosen, config))


def correction_trainer(model: TimePredictor, label: str, chosen: Mapping[str, str],
                       config: TrainingConfig) -> Callable[[TrainingSet], Transferred] | None:
    """A function that trains the corrections of `model` again from other rows; None if `model` has no corrections."""
    if not isinstance(model, Transferred):
        return None
    start = model.start
    return lambda rows: fit_transferred(rows, label, chosen, config, start)


# boosters of classes of operators ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ClassRows:
    """The rows that boosters of classes learn from. `matrix` is rows × (features, code of the kind, load), NaN in the load and
    in TELLTALE columns; `log_ratios` is log(time / roofline)."""

    matrix: Matrix
    log_ratios: Floats
    operators: npt.NDArray[np.str_]
    row_weights: Floats | None = None

    def without(self, operator: str) -> ClassRows:
        """The rows of all other operators."""
        kept = self.operators != operator
        return ClassRows(self.matrix[kept], self.log_ratios[kept], self.operators[kept],
                         None if self.row_weights is None else self.row_weights[kept])

    def weights(self, name: str) -> Floats:
        """The weight of each row in the booster `name`; the mean is 1."""
        operator, counts = np.unique(self.operators, return_inverse=True, return_counts=True)[1:]
        weights = counts[operator] ** -0.5 * (1.0 if self.row_weights is None else self.row_weights)
        kinds, classes = self._groups
        if name in kinds:
            same_class = classes == self.class_of(name)
            weights = weights * np.where(kinds == name, 1.0, np.where(same_class, OTHER_KINDS, OTHER_CLASSES))
        elif name != ANY:
            weights = weights * np.where(classes == name, 1.0, OTHER_KINDS)
        return np.asarray(weights / weights.mean())

    @cached_property
    def _groups(self) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
        """The names of the boosters of each row's kind and of its class."""
        names = [class_names(operator) for operator in self.operators.tolist()]
        return np.array([kind for kind, _, _ in names], dtype=np.str_), np.array([of for _, of, _ in names], dtype=np.str_)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The boosters that can be trained: ANY, and one for each kind and each class with enough rows."""
        kinds, classes = self._groups
        names, counts = np.unique(np.concatenate([kinds, classes[classes != kinds]]), return_counts=True)
        return tuple(sorted({ANY, *names[counts >= LEAST_KERNELS].tolist()}))

    def class_of(self, name: str) -> str:
        """The class of booster `name`, which is that of a kind or of a class."""
        kinds, classes = self._groups
        return str(next((of for kind, of in zip(kinds, classes, strict=True) if kind == name), name))

    def median_log_ratio(self, name: str) -> float:
        """The median log ratio of the class of booster `name`; operators are weighted as in `weights`."""
        own_class = self.class_of(name)
        rows = (self._groups[1] == own_class) if own_class != ANY else np.ones(len(self.operators), dtype=bool)
        order = np.argsort(self.log_ratios[rows])
        summed = np.cumsum(self.weights(ANY)[rows][order])
        return float(self.log_ratios[rows][order][np.searchsorted(summed, summed[-1] / 2)])


def class_rows(matrix: Matrix, log_ratios: Floats, types: npt.NDArray[np.str_], idle: npt.NDArray[np.bool_],
               columns: tuple[str, ...], seed: int, weights: Floats | None = None) -> ClassRows:
    """At most MOST_KERNELS random idle rows of each operator. `columns`: the features, which type code and load follow."""
    generator = np.random.default_rng(seed)
    operators = np.array([operator_in_type(name) for name in types.tolist()], dtype=np.str_)
    base = idle if idle.any() else np.ones(len(idle), dtype=bool)
    chosen: list[int] = []
    for operator in sorted(set(operators[base].tolist())):
        indices = np.flatnonzero(base & (operators == operator))
        chosen += sorted(generator.permutation(indices)[:MOST_KERNELS].tolist())
    kept = matrix[chosen].copy()
    kept[:, [index for index, name in enumerate(columns) if name in TELLTALE]] = np.nan
    kept[:, len(columns):] = np.nan
    kept[:, len(columns)] = [CODES[operator_row(operator).kind_or_class] for operator in operators[chosen].tolist()]
    return ClassRows(kept, log_ratios[chosen], operators[chosen], None if weights is None else weights[chosen])


class ClassBoosters(LazyBoosters):
    """The boosters of the classes by name, each trained at its first look-up, since most trainings need few of them. `train`
    takes a matrix, a target and weights; with an empty matrix, the booster predicts the mean. `steady` classes only use the
    median ratio, since their sizes predict less (see `steady_classes`)."""

    def __init__(self, rows: ClassRows, train: Callable[[Matrix, Floats, Floats], xgboost.Booster],
                 steady: frozenset[str] = frozenset()) -> None:
        def trained(name: str) -> xgboost.Booster:
            if rows.class_of(name) in steady:
                return train(rows.matrix[:0], np.array([rows.median_log_ratio(name)]), np.ones(1))
            return train(rows.matrix, rows.log_ratios, rows.weights(name))

        super().__init__(rows.names, trained)
        self.rows = rows


# related types -----------------------------------------------------------------------------------------------------------

def related_group(operator: str) -> str:
    """The group of operators that learn from each other: one of RELATED_KINDS, all products, all reductions, or "" for none."""
    row = operator_row(operator)
    if row.kind in RELATED_KINDS:
        return row.kind
    reduces = row.operator_class == "reduction" and row.dispatch == "reducing"
    return row.operator_class if reduces or row.operator_class == "product" else ""


def related_types(name: str, types: npt.NDArray[np.str_]) -> frozenset[str]:
    """The other types that the booster of type `name` learns from; `types` is the type of each row."""
    group = related_group(operator_in_type(name))
    if not group:
        return frozenset()
    counts = {str(kernel_type): int(count) for kernel_type, count in zip(*np.unique(types, return_counts=True), strict=True)
              if related_group(operator_in_type(str(kernel_type))) == group}
    related = frozenset(counts) - {name}
    return related if max((counts[kernel_type] for kernel_type in related), default=0) > counts.get(name, 0) else frozenset()


def row_weights(name: str, types: npt.NDArray[np.str_]) -> Floats:
    """The weight of each row in the booster of type `name`, 0 for unrelated types; `types` is the type of each row."""
    related = np.isin(types, list(related_types(name, types)))
    return np.where(types == name, 1.0, np.where(related, RELATED_WEIGHT, 0.0))
