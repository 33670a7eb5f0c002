"""Which kernels to measure on a card, so that most is learned of the others in a short time."""

from __future__ import annotations

import numpy as np

from hase.learned.data_sheet.adjusted import NEARBY, NOISE, OF_CARD, likeness, process_features, scale_of
from hase.learned.data_sheet.work import Floats, Work
from hase.records.gpu_catalogue import Gpu

# How near kernels have to be to tell of each other, in standard deviations of their features. Shorter than what the process
# begins with: with 1, thirty chosen kernels of an H100 leave an error of 6.5 % of the others, with 3 one of 7.0 %, and thirty
# that are drawn at random 7.1 %.
LENGTH = 1.0


def most_useful(work: Work, base_ms: Floats, wanted: Work, wanted_ms: Floats, base: Gpu, count: int) -> list[int]:
    """The kernels to measure, the most useful one first: each lowers most what is uncertain of those that are wanted.

    Args:
        work, base_ms: of the kernels to choose from, and their times on the base card.
        wanted, wanted_ms: of the kernels that shall be predicted well, each as often as it counts.
        base: the base card.
        count: how many to choose.

    Returns:
        Places among the kernels to choose from.
    """
    candidates, others = process_features(work, base_ms, base, base), process_features(wanted, wanted_ms, base, base)
    means, spreads = scale_of(others)
    candidates, others = (candidates - means) / spreads, (others - means) / spreads
    with_wanted, among = (OF_CARD + NEARBY * likeness(candidates, other, LENGTH) for other in (others, candidates))
    left = np.ones(len(candidates), dtype=bool)
    chosen: list[int] = []
    for _ in range(min(count, len(candidates))):
        gains = (with_wanted**2).sum(axis=1) / (np.diag(among) + NOISE)
        place = int(np.argmax(np.where(left, gains, -1.0)))
        left[place] = False
        chosen.append(place)
        share = among[:, place] / (among[place, place] + NOISE)
        with_wanted -= np.outer(share, with_wanted[place])
        among -= np.outer(share, among[place])
    return chosen
