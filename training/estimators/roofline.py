"""The roofline as an estimator: two rates, a floor and a scale, fitted to its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hase.learned.kernels.estimators import Roofline
from hase.learned.kernels.features import KernelRows
from hase.learned.kernels.interface import Estimator, Floats, Measured
from hase.training.kernels.fitting import fit_roofline


class RooflineEstimator(Estimator):
    """The time of arithmetic or memory, whichever is longer, plus a floor; scaled by the median ratio to measured times."""

    name = "roofline"
    saved_classes = (Roofline,)
    roofline: Roofline

    def fit(self, measured: Measured) -> None:
        self.roofline = fit_roofline(measured.flops, measured.bytes_moved, measured.times_ms, weights=measured.weights)

    def predict_ms(self, kernels: KernelRows) -> Floats:
        return self.roofline.bound_ms(kernels.flops, kernels.bytes_moved) * self.roofline.scale

    def saved(self) -> dict[str, Any]:
        return {"roofline": self.roofline}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.roofline = saved["roofline"]
