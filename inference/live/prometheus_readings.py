"""What a Prometheus says of one device: its metrics, and the last readings of the sharing probe and of the host's probe.

For metrics, one query fetches the raw samples of a window, and a second one asks whether their exporter is up: `avg_over_time`
would return a number even if the exporter is dead, frozen, or reported NaN or nothing for a while. For the readings of a probe
one instant query is enough: what no longer holds, such as waits or another sharing mode, is gone after the exporter's next
scrape. Series of MIG instances are never taken: none of them shows what the whole GPU does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hase.benchmark.metrics.names import (
    FIELDS,
    HOST_LABEL,
    INDEX_LABEL,
    NAMES,
    PART_LABEL,
    PROFILE_LABEL,
    UUID_LABEL,
    in_unit,
    names_of,
)
from hase.benchmark.metrics.probe_metrics import MEANINGS, Sample, Unreadable, probed_of
from hase.benchmark.metrics.source import AT_WORK, UTILISATION, Mean, MetricSource, Unsound, Window
from hase.inference.live.prometheus import FOREIGN_SERIES, PrometheusError, Server, quoted
from hase.records.host_pace import PACE_MEANINGS, PROBE, TAKEN
from hase.records.probe_reading import ProbeSummary

IDENTITY = (UUID_LABEL, INDEX_LABEL, HOST_LABEL, "job", "instance")  # labels that distinguish devices and their exporters
LISTED = 8  # how many devices a message lists
LONG_AGO = "1h"  # how far back to look for the reason if the window is empty


@dataclass(frozen=True)
class Series:
    """Samples of one metric: `(seconds since 1970, value)`, oldest first."""

    name: str
    labels: Mapping[str, str]
    samples: Sequence[tuple[float, float]]

    @property
    def exporter(self) -> tuple[str, str]:
        return self.labels.get("job", ""), self.labels.get("instance", "")

    @property
    def device(self) -> str:
        return self.labels.get(UUID_LABEL) or device_name(self.labels)

    @property
    def whole(self) -> bool:
        """Whether it is of a whole GPU, not of a MIG instance."""
        return not self.labels.get(PART_LABEL)

    @property
    def last_s(self) -> float:
        return self.samples[-1][0]


def selector(server: Server, names: Collection[str], everyone: bool = False) -> str:
    """PromQL that selects metrics of the device in the config, or of `everyone`."""
    labels = {} if everyone else asked_for(server)
    matchers = [f"__name__=~{quoted('|'.join(names))}", *(f"{key}={quoted(value)}" for key, value in labels.items())]
    return "{" + ",".join(matchers) + "}"


def asked_for(server: Server) -> dict[str, str]:
    """The labels of the device and exporter that the config names."""
    job = server.config.job
    return server.config.gpu.labels | ({} if job is None else {"job": job})


def series_of(entry: Mapping[str, Any], names: Collection[str]) -> Series:
    """A series from the API's JSON, of a matrix or a vector; a sample of a vector has the time of the answer. Values are
    strings, such as "NaN".

    Raises:
        PrometheusError: it is no series, or of no metric in `names`.
    """
    try:
        labels = dict(entry["metric"])
        samples = entry["values"] if "values" in entry else [entry["value"]]
        series = Series(labels.pop("__name__"), labels, [(_finite(when), float(value)) for when, value in samples])
    except (KeyError, TypeError, ValueError):
        raise PrometheusError(FOREIGN_SERIES) from None
    if not series.samples or series.name not in names:
        raise PrometheusError(FOREIGN_SERIES)
    return series


def _finite(when: Any) -> float:
    """A time of the API's JSON.

    Raises:
        TypeError, ValueError: it is no number, or not a finite one.
    """
    if not math.isfinite(time_s := float(when)):
        raise ValueError(f"{when} is no time")
    return time_s


def device_name(labels: Mapping[str, str]) -> str:
    """A device in words that distinguish it from others."""
    place = [f"{what} {labels[key]}" for key, what in ((INDEX_LABEL, "index"), (HOST_LABEL, "host")) if labels.get(key)]
    if labels.get(UUID_LABEL):
        return labels[UUID_LABEL] + (f" ({', '.join(place)})" if place else "")
    return ", ".join(place) if labels.get(HOST_LABEL) else ", ".join([*place, f"instance {labels.get('instance', '?')}"])


def listed(what: Collection[str]) -> str:
    texts = sorted(set(what))
    return "; ".join(texts[:LISTED]) + (f"; and {len(texts) - LISTED} more" if len(texts) > LISTED else "")


def of_one_device(series: Sequence[Series]) -> list[Series]:
    """The series of the one device, without those of its MIG instances.

    Raises:
        PrometheusError: they are of several devices, or all of MIG instances.
    """
    devices = {entry.device: device_name(entry.labels) for entry in series}
    if len(devices) > 1:
        raise PrometheusError(f"prometheus: metrics of several devices match: {listed(devices.values())}; set prometheus.gpu "
                              "to one's UUID, or to its index and host")
    whole = [entry for entry in series if entry.whole]
    if not whole:
        parts = listed([f"{PART_LABEL} {entry.labels[PART_LABEL]}, {entry.labels.get(PROFILE_LABEL, '?')}" for entry in series])
        raise PrometheusError(f"prometheus: {device_name(series[0].labels)} is split into MIG instances ({parts}), and only "
                              "these are reported; no instance's load is that of the GPU, for which predictions hold: have the "
                              "whole GPU reported too (dcgm-exporter --devices g), or switch MIG off")
    return whole


def latest_of_one_exporter(server: Server, names: Collection[str], fields: Collection[str]) -> list[Series]:
    """The series called `names` of the one device that a server's config names, as one exporter serves them now; empty where
    there are none. What an exporter stops serving is gone from the answer after its next scrape, as is everything once it is
    down.

    Args:
        server: to ask.
        names: of metrics that one of Hase's exporters serves.
        fields: of FIELDS, queried as well: if they are of another device, it is not clear whose series are meant.

    Raises:
        UserError: the config's secrets or certificates can't be read.
        PrometheusError: there is no answer, or there are several devices, several exporters or only MIG instances.
    """
    queried = [*names, *(name for field in fields for name in names_of(field))]
    answer = [series_of(entry, {*names, *NAMES}) for entry in server.query(selector(server, queried), "vector")]
    if not any(entry.name in names for entry in answer):
        return []
    of_device = [entry for entry in of_one_device(answer) if entry.name in names]
    check_one_exporter({entry.exporter for entry in of_device}, of_device[0])
    return of_device


def of_one_exporter(server: Server, series: Sequence[Series]) -> tuple[list[Series], float]:
    """The series of the one exporter that is up, and the server's time (seconds since 1970).

    A server that has its metrics from another server may not know the exporter; then only the age of the samples shows it.

    Raises:
        PrometheusError: several exporters are up, or the only one is down.
    """
    exporters = sorted({entry.exporter for entry in series})
    queries = [f"up{{job={quoted(job)},instance={quoted(instance)}}}" for job, instance in exporters]
    answer = server.query(" or ".join([*queries, "vector(time())"]), "vector")
    try:
        now_s = max(_finite(entry["value"][0]) for entry in answer)  # the time at which the server computed it
        up = {(entry["metric"].get("job", ""), entry["metric"].get("instance", "")): float(entry["value"][1]) == 1.0
              for entry in answer if entry["metric"]}  # vector(time()) has no labels
    except (KeyError, TypeError, ValueError, IndexError):
        raise PrometheusError(FOREIGN_SERIES) from None
    running = [exporter for exporter in exporters if up.get(exporter)] if len(exporters) > 1 else exporters
    running = running or exporters
    check_one_exporter(running, series[0])
    if up.get(running[0]) is False:
        raise PrometheusError(f"prometheus: the exporter of {device_name(series[0].labels)} can't be scraped (up is 0): "
                              f"{_described(running)}; its last samples do not show the present load: repair the exporter")
    return [entry for entry in series if entry.exporter == running[0]], now_s


def check_one_exporter(exporters: Collection[tuple[str, str]], series: Series) -> None:
    """Checks that the device of `series` has one exporter: one pair of job and instance.

    Raises:
        PrometheusError: it has several.
    """
    if len(exporters) > 1:
        raise PrometheusError(f"prometheus: several exporters report {device_name(series.labels)}: {_described(exporters)}; "
                              "name one's job in prometheus.job")


def _described(exporters: Collection[tuple[str, str]]) -> str:
    return listed([f"job {job}, instance {instance}" for job, instance in exporters])


class PrometheusSource(MetricSource):
    """Metrics of the device that a server's config names. The samples of a window are those scraped while it was open.

    `latest` and `stop` raise `PrometheusError` where there is no answer, there are several devices or only MIG instances of
    one, or samples are missing, too old, of a dead exporter, or impossible; the message says which and what to do. They raise
    `UserError` where the config's secrets or certificates can't be read.
    """

    name = "Prometheus"
    minimum_window_s = 0.001  # Prometheus counts in milliseconds

    def __init__(self, server: Server, fields: Collection[str]) -> None:
        """Reads `fields` under any of their names.

        Raises:
            UserError: one of them is no name of FIELDS.
        """
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
        series = [series_of(entry, NAMES) for entry in answer]
        wanted = [entry for entry in series if NAMES[entry.name].field in self.fields]
        if not wanted:
            raise _nothing(server, [name for name in names if NAMES[name].field in self.fields], window_s)
        wanted, now_s = of_one_exporter(server, of_one_device(wanted))
        newest = {field: latest for field in self.fields if (latest := _newest(wanted, field))}
        if missing := [field for field in self.fields if field not in newest]:
            raise _missing(missing, wanted[0], window_s)
        for latest in newest.values():
            _check_age(latest, now_s, server.config.max_age_s)
        same = [entry for entry in series
                if entry.exporter == wanted[0].exporter and entry.device == wanted[0].device and entry.whole]
        newest |= {field: latest for field in self._further if (latest := _newest(same, field))}
        return {field: _values(same, latest.name) for field, latest in newest.items()}


def _newest(series: Sequence[Series], field: str) -> Series | None:
    """The series of a field with the newest sample; if the old and the new name have the same, that of the old one."""
    names = names_of(field)
    return max((candidate for candidate in series if candidate.name in names), default=None,
               key=lambda candidate: (candidate.last_s, -names.index(candidate.name)))


def _values(series: Sequence[Series], name: str) -> list[float]:
    """All samples under a name, in the unit of FIELDS, by time. A GPU that changes hands (Kubernetes' pods) has a series for
    each user, and several users at once have the same samples."""
    samples = {when: value for part in series if part.name == name for when, value in part.samples}
    return [in_unit(name, samples[when]) for when in sorted(samples)]


def _check_age(series: Series, now_s: float, max_age_s: float) -> None:
    age_s = now_s - series.last_s
    if age_s > max_age_s:
        raise PrometheusError(f"prometheus: {series.name} of {device_name(series.labels)} is stale: its newest sample is "
                              f"{age_s:.1f} s old, max_age_s is {max_age_s:g}; mend its exporter, or raise max_age_s if it is "
                              "scraped less often")


def _nothing(server: Server, names: Collection[str], window_s: float) -> PrometheusError:
    """Why the window holds no sample of the device: which devices reported before, and which targets are down."""
    seen = [entry["metric"] for entry in server.query(
        f"count by ({', '.join(IDENTITY)}) (last_over_time({selector(server, names, everyone=True)}[{LONG_AGO}]))", "vector")]
    same = [labels for labels in seen if all(labels.get(label) == value for label, value in asked_for(server).items())]
    down = _down(server)
    if same:
        return PrometheusError(f"prometheus: no sample of {listed([device_name(labels) for labels in same])} within "
                               f"{window_s:g} s, though there were some within {LONG_AGO}: its exporter is dead, no longer "
                               f"scraped, or scraped less often than window_s says{down}")
    if seen:
        job = server.config.job
        wanted = ", ".join(filter(None, (str(server.config.gpu), job and f"job {job}")))
        reporting = listed([f"{device_name(labels)}, job {labels.get('job', '?')}" for labels in seen])
        return PrometheusError(f"prometheus: no metrics of {wanted}, but of {reporting}: set prometheus.gpu and prometheus.job "
                               f"to one of these{down}")
    return PrometheusError(f"prometheus.url {server.config.url}: HTTP 200, but it knows none of the metrics "
                           f"{', '.join(names)}: have it scrape an exporter that reports them{down}")


def _missing(fields: Sequence[str], reported: Series, window_s: float) -> PrometheusError:
    """What to do about fields that are missing although series `reported` of the same device is not."""
    names = ", ".join(" or ".join(names_of(field)) for field in fields)
    return PrometheusError(f"prometheus: no sample of {names} within {window_s:g} s, though {device_name(reported.labels)} "
                           f"reports {reported.name}; these predictors need it: add it to the exporter's list of metrics "
                           "(dcgm-exporter leaves some out by default)")


def _down(server: Server) -> str:
    """The scrape targets that are down, as the end of a message; empty where none is."""
    targets = [entry["metric"] for entry in server.query("up == 0", "vector")]
    down = listed([f"job {labels.get('job', '?')}, instance {labels.get('instance', '?')}" for labels in targets])
    return f"; can't be scraped at present: {down}" if targets else ""


def latest_host_probe(server: Server, fields: Collection[str]) -> tuple[float, float] | None:
    """The time of the host's probe (µs) for the device that a server's config names, and its age (s); None where there is none.

    Args:
        server: to ask.
        fields: of FIELDS, queried as well: if they are of another device, it is not clear whose pace is meant.

    Raises:
        UserError: the config's secrets or certificates can't be read.
        PrometheusError: there is no answer, there are several devices, several exporters or only MIG instances, or the samples
            are not a valid reading.
    """
    series = latest_of_one_exporter(server, PACE_MEANINGS, fields)
    if not series:
        return None
    values = {entry.name: entry.samples[-1][1] for entry in series}
    probe_s, taken_s = (values.get(name, math.nan) for name in (PROBE, TAKEN))
    whose = device_name(series[0].labels)
    if not (0.0 < probe_s < math.inf and math.isfinite(taken_s)):
        raise PrometheusError(f"prometheus: {PROBE} and {TAKEN} of {whose} are not a valid reading ({probe_s:g} and "
                              f"{taken_s:g}); mend its exporter (benchmark/metrics_exporter.py --host-pace-every), or do "
                              "without it: prometheus.host_pace_max_age_s: null")
    return (1e6 * probe_s, series[0].last_s - taken_s)


def latest_probe(server: Server, fields: Collection[str]) -> tuple[ProbeSummary, float] | None:
    """The sharing probe's last reading on the device that a server's config names, and its age (s); None where there is none.

    Args:
        server: to ask.
        fields: of FIELDS, queried as well: if they are of another device, it is not clear whose reading is meant.

    Raises:
        UserError: the config's secrets or certificates can't be read.
        PrometheusError: there is no answer, there are several devices, several exporters or only MIG instances, or the samples
            are not a valid reading.
    """
    series = latest_of_one_exporter(server, MEANINGS, fields)
    if not series:
        return None
    try:
        probed = probed_of(Sample(entry.name, entry.labels, entry.samples[-1][1]) for entry in series)
    except Unreadable as error:
        raise PrometheusError(f"prometheus: the sharing probe's reading of {device_name(series[0].labels)} can't be "
                              f"used: {error.fact}; mend its exporter (benchmark/metrics_exporter.py --probe-every), or do "
                              "without it: prometheus.probe_max_age_s: null") from None
    return probed.summary, series[0].last_s - probed.taken_s
