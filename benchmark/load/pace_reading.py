"""A machine's host pace as benchmark/host_pace.py measured it, and the names under which it is a metric.

History of the record's schema: version 1 called the device `execution_provider`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import AwareDatetime, Field, FiniteFloat

from utils import files
from utils.fingerprint import Machine, boot_id
from utils.frozen import Frozen

PACE_VERSION = 2
MEASURE = "python benchmark/host_pace.py"
PROBE, TAKEN = "hase_host_probe_seconds", "hase_host_probe_timestamp_seconds"
MEANINGS = {
    PROBE: "what dispatching a fixed graph to the device takes its host, the median over a while (s)",
    TAKEN: "time of that reading (s since 1970)",
}


class HostProbed(NamedTuple):
    """What the probe of the host took (µs), and when (seconds since 1970)."""

    probe_us: float
    taken_s: float


class MachinePace(Frozen):
    """How fast a machine's host dispatched when it was measured.

    Attributes:
        probe_us: what the probe of the host (quiet_host) took, the median of its readings.
        spread: of the readings, their interquartile range over the median, a ratio.
        readings: how many there were.
        taken: when.
        boot_id: of the run of the operating system then.
        device: what the probe ran on: `cuda`, or `cpu` in tests.
        machine: the very machine.
    """

    version: int = PACE_VERSION
    probe_us: FiniteFloat = Field(gt=0)
    spread: FiniteFloat = Field(ge=0)
    readings: int = Field(gt=0)
    taken: AwareDatetime
    boot_id: str
    device: str
    machine: Machine

    @property
    def age_s(self) -> float:
        """Seconds since it was measured; negative where the clock was set back."""
        return (datetime.now(UTC) - self.taken).total_seconds()

    @property
    def of_this_boot(self) -> bool:
        """Whether this machine has not been started anew since."""
        return self.boot_id == boot_id()


def read_pace(path: Path) -> MachinePace:
    """The record in `path`; `UserError` where it is missing, damaged or of another version."""
    return files.read_record(path, MachinePace, PACE_VERSION, f"{MEASURE} --out {path}")
