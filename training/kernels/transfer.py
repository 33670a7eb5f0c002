"""Learns a device's kernel times as multiples of what the predictors of another device say.

Devices of one kind are alike: a kernel that is inefficient on one GPU is mostly inefficient on another. So the boosters need to
learn less, and fewer kernels have to be measured: docs/this_device.md has figures. They learn log(time here / time there), and
read in addition how far the time there is above the roofline there. Training keeps them only where that lowers the error on
kernels that were held out (training/kernels/label_training.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from training.kernels.estimators import TABLES, KernelModel, TimePredictor, fit_kernel_model, table_counts
from training.kernels.features import KERNEL_FEATURES
from training.kernels.roofline import Roofline
from training.kernels.schema import FeatureSchema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from records.kernel_record import Kernel
    from training.kernels.settings import TrainingConfig
    from training.kernels.training_set import TrainingSet

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


@dataclass(frozen=True)
class Transferred:
    """Predicts the times of one label here from those of another device.

    Attributes:
        start: the other device's predictors.
        correction: predicts time here / time there, from CORRECTION_FEATURES.
    """

    start: OtherPredictors
    correction: KernelModel

    @property
    def other(self) -> KernelModel:
        """The other device's predictors."""
        return self.start.model

    @property
    def schema(self) -> FeatureSchema:
        """Of the features that `predict_ms` takes."""
        return self.other.schema

    @property
    def predictor_of(self) -> Mapping[str, str]:
        """For each kernel type that was measured here, the name of its correction."""
        return self.correction.predictor_of

    @property
    def roofline(self) -> Roofline:
        """The roofline there, as slow as this device is in the median."""
        there, slower = self.other.roofline, self.correction.roofline.floor_ms * self.correction.roofline.scale
        return there.model_copy(update={
            "flops_per_ms": there.flops_per_ms / slower, "bytes_per_ms": there.bytes_per_ms / slower,
            "floor_ms": there.floor_ms * slower, "table_ms": there.table_ms * slower})

    def predict_ms(self, types: Iterable[str], features: Floats, load: Floats, flops: Floats,
                   bytes_moved: Floats) -> Floats:
        """As of `KernelModel`. A type that was not measured here is as much slower as the median kernel."""
        types, zeros = list(types), np.zeros(len(features))
        there_ms, extended = from_there(self.other, types, features, flops, bytes_moved)
        return there_ms * self.correction.predict_ms(types, extended, load, zeros, zeros)


def from_there(other: KernelModel, types: Sequence[str], features: Floats, flops: Floats,
               bytes_moved: Floats) -> tuple[Floats, Floats]:
    """The times (ms) of kernels on the other device, idle, and their CORRECTION_FEATURES.

    A fused type that the other device does not have counts as its first operation.

    Args:
        other: its predictors.
        types, features, flops, bytes_moved: of each kernel, as of `KernelModel.predict_ms`.
    """
    meant = [name if name in other.predictor_of else name.partition("_")[0] for name in types]
    idle = np.tile(np.array(other.idle_load, dtype=float), (len(meant), 1))
    there_ms = other.predict_ms(meant, features, idle, flops, bytes_moved)
    bound_ms = other.roofline.bound_ms(flops, bytes_moved, table_counts(other.schema, features))
    return there_ms, np.column_stack([features, np.log2(there_ms / bound_ms)])


def as_ratios(rows: TrainingSet, label: str, other: KernelModel) -> tuple[TrainingSet, Floats]:
    """The learning problem of a correction: `rows` with the ratio to the time there in place of the time; and the times there.

    Operations and bytes are zero, which makes the roofline of the ratios a constant.
    """
    there_ms, features = from_there(other, rows.types.tolist(), rows.features, rows.flops, rows.bytes_moved)
    zeros = np.zeros(len(rows))
    return replace(rows, schema=CORRECTION_FEATURES, features=features, flops=zeros, bytes_moved=zeros,
                   times_ms={label: rows.times_ms[label] / there_ms}), there_ms


def fit_transferred(rows: TrainingSet, label: str, own: Sequence[str], config: TrainingConfig,
                    start: OtherPredictors) -> Transferred:
    """As `fit_kernel_model`, starting from the predictors of another target."""
    return Transferred(start, fit_kernel_model(as_ratios(rows, label, start.model)[0], label, own, config))


def learner(model: TimePredictor, label: str, own: Sequence[str],
            config: TrainingConfig) -> Callable[[TrainingSet], Transferred] | None:
    """A function that learns from fewer rows as `model` did, if that starts from another target; else None."""
    if not isinstance(model, Transferred):
        return None
    start = model.start
    return lambda rows: fit_transferred(rows, label, own, config, start)
