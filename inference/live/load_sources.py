"""The sources that a command was given of the device's load and of its host's pace, and what they say now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hase.inference.live.load import InferenceConfig, LoadReading, current_load, fields_asked
from hase.inference.sharing.co_runner import probe_of, probed
from hase.records.probe_reading import read_reading

if TYPE_CHECKING:
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.core.host_pace import PaceAsked
    from hase.inference.core.predictor import LoadOptions, Predictor
    from hase.inference.core.run_modes import RunMode


@dataclass(frozen=True)
class LiveSources:
    """Where a command reads the load of the device and its host's pace.

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

    def load(self, config: InferenceConfig | None = None) -> LoadReading:
        """The load now, by metrics and by what Prometheus says of the probes.

        Args:
            config: used in place of `self.config`.

        Raises:
            UserError: the file of metrics can't be read, or Prometheus gives no metrics that can be trusted and the config does
                not say `on_failure: idle`.
        """
        config = config or self.config
        if not self.asks_prometheus:
            return current_load(config, self.metrics)
        fitted = self.predictor.fitted
        return current_load(config, None, self.fields(), self.probe is None and fitted.sharing is not None,
                            self.host.of_prometheus(fitted, self.run_mode))

    def with_load(self, load: LoadReading) -> LoadOptions:
        """The options of a prediction that follow from a load. Probes on this machine are read now.

        Raises:
            UserError: a probe can't be read, or does not fit the target.
        """
        return {"load": load.metrics, "notices": load.notices, "co_runner": self._co_runner(load),
                "host_pace": self.host.now(self.predictor.fitted, self.run_mode, load.host_probe_us)}

    def now(self) -> LoadOptions:
        """The same with the load of this moment; if Prometheus does not know it, that is an error, and never idle."""
        return self.with_load(self.load(self.config.never_idle()))

    def _co_runner(self, load: LoadReading) -> CoRunner | None:
        """The co-runner as a probe saw it: the probe that the command was given, or Prometheus's."""
        if self.probe is None:
            return probe_of(self.predictor.fitted, load)
        return probed(self.predictor.fitted, read_reading(Path(self.probe)) if self.probe else None)
