"""The predictors that are trained for a label: boosters of log(time / roofline), or corrections of another device.

Boosters of operator classes predict operators that were never measured (training/kernels/fitting.py). A correction predicts
log(time here / time there): a kernel that is inefficient on one GPU is mostly inefficient on another, so there is less to learn
and fewer kernels have to be measured (docs/this_device.md). It also reads how far the time there is above the roofline there.
Training keeps it only if it lowers the error on held-out kernels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.features import KERNEL_FEATURES, FeatureSchema, KernelRows
from hase.learned.kernels.interface import TimePredictor
from hase.records.kernel_types import operator_in_type
from hase.records.operators import OperatorClass, OperatorKind, operator_row
from hase.utils.config import Config
from hase.utils.lazy import xgboost
from hase.utils.timing import Floats

if TYPE_CHECKING:
    from hase.records.kernel_record import Kernel

Matrix = npt.NDArray[np.float32]
TABLES = "tables"  # the roofline's feature: how many tables a kernel copies to the GPU
SHARED = "shared"  # the booster of all types without one of their own
FOREST = "random_forest"  # the forest of all types, which is kept as a booster
PREFIX = "class "  # of the names of boosters of classes; names of types have no spaces
ANY = f"{PREFIX}other"  # the booster for operators without a class, and for classes that were not measured
# Codes of kinds and classes of operators, which boosters of classes read in place of the type's code
CODES = {name: float(index) for index, name in enumerate((*get_args(OperatorKind), *get_args(OperatorClass)))}


class Roofline(Config):
    """The rates of a device, which bound the time of a kernel by arithmetic or by memory, and a floor for every kernel.

    Attributes:
        flops_per_ms, bytes_per_ms: the rates that efficient kernels reach.
        scale: the median ratio of measured time to the bound. Unknown kernel types are estimated as scale times their bound.
        table_ms: the time to copy one of the tables that some kernels copy to a GPU (feature `tables`).
    """

    flops_per_ms: float
    bytes_per_ms: float
    floor_ms: float
    scale: float
    table_ms: float = 0.0

    def bound_ms(self, flops: Floats, bytes_moved: Floats, tables: Floats | float = 0.0) -> Floats:
        """The lower bound (ms) of each kernel's time."""
        return (np.maximum(flops / self.flops_per_ms, bytes_moved / self.bytes_per_ms) + self.floor_ms + self.table_ms * tables)


FLAT = Roofline(flops_per_ms=1e300, bytes_per_ms=1e300, floor_ms=1.0, scale=1.0)  # 1 for every kernel
LEAST_LAUNCHES = FLAT.model_copy(update={"table_ms": 1.0})  # one launch for the kernel, and one for each table


class OnRoofline(TimePredictor):
    """A roofline times a ratio learned as its logarithm. `type_codes`: types in the order of their median ratios."""

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
    """Predicts the times of one label by boosters, one for each type with enough kernels, and a shared one or a random forest
    for others. A type that was not in training gets the booster of its class of operators, or the scaled roofline without one.
    Under load, its time is multiplied by the slowdown that the shared booster predicts. `predictor_of` names the booster of
    each kernel type."""

    name = "in_use"  # other estimators are compared with it
    features: FeatureSchema = KERNEL_FEATURES
    roofline: Roofline = FLAT
    type_codes: Mapping[str, float] = field(default_factory=dict)
    predictor_of: Mapping[str, str] = field(default_factory=dict)
    boosters: Mapping[str, xgboost.Booster] = field(default_factory=dict)
    idle_load: Sequence[float] = ()

    def predict_ms(self, kernels: KernelRows) -> Floats:
        if kernels.load is None:
            idle = np.tile(np.array(self.idle_load, dtype=float), (len(kernels), 1))
            kernels = replace(kernels, load=idle)
        return super().predict_ms(kernels)

    def log_ratios(self, types: Sequence[str], matrix: Matrix) -> Floats:
        code_column = matrix.shape[1] - len(self.idle_load) - 1  # the column of the type's code; the load follows
        log_ratios = np.full(len(types), np.log(self.roofline.scale))
        rows_by_predictor: dict[str, list[int]] = {}
        for row, name in enumerate(types):
            rows_by_predictor.setdefault(self.predictor_of.get(name) or self._class_predictor(name), []).append(row)
        for predictor, rows in rows_by_predictor.items():
            known = types[rows[0]] in self.predictor_of
            inputs = matrix[rows]
            if not known:
                inputs[:, code_column] = [kind_code(types[row]) for row in rows]
            if predictor:
                log_ratios[rows] = self.boosters[predictor].inplace_predict(inputs)
            if known:
                continue
            idle = matrix[rows]
            idle[:, code_column + 1:] = self.idle_load
            if not np.array_equal(idle, matrix[rows], equal_nan=True):  # otherwise the shared booster need not be read
                shared = self.boosters[SHARED]
                log_ratios[rows] += shared.inplace_predict(matrix[rows]) - shared.inplace_predict(idle)
        return log_ratios

    def saved(self) -> dict[str, Any]:
        of_classes = [name for name in self.boosters if name.startswith(PREFIX)]
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
        """The booster of the type's kind, else of its class, else of all operators; "" if none was trained."""
        return next((name for name in class_names(kernel_type) if name in self.boosters), "")


