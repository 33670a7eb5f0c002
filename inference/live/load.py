"""The load of the device at the time of a run: none (idle), or metrics by DCGM field name and the readings of probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hase.benchmark.metrics.names import NAMES, in_unit
from hase.benchmark.metrics.source import Unsound, checked, values
from hase.inference.core.targets import Fitted
from hase.inference.live.prometheus import PrometheusConfig, PrometheusError, Server, server_for
from hase.learned.sharing.slices import BUSY_FIELDS
from hase.utils import files
from hase.utils.config import Config
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

if TYPE_CHECKING:
    from hase.records.probe_reading import ProbeSummary

T = TypeVar("T")
CONFIG_FILE = ROOT / "inference" / "config.yaml"


class InferenceConfig(Config):
    """`inference/config.yaml`."""

    prometheus: PrometheusConfig = PrometheusConfig()

    def never_idle(self) -> InferenceConfig:
        """The same config, except that an unusable answer is an error whatever `on_failure` says."""
        return self.model_copy(update={"prometheus": self.prometheus.model_copy(update={"on_failure": "error"})})


def read_metrics(path: Path) -> dict[str, float]:
    """The metrics in a JSON file, `{"DCGM_FI_DEV_GPU_UTIL": 60, …}`: by DCGM field name, old or new, in the unit of that name.

    Raises:
        UserError: no such file, no JSON object, or a value that is no number or that the metric can't have.
    """
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
            metrics[metric] = checked(metric, in_unit(name, value)) if name in NAMES else float(value)
        except Unsound as error:
            raise UserError(f"{path}: {error.fact}; leave it out, or write what it was") from None
    return metrics


def fields_asked(fitted: Fitted) -> tuple[str, ...]:
    """The metrics to ask Prometheus for: those with which the target's predictors were trained; or, where it is known how the
    target is shared, only the one that shows how busy it is."""
    metrics = fitted.predictors.sidecar.metrics
    if fitted.sharing is None:
        return tuple(metrics)
    return ([field for field in BUSY_FIELDS if field in metrics] or list(BUSY_FIELDS))[0],


@dataclass(frozen=True)
class LoadReading:
    """What was read of the device's load, and of its host's pace, at one moment.

    Attributes:
        metrics: by DCGM field name; empty on an idle device.
        notices: what the reader should know about them.
        probe: the sharing probe's reading, which says more than metrics; None where there is none.
        host_probe_us: the time of the host's probe, from which the host's pace follows; None where there is none.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    probe: ProbeSummary | None = None
    host_probe_us: float | None = None


def current_load(config: InferenceConfig, metrics_file: Path | None = None, fields: Collection[str] = (),
                 probe: bool = False, pace: bool = False) -> LoadReading:
    """The load to predict for: that in `metrics_file`, else what the config's Prometheus says, else idle.

    Args:
        config: names the Prometheus, if there is one.
        metrics_file: read in place of Prometheus.
        fields: the metrics to ask Prometheus for (`fields_asked`).
        probe: whether to ask it for a reading of the sharing probe too, as where it is known how the target is shared.
        pace: whether to ask it for the host's pace too, as where it matters.

    Raises:
        UserError: the file can't be read, or Prometheus gives no metrics that can be trusted and the config does not say
            `on_failure: idle`.
    """
    if metrics_file is not None:
        return LoadReading(read_metrics(metrics_file))
    if config.prometheus.url is None:
        return LoadReading()
    if not fields:
        return LoadReading(notices=("predicted for an idle device: the predictors were trained without metrics, so Prometheus "
                                    "is not queried",))
    try:
        return _of_prometheus(server_for(config.prometheus), fields, probe, pace)
    except PrometheusError as error:
        if config.prometheus.on_failure == "idle":
            return LoadReading(notices=("predicted for an idle device, as prometheus.on_failure says, since the load is not "
                                        f"known: {error}",))
        raise


def _of_prometheus(server: Server, fields: Collection[str], probe: bool, pace: bool) -> LoadReading:
    """The load as Prometheus reports it, with the readings of the probes that are wanted."""
    from hase.inference.live.prometheus_readings import PrometheusSource, latest_host_probe, latest_probe

    load = LoadReading(values(PrometheusSource(server, fields).latest()))
    if probe:
        reading, notices = _recent(latest_probe, server, fields, "probe_max_age_s", "the sharing probe was last read",
                                   "metrics are used instead")
        load = replace(load, probe=reading, notices=notices)
    if pace:
        probe_us, notices = _recent(latest_host_probe, server, fields, "host_pace_max_age_s",
                                    "the host's pace was last measured", "it is taken as not known")
        load = replace(load, host_probe_us=probe_us, notices=(*load.notices, *notices))
    return load


def _recent(latest: Callable[[Server, Collection[str]], tuple[T, float] | None], server: Server, fields: Collection[str],
            setting: str, last: str, instead: str) -> tuple[T | None, tuple[str, ...]]:
    """A probe's last reading; or None, with a notice if it is too old.

    Args:
        latest: asks a server, given the fields of the load, for the reading and its age in seconds.
        server, fields: arguments of `latest`.
        setting: the config's entry with the greatest age; where it is null, Prometheus is not asked.
        last, instead: parts of the notice: what happened last, and what is done without the reading.
    """
    max_age_s: float | None = getattr(server.config, setting)
    if max_age_s is None or (last_reading := latest(server, fields)) is None:
        return None, ()
    reading, age_s = last_reading
    if age_s <= max_age_s:
        return reading, ()
    return None, (f"{last} {age_s:.0f} s ago, prometheus.{setting} is {max_age_s:g}: {instead}",)
