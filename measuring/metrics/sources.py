"""Opens a source of metrics. Metrics show what else runs on the device; their names are DCGM's field names.

A source returns the mean of each field over a *metrics window* and the number of samples. `start` opens a window, `stop` closes
it; windows may overlap. measuring/metrics/fields.py lists fields, units and limits. Samples that measuring/metrics/soundness.py
rejects are errors and never become features. Sources (`SOURCES`): DCGM, NVML with and without performance counters, psutil, and
a file that is replayed; for predictions also a Prometheus (inference/live/prometheus_metrics.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from measuring.metrics.cpu import CpuSource
from measuring.metrics.dcgm import DcgmMissing, DcgmSource
from measuring.metrics.nvml import CountersMissing, NvmlSource
from measuring.metrics.replay import ReplaySource
from measuring.metrics.source import MetricSource
from utils.errors import UserError
from utils.fingerprint import resolve_device
from utils.logger import get_logger

SourceName = Literal["auto", "dcgm", "nvml-gpm", "nvml", "psutil", "replay"]
SOURCES: tuple[SourceName, ...] = get_args(SourceName)
log = get_logger("metrics")


def open_source(device: str = "auto", fields: Sequence[str] | None = None, source: SourceName = "auto", *,
                dcgm_address: str | None = None, replay: Path | None = None,
                replay_step_s: float | None = None) -> MetricSource:
    """Opens a source of metrics of this machine.

    Args:
        device: `auto`, `cuda` or `cpu`.
        fields: names of FIELDS; None: all that the source can read.
        source: which one. `auto` takes the best available one and logs the choice.
        dcgm_address: of a running nv-hostengine, HOST or HOST:PORT; None: DCGM runs in this process.
        replay: the file for source `replay`.
        replay_step_s: see `measuring.metrics.replay.ReplaySource`.

    Raises:
        UserError: the source is not available, it can't read a field (the message lists those it can), or there is no GPU.
    """
    if (source == "replay") != (replay is not None):
        raise UserError(f"source {source}" + (" needs a file to replay" if replay is None else f": it does not read {replay}; "
                                              "choose source replay for that"))
    if replay is not None:
        return ReplaySource(replay, fields, replay_step_s)
    if replay_step_s is not None:
        raise UserError(f"source {source}: there is no step of a replay without a file to replay")
    device = resolve_device(device)
    _check_suits(source, device, dcgm_address)
    if device == "cpu":
        opened: MetricSource = CpuSource(fields)
        why = "this is a CPU target"
    elif source == "auto":
        opened, why = _best_for_gpu(fields, dcgm_address)
    else:
        opened, why = _gpu_source(source, fields, dcgm_address), ""
    if source == "auto":
        log.info("metrics: from %s: %s", opened.name, why)
    log.debug("metrics: %s gives %s", opened.name, ", ".join(opened.fields))
    return opened


def _check_suits(source: SourceName, device: str, dcgm_address: str | None) -> None:
    """`UserError` where a source does not read `device`, or does not heed the address."""
    if dcgm_address is not None and (source not in ("auto", "dcgm") or device == "cpu"):
        raise UserError(f"source {source} on {device}: it does not ask the DCGM at {dcgm_address}; "
                        "that reads a GPU, for source dcgm or auto")
    if source not in ("auto", "psutil") and device == "cpu":
        raise UserError(f"source {source} reads a GPU, and the device here is the CPU; use psutil or auto")
    if source == "psutil" and device == "cuda":
        raise UserError(f"source psutil reads the CPU, and the device here is a GPU; use one of {', '.join(SOURCES[:4])}")


def _gpu_source(source: SourceName, fields: Sequence[str] | None, dcgm_address: str | None) -> MetricSource:
    if source == "dcgm":
        return DcgmSource(fields, dcgm_address)
    return NvmlSource(fields, counters=source == "nvml-gpm")


def _best_for_gpu(fields: Sequence[str] | None, dcgm_address: str | None) -> tuple[MetricSource, str]:
    """The best source and the reason: DCGM at a given address, else GPM (exact means), else DCGM, else plain NVML."""
    if dcgm_address is not None:
        return _gpu_source("dcgm", fields, dcgm_address), "its address is given"
    try:
        return _gpu_source("nvml-gpm", fields, None), "this GPU's counters give the exact mean of a window (GPM)"
    except CountersMissing:
        pass
    try:
        return _gpu_source("dcgm", fields, None), "this GPU has no GPM, and DCGM is here"
    except DcgmMissing as error:
        return _gpu_source("nvml", fields, None), f"this GPU has no GPM, and there is no DCGM ({error})"