def table_counts(schema: FeatureSchema, features: Floats) -> Floats:
    """How many tables the kernel of each row copies to the GPU; 0 if the schema does not count them."""
    return features[:, schema.index(TABLES)] if TABLES in schema.names else np.zeros(len(features))


def design_matrix(types: Iterable[str], features: Floats, load: Floats | None, codes: Mapping[str, float]) -> Matrix:
    """The input of the estimators: the features, the code of the kernel type (NaN: unknown), and the load, if any."""
    encoded = np.array([codes.get(name, np.nan) for name in types], dtype=float).reshape(-1, 1)
    return np.hstack([features, encoded, *([] if load is None else [load])]).astype(np.float32)


def predict_kernels(predictor: TimePredictor, kernels: Sequence[Kernel], features: Floats, load: Sequence[float]) -> Floats:
    """The time (ms) of each kernel under one load (a value per metric). `features`: kernels × the predictor's features."""
    return predictor.predict_ms(KernelRows.of(kernels, features, load))


def class_names(kernel_type: str) -> tuple[str, str, str]:
    """The boosters that may predict a type: of its kind, its class, and all operators."""
    row = operator_row(operator_in_type(kernel_type))
    return PREFIX + row.kind_or_class, PREFIX + row.operator_class, ANY


def kind_code(kernel_type: str) -> float:
    """The code of a type's kind, in place of the type's own code."""
    return CODES[operator_row(operator_in_type(kernel_type)).kind_or_class]




def _not_alone(kernel: Kernel) -> NoReturn:
    raise NotImplementedError(f"{kernel.id}: the features of a correction need the other device's predictors")


# The features of a kernel and, last, log2(time there / roofline there). The time there already includes the tables that a
# kernel copies, so their number is an ordinary feature here.
CORRECTION_FEATURES = FeatureSchema("correction", 1, {
    **{group: tuple("table_copies" if name == TABLES else name for name in names)
       for group, names in KERNEL_FEATURES.groups.items()}, "other device": ("log_above_roofline",)}, _not_alone)


class OtherPredictors(NamedTuple):
    """The predictors of one label of another target, as a start."""

    target: str
    model: KernelModel


@dataclass
class Transferred(TimePredictor):
    """Predicts a label's times from another device's; `correction` predicts their ratio from CORRECTION_FEATURES."""

    name = "in_use_from_another_device"
    features = KERNEL_FEATURES
    saved_classes = (Roofline,)
    start: OtherPredictors = field(default_factory=lambda: OtherPredictors("", KernelModel()))
    correction: KernelModel = field(default_factory=lambda: KernelModel(features=CORRECTION_FEATURES))

    @property
    def predictor_of(self) -> Mapping[str, str]:
        """For each kernel type that was measured here, the name of its correction."""
        return self.correction.predictor_of

    @property
    def roofline(self) -> Roofline:
        """The other device's roofline, slowed down by the median ratio of this device."""
        roofline, slower = self.start.model.roofline, self.correction.roofline.floor_ms * self.correction.roofline.scale
        return roofline.model_copy(update={
            "flops_per_ms": roofline.flops_per_ms / slower, "bytes_per_ms": roofline.bytes_per_ms / slower,
            "floor_ms": roofline.floor_ms * slower, "table_ms": roofline.table_ms * slower})

    def predict_ms(self, kernels: KernelRows) -> Floats:
        """The time (ms) of each row. Types that were not measured here get the median ratio."""
        other_ms, extended = from_other_device(self.start.model, kernels)
        return other_ms * self.correction.predict_ms(extended)

    def saved(self) -> dict[str, Any]:
        return {"target": self.start.target, "start": self.start.model.saved(), "correction": self.correction.saved()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.start = OtherPredictors(saved["target"], KernelModel())
        self.start.model.restore(saved["start"])
        self.correction.restore(saved["correction"])


def from_other_device(other_model: KernelModel, kernels: KernelRows) -> tuple[Floats, KernelRows]:
    """The idle times (ms) of kernels on the other device, and the rows that a correction reads. The rows have
    CORRECTION_FEATURES, but no operations and bytes, so that the roofline of the ratios is constant. A fused type that the
    other device lacks counts as its first operation."""
    types = np.array([name if name in other_model.predictor_of else name.partition("_")[0] for name in kernels.types.tolist()],
                     dtype=np.str_)
    other_ms = other_model.predict_ms(replace(kernels, types=types, load=None))
    bound_ms = other_model.roofline.bound_ms(kernels.flops, kernels.bytes_moved, table_counts(
        other_model.features, kernels.features))
    zeros = np.zeros(len(kernels))
    return other_ms, replace(kernels, features=np.column_stack([kernels.features, np.log2(other_ms / bound_ms)]), flops=zeros,
                             bytes_moved=zeros)
