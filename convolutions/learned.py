"""Predicts the time of a convolution under each algorithm from its shape, with the estimators of kernels.

An algorithm stands where a kernel's type stands: one booster is shared, and each algorithm has one of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from convolutions.algorithms import ConvShape
from convolutions.features import CONVOLUTION_FEATURES
from convolutions.tables import Case
from training.kernels.estimators import SHARED, KernelModel, problem_of, train_booster
from training.kernels.schema import KernelRows
from training.kernels.settings import XgboostSettings
from utils.errors import UserError

Floats = npt.NDArray[np.float64]
LEAST_ROWS = 20  # of an algorithm, for a booster of its own
SETTINGS = XgboostSettings(trees=300, depth=4, min_leaf_weight=1.0, objective="squarederror")
SEED = 7


def fit(cases: Sequence[Case]) -> KernelModel:
    """Learns the time of each algorithm from the cases that it ran; layers of one shape count as one.

    Raises:
        UserError: there are none.
    """
    samples_ms: dict[tuple[ConvShape, str], list[float]] = defaultdict(list)
    for case in cases:
        for name, time_ms in case.times_ms.items():
            samples_ms[case.shape, name].append(time_ms)
    if not samples_ms:
        raise UserError("no measured layer to learn from")
    shapes, names = [shape for shape, _ in samples_ms], [name for _, name in samples_ms]
    times_ms = np.array([np.median(samples) for samples in samples_ms.values()])
    problem = problem_of(rows_of(shapes, names), times_ms)
    boosters = {SHARED: train_booster(problem.matrix, problem.log_ratios, SETTINGS, SEED)}
    for name in problem.type_codes:
        mask = np.array(names) == name
        if mask.sum() >= LEAST_ROWS:
            boosters[name] = train_booster(problem.matrix[mask], problem.log_ratios[mask], SETTINGS, SEED)
    predictor_of = {name: name if name in boosters else SHARED for name in problem.type_codes}
    return KernelModel(CONVOLUTION_FEATURES, problem.roofline, problem.type_codes, predictor_of, boosters, ())


def rows_of(shapes: Sequence[ConvShape], algorithms: Sequence[str]) -> KernelRows:
    """The shapes as the estimators read them, each under an algorithm."""
    return KernelRows(types=np.array(algorithms), features=CONVOLUTION_FEATURES.matrix(shapes),
                      flops=np.array([shape.flops for shape in shapes], dtype=float),
                      bytes_moved=np.array([shape.bytes_moved for shape in shapes], dtype=float))


def predict_ms(model: KernelModel, shapes: Sequence[ConvShape], algorithm: str) -> Floats:
    """The time of each shape under an algorithm, in ms."""
    if not shapes:
        return np.zeros(0)
    return model.predict_ms(rows_of(shapes, [algorithm] * len(shapes)))


def predict_cases(model: KernelModel, cases: Sequence[Case]) -> list[dict[str, float]]:
    """The predicted time (ms) of each case under each algorithm that can run it and that was learned."""
    times_of: list[dict[str, float]] = [{} for _ in cases]
    for name in model.type_codes:
        able = [place for place, case in enumerate(cases) if name in case.times_ms]
        for place, time_ms in zip(able, predict_ms(model, [cases[place].shape for place in able], name), strict=True):
            times_of[place][name] = float(time_ms)
    return times_of
