"""The interface of an estimator of kernel times (docs/estimators.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from hase.learned.kernels.schema import FeatureSchema, KernelRows
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import operator_of
from hase.records.operators import OperatorClass, operator_row
from hase.utils.fingerprint import Target
from hase.utils.frozen import Frozen

if TYPE_CHECKING:
    from hase.learned.kernels.settings import TrainingConfig
    from hase.records.environment import Environment
    from hase.training.kernels.training_set import TrainingSet  # needs pandas, which a prediction does not

Floats = npt.NDArray[np.float64]


class EnvironmentPattern(Frozen):
    """Environments that an estimator holds for; "" stands for any.

    Attributes:
        device: `cpu` or `cuda`.
        runtime: `ort` or `tvm`.
        target: a pattern of the target's name, such as `nvidia-h200-*`.
    """

    device: str = ""
    runtime: str = ""
    target: str = ""

    def holds_for(self, target: Target) -> bool:
        return (self.device in ("", target.flavour.device) and self.runtime in ("", target.flavour.runtime)
                and fnmatchcase(target.name, self.target or "*"))


@dataclass(frozen=True, kw_only=True)
class Measured(KernelRows):
    """What an estimator is fitted to: kernels that were measured on an idle device.

    Attributes:
        times_ms: of each row.
        target: device, runtime, threads.
        label: which time of a kernel it is (records/measurement.py).
        config: of the training.
        weights: how much each row counts, 1 in the mean: less if the machine was unsteady while it was measured. None: all
            count alike.
        all_rows: everything that may be learned from: kernels of other types, and rows under load, too.
    """

    times_ms: Floats
    target: Target
    label: str
    config: TrainingConfig
    all_rows: TrainingSet
    weights: Floats | None = None

    @property
    def environment(self) -> Environment | None:
        """Threads, cores, frequency, memory limit and caches of the machine; None where the dataset does not say."""
        return self.all_rows.header.environment


NO_FEATURES: FeatureSchema[Kernel] = FeatureSchema("none", 1, {}, lambda kernel: ())


class Estimator(ABC):
    """Predicts the times of kernels. A subclass states the attributes and has the four methods.

    Attributes:
        name: unique among all estimators; letters, digits, `_` and `-`.
        version: changes whenever the saved form, the features or the predictions from them change.
        operators: ONNX operators that it is for, with whatever is fused into them.
        classes: classes of operators that it is for. Without operators and classes, it is for every kernel.
        environments: the targets that it holds for.
        features: the numbers of a kernel that it reads besides its operations and bytes, and how they are computed.
        saved_classes: the classes whose instances its saved form holds. Any other is refused when it is read.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    operators: ClassVar[frozenset[str]] = frozenset()
    classes: ClassVar[frozenset[OperatorClass]] = frozenset()
    environments: ClassVar[tuple[EnvironmentPattern, ...]] = (EnvironmentPattern(),)
    features: FeatureSchema[Kernel] = NO_FEATURES
    saved_classes: ClassVar[tuple[type[BaseModel], ...]] = ()

    @abstractmethod
    def fit(self, measured: Measured) -> None:
        """Learns from measured kernels."""

    @abstractmethod
    def predict_ms(self, kernels: KernelRows) -> Floats:
        """The time (ms) of each row. An admitted estimator is asked for idle times alone."""

    @abstractmethod
    def saved(self) -> dict[str, Any]:
        """What was learned: numbers, text, lists, dictionaries, numpy arrays, dictionaries of XGBoost boosters, and instances
        of `saved_classes`."""

    @abstractmethod
    def restore(self, saved: Mapping[str, Any]) -> None:
        """The opposite of `saved`."""

    @classmethod
    def is_for(cls, kernel_type: str) -> bool:
        """Whether it estimates kernels of a type."""
        if not cls.operators and not cls.classes:
            return True
        operator = operator_of(kernel_type)
        return operator in cls.operators or operator_row(operator).operator_class in cls.classes

    @classmethod
    def holds_for(cls, target: Target) -> bool:
        return any(environment.holds_for(target) for environment in cls.environments)
