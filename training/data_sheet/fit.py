"""Learns how kernels' times go from one card to another.

A time on another card is that on the base card, times the ratio of what bounds it there and here (work.py). Products and
attention, which public tables have on many cards, are corrected by a booster that learned from all pairs of cards what the
bounds leave, those of other operators among them: these bring further cards. But other kinds are not corrected. They were
measured in fp32, on older cards and under PyTorch, and what was learned from them makes predictions for kernels of ONNX Runtime
worse (an H100's: 12.5 % with it, 9.1 % without).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from hase.learned.data_sheet.ratios import BASE, SHORTEST_US, CardRatios
from hase.learned.data_sheet.work import bounds_of, features_of, ratio_of_bounds
from hase.training.data_sheet.tables import Table, card
from hase.utils.lazy import xgboost

PAIR_KERNELS = 2500  # of a table, for each pair of cards
ROUNDS = 300
BOOSTER: dict[str, Any] = {"max_depth": 5, "learning_rate": 0.07, "subsample": 0.7, "colsample_bytree": 0.6,
                           "min_child_weight": 20, "objective": "reg:absoluteerror", "lambda": 5.0, "seed": 0}
BASE_WEIGHT = 3.0  # of pairs that begin at the card that Hase predicts from
MOST_LEFT = 1.5  # of what a pair's bounds leave, as a logarithm


def learn(tables: Sequence[Table], without: Collection[str] = (), base: str = BASE, most: int = PAIR_KERNELS,
          threads: int | None = None) -> CardRatios:
    """Learns from all pairs of cards of each table.

    Args:
        tables: measured kernels.
        without: cards of which nothing is learned.
        base: the card that times are carried over from.
        most: kernels of a table for each pair.
        threads: of the training.
    """
    generator = np.random.default_rng(0)
    features, left, weights = [], [], []
    for table in tables:
        for begin, end in itertools.permutations([name for name in table.ms if name not in without], 2):
            both = np.flatnonzero(np.isfinite(table.ms[begin]) & np.isfinite(table.ms[end]))
            if not len(both):
                continue
            chosen = generator.choice(both, min(most, len(both)), replace=False)
            work, begin_s, end_s = table.work.rows(chosen), 1e-3 * table.ms[begin][chosen], 1e-3 * table.ms[end][chosen]
            cards = card(begin), card(end)
            here, there = (bounds_of(work, of, SHORTEST_US[table.name]) for of in cards)
            features.append(features_of(work, begin_s, here, there, *cards))
            left.append(np.log(end_s / begin_s / ratio_of_bounds(work, begin_s, here, there, *cards)))
            weights.append(np.full(len(chosen), BASE_WEIGHT if begin == base else 1.0))
    rows = xgboost.DMatrix(np.concatenate(features), np.clip(np.concatenate(left), -MOST_LEFT, MOST_LEFT),
                           weight=np.concatenate(weights))
    settings = BOOSTER if threads is None else BOOSTER | {"nthread": threads}
    return CardRatios(xgboost.train(settings, rows, ROUNDS))
