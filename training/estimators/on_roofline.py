"""What the learned estimators share: they learn log(time / roofline) from the features of kernels and a code of their types."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from records.kernel_record import Kernel
from training.admission.interface import Estimator, Floats, Measured
from training.kernels.estimators import design_matrix, encode_types
from training.kernels.features import KERNEL_FEATURES, kernel_features
from training.kernels.roofline import Roofline, fit_roofline
from training.kernels.schema import FeatureSchema

WORK = ("flops", "bytes")  # the first features, which the roofline reads


def work_and_features(kernel: Kernel) -> list[float]:
    """Operations and bytes, then the values of KERNEL_FEATURES."""
    return [float(kernel.flops), float(kernel.bytes_read + kernel.bytes_written), *kernel_features(kernel)]


WORK_AND_FEATURES = FeatureSchema("kernel with work", KERNEL_FEATURES.version, {"work": WORK, **KERNEL_FEATURES.groups},
                                  work_and_features)
Matrix = npt.NDArray[np.float32]


class OnRoofline(Estimator):
    """A roofline times a learned ratio. A subclass learns the logarithm of the ratio."""

    features = WORK_AND_FEATURES
    roofline: Roofline
    codes: dict[str, float]

    def fit(self, measured: Measured) -> None:
        flops, moved = measured.features[:, :len(WORK)].T
        self.roofline = fit_roofline(flops, moved, measured.times_ms)
        log_ratios = np.log(measured.times_ms / self.roofline.bound_ms(flops, moved))
        self.codes = encode_types(measured.types.tolist(), log_ratios)
        self.learn(self._matrix(measured.types.tolist(), measured.features), log_ratios, measured)

    def predict_ms(self, types: Sequence[str], features: Floats) -> Floats:
        flops, moved = features[:, :len(WORK)].T
        return self.roofline.bound_ms(flops, moved) * np.exp(self.log_ratios(self._matrix(types, features)))

    def saved(self) -> dict[str, Any]:
        return {"roofline": self.roofline, "codes": self.codes}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.roofline, self.codes = saved["roofline"], saved["codes"]

    @abstractmethod
    def learn(self, matrix: Matrix, log_ratios: Floats, measured: Measured) -> None:
        """Learns from KERNEL_FEATURES and the code of the type (rows × features + 1)."""

    @abstractmethod
    def log_ratios(self, matrix: Matrix) -> Floats:
        """log(time / roofline) of each row of such a matrix."""

    def _matrix(self, types: Sequence[str], features: Floats) -> Matrix:
        return design_matrix(types, features[:, len(WORK):], np.empty((len(features), 0)), self.codes)
