"""How far off a predicted time may be, learned from how far off kernels were that were held out of training.

Predictions err most where libraries change their algorithm: there neighbours disagree, and those that were held out were far
off. A booster learns the size of these errors from the features of kernels. A kernel counts with the GPU's time or with what
its launches take the host, whichever is longer: a convolution that a library runs group by group may have a thousand launches
where its neighbours have two, and hardly more work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.estimators import KernelModel, fit_factors
from hase.learned.kernels.settings import XgboostSettings

if TYPE_CHECKING:
    from hase.training.kernels.training_set import TrainingSet  # needs pandas, which a prediction does not

Floats = npt.NDArray[np.float64]
MeasuredAndPredicted = Mapping[str, tuple[float, float]]  # of kernels, by id
LARGEST = float(np.log(50.0))  # error that counts, as a logarithm: a few kernels are off by a factor of a thousand
LAUNCH_MS = 0.0045  # what a launch takes the host of an H200, as its composition was fitted
SETTINGS = XgboostSettings(trees=200, depth=7, learning_rate=0.08, min_leaf_weight=6.0, objective="squarederror",
                           own_predictors="none")


def learn_doubt(rows: TrainingSet, gpu_ms: MeasuredAndPredicted, launches: MeasuredAndPredicted, seed: int) -> KernelModel:
    """The doubt of each kernel, as a model that predicts the factor by which its time is off in the mean.

    Args:
        rows: of the dataset.
        gpu_ms: the GPU's times (ms) of its idle kernels, measured, and predicted by a training without the kernel.
        launches: the same of the numbers of their launches, as far as these were counted.
        seed: of the booster.
    """
    known = rows.rows(rows.idle & np.isin(rows.ids, list(gpu_ms)))
    taken_ms = np.array([gpu_ms[name] for name in known.ids.tolist()])
    launched_ms = LAUNCH_MS * np.array([launches.get(name, (0.0, 0.0)) for name in known.ids.tolist()])
    measured_ms, predicted_ms = np.maximum(taken_ms, launched_ms).T
    errors = np.minimum(np.abs(np.log(predicted_ms / measured_ms) - known.carried_errors), LARGEST)
    return fit_factors(known, errors, SETTINGS, seed)
