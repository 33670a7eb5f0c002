"""The metrics of one device as a Prometheus has them: a source like those of benchmark/metrics.py.

The raw samples of all metrics come in one query, and whether their exporter is up in a second: `avg_over_time` would answer
with a number although the exporter is dead, frozen, or reported NaN or a blank in between. What a whole GPU does, none of its
parts tells: series of MIG instances are never taken.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.dcgm_names import HOST_LABEL, INDEX_LABEL, NAMES, PART_LABEL, PROFILE_LABEL, UUID_LABEL, in_unit, names_of
from benchmark.metric_fields import FIELDS
from benchmark.metrics import Mean, MetricSource, Window
from benchmark.soundness import AT_WORK, UTILISATION, Unsound
from inference.prometheus import FOREIGN_SERIES, PrometheusError, Server, quoted

IDENTITY = (UUID_LABEL, INDEX_LABEL, HOST_LABEL, "job", "instance")  # labels that tell devices and their exporters apart
LONG_AGO = "1h"  # how far back the reason is looked for where the window holds nothing
LISTED = 8  # how many devices a message lists


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
        return self.labels.get(UUID_LABEL) or _device(self.labels)

    @property
    def whole(self) -> bool:
        """Not of a MIG instance."""
        return not self.labels.get(PART_LABEL)

    @property
    def last_s(self) -> float:
        return self.samples[-1][0]


class PrometheusSource(MetricSource):
    """Metrics of the device that a server's config names. A window's readings are the samples scraped while it was open.

    `latest` and `stop` raise `PrometheusError` where there is no answer, there are several devices or only parts of one, or
    samples are missing, too old, of a dead exporter, or not to be believed: it says which and what to do; and `UserError` where
    the config's secrets or certificates can't be read.
    """

    name = "Prometheus"
    minimum_window_s = 0.001  # Prometheus counts in milliseconds

    def __init__(self, server: Server, fields: Collection[str]) -> None:
        """Reads `fields`, names of FIELDS, under any of their names; `UserError` for one that is none."""
        super().__init__(list(FIELDS), list(fields))
        self._server = server
        # where fields may be stuck at 0, a further one may tell
        self._further = [UTILISATION] if UTILISATION not in self.fields and set(AT_WORK) & set(self.fields) else []

    def latest(self) -> dict[str, Mean]:
        """The mean of each field over the config's `window_s` up to now, in the units of FIELDS."""
        return self._means(Window(time.monotonic() - self._server.config.window_s, None))

    def stop(self, window: Window) -> dict[str, Mean]:
        return self._means(window)  # windows may share samples, so they are not held against each other

    def _means(self, window: Window) -> dict[str, Mean]:
        try:
            return super()._means(window)
        except Unsound as error:
            whose = f"{self._server.config.gpu}: ".removeprefix(": ")
            raise PrometheusError(f"prometheus: {whose}{error.fact}; mend its exporter, or wait until the window has no such "
                                  "sample any more") from None

    def _read(self) -> None:
        """The server remembers."""

    def _readings(self, before: Window, after: Window) -> dict[str, list[float]]:
        server, window_s = self._server, round(after.began_s - before.began_s, 3)
        names = [name for field in (*self.fields, *self._further) for name in names_of(field)]
        answer = server.query(f"{_selector(server, names)}[{window_s * 1e3:.0f}ms]", "matrix")
        series = [_series(one) for one in answer]
        wanted = [one for one in series if NAMES[one.name].field in self.fields]
        if not wanted:
            raise _nothing(server, [name for name in names if NAMES[name].field in self.fields], window_s)
        wanted, now_s = _of_one_exporter(server, _of_one_device(wanted))
        newest = {field: one for field in self.fields if (one := _newest(wanted, field))}
        if missing := [field for field in self.fields if field not in newest]:
            raise _missing(missing, wanted[0], window_s)
        for one in newest.values():
            _check_age(one, now_s, server.config.max_age_s)
        beside = [one for one in series if one.exporter == wanted[0].exporter and one.device == wanted[0].device and one.whole]
        newest |= {field: one for field in self._further if (one := _newest(beside, field))}
        return {field: _values(beside, one.name) for field, one in newest.items()}


