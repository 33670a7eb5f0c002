"""What the sharing probe read (benchmark/sharing_probe.py): raw, and in the few numbers that metrics can carry.

History of the reading's schema: version 1 called the device `execution_provider`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import FiniteFloat, model_validator

from utils import files
from utils.fingerprint import SharingMode
from utils.frozen import Frozen

if TYPE_CHECKING:
    import numpy.typing as npt

READING_VERSION = 2
TINY_ALONE_MS = 0.1  # within which a free device runs the tiny piece, a slower one than an H200 too
WAITED = 1.2  # a run waited that took longer than this many times what it takes alone …
WAITED_MS = 0.1  # … and this: the shortest wait seen on an H200, beside bursts of 0.1 ms, is 0.35 ms
ALWAYS = 0.95  # of the time: what is busy for more of it is taken to never pause
QUANTILES = 21  # of latencies that a summary keeps, and of waits that are learned


class ProbedRuns(Frozen):
    """Runs of one piece of work, back to back.

    Attributes:
        starts_ms: when each began, since the reading began; ascending.
        latencies_ms: what each took until its result was there, in the same order.
    """

    starts_ms: tuple[float, ...]
    latencies_ms: tuple[float, ...]

    @model_validator(mode="after")
    def _as_many(self) -> ProbedRuns:
        if not 0 < len(self.starts_ms) == len(self.latencies_ms):
            raise ValueError(f"{len(self.starts_ms)} starts and {len(self.latencies_ms)} latencies: one each a run, one run "
                             "at least")
        return self


class ProbeReading(Frozen):
    """What one reading of the probe saw, raw.

    Attributes:
        machine_uuid: of the device.
        device: `cpu` or `cuda`.
        sharing: how processes share the GPU; None on a CPU.
        started: UTC, ISO 8601.
        seconds: asked for; a reading lasts longer where LEAST_RUNS of a piece do.
        tiny: one elementwise node.
        long: a chain of matrix products.
    """

    version: int = READING_VERSION
    machine_uuid: str
    device: str
    sharing: SharingMode | None
    started: str
    seconds: float
    tiny: ProbedRuns
    long: ProbedRuns

    @property
    def waited(self) -> dict[str, float]:
        """By piece of work, the share of the time spent in its runs that went into those that waited.

        A run is compared with the shortest one. Where even the tiny piece was never as fast as on a free device, the other
        processes left no gap, and all runs waited. The long piece's share is a lower bound: gaps too short for it hide that
        its shortest run waited as well.
        """
        left_gaps = min(self.tiny.latencies_ms) <= TINY_ALONE_MS
        return {piece: _share_over(runs.latencies_ms, waiting_from_ms(min(runs.latencies_ms))) if left_gaps else 1.0
                for piece, runs in (("tiny", self.tiny), ("long", self.long))}


class ProbeSummary(Frozen):
    """What a reading tells in few numbers; they are of its long piece of work.

    Attributes:
        sharing: how processes share the GPU; None on a CPU.
        latencies_ms: QUANTILES of all runs, evenly spaced from the shortest to the longest.
        waited_ms: the same of those that waited, as far as the reading itself tells; empty where none did.
        busy_ms, quiet_ms: mean lengths of `phases_ms`.
    """

    sharing: SharingMode | None
    latencies_ms: tuple[FiniteFloat, ...]
    waited_ms: tuple[FiniteFloat, ...]
    busy_ms: FiniteFloat
    quiet_ms: FiniteFloat

    @model_validator(mode="after")
    def _fits_together(self) -> ProbeSummary:
        if len(self.latencies_ms) != QUANTILES or len(self.waited_ms) not in (0, QUANTILES):
            raise ValueError(f"{len(self.latencies_ms)} and {len(self.waited_ms)} quantiles: {QUANTILES} are expected")
        if any(list(kept) != sorted(kept) for kept in (self.latencies_ms, self.waited_ms)) or self.latencies_ms[0] <= 0.0:
            raise ValueError("quantiles of latencies must be positive and ascend")
        if min(self.busy_ms, self.quiet_ms) < 0.0 or self.busy_ms + self.quiet_ms <= 0.0:
            raise ValueError("phases can't be negative, nor both without length")
        if bool(self.busy_ms) != bool(self.waited_ms):
            raise ValueError("runs wait in busy phases, and only there")
        return self


def summarised(reading: ProbeReading) -> ProbeSummary:
    """A reading in few numbers.

    A run waited that is longer than those that surely did not, which are about as short as the shortest: compared with the
    shortest itself, twice as many readings of an idle H200 have runs that waited. That all runs waited can tell only who knows
    what they take on an idle device (`training.sharing.learned.co_runner_summarised`).
    """
    latencies = np.array(reading.long.latencies_ms)
    undisturbed = latencies[latencies <= waiting_from_ms(latencies.min())]
    waited = latencies > waiting_from_ms(float(np.median(undisturbed)))
    busy_ms, quiet_ms = phases_ms(reading.long.starts_ms, latencies, waited)
    at = np.linspace(0.0, 1.0, QUANTILES)
    return ProbeSummary(
        sharing=reading.sharing, latencies_ms=tuple(np.quantile(latencies, at).tolist()),
        waited_ms=tuple(np.quantile(latencies[waited], at).tolist()) if waited.any() else (), busy_ms=busy_ms,
        quiet_ms=quiet_ms)


def phases_ms(starts_ms: npt.ArrayLike, latencies_ms: npt.ArrayLike, waited: npt.ArrayLike) -> tuple[float, float]:
    """How long other work kept the device busy and how long it left it alone, in turn: mean lengths (ms). The first is 0 where
    no run waited, and the second where it never paused.

    Runs that waited one after another are a busy phase, the others between them a quiet one. Phases that the probe's beginning
    or end cut are left out where whole ones are there.
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
    """What a run takes at least (ms) that waited, of a piece of work that takes `alone_ms` on a free device."""
    return WAITED * alone_ms + WAITED_MS


def _share_over(latencies_ms: Sequence[float], limit_ms: float) -> float:
    return sum(latency for latency in latencies_ms if latency > limit_ms) / sum(latencies_ms)


def read_reading(path: Path) -> ProbeReading:
    """The reading in `path`; `UserError` where it is missing, damaged or of another version."""
    return files.read_record(path, ProbeReading, READING_VERSION, f"python benchmark/sharing_probe.py --out {path}")
