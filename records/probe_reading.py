"""A reading of the sharing probe (benchmark/sharing_probe.py), and its summary for metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import FiniteFloat, model_validator

from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.fingerprint import SharingMode

if TYPE_CHECKING:
    import numpy.typing as npt

READING_VERSION = 2
TINY_ALONE_MS = 0.1  # an idle device, even one slower than an H200, runs the tiny piece within this time
WAITED = 1.2  # a run waited if it took more than this times its time on an idle device, …
WAITED_MS = 0.1  # … and this much longer. The shortest wait on an H200, with bursts of 0.1 ms, is 0.35 ms
ALWAYS = 0.95  # share of time: work that is busy for longer counts as never pausing
QUANTILES = 21  # of latencies in a summary, and of learned waits


class ProbedRuns(Frozen):
    """Back-to-back runs of one piece of work: the start of each since the measurement began, and its latency."""

    starts_ms: tuple[float, ...]
    latencies_ms: tuple[float, ...]

    @model_validator(mode="after")
    def _as_many(self) -> ProbedRuns:
        if not 0 < len(self.starts_ms) == len(self.latencies_ms):
            raise ValueError(f"{len(self.starts_ms)} starts and {len(self.latencies_ms)} latencies: one each a run, one run "
                             "at least")
        return self


class ProbeReading(Frozen):
    """The raw times of one measurement with the probe."""

    version: int = READING_VERSION
    machine_uuid: str
    device: str
    sharing: SharingMode | None  # how processes share the GPU; None on a CPU
    started: str  # UTC, ISO 8601
    seconds: float  # requested length; LEAST_RUNS may take longer
    tiny: ProbedRuns  # runs of one elementwise node
    long: ProbedRuns  # runs of a chain of matrix products

    @property
    def waited(self) -> dict[str, float]:
        """By piece of work, the share of its run time in runs that waited.

        Runs are compared with the shortest one. If even the tiny piece was never as fast as on an idle device, the other
        processes left no gap, and all runs waited. The long piece's share is a lower bound: if gaps are too short for it, its
        shortest run waited as well.
        """
        left_gaps = min(self.tiny.latencies_ms) <= TINY_ALONE_MS
        return {piece: _share_over(runs.latencies_ms, waiting_from_ms(min(runs.latencies_ms))) if left_gaps else 1.0
                for piece, runs in (("tiny", self.tiny), ("long", self.long))}


class ProbeSummary(Frozen):
    """The summary of a measurement's long piece of work."""

    sharing: SharingMode | None  # how processes share the GPU; None on a CPU
    latencies_ms: tuple[FiniteFloat, ...]  # QUANTILES of all runs, evenly spaced from the shortest to the longest
    waited_ms: tuple[FiniteFloat, ...]  # QUANTILES of the runs that are known to have waited; empty if none did
    # busy_ms, quiet_ms: mean lengths of `phases_ms`
    busy_ms: FiniteFloat
    quiet_ms: FiniteFloat

    @model_validator(mode="after")
    def _fits_together(self) -> ProbeSummary:
        if len(self.latencies_ms) != QUANTILES or len(self.waited_ms) not in (0, QUANTILES):
            raise ValueError(f"{len(self.latencies_ms)} and {len(self.waited_ms)} quantiles: {QUANTILES} are expected")
        if any(list(times) != sorted(times) for times in (self.latencies_ms, self.waited_ms)) or self.latencies_ms[0] <= 0.0:
            raise ValueError("quantiles of latencies must be positive and ascend")
        if min(self.busy_ms, self.quiet_ms) < 0.0 or self.busy_ms + self.quiet_ms <= 0.0:
            raise ValueError("phases can't be negative, nor both without length")
        if bool(self.busy_ms) != bool(self.waited_ms):
            raise ValueError("runs wait in busy phases, and only there")
        return self


def summarise_probe(reading: ProbeReading) -> ProbeSummary:
    """The summary of a measurement.

    A run counts as waiting if it is longer than the runs that certainly did not wait, which are about as short as the shortest
    one. (Compared with only the shortest one, twice as many measurements of an idle H200 would have waiting runs.) Whether all
    runs waited follows only from their time on an idle device (`hase.learned.sharing.co_runner_summarised`).
    """
    latencies = np.array(reading.long.latencies_ms)
    undisturbed = latencies[latencies <= waiting_from_ms(latencies.min())]
    waited = latencies > waiting_from_ms(float(np.median(undisturbed)))
    busy_ms, quiet_ms = phases_ms(reading.long.starts_ms, latencies, waited)
    probabilities = np.linspace(0.0, 1.0, QUANTILES)
    return ProbeSummary(
        sharing=reading.sharing, latencies_ms=tuple(np.quantile(latencies, probabilities).tolist()),
        waited_ms=tuple(np.quantile(latencies[waited], probabilities).tolist()) if waited.any() else (), busy_ms=busy_ms,
        quiet_ms=quiet_ms)


def phases_ms(starts_ms: npt.ArrayLike, latencies_ms: npt.ArrayLike, waited: npt.ArrayLike) -> tuple[float, float]:
    """The mean lengths (ms) of phases in which other work kept the device busy, and in which it left it idle.

    Consecutive runs that waited are a busy phase; the runs between them are a quiet phase. Phases cut by the start or end of
    the measurement are omitted if there are complete ones. The first length is 0 if no run waited, the second if the other work
    never paused.
    """
    starts, latencies, busy = np.asarray(starts_ms, dtype=float), np.asarray(latencies_ms, dtype=float), np.asarray(waited)
    edges = np.flatnonzero(np.diff(busy.astype(int))) + 1
    begins, ends = np.concatenate([[0], edges]), np.concatenate([edges, [len(busy)]]) - 1
    lengths = starts[ends] + latencies[ends] - starts[begins]
    inner = slice(1, -1) if len(begins) > 3 else slice(None)
    kinds, lengths = busy[begins][inner], lengths[inner]
    if not kinds.any():
        return 0.0, float(lengths.sum())
    if lengths[kinds].sum() > ALWAYS * lengths.sum():
        return float(lengths.sum()), 0.0
    return float(lengths[kinds].mean()), float(lengths[~kinds].mean())


def waiting_from_ms(alone_ms: float) -> float:
    """The latency (ms) above which a run waited, for work that takes `alone_ms` on an idle device."""
    return WAITED * alone_ms + WAITED_MS


def _share_over(latencies_ms: Sequence[float], limit_ms: float) -> float:
    return sum(latency for latency in latencies_ms if latency > limit_ms) / sum(latencies_ms)


def read_reading(path: Path) -> ProbeReading:
    """Reads a reading that benchmark/sharing_probe.py --out wrote."""
    return files.read_record(path, ProbeReading, READING_VERSION, f"python benchmark/sharing_probe.py --out {path}")
