"""Reads from Prometheus the metrics of one device, and the last readings of the sharing probe and the host's probe.

For metrics, one query fetches the raw samples of a window, and a second one asks whether their exporter is up: `avg_over_time`
would return a number even if the exporter is dead, frozen, or reported NaN or nothing for a while. For a probe's reading one
instant query is enough: outdated series disappear after the exporter's next scrape. Series of MIG instances are ignored, since
none of them describes the whole GPU.
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
    MEANINGS,
    NAMES,
    PART_LABEL,
    PROFILE_LABEL,
    UUID_LABEL,
    InvalidProbeSamples,
    ProbeSample,
    in_field_unit,
    metric_names,
    probe_from_samples,
)
from hase.benchmark.metrics.source import AT_WORK, UTILISATION, MetricMean, MetricSource, OpenWindow, Unsound
from hase.inference.live.prometheus import FOREIGN_SERIES, PrometheusError, PrometheusServer, quoted
from hase.records.host_pace import PACE_MEANINGS, PROBE, TAKEN
from hase.records.probe_reading import ProbeSummary

IDENTITY = (UUID_LABEL, INDEX_LABEL, HOST_LABEL, "job", "instance")  # labels that distinguish devices and their exporters
LISTED = 8  # how many devices a message lists
LONG_AGO = "1h"  # how far back to look for the reason if the window is empty


@dataclass(frozen=True)
class MetricSeries:
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
        """Whether it describes a whole GPU, not a MIG instance."""
        return not self.labels.get(PART_LABEL)

    @property
    def last_s(self) -> float:
        return self.samples[-1][0]


def selector(server: PrometheusServer, names: Collection[str], everyone: bool = False) -> str:
    """PromQL that selects metrics of the device in the config, or of all devices (`everyone`)."""
    labels = {} if everyone else asked_for(server)
    matchers = [f"__name__=~{quoted('|'.join(names))}", *(f"{key}={quoted(value)}" for key, value in labels.items())]
    return "{" + ",".join(matchers) + "}"


def asked_for(server: PrometheusServer) -> dict[str, str]:
    """The labels of the device and exporter that the config names."""
    job = server.config.job
    return server.config.gpu.labels | ({} if job is None else {"job": job})


def series_of(entry: Mapping[str, Any], names: Collection[str]) -> MetricSeries:
    """A series from an entry of the API's JSON, of a matrix or a vector. Values are strings, such as "NaN"."""
    try:
        labels = dict(entry["metric"])
        samples = entry["values"] if "values" in entry else [entry["value"]]
        series = MetricSeries(labels.pop("__name__"), labels, [(_finite(when), float(value)) for when, value in samples])
    except (KeyError, TypeError, ValueError):
        raise PrometheusError(FOREIGN_SERIES) from None
    if not series.samples or series.name not in names:
        raise PrometheusError(FOREIGN_SERIES)
    return series


def _finite(when: Any) -> float:
    """A time in the API's JSON; ValueError or TypeError if it is not a finite number."""
    if not math.isfinite(time_s := float(when)):
        raise ValueError(f"{when} is no time")
    return time_s


def device_name(labels: Mapping[str, str]) -> str:
    """A device in words that distinguish it from others."""
    texts = [f"{word} {labels[key]}" for key, word in ((INDEX_LABEL, "index"), (HOST_LABEL, "host")) if labels.get(key)]
    if labels.get(UUID_LABEL):
        return labels[UUID_LABEL] + (f" ({', '.join(texts)})" if texts else "")
    return ", ".join(texts) if labels.get(HOST_LABEL) else ", ".join([*texts, f"instance {labels.get('instance', '?')}"])


def listed(what: Collection[str]) -> str:
    """The first LISTED texts in alphabetical order, and the number of further ones."""
    texts = sorted(set(what))
    return "; ".join(texts[:LISTED]) + (f"; and {len(texts) - LISTED} more" if len(texts) > LISTED else "")


def one_device_series(series: Sequence[MetricSeries]) -> list[MetricSeries]:
    """The series of the one device that reports, without its MIG instances."""
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


