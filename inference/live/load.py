"""Reads what else runs on the device, and how fast its host is, at the time of a prediction.

The load is none (idle), metrics by DCGM field name from a file or Prometheus, or the reading of a probe. The host's pace comes
from its own probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hase.benchmark.metrics.names import NAMES, in_field_unit
from hase.benchmark.metrics.source import Unsound, checked, values
from hase.inference.live.prometheus import PrometheusConfig, PrometheusError, PrometheusServer, server_for
from hase.inference.prediction.targets import Fitted
from hase.inference.prediction.under_load import co_runner_from_probe, co_runner_from_summary
from hase.learned.sharing import BUSY_FIELDS
from hase.records.probe_reading import read_reading
from hase.utils import files
from hase.utils.config import Config
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

if TYPE_CHECKING:
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.prediction.conditions import LoadOptions, PaceAsked, RunMode
    from hase.records.probe_reading import ProbeSummary

T = TypeVar("T")
CONFIG_FILE = ROOT / "inference" / "config.yaml"


class InferenceConfig(Config):
    """The schema of `inference/config.yaml`."""

    prometheus: PrometheusConfig = PrometheusConfig()

    def never_idle(self) -> InferenceConfig:
        """A copy of the config in which an unusable answer is always an error, whatever `on_failure` says."""
        return self.model_copy(update={"prometheus": self.prometheus.model_copy(update={"on_failure": "error"})})


def read_metrics(path: Path) -> dict[str, float]:
    """Reads a JSON file such as `{"DCGM_FI_DEV_GPU_UTIL": 60, …}`; old field names and units are converted to today's."""
    document = files.read_json(path)
    if not isinstance(document, dict) or not document:
        raise UserError(f'{path}: a JSON object of metrics by DCGM field name is expected, {{"DCGM_FI_DEV_GPU_UTIL": 60}}')
    metrics: dict[str, float] = {}
    for name, value in document.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{path}: {name} is {value!r}; a finite number is expected")
        metric = NAMES[name].field if name in NAMES else name
        if metric in metrics:
            raise UserError(f"{path}: metric {metric} is given twice, under its old and its new name; leave one of them out")
        try:
            metrics[metric] = checked(metric, in_field_unit(name, value)) if name in NAMES else float(value)
        except Unsound as error:
            raise UserError(f"{path}: {error.fact}; leave it out, or write what it was") from None
    return metrics


def fields_asked(fitted: Fitted) -> tuple[str, ...]:
    """The metrics to ask Prometheus for: those of the predictors or, if sharing was learned, only the GPU's busy share."""
    metrics = fitted.predictors.sidecar.metrics
    if fitted.sharing is None:
        return tuple(metrics)
    return ([field for field in BUSY_FIELDS if field in metrics] or list(BUSY_FIELDS))[0],


@dataclass(frozen=True)
class LoadReading:
    """The load of the device and the probe of its host at one moment.

    Attributes:
        metrics: by DCGM field name; empty on an idle device.
        notices: notes about them for the reader.
        probe: the sharing probe's reading, which is more precise than metrics.
        host_probe_us: the time of the host's probe, which gives the host's pace.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    probe: ProbeSummary | None = None
    host_probe_us: float | None = None


def current_load(config: InferenceConfig, metrics_file: Path | None = None, fields: Collection[str] = (),
                 probe: bool = False, pace: bool = False) -> LoadReading:
    """The load to predict for: from `metrics_file`, else from the config's Prometheus, else idle. Prometheus is asked for
    `fields`, and if wanted for the sharing probe (`probe`) and the host's pace (`pace`)."""
    if metrics_file is not None:
        return LoadReading(read_metrics(metrics_file))
    if config.prometheus.url is None:
        return LoadReading()
    if not fields:
        return LoadReading(notices=("predicted for an idle device: the predictors were trained without metrics, so Prometheus "
                                    "is not queried",))
    try:
        return _prometheus_load(server_for(config.prometheus), fields, probe, pace)
    except PrometheusError as error:
        if config.prometheus.on_failure == "idle":
            return LoadReading(notices=("predicted for an idle device, as prometheus.on_failure says, since the load is not "
                                        f"known: {error}",))
        raise


