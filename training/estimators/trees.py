"""Trees that predict log(time / roofline) of all kernels together: boosted by XGBoost, or as a random forest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.learned.kernels.estimators import FOREST, SHARED, Matrix, OnRoofline
from hase.learned.kernels.interface import Estimator, Floats, Measured, TrainingConfig
from hase.training.kernels.fitting import Problem, problem_of, train_booster, train_forest

if TYPE_CHECKING:
    import xgboost


class Trees(OnRoofline, Estimator):
    """An estimator of trees whose leaves add up to log(time / roofline), for kernels of all types together."""

    boosters: Mapping[str, xgboost.Booster]

    @abstractmethod
    def train(self, problem: Problem, config: TrainingConfig, label: str) -> xgboost.Booster:
        """Trains the trees and returns them as a booster."""

    def fit(self, measured: Measured) -> None:
        problem = problem_of(measured, measured.times_ms, weights=measured.weights)
        self.roofline, self.type_codes = problem.roofline, problem.type_codes
        self.boosters = {SHARED: self.train(problem, measured.config, measured.label)}

    def log_ratios(self, types: Sequence[str], matrix: Matrix) -> Floats:
        return np.asarray(self.boosters[SHARED].inplace_predict(matrix), dtype=float)

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"boosters": self.boosters}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        self.boosters = saved["boosters"]


class BoostedTrees(Trees):
    """Boosted trees by XGBoost, with the training's settings for the label."""

    name = "xgboost"

    def train(self, problem: Problem, config: TrainingConfig, label: str) -> xgboost.Booster:
        return train_booster(problem.matrix, problem.log_ratios, config.booster(label), config.seed, problem.weights)


class RandomForest(Trees):
    """A random forest by scikit-learn, with the training's settings; it is saved so that predictions need no scikit-learn."""

    name = FOREST
    version = 2

    def train(self, problem: Problem, config: TrainingConfig, label: str) -> xgboost.Booster:
        return train_forest(problem.matrix, problem.log_ratios, config.forest, config.seed, problem.weights)
