"""What the sharing probe read (benchmark/sharing_probe.py), raw. History of the schema: version 1 is the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import model_validator

from ort_analysis.records import Frozen
from utils import files
from utils.sharing_mode import SharingMode

READING_VERSION = 1
TINY_ALONE_MS = 0.1  # within which a free device runs the tiny piece, a slower one than an H200 too
WAITED = 1.2  # a run waited that took longer than this many times what it takes alone …
WAITED_MS = 0.1  # … and this: the shortest wait seen on an H200, beside bursts of 0.1 ms, is 0.35 ms


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
    """What one reading of the probe saw, raw. Version 1 is the first.

    Attributes:
        machine_uuid: of the device.
        execution_provider: `cpu` or `cuda`.
        sharing: how processes share the GPU; None on a CPU.
        started: UTC, ISO 8601.
        seconds: asked for; a reading lasts longer where LEAST_RUNS of a piece do.
        tiny: one elementwise node.
        long: a chain of matrix products.
    """

    version: int = READING_VERSION
    machine_uuid: str
    execution_provider: str
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


def waiting_from_ms(alone_ms: float) -> float:
    """What a run takes at least (ms) that waited, of a piece of work that takes `alone_ms` on a free device."""
    return WAITED * alone_ms + WAITED_MS


def _share_over(latencies_ms: Sequence[float], limit_ms: float) -> float:
    return sum(latency for latency in latencies_ms if latency > limit_ms) / sum(latencies_ms)


def read_reading(path: Path) -> ProbeReading:
    """The reading in `path`; `UserError` where it is missing, damaged or of another version."""
    return files.read_record(path, ProbeReading, READING_VERSION, f"python benchmark/sharing_probe.py --out {path}")
