"""Learns a device's kernel times as multiples of what the predictors of another device say.

Devices of one kind are alike: a kernel that is inefficient on one GPU is mostly inefficient on another. So the boosters need to
learn less, and fewer kernels have to be measured: docs/this_device.md has figures. They learn log(time here / time there), and
read in addition how far the time there is above the roofline there. Training keeps them only where that lowers the error on
kernels that were held out (training/kernels/label_training.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.estimators import TABLES, KernelModel, Roofline, fit_kernel_model, table_counts
from hase.learned.kernels.features import KERNEL_FEATURES
from hase.learned.kernels.interface import Estimator, Measured
from hase.learned.kernels.schema import FeatureSchema, KernelRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from hase.learned.kernels.settings import TrainingConfig
    from hase.records.kernel_record import Kernel
    from hase.training.kernels.training_set import TrainingSet

Floats = npt.NDArray[np.float64]


def _not_alone(kernel: Kernel) -> NoReturn:
    raise NotImplementedError(f"{kernel.id}: the features of a correction need the other device's predictors")


# The features of a kernel and, last, log2(time there / roofline there). The tables that a kernel copies are in the time there
# already, so their number is an ordinary feature here.
CORRECTION_FEATURES = FeatureSchema("correction", 1, {
    **{group: tuple("table_copies" if name == TABLES else name for name in names)
       for group, names in KERNEL_FEATURES.groups.items()},
    "other device": ("log_above_roofline",)}, _not_alone)


class OtherPredictors(NamedTuple):
    """The predictors of one label of another target, to start from."""

    target: str
    model: KernelModel


@dataclass
class Transferred(Estimator):
    """Predicts the times of one label here from those of another device.

    Attributes:
        start: the other device's predictors.
        correction: predicts time here / time there, from CORRECTION_FEATURES.
    """

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
        """The roofline there, as slow as this device is in the median."""
        roofline, slower = self.start.model.roofline, self.correction.roofline.floor_ms * self.correction.roofline.scale
        return roofline.model_copy(update={
            "flops_per_ms": roofline.flops_per_ms / slower, "bytes_per_ms": roofline.bytes_per_ms / slower,
            "floor_ms": roofline.floor_ms * slower, "table_ms": roofline.table_ms * slower})

    def fit(self, measured: Measured) -> None:
        raise NotImplementedError("it is learned by fit_transferred")

    def predict_ms(self, kernels: KernelRows) -> Floats:
        """The time (ms) of each row. A type that was not measured here is as much slower as the median kernel."""
        other_ms, extended = from_other_device(self.start.model, kernels)
        return other_ms * self.correction.predict_ms(extended)

    def saved(self) -> dict[str, Any]:
        return {"target": self.start.target, "start": self.start.model.saved(), "correction": self.correction.saved()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.start = OtherPredictors(saved["target"], KernelModel())
        self.start.model.restore(saved["start"])
        self.correction.restore(saved["correction"])


def from_other_device(other_model: KernelModel, kernels: KernelRows) -> tuple[Floats, KernelRows]:
    """The times (ms) of kernels on the other device, idle, and the rows that a correction reads: with CORRECTION_FEATURES, and
    without operations and bytes, which makes the roofline of the ratios a constant.

    A fused type that the other device does not have counts as its first operation.
    """
    types = np.array([name if name in other_model.predictor_of else name.partition("_")[0] for name in kernels.types.tolist()],
                     dtype=np.str_)
    other_ms = other_model.predict_ms(replace(kernels, types=types, load=None))
    bound_ms = other_model.roofline.bound_ms(kernels.flops, kernels.bytes_moved, table_counts(
        other_model.features, kernels.features))
    zeros = np.zeros(len(kernels))
    return other_ms, replace(kernels, features=np.column_stack([kernels.features, np.log2(other_ms / bound_ms)]), flops=zeros,
                             bytes_moved=zeros)


def as_ratios(rows: TrainingSet, label: str, other_model: KernelModel) -> tuple[TrainingSet, Floats]:
    """The learning problem of a correction: `rows` with the ratio to the time on the other device in place of the time; and the
    times (ms) there."""
    other_ms, extended = from_other_device(other_model, rows.kernels)
    return replace(rows, schema=CORRECTION_FEATURES, features=extended.features, flops=extended.flops,
                   bytes_moved=extended.bytes_moved, times_ms={label: rows.times_ms[label] / other_ms}), other_ms


def fit_transferred(rows: TrainingSet, label: str, chosen: Mapping[str, str], config: TrainingConfig,
                    start: OtherPredictors) -> Transferred:
    """As `fit_kernel_model`, starting from the predictors of another target."""
    return Transferred(start, fit_kernel_model(as_ratios(rows, label, start.model)[0], label, chosen, config))


def learner(model: Estimator, label: str, chosen: Mapping[str, str],
            config: TrainingConfig) -> Callable[[TrainingSet], Transferred] | None:
    """A function that learns from fewer rows as `model` did, if that starts from another target; else None."""
    if not isinstance(model, Transferred):
        return None
    start = model.start
    return lambda rows: fit_transferred(rows, label, chosen, config, start)