def latest_of_one_exporter(server: PrometheusServer, names: Collection[str], fields: Collection[str]) -> list[MetricSeries]:
    """The newest series called `names` of the device that the config names; may be empty. Series that an exporter no longer
    serves, or whose exporter is down, are gone after the next scrape. `fields` are queried too: if they belong to another
    device, the choice of device is ambiguous."""
    queried = [*names, *(name for field in fields for name in metric_names(field))]
    answer = [series_of(entry, {*names, *NAMES}) for entry in server.query(selector(server, queried), "vector")]
    if not any(entry.name in names for entry in answer):
        return []
    served = [entry for entry in one_device_series(answer) if entry.name in names]
    check_one_exporter({entry.exporter for entry in served}, served[0])
    return served


def one_exporter_series(server: PrometheusServer, series: Sequence[MetricSeries]) -> tuple[list[MetricSeries], float]:
    """The series of the one exporter that is up, and the server's time (seconds since 1970). A server that gets its metrics
    from another server may not know the exporter; then only the age of the samples tells."""
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


def check_one_exporter(exporters: Collection[tuple[str, str]], series: MetricSeries) -> None:
    """Checks that the device of `series` has one exporter: one pair of job and instance."""
    if len(exporters) > 1:
        raise PrometheusError(f"prometheus: several exporters report {device_name(series.labels)}: {_described(exporters)}; "
                              "name one's job in prometheus.job")


def _described(exporters: Collection[tuple[str, str]]) -> str:
    return listed([f"job {job}, instance {instance}" for job, instance in exporters])


class PrometheusSource(MetricSource):
    """A metric source for the device that a server's config names. A window's samples are those scraped while it was open.
    `latest` and `stop` raise `PrometheusError` if there is no answer, there are several devices or only MIG instances, or
    samples are missing, too old, impossible, or of a dead exporter."""

    name = "Prometheus"
    minimum_window_s = 0.001  # Prometheus counts in milliseconds

    def __init__(self, server: PrometheusServer, fields: Collection[str]) -> None:
        """Reads `fields` under any of their names."""
        super().__init__(list(FIELDS), list(fields))
        self._server = server
        # another field can show whether fields stuck at 0 are right
        self._further = [UTILISATION] if UTILISATION not in self.fields and set(AT_WORK) & set(self.fields) else []

    def latest(self) -> dict[str, MetricMean]:
        """The mean of each field over the config's `window_s` up to now, in the units of FIELDS."""
        return self._means(OpenWindow(time.monotonic() - self._server.config.window_s, None))

    def stop(self, window: OpenWindow) -> dict[str, MetricMean]:
        return self._means(window)  # windows may share samples, so they are not compared with each other

    def _means(self, window: OpenWindow) -> dict[str, MetricMean]:
        try:
            return super()._means(window)
        except Unsound as error:
            whose = f"{self._server.config.gpu}: ".removeprefix(": ")
            raise PrometheusError(f"prometheus: {whose}{error.fact}; mend its exporter, or wait until the window has no such "
                                  "sample any more") from None

    def _read(self) -> None:
        """Reads nothing at the start of a window: the server keeps the samples."""

    def _readings(self, before: OpenWindow, after: OpenWindow) -> dict[str, list[float]]:
        server, window_s = self._server, round(after.began_s - before.began_s, 3)
        names = [name for field in (*self.fields, *self._further) for name in metric_names(field)]
        answer = server.query(f"{selector(server, names)}[{window_s * 1e3:.0f}ms]", "matrix")
        series = [series_of(entry, NAMES) for entry in answer]
        wanted = [entry for entry in series if NAMES[entry.name].field in self.fields]
        if not wanted:
            raise _no_sample_error(server, [name for name in names if NAMES[name].field in self.fields], window_s)
        wanted, now_s = one_exporter_series(server, one_device_series(wanted))
        newest = {field: latest for field in self.fields if (latest := _newest(wanted, field))}
        if missing := [field for field in self.fields if field not in newest]:
            raise _missing_fields_error(missing, wanted[0], window_s)
        for latest in newest.values():
            _check_age(latest, now_s, server.config.max_age_s)
        same = [entry for entry in series
                if entry.exporter == wanted[0].exporter and entry.device == wanted[0].device and entry.whole]
        newest |= {field: latest for field in self._further if (latest := _newest(same, field))}
        return {field: _values(same, latest.name) for field, latest in newest.items()}


