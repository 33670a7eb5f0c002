"""Times learned in two stages: first which CUDA kernel a library picks for a shape, then the time, with that as a feature.

The name of a CUDA kernel shows its algorithm (implicit GEMM, direct, depthwise, …), element types and layout, which explains
why similar shapes can take very different times. It is known only for measured kernels; for others a classifier guesses it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.estimators import KernelModel, assign_folds, design_matrix, fit_kernel_model, learning_problem
from hase.learned.kernels.schema import KernelRows
from hase.learned.kernels.settings import TrainingConfig
from hase.training.kernels.training_set import TrainingSet
from hase.utils.lazy import sklearn

Floats = npt.NDArray[np.float64]
MOST_CLASSES = 40  # the most frequent ones; all others are one class
TREES, LEAST_IN_LEAF = 50, 2  # of the classifier, a random forest
INNER_FOLDS = 3
_PRODUCT = re.compile(r"gemm|gemv|nvjet|fprop|dgrad|conv|winograd|fft|attention|fmha|flash", re.IGNORECASE)
_PREPARATION = re.compile(r"init_device_workspace")
_NUMBERS = re.compile(r"[^A-Za-z]+")


def cuda_class(names: Sequence[str]) -> str:
    """The class of the CUDA kernels `names` that one kernel launches: the name of the first one that multiplies, without
    arguments and numbers (`sm_xmma_fprop_implicit_gemm_f_f_tf_f_f_nhwckrsc_nhwc_tilesize_x_…`); empty where none does."""
    product = next((name for name in names if _PRODUCT.search(name) and not _PREPARATION.search(name)), "")
    return _NUMBERS.sub("_", product.partition("(")[0].removeprefix("void ")).strip("_")


@dataclass(frozen=True)
class Classifier:
    """Predicts the probability of each of `count` classes; 0 for classes that were not in its training."""

    forest: Any
    count: int

    def probabilities(self, matrix: npt.NDArray[np.float32]) -> Floats:
        """Probabilities, shape (rows, classes), of rows of a `design_matrix`."""
        probabilities = np.zeros((len(matrix), self.count))
        probabilities[:, self.forest.classes_] = self.forest.predict_proba(np.nan_to_num(matrix, nan=-1.0))
        return probabilities


def train_classifier(matrix: npt.NDArray[np.float32], classes: npt.NDArray[np.int64], count: int, seed: int) -> Classifier:
    """A random forest that predicts `classes`, which are numbers below `count`, one per row of `matrix`."""
    forest = sklearn.ensemble.RandomForestClassifier(
        n_estimators=TREES, min_samples_leaf=LEAST_IN_LEAF, random_state=seed, n_jobs=1)
    return Classifier(forest.fit(np.nan_to_num(matrix, nan=-1.0), classes), count)


class TwoStages(KernelModel):
    """Predicts the class of a kernel, then its time from its class and shape; not saved."""

    name = "two_stages"

    def __init__(self, classifier: Classifier, times: KernelModel) -> None:
        super().__init__(times.features, times.roofline, times.type_codes, times.predictor_of, times.boosters, times.idle_load)
        self.classifier = classifier

    def predict_ms(self, kernels: KernelRows) -> Floats:
        matrix = design_matrix(kernels.types.tolist(), kernels.features, kernels.load, self.type_codes)
        guessed = self.classifier.probabilities(matrix)
        return super().predict_ms(replace(kernels, features=np.hstack([kernels.features, guessed])))


def fit_two_stages(rows: TrainingSet, label: str, class_of: Mapping[str, str], config: TrainingConfig) -> TwoStages:
    """A classifier, and boosters that learn from its guesses.

    The boosters learn from guesses by classifiers that were trained without the row's family (or, for a kernel of no family,
    without the kernel): on its own rows, a classifier is far better than on others.

    Args:
        rows: to learn from.
        label: the label whose times are learned.
        class_of: the class of each row's kernel, by kernel id.
        config: of the training.
    """
    problem = learning_problem(rows, label)
    named = [class_of[name] for name in rows.ids]
    numbers = {name: place for place, (name, _) in enumerate(Counter(named).most_common(MOST_CLASSES))}
    classes = np.array([numbers.get(name, len(numbers)) for name in named])
    count = len(numbers) + 1
    groups = [min(families) if families else str(name) for families, name in zip(rows.groups, rows.ids, strict=True)]
    folds = assign_folds(groups, [""] * len(groups), INNER_FOLDS, config.seed)
    guessed = np.zeros((len(rows), count))
    for fold in set(folds.tolist()) if len(set(folds.tolist())) > 1 else ():  # one group alone: nothing to guess from
        out = folds == fold
        inner = train_classifier(problem.matrix[~out], classes[~out], count, config.seed)
        guessed[out] = inner.probabilities(problem.matrix[out])
    extended = replace(rows, features=np.hstack([rows.features, guessed]))
    times = fit_kernel_model(extended, label, {}, config)
    return TwoStages(train_classifier(problem.matrix, classes, count, config.seed), times)
