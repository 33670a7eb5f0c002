"""Serves the latest prediction to Prometheus. Where the last good one is old, it answers HTTP 503 with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from inference.sharing.co_runner import SHOWN_PERCENTILES
from utils.scrape_server import scrape_server

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from inference.live.watch import Watch

LATENCY, MEAN = "hase_predicted_latency_seconds", "hase_predicted_latency_mean_seconds"
ROUGH, HOST_PACE = "hase_prediction_rough_estimate", "hase_prediction_host_pace"
PREDICTED, FAILED = "hase_prediction_timestamp_seconds", "hase_prediction_failed_readings"


@dataclass(frozen=True, eq=False)  # a registry holds it by identity
class PredictedLatency:
    """A collector of `prometheus_client` with the metrics of a watched prediction."""

    watch: Watch

    def collect(self) -> Iterator[Any]:
        """The metric families of the latest prediction; quantiles only where it has a distribution."""
        found = self.watch.latest
        if found is None:
            return
        labels = {"model": found.model, "target": found.target}

        def gauge(name: str, meaning: str, value: float) -> Any:
            family = GaugeMetricFamily(name, meaning, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            return family

        if found.under_load:
            family = GaugeMetricFamily(LATENCY, "predicted latency under the current load (s)", labels=[*labels, "quantile"])
            for percent in SHOWN_PERCENTILES:
                family.add_metric([*labels.values(), f"{percent / 100:g}"], found.under_load.percentile_ms(percent) / 1e3)
            yield family
        yield gauge(MEAN, "mean predicted latency under the current load (s)", found.latency_ms / 1e3)
        yield gauge(ROUGH, "whether the prediction is a rough estimate (1) or not (0)", float(found.rough_estimate))
        if found.host_pace is not None:
            yield gauge(HOST_PACE, "how many times as long as usual the host takes to dispatch (ratio)", found.host_pace)
        yield gauge(PREDICTED, "time of the last good prediction (s since 1970)", self.watch.predicted_s)
        yield CounterMetricFamily(FAILED, "readings of the load that failed", value=self.watch.failed)


def export(watch: Watch, host: str, port: int) -> WSGIServer:
    """Starts a server of the predictions of `watch`, in a thread; `port` 0 takes a free one.

    Raises:
        UserError: the port can't be used.
    """
    server = scrape_server(PredictedLatency(watch), watch.trouble, host, port)
    Thread(target=server.serve_forever, daemon=True).start()
    return server
