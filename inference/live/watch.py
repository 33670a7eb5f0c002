"""Repeats a prediction as the load changes, and serves the latest one to Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hase.inference.prediction.answers import PERCENTILE, Prediction, Slo, check_slo
from hase.inference.prediction.under_load import SHOWN_PERCENTILES
from hase.learned.sharing import busy_share
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.web_server import ScrapeServer, gauge, scrape_server, stale_reason

LATENCY, MEAN = "hase_predicted_latency_seconds", "hase_predicted_latency_mean_seconds"
ROUGH, HOST_PACE = "hase_prediction_rough_estimate", "hase_prediction_host_pace"
LIMIT, AT_PERCENTILE, CHANCE = "hase_objective_limit_seconds", "hase_objective_latency_seconds", "hase_objective_chance_ratio"
PREDICTED, FAILED = "hase_prediction_timestamp_seconds", "hase_prediction_failed_readings"


class WatchLine(Frozen):
    """The load and the prediction at one time.

    Attributes:
        time: local, ISO 8601.
        busy_share: of the time in which the GPU is busy, a ratio.
        mean_ms, p50_ms, p95_ms: of the latency; percentiles if there is a distribution.
        slo: the objective, if there is one.
        rough_estimate: whether the prediction is one.
        host_pace: for which the prediction holds.
        failed: number of predictions that failed so far.
        trouble: why this one failed; "" if it did not.
    """

    time: str
    busy_share: float | None = None
    mean_ms: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    slo: Slo | None = None
    rough_estimate: bool | None = None
    host_pace: float | None = None
    failed: int = 0
    trouble: str = ""


@dataclass
class Watch:
    """Predicts at regular intervals.

    Attributes:
        predict: reads the load and predicts; raises `UserError` if that fails.
        latest: the last successful prediction, made at `predicted_s` (seconds since 1970; 0 before the first).
        failed: number of failed predictions.
        error: why the last one failed; "" if it did not.
    """

    predict: Callable[[], Prediction]
    interval_s: float
    limit_ms: float | None = None
    percentile: float = PERCENTILE
    latest: Prediction | None = None
    predicted_s: float = 0.0
    failed: int = 0
    error: str = ""

    def readings(self, stop: Event) -> Iterator[WatchLine]:
        """Yields one line at once, and one after each interval, until `stop` is set."""
        while not stop.is_set():
            yield self.read()
            stop.wait(self.interval_s)

    def read(self) -> WatchLine:
        """The load and the prediction now, or the reason of a failure."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            prediction = self.predict()
        except (UserError, OSError) as error:  # OSError: too many open files, which can be temporary
            self.failed, self.error = self.failed + 1, str(error)
            return WatchLine(time=now, failed=self.failed, trouble=self.error)
        self.latest, self.predicted_s, self.error = prediction, time.time(), ""
        shared = prediction.under_load
        return WatchLine(
            time=now, busy_share=_busy_share(prediction), mean_ms=prediction.latency_ms,
            p50_ms=shared.percentile_ms(50) if shared else None, p95_ms=shared.percentile_ms(95) if shared else None,
            slo=None if self.limit_ms is None else check_slo(prediction, self.limit_ms, self.percentile),
            rough_estimate=prediction.rough_estimate, host_pace=prediction.host_pace, failed=self.failed)

    def trouble(self) -> str:
        """Why there is no current prediction to serve; "" if the last one is fresh."""
        return stale_reason("prediction", self.predicted_s, self.interval_s, self.error)


def _busy_share(prediction: Prediction) -> float | None:
    if prediction.under_load:
        return prediction.under_load.busy_share
    return None if prediction.load == "idle" else busy_share(dict(prediction.load))


@dataclass(frozen=True, eq=False)  # eq=False: a registry needs hashing by identity
class PredictedLatency:
    """A collector of `prometheus_client` with the metrics of a watched prediction."""

    watch: Watch

    def collect(self) -> Iterator[Any]:
        """The metric families of the latest prediction; quantiles and objective only if it has them."""
        prediction = self.watch.latest
        if prediction is None:
            return
        labels = {"model": prediction.model, "target": prediction.target}
        if prediction.under_load:
            family = GaugeMetricFamily(LATENCY, "predicted latency under the current load (s)", labels=[*labels, "quantile"])
            for percent in SHOWN_PERCENTILES:
                family.add_metric([*labels.values(), f"{percent / 100:g}"], prediction.under_load.percentile_ms(percent) / 1e3)
            yield family
        yield gauge(MEAN, "mean predicted latency under the current load (s)", prediction.latency_ms / 1e3, labels)
        yield gauge(ROUGH, "whether the prediction is a rough estimate (1) or not (0)", float(prediction.rough_estimate),
                    labels)
        if prediction.host_pace is not None:
            yield gauge(HOST_PACE, "how many times as long as usual the host takes to dispatch (ratio)", prediction.host_pace,
                        labels)
        if self.watch.limit_ms is not None:
            slo = check_slo(prediction, self.watch.limit_ms, self.watch.percentile)
            limited = labels | {"quantile": f"{slo.percentile / 100:g}"}
            yield gauge(LIMIT, "highest latency that the objective allows (s)", slo.limit_ms / 1e3, limited)
            yield gauge(AT_PERCENTILE, "predicted latency that the objective limits (s)", slo.latency_ms / 1e3, limited)
            yield gauge(CHANCE, "how likely the objective is met (ratio)", slo.chance, limited)
        yield gauge(PREDICTED, "time of the last good prediction (s since 1970)", self.watch.predicted_s, labels)
        yield CounterMetricFamily(FAILED, "readings of the load that failed", value=self.watch.failed)


def export(watch: Watch, host: str, port: int, web_config: Path | None = None) -> ScrapeServer:
    """Serves the predictions of `watch` in a thread; `port` 0 takes a free one."""
    server = scrape_server(PredictedLatency(watch), watch.trouble, host, port, web_config)
    Thread(target=server.serve_forever, daemon=True).start()
    return server
