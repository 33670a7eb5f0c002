"""Which CUDA kernel a library picks for a shape, learned first, and times learned with that as further features.

The name of a CUDA kernel tells the algorithm (implicit GEMM, direct, depthwise, …), its element types and layout, and so
jumps of time between shapes that look alike. It is known of what was measured alone; of another kernel a classifier guesses it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from training.kernels.estimators import KernelModel, assign_folds, design_matrix, fit_kernel_model, pose
from training.kernels.settings import TrainingConfig
from training.kernels.training_set import TrainingSet
from utils.lazy import sklearn

Floats = npt.NDArray[np.float64]
MOST_CLASSES = 40  # the most frequent ones; all others are one
TREES, LEAST_IN_LEAF = 50, 2  # of the classifier, a random forest
INNER_FOLDS = 3
_PRODUCT = re.compile(r"gemm|gemv|nvjet|fprop|dgrad|conv|winograd|fft|attention|fmha|flash", re.IGNORECASE)
_PREPARATION = re.compile(r"init_device_workspace")
_NUMBERS = re.compile(r"[^A-Za-z]+")


def cuda_class(names: Sequence[str]) -> str:
    """The class of what ran on the GPU for one kernel: the name of the first CUDA kernel that multiplies, without arguments and
    numbers: `sm_xmma_fprop_implicit_gemm_f_f_tf_f_f_nhwckrsc_nhwc_tilesize_x_…`. Empty where none does."""
    product = next((name for name in names if _PRODUCT.search(name) and not _PREPARATION.search(name)), "")
    return _NUMBERS.sub("_", product.partition("(")[0].removeprefix("void ")).strip("_")


@dataclass(frozen=True)
class Classifier:
    """Tells the probability of each of `count` classes; those that its training did not hold have none."""

    forest: Any
    count: int

    def probabilities(self, matrix: npt.NDArray[np.float32]) -> Floats:
        """rows × classes, of rows as the estimators see them."""
        found = np.zeros((len(matrix), self.count))
        found[:, self.forest.classes_] = self.forest.predict_proba(np.nan_to_num(matrix, nan=-1.0))
        return found


def train_classifier(matrix: npt.NDArray[np.float32], classes: npt.NDArray[np.int64], count: int, seed: int) -> Classifier:
    """A random forest of `classes`, numbers below `count`, one a row of `matrix`."""
    forest = sklearn.ensemble.RandomForestClassifier(
        n_estimators=TREES, min_samples_leaf=LEAST_IN_LEAF, random_state=seed, n_jobs=1)
    return Classifier(forest.fit(np.nan_to_num(matrix, nan=-1.0), classes), count)


@dataclass(frozen=True)
class TwoStages:
    """Predicts the class of a kernel, and from that and its shape the time."""

    classifier: Classifier
    times: KernelModel

    def predict_ms(self, types: Iterable[str], features: Floats, load: Floats, flops: Floats,
                   bytes_moved: Floats) -> Floats:
        """As of `KernelModel`."""
        types = list(types)
        guessed = self.classifier.probabilities(design_matrix(types, features, load, self.times.type_codes))
        return self.times.predict_ms(types, np.hstack([features, guessed]), load, flops, bytes_moved)


def fit_two_stages(rows: TrainingSet, label: str, class_of: Mapping[str, str], config: TrainingConfig) -> TwoStages:
    """A classifier, and boosters that learn from its guesses.

    The guesses to learn from are of classifiers that did not see the row's family (nor, of a kernel of none, the kernel): a
    classifier knows its own rows too well to be trusted as much elsewhere.

    Args:
        rows: to learn from.
        label: whose times.
        class_of: the class of each row's kernel by id.
        config: of the training.
    """
    problem = pose(rows, label)
    named = [class_of[name] for name in rows.ids]
    numbers = {name: place for place, (name, _) in enumerate(Counter(named).most_common(MOST_CLASSES))}
    classes = np.array([numbers.get(name, len(numbers)) for name in named])
    count = len(numbers) + 1
    groups = [min(families) if families else str(name) for families, name in zip(rows.groups, rows.ids, strict=True)]
    folds = assign_folds(groups, [""] * len(groups), INNER_FOLDS, config.seed)
    guessed = np.zeros((len(rows), count))
    for fold in set(folds.tolist()) if len(set(folds.tolist())) > 1 else ():  # one group alone: nothing is known to guess from
        out = folds == fold
        inner = train_classifier(problem.matrix[~out], classes[~out], count, config.seed)
        guessed[out] = inner.probabilities(problem.matrix[out])
    extended = replace(rows, features=np.hstack([rows.features, guessed]))
    times = fit_kernel_model(extended, label, (), config)
    return TwoStages(train_classifier(problem.matrix, classes, count, config.seed), times)
