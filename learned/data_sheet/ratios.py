"""What was learned of how kernels' times go from one card to another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hase.learned.data_sheet.work import (
    KINDS,
    LAUNCH_US,
    Floats,
    Work,
    bounds_of,
    by_tensor_cores,
    features_of,
    peaks_flop_s,
    ratio_of_bounds,
)
from hase.records.gpu_catalogue import Gpu
from hase.utils.lazy import xgboost

BASE = "h200"  # the card that times are carried over from
OWN = "onnxruntime"  # the table of Hase's own kernels
SHORTEST_US = {"products": 2.7, "attention": 9.5, "neusight": 15.0, OWN: LAUNCH_US}  # of a launch, as the table was measured
CORRECTED = ("product", "attention")
# The share of the tensor cores' peak that the best large products reach: those of an A100, which has most power for its peak.
MOST_REACHED = 0.85


@dataclass
class CardRatios:
    """What was learned of how times go from one card to another: a booster of what the bounds leave."""

    booster: Any = field(repr=False)

    def times_ms(self, work: Work, base_ms: Floats, base: Gpu, gpu: Gpu, table: str = OWN) -> Floats:
        """The times of kernels on a card, ms, from those on another one.

        Args:
            work: of the kernels.
            base_ms: their times on the base card.
            base, gpu: the cards.
            table: as which one they were measured.
        """
        if base.slug == gpu.slug:
            return base_ms
        if gpu.tensor_share < 1.0:
            # Its tensor cores do less than they could, so they reach more of their peak than a whole card's, which lacks power.
            whole_ms = CardRatios.times_ms(self, work, base_ms, base, gpu.with_tensor_peaks(1.0 / gpu.tensor_share), table)
            return np.maximum(whole_ms, 1e3 * by_tensor_cores(work, gpu) / (peaks_flop_s(work, gpu) * MOST_REACHED))
        base_s = base_ms * 1e-3
        here, there = (bounds_of(work, of, SHORTEST_US[table]) for of in (base, gpu))
        ratios = ratio_of_bounds(work, base_s, here, there, base, gpu)
        chosen = corrected(work)
        if chosen.any():
            features = features_of(work, base_s, here, there, base, gpu)[chosen]
            ratios[chosen] *= np.exp(self.booster.predict(xgboost.DMatrix(features)))
        return np.asarray(base_ms * ratios, dtype=float)


def corrected(work: Work) -> npt.NDArray[np.bool_]:
    """Which kernels the booster corrects."""
    return np.isin(work.kinds, [KINDS.index(kind) for kind in CORRECTED])
