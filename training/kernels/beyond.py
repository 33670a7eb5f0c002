"""How far the sizes of kernels lie beyond those that were learned from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from training.kernels.schema import FeatureSchema

Floats = npt.NDArray[np.float64]
SLACK = 1e-6  # a feature may be beyond its range by this much, for rounding


def times_beyond(schema: FeatureSchema, features: Floats, low: Floats, high: Floats) -> Floats:
    """By what factor each kernel is beyond the range of the training, the largest over its features; 1 within the range.

    Args:
        features: kernels × the schema's features.
        low, high: of the training, by feature.
    """
    beyond = (features < low - SLACK) | (features > high + SLACK)
    sizes, least, most = (np.where(schema.logarithmic, values, np.log2(1.0 + np.abs(values)))
                          for values in (features, low, high))
    doublings = np.where(beyond, np.maximum(sizes - most, least - sizes), 0.0).max(axis=1)
    return np.asarray(2.0 ** np.maximum(doublings, 0.0))
