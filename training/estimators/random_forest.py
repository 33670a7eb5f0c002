"""A random forest on log(time / roofline). It is saved as the arrays of its trees, so a prediction needs no scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from training.admission.interface import Floats, Measured
from training.admission.saved_form import SavedArray
from training.estimators.on_roofline import Matrix, OnRoofline
from training.kernels.estimators import train_forest
from training.kernels.roofline import Roofline
from utils.frozen import Frozen


class Tree(Frozen):
    """A regression tree: by node, the feature and threshold, the nodes left (at most the threshold) and right, and the value.
    A leaf's left is -1."""

    feature: SavedArray
    threshold: SavedArray
    left: SavedArray
    right: SavedArray
    value: SavedArray

    def predict(self, matrix: Matrix) -> Floats:
        feature, threshold, left, right, value = (
            array.values for array in (self.feature, self.threshold, self.left, self.right, self.value))
        at, rows = np.zeros(len(matrix), dtype=np.int64), np.arange(len(matrix))
        while len(rows := rows[left[at[rows]] >= 0]):
            nodes = at[rows]
            at[rows] = np.where(matrix[rows, feature[nodes]] <= threshold[nodes], left[nodes], right[nodes])
        return np.asarray(value[at])


class RandomForest(OnRoofline):
    """scikit-learn's forest, as the settings of the training say."""

    name = "random_forest"
    saved_classes = (Roofline, Tree)
    trees: list[Tree]

    def learn(self, matrix: Matrix, log_ratios: Floats, measured: Measured) -> None:
        forest = train_forest(matrix, log_ratios, measured.config.forest, measured.config.seed)
        self.trees = []
        for one in forest.estimators_:
            tree = one.tree_
            arrays = (tree.feature, tree.threshold, tree.children_left, tree.children_right, tree.value[:, 0, 0])
            named = zip(Tree.model_fields, arrays, strict=True)
            self.trees.append(Tree(**{name: SavedArray.of(array) for name, array in named}))

    def log_ratios(self, matrix: Matrix) -> Floats:
        return np.mean([tree.predict(matrix) for tree in self.trees], axis=0)

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"trees": self.trees}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        self.trees = saved["trees"]
