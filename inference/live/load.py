"""The load of the device at the time of a run, and the host's pace, from the sources that a command was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from inference.core.targets import Fitted
from inference.live.prometheus import PrometheusConfig, PrometheusError, Server, server_for
from inference.sharing.co_runner import probe_of, probed
from measuring.metrics.names import NAMES, in_unit
from measuring.metrics.source import Unsound, checked, values
from records.probe_reading import read_reading
from training.sharing.learned import BUSY_FIELDS
from utils import files
from utils.config import Config
from utils.errors import UserError
from utils.paths import ROOT

if TYPE_CHECKING:
    from graph_model.simulation.sharing import CoRunner
    from inference.core.host_pace import PaceAsked
    from inference.core.predictor import Circumstances, Predictor
    from inference.core.run_modes import RunMode
    from records.probe_reading import ProbeSummary

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
    found = files.read_json(path)
    if not isinstance(found, dict) or not found:
        raise UserError(f'{path}: a JSON object of metrics by DCGM field name is expected, {{"DCGM_FI_DEV_GPU_UTIL": 60}}')
    metrics: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{path}: {name} is {value!r}; a finite number is expected")
        metric = NAMES[name].field if name in NAMES else name
        if metric in metrics:
            raise UserError(f"{path}: {metric} is there twice, under its old and its new name; leave one out")
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
class Load:
    """The load of the device.

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
                 probe: bool = False, pace: bool = False) -> Load:
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
        return Load(read_metrics(metrics_file))
    if config.prometheus.url is None:
        return Load()
    if not fields:
        return Load(notices=("predicted for an idle device: the predictors were trained without metrics, so Prometheus is not "
                             "queried",))
    try:
        return _of_prometheus(server_for(config.prometheus), fields, probe, pace)
    except PrometheusError as error:
        if config.prometheus.on_failure == "idle":
            return Load(notices=(f"predicted for an idle device, as prometheus.on_failure says, since the load is not known: "
                                 f"{error}",))
        raise


def _of_prometheus(server: Server, fields: Collection[str], probe: bool, pace: bool) -> Load:
    """The load as Prometheus reports it, with the readings of the probes that are wanted."""
    from inference.live.prometheus_readings import PrometheusSource, latest_host_probe, latest_probe

    load = Load(values(PrometheusSource(server, fields).latest()))
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
    if max_age_s is None or (found := latest(server, fields)) is None:
        return None, ()
    reading, age_s = found
    if age_s <= max_age_s:
        return reading, ()
    return None, (f"{last} {age_s:.0f} s ago, prometheus.{setting} is {max_age_s:g}: {instead}",)


@dataclass(frozen=True)
class Surroundings:
    """The sources.

    Attributes:
        predictor: for the target.
        run_mode: how the model is run.
        config: names a Prometheus, if there is one.
        metrics: a file of metrics, which is read each time; with it, Prometheus is not asked.
        probe: a file with a reading of the sharing probe; "": read it on this machine; None: Prometheus may have one.
        host: the source of the host's pace.
    """

    predictor: Predictor
    run_mode: RunMode
    config: InferenceConfig
    metrics: Path | None
    probe: str | None
    host: PaceAsked

    @property
    def asks_prometheus(self) -> bool:
        """Whether a Prometheus is asked for the load."""
        return self.config.prometheus.url is not None and not self.metrics

    @property
    def change(self) -> bool:
        """Whether any source may say something else at the next prediction."""
        return bool(self.asks_prometheus or self.metrics or self.probe is not None
                    or self.host.is_followed(self.predictor.fitted, self.run_mode))

    def fields(self) -> tuple[str, ...]:
        """The metrics to ask Prometheus for; none where it is not asked, or where the predictors know none."""
        return fields_asked(self.predictor.fitted) if self.asks_prometheus else ()

    def load(self, config: InferenceConfig | None = None) -> Load:
        """The load now, by metrics and by what Prometheus says of the probes; errors as of `current_load`.

        Args:
            config: used in place of `self.config`.
        """
        config = config or self.config
        if not self.asks_prometheus:
            return current_load(config, self.metrics)
        fitted = self.predictor.fitted
        return current_load(config, None, self.fields(), self.probe is None and fitted.sharing is not None,
                            self.host.of_prometheus(fitted, self.run_mode))

    def with_load(self, load: Load) -> Circumstances:
        """What a prediction needs to know of its surroundings, given the load. Probes on this machine are read now.

        Raises:
            UserError: a probe can't be read, or does not fit the target.
        """
        return {"load": load.metrics, "notices": load.notices, "co_runner": self._co_runner(load),
                "host_pace": self.host.now(self.predictor.fitted, self.run_mode, load.host_probe_us)}

    def now(self) -> Circumstances:
        """The same with the load of this moment; if Prometheus does not know it, that is an error, and never idle."""
        return self.with_load(self.load(self.config.never_idle()))

    def _co_runner(self, load: Load) -> CoRunner | None:
        """The co-runner as a probe saw it: the probe that the command was given, or Prometheus's."""
        if self.probe is None:
            return probe_of(self.predictor.fitted, load)
        return probed(self.predictor.fitted, read_reading(Path(self.probe)) if self.probe else None)
