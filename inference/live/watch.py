"""Repeats a prediction as the load changes; a prediction that fails has a line too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from threading import Event

from inference.core.answers import Prediction
from inference.sharing.slo import PERCENTILE, Slo, check_slo
from training.sharing.learned import busy_share
from utils.errors import UserError
from utils.frozen import Frozen
from utils.logger import get_logger
from utils.scrape_server import stale

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
            found = self.predict()
        except UserError as error:
            self.failed, self.error = self.failed + 1, str(error)
            return WatchLine(time=now, failed=self.failed, trouble=self.error)
        self.latest, self.predicted_s, self.error = found, time.time(), ""
        shared = found.under_load
        return WatchLine(
            time=now, busy_share=_busy_share(found), mean_ms=found.latency_ms,
            p50_ms=shared.percentile_ms(50) if shared else None, p95_ms=shared.percentile_ms(95) if shared else None,
            slo=None if self.limit_ms is None else check_slo(found, self.limit_ms, self.percentile),
            rough_estimate=found.rough_estimate, host_pace=found.host_pace, failed=self.failed)

    def trouble(self) -> str:
        """Why there is no prediction to serve; "" where the last one is fresh."""
        return stale("prediction", self.predicted_s, self.interval_s, self.error)


def _busy_share(found: Prediction) -> float | None:
    if found.under_load:
        return found.under_load.busy_share
    return None if found.load == "idle" else busy_share(dict(found.load))
