"""Corrects a data sheet's predictions by kernels that were measured on the card, in a minute or in ten.

What is left of a kernel's time (the logarithm of measured over predicted) is a smooth function of how long it takes, of what
bounds it, and of its kind. A Gaussian process learns it from the measured kernels: near them it follows what was measured, far
from them it falls back to the card's mean error, and without any it changes nothing.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from records.gpu_catalogue import Gpu
from training.data_sheet.ratios import OWN, SHORTEST_US, CardRatios
from training.data_sheet.work import KINDS, Floats, Work, bounds_of
from utils.lazy import sklearn

MOST_LEFT = 0.8  # of what is left, as a logarithm: what is further off is a wrong label or a cliff
KIND_APART = 2.0  # how far two kinds lie from each other, in standard deviations of the other features


@dataclass
class AdjustedRatios(CardRatios):
    """Ratios that were corrected for one card.

    Attributes:
        process: the Gaussian process.
        means, spreads: of its features over the measured kernels.
        gpu, table: that it holds for.
    """

    process: Any = None
    means: Floats = field(default_factory=lambda: np.zeros(0))
    spreads: Floats = field(default_factory=lambda: np.ones(0))
    gpu: Gpu | None = None
    table: str = OWN

    def times_ms(self, work: Work, base_ms: Floats, base: Gpu, gpu: Gpu, table: str = OWN) -> Floats:
        times_ms = super().times_ms(work, base_ms, base, gpu, table)
        if self.gpu is None or gpu.slug != self.gpu.slug or base.slug == gpu.slug:
            return times_ms
        features = (_features(work, base_ms, base, gpu, table) - self.means) / self.spreads
        return np.asarray(times_ms * np.exp(self.process.predict(features)), dtype=float)


def _features(work: Work, base_ms: Floats, base: Gpu, gpu: Gpu, table: str) -> Floats:
    base_s = base_ms * 1e-3
    here, there = (bounds_of(work, of, SHORTEST_US[table]) for of in (base, gpu))
    return np.column_stack([
        np.log(base_s), np.log(base_s / here.longest_s), there.memory_s / there.longest_s, there.compute_s / there.longest_s,
        np.log(work.moved_bytes), np.log(np.maximum(work.flops, 1.0) / work.moved_bytes), np.log(np.maximum(work.outputs, 1.0)),
        *(KIND_APART * (work.kinds == place) for place in range(len(KINDS)))])


def adjust(ratios: CardRatios, work: Work, base_ms: Floats, measured_ms: Floats, base: Gpu, gpu: Gpu,
           table: str = OWN) -> AdjustedRatios:
    """The ratios, corrected by kernels that were measured on a card.

    Args:
        ratios: what was learned of cards.
        work: of the measured kernels.
        base_ms, measured_ms: their times on the base card and on this one.
        base, gpu: the cards.
        table: as which one they were measured.
    """
    kernels, process = sklearn.gaussian_process.kernels, sklearn.gaussian_process.GaussianProcessRegressor
    left = np.log(measured_ms / ratios.times_ms(work, base_ms, base, gpu, table))
    features = _features(work, base_ms, base, gpu, table)
    means, spreads = features.mean(axis=0), features.std(axis=0)
    of_kinds = np.arange(features.shape[1]) >= features.shape[1] - len(KINDS)
    means, spreads = np.where(of_kinds, 0.0, means), np.where(of_kinds | (spreads < 1e-9), 1.0, spreads)
    of_card, nearby = kernels.ConstantKernel(0.05, (1e-3, 1.0)), kernels.ConstantKernel(0.05, (1e-3, 1.0))
    learned = process(of_card + nearby * kernels.RBF(3.0, (1.0, 30.0)) + kernels.WhiteKernel(0.02, (1e-3, 0.3)))
    with warnings.catch_warnings():  # the bounds are what is plausible, and reached where a few kernels say little
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        learned.fit((features - means) / spreads, np.clip(left, -MOST_LEFT, MOST_LEFT))
    return AdjustedRatios(ratios.booster, learned, means, spreads, gpu, table)
