"""What a table tells of the host's pace beside models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmark.records.labels import DISTURBANCE_ADMITTED, VARIANTS
from benchmark.records.reading import idle_rows

if TYPE_CHECKING:
    import pandas as pd

GOOD_PROBE = 0.25  # quantile of the readings of the probe that surely are of an undisturbed host: others only slow it down
HOST_IDLES = 0.7  # a model whose host needs less of its latency is held up by the GPU, however disturbed the host is
MODEL_TIMES = ("median_ms", "host_ms", "gpu_ms", *(f"{name}_ms" for name in VARIANTS))  # of a whole model, in its table


def is_undisturbed(latency_ms: float, host_ms: float, disturbance: float) -> bool:
    """Whether a latency tells of the model alone: the host was undisturbed (see quiet_host), or does not hold the GPU up.

    Args:
        latency_ms: the model's.
        host_ms: the host's time of a run; NaN where it is not known.
        disturbance: of the host meanwhile, a ratio; NaN where it was not watched.
    """
    return not disturbance > DISTURBANCE_ADMITTED or host_ms <= HOST_IDLES * latency_ms


def good_probe_us(table: pd.DataFrame) -> float:
    """What the probe of the host takes beside models of a table where other work surely does not slow it down, in
    microseconds: a low quantile of the readings; NaN where none was recorded."""
    return float(idle_rows(table).reindex(columns=["Probe_us"])["Probe_us"].quantile(GOOD_PROBE))


def usual_probe_us(table: pd.DataFrame) -> float:
    """What the probe usually takes while the host is undisturbed: the median of the readings that are not far above a good one;
    NaN where none was recorded."""
    readings = idle_rows(table).reindex(columns=["Probe_us"])["Probe_us"]
    return float(readings[readings <= good_probe_us(table) * (1 + DISTURBANCE_ADMITTED)].median())


def paced_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The idle rows of a model table, with column `median_ms` the latency, `host_ms`, `gpu_ms` and those of VARIANTS (ms, NaN
    where it does not tell); `pace`: how many times longer than usual the host took meanwhile (`usual_probe_us`), a ratio, 1
    where that was not recorded; and `undisturbed`: whether the latency tells of the model and not of its host.

    Where the probe was recorded, it says how disturbed the host was, since `Disturbance` is relative to what one worker read;
    elsewhere host times beside a disturbed host are left out.
    """
    idle = idle_rows(table)
    if "median_ms" not in idle.columns:
        idle = idle.assign(median_ms=idle["Latency_ms"])
    idle = idle.reindex(columns=["Model", "Machine", "Disturbance", "Probe_us", *MODEL_TIMES])
    pace, disturbance = idle["Probe_us"] / usual_probe_us(table), idle["Probe_us"] / good_probe_us(table) - 1.0
    idle = idle.assign(Disturbance=disturbance.fillna(idle["Disturbance"]), pace=pace.fillna(1.0))
    of_known_pace = pace.notna() | ~(idle["Disturbance"] > DISTURBANCE_ADMITTED)
    undisturbed = [is_undisturbed(*figures) for figures in idle[["median_ms", "host_ms", "Disturbance"]].to_numpy(dtype=float)]
    return idle.assign(undisturbed=np.array(undisturbed, dtype=bool), host_ms=idle["host_ms"].where(of_known_pace))


def idle_models(table: pd.DataFrame, with_disturbed: bool = False) -> pd.DataFrame:
    """What a model table tells of each model on an idle device, by name: medians over its sessions of the times and the pace
    of `paced_rows`; latencies that a disturbed host held up are left out unless `with_disturbed`."""
    rows = paced_rows(table)
    return (rows if with_disturbed else rows[rows["undisturbed"]]).groupby("Model", sort=True)[[*MODEL_TIMES, "pace"]].median()
