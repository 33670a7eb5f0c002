"""One line of the journal: a block of measurements between two runs of the canary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from records.labels import BELOW_BEST, DATASET_VERSION
from records.measurement import Measurement
from records.probe_reading import ProbeReading
from utils.frozen import Frozen


class Block(Frozen):
    """What the collector measures between two runs of the canary: one line of the journal, kept or lost as a whole.

    Attributes:
        level: share of the time that the stressor was asked to be busy, 0–1.
        background_name: what it was busy with, by its name in the dataset's header; "" on an idle device.
        key: the block's name within its level and background.
        background: mean of each metric over a window with the stressor alone, by DCGM field name.
        during: the same over a window around the block's own runs; empty if they were too short for a valid window.
        background_s, during_s: how long the two windows lasted, in seconds; 0 if there was none, or if it is not
            known.
        canary_before_ms, canary_after_ms: the canary's times around the block.
        canary_best_ms: its shortest time so far on this machine when idle; 0 under load, where it varies.
        attempts: how often the block was measured until it was steady, or attempts ran out.
        stress: what the stressor reports to have reached.
        probe: how long tiny work waited for other work just before the block's own runs; None if that was not read.
    """

    version: int = DATASET_VERSION
    level: float
    background_name: str = ""
    key: str
    background: dict[str, float]
    during: dict[str, float]
    background_s: float = 0.0
    during_s: float = 0.0
    canary_before_ms: float
    canary_after_ms: float
    canary_best_ms: float = 0.0
    attempts: int
    stress: dict[str, float] = {}
    probe: ProbeReading | None = None
    machine: str
    measurements: tuple[Measurement, ...]

    @property
    def load(self) -> tuple[float, str]:
        """What it was measured under: level and background."""
        return self.level, self.background_name

    @property
    def drift(self) -> float:
        """How unsteady the machine was, a ratio. It is the largest of three:

        the difference of the two canaries; how much slower than at its best the canary was, beyond BELOW_BEST; and the
        difference between the halves of a whole model's latencies (or host times), which are taken before and after its
        profile.
        """
        canaries = abs(self.canary_after_ms / self.canary_before_ms - 1.0) if self.canary_before_ms else 0.0
        slowest = max(self.canary_before_ms, self.canary_after_ms)
        excess = slowest / self.canary_best_ms - 1.0 - BELOW_BEST if self.canary_best_ms else 0.0
        return max([canaries, excess, *(halves_drift(m.samples_ms) for m in self.measurements
                                          if m.label == "latency" or (m.subject, m.label) == ("model", "host"))])


def halves_drift(samples: Sequence[float]) -> float:
    """The difference between the medians of the second and the first half of `samples`, as a ratio; 0 for fewer than four."""
    half = len(samples) // 2
    return abs(float(np.median(samples[half:]) / np.median(samples[:half])) - 1.0) if half >= 2 else 0.0
