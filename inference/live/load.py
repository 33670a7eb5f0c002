"""What else runs on the device while a model is to run: nothing (idle), or metrics by DCGM field name, and what a probe saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmark.metrics.dcgm_names import NAMES, in_unit
from benchmark.metrics.soundness import Unsound, checked
from benchmark.metrics.source import values
from inference.core.targets import Fitted
from inference.live.prometheus import PrometheusConfig, PrometheusError, Server, server_for
from training.sharing.learned import BUSY_FIELDS
from utils import files
from utils.config import Config
from utils.errors import UserError
from utils.paths import ROOT

if TYPE_CHECKING:
    from benchmark.load.probe_reading import ProbeSummary

T = TypeVar("T")
CONFIG_FILE = ROOT / "inference" / "config.yaml"


class InferenceConfig(Config):
    """`inference/config.yaml`."""

    prometheus: PrometheusConfig = PrometheusConfig()

    def never_idle(self) -> InferenceConfig:
        """The same, but an unusable answer is an error whatever `on_failure` says."""
        return self.model_copy(update={"prometheus": self.prometheus.model_copy(update={"on_failure": "error"})})


def read_metrics(path: Path) -> dict[str, float]:
    """The metrics in a JSON file, `{"DCGM_FI_DEV_GPU_UTIL": 60, …}`: by DCGM field name, old or new, in the name's unit.

    Raises:
        UserError: no such file, no JSON object, or a value that is no number or that the metric can't have.
    """
    found = files.read_json(path)
    if not isinstance(found, dict) or not found:
        raise UserError(f'{path}: a JSON object of metrics by DCGM field name is expected, {{"DCGM_FI_DEV_GPU_UTIL": 60}}')
    metrics: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{path}: {name} is {value!r}; a finite number is expected")
        metric = NAMES[name].field if name in NAMES else name
        if metric in metrics:
            raise UserError(f"{path}: {metric} stands there twice, under its old and its new name; leave one out")
        try:
            metrics[metric] = checked(metric, in_unit(name, value)) if name in NAMES else float(value)
        except Unsound as error:
            raise UserError(f"{path}: {error.fact}; leave it out, or write what it was") from None
    return metrics


def fields_asked(fitted: Fitted) -> tuple[str, ...]:
    """The metrics that Prometheus is asked for: those that the target's predictors were trained with; where it is known how the
    target is shared, only what says how busy it is."""
    metrics = fitted.predictors.sidecar.metrics
    if fitted.sharing is None:
        return tuple(metrics)
    return ([field for field in BUSY_FIELDS if field in metrics] or list(BUSY_FIELDS))[0],


@dataclass(frozen=True)
class Load:
    """What else runs on the device.

    Attributes:
        metrics: by DCGM field name; empty where nothing runs.
        notices: what to know about them.
        probe: the sharing probe's reading, which tells more than they do; None where there is none.
        host_probe_us: what the probe of the host took beside the device, which tells the host's pace; None likewise.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    probe: ProbeSummary | None = None
    host_probe_us: float | None = None


def current_load(config: InferenceConfig, metrics_file: Path | None = None, fields: Collection[str] = (),
                 probe: bool = False, pace: bool = False) -> Load:
    """The load to predict for: that of `metrics_file`, else what the config's Prometheus says, else idle.

    Args:
        fields: those that Prometheus is asked for (`fields_asked`).
        probe: whether it is asked for a reading of the sharing probe too: where it is known how the target is shared.
        pace: whether it is asked for the host's pace too: where that counts.

    Raises:
        UserError: the file can't be read, or Prometheus gives no metrics that can be believed and the config does not say
            `on_failure: idle`.
    """
    if metrics_file is not None:
        return Load(read_metrics(metrics_file))
    if config.prometheus.url is None:
        return Load()
    if not fields:
        return Load(notices=("predicted for an idle device: the predictors were trained without metrics, so Prometheus is not "
                             "asked",))
    try:
        return _of_prometheus(server_for(config.prometheus), fields, probe, pace)
    except PrometheusError as error:
        if config.prometheus.on_failure == "idle":
            return Load(notices=(f"predicted for an idle device, as prometheus.on_failure says, since the load is not known: "
                                 f"{error}",))
        raise


def _of_prometheus(server: Server, fields: Collection[str], probe: bool, pace: bool) -> Load:
    """What a Prometheus says of the load, and of the probes that it is asked for."""
    from inference.live.prometheus_metrics import PrometheusSource
    from inference.live.prometheus_pace import latest_host_probe
    from inference.live.prometheus_probe import latest_probe

    load = Load(values(PrometheusSource(server, fields).latest()))
    if probe:
        reading, notices = _recent(latest_probe, server, fields, "probe_max_age_s", "the sharing probe was last read",
                                   "metrics tell what else runs")
        load = replace(load, probe=reading, notices=notices)
    if pace:
        probe_us, notices = _recent(latest_host_probe, server, fields, "host_pace_max_age_s",
                                    "the host's pace was last measured", "it is taken as not known")
        load = replace(load, host_probe_us=probe_us, notices=(*load.notices, *notices))
    return load


def _recent(latest: Callable[[Server, Collection[str]], tuple[T, float] | None], server: Server, fields: Collection[str],
            setting: str, last: str, instead: str) -> tuple[T | None, tuple[str, ...]]:
    """A probe's last reading; or None, with a notice where it is too old.

    Args:
        latest: asks a server, given the fields of the load, for the reading and its age in seconds.
        server, fields: what `latest` takes.
        setting: name of the config's entry that says how old a reading may be; null there: it is not asked for.
        last, instead: what a notice says was done last, and what holds in its place.
    """
    max_age_s: float | None = getattr(server.config, setting)
    if max_age_s is None or (found := latest(server, fields)) is None:
        return None, ()
    reading, age_s = found
    if age_s <= max_age_s:
        return reading, ()
    return None, (f"{last} {age_s:.0f} s ago, prometheus.{setting} is {max_age_s:g}: {instead}",)
