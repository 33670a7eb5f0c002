"""One line of the journal: a block of measurements between two canaries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmark.load.probe_reading import ProbeReading
from benchmark.records.labels import BELOW_BEST, DATASET_VERSION
from benchmark.records.measurement import Measurement
from utils.frozen import Frozen


class Block(Frozen):
    """What the collector measures between two canaries; one line of the journal, kept or lost as a whole.

    Attributes:
        level: share of time that the stressor was asked to be busy, 0–1.
        background_name: what it was busy with, by its name in the dataset's header; "" where it was idle, and in a journal from
            before backgrounds had names.
        key: names the block's work within its level and background, for resuming.
        background: metric means over a window with the stressor alone, by DCGM field name.
        during: the same over a window of the block's own runs; empty where they were over too soon to tell.
        background_s, during_s: how long the two windows lasted, in seconds; 0 where there was none, or where an older journal
            does not say.
        canary_before_ms, canary_after_ms: the canary's times around the block.
        canary_best_ms: the shortest it took on this machine at this level so far; 0 under load, where it varies.
        attempts: how often the block was measured until canaries agreed (or attempts ran out).
        stress: what the stressor reported to have reached.
        probe: how long tiny work waited for what else ran, just before the block's own runs; None where that was not read.
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
        """How unsteady the machine was, as a ratio, the largest of: how far the canaries part; how far they are from the
        best, less what is admitted; how far the halves of a whole model's latencies part (or of its host times), which are
        taken before and after its profile."""
        canaries = abs(self.canary_after_ms / self.canary_before_ms - 1.0) if self.canary_before_ms else 0.0
        slowest = max(self.canary_before_ms, self.canary_after_ms)
        excess = slowest / self.canary_best_ms - 1.0 - BELOW_BEST if self.canary_best_ms else 0.0
        return max([canaries, excess, *(halves_drift(m.samples_ms) for m in self.measurements
                                          if m.label == "latency" or (m.subject, m.label) == ("model", "host"))])


def halves_drift(samples: Sequence[float]) -> float:
    """How far the median of the second half of `samples` is from the first's, as a ratio; 0 for fewer than four."""
    half = len(samples) // 2
    return abs(float(np.median(samples[half:]) / np.median(samples[:half])) - 1.0) if half >= 2 else 0.0
