"""Predicts how long kernels take on a card from their shapes and its data sheet alone, with no time of them on another card.

What bounds a kernel gives its time, and a booster, learned from other cards, by how much it misses that. The booster sees no
figure of a card, but only what has no unit (bytes over the second cache, waves of blocks over the SMs, the bounds' shares),
the longest bound and the shape, so that a card may be faster than all that it learned from. Only recipes/gpus/judge_neusight.py
uses it, which shows how far off it is.

Products are bounded by power, too. A T4 reaches half of its peak for a few milliseconds, and 37 % in the long run: each
operation costs energy, and the card's limit pays for so many a second. Of cards of 16 and 12 nm that is 22 pJ; of newer
processes less, as TSMC says of them (power at the same speed: 7 nm 0.36 of 16 nm, 5 nm 0.7 of 7 nm).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from records.gpu_catalogue import Gpu
from training.data_sheet.work import Floats, Work, bounds_of, peaks_flop_s
from utils.lazy import xgboost

SHORTEST_S = 25e-6  # of a kernel in NeuSight's tables, which is the host's, and much alike on all cards
OPERATION_PJ = 22.0  # at 16 and 12 nm: what long products on a T4, a V100 and a P4 reach at their limits of power (20 to 25)
PROCESS = {"pascal": 1.0, "volta": 1.0, "turing": 1.0, "ampere": 0.36, "ada": 0.25, "hopper": 0.25, "blackwell": 0.25}
BURST_S, BURST = 5e-3, 0.33  # until a limit of power holds, and the share of the time that is saved until then
MOST_OF_PEAK, MOST_OF_BANDWIDTH = 0.85, 0.85  # that long kernels reach
SHARPNESS = 8.0  # of the change from the bound by the clock to the one by power
TILES = ((128, 128), (64, 64), (128, 64), (32, 32))  # numbers of a product's result that a block of threads computes
ALIGNED = 32
PRODUCT_ROUNDS, ROW_ROUNDS = 200, 100
BOOSTER: dict[str, Any] = {"learning_rate": 0.08, "subsample": 0.7, "colsample_bytree": 0.6, "min_child_weight": 20,
                           "objective": "reg:absoluteerror", "lambda": 5.0, "seed": 0}
PRODUCT_DEPTH, ROW_DEPTH = 6, 4


class Shaped(NamedTuple):
    """Kernels with their shapes.

    Attributes:
        work: of the kernels.
        operators: a number for each operator.
        sizes: a row for each kernel: B, M, N, K of a product; rows and their lengths of all others.
    """

    work: Work
    operators: npt.NDArray[np.int_]
    sizes: Floats

    @property
    def products(self) -> bool:
        return self.sizes.shape[1] == 4


class Measured(NamedTuple):
    """Kernels and their times on a card, ms."""

    kernels: Shaped
    gpu: Gpu
    ms: Floats


class ByShape(NamedTuple):
    """What was learned of kernels of one kind: a booster of what the bounds leave."""

    booster: Any

    def times_ms(self, kernels: Shaped, gpu: Gpu) -> Floats:
        """The times of kernels on a card, ms."""
        bound_s, features = _bound_and_features(kernels, gpu)
        return np.asarray(1e3 * bound_s * np.exp(self.booster.predict(xgboost.DMatrix(features))), dtype=float)


def learn_by_shape(measured: Sequence[Measured], threads: int | None = None) -> ByShape:
    """Learns from kernels of one kind, products or others, on several cards."""
    bounds, features = zip(*(_bound_and_features(of_card.kernels, of_card.gpu) for of_card in measured), strict=True)
    left = np.log(1e-3 * np.concatenate([of_card.ms for of_card in measured]) / np.concatenate(bounds))
    products = measured[0].kernels.products
    settings = BOOSTER | {"max_depth": PRODUCT_DEPTH if products else ROW_DEPTH}
    return ByShape(xgboost.train(settings if threads is None else settings | {"nthread": threads},
                                 xgboost.DMatrix(np.concatenate(features), left), PRODUCT_ROUNDS if products else ROW_ROUNDS))


def compute_s(work: Work, gpu: Gpu) -> Floats:
    """How long products compute at least, by the card's clock and by its power."""
    by_clock = work.flops / (MOST_OF_PEAK * peaks_flop_s(work, gpu))
    by_power = work.flops * OPERATION_PJ * 1e-12 * PROCESS[gpu.generation] / gpu.power_w
    by_power = by_power * (1.0 - BURST * np.exp(-by_power / BURST_S))
    return np.asarray((by_clock**SHARPNESS + by_power**SHARPNESS) ** (1.0 / SHARPNESS))


def _bound_and_features(kernels: Shaped, gpu: Gpu) -> tuple[Floats, Floats]:
    return _of_products(kernels, gpu) if kernels.products else _of_rows(kernels, gpu)


def _of_products(kernels: Shaped, gpu: Gpu) -> tuple[Floats, Floats]:
    work, (b, m, n, k) = kernels.work, kernels.sizes.T
    memory_s, computing_s = bounds_of(work, gpu).memory_s, compute_s(work, gpu)
    bound_s = np.maximum(memory_s, computing_s)
    longest_s = np.maximum(bound_s, SHORTEST_S)
    of_cache = work.moved_bytes / (gpu.l2_mb * 1e6)
    features = [np.log(memory_s / longest_s), np.log(computing_s / longest_s), np.log(memory_s / computing_s),
                np.log(longest_s), np.log(b), np.log(m), np.log(n), np.log(k), np.log(of_cache),
                np.log(of_cache / b), np.log(work.flops / work.moved_bytes), np.log(np.minimum(m, n)), np.log(m / n)]
    for height, width in TILES:
        down, across = np.ceil(m / height), np.ceil(n / width)
        waves = b * down * across / gpu.sms
        features += [np.log(waves), np.clip(np.log(np.ceil(waves) / waves), 0.0, 3.0),
                     np.log(down * height * across * width / (m * n))]
    features += [np.gcd(side.astype(int), ALIGNED).astype(float) for side in (m, n, k)]
    return bound_s + SHORTEST_S, np.column_stack(features)


def _of_rows(kernels: Shaped, gpu: Gpu) -> tuple[Floats, Floats]:
    work, (_, length) = kernels.work, kernels.sizes.T
    memory_s = work.moved_bytes / (MOST_OF_BANDWIDTH * gpu.bandwidth_gb_s * 1e9)
    bound_s = memory_s + SHORTEST_S
    return bound_s, np.column_stack([kernels.operators.astype(float), np.log(memory_s / bound_s), np.log(length),
                                     np.log(work.moved_bytes / (gpu.l2_mb * 1e6))])