def _selector(server: Server, names: Collection[str], everyone: bool = False) -> str:
    """PromQL for metrics of the device that is asked for, or of `everyone`."""
    labels = {} if everyone else _asked_for(server)
    told = [f"__name__=~{quoted('|'.join(names))}", *(f"{key}={quoted(value)}" for key, value in labels.items())]
    return "{" + ",".join(told) + "}"


def _asked_for(server: Server) -> dict[str, str]:
    """What the config says of the device and its exporter, by label."""
    job = server.config.job
    return server.config.gpu.labels | ({} if job is None else {"job": job})


def _series(one: Mapping[str, Any]) -> Series:
    """A series of the API's JSON. Values are strings, "NaN" too."""
    try:
        labels = dict(one["metric"])
        found = Series(labels.pop("__name__"), labels, [(float(when), float(value)) for when, value in one["values"]])
    except (KeyError, TypeError, ValueError):
        raise PrometheusError(FOREIGN_SERIES) from None
    if not found.samples or found.name not in NAMES:
        raise PrometheusError(FOREIGN_SERIES)
    return found


def _newest(series: Sequence[Series], field: str) -> Series | None:
    """The one of a field's series that has the newest sample, of two under the old and the new name the old one."""
    names = names_of(field)
    return max((one for one in series if one.name in names), default=None,
               key=lambda one: (one.last_s, -names.index(one.name)))


def _values(series: Sequence[Series], name: str) -> list[float]:
    """All samples under a name, in the unit of FIELDS, in the order of time. A GPU that changes hands (Kubernetes' pods) has a
    series for each, and several that share it have the same samples."""
    samples = {when: value for one in series if one.name == name for when, value in one.samples}
    return [in_unit(name, samples[when]) for when in sorted(samples)]


def _device(labels: Mapping[str, str]) -> str:
    """A device in the user's words, which tell it from others."""
    place = [f"{what} {labels[key]}" for key, what in ((INDEX_LABEL, "index"), (HOST_LABEL, "host")) if labels.get(key)]
    if labels.get(UUID_LABEL):
        return labels[UUID_LABEL] + (f" ({', '.join(place)})" if place else "")
    return ", ".join(place) if labels.get(HOST_LABEL) else ", ".join([*place, f"instance {labels.get('instance', '?')}"])


def _listed(what: Collection[str]) -> str:
    some = sorted(set(what))
    return "; ".join(some[:LISTED]) + (f"; and {len(some) - LISTED} more" if len(some) > LISTED else "")


def _of_one_device(series: Sequence[Series]) -> list[Series]:
    """The series of the one device, without those of its parts."""
    devices = {one.device: _device(one.labels) for one in series}
    if len(devices) > 1:
        raise PrometheusError(f"prometheus: metrics of several devices match: {_listed(devices.values())}; set prometheus.gpu "
                              "to one's UUID, or to its index and host")
    whole = [one for one in series if one.whole]
    if not whole:
        parts = _listed([f"{PART_LABEL} {one.labels[PART_LABEL]}, {one.labels.get(PROFILE_LABEL, '?')}" for one in series])
        raise PrometheusError(f"prometheus: {_device(series[0].labels)} is split into MIG instances ({parts}), and only these "
                              "are reported; no instance's load is that of the GPU, for which predictions hold: have the whole "
                              "GPU reported too (dcgm-exporter --devices g), or switch MIG off")
    return whole


