"""The roofline: two rates, a floor and a scale, fitted to the kernels that it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from records.kernel_record import Kernel
from training.admission.interface import Estimator, Floats, Measured
from training.kernels.roofline import Roofline, fit_roofline
from training.kernels.schema import FeatureSchema


def work(kernel: Kernel) -> list[float]:
    return [float(kernel.flops), float(kernel.bytes_read + kernel.bytes_written)]


class RooflineEstimator(Estimator):
    """The time by arithmetic or by memory, whichever is longer, plus a floor; times the median ratio to that."""

    name = "roofline"
    features = FeatureSchema("work", 1, {"work": ("flops", "bytes")}, work)
    saved_classes = (Roofline,)
    roofline: Roofline

    def fit(self, measured: Measured) -> None:
        flops, moved = measured.features.T
        self.roofline = fit_roofline(flops, moved, measured.times_ms)

    def predict_ms(self, types: Sequence[str], features: Floats) -> Floats:
        return self.roofline.bound_ms(*features.T) * self.roofline.scale

    def saved(self) -> dict[str, Any]:
        return {"roofline": self.roofline}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.roofline = saved["roofline"]
