"""The roofline: two rates, a floor and a scale, fitted to the kernels that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hase.learned.kernels.estimators import Roofline, fit_roofline
from hase.learned.kernels.interface import Estimator, Floats, Measured
from hase.learned.kernels.schema import KernelRows


class RooflineEstimator(Estimator):
    """The time by arithmetic or by memory, whichever is longer, plus a floor; times the median ratio to that."""

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
