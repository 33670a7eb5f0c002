"""Corrects a data sheet's predictions by kernels that were measured on the card, in a minute or in ten.

What is left of a kernel's time (the logarithm of measured over predicted) is a smooth function of how long it takes, of what
bounds it, and of its kind. A Gaussian process learns it from the measured kernels: near them it follows what was measured, far
from them it falls back to the card's mean error, and without any it changes nothing.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hase.learned.data_sheet.ratios import OWN, SHORTEST_US, CardRatios
from hase.learned.data_sheet.work import KINDS, Floats, Work, bounds_of
from hase.records.gpu_catalogue import Gpu
from hase.utils.lazy import sklearn

MOST_LEFT = 0.8  # of what is left, as a logarithm: what is further off is a wrong label or a cliff
KIND_APART = 2.0  # how far two kinds lie from each other, in standard deviations of the other features
OF_CARD, NEARBY, LENGTH, NOISE = 0.05, 0.05, 3.0, 0.02  # what the process expects before it has seen any kernel
HELD = 0.9  # share of times that a range holds
SUMMED, DRAWS = 4, 4000  # kernels whose sum stands for a model's time: few, since those of a model are alike; and such sums


class Process(NamedTuple):
    """What a Gaussian process learned of kernels that were measured on a card.

    Attributes:
        known: features of these kernels (kernels × features), in standard deviations.
        pulls: how much each pulls kernels like it.
        means, spreads: of the features.
        of_card: variance of what all kernels of the card have in common.
        nearby, length: variance of what kernels have in common with those near them, and how near that is.
    """

    known: Floats
    pulls: Floats
    means: Floats
    spreads: Floats
    of_card: float
    nearby: float
    length: float

    def left(self, features: Floats) -> Floats:
        """The logarithm of true over predicted time that it expects of each kernel, by its features."""
        scaled = (features - self.means) / self.spreads
        return np.asarray((self.of_card + self.nearby * likeness(scaled, self.known, self.length)) @ self.pulls)


@dataclass
class AdjustedRatios(CardRatios):
    """Ratios that were corrected for one card.

    Attributes:
        process: what corrects them.
        gpu, table: that it holds for.
        low, high: the multiples of a prediction between which nine of ten times of models lie.
        left_out: the logarithm of measured over predicted time of each measured kernel, when it is left out; empty where it is
            not known.
    """

    process: Process
    gpu: Gpu
    table: str
    low: float = 1.0
    high: float = 1.0
    left_out: Floats = field(default_factory=lambda: np.zeros(0))

    def times_ms(self, work: Work, base_ms: Floats, base: Gpu, gpu: Gpu, table: str = OWN) -> Floats:
        times_ms = super().times_ms(work, base_ms, base, gpu, table)
        if gpu.slug != self.gpu.slug or base.slug == gpu.slug:
            return times_ms
        return np.asarray(times_ms * np.exp(self.process.left(process_features(work, base_ms, base, gpu, table))), dtype=float)


def likeness(of: Floats, to: Floats, length: float) -> Floats:
    """How alike kernels are by their scaled features, 1 for the same; rows × rows."""
    apart = (of**2).sum(axis=1)[:, None] + (to**2).sum(axis=1)[None] - 2 * of @ to.T
    return np.asarray(np.exp(-0.5 * np.maximum(apart, 0.0) / length**2))


def process_features(work: Work, base_ms: Floats, base: Gpu, gpu: Gpu, table: str = OWN) -> Floats:
    """What tells which kernels are alike, a row for each."""
    base_s = base_ms * 1e-3
    here, there = (bounds_of(work, of, SHORTEST_US[table]) for of in (base, gpu))
    return np.column_stack([
        np.log(base_s), np.log(base_s / here.longest_s), there.memory_s / there.longest_s, there.compute_s / there.longest_s,
        np.log(work.moved_bytes), np.log(np.maximum(work.flops, 1.0) / work.moved_bytes), np.log(np.maximum(work.outputs, 1.0)),
        *(KIND_APART * (work.kinds == place) for place in range(len(KINDS)))])


def scale_of(features: Floats) -> tuple[Floats, Floats]:
    """Means and spreads that scale features; kinds are scaled already."""
    means, spreads = features.mean(axis=0), features.std(axis=0)
    of_kinds = np.arange(features.shape[1]) >= features.shape[1] - len(KINDS)
    return np.where(of_kinds, 0.0, means), np.where(of_kinds | (spreads < 1e-9), 1.0, spreads)


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
    left = np.clip(np.log(measured_ms / ratios.times_ms(work, base_ms, base, gpu, table)), -MOST_LEFT, MOST_LEFT)
    features = process_features(work, base_ms, base, gpu, table)
    means, spreads = scale_of(features)
    of_card, nearby = kernels.ConstantKernel(OF_CARD, (1e-3, 1.0)), kernels.ConstantKernel(NEARBY, (1e-3, 1.0))
    learned = process(of_card + nearby * kernels.RBF(LENGTH, (1.0, 30.0)) + kernels.WhiteKernel(NOISE, (1e-3, 0.3)))
    with warnings.catch_warnings():  # the bounds are what is plausible, and reached where a few kernels say little
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        learned.fit((features - means) / spreads, left)
    fitted, inverse = learned.kernel_.k1, np.linalg.inv(learned.L_ @ learned.L_.T)
    left_out = learned.alpha_ / np.diag(inverse)
    low, high = _ends(left_out, measured_ms / np.exp(left_out))
    return AdjustedRatios(ratios.booster, Process(
        learned.X_train_, learned.alpha_, means, spreads, float(fitted.k1.constant_value), float(fitted.k2.k1.constant_value),
        float(fitted.k2.k2.length_scale)), gpu, table, low, high, left_out)


def _ends(left_out: Floats, times_ms: Floats) -> tuple[float, float]:
    """The multiples that hold nine of ten models' times, from what is left of each measured kernel when it is left out.

    A model's time is a sum over kernels, whose errors partly cancel: sums of SUMMED kernels stand for models. Fewer kernels say
    less of the range, so it is wider.
    """
    drawn = np.random.default_rng(0).integers(len(left_out), size=(DRAWS, SUMMED))
    sums = (np.exp(left_out) * times_ms)[drawn].sum(axis=1) / times_ms[drawn].sum(axis=1)
    low, high = np.log(np.quantile(sums, [(1 - HELD) / 2, (1 + HELD) / 2])) * (1.0 + 1.0 / np.sqrt(len(left_out)))
    return float(np.exp(min(low, 0.0))), float(np.exp(max(high, 0.0)))
