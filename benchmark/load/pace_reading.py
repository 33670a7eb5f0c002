"""The record of a machine's host pace, which benchmark/host_pace.py measures, and the names of its metrics.
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
    PROBE: "time that the host takes to dispatch a fixed graph to the device, median over a while (s)",
    TAKEN: "time of that measurement (s since 1970)",
}


class HostProbed(NamedTuple):
    """The time of the host probe (µs), and when it was measured (seconds since 1970)."""

    probe_us: float
    taken_s: float


class MachinePace(Frozen):
    """How fast a machine's host dispatched when it was measured.

    Attributes:
        probe_us: median time of the host probe (quiet_host).
        spread: interquartile range of its times over their median, a ratio.
        readings: number of its times.
        taken: when it was measured.
        boot_id: identifies the run of the operating system.
        device: on which the probe ran: `cuda`, or `cpu` in tests.
        machine: on which it ran.
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
        """Seconds since it was measured; negative if the clock was set back."""
        return (datetime.now(UTC) - self.taken).total_seconds()

    @property
    def of_this_boot(self) -> bool:
        """Whether this machine has not been restarted since."""
        return self.boot_id == boot_id()


def read_pace(path: Path) -> MachinePace:
    """The record in `path`; `UserError` if it is missing, damaged or of another version."""
    return files.read_record(path, MachinePace, PACE_VERSION, f"{MEASURE} --out {path}")
