"""The interface of an estimator of kernel times (docs/estimators.md), what it is fitted to, and the settings of a training."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from hase.learned.kernels.features import FeatureSchema, KernelRows
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import operator_in_type
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.records.operators import OperatorClass, operator_row
from hase.utils.config import Config, Frozen
from hase.utils.fingerprint import Target
from hase.utils.timing import Floats

if TYPE_CHECKING:
    from hase.records.dataset_files import DatasetHeader
    from hase.records.devices import Environment

USUAL_ERROR = 0.1  # of a predicted time, as its logarithm: a row with a drift this large has half the weight of a steady one
NO_FEATURES: FeatureSchema[Kernel] = FeatureSchema("none", 1, {}, lambda kernel: ())


class XgboostSettings(Config):
    """Settings of a booster; names as in training/config.yaml."""

    trees: int = Field(400, ge=1)
    depth: int = Field(6, ge=1, le=20)
    learning_rate: float = Field(0.05, gt=0.0, le=1.0)
    row_share: float = Field(0.8, gt=0.0, le=1.0)
    column_share: float = Field(0.5, gt=0.0, le=1.0)
    min_leaf_weight: float = Field(2.0, ge=0.0)
    bins: int = Field(128, ge=2, le=1024)
    objective: Literal["squarederror", "absoluteerror"] = "absoluteerror"
    own_predictors: Literal["none", "better", "all"] = "better"


class ForestSettings(Config):
    """Settings of the random forest."""

    trees: int = Field(100, ge=1)
    column_share: float = Field(0.33, gt=0.0, le=1.0)
    least_in_leaf: int = Field(1, ge=1)


class TrainingConfig(Config):
    """The settings of a training: training/config.yaml."""

    folds: int = Field(5, ge=2)
    seed: int = 7
    own_min_kernels: int = Field(60, ge=2)
    short_ms: float = Field(0.02, ge=0.0)
    threads: int = Field(0, ge=0)
    start_from: str | None = None
    estimators: tuple[Literal["xgboost", "random_forest"], ...] = Field(("xgboost",), min_length=1)
    xgboost: XgboostSettings = XgboostSettings()
    xgboost_gpu: XgboostSettings = XgboostSettings(depth=9, objective="squarederror", own_predictors="all")
    xgboost_class: XgboostSettings = XgboostSettings(trees=150, learning_rate=0.1, own_predictors="none")
    forest: ForestSettings = ForestSettings()

    @property
    def workers(self) -> int:
        return self.threads or os.cpu_count() or 1

    def booster(self, label: str) -> XgboostSettings:
        """The settings of the boosters of a label."""
        return self.xgboost_gpu if label in (GPU_LABEL, LAUNCHES) else self.xgboost


@dataclass(frozen=True)
class TrainingSet:
    """The rows of a target's kernel table to learn from (training/kernels/training_set.py reads them).

    They were measured successfully, belong not only to held-out families, and were not measured next to a held-out background.
    A kernel has one row per machine that measured it; folds never separate these rows, and a look-up takes their median.

    Attributes:
        groups, collections: those whose models have the row's kernel, or near whose shapes it was sampled.
        backgrounds: "" for none.
        features: rows × the schema's features.
        load: rows × `metrics`; all idle rows have `idle_load` (medians), so that the noise of idle metrics is not learned.
        times_ms: by label, NaN for rows without it; under LAUNCHES the number of launches.
        drifts: by label, of the unsteady blocks that times come from (`Block.drift`); 0 for steady rows. Steady labels may be
            missing.
        carried_errors: the error, as a logarithm, of rows converted from another card; 0 for measured rows.
    """

    header: DatasetHeader
    sha256: str
    ids: npt.NDArray[np.str_]
    types: npt.NDArray[np.str_]
    forms: npt.NDArray[np.str_]
    groups: tuple[frozenset[str], ...]
    collections: tuple[frozenset[str], ...]
    backgrounds: npt.NDArray[np.str_]
    idle: npt.NDArray[np.bool_]
    schema: FeatureSchema
    features: Floats
    load: Floats
    metrics: tuple[str, ...]
    idle_load: dict[str, float]
    times_ms: dict[str, Floats]
    drifts: dict[str, Floats]
    flops: Floats
    bytes_moved: Floats
    dtypes: tuple[str, ...]
    carried_errors: Floats

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def kernels(self) -> KernelRows:
        """The rows as estimators read them."""
        return KernelRows(types=self.types, features=self.features, flops=self.flops, bytes_moved=self.bytes_moved,
                          load=self.load)

    def weights(self, label: str) -> Floats | None:
        """The weight of each row for learning `label`, with a mean of 1; None if all are equal. Rows from an idle but unsteady
        device weigh less. Under load the canary itself varies, so its drift says little. A GPU's trace of a kernel hardly
        depends on the host, to which the canary is sensitive."""
        if label not in self.drifts or label in (GPU_LABEL, LAUNCHES) or not self.drifts[label][self.idle].any():
            return None
        idle_weights = 1.0 / (1.0 + (np.log1p(self.drifts[label][self.idle]) / USUAL_ERROR) ** 2)
        weights = np.ones(len(self))
        weights[self.idle] = idle_weights / idle_weights.mean()
        return weights

    def rows(self, mask: npt.NDArray[np.bool_]) -> TrainingSet:
        """The rows where `mask` is true."""
        return replace(
            self, ids=self.ids[mask], types=self.types[mask], forms=self.forms[mask], idle=self.idle[mask],
            features=self.features[mask], backgrounds=self.backgrounds[mask],
            groups=tuple(names for names, kept in zip(self.groups, mask, strict=True) if kept),
            collections=tuple(names for names, kept in zip(self.collections, mask, strict=True) if kept), load=self.load[mask],
            times_ms={label: times[mask] for label, times in self.times_ms.items()},
            drifts={label: drifts[mask] for label, drifts in self.drifts.items()}, flops=self.flops[mask],
            bytes_moved=self.bytes_moved[mask], carried_errors=self.carried_errors[mask])


@dataclass(frozen=True, kw_only=True)
class Measured(KernelRows):
    """Kernels measured on an idle device, to which an estimator is fitted.

    Attributes:
        label: which time of a kernel `times_ms` is (records/measurement.py).
        weights: of the rows, with a mean of 1; lower for rows from an unsteady machine. None: all equal.
        all_rows: everything to learn from, including other types and rows under load.
    """

    times_ms: Floats
    target: Target
    label: str
    config: TrainingConfig
    all_rows: TrainingSet
    weights: Floats | None = None

    @property
    def environment(self) -> Environment | None:
        """Threads, cores, frequency, memory limit and caches of the machine; None if unknown."""
        return self.all_rows.header.environment


class EnvironmentPattern(Frozen):
    """Environments that an estimator is valid for; "" is any. `target` is a pattern such as `nvidia-h200-*`."""

    device: str = ""
    runtime: str = ""
    target: str = ""

    def holds_for(self, target: Target) -> bool:
        return (self.device in ("", target.flavour.device) and self.runtime in ("", target.flavour.runtime)
                and fnmatchcase(target.name, self.target or "*"))


class TimePredictor(ABC):
    """Predicts the times of kernels, and has a saved form.

    Attributes:
        name: unique among all estimators; letters, digits, `_` and `-`.
        version: changes whenever the saved form, the features or the predictions from them change.
        features: the schema of the features that it reads besides operations and bytes.
        saved_classes: the only classes whose instances its saved form may hold.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    features: FeatureSchema[Kernel] = NO_FEATURES
    saved_classes: ClassVar[tuple[type[BaseModel], ...]] = ()

    @abstractmethod
    def predict_ms(self, kernels: KernelRows) -> Floats:
        """The time (ms) of each row. Admitted estimators only predict idle times."""

    @abstractmethod
    def saved(self) -> dict[str, Any]:
        """Numbers, text, lists, dictionaries, arrays, dictionaries of boosters, instances of `saved_classes`."""

    @abstractmethod
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores what `saved` returned."""


class Estimator(TimePredictor):
    """Learns to predict the times of kernels. A subclass sets the attributes and implements `fit` and `TimePredictor`'s
    methods.

    Attributes:
        operators, classes: what it predicts, with whatever is fused into it; if both are empty, every kernel.
        environments: the targets that it is valid for.
    """

    operators: ClassVar[frozenset[str]] = frozenset()
    classes: ClassVar[frozenset[OperatorClass]] = frozenset()
    environments: ClassVar[tuple[EnvironmentPattern, ...]] = (EnvironmentPattern(),)

    @abstractmethod
    def fit(self, measured: Measured) -> None:
        """Learns from measured kernels."""

    @classmethod
    def is_for(cls, kernel_type: str) -> bool:
        """Whether the estimator predicts kernels of a type."""
        if not cls.operators and not cls.classes:
            return True
        operator = operator_in_type(kernel_type)
        return operator in cls.operators or operator_row(operator).operator_class in cls.classes

    @classmethod
    def holds_for(cls, target: Target) -> bool:
        return any(environment.holds_for(target) for environment in cls.environments)
