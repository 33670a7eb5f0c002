"""Trees on log(time / roofline) for all kernels together: XGBoost's boosted ones, and a random forest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from training.admission.interface import Floats, Measured
from training.kernels.estimators import SHARED, Matrix, OnRoofline, problem_of, train_booster, train_forest

if TYPE_CHECKING:
    import xgboost

FOREST_COLUMNS = ("feature", "threshold", "left", "right", "value")  # of a node


class BoostedTrees(OnRoofline):
    """XGBoost with the settings that the training has for the label."""

    name = "xgboost"
    boosters: Mapping[str, xgboost.Booster]

    def fit(self, measured: Measured) -> None:
        problem, config = problem_of(measured, measured.times_ms, weights=measured.weights), measured.config
        self.roofline, self.type_codes = problem.roofline, problem.type_codes
        self.boosters = {SHARED: train_booster(problem.matrix, problem.log_ratios, config.booster(measured.label), config.seed,
                                               problem.weights)}

    def log_ratios(self, types: Sequence[str], matrix: Matrix) -> Floats:
        return np.asarray(self.boosters[SHARED].inplace_predict(matrix), dtype=float)

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"boosters": self.boosters}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        self.boosters = saved["boosters"]


class RandomForest(OnRoofline):
    """scikit-learn's forest, as the settings of the training say. A prediction needs no scikit-learn.

    Attributes:
        nodes: by column, all nodes of all trees: the feature and threshold, the nodes left (at most the threshold) and right,
            and the value. A leaf's left is -1.
        roots: the first node of each tree.
    """

    name = "random_forest"
    nodes: Mapping[str, npt.NDArray[Any]]
    roots: npt.NDArray[np.int64]

    def fit(self, measured: Measured) -> None:
        problem, config = problem_of(measured, measured.times_ms, weights=measured.weights), measured.config
        self.roofline, self.type_codes = problem.roofline, problem.type_codes
        forest = train_forest(problem.matrix, problem.log_ratios, config.forest, config.seed, problem.weights)
        trees = [tree.tree_ for tree in forest.estimators_]
        self.roots = np.cumsum([0, *(tree.node_count for tree in trees[:-1])])
        columns = zip(*((tree.feature, tree.threshold, tree.children_left + root * (tree.children_left >= 0),
                         tree.children_right + root, tree.value[:, 0, 0])
                        for tree, root in zip(trees, self.roots.tolist(), strict=True)), strict=True)
        self.nodes = dict(zip(FOREST_COLUMNS, map(np.concatenate, columns), strict=True))

    def log_ratios(self, types: Sequence[str], matrix: Matrix) -> Floats:
        feature, threshold, left, right, value = (self.nodes[column] for column in FOREST_COLUMNS)
        of_trees = []
        for root in self.roots.tolist():
            at, rows = np.full(len(matrix), root), np.arange(len(matrix))
            while len(rows := rows[left[at[rows]] >= 0]):
                nodes = at[rows]
                at[rows] = np.where(matrix[rows, feature[nodes]] <= threshold[nodes], left[nodes], right[nodes])
            of_trees.append(value[at])
        return np.asarray(np.mean(of_trees, axis=0))

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"nodes": self.nodes, "roots": self.roots}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        self.nodes, self.roots = saved["nodes"], saved["roots"]
