"""The metrics of one device from a Prometheus: a source like those of measuring/metrics/sources.py.

One query fetches the raw samples of all metrics, a second one whether their exporter is up. `avg_over_time` would return a
number even if the exporter is dead, frozen, or reported NaN or nothing for a while. Series of MIG instances are never taken:
none of them shows what the whole GPU does.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from inference.live.prometheus import PrometheusError, Server
from inference.live.prometheus_devices import (
    IDENTITY,
    Series,
    asked_for,
    device_name,
    listed,
    of_one_device,
    of_one_exporter,
    selector,
    series_of,
)
from measuring.metrics.dcgm_names import NAMES, in_unit, names_of
from measuring.metrics.fields import FIELDS
from measuring.metrics.soundness import AT_WORK, UTILISATION, Unsound
from measuring.metrics.source import Mean, MetricSource, Window

LONG_AGO = "1h"  # how far back to look for the reason if the window is empty


class PrometheusSource(MetricSource):
    """Metrics of the device that a server's config names. The samples of a window are those scraped while it was open.

    `latest` and `stop` raise `PrometheusError` where there is no answer, there are several devices or only MIG instances of
    one, or samples are missing, too old, of a dead exporter, or impossible; the message says which and what to do. They raise
    `UserError` where the config's secrets or certificates can't be read.
    """

    name = "Prometheus"
    minimum_window_s = 0.001  # Prometheus counts in milliseconds

    def __init__(self, server: Server, fields: Collection[str]) -> None:
        """Reads `fields`, names of FIELDS, under any of their names; `UserError` for one that is none."""
        super().__init__(list(FIELDS), list(fields))
        self._server = server
        # a further field may show whether those stuck at 0 are right
        self._further = [UTILISATION] if UTILISATION not in self.fields and set(AT_WORK) & set(self.fields) else []

    def latest(self) -> dict[str, Mean]:
        """The mean of each field over the config's `window_s` up to now, in the units of FIELDS."""
        return self._means(Window(time.monotonic() - self._server.config.window_s, None))

    def stop(self, window: Window) -> dict[str, Mean]:
        return self._means(window)  # windows may share samples, so they are not compared with each other

    def _means(self, window: Window) -> dict[str, Mean]:
        try:
            return super()._means(window)
        except Unsound as error:
            whose = f"{self._server.config.gpu}: ".removeprefix(": ")
            raise PrometheusError(f"prometheus: {whose}{error.fact}; mend its exporter, or wait until the window has no such "
                                  "sample any more") from None

    def _read(self) -> None:
        """Nothing to do at the start of a window: the server keeps the samples."""

    def _readings(self, before: Window, after: Window) -> dict[str, list[float]]:
        server, window_s = self._server, round(after.began_s - before.began_s, 3)
        names = [name for field in (*self.fields, *self._further) for name in names_of(field)]
        answer = server.query(f"{selector(server, names)}[{window_s * 1e3:.0f}ms]", "matrix")
        series = [series_of(one, NAMES) for one in answer]
        wanted = [one for one in series if NAMES[one.name].field in self.fields]
        if not wanted:
            raise _nothing(server, [name for name in names if NAMES[name].field in self.fields], window_s)
        wanted, now_s = of_one_exporter(server, of_one_device(wanted))
        newest = {field: one for field in self.fields if (one := _newest(wanted, field))}
        if missing := [field for field in self.fields if field not in newest]:
            raise _missing(missing, wanted[0], window_s)
        for one in newest.values():
            _check_age(one, now_s, server.config.max_age_s)
        same = [one for one in series if one.exporter == wanted[0].exporter and one.device == wanted[0].device and one.whole]
        newest |= {field: one for field in self._further if (one := _newest(same, field))}
        return {field: _values(same, one.name) for field, one in newest.items()}


def _newest(series: Sequence[Series], field: str) -> Series | None:
    """The series of a field with the newest sample; if the old and the new name have the same, that of the old one."""
    names = names_of(field)
    return max((one for one in series if one.name in names), default=None,
               key=lambda one: (one.last_s, -names.index(one.name)))


def _values(series: Sequence[Series], name: str) -> list[float]:
    """All samples under a name, in the unit of FIELDS, by time. A GPU that changes hands (Kubernetes' pods) has a series for
    each user, and several users at once have the same samples."""
    samples = {when: value for one in series if one.name == name for when, value in one.samples}
    return [in_unit(name, samples[when]) for when in sorted(samples)]


def _check_age(series: Series, now_s: float, max_age_s: float) -> None:
    age_s = now_s - series.last_s
    if age_s > max_age_s:
        raise PrometheusError(f"prometheus: {series.name} of {device_name(series.labels)} is stale: its newest sample is "
                              f"{age_s:.1f} s old, max_age_s is {max_age_s:g}; mend its exporter, or raise max_age_s if it is "
                              "scraped less often")


def _nothing(server: Server, names: Collection[str], window_s: float) -> PrometheusError:
    """Why the window holds no sample of the device: which devices reported before, and which targets are down."""
    seen = [one["metric"] for one in server.query(
        f"count by ({', '.join(IDENTITY)}) (last_over_time({selector(server, names, everyone=True)}[{LONG_AGO}]))", "vector")]
    same = [one for one in seen if all(one.get(label) == value for label, value in asked_for(server).items())]
    down = _down(server)
    if same:
        return PrometheusError(f"prometheus: no sample of {listed([device_name(one) for one in same])} within {window_s:g} s, "
                               f"though there were some within {LONG_AGO}: its exporter is dead, no longer scraped, or scraped "
                               f"less often than window_s says{down}")
    if seen:
        job = server.config.job
        wanted = ", ".join(filter(None, (str(server.config.gpu), job and f"job {job}")))
        there = listed([f"{device_name(one)}, job {one.get('job', '?')}" for one in seen])
        return PrometheusError(f"prometheus: no metrics of {wanted}; there are those of {there}: set prometheus.gpu and "
                               f"prometheus.job to what is there{down}")
    return PrometheusError(f"prometheus.url {server.config.url}: HTTP 200, but it knows none of the metrics "
                           f"{', '.join(names)}: have it scrape an exporter that reports them{down}")


def _missing(fields: Sequence[str], other: Series, window_s: float) -> PrometheusError:
    """What to do about fields that are missing although `other` is there."""
    said = ", ".join(" or ".join(names_of(field)) for field in fields)
    return PrometheusError(f"prometheus: no sample of {said} within {window_s:g} s, though {device_name(other.labels)} reports "
                           f"{other.name}; these predictors need it: add it to the exporter's list of metrics (dcgm-exporter "
                           "leaves some out by default)")


def _down(server: Server) -> str:
    """The scrape targets that are down, as the end of a message; empty where none is."""
    found = [one["metric"] for one in server.query("up == 0", "vector")]
    down = listed([f"job {one.get('job', '?')}, instance {one.get('instance', '?')}" for one in found])
    return f"; can't be scraped at present: {down}" if found else ""