def _newest(series: Sequence[MetricSeries], field: str) -> MetricSeries | None:
    """The series of a field with the newest sample; at equal times the one with the field's old name."""
    names = metric_names(field)
    return max((candidate for candidate in series if candidate.name in names), default=None,
               key=lambda candidate: (candidate.last_s, -names.index(candidate.name)))


def _values(series: Sequence[MetricSeries], name: str) -> list[float]:
    """All samples under a name, in the unit of FIELDS, by time. A GPU that changes users (Kubernetes pods) has a series for
    each; several users at once have the same samples."""
    samples = {when: value for part in series if part.name == name for when, value in part.samples}
    return [in_field_unit(name, samples[when]) for when in sorted(samples)]


def _check_age(series: MetricSeries, now_s: float, max_age_s: float) -> None:
    age_s = now_s - series.last_s
    if age_s > max_age_s:
        raise PrometheusError(f"prometheus: {series.name} of {device_name(series.labels)} is stale: its newest sample is "
                              f"{age_s:.1f} s old, max_age_s is {max_age_s:g}; mend its exporter, or raise max_age_s if it is "
                              "scraped less often")


def _no_sample_error(server: PrometheusServer, names: Collection[str], window_s: float) -> PrometheusError:
    """Explains why the window has no sample of the device: which devices reported before, and which targets are down."""
    seen = [entry["metric"] for entry in server.query(
        f"count by ({', '.join(IDENTITY)}) (last_over_time({selector(server, names, everyone=True)}[{LONG_AGO}]))", "vector")]
    same = [labels for labels in seen if all(labels.get(label) == value for label, value in asked_for(server).items())]
    down = _targets_down(server)
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


def _missing_fields_error(fields: Sequence[str], reported: MetricSeries, window_s: float) -> PrometheusError:
    """Explains what to do about missing fields of a device that reports `reported`."""
    names = ", ".join(" or ".join(metric_names(field)) for field in fields)
    return PrometheusError(f"prometheus: no sample of {names} within {window_s:g} s, though {device_name(reported.labels)} "
                           f"reports {reported.name}; these predictors need it: add it to the exporter's list of metrics "
                           "(dcgm-exporter leaves some out by default)")


def _targets_down(server: PrometheusServer) -> str:
    """The scrape targets that are down, as the end of a message; "" if there are none."""
    targets = [entry["metric"] for entry in server.query("up == 0", "vector")]
    down = listed([f"job {labels.get('job', '?')}, instance {labels.get('instance', '?')}" for labels in targets])
    return f"; can't be scraped at present: {down}" if targets else ""


def latest_host_probe(server: PrometheusServer, fields: Collection[str]) -> tuple[float, float] | None:
    """The time of the host's probe (µs) and its age (s), for the device that the config names; None if there is none."""
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


def latest_probe(server: PrometheusServer, fields: Collection[str]) -> tuple[ProbeSummary, float] | None:
    """The sharing probe's last reading and its age (s), for the device that the config names; None if there is none."""
    series = latest_of_one_exporter(server, MEANINGS, fields)
    if not series:
        return None
    try:
        probed = probe_from_samples(ProbeSample(entry.name, entry.labels, entry.samples[-1][1]) for entry in series)
    except InvalidProbeSamples as error:
        raise PrometheusError(f"prometheus: the sharing probe's reading of {device_name(series[0].labels)} can't be "
                              f"used: {error.fact}; mend its exporter (benchmark/metrics_exporter.py --probe-every), or do "
                              "without it: prometheus.probe_max_age_s: null") from None
    return probed.summary, series[0].last_s - probed.taken_s
