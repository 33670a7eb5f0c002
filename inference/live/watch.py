"""Repeats a prediction as the load changes, prints a line for each, and serves the latest one to Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hase.inference.core.answers import Prediction
from hase.inference.sharing.co_runner import SHOWN_PERCENTILES
from hase.inference.sharing.shared_models import PERCENTILE, Slo, check_slo
from hase.learned.sharing.slices import busy_share
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.logger import get_logger
from hase.utils.processes import set_by_signal
from hase.utils.scrape_server import ScrapeServer, gauge, scrape_server, stale

log = get_logger("watch")


class WatchLine(Frozen):
    """The load and the prediction at one time.

    Attributes:
        time: local, ISO 8601.
        busy_share: the share of the time (a ratio) in which the GPU is busy; None where it is not known.
        mean_ms, p50_ms, p95_ms: of the latency; percentiles only where the prediction has a distribution.
        slo: how the prediction compares with the objective, if there is one.
        rough_estimate: whether the prediction is one.
        host_pace: for which the prediction holds, a ratio; None where it is unknown or does not matter.
        failed: number of predictions that failed so far.
        trouble: why this one failed, with everything else None; "" where it did not.
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
    """Predicts again and again.

    Attributes:
        predict: reads the load and predicts; `UserError` where that fails.
        interval_s: seconds between two predictions.
        limit_ms, percentile: the objective; None: there is none.
        latest: the last good prediction, if there was one.
        predicted_s: its time, seconds since 1970; 0: there was none.
        failed: number of predictions that failed.
        error: why the last one failed; "" where it did not.
    """

    predict: Callable[[], Prediction]
    interval_s: float
    limit_ms: float | None = None
    percentile: float = PERCENTILE
    latest: Prediction | None = None
    predicted_s: float = 0.0
    failed: int = 0
    error: str = ""

    def readings(self, over: Event) -> Iterator[WatchLine]:
        """One line at once, and one after each interval, until `over` is set."""
        while not over.is_set():
            yield self.read()
            over.wait(self.interval_s)

    def read(self) -> WatchLine:
        """The load and the prediction now; if that fails, a line that says why."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            prediction = self.predict()
        except (UserError, OSError) as error:  # OSError: too many open files, which may pass
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
        """Why there is no prediction to serve; "" where the last one is fresh."""
        return stale("prediction", self.predicted_s, self.interval_s, self.error)


def _busy_share(prediction: Prediction) -> float | None:
    if prediction.under_load:
        return prediction.under_load.busy_share
    return None if prediction.load == "idle" else busy_share(dict(prediction.load))


LATENCY, MEAN = "hase_predicted_latency_seconds", "hase_predicted_latency_mean_seconds"
ROUGH, HOST_PACE = "hase_prediction_rough_estimate", "hase_prediction_host_pace"
LIMIT, AT_PERCENTILE, CHANCE = "hase_objective_limit_seconds", "hase_objective_latency_seconds", "hase_objective_chance_ratio"
PREDICTED, FAILED = "hase_prediction_timestamp_seconds", "hase_prediction_failed_readings"


@dataclass(frozen=True, eq=False)  # a registry holds it by identity
class PredictedLatency:
    """A collector of `prometheus_client` with the metrics of a watched prediction."""

    watch: Watch

    def collect(self) -> Iterator[Any]:
        """The metric families of the latest prediction; quantiles only where it has a distribution, and the comparison with the
        objective only where there is one."""
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
            at = labels | {"quantile": f"{slo.percentile / 100:g}"}
            yield gauge(LIMIT, "highest latency that the objective allows (s)", slo.limit_ms / 1e3, at)
            yield gauge(AT_PERCENTILE, "predicted latency that the objective limits (s)", slo.latency_ms / 1e3, at)
            yield gauge(CHANCE, "how likely the objective is met (ratio)", slo.chance, at)
        yield gauge(PREDICTED, "time of the last good prediction (s since 1970)", self.watch.predicted_s, labels)
        yield CounterMetricFamily(FAILED, "readings of the load that failed", value=self.watch.failed)


def export(watch: Watch, host: str, port: int, web_config: Path | None = None) -> ScrapeServer:
    """Starts a server of the predictions of `watch`, in a thread; `port` 0 takes a free one.

    Raises:
        UserError: the port or the file with TLS and users can't be used.
    """
    server = scrape_server(PredictedLatency(watch), watch.trouble, host, port, web_config)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def columns(reading: WatchLine) -> dict[str, Any]:
    """A reading as a row of a table."""
    slo = reading.slo
    return {
        "time": reading.time, "busy share": None if reading.busy_share is None else f"{reading.busy_share:.0%}",
        "mean (ms)": reading.mean_ms, "p50 (ms)": reading.p50_ms, "p95 (ms)": reading.p95_ms,
        "rough estimate": None if reading.rough_estimate is None else "yes" if reading.rough_estimate else "no",
        "host pace": reading.host_pace,
        "SLO": None if slo is None else "met" if slo.met else "missed",
        "trouble": f"reading failed ({reading.failed} so far): {reading.trouble}" if reading.trouble else None}


def follow(watch: Watch, address: tuple[str, int] | None = None, as_json: bool = False,
           web_config: Path | None = None) -> None:
    """Prints a line on stdout for each prediction of a watch, until Ctrl-C or SIGTERM, and serves the latest one at `address`,
    if any, with TLS and users as the file `web_config` says.

    Raises:
        UserError: the address or the file can't be used.
    """
    over = set_by_signal()
    server = export(watch, *address, web_config) if address else None
    if server:
        log.info("the latest prediction: %s", server.url)
    count = 0
    for count, reading in enumerate(watch.readings(over), 1):
        if as_json:
            print(reading.model_dump_json(), flush=True)
        else:
            cli.print_line(columns(reading), heading=count == 1)
    if server:
        server.shutdown()
        server.server_close()
    log.info("%d readings, of which %d failed", count, watch.failed)
