"""A machine's host pace: the record that benchmark/host_pace.py writes, the names of its metrics, and the host's pace in a
table of models."""

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
from hase.utils.fingerprint import Machine, boot_id
from hase.utils.frozen import Frozen

if TYPE_CHECKING:
    import pandas as pd

PACE_VERSION = 2
STALL_S = 0.003  # a dispatch that takes so much longer than usual has stalled
GOOD_PROBE = 0.25  # quantile of the probe's readings that is surely of an undisturbed host: other work only slows it down
HOST_IDLES = 0.7  # share of a latency: if the host needs less, the GPU decides the latency, however disturbed the host
MODEL_TIMES = ("median_ms", "host_ms", "gpu_ms", *(f"{name}_ms" for name in VARIANTS))  # of a whole model, in its table
MEASURE = "python benchmark/host_pace.py"
PROBE, TAKEN = "hase_host_probe_seconds", "hase_host_probe_timestamp_seconds"
PACE_MEANINGS = {
    PROBE: "time that the host takes to dispatch a fixed graph to the device, median over a while (s)",
    TAKEN: "time of that measurement (s since 1970)",
}


class HostProbed(NamedTuple):
    """The time of the host probe (µs), and when it was measured (seconds since 1970)."""

    probe_us: float
    taken_s: float


class Stalls(NamedTuple):
    """When a host did nothing for STALL_S or longer while it dispatched: how often in a second of that, and how long (ms)."""

    per_s: float
    lengths_ms: Sequence[float]


class MachinePace(Frozen):
    """How fast a machine's host dispatched when it was measured.

    Attributes:
        probe_us: median time of the host probe (quiet_host).
        spread: interquartile range of its times over their median, a ratio.
        readings: number of its times.
        stalls_per_s: how often the host did nothing for STALL_S or longer while it dispatched, as virtual machines do that wait
            for their cores; None where that was not watched.
        stalls_ms: for how long, each time.
        taken: when it was measured.
        boot_id: identifies the run of the operating system.
        device: on which the probe ran: `cuda`, or `cpu` in tests.
        machine: on which it ran.
    """

    version: int = PACE_VERSION
    probe_us: FiniteFloat = Field(gt=0)
    spread: FiniteFloat = Field(ge=0)
    readings: int = Field(gt=0)
    stalls_per_s: FiniteFloat | None = Field(None, ge=0)
    stalls_ms: tuple[FiniteFloat, ...] = ()
    taken: AwareDatetime
    boot_id: str
    device: str
    machine: Machine

    @property
    def stalls(self) -> Stalls | None:
        """Its stalls; None where they were not watched."""
        return None if self.stalls_per_s is None else Stalls(self.stalls_per_s, self.stalls_ms)

    @property
    def age_s(self) -> float:
        """Seconds since it was measured; negative if the clock was set back."""
        return (datetime.now(UTC) - self.taken).total_seconds()

    @property
    def of_this_boot(self) -> bool:
        """Whether this machine has not been restarted since."""
        return self.boot_id == boot_id()


def read_pace(path: Path) -> MachinePace:
    """The record in `path`.

    Raises:
        UserError: it is missing, damaged or of another version.
    """
    return files.read_record(path, MachinePace, PACE_VERSION, f"{MEASURE} --out {path}")


def is_undisturbed(latency_ms: float, host_ms: float, disturbance: float) -> bool:
    """Whether a latency is undisturbed by other work on the host: the host was undisturbed (see quiet_host), or it does not
    hold the GPU up.

    Args:
        latency_ms: the model's.
        host_ms: the host's time of a run; NaN if it is not known.
        disturbance: of the host meanwhile, a ratio; NaN if it was not watched.
    """
    return not disturbance > DISTURBANCE_ADMITTED or host_ms <= HOST_IDLES * latency_ms


def good_probe_us(table: pd.DataFrame) -> float:
    """The host probe's time at moments in which other work surely did not slow it down, in microseconds: a low quantile of the
    readings in a table; NaN if none was recorded."""
    return float(idle_rows(table).reindex(columns=["Probe_us"])["Probe_us"].quantile(GOOD_PROBE))


def usual_probe_us(table: pd.DataFrame) -> float:
    """The host probe's usual time on an undisturbed host: the median of the readings that are not far above a good one; NaN if
    none was recorded."""
    readings = idle_rows(table).reindex(columns=["Probe_us"])["Probe_us"]
    return float(readings[readings <= good_probe_us(table) * (1 + DISTURBANCE_ADMITTED)].median())


def paced_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The idle rows of a model table, with the host's pace.

    If the probe was recorded, it says how disturbed the host was, because `Disturbance` is relative to the readings of one
    worker. Otherwise the host times of a disturbed host are omitted. A session that was measured while the machine was unsteady
    is omitted if the model has a steady one.

    Returns:
        The rows with columns `median_ms` (the latency), `host_ms`, `gpu_ms` and those of VARIANTS (ms, NaN if unknown);
            `pace`: how
        many times longer than usual the host took meanwhile (`usual_probe_us`), a ratio, 1 if that was not recorded; and
        `undisturbed`: whether the latency is undisturbed (`is_undisturbed`).
    """
    idle = idle_rows(table)
    idle = idle[~_superseded(idle)]
    if "median_ms" not in idle.columns:
        idle = idle.assign(median_ms=idle["Latency_ms"])
    idle = idle.reindex(columns=["Model", "Machine", "Disturbance", "Probe_us", *MODEL_TIMES])
    pace, disturbance = idle["Probe_us"] / usual_probe_us(table), idle["Probe_us"] / good_probe_us(table) - 1.0
    idle = idle.assign(Disturbance=disturbance.fillna(idle["Disturbance"]), pace=pace.fillna(1.0))
    of_known_pace = pace.notna() | ~(idle["Disturbance"] > DISTURBANCE_ADMITTED)
    undisturbed = [is_undisturbed(*figures) for figures in idle[["median_ms", "host_ms", "Disturbance"]].to_numpy(dtype=float)]
    return idle.assign(undisturbed=np.array(undisturbed, dtype=bool), host_ms=idle["host_ms"].where(of_known_pace))


def _superseded(idle: pd.DataFrame) -> pd.Series:
    """Which sessions of models were measured while the machine was unsteady, and again while it was steady. Sessions with a
    reading of the host probe stay: the probe says more of them."""
    if "Unsteady" in idle.columns:
        unsteady = idle["Unsteady"].notna() & (idle["Unsteady"] != "")
    else:  # an older table
        unsteady = idle.reindex(columns=["Drift"])["Drift"] > DRIFT_ADMITTED
    unsteady &= idle.reindex(columns=["Probe_us"])["Probe_us"].isna()
    return unsteady & idle["Model"].isin(idle["Model"][~unsteady])


def idle_models(table: pd.DataFrame, with_disturbed: bool = False) -> pd.DataFrame:
    """Each model on an idle device, by name: medians over its sessions of the times and the pace of `paced_rows`. Disturbed
    latencies count only `with_disturbed`."""
    rows = paced_rows(table)
    return (rows if with_disturbed else rows[rows["undisturbed"]]).groupby("Model", sort=True)[[*MODEL_TIMES, "pace"]].median()
