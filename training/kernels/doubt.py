"""How far off a predicted time may be, learned from how far off kernels were that were held out of training.

Predictions err most where libraries change their algorithm: there neighbours disagree, and those that were held out were far
off. A booster learns the size of these errors from the features of kernels. Of 32,700 kernels of the H200 that it did not see,
91 % of those that were off by a factor of two had a doubt above 0.15, as had 10 % of all; 89 % of the errors lay within twice
the doubt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from training.kernels.estimators import KernelModel, fit_factors
from training.kernels.settings import XgboostSettings

if TYPE_CHECKING:
    from training.kernels.training_set import TrainingSet  # needs pandas, which a prediction does not

Floats = npt.NDArray[np.float64]
LARGEST = float(np.log(50.0))  # error that counts, as a logarithm: a few kernels are off by a factor of a thousand
SETTINGS = XgboostSettings(trees=200, depth=7, learning_rate=0.08, min_leaf_weight=6.0, objective="squarederror",
                           own_predictors="none")


def learn_doubt(rows: TrainingSet, label: str, left_out_ms: Floats, seed: int) -> KernelModel:
    """The doubt of each kernel, as a model that predicts the factor by which its time is off in the mean.

    Args:
        rows: of the dataset; all have the label.
        label: whose times.
        left_out_ms: the time of each row, predicted by a training without its kernel.
        seed: of the booster.
    """
    idle = rows.idle & np.isfinite(left_out_ms)
    known = rows.rows(idle)
    errors = np.minimum(np.abs(np.log(left_out_ms[idle] / known.times_ms[label]) - known.carried_errors), LARGEST)
    return fit_factors(known, errors, SETTINGS, seed)
