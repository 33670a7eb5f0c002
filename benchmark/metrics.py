"""What else runs on the device: one interface to its metrics, whoever reads them, by DCGM field name.

A source gives, of each field, the *mean over a window* and how many readings that rests on. `start` opens a window, `stop`
closes it; windows may overlap. Fields, units and limits stand in one table, benchmark/metric_fields.py. What
benchmark/soundness.py doubts is an error and never becomes a feature. Sources (`SOURCES`): DCGM, NVML with and without its
performance counters, psutil, and a file that is played again; and, for predictions, a Prometheus
(inference/prometheus_metrics.py).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from benchmark.soundness import History, Unsound, check_together, checked
from utils.errors import UserError
from utils.fingerprint import resolve_provider
from utils.logger import get_logger

SourceName = Literal["auto", "dcgm", "nvml-gpm", "nvml", "psutil", "replay"]
SOURCES: tuple[SourceName, ...] = get_args(SourceName)
log = get_logger("metrics")


@dataclass(frozen=True)
class Window:
    """An open window: when it began (seconds, monotonic) and what the source read then."""

    began_s: float
    reading: Any


class Mean(NamedTuple):
    """A field's mean over a window in the unit of FIELDS, and of how many readings; a counter's difference is one."""

    value: float
    readings: int


class MetricSource(ABC):
    """Means of metrics over windows. A new source says what it can read (`available`), what it notes when a window opens and
    when it closes (`_read`), and which readings lie between the two (`_readings`).

    Attributes:
        name: for messages.
        minimum_window_s: a shorter window is not valid.
        fields: what it reads, names of FIELDS.
    """

    name: str
    minimum_window_s: float

    def __init__(self, available: Sequence[str], fields: Sequence[str] | None) -> None:
        """Reads `fields`, or all that are `available` where none is named; `UserError` for one that is not."""
        unknown = [field for field in fields or () if field not in available]
        if unknown:
            raise UserError(f"metric {', '.join(unknown)}: {self.name} can't read it here; it has {', '.join(available)}")
        self.fields = tuple(dict.fromkeys(fields or available))
        self._history = History()

    @abstractmethod
    def _read(self) -> Any:
        """What the device shows now."""

    @abstractmethod
    def _readings(self, before: Window, after: Window) -> Mapping[str, Sequence[float]]:
        """Every field's readings between two moments, in the units of FIELDS; a counter's difference gives a single one, the
        mean. There may be further fields, to check these against where they are sound."""

    def start(self) -> Window:
        """Opens a window."""
        return Window(time.monotonic(), self._read())

    def stop(self, window: Window) -> dict[str, Mean]:
        """Closes `window`: the mean of each field since it was opened, in the units of FIELDS. May take a moment, until the
        device shows what it did up to now.

        Raises:
            Unsound: readings are blank, out of their range, frozen, or at odds with another field's.
            UserError: the window is shorter than `minimum_window_s`, or a field has no reading in it.
        """
        means = self._means(window)
        self._history.add(values(means))
        return means

    def _means(self, window: Window) -> dict[str, Mean]:
        """The mean of each field from when `window` was opened until now; raises as `stop` does."""
        now = time.monotonic()
        lasted_s = now - window.began_s
        if lasted_s < self.minimum_window_s:
            raise UserError(f"a metric window of {lasted_s * 1e3:.0f} ms is too short to be valid: "
                            f"{self.name} needs {self.minimum_window_s * 1e3:.0f} ms")
        found = self._sound(self._readings(window, Window(now, self._read())))
        for field in self.fields:
            if not found.get(field):
                raise UserError(f"metric {field}: {self.name} has no reading of it in a window of {lasted_s:.1f} s")
        check_together(found, lasted_s)
        return {field: Mean(sum(found[field]) / len(found[field]), len(found[field])) for field in self.fields}

    def _sound(self, readings: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Readings that the fields can have; a further field that has others is left out.

        Raises:
            Unsound: one of `fields` has others.
        """
        found = {}
        for field, seen in readings.items():
            try:
                found[field] = [checked(field, value) for value in seen]
            except Unsound:
                if field in self.fields:
                    raise
        return found

    def window(self, seconds: float) -> dict[str, Mean]:
        """The mean of each field over the next `seconds`."""
        opened = self.start()
        time.sleep(seconds)
        return self.stop(opened)


def values(means: Mapping[str, Mean]) -> dict[str, float]:
    """Means without their counts."""
    return {field: mean.value for field, mean in means.items()}


def open_source(execution_provider: str = "auto", fields: Sequence[str] | None = None, source: SourceName = "auto", *,
                dcgm_address: str | None = None, replay: Path | None = None,
                replay_step_s: float | None = None) -> MetricSource:
    """A source on this machine for the device of `auto`, `cuda` or `cpu`.

    Args:
        execution_provider: whose device.
        fields: what to read, names of FIELDS; none: all it can.
        source: which one. `auto` takes the best there is, and says in the log which and why.
        dcgm_address: of a running nv-hostengine, HOST or HOST:PORT; none: DCGM runs within this process.
        replay: the file for source `replay`.
        replay_step_s: see `benchmark.replay_metrics.ReplaySource`.

    Raises:
        UserError: a source that is not here, a field that it can't read (those it can are listed), or no GPU where CUDA is
            asked for.
    """
    if (source == "replay") != (replay is not None):
        raise UserError(f"source {source}" + (" needs a file to replay" if replay is None else f": it does not read {replay}; "
                                              "choose source replay for that"))
    if replay is not None:
        from benchmark.replay_metrics import ReplaySource

        return ReplaySource(replay, fields, replay_step_s)
    if replay_step_s is not None:
        raise UserError(f"source {source}: there is no step of a replay without a file to replay")
    provider = resolve_provider(execution_provider)
    _check_suits(source, provider, dcgm_address)
    if provider == "cpu":
        from benchmark.cpu_metrics import CpuSource

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


def _check_suits(source: SourceName, provider: str, dcgm_address: str | None) -> None:
    """`UserError` where a source does not read the device of `provider`, or does not heed the address."""
    if dcgm_address is not None and (source not in ("auto", "dcgm") or provider == "cpu"):
        raise UserError(f"source {source} on {provider}: it does not ask the DCGM at {dcgm_address}; "
                        "that reads a GPU, for source dcgm or auto")
    if source not in ("auto", "psutil") and provider == "cpu":
        raise UserError(f"source {source} reads a GPU, and the device here is the CPU; use psutil or auto")
    if source == "psutil" and provider == "cuda":
        raise UserError(f"source psutil reads the CPU, and the device here is a GPU; use one of {', '.join(SOURCES[:4])}")


def _gpu_source(source: SourceName, fields: Sequence[str] | None, dcgm_address: str | None) -> MetricSource:
    if source == "dcgm":
        from benchmark.dcgm_metrics import DcgmSource

        return DcgmSource(fields, dcgm_address)
    from benchmark.nvml_metrics import NvmlSource

    return NvmlSource(fields, counters=source == "nvml-gpm")


def _best_for_gpu(fields: Sequence[str] | None, dcgm_address: str | None) -> tuple[MetricSource, str]:
    """The best source, and why: the DCGM pointed out, else counters (exact means of windows), else DCGM, else what all have."""
    from benchmark.dcgm_metrics import DcgmMissing
    from benchmark.nvml_metrics import CountersMissing

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
