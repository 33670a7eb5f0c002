"""A small neural network that predicts log(time / roofline) from the boosters' features.

It has two hidden layers with 64 neurons each. Its inputs are logarithms of sizes, and all features are standardised. Only its
weights are saved, so a prediction needs no scikit-learn.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hase.learned.kernels.estimators import Matrix, OnRoofline
from hase.learned.kernels.features import KERNEL_FEATURES
from hase.learned.kernels.interface import Estimator, Floats, Measured
from hase.training.kernels.fitting import problem_of
from hase.utils.lazy import sklearn

LAYERS = (64, 64)
EPOCHS = 150
MOST_DEVIATIONS = 6.0  # standard deviations from the mean at which features are clipped; the network extrapolates badly


class NeuralNetwork(OnRoofline, Estimator):
    """A multi-layer perceptron with ReLU, fitted by scikit-learn's MLPRegressor."""

    name = "neural_network"
    middle: Floats
    spread: Floats
    weights: list[Floats]
    offsets: list[Floats]

    def fit(self, measured: Measured) -> None:
        problem = problem_of(measured, measured.times_ms, weights=measured.weights)
        self.roofline, self.type_codes = problem.roofline, problem.type_codes
        sizes = _log_scaled(problem.matrix)
        self.middle, self.spread = sizes.mean(axis=0), np.maximum(sizes.std(axis=0), 1e-6)
        network = sklearn.neural_network.MLPRegressor(
            hidden_layer_sizes=LAYERS, max_iter=EPOCHS, early_stopping=len(measured) >= 200, n_iter_no_change=15, alpha=1e-3,
            random_state=measured.config.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)  # so many epochs are enough
            network.fit(self._standardised(problem.matrix), problem.log_ratios, sample_weight=problem.weights)
        self.weights, self.offsets = network.coefs_, network.intercepts_

    def log_ratios(self, types: Sequence[str], matrix: Matrix) -> Floats:
        values = self._standardised(matrix)
        for layer, (weights, offsets) in enumerate(zip(self.weights, self.offsets, strict=True)):
            values = (np.maximum(values, 0.0) if layer else values) @ weights + offsets
        return values[:, 0]

    def saved(self) -> dict[str, Any]:
        return super().saved() | {
            "middle": self.middle, "spread": self.spread, "weights": self.weights, "offsets": self.offsets}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        self.middle, self.spread = saved["middle"], saved["spread"]
        self.weights, self.offsets = saved["weights"], saved["offsets"]

    def _standardised(self, matrix: Matrix) -> Floats:
        return np.clip((_log_scaled(matrix) - self.middle) / self.spread, -MOST_DEVIATIONS, MOST_DEVIATIONS)


def _log_scaled(matrix: Matrix) -> Floats:
    """Logarithms of all features that are not yet logarithms; 0 for the code of an unknown type."""
    values = np.nan_to_num(matrix.astype(float))
    is_log = np.append(KERNEL_FEATURES.logarithmic, True)  # the code of the type stays as it is
    return np.where(is_log, values, np.sign(values) * np.log2(1.0 + np.abs(values)))