def _of_one_exporter(server: Server, series: Sequence[Series]) -> tuple[list[Series], float]:
    """The series of the one exporter that is up, and the server's time (seconds since 1970).

    A server that was told the metrics by another one may not know of the exporter; then only the samples' age tells.
    """
    exporters = sorted({one.exporter for one in series})
    asked = [f"up{{job={quoted(job)},instance={quoted(instance)}}}" for job, instance in exporters]
    answer = server.query(" or ".join([*asked, "vector(time())"]), "vector")
    try:
        now_s = max(float(one["value"][0]) for one in answer)  # when the server worked it out
        up = {(one["metric"].get("job", ""), one["metric"].get("instance", "")): float(one["value"][1]) == 1.0
              for one in answer if one["metric"]}  # vector(time()) has no labels
    except (KeyError, TypeError, ValueError, IndexError):
        raise PrometheusError(FOREIGN_SERIES) from None
    running = [exporter for exporter in exporters if up.get(exporter)] if len(exporters) > 1 else exporters
    running = running or exporters
    described = _listed([f"job {job}, instance {instance}" for job, instance in running])
    if len(running) > 1:
        raise PrometheusError(f"prometheus: several exporters report {_device(series[0].labels)}: {described}; name one's job "
                              "in prometheus.job")
    if up.get(running[0]) is False:
        raise PrometheusError(f"prometheus: the exporter of {_device(series[0].labels)} can't be scraped (up is 0): "
                              f"{described}; what is left of its samples is no load of now: mend the exporter")
    return [one for one in series if one.exporter == running[0]], now_s


def _check_age(series: Series, now_s: float, max_age_s: float) -> None:
    age_s = now_s - series.last_s
    if age_s > max_age_s:
        raise PrometheusError(f"prometheus: {series.name} of {_device(series.labels)} is stale: its newest sample is "
                              f"{age_s:.1f} s old, max_age_s is {max_age_s:g}; mend its exporter, or raise max_age_s if it is "
                              "scraped less often")


def _nothing(server: Server, names: Collection[str], window_s: float) -> PrometheusError:
    """Why the window holds not one sample of the device: who was there before, and who is down."""
    seen = [one["metric"] for one in server.query(
        f"count by ({', '.join(IDENTITY)}) (last_over_time({_selector(server, names, everyone=True)}[{LONG_AGO}]))", "vector")]
    same = [one for one in seen if all(one.get(label) == value for label, value in _asked_for(server).items())]
    down = _down(server)
    if same:
        return PrometheusError(f"prometheus: no sample of {_listed([_device(one) for one in same])} within {window_s:g} s, "
                               f"though there were some within {LONG_AGO}: its exporter is dead, no longer scraped, or scraped "
                               f"less often than window_s says{down}")
    if seen:
        job = server.config.job
        asked = ", ".join(filter(None, (str(server.config.gpu), job and f"job {job}")))
        there = _listed([f"{_device(one)}, job {one.get('job', '?')}" for one in seen])
        return PrometheusError(f"prometheus: no metrics of {asked}; there are those of {there}: set prometheus.gpu and "
                               f"prometheus.job to what is there{down}")
    return PrometheusError(f"prometheus.url {server.config.url}: HTTP 200, but it knows none of the metrics "
                           f"{', '.join(names)}: have it scrape an exporter that reports them{down}")


def _missing(fields: Sequence[str], other: Series, window_s: float) -> PrometheusError:
    """What to do about fields that are not there, though `other` is."""
    told = ", ".join(" or ".join(names_of(field)) for field in fields)
    return PrometheusError(f"prometheus: no sample of {told} within {window_s:g} s, though {_device(other.labels)} reports "
                           f"{other.name}; these predictors need it: add it to the exporter's list of metrics (dcgm-exporter "
                           "leaves some out by default)")


def _down(server: Server) -> str:
    """The scrape targets that are down, as the end of a message; empty where none is."""
    found = [one["metric"] for one in server.query("up == 0", "vector")]
    down = _listed([f"job {one.get('job', '?')}, instance {one.get('instance', '?')}" for one in found])
    return f"; can't be scraped at present: {down}" if found else ""
