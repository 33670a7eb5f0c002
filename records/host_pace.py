"""Host pace (how fast a machine's host dispatches work): its record and metrics, and its use with model tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pydantic import AwareDatetime, Field, FiniteFloat

from hase.records.dataset_files import idle_rows
from hase.records.measurement import DISTURBANCE_ADMITTED, DRIFT_ADMITTED, VARIANTS
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.fingerprint import Machine, boot_id

if TYPE_CHECKING:
    import pandas as pd

PACE_VERSION = 2
STALL_S = 0.003  # a dispatch that takes this much longer than usual has stalled
GOOD_PROBE = 0.25  # quantile of the probe's readings that is certainly without other work, which only slows the host down
HOST_IDLES = 0.7  # share of a latency: if the host needs less, the GPU is the bottleneck, even with a disturbed host
MODEL_TIMES = ("median_ms", "host_ms", "gpu_ms", *(f"{name}_ms" for name in VARIANTS))  # of a whole model, in its table
MEASURE = "python benchmark/host_pace.py"
PROBE, TAKEN = "hase_host_probe_seconds", "hase_host_probe_timestamp_seconds"
PACE_MEANINGS = {
    PROBE: "time that the host takes to dispatch a fixed graph to the device, median over a while (s)",
    TAKEN: "time of that measurement (s since 1970)",
}


class HostProbeReading(NamedTuple):
    """One reading of the host probe: its time (µs), and when it was taken (seconds since 1970)."""

    probe_us: float
    taken_s: float


class Stalls(NamedTuple):
    """Stalls of a dispatching host, of at least STALL_S: number per second, and lengths (ms)."""

    per_s: float
    lengths_ms: Sequence[float]


class MachinePace(Frozen):
    """How fast a machine's host dispatched when it was measured."""

    version: int = PACE_VERSION
    probe_us: FiniteFloat = Field(gt=0)  # median time of the host probe (quiet_host)
    spread: FiniteFloat = Field(ge=0)  # interquartile range of its times over their median, a ratio
    readings: int = Field(gt=0)
    # stalls of at least STALL_S while dispatching, as on virtual machines that wait for cores; None if not watched
    stalls_per_s: FiniteFloat | None = Field(None, ge=0)
    stalls_ms: tuple[FiniteFloat, ...] = ()
    taken: AwareDatetime
    boot_id: str
    device: str  # of the probe: `cuda`, or `cpu` in tests
    machine: Machine

    @property
    def stalls(self) -> Stalls | None:
        """Its stalls; None if not watched."""
        return None if self.stalls_per_s is None else Stalls(self.stalls_per_s, self.stalls_ms)

    @property
    def age_s(self) -> float:
        """Seconds since it was measured; negative if the clock was set back."""
        return (datetime.now(UTC) - self.taken).total_seconds()

    @property
    def of_this_boot(self) -> bool:
        """Whether this machine has not been restarted since then."""
        return self.boot_id == boot_id()


def read_pace(path: Path) -> MachinePace:
    """The record in `path`."""
    return files.read_record(path, MachinePace, PACE_VERSION, f"{MEASURE} --out {path}")


def is_undisturbed(latency_ms: float, host_ms: float, disturbance: float) -> bool:
    """Whether other work on the host did not affect a latency: the host was undisturbed, or is not the bottleneck. `host_ms`
    and `disturbance` (a ratio, see quiet_host) are NaN if unknown."""
    return not disturbance > DISTURBANCE_ADMITTED or host_ms <= HOST_IDLES * latency_ms


def good_probe_us(table: pd.DataFrame) -> float:
    """The host probe's time (µs) without other work: a low quantile of the readings in a table; NaN without readings."""
    return float(idle_rows(table).reindex(columns=["Probe_us"])["Probe_us"].quantile(GOOD_PROBE))


def usual_probe_us(table: pd.DataFrame) -> float:
    """The host probe's usual time on an undisturbed host: the median of readings near a good one; NaN without readings."""
    readings = idle_rows(table).reindex(columns=["Probe_us"])["Probe_us"]
    return float(readings[readings <= good_probe_us(table) * (1 + DISTURBANCE_ADMITTED)].median())


def paced_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The idle rows of a model table, with the host's pace.

    A recorded probe says how disturbed the host was, because `Disturbance` is relative to the readings of one worker. Without
    it, host times of a disturbed host are omitted, and so are sessions of an unsteady machine if the model has a steady one.

    Returns:
        Rows with `median_ms` (latency), `host_ms`, `gpu_ms` and VARIANTS (ms, NaN if unknown); `pace`: the host's time relative
            to the usual one (`usual_probe_us`), 1 if not recorded; and `undisturbed` (`is_undisturbed`).
    """
    idle = idle_rows(table)
    idle = idle[~_superseded(idle)]
    if "median_ms" not in idle.columns:
        idle = idle.assign(median_ms=idle["Latency_ms"])
    idle = idle.reindex(columns=["Model", "Machine", "Disturbance", "Probe_us", *MODEL_TIMES])
    pace, disturbance = idle["Probe_us"] / usual_probe_us(table), idle["Probe_us"] / good_probe_us(table) - 1.0
    idle = idle.assign(Disturbance=disturbance.fillna(idle["Disturbance"]), pace=pace.fillna(1.0))
    pace_known = pace.notna() | ~(idle["Disturbance"] > DISTURBANCE_ADMITTED)
    undisturbed = [is_undisturbed(*figures) for figures in idle[["median_ms", "host_ms", "Disturbance"]].to_numpy(dtype=float)]
    return idle.assign(undisturbed=np.array(undisturbed, dtype=bool), host_ms=idle["host_ms"].where(pace_known))


def _superseded(idle: pd.DataFrame) -> pd.Series:
    """Which sessions of an unsteady machine are superseded by a steady session of the model. Sessions with a host probe reading
    stay, since it is more reliable."""
    if "Unsteady" in idle.columns:
        unsteady = idle["Unsteady"].notna() & (idle["Unsteady"] != "")
    else:  # an older table
        unsteady = idle.reindex(columns=["Drift"])["Drift"] > DRIFT_ADMITTED
    unsteady &= idle.reindex(columns=["Probe_us"])["Probe_us"].isna()
    return unsteady & idle["Model"].isin(idle["Model"][~unsteady])


def idle_models(table: pd.DataFrame, with_disturbed: bool = False) -> pd.DataFrame:
    """Each model on an idle device, by name: medians of the times and the pace of `paced_rows` over its sessions. Disturbed
    latencies count only `with_disturbed`."""
    rows = paced_rows(table)
    return (rows if with_disturbed else rows[rows["undisturbed"]]).groupby("Model", sort=True)[[*MODEL_TIMES, "pace"]].median()