def _prometheus_load(server: PrometheusServer, fields: Collection[str], probe: bool, pace: bool) -> LoadReading:
    """The load as Prometheus reports it, with the requested probe readings."""
    from hase.inference.live.prometheus_readings import PrometheusSource, latest_host_probe, latest_probe  # noqa: PLC0415 - most predictions do not need it

    load = LoadReading(values(PrometheusSource(server, fields).latest()))
    if probe:
        reading, notices = _recent_reading(latest_probe, server, fields, "probe_max_age_s", "the sharing probe was last read",
                                           "metrics are used instead")
        load = replace(load, probe=reading, notices=notices)
    if pace:
        probe_us, notices = _recent_reading(latest_host_probe, server, fields, "host_pace_max_age_s",
                                            "the host's pace was last measured", "it is taken as not known")
        load = replace(load, host_probe_us=probe_us, notices=(*load.notices, *notices))
    return load


def _recent_reading(latest: Callable[[PrometheusServer, Collection[str]], tuple[T, float] | None], server: PrometheusServer,
            fields: Collection[str], setting: str, last: str, instead: str) -> tuple[T | None, tuple[str, ...]]:
    """A probe's last reading, or None with a notice if it is too old.

    Args:
        latest: asks a server, given the fields of the load, for the reading and its age (s).
        setting: the config's entry with the maximum age; if it is null, Prometheus is not asked.
        last, instead: parts of the notice: what was last read, and what happens without it.
    """
    max_age_s: float | None = getattr(server.config, setting)
    if max_age_s is None or (last_reading := latest(server, fields)) is None:
        return None, ()
    reading, age_s = last_reading
    if age_s <= max_age_s:
        return reading, ()
    return None, (f"{last} {age_s:.0f} s ago, prometheus.{setting} is {max_age_s:g}: {instead}",)


@dataclass(frozen=True)
class LiveSources:
    """Where a command reads the device's load and the host's pace.

    Attributes:
        fitted: returns the target's predictors, which a training may replace meanwhile.
        metrics: a file that is read each time, in place of Prometheus.
        probe: a file with a reading of the sharing probe; "": read it on this machine; None: Prometheus may have one.
        host: the source of the host's pace.
    """

    fitted: Callable[[], Fitted]
    run_mode: RunMode
    config: InferenceConfig
    metrics: Path | None
    probe: str | None
    host: PaceAsked

    @property
    def asks_prometheus(self) -> bool:
        """Whether Prometheus is asked for the load."""
        return self.config.prometheus.url is not None and not self.metrics

    @property
    def change(self) -> bool:
        """Whether any source may report something else at the next prediction."""
        return bool(self.asks_prometheus or self.metrics or self.probe is not None
                    or self.host.is_followed(self.fitted(), self.run_mode))

    def fields(self) -> tuple[str, ...]:
        """The metrics to ask Prometheus for; none if it is not asked, or the predictors use none."""
        return fields_asked(self.fitted()) if self.asks_prometheus else ()

    def load(self, config: InferenceConfig | None = None) -> LoadReading:
        """The load now; `config` replaces the command's own."""
        config = config or self.config
        if not self.asks_prometheus:
            return current_load(config, self.metrics)
        fitted = self.fitted()
        return current_load(config, None, self.fields(), self.probe is None and fitted.sharing is not None,
                            self.host.of_prometheus(fitted, self.run_mode))

    def with_load(self, load: LoadReading) -> LoadOptions:
        """The prediction options for a load. Probes on this machine are read now."""
        return {"load": load.metrics, "notices": load.notices, "co_runner": self._co_runner(load),
                "host_pace": self.host.now(self.fitted(), self.run_mode, load.host_probe_us)}

    def now(self) -> LoadOptions:
        """The prediction options for this moment. If Prometheus does not know the load, this is an error, never idle."""
        return self.with_load(self.load(self.config.never_idle()))

    def _co_runner(self, load: LoadReading) -> CoRunner | None:
        """The co-runner from the command's own probe, else from Prometheus."""
        if self.probe is None:
            return co_runner_from_summary(self.fitted(), load.probe)
        return co_runner_from_probe(self.fitted(), read_reading(Path(self.probe)) if self.probe else None)
