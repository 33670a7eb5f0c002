"""A prediction that follows the load: made anew in every interval, with a line for each, a failed one too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from threading import Event

from inference.core.answers import Prediction
from inference.sharing.slo import PERCENTILE, Slo, check_slo
from ort_analysis.records.kernel_record import Frozen
from training.sharing.learned import busy_share
from utils.errors import UserError
from utils.logger import get_logger
from utils.scrape_server import stale

log = get_logger("watch")


class WatchLine(Frozen):
    """The load and the prediction at one time.

    Attributes:
        time: local, ISO 8601.
        busy_share: for what share of the time (a ratio) the GPU is busy; None where that is not known.
        mean_ms, p50_ms, p95_ms: of the latency; percentiles only where the prediction has a distribution.
        slo: how that compares with the objective, where there is one.
        rough_estimate: whether the prediction is one.
        host_pace: that the prediction holds for, a ratio; None where it is not known or does not count.
        failed: how many readings failed so far.
        trouble: why this one did, all else then being None; "" where all is well.
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
        predict: reads the load, and predicts; `UserError` where that fails.
        interval_s: between two readings.
        limit_ms, percentile: the objective; None: there is none.
        latest: the last prediction that there was.
        predicted_s: when, seconds since 1970; 0 for never.
        failed: how many readings failed.
        error: why the last one did; "" while all is well.
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
        """One at once, and one after each interval, until `over`."""
        while not over.is_set():
            yield self.read()
            over.wait(self.interval_s)

    def read(self) -> WatchLine:
        """The load and the prediction now; a failure is a reading that says so."""
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
